//! Which instants come after this one?
//!
//! Everything here is pure: no clock, no waiting, no state but what is known of each time zone. A [`Timing`] joins a kind (`every`, `cron`, `at`,
//! `after`), a [`Zone`], a [`Window`] and a [`Jitter`], and answers with [`Tick`]s. The planner, the API, the
//! command line and the dashboard all ask the same function, so a preview is what will happen.
//!
//! ```
//! use belfry_time::{Cron, Timing, Zone};
//!
//! let zone = Zone::get("America/New_York")?;
//! let timing = Timing::cron(Cron::parse("30 2 * * *")?, zone).build()?;
//!
//! // On 8 March 2026 the clocks go from 02:00 to 03:00: the tick moves to the end of the gap.
//! let tick = timing.next("2026-03-08T01:00:00-05:00".parse()?).unwrap();
//! assert_eq!(tick.tick_at, "2026-03-08T03:00:00-04:00".parse()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Start reading at `timing.rs`; the daylight-saving rules are in `cron/next.rs`.

mod at;
mod calendar;
mod civil;
mod cron;
mod duration;
mod error;
mod every;
mod jitter;
mod timing;
mod window;
mod zone;

pub use at::parse_instant;
pub use cron::{Cron, Dst, Field, Fold, Gap};
pub use duration::{format_duration, parse_duration};
pub use error::{Error, ErrorKind};
pub use every::{Anchor, Every};
pub use jitter::{Jitter, hashed_delay};
pub use timing::{Kind, Shift, Tick, Ticks, Timing, TimingBuilder};
pub use window::{Allowed, Window};
pub use zone::Zone;

// The instants and durations in this crate's interface are jiff's.
pub use jiff::{SignedDuration, Timestamp};
