//! A node that is killed or frozen, a lease that lapses, a keeper that dies: invariants 17 and 38, faults F2, F3 and F24, rule R21.
//!
//! The node is this binary again, started with `node`; see `Node` below.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use belfry_core::model::{NodeId, Reason};
use belfry_core::retry::Outcome;
use belfry_runner::{
    ChildRecord, KeeperHandle, KeeperOptions, Runner, RunnerOptions, Stop, end_leftover, end_leftovers,
};
use nix::sys::signal::Signal;
use nix::time::ClockId;
use nix::unistd::{Pid, getsid};
use serde_json::json;
use support::{DEADLINE, Rig, argv, is_gone, lives, pid_in, shell, signal};

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("node") => return node_main(),
        Some("limited") => return limited_main(),
        _ => {}
    }
    support::main(tests![
        a_killed_node_leaves_no_child,
        a_node_killed_while_it_starts_children_leaves_none,
        a_frozen_node_has_no_child_when_its_lease_ends,
        a_node_that_does_not_read_has_no_child_when_its_lease_ends,
        a_lease_that_is_renewed_keeps_children_alive,
        a_lease_that_has_lapsed_admits_no_child,
        a_keeper_that_dies_is_replaced_and_knows_the_children,
        a_keeper_that_is_frozen_is_replaced,
        a_keeper_without_a_node_ends,
        a_binary_that_is_no_keeper_is_found_out,
        a_child_that_is_never_told_to_go_does_nothing,
        a_child_leads_a_session_and_one_that_ends_before_is_started_again,
        leftovers_are_ended_only_if_everything_matches,
        leftovers_without_their_leader_are_found_by_child_id,
        a_control_group_holds_who_hides,
        a_node_without_files_to_open_waits_for_them,
    ])
}

/// Children that do not want to go: a group that ignores TERM, and a daemon in another session, without the pipes.
const STUBBORN: &str = "trap '' TERM; \
     (setsid sh -c 'trap \"\" TERM; echo $$ > '$D'/daemon; while :; do sleep 1; done' >/dev/null 2>&1 &); \
     sh -c 'echo $$ > '$D'/child; while :; do sleep 1; done' & \
     echo $$ > $D/leader; while :; do sleep 1; done";

fn now_ms() -> u64 {
    Duration::from(ClockId::CLOCK_MONOTONIC.now().unwrap()).as_millis() as u64
}

/// A node in another process, and what it says on its standard output, line by line.
struct Node {
    process: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    dir: tempfile::TempDir,
    keeper: i32,
}

impl Node {
    /// `lease_ms` 0: no lease is ever told. `children`: how many attempts of `line` are started at once.
    fn start(kept: bool, lease_ms: u64, children: usize, line: &str) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let line = format!("D={}; {line}", dir.path().display());
        let mut process = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["node", dir.path().join("state").to_str().unwrap(), &kept.to_string()])
            .args([lease_ms.to_string(), children.to_string(), line])
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut node = Node { process, lines, dir, keeper: 0 };
        if kept {
            node.keeper = node.hear("keeper");
        }
        node
    }

    /// The number in the next line that starts with this word.
    fn hear<T: std::str::FromStr<Err: std::fmt::Debug>>(&mut self, word: &str) -> T {
        loop {
            let line = self.lines.next().expect("the node has ended").unwrap();
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().parse().unwrap();
            }
        }
    }

    fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// The stubborn children.
    async fn children(&self) -> [i32; 3] {
        let pid = async |name: &str| pid_in(&self.dir.path().join(name)).await;
        [pid("leader").await, pid("child").await, pid("daemon").await]
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The other side of [`Node`].
fn node_main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(2).collect();
    let [state_dir, kept, lease_ms, children, line] = arguments.try_into().unwrap();
    let lease = Duration::from_millis(lease_ms.parse().unwrap());
    support::block_on(async move {
        let keeper = match kept.parse().unwrap() {
            true => {
                let options = KeeperOptions {
                    term_before: lease / 2,
                    kill_before: lease / 4,
                    gone_grace: Duration::from_millis(300),
                    ..KeeperOptions::default()
                };
                Some(KeeperHandle::spawn(options).await.unwrap())
            }
            false => None,
        };
        let mut rig = Rig::with_keeper(keeper.clone());
        let options =
            RunnerOptions { keeper: keeper.clone(), state_dir: state_dir.into(), ..RunnerOptions::default() };
        rig.runner = Runner::new(options);
        let mut said = None;
        let mut say = move |keeper: &Option<KeeperHandle>| match keeper.as_ref().and_then(KeeperHandle::pid) {
            Some(pid) if said != Some(pid) => {
                said = Some(pid);
                println!("keeper {pid}");
            }
            _ => {}
        };
        say(&keeper);
        let renew = |keeper: &KeeperHandle| {
            let (asked_at, asked_at_ms) = (Instant::now(), now_ms());
            keeper.renew(asked_at, lease);
            println!("renewed {asked_at_ms}");
        };
        if let (Some(keeper), false) = (&keeper, lease.is_zero()) {
            renew(keeper);
        }
        let lives: Vec<_> = (0..children.parse().unwrap()).map(|_| rig.start(shell(&line))).collect();
        loop {
            tokio::time::sleep(if lease.is_zero() { Duration::from_millis(20) } else { lease / 8 }).await;
            if let (Some(keeper), false) = (&keeper, lease.is_zero()) {
                renew(keeper);
            }
            say(&keeper);
            let _ = std::io::stdout().flush();
            if lives.iter().all(|live| live.task.is_finished()) {
                println!("all ended 0");
            }
        }
    });
    ExitCode::SUCCESS
}

