//! The store's health, as this node sees it.
//!
//! The store is well until a call fails, and well again once each kind of call that has failed has succeeded, or has nothing
//! left to do. A read alone proves little: a full disk still answers it. So a failed read is also followed by a renewal of the
//! lease, which is a write. A refusal is no failure: the store is there, and what it was to keep is at fault. Only the loop
//! that asked waits then.
//!
//! An outage is told once. Calls that were on their way when it began may fail long after others have succeeded again: it is
//! not over before they are answered. Nothing else waits for that.

use super::*;

/// Calls that are repeated until they succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Call {
    /// What is due is read, and decisions are written.
    Plans,
    Claims,
    Ends,
    /// Also stands for what is not repeated.
    Lease,
    Heartbeat,
    Pruning,
    // Reads that no write follows.
    Nodes,
    Lanes,
    Unreadable,
    Marks,
}

impl Call {
    fn is_only_read(self) -> bool {
        matches!(self, Call::Nodes | Call::Lanes | Call::Unreadable | Call::Marks)
    }
}

#[derive(Debug, Default)]
pub(super) struct Health {
    /// Kinds of calls that failed and have not succeeded since.
    failing: BTreeSet<Call>,
    /// Kinds of calls that were on their way when an outage began, and have not been answered since.
    unanswered: BTreeSet<Call>,
    /// Whether an outage was told, and not its end.
    is_away: bool,
    /// Calls that failed since the store was well.
    failures: u32,
    /// Whether one of them failed because the store was removed or replaced.
    is_replaced: bool,
    /// Kinds of writes that were refused for their content, each with how often since it was taken last.
    refusals: BTreeMap<Call, u32>,
    /// What was told of refusals: each is told once.
    told: BTreeSet<String>,
}

/// More refusals are not remembered as told, and not told.
const TOLD_MAX: usize = 1000;

impl Health {
    pub(super) fn is_well(&self) -> bool {
        self.failing.is_empty()
    }

    /// Whether an outage was told, and not its end.
    pub(super) fn is_away(&self) -> bool {
        self.is_away
    }

    /// Whether the store that was opened is not at its place: nothing can be stored until somebody puts it back.
    pub(super) fn is_replaced(&self) -> bool {
        self.is_replaced
    }
}

impl Driver {
    /// The answer to a read, or nothing where it failed.
    pub(super) fn read<T>(&mut self, now: Now, kind: Call, answer: Result<T, Error>) -> Option<T> {
        match answer {
            Ok(answer) => {
                if kind.is_only_read() {
                    self.store_took(kind);
                }
                Some(answer)
            }
            Err(error) => {
                self.store_failed(now, kind, &error);
                self.health.failing.insert(Call::Lease);
                None
            }
        }
    }

    /// The answer to a write, or nothing where it failed.
    pub(super) fn written<T>(&mut self, now: Now, kind: Call, answer: Result<T, Error>) -> Option<T> {
        match answer {
            Ok(answer) => {
                self.store_took(kind);
                Some(answer)
            }
            Err(error) if error.is_refused() => {
                let refusals = self.health.refusals.entry(kind).or_default();
                *refusals = refusals.saturating_add(1);
                self.note_refused(Event::new(now.wall, Level::Error, Name::WriteRefused), &error);
                None
            }
            Err(error) => {
                self.store_failed(now, kind, &error);
                None
            }
        }
    }

    /// Tells once what the store refuses to keep.
    pub(super) fn note_refused(&mut self, event: Event, error: &Error) {
        let detail = error.marked();
        let about = format!("{:?} {:?} {:?} {detail}", event.agent, event.schedule, event.run_id);
        if self.health.told.len() < TOLD_MAX && self.health.told.insert(about) {
            self.note(Event { node: Some(self.node), detail: Some(detail), ..event });
        }
    }

    fn store_took(&mut self, kind: Call) {
        self.health.refusals.remove(&kind);
        if self.health.failing.remove(&kind) && self.health.is_well() {
            (self.health.failures, self.health.is_replaced) = (0, false);
        }
    }

    /// Tells the end of an outage, once all is answered.
    pub(super) fn tell_health(&mut self, now: Now) {
        let asking = self.asking();
        let health = &mut self.health;
        health.unanswered.retain(|kind| asking.contains(kind));
        if health.is_away && health.is_well() && health.unanswered.is_empty() {
            health.is_away = false;
            self.note(Event::new(now.wall, Level::Info, Name::StoreAvailable));
        }
    }

    /// Kinds of calls that are on their way.
    fn asking(&self) -> Vec<Call> {
        let loops = [
            (Call::Plans, self.planner),
            (Call::Claims, self.dispatcher),
            (Call::Ends, self.finisher),
            (Call::Lease, self.renewer),
            (Call::Heartbeat, self.beater),
            (Call::Pruning, self.pruner),
            (Call::Nodes, self.reaper),
            (Call::Lanes, self.lanes),
            (Call::Marks, self.marker),
        ];
        loops.into_iter().filter(|(_, each)| each.busy).map(|(kind, _)| kind).collect()
    }

    fn store_failed(&mut self, now: Now, kind: Call, error: &Error) {
        if !std::mem::replace(&mut self.health.is_away, true) {
            self.health.unanswered = self.asking().into_iter().collect();
            let event = Event::new(now.wall, Level::Error, Name::StoreUnavailable);
            self.note(Event { detail: Some(error.marked()), ..event });
        }
        if error.is_replaced() {
            // Another node may be at work in its place: nothing may run on here, as after the end of the lease.
            self.lease_good = now.mono;
        }
        self.health.is_replaced = error.is_replaced();
        self.health.failing.insert(kind);
        self.health.failures = self.health.failures.saturating_add(1);
        // The renewal is what finds out that a store can be written again.
        self.renewer.at = self.renewer.at.min(now.mono + self.backoff(Call::Lease));
    }

    /// Nothing of these kinds is left to do. Where one of them has failed, the renewal finds out when the store is well.
    pub(super) fn nothing_left(&mut self, kinds: &[Call]) {
        let before = self.health.failing.len();
        self.health.failing.retain(|kind| !kinds.contains(kind));
        if self.health.failing.len() < before {
            self.health.failing.insert(Call::Lease);
        }
    }

    /// How long to wait before such a call is made again.
    pub(super) fn backoff(&self, kind: Call) -> Duration {
        let refusals = self.health.refusals.get(&kind).copied().unwrap_or(0);
        let failures = self.health.failures.max(refusals);
        (self.options.backoff * (1 << failures.min(5))).min(self.options.lease / 10)
    }
}
