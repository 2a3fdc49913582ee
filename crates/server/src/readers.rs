//! Requests that hold their connection for long: readers of events, readers that follow what a run writes, and requests
//! that wait for a run. Together they hold three quarters of the connections at most, so that short requests find one.
//!
//! No token holds more than a quarter of the places of a kind, and an eighth is kept for the local token: whoever has a
//! token of a small scope cannot keep the owner out.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::guard::{ANONYMOUS, Actor, LOCAL};
use crate::problem::Problem;

/// Readers that follow what runs write; each looks four times a second.
const FOLLOWERS_MAX: usize = 512;
/// Readers of events.
const LISTENERS_MAX: usize = 4096;

/// The places for all of them.
pub struct Readers {
    places: Arc<Seats>,
    followers: Arc<Seats>,
    listeners: Arc<Seats>,
}

/// The places of one kind.
struct Seats {
    /// What a reader does on one of these, for messages.
    what: &'static str,
    max: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    total: usize,
    by_actor: HashMap<String, usize>,
}

/// One of the places of a kind. Dropping it gives the place back.
pub struct Seat {
    seats: Arc<Seats>,
    actor: String,
}

/// A place of one of them. It is kept until the connection has been left: also after the reader was given up.
pub struct Place(#[allow(dead_code, reason = "dropping it gives the place back")] Seat);

impl Seats {
    fn new(what: &'static str, max: usize) -> Arc<Seats> {
        Arc::new(Seats { what, max, taken: Mutex::default() })
    }

    fn take(self: &Arc<Seats>, actor: &Actor) -> Result<Seat, Problem> {
        let mut taken = self.taken.lock();
        let held = taken.by_actor.get(&actor.id).copied().unwrap_or(0);
        // Where no token is needed, everybody on this host is the owner.
        let (all, own) = match [LOCAL, ANONYMOUS].contains(&actor.id.as_str()) {
            true => (self.max, self.max),
            false => ((self.max - self.max / 8).max(1), (self.max / 4).max(1)),
        };
        if taken.total >= all || held >= own {
            let detail = match held >= own {
                true => format!("{held} requests with this token {} already, and no more may", self.what),
                false => format!("{} requests {} already, and no more may", taken.total, self.what),
            };
            return Err(Problem::unavailable("too_many_readers", detail)
                .way_out("try again when others have left, or ask now and then without waiting"));
        }
        taken.total += 1;
        taken.by_actor.insert(actor.id.clone(), held + 1);
        Ok(Seat { seats: self.clone(), actor: actor.id.clone() })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock();
        taken.total -= 1;
        if let Some(held) = taken.by_actor.get_mut(&self.actor) {
            *held -= 1;
            if *held == 0 {
                taken.by_actor.remove(&self.actor);
            }
        }
    }
}

impl Readers {
    pub fn new(connections_max: usize) -> Readers {
        let places_max = (connections_max - connections_max / 4).max(1);
        Readers {
            places: Seats::new("listen, follow or wait", places_max),
            followers: Seats::new("follow what runs write", FOLLOWERS_MAX),
            listeners: Seats::new("listen to events", LISTENERS_MAX),
        }
    }

    /// One more that follows what a run writes, while the seat is held.
    pub fn follow(&self, actor: &Actor) -> Result<(Seat, Place), Problem> {
        Ok((self.followers.take(actor)?, self.wait(actor)?))
    }

    /// One more that listens to events, while the seat is held.
    pub fn listen(&self, actor: &Actor) -> Result<(Seat, Place), Problem> {
        Ok((self.listeners.take(actor)?, self.wait(actor)?))
    }

    /// One more that waits for a run.
    pub fn wait(&self, actor: &Actor) -> Result<Place, Problem> {
        self.places.take(actor).map(Place)
    }

    /// How many listen to events.
    pub fn listening(&self) -> usize {
        self.listeners.taken.lock().total
    }
}

#[cfg(test)]
mod tests {
    use belfry_store::Scope;

    use super::*;

    fn actor(id: &str) -> Actor {
        Actor { id: id.into(), scope: Scope::Read }
    }

    #[test]
    fn all_kinds_share_three_quarters_of_the_connections() {
        let (readers, local) = (Readers::new(8), actor(LOCAL));
        let held = (readers.listen(&local).unwrap(), readers.follow(&local).unwrap());
        let waiting: Vec<_> = std::iter::from_fn(|| readers.wait(&local).ok()).collect();
        assert_eq!(waiting.len(), 4);
        assert!(readers.listen(&local).is_err() && readers.follow(&local).is_err());
        assert_eq!(readers.listening(), 1, "a reader that was refused is not counted");
        drop(held);
        assert!(readers.follow(&local).is_ok() && readers.listen(&local).is_ok());
        assert!(Readers::new(1).wait(&actor("one")).is_ok());
    }

    #[test]
    fn no_token_keeps_others_out_and_none_keeps_the_local_one_out() {
        let readers = Readers::new(8192);
        let follow = |id: &str| -> Vec<_> {
            let actor = actor(id);
            std::iter::from_fn(|| readers.follow(&actor).ok()).collect()
        };
        let one = follow("one");
        assert_eq!(one.len(), FOLLOWERS_MAX / 4);
        let others: Vec<_> = (0..10).flat_map(|n| follow(&n.to_string())).collect();
        assert_eq!(one.len() + others.len(), FOLLOWERS_MAX - FOLLOWERS_MAX / 8);
        let local = follow(LOCAL);
        assert_eq!(local.len(), FOLLOWERS_MAX / 8);
        drop((one, others, local));
        assert!(readers.followers.taken.lock().by_actor.is_empty(), "who has left is forgotten");
    }
}
