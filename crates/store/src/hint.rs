//! Hints that there may be work: each verb that could make some gives one. Correctness never depends on them.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::shapes::{Commit, Committed};
use crate::store::Answer;

/// Wakes whoever waits in this process. A hint that nobody waits for is kept for who comes next; many are one.
#[derive(Debug, Default)]
pub(crate) struct Hint {
    notify: Notify,
    count: AtomicU64,
}

impl Hint {
    /// Gives a hint if an answer is news.
    pub(crate) fn after<T>(&self, answer: Answer<T>, is_news: impl FnOnce(&T) -> bool) -> Answer<T> {
        if answer.as_ref().is_ok_and(is_news) {
            self.give();
        }
        answer
    }

    pub(crate) fn give(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.notify.notify_one();
    }

    /// How many were given.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(crate) async fn given(&self) {
        self.notify.notified().await;
    }
}

/// Whether plans that were committed made runs.
pub(crate) fn made_runs(commits: &[Commit], committed: &[Committed]) -> bool {
    let held = |committed: &Committed| *committed == Committed::Held;
    commits.iter().zip(committed).any(|(commit, committed)| held(committed) && !commit.runs.is_empty())
}

/// Schedules of plans that were committed.
pub(crate) fn held(
    commits: &[Commit],
    committed: &Answer<Vec<Committed>>,
) -> impl Iterator<Item = belfry_core::ScheduleId> {
    let answers = committed.iter().flatten();
    let held = commits.iter().zip(answers).filter(|(_, committed)| **committed == Committed::Held);
    held.map(|(commit, _)| commit.schedule)
}
