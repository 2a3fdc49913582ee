//! The memory that request bodies may take, over all requests. A body takes its share as its bytes arrive, whatever
//! length it announced, and gives it back when the request is answered.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::problem::Problem;

/// The first bytes of a body need no share: small requests pass also while large ones have taken everything. What they
/// take is bounded by the number of connections.
const FREE_BYTES: usize = 16 << 10;
/// Permits count units of this size.
const UNIT_BYTES: usize = 1 << 10;
/// How long a body waits for others to be done.
const WAIT: Duration = Duration::from_secs(1);

/// The memory for bodies.
pub struct Bodies {
    units: usize,
    free: Arc<Semaphore>,
}

/// The share of one request. Clones are the same share; it is given back when the last of them is dropped.
#[derive(Clone, Default)]
pub struct Share(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

impl Bodies {
    pub fn new(bytes_max: usize) -> Bodies {
        let units = bytes_max.div_ceil(UNIT_BYTES);
        Bodies { units, free: Arc::new(Semaphore::new(units)) }
    }

    /// Enlarges a share to a body of so many bytes. A body larger than everything takes everything, and goes alone.
    pub async fn grow(&self, share: &Share, bytes: usize) -> Result<(), Problem> {
        let units = bytes.saturating_sub(FREE_BYTES).div_ceil(UNIT_BYTES).min(self.units);
        let held = share.0.lock().as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let Some(more) = units.checked_sub(held).filter(|more| *more > 0) else { return Ok(()) };
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let taken = tokio::time::timeout(WAIT, self.free.clone().acquire_many_owned(more)).await;
        // The semaphore is never closed.
        let Ok(Ok(permit)) = taken else { return Err(too_many()) };
        let mut held = share.0.lock();
        match held.as_mut() {
            Some(held) => held.merge(permit),
            None => *held = Some(permit),
        }
        Ok(())
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
            bodies.grow(&one, bytes).await.unwrap();
        }
        assert_eq!(bodies.free.available_permits(), 64 - 44);
        assert!(bodies.grow(&other, 60 << 10).await.is_err(), "there is no room for both");
        assert_eq!(bodies.free.available_permits(), 64 - 44, "what was not given is not taken");
        bodies.grow(&small, FREE_BYTES).await.unwrap();
        let clone = one.clone();
        drop(one);
        assert_eq!(bodies.free.available_permits(), 64 - 44);
        drop(clone);
        bodies.grow(&other, 60 << 10).await.unwrap();
        drop(other);
        assert_eq!(bodies.free.available_permits(), 64);
    }

    #[tokio::test]
    async fn a_body_waits_until_another_is_done() {
        let bodies = Bodies::new(64 << 10);
        let (one, other) = (Share::default(), Share::default());
        bodies.grow(&one, 80 << 10).await.unwrap();
        let (waited, ()) = tokio::join!(bodies.grow(&other, 80 << 10), async {
            // By now the other waits.
            tokio::task::yield_now().await;
            drop(one);
        });
        waited.unwrap();
    }

    #[tokio::test]
    async fn a_body_larger_than_everything_goes_alone() {
        let bodies = Bodies::new(64 << 10);
        let (one, other) = (Share::default(), Share::default());
        bodies.grow(&one, 1 << 30).await.unwrap();
        bodies.grow(&one, 2 << 30).await.unwrap();
        assert!(bodies.grow(&other, 20 << 10).await.is_err());
    }
}
