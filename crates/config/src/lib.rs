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
mod export;
mod file;
mod fragment;
mod keys;
mod load;
mod mask;
mod network;
mod password;
mod problem;
mod reference;
mod schedule;
mod schema;
mod settings;
mod tree;
mod value;

pub use export::export;
pub use fragment::{About, Input, Parsed, agent_keys, parse_agent, parse_schedule, schedule_keys};
pub use load::{Host, Loaded, load, load_text};
pub use network::{Network, NotANetwork};
pub use problem::{Errors, Place, Problem, Severity};
pub use reference::{env_is_written_out, is_written_out, resolve_secret};
pub use schedule::Inherited;
pub use schema::schema;
pub use settings::{Api, Engine, Lane, Log, LogFormat, Rate, Retention, Settings, StoreUrl};

/// What `belfry init` writes: small, commented, and with something to see within ten seconds.
pub const STARTER: &str = include_str!("starter.yaml");

/// What `belfry up --demo` runs.
pub const DEMO: &str = include_str!("demo.yaml");
