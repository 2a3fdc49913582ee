//! Schedules that this version cannot read, because their definition or their agent's is of a newer format, or broken;
//! and for a while those whose plans the store refuses. The loops of this node leave them alone, and everything else
//! goes on.

use std::collections::BTreeMap;
use std::sync::Arc;

use belfry_core::ScheduleId;
use parking_lot::Mutex;

/// More are not remembered; those are found again each time they are read.
pub(crate) const UNREAD_MAX: usize = 10_000;

/// Maximum number of rows that are told of as unreadable, for each kind.
pub const UNREADABLE_ROWS_MAX: i64 = 10;

/// What a store has found so far.
#[derive(Default)]
pub(crate) struct Unread(Mutex<BTreeMap<ScheduleId, Arc<str>>>);

impl Unread {
    /// Those that are left alone.
    pub(crate) fn ids(&self) -> Vec<ScheduleId> {
        self.0.lock().keys().copied().collect()
    }

    /// Why a schedule cannot be read, if it is known that it cannot.
    pub(crate) fn why(&self, schedule: ScheduleId) -> Option<Arc<str>> {
        self.0.lock().get(&schedule).cloned()
    }

    pub(crate) fn add(&self, schedule: ScheduleId, why: &impl std::fmt::Display) -> Arc<str> {
        let why: Arc<str> = Arc::from(why.to_string());
        let mut known = self.0.lock();
        if known.len() < UNREAD_MAX {
            known.insert(schedule, why.clone());
        }
        why
    }

    /// Replaces what is known.
    pub(crate) fn set(&self, found: impl Iterator<Item = (ScheduleId, Arc<str>)>) {
        *self.0.lock() = found.take(UNREAD_MAX).collect();
    }
}
