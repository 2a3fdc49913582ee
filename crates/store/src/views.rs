//! What goes into the verbs that people and the engine read and edit with, and what comes out.

use std::sync::Arc;

use belfry_core::{AgentDefinition, AgentId, Epoch, RunId, Schedule, ScheduleId};
use belfry_time::Timestamp;

/// The source of what was made through the API or the command line. Files never touch it, nor it what files own.
pub const API: &str = "api";

/// What it takes to start a run of a schedule, and to arm the schedule at its end.
#[derive(Debug, Clone)]
pub struct Definitions {
    /// Which.
    pub schedule: ScheduleId,
    /// Whose.
    pub agent: AgentId,
    /// `agent/schedule`.
    pub name: Arc<str>,
    /// The agent's name.
    pub agent_name: Arc<str>,
    /// Changes with each edit of the agent.
    pub agent_revision: i64,
    /// What the agent is, now.
    pub agent_definition: Arc<AgentDefinition>,
    /// What the schedule is, or why it cannot be read.
    pub compiled: Result<Arc<Schedule>, Arc<str>>,
    /// Its first tick.
    pub origin: Option<Timestamp>,
    /// The run whose end arms it.
    pub waits_for: Option<RunId>,
}

/// What became of a schedule that was put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Put {
    /// It is new.
    Added(ScheduleId),
    /// Its definition changed.
    Changed(ScheduleId),
    /// It was so already.
    Unchanged(ScheduleId),
    /// There is no such agent.
    NoAgent,
    /// It belongs to this source, which alone may change it.
    OwnedBy(String),
}

/// What became of a schedule that was to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    /// It is gone.
    Gone {
        /// So many of its runs were waiting, and have ended.
        cancelled: u32,
    },
    /// It belongs to this source, which alone may remove it.
    OwnedBy(String),
    /// There is no such schedule.
    NotFound,
}

/// Where a piece of output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
    /// Belfry's own words: what was cut, how it ended.
    Note,
}

impl Stream {
    pub(crate) fn code(self) -> i16 {
        match self {
            Stream::Out => 0,
            Stream::Err => 1,
            Stream::Note => 2,
        }
    }

    pub(crate) fn from_code(code: i16) -> Stream {
        match code {
            0 => Stream::Out,
            1 => Stream::Err,
            _ => Stream::Note,
        }
    }
}

/// A piece of a run's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChunk {
    /// Its place. Grows over all attempts of a run; those of one claim begin at [`OutputChunk::first_seq`].
    pub seq: u64,
    /// Which attempt wrote it, from 1.
    pub attempt: u32,
    /// Where it came from.
    pub stream: Stream,
    /// What was written.
    pub bytes: Vec<u8>,
}

impl OutputChunk {
    /// The place of the first piece of a claim: after all pieces of the claims before it.
    pub fn first_seq(epoch: Epoch) -> u64 {
        u64::from(epoch.max(0).unsigned_abs()) << 32
    }
}

/// More pieces of output than this are not given at once.
pub(crate) const OUTPUT_CHUNKS_MAX: usize = 1024;
