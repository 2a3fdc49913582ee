//! Another local user of the machine: what it can read, hold and replace of a node that runs under an account of its own.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::closed::is_root;
use crate::support::{Site, Up};

/// The user that runs the node, and another one. Neither needs an account.
const OWNER: u32 = 54_321;
const OTHER: u32 = 65_534;

const CONFIG: &str = r#"
store: sqlite:.belfry/belfry.db
agents:
  a:
    shell: 'echo "run $BELFRY_SCHEDULE $$" >> side.log'
    schedules:
      s: {every: 200ms, anchor: slot}
"#;

/// A folder of the owner that everybody may enter, with a copy of the binary that everybody may start.
fn site() -> Site {
    let site = Site::sqlite();
    site.raw_config(CONFIG);
    std::fs::copy(env!("CARGO_BIN_EXE_belfry"), site.path("belfry")).unwrap();
    for name in ["", "belfry.yaml", "belfry"] {
        chown(site.path(name), Some(OWNER), Some(OWNER)).unwrap();
    }
    std::fs::set_permissions(site.path(""), Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(site.path("belfry"), Permissions::from_mode(0o755)).unwrap();
    site
}

/// A server of the owner that was started with a umask.
fn up(site: &Site, umask: &str) -> Up {
    site.up_with(|command| {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &format!("umask {umask}; exec ./belfry up --log-format json")]);
        shell.uid(OWNER).gid(OWNER).current_dir(site.path("")).env_clear();
        shell.env("PATH", "/usr/bin:/bin").env("HOME", site.path("")).env("BELFRY_LISTEN", "127.0.0.1:0");
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        *command = shell;
    })
}

/// What a user achieves of a list of attempts, by name.
fn achieved(site: &Site, user: u32) -> Vec<String> {
    let attempts = [
        ("list", "ls .belfry"),
        ("read the store", "head -c 1 .belfry/belfry.db"),
        ("read its log", "head -c 1 .belfry/belfry.db-wal"),
        ("read the token", "cat .belfry/server.json"),
        ("hold the lock", "flock --shared --nonblock .belfry/belfry.db.lock true"),
        ("hold the store", "flock --shared --nonblock .belfry/belfry.db true"),
        ("add a file", "touch .belfry/new"),
        ("replace the store", "cp belfry.yaml .belfry/swapped && mv -f .belfry/swapped .belfry/swapped.db"),
        ("move the folder", "mv .belfry moved && mv moved .belfry"),
        ("change the file", "true >> belfry.yaml"),
    ];
    let succeeds = |script: &str| {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).uid(user).gid(user).current_dir(site.path(""));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap().success()
    };
    attempts.iter().filter(|(_, script)| succeeds(script)).map(|(name, _)| (*name).to_owned()).collect()
}

/// Everything below a folder, with its mode.
fn modes(folder: &Path, found: &mut Vec<(String, u32)>) {
    let metadata = std::fs::symlink_metadata(folder).unwrap();
    found.push((folder.display().to_string(), metadata.mode() & 0o777));
    if metadata.is_dir() {
        // The folder of an attempt goes when the attempt ends.
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().exists() {
                modes(&entry.path(), found);
            }
        }
    }
}

#[test]
fn another_user_reads_holds_and_replaces_nothing_whatever_the_umask() {
    if !is_root() {
        return;
    }
    for umask in ["000", "022", "077"] {
        let site = site();
        let mut server = up(&site, umask);
        server.event("run_finished");
        assert_eq!(achieved(&site, OTHER), Vec::<String>::new(), "umask {umask}");
        // The same attempts are possible in principle: their owner makes most of them.
        let by_owner = achieved(&site, OWNER);
        for name in ["list", "read the store", "read the token", "add a file", "change the file"] {
            assert!(by_owner.iter().any(|achieved| achieved == name), "{name}: {by_owner:?}");
        }
        std::fs::remove_file(site.path(".belfry/new")).unwrap();
        std::fs::remove_file(site.path(".belfry/swapped.db")).unwrap();
        let mut found = Vec::new();
        modes(&site.path(".belfry"), &mut found);
        let open: Vec<_> = found.iter().filter(|(_, mode)| mode & 0o077 != 0).collect();
        assert!(open.is_empty() && found.len() > 4, "umask {umask}: {open:?} of {found:?}");
        server.stop();
    }
}

#[test]
fn another_user_is_told_whose_store_it_cannot_read() {
    if !is_root() {
        return;
    }
    let site = site();
    let mut server = up(&site, "022");
    server.event("run_finished");
    for arguments in [&["ls"][..], &["runs"], &["doctor"]] {
        let mut command = Command::new(site.path("belfry"));
        command.args(arguments).uid(OTHER).gid(OTHER).current_dir(site.path("")).env_clear();
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        // A table may break its lines.
        let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let whose = format!("it belongs to user {OWNER} (mode 700), and this is user");
        assert!(words.contains("cannot read the folder ") && words.contains(&whose), "{said}");
        assert_eq!(output.status.code(), Some(if arguments == ["doctor"] { 1 } else { 4 }), "{said}");
    }
    server.stop();
}