async fn a_killed_node_leaves_no_child() {
    let mut node = Node::start(true, 0, 1, STUBBORN);
    let children = node.children().await;
    assert_ne!(getsid(Some(Pid::from_raw(node.keeper))), getsid(Some(Pid::from_raw(node.pid()))));
    for each in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        signal(node.keeper, each);
    }
    assert!(lives(node.keeper) && children.into_iter().all(lives));
    node.kill();
    for pid in children {
        is_gone(pid, DEADLINE).await;
    }
    is_gone(node.keeper, DEADLINE).await;
}

async fn a_node_killed_while_it_starts_children_leaves_none() {
    let mut seen = 0;
    for round in 0..12u64 {
        let mut node =
            Node::start(true, 0, 8, "mkdir -p $D/pids; echo > $D/pids/$$; trap '' TERM; sleep 1000");
        // At any moment, not after any event.
        tokio::time::sleep(Duration::from_millis(round * 7)).await;
        node.kill();
        is_gone(node.keeper, DEADLINE).await;
        for pid in std::fs::read_dir(node.dir.path().join("pids")).into_iter().flatten().flatten() {
            let pid = pid.file_name().to_str().unwrap().parse().unwrap();
            assert!(!lives(pid), "round {round}: {pid} lives");
            seen += 1;
        }
    }
    assert!(seen > 0, "no child was ever started");
}

async fn a_frozen_node_has_no_child_when_its_lease_ends() {
    let lease_ms = 6_000;
    let mut node = Node::start(true, lease_ms, 1, STUBBORN);
    let children = node.children().await;
    signal(node.pid(), Signal::SIGSTOP);
    // It may have said more than we have read: the last one counts.
    let frozen_at_ms = now_ms();
    for pid in children {
        is_gone(pid, Duration::from_millis(lease_ms)).await;
    }
    let gone_at_ms = now_ms();
    signal(node.pid(), Signal::SIGCONT);
    let mut renewed_at_ms: u64 = node.hear("renewed");
    loop {
        let next: u64 = node.hear("renewed");
        if next > frozen_at_ms {
            break;
        }
        renewed_at_ms = next;
    }
    assert!(gone_at_ms < renewed_at_ms + lease_ms, "{} ms late", gone_at_ms - renewed_at_ms - lease_ms);
    // The node has lost nothing but its children, and still has its keeper.
    let _: u32 = node.hear("all ended");
    assert!(lives(node.keeper));
}

fn record_of(pid: i32, child_id: &str) -> ChildRecord {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start_time =
        stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
    let (boot_id, pid_ns, child_id) = (String::new(), String::new(), child_id.to_owned());
    ChildRecord { pid, pgid: pid, start_time, boot_id, pid_ns, child_id, cgroup: None }
}

