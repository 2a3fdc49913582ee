//! The memory that request bodies may take, over all requests. A body gives its share back when the request is
//! answered.
//!
//! There are two pools. Requests with a token share one. A large body takes room there once, for all that may come:
//! bodies that each hold a part and wait for more would wait for each other.
//!
//! Bodies that must be read before anybody knows who sent them, such as those of signed webhooks, share the other pool:
//! a stranger who fills it takes nothing from requests with a token. A body takes room there as its bytes arrive,
//! whatever length it announced. One that takes longer than [`DONE_WITHIN`] is ended when another needs its room.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::http::StatusCode;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use crate::problem::Problem;

/// The first bytes of a body need no share: small requests pass also while large ones have taken everything. What they
/// take is bounded by the number of connections.
const FREE_BYTES: usize = 16 << 10;
/// Permits count units of this size.
const UNIT_BYTES: usize = 1 << 10;
/// How long a body waits for others to be done. It is longer than [`DONE_WITHIN`]: a body that finds only young ones
/// waits until one of them may be ended.
const WAIT: Duration = Duration::from_secs(3);
/// A sender who is still unknown keeps its room for so long, and then until another needs it.
const DONE_WITHIN: Duration = Duration::from_secs(1);

/// How often a body that waits looks for another that may be ended.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The memory for bodies.
pub struct Bodies {
    proven: Pool,
    unproven: Pool,
    /// The bodies that hold a part of the unproven pool, the oldest first.
    unread: Mutex<VecDeque<Weak<Held>>>,
}

struct Pool {
    units: usize,
    free: Arc<Semaphore>,
}

/// The share of one request. Clones are the same share; it is given back when the last of them is dropped.
#[derive(Clone, Default)]
pub struct Share(Arc<Held>);

#[derive(Default)]
struct Held {
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    is_proven: AtomicBool,
    /// The body is read or ended: another cannot end it.
    is_done: AtomicBool,
    /// Since when the sender keeps its room, without the time in which it waited for more. None while it waits: then it
    /// is not the sender that is slow.
    since: Mutex<Option<Instant>>,
    /// Told when the body must give its room to another.
    ended: Notify,
}

impl Share {
    /// The sender is known before the body is read.
    pub fn prove(&self) {
        self.0.is_proven.store(true, Ordering::Relaxed);
    }

    /// Waits until the body must give its room to another.
    pub async fn ended(&self) -> Problem {
        self.0.ended.notified().await;
        let detail = "the body came slowly, and another needed its room";
        Problem::new(StatusCode::REQUEST_TIMEOUT, "too_slow", detail)
    }

    /// All of the body is there: from now on it is not ended.
    pub fn read(&self) {
        self.0.is_done.store(true, Ordering::Relaxed);
    }
}

impl Held {
    fn end(&self) {
        self.is_done.store(true, Ordering::Relaxed);
        self.ended.notify_one();
    }

    fn units(&self) -> usize {
        self.permit.lock().as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }
}

impl Pool {
    fn new(bytes_max: usize) -> Pool {
        let units = bytes_max.div_ceil(UNIT_BYTES);
        Pool { units, free: Arc::new(Semaphore::new(units)) }
    }
}

impl Bodies {
    /// Two pools of so many bytes each.
    pub fn new(bytes_max: usize) -> Bodies {
        Bodies { proven: Pool::new(bytes_max), unproven: Pool::new(bytes_max), unread: Mutex::default() }
    }

    /// Enlarges a share to `bytes` of a body that has at most `bytes_max`. A body larger than the pool takes the whole
    /// pool.
    pub async fn grow(&self, share: &Share, bytes: usize, bytes_max: usize) -> Result<(), Problem> {
        let is_proven = share.0.is_proven.load(Ordering::Relaxed);
        let pool = if is_proven { &self.proven } else { &self.unproven };
        let bytes = if is_proven && bytes > FREE_BYTES { bytes_max } else { bytes };
        let units = bytes.saturating_sub(FREE_BYTES).div_ceil(UNIT_BYTES).min(pool.units);
        let held = share.0.units();
        let Some(more) = units.checked_sub(held).filter(|more| *more > 0) else { return Ok(()) };
        let taking = pool.free.clone().acquire_many_owned(u32::try_from(more).unwrap_or(u32::MAX));
        let mut taking = std::pin::pin!(taking);
        let began = Instant::now();
        let since = share.0.since.lock().take();
        let permit = loop {
            tokio::select! {
                biased;
                // The semaphore is never closed.
                taken = taking.as_mut() => break taken.map_err(|_| too_many())?,
                () = sleep(LOOK_AGAIN) => {}
            }
            if began.elapsed() >= WAIT {
                return Err(too_many());
            }
            if !is_proven {
                self.make_room(more);
            }
        };
        *share.0.since.lock() = Some(since.map_or_else(Instant::now, |since| since + began.elapsed()));
        let mut held = share.0.permit.lock();
        match held.as_mut() {
            Some(held) => held.merge(permit),
            None => {
                *held = Some(permit);
                if !is_proven {
                    let mut unread = self.unread.lock();
                    unread.retain(|held| held.strong_count() > 0);
                    unread.push_back(Arc::downgrade(&share.0));
                }
            }
        }
        Ok(())
    }

