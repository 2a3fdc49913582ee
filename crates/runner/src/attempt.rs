//! What goes into the runner and what comes out. Plain data.

use std::sync::Arc;

use belfry_core::input::{Given, StoredPayload};
use belfry_core::model::{Epoch, NodeId, Reason, RunId};
use belfry_core::retry::Outcome;
pub use belfry_core::session::RunUsage as Usage;
use belfry_core::work::Work;
use belfry_core::{AgentDefinition, ScheduleDefinition};
use belfry_time::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

use crate::error::Error;

/// One attempt to start.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// The run it is an attempt of.
    pub run: RunId,
    /// The claim it runs under.
    pub epoch: Epoch,
    /// Which attempt of the run, from 1.
    pub attempt: u32,
    /// The node it runs on.
    pub node: NodeId,
    /// The agent's name.
    pub agent: Arc<str>,
    /// The schedule's name.
    pub schedule: Arc<str>,
    /// The schedule's command; a key of the agent's `commands`, or just a value.
    pub command: String,
    /// The nominal instant, where a tick made the run.
    pub tick_at: Option<Timestamp>,
    /// The key of its session, where a message made the run.
    pub session: Option<String>,
    /// When the schedule's last run that completed ended.
    pub last_success_at: Option<Timestamp>,
    /// The prompt that came with the run, never a template.
    pub prompt: Option<String>,
    /// The payload that came with the run.
    pub payload: StoredPayload,
    /// Names the run in every log line and in the child's `TRACEPARENT`.
    pub trace_id: Uuid,
    /// What is started, and how it is judged.
    pub agent_definition: Arc<AgentDefinition>,
    /// Of which schedule: its prompt, its payload and its time zone.
    pub schedule_definition: Arc<ScheduleDefinition>,
}

impl Attempt {
    /// What is started, and how it is judged.
    pub fn work(&self) -> &Work {
        &self.agent_definition.work
    }

    /// What the attempt is given. Made anew each time, because it may take much memory.
    pub fn given(&self) -> Result<Given, Error> {
        let payload = self.payload.read().map_err(Error::Action)?;
        Ok(Given::of(self.prompt.as_deref(), payload, &self.schedule_definition, self.work()))
    }
}

/// How an attempt ended. None of its process group lives when this is returned.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What `belfry_core::retry::verdict` decides on.
    pub outcome: Outcome,
    /// The code, where the program ended by itself.
    pub exit_code: Option<i32>,
    /// What went wrong, in a sentence; secrets are masked.
    pub error: Option<String>,
    /// What the program wrote into its result file, or why that was not used.
    pub summary: Option<String>,
    /// What the program says it used.
    pub usage: Option<Usage>,
}

/// Which pipe bytes came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Some output, at most 64 KiB, masked. Any bytes: not always whole lines, nor UTF-8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Where it came from.
    pub stream: Stream,
    /// What it is.
    pub bytes: Vec<u8>,
}

/// Why an attempt should end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The run is cancelled: TERM, grace, KILL.
    Cancel(Reason),
    /// The node shuts down: TERM, grace, KILL.
    Shutdown,
    /// The node shuts down at once: KILL. Also cuts short a grace that has begun.
    ShutdownNow,
    /// The node's lease is about to end, and others may start the run: KILL, at once as well. Unlike a shutdown it counts as a failure.
    LeaseLost,
}

impl Stop {
    /// Whether there is no time for a grace.
    pub fn is_at_once(self) -> bool {
        matches!(self, Stop::ShutdownNow | Stop::LeaseLost)
    }
}

/// Asks an attempt to end, at any time.
pub type CancelSender = watch::Sender<Option<Stop>>;
/// Where an attempt hears of it. A sender that is dropped without a word asks for nothing.
pub type CancelReceiver = watch::Receiver<Option<Stop>>;

/// A pair that says nothing yet.
pub fn cancellation() -> (CancelSender, CancelReceiver) {
    watch::channel(None)
}