/// A frozen node reads nothing: the keeper's answers fill the pipe long before the last child is ended.
async fn a_node_that_does_not_read_has_no_child_when_its_lease_ends() {
    let mut keeper = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["__belfry", "keep"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to_keeper, unread) = (keeper.stdin.take().unwrap(), keeper.stdout.take().unwrap());
    // The smallest pipe there is holds the answers for fewer children than we have.
    #[cfg(target_os = "linux")]
    nix::fcntl::fcntl(&unread, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let mut children: Vec<_> = (0..200)
        .map(|number| {
            let child_id = format!("{number:0>64}");
            let child = std::process::Command::new("sleep")
                .arg("1000")
                .env("BELFRY_CHILD_ID", &child_id)
                .process_group(0)
                .spawn()
                .unwrap();
            (child, child_id)
        })
        .collect();
    let mut say =
        |message: serde_json::Value| to_keeper.write_all(format!("{message}\n").as_bytes()).unwrap();
    say(json!({"hello": {"term_before_ms": 200, "kill_before_ms": 100, "gone_grace_ms": 0}}));
    for (number, (child, child_id)) in children.iter().enumerate() {
        let record = record_of(child.id() as i32, child_id);
        say(json!({"add": {"number": number, "record": record}}));
    }
    let until_ms = Duration::from(ClockId::CLOCK_BOOTTIME.now().unwrap()).as_millis() as u64 + 300;
    say(json!({"lease": {"until_ms": until_ms}}));
    let until = Instant::now() + Duration::from_secs(20);
    let mut left = children.len();
    while left > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
        left = children
            .iter_mut()
            .filter_map(|(child, _)| child.try_wait().unwrap().is_none().then_some(()))
            .count();
    }
    for (child, _) in &mut children {
        let _ = child.kill();
        let _ = child.wait();
    }
    let _ = keeper.kill();
    let _ = keeper.wait();
    assert_eq!(left, 0, "children outlived the lease");
}

fn short(term_before_ms: u64, kill_before_ms: u64) -> KeeperOptions {
    KeeperOptions {
        term_before: Duration::from_millis(term_before_ms),
        kill_before: Duration::from_millis(kill_before_ms),
        ..KeeperOptions::default()
    }
}

async fn a_lease_that_is_renewed_keeps_children_alive() {
    let lease = Duration::from_secs(3);
    let keeper = KeeperHandle::spawn(short(1_000, 500)).await.unwrap();
    keeper.renew(Instant::now(), lease);
    let rig = Rig::with_keeper(Some(keeper.clone()));
    let live = rig.start(argv(&["sleep", "4"]));
    while !live.task.is_finished() {
        keeper.renew(Instant::now(), lease);
        tokio::time::sleep(lease / 10).await;
    }
    assert_eq!(live.done().await.report.outcome, Outcome::Completed);

    // And one that is not renewed ends them: asked first. That is never taken for a success.
    let live = rig.start(shell("trap 'echo bye; exit 0' TERM; while :; do sleep 0.05; done"));
    let done = live.done().await;
    assert_eq!(done.report.outcome, Outcome::Failed { reason: Reason::Orphaned, retryable: true });
    assert_eq!(done.report.error.unwrap(), "ended by the keeper: the node's lease was about to end");
    assert_eq!(done.stdout, "bye\n");
}

async fn a_lease_that_has_lapsed_admits_no_child() {
    let keeper = KeeperHandle::spawn(KeeperOptions::default()).await.unwrap();
    let rig = Rig::with_keeper(Some(keeper.clone()));
    // Less is left than the keeper needs to end a child.
    keeper.renew(Instant::now(), Duration::from_secs(9));
    let mark = rig.path("mark");
    let report = rig.run(argv(&["touch", mark.to_str().unwrap()])).await.report;
    assert_eq!(report.outcome, Outcome::NotStarted);
    assert_eq!(report.error.unwrap(), "the keeper does not take new children: the lease is about to end");
    assert!(!mark.exists());
    keeper.renew(Instant::now(), Duration::from_secs(30));
    assert_eq!(rig.run(argv(&["touch", mark.to_str().unwrap()])).await.report.outcome, Outcome::Completed);
    // An instant long ago is a lease that is over.
    let long_ago = Instant::now().checked_sub(Duration::from_secs(25)).unwrap();
    keeper.renew(long_ago, Duration::from_secs(30));
    assert_ne!(rig.run(argv(&["true"])).await.report.outcome, Outcome::Completed);
}

