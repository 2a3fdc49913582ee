//! The memory that request bodies may take, over all requests. A body gives its room back when the request is answered.
//!
//! There are three pools, so that nobody takes the room of a sender who is trusted more. Requests with the local token or
//! one of scope admin share the first, requests with another token the second. A large body takes room there once, for all
//! that may come: bodies that each hold a part and wait for more would wait for each other.
//!
//! Bodies that must be read before anybody knows who sent them, such as those of signed webhooks, share the third. A body
//! takes room there as its bytes arrive, whatever length it announced.
//!
//! A sender is a token, or a network while no token is known. What becomes free goes to the sender who will have least of
//! the pool with it, and of that sender's bodies to the oldest. Where nothing becomes free, a body is ended for the one that
//! is next: one with a slow sender, else the youngest of a sender who has several and more than the next would have.
//!
//! A document of many small values takes many times the memory of its text. So each pool has as much again for documents,
//! which take their room once the whole text is there, in the order in which they ask, and give it back, with the text,
//! when the request is answered or begins to wait for a run.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;
use belfry_store::Scope;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use crate::limiter::network;
use crate::problem::Problem;

/// The first bytes of a body need no room: small requests pass also while large ones have taken everything. What they
/// take is bounded by the number of connections.
const FREE_BYTES: usize = 16 << 10;
/// Room is counted in units of this size.
const UNIT_BYTES: usize = 1 << 10;
/// How long a body waits for others to be done, in all. It is longer than a sender keeps its room: a body that finds only
/// young ones waits until one of them may be ended.
const WAIT: Duration = Duration::from_secs(3);
/// How long a body waits, in all, before others are ended whose senders are not slow. Most are read sooner.
const PATIENCE: Duration = Duration::from_millis(200);
/// A sender who is still unknown keeps its room for so long, and then until another needs it.
const UNKNOWN_DONE_WITHIN: Duration = Duration::from_secs(1);
/// The same for a sender who is known.
const KNOWN_DONE_WITHIN: Duration = Duration::from_secs(2);
/// A document that is estimated to take less memory needs no room. What these take is bounded by the number of connections.
const FREE_DOCUMENT_BYTES: usize = 64 << 10;
/// How long a document waits for others to be done.
const DOCUMENT_WAIT: Duration = Duration::from_secs(10);
/// How often a body that waits looks whether time has made room.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The memory for bodies.
pub struct Bodies {
    owner: Arc<Pool>,
    known: Arc<Pool>,
    unknown: Arc<Pool>,
}

struct Pool {
    units: usize,
    done_within: Duration,
    room: Mutex<Room>,
    /// The units for documents.
    documents: Arc<Semaphore>,
}

/// Who has how much of a pool, and who waits.
struct Room {
    free: usize,
    /// In the order in which they came.
    bodies: BTreeMap<u64, Body>,
    came: u64,
    /// When somebody who waits has last looked what time has made of it.
    looked_at: Instant,
}

struct Body {
    sender: String,
    units: usize,
    came_at: Instant,
    /// The units that it waits for, and since when.
    wants: Option<(usize, Instant)>,
    /// How long it had waited before.
    waited: Duration,
    state: State,
    signals: Arc<Signals>,
}

#[derive(PartialEq, Eq)]
enum State {
    /// Its bytes arrive, or it waits for room.
    Open,
    /// All of it is there. Its room is free in a moment, when the request is answered.
    Read,
    /// Another needs its room, which is free in a moment. Says whether the sender was slow.
    Ended { is_slow: bool },
}

/// What a body waits for.
#[derive(Default)]
struct Signals {
    granted: Notify,
    ended: Notify,
}

/// The room of one request. Clones are the same; it is given back when the last of them is dropped.
#[derive(Clone, Default)]
pub struct Share(Arc<Held>);

