//! What all simulated nodes share: true time, the store's clock, and the faults that are active.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use belfry::testing::Now;
use belfry::{RunId, SignedDuration, Time, Timestamp};
use belfry_core::Epoch;
use belfry_store::Claimed;
use parking_lot::Mutex;

use crate::random::Random;

/// True time in microseconds since the start of the simulation. It only goes forward.
pub type Micros = u64;

/// Microseconds in a second.
pub const SECOND: Micros = 1_000_000;
/// Microseconds in a minute.
pub const MINUTE: Micros = 60 * SECOND;
/// Microseconds in an hour.
pub const HOUR: Micros = 60 * MINUTE;
/// Microseconds in a day.
pub const DAY: Micros = 24 * HOUR;

/// How a store behaves towards one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It answers.
    None,
    /// It does not do it, and says so.
    Refuses,
    /// There is no room to write.
    Full,
    /// It does it, and the answer is lost.
    LosesAnswer,
}

/// What goes wrong at the moment.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The store answers nobody until then.
    pub down_until: Micros,
    /// The store takes no writes until then.
    pub full_until: Micros,
    /// Every call takes long until then.
    pub slow_until: Micros,
    /// Nodes that do not reach the store, until then.
    pub cut_until: Vec<Micros>,
    /// Calls in a thousand that fail.
    pub fails_permille: u64,
    /// Calls in a thousand whose answer is lost although they were done.
    pub loses_permille: u64,
}

/// What all nodes share.
pub struct World {
    inner: Mutex<Inner>,
}

struct Inner {
    now: Micros,
    start: Timestamp,
    /// How far the store's clock was stepped, in microseconds.
    stepped: i64,
    /// When it was stepped back last, in true time, and the latest instant that it has shown.
    stepped_back: Option<(Micros, Timestamp)>,
    /// A claim was made by the clock as it is since then: by that stores notice the step.
    is_step_noticed: bool,
    /// A step that is to come.
    step_later: Option<i64>,
    random: Random,
    faults: Faults,
    /// When the future that is being polled wants to be polled again.
    wakes: Vec<Micros>,
    lease: Micros,
    /// When runs were claimed that have not started yet.
    claims: BTreeMap<(RunId, Epoch), Micros>,
    /// When runs of plans have reached the store.
    planned: BTreeMap<RunId, Micros>,
    /// What a call did that it must not do.
    breach: Option<String>,
}

impl World {
    /// A world whose store's clock shows `start`.
    pub fn new(start: Timestamp, random: Random, lease: Micros) -> World {
        let faults = Faults::default();
        let inner = Inner {
            now: 0,
            start,
            stepped: 0,
            stepped_back: None,
            is_step_noticed: false,
            step_later: None,
            random,
            faults,
            wakes: Vec::new(),
            lease,
            claims: BTreeMap::new(),
            planned: BTreeMap::new(),
            breach: None,
        };
        World { inner: Mutex::new(inner) }
    }

    /// True time.
    pub fn now(&self) -> Micros {
        self.inner.lock().now
    }

    /// Lets time pass.
    pub fn set_now(&self, now: Micros) {
        let mut inner = self.inner.lock();
        debug_assert!(now >= inner.now, "time goes forward");
        inner.now = now;
    }

    /// Runs of a plan have reached the store.
    pub fn planned(&self, runs: impl Iterator<Item = RunId>) {
        let mut inner = self.inner.lock();
        let now = inner.now;
        inner.planned.extend(runs.map(|run| (run, now)));
    }

    /// When a run of a plan has reached the store; none of other runs, which are there at once.
    pub fn planned_at(&self, run: RunId) -> Option<Micros> {
        self.inner.lock().planned.get(&run).copied()
    }

    /// What the store's clock shows.
    pub fn wall(&self) -> Timestamp {
        self.inner.lock().wall()
    }

    /// Steps the store's clock.
    pub fn step(&self, by: i64) {
        self.inner.lock().step(by);
    }

    /// When the store's clock was stepped back, in true time, if stores have noticed it and it has not shown the instants since
    /// that it had shown before.
    pub fn behind_since(&self) -> Option<Micros> {
        let inner = self.inner.lock();
        let is_behind = |latest: Timestamp| inner.is_step_noticed && inner.wall() < latest;
        inner.stepped_back.filter(|(_, latest)| is_behind(*latest)).map(|(at, _)| at)
    }

    /// Steps the store's clock right after the next read of what is due.
    pub fn step_later(&self, by: i64) {
        self.inner.lock().step_later = Some(by);
    }

    /// What is due was read.
    pub fn due_read(&self) {
        let mut inner = self.inner.lock();
        let by = inner.step_later.take().unwrap_or(0);
        inner.step(by);
    }