async fn a_keeper_that_dies_is_replaced_and_knows_the_children() {
    let mut node = Node::start(true, 0, 1, STUBBORN);
    let children = node.children().await;
    let mut keeper = node.keeper;
    for _ in 0..3 {
        signal(keeper, Signal::SIGKILL);
        keeper = node.hear("keeper");
    }
    assert!(children.into_iter().all(lives));
    node.kill();
    for pid in children {
        is_gone(pid, DEADLINE).await;
    }
    is_gone(keeper, DEADLINE).await;
}

async fn a_keeper_that_is_frozen_is_replaced() {
    let keeper = KeeperHandle::spawn(KeeperOptions::default()).await.unwrap();
    let rig = Rig::with_keeper(Some(keeper.clone()));
    let pid = rig.path("pid");
    let live = rig.start(shell(&format!("echo $$ > {}; sleep 1000", pid.display())));
    let child = pid_in(&pid).await;
    let first = keeper.pid().unwrap() as i32;
    signal(first, Signal::SIGSTOP);
    assert_eq!(rig.run(argv(&["true"])).await.report.outcome, Outcome::Completed);
    assert_eq!(keeper.starts(), 2);
    is_gone(first, DEADLINE).await;
    // The one that was replaced has not taken anybody with it.
    assert!(lives(child));
    live.stop(Stop::Cancel(Reason::Requested));
    live.done().await;
}

async fn a_keeper_without_a_node_ends() {
    let keeper = KeeperHandle::spawn(KeeperOptions::default()).await.unwrap();
    let pid = keeper.pid().unwrap() as i32;
    let rig = Rig::with_keeper(Some(keeper));
    assert_eq!(rig.run(argv(&["true"])).await.report.outcome, Outcome::Completed);
    drop(rig);
    is_gone(pid, DEADLINE).await;
}

async fn a_binary_that_is_no_keeper_is_found_out() {
    for exe in ["/bin/true", "/no/such/binary"] {
        let options = KeeperOptions { exe: exe.into(), ..KeeperOptions::default() };
        let error = KeeperHandle::spawn(options).await.unwrap_err().to_string();
        assert!(error.starts_with("the keeper ") && error.contains(exe), "{error}");
    }
}

async fn a_child_that_is_never_told_to_go_does_nothing() {
    for said in [&b""[..], b"\x05", &u64::MAX.to_le_bytes(), b"\x08\0\0\0\0\0\0\0/bin/ls"] {
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["__belfry", "execute"])
            .stdin(std::os::fd::OwnedFd::from(theirs))
            .stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        drop(command);
        ours.write_all(said).unwrap();
        drop(ours);
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stdout), (Some(127), Vec::new()), "{said:?}");
    }
}

async fn a_child_leads_a_session_and_one_that_ends_before_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let (exe, once) = (dir.path().join("belfry"), dir.path().join("once"));
    let own = std::env::current_exe().unwrap();
    // As a Ctrl-C ends it that comes while it still belongs to the node's group.
    let script = format!(
        "#!/bin/sh\n[ $2 = execute ] && mkdir {} 2>/dev/null && kill -INT $$\nexec {} \"$@\"\n",
        once.display(),
        own.display()
    );
    std::fs::write(&exe, script).unwrap();
    std::fs::set_permissions(&exe, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let keeper = KeeperHandle::spawn(KeeperOptions { exe, ..KeeperOptions::default() }).await.unwrap();
    let rig = Rig::with_keeper(Some(keeper));
    let done = rig.run(shell("echo $$; cut -d ' ' -f 5,6 /proc/$$/stat")).await;
    assert_eq!(done.report.outcome, Outcome::Completed, "{done:?}");
    assert!(once.exists());
    let (pid, ids) = done.stdout.trim().split_once('\n').unwrap();
    assert_eq!(ids, format!("{pid} {pid}"), "group and session");
}

