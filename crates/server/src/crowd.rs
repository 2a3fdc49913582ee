//! The connections of a server: counted, and the idlest let go when there is no room for another.
//!
//! A connection is idle while no request of it is being answered: it has sent nothing yet, only a part of a request, or
//! waits after an answer. A reader of events is never idle.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use axum::body::Body;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// All connections of a server. Cheap to clone.
#[derive(Clone)]
pub struct Crowd {
    inner: Arc<Inner>,
}

struct Inner {
    max: usize,
    /// Bounded by `max`, and one that waits for room.
    members: Mutex<HashMap<u64, Arc<Member>>>,
    /// A connection has ended, or has become idle.
    changed: Notify,
    /// Grows with each connection and with each answer: a smaller number was idle for longer.
    turn: AtomicU64,
}

struct Member {
    /// Requests that are being answered.
    answering: AtomicUsize,
    /// The turn at which it became idle.
    idle_since: AtomicU64,
    leave: Notify,
}

/// A place in the crowd, until it is dropped.
pub struct Place {
    number: u64,
    member: Arc<Member>,
    crowd: Crowd,
}

impl Crowd {
    pub fn new(max: usize) -> Crowd {
        let inner = Inner {
            max: max.max(1),
            members: Mutex::default(),
            changed: Notify::new(),
            turn: AtomicU64::new(0),
        };
        Crowd { inner: Arc::new(inner) }
    }

    /// A place for a new connection. Where all are taken the idlest connection is told to leave; where none is idle it waits.
    pub async fn enter(&self) -> Place {
        loop {
            let changed = self.inner.changed.notified();
            if let Some(place) = self.enter_now() {
                return place;
            }
            self.drop_idlest();
            changed.await;
        }
    }

    fn enter_now(&self) -> Option<Place> {
        let mut members = self.inner.members.lock();
        if members.len() >= self.inner.max {
            return None;
        }
        let number = self.inner.turn.fetch_add(1, Ordering::Relaxed);
        let member = Arc::new(Member {
            answering: AtomicUsize::new(0),
            idle_since: AtomicU64::new(number),
            leave: Notify::new(),
        });
        members.insert(number, member.clone());
        Some(Place { number, member, crowd: self.clone() })
    }

    /// Tells the connection that was idle for longest to leave.
    pub fn drop_idlest(&self) {
        let members = self.inner.members.lock();
        let idle = members.values().filter(|member| member.answering.load(Ordering::Acquire) == 0);
        if let Some(idlest) = idle.min_by_key(|member| member.idle_since.load(Ordering::Relaxed)) {
            idlest.leave.notify_one();
        }
    }

    /// Waits until all have left.
    pub async fn empty(&self) {
        loop {
            let changed = self.inner.changed.notified();
            if self.inner.members.lock().is_empty() {
                return;
            }
            changed.await;
        }
    }
}

impl Place {
    /// Waits until this connection is to make room for another.
    pub async fn told_to_leave(&self) {
        self.member.leave.notified().await;
    }

    /// Marks the connection as in use until the mark is dropped.
    pub fn answering(&self) -> Answering {
        self.member.answering.fetch_add(1, Ordering::AcqRel);
        Answering { member: self.member.clone(), crowd: self.crowd.clone() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.crowd.inner.members.lock().remove(&self.number);
        self.crowd.inner.changed.notify_waiters();
    }
}

/// A request that is being answered.
pub struct Answering {
    member: Arc<Member>,
    crowd: Crowd,
}

/// A request whose body may still have to come.
#[derive(Clone)]
pub struct Asking {
    member: Arc<Member>,
    crowd: Crowd,
}

/// A request that waits for its body.
pub struct Waiting(Asking);

impl Asking {
    /// Counts the request as not being answered until the mark is dropped.
    pub fn waiting(&self) -> Waiting {
        self.member.rest(&self.crowd);
        Waiting(self.clone())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.member.answering.fetch_add(1, Ordering::AcqRel);
    }
}

impl Member {
    /// One request less is being answered.
    fn rest(&self, crowd: &Crowd) {
        let turn = crowd.inner.turn.fetch_add(1, Ordering::Relaxed);
        self.idle_since.store(turn, Ordering::Relaxed);
        self.answering.fetch_sub(1, Ordering::AcqRel);
        crowd.inner.changed.notify_waiters();
    }
}

impl Answering {
    /// For the part that reads the body.
    pub fn asking(&self) -> Asking {
        Asking { member: self.member.clone(), crowd: self.crowd.clone() }
    }

    /// A body that counts as being answered until it has been written.
    pub fn body(self, body: Body) -> Body {
        // The closure keeps the mark for as long as there is a body.
        Body::new(body.map_err(move |error| {
            let _ = &self;
            error
        }))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.member.rest(&self.crowd);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn is_told(place: &Place) -> bool {
        tokio::time::timeout(Duration::from_millis(20), place.told_to_leave()).await.is_ok()
    }

    #[tokio::test]
    async fn the_idlest_leaves_and_one_that_is_answered_stays() {
        let crowd = Crowd::new(3);
        let (busy, first, second) = (crowd.enter().await, crowd.enter().await, crowd.enter().await);
        let answering = busy.answering();
        // What has just been answered is less idle than what never asked.
        drop(first.answering());
        assert!(crowd.enter_now().is_none());
        crowd.drop_idlest();
        assert!(is_told(&second).await);
        drop(second);
        let third = crowd.enter().await;
        drop(first);
        let fourth = crowd.enter().await;
        let (_third, _fourth) = (third.answering(), fourth.answering());
        crowd.drop_idlest();
        for place in [&busy, &third, &fourth] {
            assert!(!is_told(place).await);
        }
        // Nobody is idle: the next one waits until somebody is.
        let waiting = tokio::spawn({
            let crowd = crowd.clone();
            async move { crowd.enter().await }
        });
        tokio::task::yield_now().await;
        drop(answering);
        busy.told_to_leave().await;
        drop(busy);
        drop(waiting.await.unwrap());
    }

    #[tokio::test]
    async fn a_request_whose_body_does_not_come_is_idle() {
        let crowd = Crowd::new(2);
        let (sending, done) = (crowd.enter().await, crowd.enter().await);
        let (asking, answering) = (sending.answering(), done.answering());
        let body = asking.asking().waiting();
        drop(done.answering().asking().waiting());
        crowd.drop_idlest();
        assert!(!is_told(&done).await, "its body has come");
        assert!(is_told(&sending).await);
        drop((body, asking, answering));
    }
}
