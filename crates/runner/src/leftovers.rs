//! Ends what a node of this host has left behind: before its runs are rescued here, and only what is surely its own.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use belfry_core::model::NodeId;
use nix::sys::signal::Signal;
use rustix::fs::CWD;
use rustix::io::Errno;

use crate::cgroup;
use crate::files;
use crate::processes::{self, ChildRecord, Family, Process, Scope};
use crate::removal::{self, REMOVAL_MAX};

/// How long to wait for the end of a killed process before giving up on it.
const GIVE_UP: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How long the removal of directories is waited for.
const REMOVAL_AWAITED: Duration = Duration::from_millis(500);

/// Ends what the attempts of a node that is gone have left, and removes their private directories. Returns how many attempts
/// had something left. Links are removed, not followed. Never call it for a node that lives. Blocks.
pub fn end_leftovers(state_dir: &Path, node: NodeId, grace: Duration) -> io::Result<usize> {
    let directory = files::directory_of(state_dir, node);
    let mut ended = 0;
    match removal::open_to_empty(CWD, directory.as_os_str()) {
        Ok(folder) => {
            for attempt in removal::folders_in(&folder)? {
                if files::read_record(attempt?).is_some_and(|record| end_leftover(&record, grace)) {
                    ended += 1;
                }
            }
        }
        Err(Errno::NOENT) => return Ok(0),
        // A child put something else in its place, which is removed below.
        Err(error) if removal::is_no_folder(error) => {}
        Err(error) => return Err(error.into()),
    }
    remove_apart(directory);
    Ok(ended)
}

/// Removes a directory in a thread of its own, and waits a moment for it: whoever rescues runs does not wait for a directory
/// that takes long. What cannot be removed stays.
fn remove_apart(directory: PathBuf) {
    let (done, is_done) = mpsc::channel();
    let removing = std::thread::Builder::new().name("belfry-remove".into()).spawn(move || {
        let _ = removal::remove(&directory, Instant::now() + REMOVAL_MAX);
        let _ = done.send(());
    });
    if removing.is_ok() {
        let _ = is_done.recv_timeout(REMOVAL_AWAITED);
    }
}

/// Ends what is left of one child; false if nothing is. It is left alone unless boot, pid namespace, start time and child id
/// all match; of those it has started, every process that carries the child id and is not older is ended with it. Blocks.
pub fn end_leftover(record: &ChildRecord, grace: Duration) -> bool {
    if record.boot_id.is_empty()
        || record.boot_id != processes::boot_id()
        || record.pid_ns != processes::pid_ns()
    {
        return false;
    }
    let leader = Process::read(record.pid)
        .filter(|process| process.start_time == record.start_time && process.carries(&record.child_id));
    // Without its leader a group cannot be told from another that got the same number since.
    let mut family = match leader {
        Some(_) => Family::new(record.clone()),
        None => Family::without_group(record.clone()),
    };
    let cgroup = record.cgroup.as_deref().filter(|group| cgroup::lives(group));
    if !family.lives(Scope::Everyone) && cgroup.is_none() {
        remove_cgroup(record);
        return false;
    }
    family.signal(Signal::SIGTERM, Scope::Everyone);
    let asked_at = Instant::now();
    while asked_at.elapsed() < grace + GIVE_UP {
        if !family.lives(Scope::Everyone) && !cgroup.is_some_and(cgroup::lives) {
            break;
        }
        if asked_at.elapsed() >= grace {
            cgroup.into_iter().for_each(cgroup::kill);
            family.signal(Signal::SIGKILL, Scope::Everyone);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    remove_cgroup(record);
    true
}

fn remove_cgroup(record: &ChildRecord) {
    if let Some(group) = &record.cgroup {
        cgroup::remove(group);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use uuid::Uuid;

    use super::*;

    /// A state directory, a node that is gone, and the folder of its attempts.
    fn gone() -> (tempfile::TempDir, NodeId, PathBuf) {
        let state = tempfile::tempdir().unwrap();
        let node = NodeId(Uuid::now_v7());
        let folder = files::directory_of(state.path(), node);
        fs::create_dir_all(&folder).unwrap();
        (state, node, folder)
    }

    #[test]
    fn a_record_that_is_no_longer_a_small_file_is_not_read() {
        let (state, node, folder) = gone();
        for name in ["fifo", "sparse", "folder", "link"] {
            fs::create_dir(folder.join(name)).unwrap();
        }
        nix::unistd::mkfifo(&folder.join("fifo/child.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::File::create(folder.join("sparse/child.json")).unwrap().set_len(3 << 29).unwrap();
        fs::create_dir(folder.join("folder/child.json")).unwrap();
        symlink("../fifo/child.json", folder.join("link/child.json")).unwrap();
        let (sender, ended) = std::sync::mpsc::channel();
        let path = state.path().to_owned();
        std::thread::spawn(move || sender.send(end_leftovers(&path, node, Duration::ZERO).unwrap()));
        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(0));
        assert!(!folder.exists());
    }

    #[test]
    fn what_a_link_leads_to_is_neither_read_nor_removed() {
        let (state, node, folder) = gone();
        let outside = tempfile::tempdir().unwrap();
        let kept = outside.path().join("work/kept");
        fs::create_dir(outside.path().join("work")).unwrap();
        fs::write(&kept, "").unwrap();

        // In place of an attempt's directory, and inside one.
        fs::create_dir(folder.join("attempt")).unwrap();
        symlink(outside.path(), folder.join("attempt/inside")).unwrap();
        symlink(outside.path(), folder.join("link")).unwrap();
        assert_eq!(end_leftovers(state.path(), node, Duration::ZERO).unwrap(), 0);
        assert!(kept.exists() && !folder.exists());

        // In place of the node's directory.
        symlink(outside.path(), &folder).unwrap();
        assert_eq!(end_leftovers(state.path(), node, Duration::ZERO).unwrap(), 0);
        assert!(kept.exists());
        assert!(folder.symlink_metadata().is_err(), "the link is left");
    }
}
