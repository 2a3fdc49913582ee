//! Processes as the kernel shows them: who they are, who belongs to an attempt, and how they are signalled.
//!
//! On Linux all of it comes from `/proc`; elsewhere only the process group is known. Everything here blocks for as long
//! as reading `/proc` takes.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The variable that marks every process of an attempt, unless it cleans its environment.
pub(crate) const CHILD_ID: &str = "BELFRY_CHILD_ID";

/// Enough to recognise an attempt's process later, and never to mistake another one for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildRecord {
    /// The process that was started.
    pub pid: i32,
    /// Its process group.
    pub pgid: i32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// Which boot that was.
    pub boot_id: String,
    /// In which pid namespace its pid means something.
    pub pid_ns: String,
    /// The random value of `BELFRY_CHILD_ID` in its environment.
    pub child_id: String,
    /// Its own control group, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
}

impl ChildRecord {
    /// A record of a child that has just been started as the leader of its group.
    pub(crate) fn of(pid: i32, child_id: &str, cgroup: Option<PathBuf>) -> ChildRecord {
        ChildRecord {
            pid,
            pgid: pid,
            start_time: Process::read(pid).map_or(0, |process| process.start_time),
            boot_id: boot_id(),
            pid_ns: pid_ns(),
            child_id: child_id.to_owned(),
            cgroup,
        }
    }
}

/// What the system says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// Nothing: the system does not say, or not to this user.
    Unknown,
    /// Nobody has this pid.
    Gone,
    /// Somebody has it.
    Found {
        /// When it started, in clock ticks since boot.
        start_time: u64,
        /// Whether it still runs: a zombie does not.
        lives: bool,
    },
}

impl ProcessState {
    /// Looks at a process of this pid namespace.
    pub fn of(pid: u32) -> ProcessState {
        let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 0) else { return ProcessState::Unknown };
        match Process::read(pid) {
            Some(process) => ProcessState::Found { start_time: process.start_time, lives: process.lives },
            // Other users' processes may be hidden.
            None if kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH) => ProcessState::Gone,
            None => ProcessState::Unknown,
        }
    }
}

/// The id of this boot; empty where there is none.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Names the pid namespace we live in; empty where there is none.
pub fn pid_ns() -> String {
    fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned()).unwrap_or_default()
}

/// A line of `/proc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub pid: i32,
    pub parent: i32,
    pub group: i32,
    pub start_time: u64,
    /// Still runs, or could: not a zombie that waits for its parent to look.
    pub lives: bool,
}

impl Process {
    pub(crate) fn read(pid: i32) -> Option<Process> {
        Process::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The name in parentheses may itself hold anything, also parentheses.
    fn parse(stat: &[u8]) -> Option<Process> {
        let stat = String::from_utf8_lossy(stat);
        let (head, tail) = stat.rsplit_once(')')?;
        let pid = head.split_once(' ')?.0.parse().ok()?;
        let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
        // A process whose first thread has ended looks like a zombie while its others go on.
        let threads: i32 = fields.get(17)?.parse().ok()?;
        Some(Process {
            pid,
            lives: threads > 1 || !matches!(*fields.first()?, "Z" | "X" | "x"),
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            start_time: fields.get(19)?.parse().ok()?,
        })
    }

    /// Whether it was started with this child id in its environment.
    pub(crate) fn carries(&self, child_id: &str) -> bool {
        self.child_id().is_some_and(|own| own == child_id)
    }

    fn child_id(&self) -> Option<String> {
        let environ = fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        let mut entries = environ.split(|byte| *byte == 0);
        let value = entries.find_map(|entry| entry.strip_prefix(CHILD_ID.as_bytes())?.strip_prefix(b"="))?;
        String::from_utf8(value.to_vec()).ok()
    }
}

/// All processes at one moment. A child id is read when it is asked for: one that matches is ours, whenever it was read.
#[derive(Debug)]
pub(crate) struct Snapshot {
    started_at: Instant,
    processes: Vec<(Process, OnceLock<Option<String>>)>,
}

impl Snapshot {
    pub(crate) fn take() -> Snapshot {
        let started_at = Instant::now();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let processes = pids.filter_map(Process::read).map(|process| (process, OnceLock::new())).collect();
        Snapshot { started_at, processes }
    }

    /// A snapshot that was started after this was called. Whoever waits meanwhile gets the same one, so that a hundred
    /// attempts that end at once do not look a hundred times.
    pub(crate) fn shared() -> Arc<Snapshot> {
        static LAST: Mutex<Option<Arc<Snapshot>>> = Mutex::new(None);
        let called_at = Instant::now();
        let mut last = LAST.lock();
        match &*last {
            Some(snapshot) if snapshot.started_at > called_at => snapshot.clone(),
            _ => last.insert(Arc::new(Snapshot::take())).clone(),
        }
    }
}

/// Whom to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The process group.
    Group,
    /// Also who left it: descendants, and whoever carries the child id.
    Everyone,
}

/// The processes of one attempt. Remembers whom it has seen, because a process whose parent is gone is no longer known
/// as a descendant.
#[derive(Debug)]
pub(crate) struct Family {
    record: ChildRecord,
    /// Whether the group and the leader are surely those of the record.
    group: bool,
    seen: HashSet<(i32, u64)>,
    /// Whether someone was seen outside the group.
    strays: bool,
}

