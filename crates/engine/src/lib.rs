//! Belfry as a library: it decides when work runs, how much of it at once, and what happens when it goes wrong.
//!
//! ```text
//! Engine::start ─► shell.rs    brings the time, does what is asked, carries answers back
//!                   └► driver/    one synchronous step: every loop, every timer
//!                       └► belfry_core  every decision
//! ```
//! Nothing here waits but the shell, and nothing reads a clock but `clock.rs`: a simulator can drive the same driver.

mod about;
mod access;
mod agent;
pub mod api;
mod api_nodes;
mod api_sessions;
mod backfill;
mod carry;
mod clock;
mod driver;
mod edit;
mod engine;
mod error;
pub mod event;
mod handler;
mod hook;
mod ids;
mod lane;
mod limits;
mod machine;
mod node;
mod output;
mod relay;
mod requests;
mod runs;
mod session;
mod shell;
mod standing;
mod why;

pub use agent::{AgentBuilder, chat, cron, every};
pub use api::Why;
pub use backfill::{Backfill, Backfilled};
pub use belfry_core::check::Check;
pub use belfry_core::definition::{Options as ScheduleOptions, When};
pub use belfry_core::session::{Mode, Usage};
pub use belfry_core::{
    AgentDefinition, AgentSpec, NodeId, Reason, RunId, RunState, ScheduleDefinition, SkipRange, SkipReason,
    Trigger,
};
pub use belfry_runner::keeper::main_if_asked;
pub use belfry_runner::{Attempt, KeeperHandle};
pub use belfry_store::{
    AgentRecord, AnyStore, Applied, BreakerEntry, BreakerRecord, Counts, Error as StoreError, Expect,
    LaneRecord, LaneSettings, Page, Put, PutAgent, Reader, Removed, RunFilter, RunRecord, ScheduleFilter,
    ScheduleRecord, SessionDone, SessionFilter, SessionRecord, SessionVerb, Snapshot, SnapshotFilter,
    StatusKind,
};
pub use belfry_time::{SignedDuration, Timestamp};
pub use clock::{Clock, ManualClock, Time};
pub use driver::{GUEST, Keep, Options, default_lanes};
pub use engine::{Builder, Engine, State, Status, StopOptions};
pub use error::Error;
pub use event::Event;
pub use handler::{Context, HandlerError};
pub use hook::Webhook;
pub use lane::is_lane_name;
pub use node::host;
pub use runs::{Cancelling, Requested, RunRequest};
pub use session::{Reply, SendOptions, Sent, Taken};
pub use standing::{
    Resume, Resumed, clock_back, exhausted_words, is_expired, open_ranges, past_words, refuse_unreadable,
};
pub use why::{Decision, skip_words};

/// What the simulator and tests drive by hand: the loops of a node, and commands on a store without an engine.
#[cfg(feature = "testing")]
pub mod testing {
    pub use crate::carry::{carry_out, fence};
    pub use crate::driver::*;
    pub use crate::ids::new_run_id;
    pub use crate::requests::prepare;
    pub use crate::standing::resume;
    pub use crate::why::{why, why_at};
}
