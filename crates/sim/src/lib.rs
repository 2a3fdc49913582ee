//! A simulator: several nodes of the real driver on the store in memory, with clocks, a runner, a keeper and a network that
//! are simulated. One seed gives one life of some weeks, drawn at random: schedules of all kinds, everything that people
//! do to them, and everything that goes wrong. [`Sim::run`] is the place to start reading.
//!
//! A life has two phases. In the first, anything may happen, and checks that must hold at every moment are made. Then
//! everything heals, and what can run must run: every tick has exactly one result, and nothing waits for ever.

mod account;
mod all;
mod attempts;
mod beside;
mod draw;
mod node;
mod people;
mod random;
mod sim;
mod slow;
mod world;

pub use all::{Noticed, POSTGRES_EVERY, SQLITE_EVERY, Stores, Summary, live_all, notice, notice_all};
pub use beside::Other;
pub use draw::Params;
pub use people::{impossible, states, verbs};
pub use sim::{Report, Sim};
