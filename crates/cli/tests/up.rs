//! `belfry up` from outside: real processes, real signals, both stores.
//!
//! What the children did is read from a log that only they write; what the server says is checked line by line.

#![allow(clippy::unwrap_used)]

#[path = "outside/mod.rs"]
mod support;

#[path = "up/clock.rs"]
mod clock;
#[path = "up/closed.rs"]
mod closed;
#[path = "up/descriptors.rs"]
mod descriptors;
#[path = "up/disk.rs"]
mod disk;
#[path = "up/ending.rs"]
mod ending;
#[path = "up/failing.rs"]
mod failing;
#[path = "up/frozen.rs"]
mod frozen;
#[path = "up/lines.rs"]
mod lines;
#[path = "up/output.rs"]
mod output;
#[path = "up/poison.rs"]
mod poison;
#[path = "up/reloading.rs"]
mod reloading;
#[path = "up/sharing.rs"]
mod sharing;
#[path = "up/starting.rs"]
mod starting;
#[path = "up/stranger.rs"]
mod stranger;
