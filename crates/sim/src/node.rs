//! A simulated node: the real driver, with a simulated process, keeper and runner around it.

use std::collections::VecDeque;
use std::sync::Arc;

use belfry::testing::{Driver, Input};
use belfry::{NodeId, RunId};
use belfry_core::retry::Outcome;
use belfry_core::{Epoch, ScheduleId};

use crate::slow::Slow;
use crate::world::{Micros, NodeClock};

/// Whether the process of a node lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It does.
    Up,
    /// It is stopped (SIGSTOP). Calls that were on their way reach the store, or not.
    Frozen {
        /// Whether they do.
        calls_land: bool,
    },
    /// It does not.
    Down,
}

/// A node of the cluster: a process that comes and goes.
pub struct SimNode {
    /// Grows with each start of the process. What belongs to an earlier life is ignored.
    pub lives: u64,
    /// Whether the process lives.
    pub life: Life,
    /// The driver, while the process lives.
    pub driver: Option<Driver>,
    /// Its clock.
    pub clock: Arc<NodeClock>,
    /// How it reaches the store.
    pub store: Arc<Slow>,
    /// When the process started.
    pub started_at: Micros,
    /// Inputs that came while it was frozen.
    pub inbox: VecDeque<Input>,
    /// Tasks that are to be polled once it is thawed.
    pub stalled: Vec<u64>,
    /// When its driver wants to be woken, and the place of that among other events of the same instant.
    pub wakes_at: Option<(Micros, u64)>,
    /// A hint is on its way.
    pub is_hinted: bool,
    /// It is frozen for this time when it claims next, before its claim reaches the store.
    pub freezes: Option<Micros>,
    /// Until when the keeper lets children run.
    pub keeper_until: Micros,
}

/// A process that an attempt has started.
#[derive(Debug, Clone)]
pub struct Process {
    /// The node that started it.
    pub place: usize,
    /// The life of that node.
    pub lives: u64,
    /// The id of the node at that time.
    pub node: NodeId,
    /// The run.
    pub run: RunId,
    /// The claim.
    pub epoch: Epoch,
    /// `agent/schedule`.
    pub name: String,
    /// The agent.
    pub agent: String,
    /// The schedule.
    pub schedule: ScheduleId,
    /// The command.
    pub command: String,
    /// Its lane when it started.
    pub lane: String,
    /// The key of its session, if it is of one.
    pub session: Option<String>,
    /// When its run was claimed.
    pub claimed_at: Micros,
    /// How it will end, unless something else ends it.
    pub outcome: Outcome,
    /// Changes whenever its end is set anew.
    pub ending: u64,
    /// It was told to end.
    pub is_stopping: bool,
}

impl Process {
    /// Whether it is a run of a session.
    pub fn is_session(&self) -> bool {
        self.session.is_some()
    }
}
