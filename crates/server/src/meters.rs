//! What is counted, from what the engine tells.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use belfry::Event;
use belfry::event::Name;

/// What is counted.
pub struct Meters {
    store_is_well: AtomicBool,
}

impl Meters {
    pub fn new() -> Meters {
        Meters { store_is_well: AtomicBool::new(true) }
    }

    /// Whether the engine's last word about its store was a good one.
    pub fn store_is_well(&self) -> bool {
        self.store_is_well.load(Ordering::Relaxed)
    }

    /// Takes note of a request.
    pub fn request(&self, _operation: &str, _status: StatusCode, _took: Duration) {}

    /// Takes note of what happened.
    pub fn note(&self, event: &Event) {
        match event.event {
            Name::StoreUnavailable => self.store_is_well.store(false, Ordering::Relaxed),
            Name::StoreAvailable => self.store_is_well.store(true, Ordering::Relaxed),
            _ => {}
        }
    }
}
