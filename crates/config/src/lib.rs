//! From YAML files to definitions, with errors that point at the line.
//!
//! [`load`] reads a main file and what it includes. What is wrong with the files as such (syntax, unknown keys, wrong
//! types) refuses them as a whole, with every problem listed; a schedule whose timing means nothing is `invalid` alone.
//! [`parse_schedule`] reads one schedule with the same texts, for the command line and the API; [`export`] writes what
//! [`load`] reads. Nothing here knows the clock, the store or the terminal.
//!
//! Start reading at `load.rs`; every key is in `keys.rs`.

mod agent;
mod check;
mod context;
mod digest;
mod file;
mod keys;
mod load;
mod problem;
mod reference;
mod schedule;
mod settings;
mod tree;
mod value;

pub use load::{Host, Loaded, load};
pub use problem::{Errors, Place, Problem, Severity};
pub use schedule::Inherited;
pub use settings::{Api, Engine, Lane, Log, LogFormat, Rate, Retention, Settings, StoreUrl};