    /// Ends the oldest bodies with a slow sender, until so many units will be free. Where all bodies wait for each other's
    /// room, ends the one that has most of it.
    fn make_room(&self, units: usize) {
        let mut unread = self.unread.lock();
        let mut ended = 0;
        let (mut all_wait, mut largest) = (true, None::<Arc<Held>>);
        unread.retain(|held| {
            let Some(held) = held.upgrade() else { return false };
            let since = *held.since.lock();
            // What is done gives its room back in a moment.
            let is_done = held.is_done.load(Ordering::Relaxed);
            all_wait &= since.is_none() && !is_done;
            if is_done {
                return true;
            }
            if ended < units && since.is_some_and(|since| since.elapsed() > DONE_WITHIN) {
                ended += held.units();
                held.end();
                return true;
            }
            if largest.as_ref().is_none_or(|largest| largest.units() < held.units()) {
                largest = Some(held);
            }
            true
        });
        if let (true, Some(largest)) = (all_wait, largest) {
            largest.end();
        }
    }
}

fn too_many() -> Problem {
    Problem::unavailable(
        "too_many_bodies",
        "the bodies of other requests have taken all memory that is meant for them",
    )
    .way_out("try again in a moment, or send less at once")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_share_follows_the_bytes_and_is_given_back() {
        let bodies = Bodies::new(64 << 10);
        let (one, other, small) = (Share::default(), Share::default(), Share::default());
        for bytes in [1, 1000, 20 << 10, 40 << 10, 60 << 10] {
            bodies.grow(&one, bytes, bytes).await.unwrap();
        }
        assert_eq!(bodies.unproven.free.available_permits(), 64 - 44);
        assert!(bodies.grow(&other, 60 << 10, 60 << 10).await.is_err(), "there is no room for both");
        assert_eq!(bodies.unproven.free.available_permits(), 64 - 44, "what was not given is not taken");
        bodies.grow(&small, FREE_BYTES, FREE_BYTES).await.unwrap();
        let clone = one.clone();
        drop(one);
        assert_eq!(bodies.unproven.free.available_permits(), 64 - 44);
        drop(clone);
        bodies.grow(&other, 60 << 10, 60 << 10).await.unwrap();
        drop(other);
        assert_eq!(bodies.unproven.free.available_permits(), 64);
    }

    #[tokio::test]
    async fn a_body_waits_until_another_is_done() {
        let bodies = Bodies::new(64 << 10);
        let (one, other) = (Share::default(), Share::default());
        bodies.grow(&one, 80 << 10, 80 << 10).await.unwrap();
        let (waited, ()) = tokio::join!(bodies.grow(&other, 80 << 10, 80 << 10), async {
            // By now the other waits.
            tokio::task::yield_now().await;
            drop(one);
        });
        waited.unwrap();
    }

    #[tokio::test]
    async fn bodies_of_known_senders_do_not_wait_for_each_other() {
        let bodies = Bodies::new(64 << 10);
        let read = async || {
            let share = Share::default();
            share.prove();
            for bytes in [20 << 10, 40 << 10, 60 << 10] {
                bodies.grow(&share, bytes, 60 << 10).await?;
                tokio::task::yield_now().await;
            }
            Ok::<(), Problem>(())
        };
        let (one, other) = tokio::join!(read(), read());
        one.unwrap();
        other.unwrap();
    }

    #[tokio::test]
    async fn an_unproven_body_that_takes_long_is_ended_for_another() {
        let bodies = Bodies::new(64 << 10);
        let (slow, other, proven) = (Share::default(), Share::default(), Share::default());
        bodies.grow(&slow, 80 << 10, 80 << 10).await.unwrap();
        proven.prove();
        bodies.grow(&proven, 80 << 10, 80 << 10).await.unwrap();
        let end = async {
            slow.ended().await;
            drop(slow);
        };
        let (grown, ()) = tokio::join!(bodies.grow(&other, 80 << 10, 80 << 10), end);
        grown.unwrap();
        other.read();
        assert!(
            bodies.grow(&Share::default(), 20 << 10, 20 << 10).await.is_err(),
            "what is read stays until it is answered"
        );
    }

    #[tokio::test]
    async fn a_body_larger_than_everything_goes_alone() {
        let bodies = Bodies::new(64 << 10);
        let (one, other) = (Share::default(), Share::default());
        bodies.grow(&one, 1 << 30, 1 << 30).await.unwrap();
        bodies.grow(&one, 2 << 30, 2 << 30).await.unwrap();
        assert!(bodies.grow(&other, 20 << 10, 20 << 10).await.is_err());
    }
}
