//! The keeper: a small process of the same binary that ends a node's children when the node no longer can, because it was
//! killed or frozen, or lost its lease.
//!
//! `protocol.rs` is what node and keeper say to each other, `handle.rs` the node's side, `watch.rs` the keeper itself. The
//! keeper has no store, no configuration and no log; it knows process groups, child ids and one instant.

mod handle;
mod protocol;
mod watch;

use std::process::ExitCode;

pub use handle::{KeeperHandle, KeeperOptions};

/// The first argument of a process that is not meant to be a node.
const HIDDEN: &str = "__belfry";
/// The second, for the keeper.
const KEEP: &str = "keep";
/// The second, for a child that waits to become its program.
const EXECUTE: &str = "execute";

/// Call this first in `main`: if this process was started by a node as its keeper, or as a child that waits to become its
/// program, it does that and gives the exit code. Otherwise the process is what it seems to be.
///
/// ```
/// fn main() -> std::process::ExitCode {
///     if let Some(code) = belfry_runner::keeper::main_if_asked() {
///         return code;
///     }
///     // … the program itself …
///     std::process::ExitCode::SUCCESS
/// }
/// ```
pub fn main_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != HIDDEN {
        return None;
    }
    match arguments.next()?.to_str()? {
        KEEP => Some(keeper_main()),
        EXECUTE => Some(crate::trampoline::main()),
        _ => None,
    }
}

/// Is the keeper, until its node is gone and all its children are.
pub fn keeper_main() -> ExitCode {
    watch::main()
}