    /// Runs were claimed now, by a node whose clock showed `wall` when it asked.
    pub fn claimed(&self, wall: Timestamp, claimed: &[Claimed]) {
        let mut inner = self.inner.lock();
        inner.is_step_noticed |= wall <= inner.wall();
        let now = inner.now;
        inner.claims.extend(claimed.iter().map(|claimed| ((claimed.run, claimed.epoch), now)));
    }

    /// A call did what it must not do.
    pub fn breach(&self, what: String) {
        self.inner.lock().breach.get_or_insert(what);
    }

    /// What a call did that it must not do.
    pub fn take_breach(&self) -> Option<String> {
        self.inner.lock().breach.take()
    }

    /// When a run was claimed.
    pub fn take_claim(&self, run: RunId, epoch: Epoch) -> Micros {
        self.inner.lock().claims.remove(&(run, epoch)).unwrap_or(0)
    }

    /// Changes what goes wrong.
    pub fn faults<T>(&self, change: impl FnOnce(&mut Faults) -> T) -> T {
        change(&mut self.inner.lock().faults)
    }

    /// How long a call is on its way, one way. So many of a thousand take no time, unless the store is slow.
    pub fn latency(&self, at_once_permille: u64) -> Micros {
        let mut inner = self.inner.lock();
        let (now, lease) = (inner.now, inner.lease);
        let is_slow = now < inner.faults.slow_until;
        let draw = inner.random.below(1000);
        match draw {
            // A call that arrives after the lease of its node has ended.
            0 if is_slow => inner.random.between(lease / 2, 2 * lease),
            0..200 if is_slow => inner.random.between(SECOND, 20 * SECOND),
            0..5 => inner.random.between(SECOND, 3 * SECOND),
            _ if !is_slow && draw >= 1000 - at_once_permille => 0,
            _ => inner.random.between(200, 20_000),
        }
    }

    /// How the store behaves towards a call of a node.
    pub fn fault(&self, node: usize, is_write: bool) -> Fault {
        let mut inner = self.inner.lock();
        let now = inner.now;
        let is_cut = inner.faults.cut_until.get(node).is_some_and(|until| now < *until);
        if is_cut || now < inner.faults.down_until {
            // The last calls before an outage may have been done.
            return if is_write && inner.random.permille(50) { Fault::LosesAnswer } else { Fault::Refuses };
        }
        if is_write && now < inner.faults.full_until {
            return Fault::Full;
        }
        let (fails, loses) = (inner.faults.fails_permille, inner.faults.loses_permille);
        if inner.random.permille(fails) {
            return Fault::Refuses;
        }
        if is_write && inner.random.permille(loses) { Fault::LosesAnswer } else { Fault::None }
    }

    /// Waits in simulated time.
    pub fn sleep(self: &Arc<World>, time: Micros) -> impl Future<Output = ()> + Send + use<> {
        let world = self.clone();
        let until = world.now() + time;
        poll_fn(move |_| {
            let mut inner = world.inner.lock();
            if inner.now >= until {
                return Poll::Ready(());
            }
            inner.wakes.push(until);
            Poll::Pending
        })
    }

    /// When the future that was polled wants to be polled again.
    pub fn take_wakes(&self) -> Vec<Micros> {
        std::mem::take(&mut self.inner.lock().wakes)
    }
}

/// The clock of a node.
pub struct NodeClock {
    world: Arc<World>,
    /// When the node started: its monotonic time counts from there.
    since: Micros,
    /// What the store's clock showed when it was read, and when that was. None for a node that reads the host's clock,
    /// which is the store's clock then.
    read: Option<Mutex<(Timestamp, Micros)>>,
}

impl NodeClock {
    /// A clock that starts now.
    pub fn new(world: &Arc<World>, follows_store: bool) -> NodeClock {
        let since = world.now();
        let read = follows_store.then(|| Mutex::new((world.wall(), since)));
        NodeClock { world: world.clone(), since, read }
    }
}

impl Time for NodeClock {
    fn now(&self) -> Now {
        let now = self.world.now();
        let wall = match &self.read {
            None => self.world.wall(),
            Some(read) => {
                let (at, read_at) = *read.lock();
                at + SignedDuration::from_micros((now - read_at) as i64)
            }
        };
        Now { wall, mono: Duration::from_micros(now - self.since) }
    }

    fn follow(&self, store: Timestamp) {
        if let Some(read) = &self.read {
            *read.lock() = (store, self.world.now());
        }
    }
}

impl Inner {
    fn wall(&self) -> Timestamp {
        self.start + SignedDuration::from_micros(self.now as i64 + self.stepped)
    }

    fn step(&mut self, by: i64) {
        if by < 0 {
            self.is_step_noticed = false;
            let before = self.stepped_back.map(|(_, latest)| latest);
            self.stepped_back =
                Some((self.now, before.map_or(self.wall(), |before| before.max(self.wall()))));
        }
        self.stepped += by;
    }
}
