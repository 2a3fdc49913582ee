//! Schedules that this version cannot read, because their definition or their agent's is of a newer format, or broken;
//! and for a while those whose plans the store refuses. The loops of this node leave them alone, and everything else
//! goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_core::ScheduleId;
use parking_lot::Mutex;

use crate::error::Error;
use crate::views::RefusedPart;

/// More are not remembered; those are found again each time they are read.
pub(crate) const UNREAD_MAX: usize = 10_000;

/// Maximum number of rows that are told of as unreadable, for each kind.
pub const UNREADABLE_ROWS_MAX: i64 = 10;

/// How long after a refusal nobody wakes up for its schedule, nor counts it as late, unless its plan is stored. Longer than
/// it takes until the plan is tried again.
const NOT_AWAITED: Duration = Duration::from_secs(120);

/// How long a schedule rests whose rows another transaction holds.
const LOCKED_RESTS: Duration = Duration::from_secs(3);

/// What a store has found so far.
#[derive(Default)]
pub(crate) struct Unread(Mutex<Known>);

#[derive(Default)]
struct Known {
    unreadable: BTreeMap<ScheduleId, Arc<str>>,
    /// Schedules with plans that were refused.
    refused: BTreeMap<ScheduleId, Refused>,
}

struct Refused {
    /// When, last.
    at: Instant,
    /// Whether it is not planned until the next [`Unread::set`].
    rests: bool,
    /// Whether it was locked: then it rests for [`LOCKED_RESTS`] at most.
    is_locked: bool,
}

impl Refused {
    fn rests(&self) -> bool {
        self.rests && !(self.is_locked && self.at.elapsed() >= LOCKED_RESTS)
    }

    fn is_awaited(&self) -> bool {
        self.at.elapsed() >= if self.is_locked { LOCKED_RESTS } else { NOT_AWAITED }
    }
}

impl Known {
    fn and(&self, refused: impl Fn(&Refused) -> bool) -> Vec<ScheduleId> {
        let refused = self.refused.iter().filter(|(_, one)| refused(one)).map(|(schedule, _)| schedule);
        self.unreadable.keys().chain(refused).copied().collect()
    }
}

impl Unread {
    /// Those that cannot be read.
    pub(crate) fn ids(&self) -> Vec<ScheduleId> {
        self.0.lock().unreadable.keys().copied().collect()
    }

    /// Those that are not planned now: also those that rest after a refusal.
    pub(crate) fn not_planned(&self) -> Vec<ScheduleId> {
        self.0.lock().and(Refused::rests)
    }

    /// Those that nobody waits for: also those whose plans are tried again now and then.
    pub(crate) fn not_awaited(&self) -> Vec<ScheduleId> {
        self.0.lock().and(|refused| !refused.is_awaited())
    }

    /// Why a schedule cannot be read, if it is known that it cannot.
    pub(crate) fn why(&self, schedule: ScheduleId) -> Option<Arc<str>> {
        self.0.lock().unreadable.get(&schedule).cloned()
    }

    pub(crate) fn add(&self, schedule: ScheduleId, why: &impl std::fmt::Display) -> Arc<str> {
        let why: Arc<str> = Arc::from(why.to_string());
        let mut known = self.0.lock();
        if known.unreadable.len() < UNREAD_MAX {
            known.unreadable.insert(schedule, why.clone());
        }
        why
    }

    /// A part was refused in every form, or is locked. The schedule of a plan rests.
    pub(crate) fn note(&self, part: RefusedPart) {
        let (schedule, is_locked) = match part {
            RefusedPart::Plan(schedule) => (schedule, false),
            RefusedPart::LockedPlan(schedule) => (schedule, true),
            RefusedPart::End(_) => return,
        };
        let mut known = self.0.lock();
        known.refused.retain(|_, refused| refused.rests || refused.at.elapsed() < NOT_AWAITED);
        if known.refused.len() < UNREAD_MAX {
            known.refused.insert(schedule, Refused { at: Instant::now(), rests: true, is_locked });
        }
    }

    /// Plans were stored: forgets that plans of these schedules were refused, and names those of which it knew.
    pub(crate) fn stored(&self, schedules: impl Iterator<Item = ScheduleId>) -> Vec<ScheduleId> {
        let mut known = self.0.lock();
        if known.refused.is_empty() {
            return Vec::new();
        }
        schedules.filter(|schedule| known.refused.remove(schedule).is_some()).collect()
    }

    /// Replaces what is known to be unreadable, and lets nothing rest any longer.
    pub(crate) fn set(&self, found: impl Iterator<Item = (ScheduleId, Arc<str>)>) {
        let mut known = self.0.lock();
        known.unreadable = found.take(UNREAD_MAX).collect();
        known.refused.values_mut().for_each(|refused| refused.rests = false);
    }
}

/// What a failed claim says after waiting runs were set aside: the error itself if there were none.
pub(crate) fn set_aside(runs: Vec<String>, error: Error) -> Error {
    if runs.is_empty() {
        return error;
    }
    let (first, more) = (&runs[0], runs.len() - 1);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Error::Refused {
        detail: format!(
            "run {first}{more} cannot be started: its stored id, epoch or attempt is out of range. It is set aside, and \
             everything else goes on; `belfry cancel` ends it, unless its id is what is wrong"
        ),
    }
}
