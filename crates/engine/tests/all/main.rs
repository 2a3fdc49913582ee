//! Engines on every store. One program for all of these tests: each further one would compile the whole engine again.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

mod cases;
mod deaths;
mod deferring;
mod draining;
mod engine;
mod events;
#[cfg(target_os = "linux")]
mod gone;
mod guest;
mod handlers;
mod inputs;
mod isolation;
mod lanes;
mod locked;
mod outages;
mod planning;
mod rejoining;
mod sessions;
mod watching;
mod why;
