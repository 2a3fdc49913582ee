//! This process as a node: descriptors, file modes and memory that its children and other users must not reach, and how many
//! descriptors there are for connections and runs.
//!
//! What a node changes for itself (the soft limit of open files, the umask) its children get back: the trampoline sets both
//! again before it executes the program.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};

/// Descriptors of a node without a connection and without a run: standard streams, listener, store, keeper, files.
const NODE_FILES: u64 = 64;
/// Descriptors that one run costs its node while it starts: two pipes, the process and the socket to the trampoline.
/// Once it runs it costs one less.
const RUN_FILES: u64 = 4;
/// More connections than this are of no use to anybody.
const CONNECTIONS_MAX: u64 = 8192;

/// What this process was started with and has changed since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inherited {
    /// The soft limit of open files.
    pub open_files: u64,
    /// The mode bits that files are made without.
    pub umask: Mode,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();

/// How many descriptors a node has for its two large users. Together with what the node itself needs they stay below its
/// limit, so neither can take what the other needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Connections at once.
    pub connections_max: usize,
    /// Runs at once.
    pub runs_max: u32,
}

impl Room {
    /// Half of the descriptors are for connections, at most 8192; the rest is for the node and its runs.
    pub fn of(open_files: u64) -> Room {
        let connections = (open_files / 2).min(CONNECTIONS_MAX);
        let runs = (open_files - connections).saturating_sub(NODE_FILES) / RUN_FILES;
        Room {
            connections_max: usize::try_from(connections).unwrap_or(usize::MAX).max(1),
            runs_max: u32::try_from(runs).unwrap_or(u32::MAX).max(1),
        }
    }
}

/// Makes this process a node. It may open as many files as its hard limit allows, the files that it makes are for their owner
/// alone, and no other process of the same user can read its memory or its environment (on Linux). Process-wide;
/// children that are started through a keeper get the limit and the umask that this process was started with.
pub fn become_node() -> io::Result<Room> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let open_files = raise_open_files(soft, hard);
    let before = umask(Mode::from_bits_truncate(0o077));
    // A process becomes a node once; what it finds the second time is its own doing.
    let _ = INHERITED.set(Inherited { open_files: soft, umask: before });
    hide_memory();
    Ok(Room::of(open_files))
}

/// What children get back; none where nothing was changed.
pub(crate) fn inherited() -> Option<Inherited> {
    INHERITED.get().copied()
}

/// Gives a process back what its node was started with.
pub(crate) fn give_back(inherited: Inherited) -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, inherited.open_files.min(hard), hard)?;
    umask(inherited.umask);
    Ok(())
}

/// Raises the soft limit to the hard one. Gives what holds afterwards: a system that refuses leaves it as it is.
fn raise_open_files(soft: u64, hard: u64) -> u64 {
    // macOS reports no hard limit, and refuses more than this.
    let wanted = if cfg!(target_os = "macos") { hard.min(10_240) } else { hard };
    if wanted > soft && setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok() { wanted } else { soft }
}

/// Closes to others of the same user what `/proc` shows of this process, and `ptrace`; it leaves no core dump either. Linux
/// does not refuse it; other systems do not have it.
pub fn hide_memory() {
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_dumpable(false);
}

/// Closes what the parent left open beyond the three standard streams, so that no child gets it. Call it first in `main`,
/// before anything is opened.
pub fn close_inherited_descriptors() {
    let folder = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
    let Ok(entries) = Path::new(folder).read_dir() else { return };
    let open: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        // The folder's own is closed already.
        let _ = nix::unistd::close(descriptor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_runs_and_the_node_fit_into_the_limit() {
        for open_files in [0, 1, 20, 128, 256, 1024, 4096, 20_000, 1 << 30] {
            let room = Room::of(open_files);
            let needed = room.connections_max as u64 + u64::from(room.runs_max) * RUN_FILES + NODE_FILES;
            assert!(needed <= open_files.max(NODE_FILES * 2 + RUN_FILES * 2), "{open_files}: {room:?}");
        }
        assert_eq!(Room::of(1024), Room { connections_max: 512, runs_max: 112 });
    }
}
