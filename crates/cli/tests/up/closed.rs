//! What other users and children must not reach: the state on disk, the store's file, the node's memory; and what a job may.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Uid;
use serde_json::Value;

use crate::support::{PATIENCE, Site, eventually, lives};

const NOBODY: u32 = 65_534;

const BEATS: &str = r#"
agents:
  a:
    shell: 'echo "run $BELFRY_RUN_ID $BELFRY_TICK_AT $$" >> side.log'
    schedules:
      s: {every: 200ms, anchor: slot}
"#;

/// Whether this is root. Says loudly that a test which needs another user is skipped where it is not.
pub fn is_root() -> bool {
    if !Uid::effective().is_root() {
        let words = "\nSKIPPED: only root can act as another user\n";
        drop(std::io::stderr().write_all(words.as_bytes()));
    }
    Uid::effective().is_root()
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Everything below a folder, the folder included.
fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_owned()];
    let mut at = 0;
    while let Some(path) = found.get(at).cloned() {
        at += 1;
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
            found.extend(entries.map(|entry| entry.path()));
        }
    }
    found
}

/// What a server is asked without a token.
fn get(site: &Site, path: &str) -> String {
    let told: Value = serde_json::from_slice(&std::fs::read(site.path("told.json")).unwrap()).unwrap();
    let address = told["url"].as_str().unwrap().strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_state_is_private_whatever_the_umask() {
    for umask in ["000", "022", "077"] {
        let site = Site::sqlite();
        site.raw_config(
            "agents: {a: {shell: 'touch running; while [ ! -e go ]; do sleep 0.05; done', schedules: {s: {every: 1h}}}}\n",
        );
        let mut up = site.up_after(&format!("umask {umask}"));
        eventually("a run", || site.path("running").exists().then_some(()));
        eventually("server.json", || site.path(".belfry/server.json").exists().then_some(()));
        let found = below(&site.path(".belfry"));
        for name in
            ["belfry.db", "belfry.db-wal", "belfry.db-shm", "belfry.db.lock", "server.json", "payload.json"]
        {
            assert!(found.iter().any(|path| path.ends_with(name)), "{name} is not in {found:?}");
        }
        for path in &found {
            let wanted = if path.is_dir() { 0o700 } else { 0o600 };
            assert_eq!(mode(path), wanted, "umask {umask}: {}", path.display());
        }
        // What the child made has the mode that the umask gives.
        let given = 0o666 & !u32::from_str_radix(umask, 8).unwrap();
        assert_eq!(mode(&site.path("running")), given);
        site.file("go", "");
        up.stop();
    }
}

#[test]
fn a_state_that_was_open_is_closed_and_one_of_another_user_is_refused() {
    let site = Site::sqlite();
    site.raw_config("agents: {a: {shell: 'true', schedules: {s: {every: 1h}}}}\n");
    site.up().event("run_finished");
    let state = site.path(".belfry");
    let open =
        [(state.clone(), 0o755), (state.join("belfry.db"), 0o644), (state.join("belfry.db.lock"), 0o666)];
    open.iter().for_each(|(path, mode)| set_mode(path, *mode));
    let mut up = site.up();
    up.event("node_started");
    up.stop();
    for (path, _) in &open {
        assert_eq!(mode(path) & 0o077, 0, "{}", path.display());
        assert!(up.errors().contains(&format!("{} was open to others", path.display())), "{}", up.errors());
    }
    // Where everybody may write, everybody may replace the folder.
    set_mode(&site.path(""), 0o777);
    let refused = site.belfry(&["up"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(said(&refused).contains("chmod o-w"), "{}", said(&refused));
    set_mode(&site.path(""), 0o700);
    if !is_root() {
        return;
    }
    for path in [&state, &state.join("belfry.db"), &state.join("belfry.db.lock")] {
        chown(path, Some(NOBODY), None).unwrap();
        let refused = site.belfry(&["up"]);
        assert_eq!(refused.status.code(), Some(4), "{}: {refused:?}", path.display());
        assert!(said(&refused).contains("belongs to user 65534"), "{}", said(&refused));
        assert_eq!(path.metadata().unwrap().uid(), NOBODY);
        chown(path, Some(0), None).unwrap();
    }
    // A link of another user, to a folder of ours.
    std::fs::rename(&state, site.path("elsewhere")).unwrap();
    symlink("elsewhere", &state).unwrap();
    std::os::unix::fs::lchown(&state, Some(NOBODY), None).unwrap();
    let refused = site.belfry(&["up"]);
    assert!(said(&refused).contains("belongs to user 65534"), "{}", said(&refused));
}

#[test]
fn root_takes_no_commands_from_a_folder_that_is_open_to_all() {
    let site = Site::sqlite();
    site.config(BEATS);
    set_mode(&site.path(""), 0o777);
    let checked = site.belfry(&["check"]);
    assert!(said(&checked).contains("every user of this host can replace"), "{checked:?}");
    let wanted = if Uid::effective().is_root() { 2 } else { 0 };
    assert_eq!(checked.status.code(), Some(wanted), "{checked:?}");
    set_mode(&site.path(""), 0o1777);
    assert_eq!(site.belfry(&["check"]).status.code(), Some(0));
    // Only root can give a link away.
    if Uid::effective().is_root() {
        std::fs::rename(site.path("belfry.yaml"), site.path("real.yaml")).unwrap();
        symlink("real.yaml", site.path("belfry.yaml")).unwrap();
        assert_eq!(site.belfry(&["check"]).status.code(), Some(0));
        std::os::unix::fs::lchown(site.path("belfry.yaml"), Some(12_345), None).unwrap();
        let checked = site.belfry(&["check"]);
        assert!(said(&checked).contains("user 12345 owns the link"), "{checked:?}");
        symlink("belfry.yaml", site.path("chain.yaml")).unwrap();
        let chained = site.belfry(&["check", "-c", "chain.yaml"]);
        assert!(said(&chained).contains("user 12345 owns the link"), "{chained:?}");
        assert_eq!(checked.status.code(), Some(2), "{checked:?}");
    }
}

#[test]
fn a_file_has_one_server_under_all_its_names() {
    let site = Site::sqlite();
    site.config(BEATS);
    let mut up = site.up();
    up.event("run_finished");
    let other = site.beside();
    symlink(site.path("belfry.db"), other.path("link.db")).unwrap();
    symlink(site.path(""), other.path("folder")).unwrap();
    let names =
        [other.path("link.db"), other.path("folder/belfry.db"), other.path("folder/./../folder/belfry.db")];
    for name in &names {
        other.raw_config(&format!("store: \"sqlite:{}\"\n{BEATS}", name.display()));
        let refused = other.belfry(&["up"]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(said(&refused).contains(&format!("in use by process {}", up.pid())), "{}", said(&refused));
        // Commands find the server by each of them.
        assert!(other.belfry(&["ls"]).status.success());
    }
    std::fs::hard_link(site.path("belfry.db"), other.path("hard.db")).unwrap();
    other.raw_config(&format!("store: \"sqlite:{}\"\n{BEATS}", other.path("hard.db").display()));
    let refused = other.belfry(&["up"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(said(&refused).contains("hard links"), "{}", said(&refused));
    std::fs::remove_file(other.path("hard.db")).unwrap();
    up.stop();
}

#[test]
fn a_second_server_names_the_first_also_if_the_lock_was_removed() {
    let site = Site::sqlite();
    site.config(BEATS);
    let mut up = site.up();
    up.event("run_finished");
    let told: serde_json::Value =
        serde_json::from_slice(&std::fs::read(site.path("server.json")).unwrap()).unwrap();
    let expected = format!(
        "A node still runs there: process {pid}, {}; `kill {pid}` ends it in order",
        told["url"].as_str().unwrap(),
        pid = up.pid()
    );
    for is_locked in [true, false] {
        if !is_locked {
            std::fs::remove_file(site.path("belfry.db.lock")).unwrap();
        }
        let refused = site.belfry(&["up"]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(said(&refused).contains("belfry.db is in use by"), "{}", said(&refused));
        assert!(said(&refused).contains(&expected), "{}", said(&refused));
        assert_eq!(said(&refused).contains("lock file removed"), !is_locked, "{}", said(&refused));
    }
    up.signal(Signal::SIGKILL);
}

#[test]
fn a_store_that_is_taken_away_is_not_served_and_what_runs_is_ended() {
    let site = Site::sqlite();
    site.raw_config(
        r#"
engine: {shutdown_timeout: 1s}
agents:
  long:
    shell: 'echo "pid $$" >> side.log; exec sleep 1000'
    schedules: {s: {every: 1h}}
  often:
    shell: 'echo "tick $BELFRY_TICK_AT" >> side.log'
    schedules: {s: {every: 200ms, anchor: slot}}
"#,
    );
    let mut up = site.up();
    let pid = site.wait_for_line("pid")[1].clone();
    site.wait_for_line("tick");
    let told = eventually("server.json", || std::fs::read(site.path(".belfry/server.json")).ok());
    std::fs::write(site.path("told.json"), told).unwrap();
    assert!(get(&site, "/readyz").starts_with("HTTP/1.1 200"));
    std::fs::remove_dir_all(site.path(".belfry")).unwrap();
    let unavailable = up.event("store_unavailable");
    assert!(unavailable["detail"].as_str().unwrap().contains("removed or replaced"), "{unavailable}");
    eventually("what runs to be ended", || (!lives(&pid)).then_some(()));
    let answer = get(&site, "/readyz");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("removed or replaced"), "{answer}");
    // Another one begins anew in its place, and no tick runs twice.
    let mut next = site.up();
    next.event_of("run_finished", "s");
    site.wait_for_side("two starts", |lines| lines.iter().filter(|line| line[0] == "pid").count() >= 2);
    let seen = site.side().len();
    site.wait_for_side("more ticks", |lines| lines.len() >= seen + 10);
    let mut ticks: Vec<String> =
        site.side().iter().filter(|line| line[0] == "tick").map(|line| line[1].clone()).collect();
    let all = ticks.len();
    ticks.sort();
    ticks.dedup();
    assert_eq!(ticks.len(), all, "a tick ran twice");
    next.kill();
    up.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(up.ends_within(Duration::from_secs(20)).is_some(), "it does not stop without its store");
}

#[test]
fn a_child_of_the_same_user_reads_neither_node_nor_keeper() {
    if !is_root() {
        return;
    }
    let site = Site::sqlite();
    // `nobody` can go neither where the binary was built nor where root has its files.
    let binary = site.path("belfry");
    std::fs::copy(env!("CARGO_BIN_EXE_belfry"), &binary).unwrap();
    let script = r#"for status in $(grep -l "^PPid:.$PPID\$" /proc/[0-9]*/status); do
  process=${status%/status}
  [ "$process" = "/proc/$$" ] && continue
  if cat $process/environ >/dev/null 2>&1; then echo "sibling readable" >> side.log; else echo "sibling closed" >> side.log; fi
done
if cat /proc/$PPID/environ >/dev/null 2>&1; then echo "node readable" >> side.log; else echo "node closed" >> side.log; fi
cat /proc/$$/environ >/dev/null && echo "self readable" >> side.log
"#;
    site.file("child.sh", script);
    site.config(
        r#"
agents:
  a: {run: [sh, child.sh], schedules: {s: {every: 1h}}}
  long: {shell: '(setsid sleep 1000 &) ; sleep 1000', grace: 100ms, schedules: {s: {after: 99h}}}
"#,
    );
    for path in below(&site.path("")) {
        chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let mut up = site.start_after(":", &binary, |command| {
        command.uid(NOBODY).gid(NOBODY).env("SECRET_OF_NODE", "hush");
    });
    let ended = up.event("run_finished");
    assert_eq!(ended["state"], "completed", "{ended}");
    let lines: Vec<String> = site.side().iter().map(|line| line.join(" ")).collect();
    assert_eq!(lines, ["sibling closed", "node closed", "self readable"]);
    // Its own families it still knows.
    let run = site.belfry_with(&["run", "long/s"], |command| {
        command.uid(NOBODY).gid(NOBODY);
    });
    let run = String::from_utf8(run.stdout).unwrap();
    up.event_of("run_started", "s");
    let cancelled = site.belfry_with(&["cancel", run.trim()], |command| {
        command.uid(NOBODY).gid(NOBODY);
    });
    assert!(cancelled.status.success(), "{cancelled:?}");
    up.event("run_cancelled");
    up.stop();
}

#[test]
fn a_job_starts_another_through_the_command_line() {
    for site in Site::each() {
        site.config(&format!(
            r#"
agents:
  caller: {{run: ["{}", run, callee/s, --wait], cwd: /, schedules: {{s: {{every: 1h}}}}}}
  callee: {{shell: 'echo "called $BELFRY_CHILD_ID token=$BELFRY_TOKEN." >> side.log', schedules: {{s: {{after: 99h}}}}}}
"#,
            env!("CARGO_BIN_EXE_belfry")
        ));
        let mut up = site.up();
        let called = site.wait_for_line("called");
        assert_eq!((called[1].len(), called[2].as_str()), (32, "token=."), "{called:?}");
        for _ in 0..2 {
            let ended = up.event("run_finished");
            assert_eq!(ended["state"], "completed", "{ended}");
        }
        up.stop();
    }
}
