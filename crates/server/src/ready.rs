//! Whether the node can work: looked at from outside its loops, so that a loop that hangs is seen.

use std::time::Duration;

use belfry::{Status, Timestamp};
use belfry_time::SignedDuration;

use crate::routes::health::{Ready, ReadyCheck};
use crate::state::Shared;

/// A store that answers later does not answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// A call of the engine that waits longer holds up its work: of a database that hangs, other connections may answer.
const CALL_MAX: Duration = Duration::from_secs(10);
/// How often it is tried whether the store takes writes.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// Rounds of the planner that may be missing.
const ROUNDS_MAX: u32 = 3;
/// A tick that is due for longer should have been planned.
const LAG_MAX: SignedDuration = SignedDuration::from_secs(60);

fn no_answer() -> String {
    format!("no answer within {} s", ANSWER_WITHIN.as_secs())
}

impl Shared {
    pub async fn ready(&self) -> Ready {
        let now = self.now();
        let status = self.engine.status();
        let mut checks = vec![ReadyCheck {
            check: "engine",
            ok: status == Status::Running,
            detail: match status {
                Status::Running => "it plans and runs".into(),
                Status::Draining => "it was told to drain: it lets its work end and takes nothing new".into(),
                Status::Stopping => "it lets its work end".into(),
                Status::Stopped => "it does nothing".into(),
            },
        }];
        checks.push(self.planner(now));
        let due = tokio::time::timeout(ANSWER_WITHIN, self.store().next_due()).await;
        let slow = self.engine.longest_call().filter(|waits| *waits > CALL_MAX);
        let (ok, detail, lag) = match (due, self.probe().await) {
            (Ok(Ok(due)), Ok(())) if let Some(waits) = slow => {
                let detail =
                    format!("it answers, but a call of this node has waited for {} s", waits.as_secs());
                (false, detail, due)
            }
            (Ok(Ok(due)), Ok(())) if self.engine.store_is_well() => {
                (true, "it answers and takes writes".to_owned(), due)
            }
            (Ok(Ok(due)), Ok(())) => (false, "it answers, but takes no writes".to_owned(), due),
            (Ok(Ok(due)), Err(error)) => (false, format!("it answers, but takes no writes: {error}"), due),
            (Ok(Err(error)), _) => (false, error.marked(), None),
            (Err(_), _) => (false, no_answer(), None),
        };
        checks.push(ReadyCheck { check: "store", ok, detail });
        let lag = lag.map_or(SignedDuration::ZERO, |due| now.duration_since(due).max(SignedDuration::ZERO));
        checks.push(ReadyCheck {
            check: "lag",
            ok: lag <= LAG_MAX,
            detail: format!(
                "the earliest tick that is due waits for {} ms, up to {} is well",
                lag.as_millis(),
                LAG_MAX.as_millis()
            ),
        });
        let delayed = self.engine.delayed_total();
        checks.push(ReadyCheck {
            check: "starts",
            ok: delayed == 0,
            detail: match delayed {
                0 => "no attempt waits for what the system is short of".into(),
                _ => format!(
                    "{} for what the system is short of, such as room on the disk; the log says more",
                    if delayed == 1 {
                        "1 attempt waits".to_owned()
                    } else {
                        format!("{delayed} attempts wait")
                    }
                ),
            },
        });
        Ready { ready: checks.iter().all(|check| check.ok), checks }
    }

    /// Whether the store takes a write. Tried at most every few seconds, because anybody may ask.
    async fn probe(&self) -> Result<(), String> {
        let mut probed = self.probed.lock().await;
        if let Some((at, outcome)) = &*probed
            && at.elapsed() < PROBE_EVERY
        {
            return outcome.clone();
        }
        let outcome = tokio::time::timeout(ANSWER_WITHIN, self.store().probe()).await;
        let outcome = outcome.map_or_else(|_| Err(no_answer()), |done| done.map_err(|error| error.marked()));
        *probed = Some((tokio::time::Instant::now(), outcome.clone()));
        outcome
    }

    /// Whether the planner has looked lately.
    fn planner(&self, now: Timestamp) -> ReadyCheck {
        let state = self.engine.state();
        let since = state.last_check_at.or(state.started_at);
        let age = since.map_or(SignedDuration::MAX, |at| now.duration_since(at));
        if self.engine.status() == Status::Draining {
            return ReadyCheck {
                check: "planner",
                ok: true,
                detail: "it looks for nothing while it drains".into(),
            };
        }
        let bound = self.options.poll_interval.max(self.options.check_interval) * ROUNDS_MAX + ANSWER_WITHIN;
        let bound = SignedDuration::try_from(bound).unwrap_or(SignedDuration::MAX);
        ReadyCheck {
            check: "planner",
            ok: age <= bound,
            detail: match since {
                Some(_) => format!(
                    "it looked {} ms ago, up to {} is well",
                    age.as_millis().max(0),
                    bound.as_millis()
                ),
                None => "it has not looked yet".into(),
            },
        }
    }
}
