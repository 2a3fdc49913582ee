//! Lanes that are full, and ticks that wait for them.

use belfry_core::SkipReason;
use belfry_core::text::count;
use belfry_store::Deferred;
use belfry_time::Timestamp;

use super::{Decision, Known, passed};
use crate::api::Why;

/// The lane that a tick goes to.
pub(super) struct Lane {
    pub(super) name: String,
    pub(super) queue_limit: Option<u32>,
    /// How many runs take a place of its `queue_limit`; 0 where it has none.
    pub(super) queued: u32,
}

impl Known {
    /// Whether the lane has no room for a tick; nothing where it is not limited in what may wait.
    pub(super) fn lane_full(&self) -> Option<Result<String, String>> {
        let Lane { name: lane, queue_limit: limit, queued: waiting } = &self.lane;
        let waiting = *waiting as usize;
        let runs = count(waiting, "run");
        // Runs by hand may be more.
        let most = match limit {
            Some(limit) if *limit as usize != waiting => format!("its queue_limit is {limit}"),
            _ => "its queue_limit".to_owned(),
        };
        match (&self.record.deferred, limit) {
            (None, None) => None,
            (None, Some(limit)) if waiting < *limit as usize => {
                let wait = if *limit == 1 { "waits" } else { "wait" };
                let most = count(*limit as usize, "run");
                Some(Ok(format!("{waiting} of {most} {wait} in the lane {lane}")))
            }
            (None, Some(_)) => Some(Err(format!("the lane {lane} has {runs} waiting, {most}"))),
            (Some(deferred), limit) => {
                let since = self.time(deferred.since);
                Some(match limit.is_some_and(|limit| waiting >= limit as usize) {
                    _ if self.record.token.is_some() => {
                        Ok(format!("the lane {lane} was full since {since}, and has room now"))
                    }
                    true => {
                        Err(format!("the lane {lane} has {runs} waiting, {most}; deferred since {since}"))
                    }
                    false => {
                        Err(format!("others that wait for the lane {lane} go first; deferred since {since}"))
                    }
                })
            }
        }
    }

    /// A tick that waits for its lane, or has come while another does.
    pub(super) fn of_deferred(&self, tick_at: Timestamp, deferred: &Deferred) -> Why {
        let time = self.time(tick_at);
        if tick_at > deferred.since {
            let first = self.time(deferred.tick_at);
            let words = format!("The tick at {time} is left out: the one at {first} waits for its lane.");
            let reason = Some(SkipReason::QueueFull.as_str().to_owned());
            let checks = passed(Some(SkipReason::QueueFull));
            return Why { reason, words, ..self.answer(tick_at, Decision::Skipped, checks) };
        }
        let detail = match self.lane_full() {
            Some(Ok(detail) | Err(detail)) => detail,
            None => "it is about to be planned".into(),
        };
        self.nothing(tick_at, "lane_full", format!("The tick at {time} waits: {detail}."))
    }
}
