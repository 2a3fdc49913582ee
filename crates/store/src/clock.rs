//! Notices when the clock of this process was set back.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use belfry_core::NodeId;
use belfry_core::edit::CLOCK_BACK_MIN;
use belfry_time::{SignedDuration, Timestamp};
use parking_lot::Mutex;

/// Clocks are read in steps and adjusted by less than this.
const OUT_OF_ORDER_MAX: Duration = Duration::from_millis(50);
/// A claim is made no later than this after its instant was read, however busy the machine is.
const LATE_MAX: Duration = Duration::from_secs(5);
/// Maximum number of nodes that are remembered. A process has one; only tests have more.
const NODES_MAX: usize = 1_000;

/// The latest instant by which something was claimed or stored. A run that waits at a gate is not looked at again before somebody leaves that gate; what
/// held it there may no longer be due by a clock that was set back. A run that was made before that, and has not started, is to
/// wait no longer than it would have: see [`Clock::may_be_back`].
///
/// A claim of one thread may come after one of another whose instant was read later. The claims of one node follow each other:
/// the instant of a claim was read after the node's last claim. If an instant is earlier than that allows, by the time
/// that has really passed, then the clock was set back. It counts as set back until what follows from that is stored.
#[derive(Debug)]
pub(crate) struct LastClaim(Mutex<Claims>);

#[derive(Debug, Clone)]
struct Claims {
    opened_at: Instant,
    /// The latest instant in microseconds, and when it came.
    latest: Option<(i64, Instant)>,
    /// The instant of the last claim after which runs may wait for a later clock, until that is mended in the store.
    unsettled: Option<i64>,
    /// When each node last claimed.
    nodes: HashMap<NodeId, Instant>,
}

/// How the clock of a claim stands to that of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// There was no claim before: it may have been set while this process did not run.
    Unknown,
    /// It was set back.
    Back,
    /// It went on.
    On,
}

impl Clock {
    /// If the clock may have been set back: the instant after which a run was made by a later clock, more than clocks of
    /// several nodes differ. If there is such a run, or one that was started or a tick that was deferred then, see [`Shift`].
    pub(crate) fn may_be_back(self, now: Timestamp) -> Option<Timestamp> {
        (self != Clock::On).then(|| now.saturating_add(CLOCK_BACK_MIN).unwrap_or(now))
    }
}

/// What a clock that was set back does to live runs, and to ticks that a full lane defers: what was due by the later clock is
/// due now, also for a tick that lies ahead. Runs that were made, or put off, by the later clock wait no longer than they were
/// to wait: also for a retry or for the end of a failure budget. All keep their order, also those that
/// are running: among those that are due now the first made is the first, and they come before the ticks that were deferred.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shift {
    /// The clock.
    pub now: Timestamp,
    /// The latest instant of the later clock that is known.
    pub latest: Timestamp,
}

impl Shift {
    /// None where no run was made, started or put off, and no tick deferred, by a later clock. `last_told` is when the last of these
    /// happened.
    pub(crate) fn of(now: Timestamp, later: Timestamp, last_told: Option<Timestamp>) -> Option<Shift> {
        last_told.filter(|latest| *latest > later).map(|latest| Shift { now, latest })
    }

    /// An instant of a run that was made or put off by the later clock.
    pub(crate) fn of_later_clock(self, at: Timestamp) -> Timestamp {
        let earlier = at.saturating_sub(self.latest.duration_since(self.now)).unwrap_or(at);
        if at >= self.now { earlier.max(self.due()) } else { at }
    }

    /// The place in the order of a run that was made by this clock.
    pub(crate) fn of_this_clock(self, due_at: Timestamp) -> Timestamp {
        if due_at >= self.now && due_at <= self.latest { self.due() } else { due_at }
    }

    /// Since when runs are due that are due now: a moment ago, before ticks that were deferred. The ids of the runs of these may be
    /// smaller.
    pub(crate) fn due(self) -> Timestamp {
        self.now.saturating_sub(SignedDuration::from_micros(1)).unwrap_or(self.now)
    }
}

impl Default for LastClaim {
    fn default() -> LastClaim {
        LastClaim(Mutex::new(Claims::new(Instant::now())))
    }
}

impl Clone for LastClaim {
    fn clone(&self) -> LastClaim {
        LastClaim(Mutex::new(self.0.lock().clone()))
    }
}

impl LastClaim {
    /// How the clock stands at a claim of a node. Unless it went on, [`LastClaim::settled`] has to follow.
    pub(crate) fn clock_at(&self, node: NodeId, now: Timestamp) -> Clock {
        let mut claims = self.0.lock();
        claims.clock_at(node, now.as_microsecond(), Instant::now())
    }

    /// What follows from the clock of a claim at this instant is stored.
    pub(crate) fn settled(&self, now: Timestamp) {
        self.0.lock().settled(now.as_microsecond(), Instant::now());
    }

    /// Plans, runs or ends of attempts were stored that were made at this instant: the clock has shown it. It may have been set
    /// back since, and nodes that drain or are full do not claim.
    pub(crate) fn shown(&self, now: Timestamp) {
        self.0.lock().shown(now.as_microsecond(), Instant::now());
    }
}

