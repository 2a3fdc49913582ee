//! Belfry as a library: it decides when work runs, how much of it at once, and what happens when it goes wrong.
//!
//! ```text
//! Engine::start ─► shell.rs    brings the time, does what is asked, carries answers back
//!                   └► driver/    one synchronous step: every loop, every timer
//!                       └► belfry_core  every decision
//! ```
//! Nothing here waits but the shell, and nothing reads a clock but `clock.rs`: a simulator can drive the same driver.

mod about;
mod agent;
pub mod api;
mod api_nodes;
mod api_sessions;
mod backfill;
mod carry;
mod clock;
pub mod driver;
mod engine;
mod error;
pub mod event;
mod handler;
mod machine;
mod node;
mod output;
mod relay;
mod session;
mod shell;
mod standing;
mod why;

pub use agent::{AgentBuilder, chat, cron, every};
pub use api::Why;
pub use backfill::{Backfill, Backfilled, backfill};
pub use belfry_core::definition::{Options as ScheduleOptions, When};
pub use belfry_core::session::{Mode, Usage};
pub use belfry_core::{AgentDefinition, AgentSpec, NodeId, RunId, RunState, ScheduleDefinition};
pub use belfry_runner::keeper::main_if_asked;
pub use belfry_store::{
    AnyStore, Error as StoreError, Expect, LaneRecord, LaneSettings, PutAgent, Removed, RunRecord,
    ScheduleRecord, SessionDone, SessionVerb, Snapshot, SnapshotFilter,
};
pub use belfry_time::{SignedDuration, Timestamp};
pub use carry::{carry_out, fence};
pub use clock::{Clock, ManualClock, Time};
pub use driver::{GUEST, Options, default_lanes};
pub use engine::{
    Builder, Engine, Requested, RunRequest, State, Status, StopOptions, enqueue, new_run_id, prepare,
    request_run,
};
pub use error::Error;
pub use event::Event;
pub use handler::{Context, HandlerError};
pub use node::{drain, host};
pub use session::{
    Chat, Made, Reply, SendOptions, Sent, Taken, change_session, find_chat, is_lane_name, lanes, send,
};
pub use standing::{
    Resume, Resumed, clock_back, exhausted_words, is_expired, open_ranges, past_words, refuse_unreadable,
    resume,
};
pub use why::{Decision, skip_words, why, why_at};
