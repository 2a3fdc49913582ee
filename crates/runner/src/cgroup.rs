//! A control group per attempt, where a part of the tree has been handed to this node: then no grandchild can leave, whatever
//! it does. Without one, process group and child id must do.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The control group that this process is in, if the node may make groups of its own below it. The root of the tree is
/// nobody's own. Linux with cgroup v2 and a delegated group (systemd: `Delegate=yes`) only.
pub fn delegated_cgroup() -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    if path.is_empty() {
        return None;
    }
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let root = roots.into_iter().find(|root| root.join("cgroup.controllers").exists())?;
    let own = root.join(path);
    is_usable(&own).then_some(own)
}

/// Whether a group can be made below `parent`, entered, and killed as a whole.
fn is_usable(parent: &Path) -> bool {
    let probe = parent.join(format!("belfry-probe-{}", std::process::id()));
    if fs::create_dir(&probe).is_err() {
        return false;
    }
    let usable = probe.join("cgroup.kill").exists()
        && fs::OpenOptions::new().write(true).open(parent.join("cgroup.procs")).is_ok();
    let _ = fs::remove_dir(&probe);
    usable
}

/// Makes a group and puts a process into it, before that has started any other.
pub(crate) fn enter(parent: &Path, name: &str, pid: i32) -> io::Result<PathBuf> {
    let group = parent.join(name);
    fs::create_dir(&group)?;
    match fs::write(group.join("cgroup.procs"), pid.to_string()) {
        Ok(()) => Ok(group),
        Err(error) => {
            let _ = fs::remove_dir(&group);
            Err(error)
        }
    }
}

/// Kills all that is in it.
pub(crate) fn kill(group: &Path) {
    let _ = fs::write(group.join("cgroup.kill"), "1");
}

/// Whether something lives in it.
pub(crate) fn lives(group: &Path) -> bool {
    fs::read_to_string(group.join("cgroup.events")).is_ok_and(|text| text.contains("populated 1"))
}

/// Removes it, if nothing lives in it.
pub(crate) fn remove(group: &Path) {
    let _ = fs::remove_dir(group);
}
