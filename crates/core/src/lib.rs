//! The model of Belfry and every decision it takes, as pure functions: (state, event, now) in, change out.
//!
//! No clock, no waiting, no storage and no randomness comes in here; whoever calls brings the instant and the
//! facts, and commits what comes back. Start reading at `plan.rs`: what becomes of a tick.

pub mod breaker;
pub mod broken;
pub mod budget;
pub mod check;
pub mod definition;
pub mod display;
pub mod edit;
pub mod ending;
pub mod gate;
pub mod hook;
pub mod input;
pub mod model;
pub mod overlap;
pub mod plan;
pub mod reference;
pub mod rescue;
pub mod retry;
pub mod session;
pub mod size;
pub mod suggest;
pub mod template;
pub mod text;
pub mod trigger;
pub mod work;

pub use definition::{AgentDefinition, AgentSpec, DEFAULT_LANES, Schedule, ScheduleDefinition};
pub use model::{
    AgentId, Epoch, NodeId, Reason, RunId, RunState, ScheduleId, SkipRange, SkipReason, Token, TokenKind,
    Trigger,
};
pub use plan::{Facts, Plan, plan};