#[derive(Default)]
struct Held {
    /// The network of the sender, or the id of its token.
    sender: Mutex<String>,
    /// What the sender's token may do; unset while the sender is unknown.
    scope: OnceLock<Scope>,
    signals: Arc<Signals>,
    /// The pool, and the number of the body in it; unset while it needs no room.
    place: OnceLock<(Arc<Pool>, u64)>,
    /// The room of its document.
    document: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Share {
    /// Of a request from this address.
    pub fn from_address(address: IpAddr) -> Share {
        let share = Share::default();
        *share.0.sender.lock() = network(address).to_string();
        share
    }

    /// The sender is known before the body is read, by a token with this id and scope.
    pub fn prove(&self, token: &str, scope: Scope) {
        if self.0.scope.set(scope).is_ok() {
            *self.0.sender.lock() = token.to_owned();
        }
    }

    /// Waits until the body must give its room to another, and says why.
    pub async fn ended(&self) -> Problem {
        self.0.signals.ended.notified().await;
        match self.0.change(|body| body.state == State::Ended { is_slow: true }) {
            Some(true) => {
                let detail = "the body came slowly, and another needed its room";
                Problem::new(StatusCode::REQUEST_TIMEOUT, "too_slow", detail)
            }
            _ => too_many(),
        }
    }

    /// All of the body is there: from now on it is not ended.
    pub fn read(&self) {
        self.0.change(|body| {
            if body.state == State::Open {
                body.state = State::Read;
            }
        });
    }

    /// Neither the body nor its document is needed any longer: others get the room.
    pub fn close(&self) {
        self.0.give_back();
    }
}

impl Held {
    /// Changes the body in its pool, if it has a place there.
    fn change<T>(&self, change: impl FnOnce(&mut Body) -> T) -> Option<T> {
        let (pool, number) = self.place.get()?;
        pool.room.lock().bodies.get_mut(number).map(change)
    }
}

impl Held {
    fn give_back(&self) {
        self.document.lock().take();
        if let Some((pool, number)) = self.place.get() {
            let mut room = pool.room.lock();
            if let Some(body) = room.bodies.remove(number) {
                room.free += body.units;
            }
            room.give(pool.done_within, Instant::now());
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Bodies {
    /// Three pools of so many bytes each.
    pub fn new(bytes_max: usize) -> Bodies {
        Bodies {
            owner: Pool::new(bytes_max, KNOWN_DONE_WITHIN),
            known: Pool::new(bytes_max, KNOWN_DONE_WITHIN),
            unknown: Pool::new(bytes_max, UNKNOWN_DONE_WITHIN),
        }
    }

    /// The bytes that bodies have taken of each pool.
    pub fn taken(&self) -> [(&'static str, usize); 3] {
        [("owner", self.owner.taken()), ("token", self.known.taken()), ("unknown", self.unknown.taken())]
    }

    /// Enlarges a share to `bytes` of a body that has at most `bytes_max`. A body larger than the pool takes the whole
    /// pool.
    pub async fn grow(&self, share: &Share, bytes: usize, bytes_max: usize) -> Result<(), Problem> {
        if bytes <= FREE_BYTES {
            return Ok(());
        }
        let bytes = if share.0.scope.get().is_some() { bytes_max } else { bytes };
        self.pool_of(share).grow(&share.0, bytes - FREE_BYTES).await
    }

    /// Waits for room for a document that is estimated to take so many bytes. One larger than the pool takes the whole
    /// pool.
    pub async fn open(&self, share: &Share, bytes: usize) -> Result<(), Problem> {
        if bytes <= FREE_DOCUMENT_BYTES {
            return Ok(());
        }
        let pool = self.pool_of(share);
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES).min(pool.units)).unwrap_or(u32::MAX);
        let room = timeout(DOCUMENT_WAIT, pool.documents.clone().acquire_many_owned(units)).await;
        let room = room.ok().and_then(Result::ok).ok_or_else(too_many)?;
        *share.0.document.lock() = Some(room);
        Ok(())
    }

    fn pool_of(&self, share: &Share) -> &Arc<Pool> {
        match share.0.scope.get() {
            None => &self.unknown,
            Some(Scope::Admin) => &self.owner,
            Some(_) => &self.known,
        }
    }
}

impl Pool {
    fn new(bytes_max: usize, done_within: Duration) -> Arc<Pool> {
        let units = bytes_max.div_ceil(UNIT_BYTES);
        let room = Room { free: units, bodies: BTreeMap::new(), came: 0, looked_at: Instant::now() };
        let documents = Arc::new(Semaphore::new(units));
        Arc::new(Pool { units, done_within, room: Mutex::new(room), documents })
    }

    fn taken(&self) -> usize {
        (self.units - self.room.lock().free) * UNIT_BYTES
    }

    async fn grow(self: &Arc<Pool>, held: &Held, bytes: usize) -> Result<(), Problem> {
        let units = bytes.div_ceil(UNIT_BYTES).min(self.units);
        let (_, number) = held.place.get_or_init(|| (self.clone(), self.room.lock().enter(held)));
        {
            let now = Instant::now();
            let mut room = self.room.lock();
            let Some(body) = room.bodies.get_mut(number).filter(|body| body.units < units) else {
                return Ok(());
            };
            body.wants = Some((units - body.units, now));
            room.give(self.done_within, now);
        }
        loop {
            {
                let now = Instant::now();
                let mut room = self.room.lock();
                let Some(body) = room.bodies.get_mut(number).filter(|body| body.wants.is_some()) else {
                    return Ok(());
                };
                if body.waited(now) >= WAIT {
                    body.wants = None;
                    return Err(too_many());
                }
                // One of those who wait looks for all.
                if now - room.looked_at >= LOOK_AGAIN {
                    room.looked_at = now;
                    room.give(self.done_within, now);
                }
            }
            let _ = timeout(LOOK_AGAIN, held.signals.granted.notified()).await;
        }
    }
}

impl Room {
    /// The number of a body that has come.
    fn enter(&mut self, held: &Held) -> u64 {
        self.came += 1;
        let body = Body {
            sender: held.sender.lock().clone(),
            units: 0,
            came_at: Instant::now(),
            wants: None,
            waited: Duration::ZERO,
            state: State::Open,
            signals: held.signals.clone(),
        };
        self.bodies.insert(self.came, body);
        self.came
    }

    /// Gives what is free to the bodies that are next, and makes room for the first that finds none.
    fn give(&mut self, done_within: Duration, now: Instant) {
        while let Some((number, units)) = self.next() {
            if units > self.free {
                return self.make_room(number, units, done_within, now);
            }
            let Some(body) = self.bodies.get_mut(&number) else { return };
            self.free -= units;
            body.units += units;
            body.waited = body.waited(now);
            body.wants = None;
            body.signals.granted.notify_one();
        }
    }

    /// The body that gets room before all others, and how much it wants: the oldest of the sender who will have least.
    fn next(&self) -> Option<(u64, usize)> {
        let waiting = self.bodies.iter().filter(|(_, body)| body.state == State::Open);
        let mut oldest = HashMap::new();
        for (number, body) in waiting {
            if let Some((units, _)) = body.wants {
                oldest.entry(&body.sender).or_insert((*number, units));
            }
        }
        // Mostly one waits at most: then nobody needs to know who has how much.
        let has = if oldest.len() > 1 { self.has() } else { HashMap::new() };
        let will_have = |sender: &str, units: usize| has.get(sender).copied().unwrap_or(0) + units;
        let next =
            oldest.into_iter().min_by_key(|(sender, (number, units))| (will_have(sender, *units), *number));
        next.map(|(_, next)| next)
    }

    /// Ends bodies until the one that is next will find what it wants.
    fn make_room(&mut self, next: u64, units: usize, done_within: Duration, now: Instant) {
        let ended = self.bodies.values().filter(|body| body.is_ended()).map(|body| body.units);
        let mut coming = self.free + ended.sum::<usize>();
        for (number, body) in &mut self.bodies {
            if coming >= units {
                return;
            }
            if *number != next && body.may_be_ended() && body.sender_took(now) > done_within {
                coming += body.end(true);
            }
        }
        while coming < units
            && let Some(number) = self.too_many(next, units, now)
            && let Some(body) = self.bodies.get_mut(&number)
        {
            coming += body.end(false);
        }
    }

    /// The body that is ended for another although its sender is not slow: the youngest of the sender who has most of those
    /// with several bodies, if that is more than the next will have. Where all wait for each other, whoever sent them.
    fn too_many(&self, next: u64, units: usize, now: Instant) -> Option<u64> {
        let body = self.bodies.get(&next)?;
        let has_waited = body.waited(now) >= PATIENCE;
        let has = self.has();
        let will_have = has.get(&*body.sender).copied().unwrap_or(0) + units;
        let all_wait =
            self.bodies.values().all(|body| body.units == 0 || body.may_be_ended() && body.wants.is_some());
        let mut most = None;
        for (number, other) in
            self.bodies.iter().filter(|(number, other)| **number != next && other.may_be_ended())
        {
            let has = has.get(&*other.sender).copied().unwrap_or(0);
            let is_one_of_many = other.sender != body.sender && has > other.units && has > will_have;
            if all_wait || has_waited && is_one_of_many {
                most = most.max(Some((has, *number)));
            }
        }
        most.map(|(_, number)| number)
    }

    /// What the bodies of each sender have, without those that are ended.
    fn has(&self) -> HashMap<&str, usize> {
        let mut has = HashMap::new();
        for body in self.bodies.values().filter(|body| !body.is_ended()) {
            *has.entry(&*body.sender).or_insert(0) += body.units;
        }
        has
    }
}

impl Body {
    /// How long it has waited for room.
    fn waited(&self, now: Instant) -> Duration {
        self.waited + self.wants.map_or(Duration::ZERO, |(_, since)| now.saturating_duration_since(since))
    }

    /// How long its sender has taken: while a body waits for room it is not the sender that is slow.
    fn sender_took(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.came_at).saturating_sub(self.waited(now))
    }

    fn may_be_ended(&self) -> bool {
        self.units > 0 && self.state == State::Open
    }

    fn is_ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Ends it, and says how much room that makes.
    fn end(&mut self, is_slow: bool) -> usize {
        self.state = State::Ended { is_slow };
        self.signals.ended.notify_one();
        self.units
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
    use axum::response::IntoResponse;

    use super::*;

    fn free(bodies: &Bodies) -> usize {
        bodies.unknown.room.lock().free
    }

    #[tokio::test]
    async fn a_share_follows_the_bytes_and_is_given_back() {
        let bodies = Bodies::new(64 << 10);
        let (one, other, small) = (Share::default(), Share::default(), Share::default());
        for bytes in [1, 1000, 20 << 10, 40 << 10, 60 << 10] {
            bodies.grow(&one, bytes, bytes).await.unwrap();
        }
        assert_eq!(free(&bodies), 64 - 44);
        assert!(bodies.grow(&other, 60 << 10, 60 << 10).await.is_err(), "there is no room for both");
        assert_eq!(free(&bodies), 64 - 44, "what was not given is not taken");
        bodies.grow(&small, FREE_BYTES, FREE_BYTES).await.unwrap();
        let clone = one.clone();
        drop(one);
        assert_eq!(free(&bodies), 64 - 44);
        drop(clone);
        bodies.grow(&other, 60 << 10, 60 << 10).await.unwrap();
        drop(other);
        assert_eq!(free(&bodies), 64);
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
            share.prove("token", Scope::Trigger);
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
        proven.prove("token", Scope::Trigger);
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
            share.prove(&format!("{scope:?}"), scope);
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
        let share = |token| {
            let share = Share::default();
            share.prove(token, Scope::Trigger);
            share
        };
        let (holder, large, small) = (share("a"), share("b"), share("c"));
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
    async fn documents_wait_for_each_other_until_a_request_is_answered_or_waits_for_a_run() {
        let bodies = Bodies::new(1 << 20);
        let share = || {
            let share = Share::default();
            share.prove("token", Scope::Trigger);
            share
        };
        let (large, next, small) = (share(), share(), share());
        bodies.open(&large, 700 << 10).await.unwrap();
        bodies.open(&small, FREE_DOCUMENT_BYTES).await.unwrap();
        bodies.open(&Share::default(), 700 << 10).await.unwrap();
        let both = timeout(LOOK_AGAIN, bodies.open(&next, 700 << 10)).await;
        assert!(both.is_err(), "there is no room for both");
        let (opened, ()) = tokio::join!(bodies.open(&next, 700 << 10), async {
            tokio::task::yield_now().await;
            // It begins to wait for its run; the share lives on.
            large.close();
        });
        opened.unwrap();
        drop(next);
        bodies.open(&large, 1 << 30).await.unwrap();
    }

    #[tokio::test]
    async fn a_body_that_is_no_longer_needed_gives_its_room_back() {
        let bodies = Bodies::new(64 << 10);
        let (one, other) = (Share::default(), Share::default());
        bodies.grow(&one, 80 << 10, 80 << 10).await.unwrap();
        one.read();
        one.close();
        assert_eq!(free(&bodies), 64);
        bodies.grow(&other, 80 << 10, 80 << 10).await.unwrap();
        drop(one);
        assert_eq!(free(&bodies), 0, "it is not given back twice");
    }

    #[tokio::test]
    async fn a_body_larger_than_everything_goes_alone() {
        let bodies = Bodies::new(64 << 10);
        let (one, other) = (Share::default(), Share::default());
        bodies.grow(&one, 1 << 30, 1 << 30).await.unwrap();
        bodies.grow(&one, 2 << 30, 2 << 30).await.unwrap();
        assert!(bodies.grow(&other, 20 << 10, 20 << 10).await.is_err());
    }
    /// A body from one of two networks that holds so much of 100 KiB for strangers, and the network's address.
    async fn holds(bodies: &Bodies, last: u8, kib: usize) -> Share {
        let share = Share::from_address([10, 0, 0, last].into());
        bodies.grow(&share, (16 + kib) << 10, 1 << 20).await.unwrap();
        share
    }

    /// How a body ends that another needs the room of.
    async fn end(share: Share) -> StatusCode {
        share.ended().await.into_response().status()
    }

    #[tokio::test]
    async fn a_sender_with_many_bodies_gives_room_to_one_with_less() {
        let bodies = Bodies::new(100 << 10);
        let first = holds(&bodies, 1, 50).await;
        let last = holds(&bodies, 1, 50).await;
        let began = Instant::now();
        let (other, status) = tokio::join!(holds(&bodies, 2, 40), end(last));
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "it was not slow");
        // Now the first has as much as the other would have: it waits until the sender is slow.
        let more = bodies.grow(&other, (16 + 60) << 10, 1 << 20);
        let (more, status) = tokio::join!(more, end(first));
        more.unwrap();
        assert_eq!(status, StatusCode::REQUEST_TIMEOUT);
        assert!(began.elapsed() > UNKNOWN_DONE_WITHIN);
    }

    #[tokio::test]
    async fn what_is_free_goes_to_the_sender_with_least_and_there_to_the_oldest() {
        let bodies = Bodies::new(100 << 10);
        let first = holds(&bodies, 1, 90).await;
        first.read();
        let order = Mutex::new(Vec::new());
        let waits = async |name, last, kib| {
            let share = holds(&bodies, last, kib).await;
            order.lock().push(name);
            drop(share);
        };
        tokio::join!(
            waits("old", 1, 70),
            waits("young", 1, 65),
            waits("large", 2, 80),
            waits("small", 3, 60),
            async {
                tokio::task::yield_now().await;
                drop(first);
            }
        );
        assert_eq!(*order.lock(), ["small", "old", "young", "large"]);
    }

    #[tokio::test]
    async fn where_all_wait_for_each_other_the_youngest_is_ended_and_was_not_slow() {
        let bodies = Bodies::new(100 << 10);
        let (old, young) = (holds(&bodies, 1, 40).await, holds(&bodies, 1, 60).await);
        let read = async |share: Share, kib: usize| {
            let status = tokio::select! {
                grown = bodies.grow(&share, (16 + kib) << 10, 1 << 20) => { grown.unwrap(); StatusCode::OK }
                problem = share.ended() => problem.into_response().status(),
            };
            drop(share);
            status
        };
        let statuses = tokio::join!(read(old, 70), read(young, 90));
        assert_eq!(statuses, (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE));
    }
}