impl Claims {
    fn new(opened_at: Instant) -> Claims {
        Claims { opened_at, latest: None, unsettled: None, nodes: HashMap::new() }
    }

    /// `now` in microseconds by the clock of the claim, which came `at`.
    fn clock_at(&mut self, node: NodeId, now: i64, at: Instant) -> Clock {
        if self.nodes.len() >= NODES_MAX {
            self.nodes.clear();
        }
        let last_at = self.nodes.insert(node, at).unwrap_or(self.opened_at);
        let Some((latest, latest_at)) = self.latest else {
            self.unsettled = Some(now);
            return Clock::Unknown;
        };
        let late = latest_at.saturating_duration_since(last_at).min(LATE_MAX) + OUT_OF_ORDER_MAX;
        let is_back = latest.saturating_sub(now) > i64::try_from(late.as_micros()).unwrap_or(i64::MAX);
        if is_back {
            self.unsettled = Some(now);
            return Clock::Back;
        }
        self.shown(now, at);
        Clock::On
    }

    fn settled(&mut self, now: i64, at: Instant) {
        if self.unsettled.take_if(|unsettled| *unsettled == now).is_some() {
            self.latest = Some((now, at));
        }
    }

    /// The clock showed `now` at a call that came `at`. Before the first claim nothing is known of it.
    fn shown(&mut self, now: i64, at: Instant) {
        self.latest = self.latest.map(|latest| if now >= latest.0 { (now, at) } else { latest });
    }
}

#[cfg(test)]
mod tests {
    use belfry_core::NodeId;
    use uuid::Uuid;

    use super::*;

    /// The clock at claims, each by its node, its instant and when it came, in milliseconds after the store was opened.
    fn clocks<const N: usize>(claims: [(u128, i64, u64); N]) -> [Clock; N] {
        let opened_at = Instant::now();
        let mut known = Claims::new(opened_at);
        claims.map(|(node, now, at)| {
            let at = opened_at + Duration::from_millis(at);
            let clock = known.clock_at(NodeId(Uuid::from_u128(node)), now * 1000, at);
            known.settled(now * 1000, at);
            clock
        })
    }

    #[test]
    fn a_clock_that_was_set_back_is_noticed_again_until_what_follows_is_stored() {
        let opened_at = Instant::now();
        let mut known = Claims::new(opened_at);
        let node = NodeId(Uuid::from_u128(1));
        let at = |seconds| opened_at + Duration::from_secs(seconds);
        assert_eq!(known.clock_at(node, 1_000_000, at(1)), Clock::Unknown);
        assert_eq!(known.clock_at(node, 2_000_000, at(2)), Clock::Unknown, "its claim failed");
        known.settled(2_000_000, at(2));
        known.shown(90_000_000, at(3));
        assert_eq!(known.clock_at(node, 4_000_000, at(4)), Clock::Back);
        known.shown(4_500_000, at(4));
        assert_eq!(known.clock_at(node, 5_000_000, at(5)), Clock::Back, "its claim failed");
        known.settled(5_000_000, at(5));
        assert_eq!(known.clock_at(node, 6_000_000, at(6)), Clock::On);
    }

    #[test]
    fn a_claim_of_another_node_that_comes_late_is_no_clock_that_was_set_back() {
        use Clock::{Back, On, Unknown};
        // The second node read its clock at 1010, and comes 900 ms later.
        assert_eq!(clocks([(2, 1000, 0), (1, 1900, 900), (2, 1010, 910)]), [Unknown, On, On]);
        // It has read it after its last claim.
        assert_eq!(clocks([(2, 1000, 0), (1, 1900, 900), (2, 900, 910)]), [Unknown, On, Back]);
        assert_eq!(clocks([(1, 1900, 900), (2, 1010, 910)]), [Unknown, On], "after the store was opened");
    }

    #[test]
    fn a_clock_that_was_set_back_is_noticed_after_a_plan_too() {
        let opened_at = Instant::now();
        let mut known = Claims::new(opened_at);
        let node = NodeId(Uuid::from_u128(1));
        assert_eq!(known.clock_at(node, 1_000_000, opened_at), Clock::Unknown);
        known.settled(1_000_000, opened_at);
        known.shown(9_000_000, opened_at + Duration::from_secs(8));
        assert_eq!(known.clock_at(node, 3_000_000, opened_at + Duration::from_secs(9)), Clock::Back);
    }

    #[test]
    fn a_node_whose_instants_go_back_has_a_clock_that_was_set_back() {
        use Clock::{Back, On, Unknown};
        assert_eq!(clocks([(1, 1000, 0), (1, 960, 1), (1, 900, 2)]), [Unknown, On, Back]);
        assert_eq!(clocks([(1, 1000, 0), (1, 900, 1), (1, 901, 2)]), [Unknown, Back, On], "once");
        // Whatever the time since, nobody is late by hours.
        assert_eq!(clocks([(1, 9_000_000, 9_000_000), (2, 0, 9_000_001)]), [Unknown, Back]);
        // What may be a late claim is none if the next one is not later.
        let small = [(2, 0, 0), (1, 1000, 1000), (2, 500, 1100), (2, 600, 1200)];
        assert_eq!(clocks(small), [Unknown, On, On, Back]);
    }
}