impl Family {
    pub(crate) fn new(record: ChildRecord) -> Family {
        Family { record, group: true, seen: HashSet::new(), strays: false }
    }

    /// Of a record whose leader was not found, so that its group's number may be someone else's by now.
    pub(crate) fn without_group(record: ChildRecord) -> Family {
        Family { group: false, ..Family::new(record) }
    }

    pub(crate) fn record(&self) -> &ChildRecord {
        &self.record
    }

    /// Whether any of them lives. Zombies do not.
    pub(crate) fn lives(&mut self, scope: Scope) -> bool {
        // The usual case, without a look at every process there is.
        if scope == Scope::Group && group_is_empty(self.record.pgid) {
            return false;
        }
        // Reading `/proc` takes time, in which one who forks could slip past; not twice.
        self.lives_in(&Snapshot::shared(), scope)
            || (self.strays && self.lives_in(&Snapshot::shared(), scope))
    }

    pub(crate) fn lives_in(&mut self, snapshot: &Snapshot, scope: Scope) -> bool {
        if cfg!(target_os = "linux") {
            !self.members(snapshot, scope).is_empty()
        } else {
            !group_is_empty(self.record.pgid)
        }
    }

    /// Signals all of them. Whoever is gone meanwhile is no error.
    pub(crate) fn signal(&mut self, signal: Signal, scope: Scope) {
        self.signal_in(&Snapshot::shared(), signal, scope);
    }

    pub(crate) fn signal_in(&mut self, snapshot: &Snapshot, signal: Signal, scope: Scope) {
        let members = self.members(snapshot, scope);
        let ours = self.group_is_ours();
        // A stopped process takes notice of TERM only when it goes on.
        let also = (signal == Signal::SIGTERM).then_some(Signal::SIGCONT);
        for signal in std::iter::once(signal).chain(also) {
            if ours {
                signal_group(self.record.pgid, signal);
            }
            for process in members.iter().filter(|process| !ours || process.group != self.record.pgid) {
                let _ = kill(Pid::from_raw(process.pid), signal);
            }
        }
    }

    /// The leader's number may have been given to another process after our group had ended.
    fn group_is_ours(&self) -> bool {
        self.group
            && Process::read(self.record.pid)
                .is_none_or(|process| process.start_time == self.record.start_time)
    }

    fn members(&mut self, snapshot: &Snapshot, scope: Scope) -> Vec<Process> {
        let ours = self.group_is_ours();
        let own = std::process::id() as i32;
        let mut members: HashSet<i32> = HashSet::new();
        if ours && scope == Scope::Everyone {
            members.insert(self.record.pid);
        }
        // Whoever started before our child is not of its family.
        let all: Vec<_> = snapshot
            .processes
            .iter()
            .filter(|(process, _)| process.start_time >= self.record.start_time && process.pid != own)
            .collect();
        for (process, child_id) in &all {
            let carries =
                || child_id.get_or_init(|| process.child_id()).as_ref() == Some(&self.record.child_id);
            if (ours && process.group == self.record.pgid)
                || (scope == Scope::Everyone
                    && (self.seen.contains(&(process.pid, process.start_time)) || carries()))
            {
                members.insert(process.pid);
            }
        }
        let is_child = |process: &Process, members: &HashSet<i32>| members.contains(&process.parent);
        while scope == Scope::Everyone
            && all.iter().any(|(process, _)| is_child(process, &members) && members.insert(process.pid))
        {
        }
        let found = all.iter().map(|(process, _)| *process).filter(|process| members.contains(&process.pid));
        let found: Vec<Process> = found.collect();
        self.strays |= found.iter().any(|process| process.group != self.record.pgid);
        self.seen.extend(found.iter().map(|process| (process.pid, process.start_time)));
        found.into_iter().filter(|process| process.lives).collect()
    }
}

/// Signals a group, never our own and never all.
pub(crate) fn signal_group(pgid: i32, signal: Signal) {
    if pgid > 1 {
        let _ = killpg(Pid::from_raw(pgid), signal);
    }
}

/// Whether a group has no process at all, not even a zombie.
pub(crate) fn group_is_empty(pgid: i32) -> bool {
    killpg(Pid::from_raw(pgid), None) == Err(Errno::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        let stat = b"42 (a) b) S (c) R 7 41 41 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 9876 1 1";
        let process = Process::parse(stat).unwrap();
        let wanted = Process { pid: 42, parent: 7, group: 41, start_time: 9876, lives: true };
        assert_eq!(process, wanted);
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_still_lives() {
        let stat = |threads: u8| {
            let text = format!("42 (a) Z 7 41 41 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 9876 1 1");
            Process::parse(text.as_bytes()).unwrap().lives
        };
        assert!(stat(2));
        assert!(!stat(1));
    }

    #[test]
    fn a_shared_snapshot_is_not_older_than_the_question() {
        let first = Snapshot::shared();
        let asked_at = Instant::now();
        assert!(Snapshot::shared().started_at >= asked_at);
        assert!(first.started_at < asked_at);
    }
}
