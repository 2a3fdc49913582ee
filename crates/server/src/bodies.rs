//! The memory that request bodies may take, over all requests. A body gives its share back when the request is
//! answered.
//!
//! There are three pools, so that nobody takes the room of a sender who is trusted more. Requests with the local token or
//! one of scope admin share the first, requests with another token the second. A large body takes room there once, for all
//! that may come: bodies that each hold a part and wait for more would wait for each other.
//!
//! Bodies that must be read before anybody knows who sent them, such as those of signed webhooks, share the third. A body
//! takes room there as its bytes arrive, whatever length it announced.
//!
//! A body that takes longer than its pool allows is ended when another needs its room. A large body with a token that waits
//! for room does not keep smaller ones from what is free.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use axum::http::StatusCode;
use belfry_store::Scope;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use crate::problem::Problem;

/// The first bytes of a body need no share: small requests pass also while large ones have taken everything. What they
/// take is bounded by the number of connections.
const FREE_BYTES: usize = 16 << 10;
/// Permits count units of this size.
const UNIT_BYTES: usize = 1 << 10;
/// How long a body waits for others to be done. It is longer than a sender keeps its room: a body that finds only young
/// ones waits until one of them may be ended.
const WAIT: Duration = Duration::from_secs(3);
/// A sender who is still unknown keeps its room for so long, and then until another needs it.
const UNKNOWN_DONE_WITHIN: Duration = Duration::from_secs(1);
/// The same for a sender who is known.
const KNOWN_DONE_WITHIN: Duration = Duration::from_secs(2);

/// How often a body that waits looks for room, and for another that may be ended.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The memory for bodies.
pub struct Bodies {
    owner: Pool,
    known: Pool,
    unknown: Pool,
}

struct Pool {
    units: usize,
    free: Arc<Semaphore>,
    done_within: Duration,
    /// Whether bodies take room in the order in which they came. Strangers must: those who come again and again would take
    /// what others wait for. Elsewhere a large body at the head would keep smaller ones from what is free.
    is_queue: bool,
    /// The bodies that hold a part of the pool, the oldest first.
    unread: Mutex<VecDeque<Weak<Held>>>,
}

/// The share of one request. Clones are the same share; it is given back when the last of them is dropped.
#[derive(Clone, Default)]
pub struct Share(Arc<Held>);

#[derive(Default)]
struct Held {
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    /// What the sender's token may do; unset while the sender is unknown.
    scope: OnceLock<Scope>,
    /// The body is read or ended: another cannot end it.
    is_done: AtomicBool,
    /// Since when the sender keeps its room, without the time in which it waited for more. None while it waits: then it
    /// is not the sender that is slow.
    since: Mutex<Option<Instant>>,
    /// Told when the body must give its room to another.
    ended: Notify,
}

