//! Ids of runs and nodes, and what tells the bodies of repeated requests apart.

use std::sync::LazyLock;

use belfry_core::RunId;
use belfry_time::Timestamp;
use parking_lot::Mutex;
use uuid::{ContextV7, Uuid};

/// An id for a new run, which sorts by the store's clock.
pub fn new_run_id(now: Timestamp) -> RunId {
    RunId(new_id(now))
}

/// An id that sorts by the store's clock, and among those of one millisecond in the order of their making.
pub(crate) fn new_id(now: Timestamp) -> Uuid {
    static CONTEXT: LazyLock<Mutex<ContextV7>> = LazyLock::new(|| Mutex::new(ContextV7::new()));
    let millis = u64::try_from(now.as_millisecond()).unwrap_or(0);
    let nanos = (millis % 1000) as u32 * 1_000_000;
    Uuid::new_v7(uuid::Timestamp::from_unix(&*CONTEXT.lock(), millis / 1000, nanos))
}

/// Tells bodies apart that carry one key; not meant to withstand an attack.
pub(crate) fn hash(body: &[u8]) -> Vec<u8> {
    let mut hash = [0xcbf2_9ce4_8422_2325_u64, 0x8422_2325_cbf2_9ce4];
    for (n, byte) in body.iter().enumerate() {
        let lane = &mut hash[n % 2];
        *lane = (*lane ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash.iter().flat_map(|half| half.to_be_bytes()).chain((body.len() as u64).to_be_bytes()).collect()
}
