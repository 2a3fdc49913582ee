//! Turns "start this attempt" into a process, watches over it, and says how it ended.
//!
//! ```text
//! Attempt ─► plan.rs      templates, environment, private files: what exactly is started
//!         ─► spawn.rs     a child in its own session, registered with the keeper before it executes anything
//!         ─► output.rs    both pipes: masked, capped, in chunks
//!         ─► ending.rs    TERM, grace, KILL, until the group is gone
//!         ─► Report
//! ```
//! Nothing here knows the store, the schedule's timing or whether a retry follows. Start reading at [`Runner::run`]; the
//! process that outlives a killed node is in [`keeper`].

mod attempt;
mod cgroup;
mod ending;
mod environment;
mod error;
mod files;
pub mod keeper;
mod leftovers;
mod mask;
mod node_process;
mod output;
mod plan;
mod processes;
mod removal;
mod runner;
mod spawn;
mod trampoline;

pub use attempt::{Attempt, CancelReceiver, CancelSender, Chunk, Report, Stop, Stream, Usage, cancellation};
pub use cgroup::delegated_cgroup;
pub use error::Error;
pub use keeper::{KeeperHandle, KeeperOptions};
pub use leftovers::{end_leftover, end_leftovers};
pub use node_process::{Room, become_node, close_inherited_descriptors, hide_memory};
pub use plan::build_input;
pub use processes::{ChildRecord, ProcessState, boot_id, pid_ns};
pub use runner::{Progress, Runner, RunnerOptions};