/// The node's id and the record of its one attempt, from its state directory. Without a keeper the record is written only
/// after the child has been started.
async fn only_record(state: &Path) -> (NodeId, PathBuf, ChildRecord) {
    let only = |path: &Path| std::fs::read_dir(path).unwrap().next().unwrap().unwrap().path();
    let node = only(&state.join("attempts"));
    let attempt = only(&node);
    let until = Instant::now() + DEADLINE;
    loop {
        let bytes = std::fs::read(attempt.join("child.json")).unwrap_or_default();
        if let Ok(record) = serde_json::from_slice(&bytes) {
            let id = node.file_name().unwrap().to_str().unwrap().parse().unwrap();
            return (NodeId(id), attempt, record);
        }
        assert!(Instant::now() < until, "no record was written");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn leftovers_are_ended_only_if_everything_matches() {
    let mut node = Node::start(false, 0, 1, STUBBORN);
    let children = node.children().await;
    let state = node.dir.path().join("state");
    let (id, attempt, record) = only_record(&state).await;
    node.kill();
    assert_eq!(record.pid, children[0]);
    let grace = Duration::from_millis(50);
    for other in [
        ChildRecord { boot_id: "another".into(), ..record.clone() },
        ChildRecord { boot_id: String::new(), ..record.clone() },
        ChildRecord { pid_ns: "pid:[1]".into(), ..record.clone() },
        ChildRecord { start_time: record.start_time - 1, child_id: "another".into(), ..record.clone() },
        ChildRecord { child_id: "another".into(), ..record.clone() },
        ChildRecord { pid: std::process::id() as i32, child_id: "another".into(), ..record.clone() },
    ] {
        assert!(!end_leftover(&other, grace), "{other:?}");
        assert!(children.into_iter().all(lives), "{other:?}");
    }
    assert_eq!(end_leftovers(&state, id, grace).unwrap(), 1);
    assert!(!children.into_iter().any(lives));
    assert!(!attempt.exists());
    assert_eq!(end_leftovers(&state, id, grace).unwrap(), 0);
}

async fn leftovers_without_their_leader_are_found_by_child_id() {
    let mut node = Node::start(false, 0, 1, STUBBORN);
    let [leader, child, daemon] = node.children().await;
    let (_, _, record) = only_record(&node.dir.path().join("state")).await;
    // Frozen first, or it would see the leader go, and end the others itself.
    signal(node.pid(), Signal::SIGSTOP);
    signal(leader, Signal::SIGKILL);
    node.kill();
    is_gone(leader, DEADLINE).await;
    assert!(end_leftover(&record, Duration::from_millis(50)));
    assert!(!lives(child) && !lives(daemon));
}

async fn a_control_group_holds_who_hides() {
    let parent = std::env::var_os("BELFRY_TEST_CGROUP").map(PathBuf::from);
    let Some(parent) = parent.or_else(belfry_runner::delegated_cgroup) else {
        println!("skipped: no control group of our own; BELFRY_TEST_CGROUP may name one");
        return;
    };
    let keeper = KeeperHandle::spawn(KeeperOptions::default()).await.unwrap();
    let mut rig = Rig::with_keeper(Some(keeper.clone()));
    rig.runner = Runner::new(RunnerOptions {
        keeper: Some(keeper),
        state_dir: rig.path("state"),
        cgroup: Some(parent.clone()),
        ..RunnerOptions::default()
    });
    // Neither child id nor group nor parent.
    let pid = rig.path("pid");
    let line = format!(
        "env -i sh -c '(setsid sh -c \"echo \\$\\$ > {}; exec sleep 1000\" >/dev/null 2>&1 &)'; exec sleep 1000",
        pid.display()
    );
    let live = rig.start(shell(&line));
    let hidden = pid_in(&pid).await;
    live.stop(Stop::Cancel(Reason::Requested));
    live.done().await;
    assert!(!lives(hidden));
    let left = std::fs::read_dir(&parent).unwrap().flatten();
    assert!(!left.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with("belfry-")));
}

async fn a_node_without_files_to_open_waits_for_them() {
    let status = std::process::Command::new("/bin/sh")
        .args(["-c", "ulimit -n 48; exec \"$0\" limited", std::env::current_exe().unwrap().to_str().unwrap()])
        .status();
    assert!(status.unwrap().success());
}

/// Starts more than it has files for.
fn limited_main() -> ExitCode {
    support::block_on(async {
        let rig = Rig::new(true).await;
        let lives: Vec<_> = (0..40).map(|_| rig.start(argv(&["sleep", "0.3"]))).collect();
        for live in lives {
            let report = live.done().await.report;
            assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
        }
        assert_eq!(rig.run(argv(&["true"])).await.report.outcome, Outcome::Completed);
        assert_eq!(rig.keeper.as_ref().unwrap().starts(), 1);
    });
    ExitCode::SUCCESS
}
