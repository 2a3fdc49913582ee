//! What time it is, and waiting: the only place in the engine that knows either.

use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_time::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::driver::Now;

/// The time that a node goes by.
pub trait Time: Send + Sync {
    /// Wall-clock time for decisions, monotonic time for waiting.
    fn now(&self) -> Now;

    /// The store's clock was read just now. A clock that does not go by the store's ignores it.
    fn follow(&self, store: Timestamp);
}

impl Time for Clock {
    fn now(&self) -> Now {
        Clock::now(self)
    }

    fn follow(&self, store: Timestamp) {
        if let Kind::Store { read, .. } = &self.kind {
            *read.lock() = (store, Instant::now());
        }
    }
}

/// A clock for the engine.
#[derive(Debug, Clone)]
pub struct Clock {
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    /// The host's clock and watch.
    System { since: Instant, shift: SignedDuration },
    /// The clock of the store as it was read at an instant, and the host's watch.
    Store { since: Instant, read: Arc<Mutex<(Timestamp, Instant)>> },
    /// Moved by hand.
    Manual(ManualClock),
}

impl Clock {
    /// The host's clock.
    pub fn system() -> Clock {
        Clock::shifted(SignedDuration::ZERO)
    }

    /// The host's clock, as if somebody had set it to another time.
    pub fn shifted(shift: SignedDuration) -> Clock {
        Clock { kind: Kind::System { since: Instant::now(), shift } }
    }

    /// The clock of a store that has one of its own, read just now.
    pub(crate) fn of_store(now: Timestamp) -> Clock {
        let since = Instant::now();
        Clock { kind: Kind::Store { since, read: Arc::new(Mutex::new((now, since))) } }
    }

    /// What time it is.
    pub fn now(&self) -> Now {
        match &self.kind {
            Kind::System { since, shift } => {
                let now = Timestamp::now();
                Now { wall: whole(now.saturating_add(*shift).unwrap_or(now)), mono: since.elapsed() }
            }
            Kind::Store { since, read } => {
                let (at, read_at) = *read.lock();
                let passed = SignedDuration::try_from(read_at.elapsed()).unwrap_or(SignedDuration::ZERO);
                Now { wall: whole(at.saturating_add(passed).unwrap_or(at)), mono: since.elapsed() }
            }
            Kind::Manual(manual) => manual.now(),
        }
    }

    pub(crate) async fn sleep(&self, time: Duration) {
        match &self.kind {
            Kind::System { .. } | Kind::Store { .. } => tokio::time::sleep(time).await,
            Kind::Manual(manual) => manual.sleep(time).await,
        }
    }
}

/// Stores keep microseconds.
fn whole(at: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(at.as_microsecond()).unwrap_or(at)
}

impl From<ManualClock> for Clock {
    fn from(manual: ManualClock) -> Clock {
        Clock { kind: Kind::Manual(manual) }
    }
}

/// A clock that is moved by hand, to try schedules out: three days pass when you say so.
#[derive(Debug, Clone)]
pub struct ManualClock {
    now: watch::Sender<Now>,
}

impl ManualClock {
    /// A clock that stands at an instant.
    pub fn new(wall: Timestamp) -> ManualClock {
        ManualClock { now: watch::Sender::new(Now { wall, mono: Duration::ZERO }) }
    }

    /// What it shows.
    pub fn now(&self) -> Now {
        *self.now.borrow()
    }

    /// Lets time pass.
    pub fn advance(&self, time: Duration) {
        self.now.send_modify(|now| {
            let signed = SignedDuration::try_from(time).unwrap_or(SignedDuration::MAX);
            now.wall = now.wall.saturating_add(signed).unwrap_or(Timestamp::MAX);
            now.mono += time;
        });
    }

    /// Sets the wall clock, forward or back, as an operator or a network might; the watch goes on as it was.
    pub fn step_to(&self, wall: Timestamp) {
        self.now.send_modify(|now| now.wall = wall);
    }

    async fn sleep(&self, time: Duration) {
        let mut changes = self.now.subscribe();
        let start = *changes.borrow_and_update();
        let until = start.mono + time;
        // A step of the wall wakes as well: what is due may have changed.
        while changes.changed().await.is_ok() {
            let now = *changes.borrow_and_update();
            let stepped = now.wall.duration_since(start.wall)
                != SignedDuration::try_from(now.mono - start.mono).unwrap_or_default();
            if now.mono >= until || stepped {
                return;
            }
        }
    }
}
