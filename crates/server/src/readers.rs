//! Requests that hold their connection for long: readers of events, readers that follow what a run writes, and requests
//! that wait for a run. Together they hold three quarters of the connections at most, so that short requests find one.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::problem::Problem;

/// Readers that follow what runs write; each looks four times a second.
const FOLLOWERS_MAX: usize = 512;
/// Readers of events.
const LISTENERS_MAX: usize = 4096;

/// The places for all of them.
pub struct Readers {
    places: Arc<Semaphore>,
    places_max: usize,
    followers: Arc<Semaphore>,
    listeners: Arc<Semaphore>,
}

/// A place of one of them. It is kept until the connection has been left: also after the reader was given up.
pub struct Place(#[allow(dead_code, reason = "dropping it gives the place back")] OwnedSemaphorePermit);

impl Readers {
    pub fn new(connections_max: usize) -> Readers {
        let places_max = (connections_max - connections_max / 4).clamp(1, Semaphore::MAX_PERMITS);
        Readers {
            places: Arc::new(Semaphore::new(places_max)),
            places_max,
            followers: Arc::new(Semaphore::new(FOLLOWERS_MAX)),
            listeners: Arc::new(Semaphore::new(LISTENERS_MAX)),
        }
    }

    /// One more that follows what a run writes, while the permit is held.
    pub fn follow(&self) -> Result<(OwnedSemaphorePermit, Place), Problem> {
        let permit = self.followers.clone().try_acquire_owned();
        Ok((permit.map_err(|_| too_many("follow what runs write", FOLLOWERS_MAX))?, self.wait()?))
    }

    /// One more that listens to events, while the permit is held.
    pub fn listen(&self) -> Result<(OwnedSemaphorePermit, Place), Problem> {
        let permit = self.listeners.clone().try_acquire_owned();
        Ok((permit.map_err(|_| too_many("listen to events", LISTENERS_MAX))?, self.wait()?))
    }

    /// One more that waits for a run.
    pub fn wait(&self) -> Result<Place, Problem> {
        let place = self.places.clone().try_acquire_owned();
        place.map(Place).map_err(|_| too_many("listen, follow or wait", self.places_max))
    }

    /// How many listen to events.
    pub fn listening(&self) -> usize {
        LISTENERS_MAX.saturating_sub(self.listeners.available_permits())
    }
}

fn too_many(what: &str, max: usize) -> Problem {
    Problem::unavailable("too_many_readers", format!("{max} requests {what} already, and no more may"))
        .way_out("try again when others have left, or ask now and then without waiting")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_share_three_quarters_of_the_connections() {
        let readers = Readers::new(8);
        let held = (readers.listen().unwrap(), readers.follow().unwrap());
        let waiting: Vec<_> = std::iter::from_fn(|| readers.wait().ok()).collect();
        assert_eq!(waiting.len(), 4);
        assert!(readers.listen().is_err() && readers.follow().is_err());
        assert_eq!(readers.listening(), 1, "a reader that was refused is not counted");
        drop(held);
        assert!(readers.follow().is_ok() && readers.listen().is_ok());
        assert!(Readers::new(1).wait().is_ok());
    }
}