impl Share {
    /// The sender is known before the body is read, by a token with this scope.
    pub fn prove(&self, scope: Scope) {
        let _ = self.0.scope.set(scope);
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

impl Bodies {
    /// Three pools of so many bytes each.
    pub fn new(bytes_max: usize) -> Bodies {
        Bodies {
            owner: Pool::new(bytes_max, KNOWN_DONE_WITHIN, false),
            known: Pool::new(bytes_max, KNOWN_DONE_WITHIN, false),
            unknown: Pool::new(bytes_max, UNKNOWN_DONE_WITHIN, true),
        }
    }

    /// Enlarges a share to `bytes` of a body that has at most `bytes_max`. A body larger than the pool takes the whole
    /// pool.
    pub async fn grow(&self, share: &Share, bytes: usize, bytes_max: usize) -> Result<(), Problem> {
        match share.0.scope.get() {
            None => self.unknown.grow(share, bytes).await,
            Some(scope) => {
                let pool = if *scope == Scope::Admin { &self.owner } else { &self.known };
                pool.grow(share, if bytes > FREE_BYTES { bytes_max } else { bytes }).await
            }
        }
    }
}

impl Pool {
    fn new(bytes_max: usize, done_within: Duration, is_queue: bool) -> Pool {
        let units = bytes_max.div_ceil(UNIT_BYTES);
        Pool { units, free: Arc::new(Semaphore::new(units)), done_within, is_queue, unread: Mutex::default() }
    }

    async fn grow(&self, share: &Share, bytes: usize) -> Result<(), Problem> {
        let units = bytes.saturating_sub(FREE_BYTES).div_ceil(UNIT_BYTES).min(self.units);
        let held = share.0.units();
        let Some(more) = units.checked_sub(held).filter(|more| *more > 0) else { return Ok(()) };
        let permits = u32::try_from(more).unwrap_or(u32::MAX);
        // It has a place in the queue only once it is polled.
        let mut queued = std::pin::pin!(self.free.clone().acquire_many_owned(permits));
        let began = Instant::now();
        let since = share.0.since.lock().take();
        let permit = loop {
            if !self.is_queue
                && let Ok(permit) = self.free.clone().try_acquire_many_owned(permits)
            {
                break permit;
            }
            tokio::select! {
                biased;
                // The semaphore is never closed.
                taken = queued.as_mut(), if self.is_queue => break taken.map_err(|_| too_many())?,
                () = sleep(LOOK_AGAIN) => {}
            }
            if began.elapsed() >= WAIT {
                return Err(too_many());
            }
            self.make_room(more);
        };
        *share.0.since.lock() = Some(since.map_or_else(Instant::now, |since| since + began.elapsed()));
        let mut held = share.0.permit.lock();
        match held.as_mut() {
            Some(held) => held.merge(permit),
            None => {
                *held = Some(permit);
                let mut unread = self.unread.lock();
                unread.retain(|held| held.strong_count() > 0);
                unread.push_back(Arc::downgrade(&share.0));
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
            if ended < units && since.is_some_and(|since| since.elapsed() > self.done_within) {
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
        assert_eq!(bodies.unknown.free.available_permits(), 64 - 44);
        assert!(bodies.grow(&other, 60 << 10, 60 << 10).await.is_err(), "there is no room for both");
        assert_eq!(bodies.unknown.free.available_permits(), 64 - 44, "what was not given is not taken");
        bodies.grow(&small, FREE_BYTES, FREE_BYTES).await.unwrap();
        let clone = one.clone();
        drop(one);
        assert_eq!(bodies.unknown.free.available_permits(), 64 - 44);
        drop(clone);
        bodies.grow(&other, 60 << 10, 60 << 10).await.unwrap();
        drop(other);
        assert_eq!(bodies.unknown.free.available_permits(), 64);
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
            share.prove(Scope::Trigger);
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
    async fn a_body_of_an_unknown_sender_that_takes_long_is_ended_for_another() {
        let bodies = Bodies::new(64 << 10);
        let (slow, other, proven) = (Share::default(), Share::default(), Share::default());
        bodies.grow(&slow, 80 << 10, 80 << 10).await.unwrap();
        proven.prove(Scope::Trigger);
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
    async fn a_known_sender_that_stalls_gives_way_and_takes_nothing_from_the_owner() {
        let bodies = Bodies::new(64 << 10);
        let share = |scope| {
            let share = Share::default();
            share.prove(scope);
            share
        };
        let stalled = share(Scope::Trigger);
        bodies.grow(&stalled, 20 << 10, 80 << 10).await.unwrap();
        let began = Instant::now();
        bodies.grow(&share(Scope::Admin), 20 << 10, 80 << 10).await.unwrap();
        assert!(began.elapsed() < KNOWN_DONE_WITHIN, "the owner has room of its own");
        let end = async {
            stalled.ended().await;
            drop(stalled);
        };
        let other = share(Scope::Trigger);
        let (grown, ()) = tokio::join!(bodies.grow(&other, 20 << 10, 80 << 10), end);
        grown.unwrap();
    }

    #[tokio::test]
    async fn a_large_body_that_waits_does_not_block_a_small_one() {
        let bodies = Bodies::new(64 << 10);
        let share = || {
            let share = Share::default();
            share.prove(Scope::Trigger);
            share
        };
        let (holder, large, small) = (share(), share(), share());
        bodies.grow(&holder, 40 << 10, 40 << 10).await.unwrap();
        holder.read();
        let later = async {
            tokio::task::yield_now().await;
            let began = Instant::now();
            bodies.grow(&small, 20 << 10, 20 << 10).await.unwrap();
            assert!(began.elapsed() < KNOWN_DONE_WITHIN, "it does not wait behind the large one");
            drop(holder);
        };
        let (grown, ()) = tokio::join!(bodies.grow(&large, 76 << 10, 76 << 10), later);
        grown.unwrap();
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
