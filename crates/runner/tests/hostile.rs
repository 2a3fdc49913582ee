//! Children that do not behave, and definitions that cannot work: invariants 38 to 41, fault F28, hostile inputs 50 to 55.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use belfry_core::input::StoredPayload;
use belfry_core::model::{Reason, Trigger};
use belfry_core::retry::Outcome;
use belfry_core::work::Work;
use belfry_runner::{Report, Stop};
use serde_json::json;
use support::{Rig, argv, lives, payload, pid_in, shell};

fn main() -> ExitCode {
    support::main(both_ways![
        a_program_that_cannot_be_started_is_explained,
        an_argument_that_no_program_can_get_is_explained,
        a_payload_that_cannot_be_read_starts_nothing,
        a_variable_that_no_environment_can_hold_is_explained,
        hostile_variables_reach_only_the_program,
        a_directory_that_is_not_there_is_explained,
        a_group_that_ignores_term_is_gone_before_the_report,
        a_background_process_ends_with_its_leader,
        a_daemon_that_holds_the_pipe_cannot_keep_the_run_open,
        a_daemon_that_hides_cannot_keep_the_run_open,
        a_daemon_without_the_pipe_may_outlive_a_run_that_ends_by_itself,
        a_cancel_also_ends_who_left_the_group,
        a_cancel_ends_who_has_cleaned_its_environment,
        a_child_that_forks_and_forks_is_ended,
        a_child_in_another_group_is_ended,
        a_stopped_child_is_ended,
        a_process_whose_first_thread_has_ended_is_ended,
        a_hundred_that_ignore_term_are_ended_at_once,
        closed_pipes_are_not_the_end,
        output_without_a_line_end_is_passed_on_while_it_runs,
        output_is_bytes_and_nothing_is_read_into_it,
        endless_output_is_capped_and_memory_with_it,
        the_pipe_drains_although_nobody_takes_the_output,
        nobody_wants_the_output,
        a_secret_is_masked_over_two_writes,
        what_was_written_last_is_not_lost,
        a_private_directory_of_any_depth_is_removed,
        a_link_in_the_place_of_private_directories_leads_nothing_away,
    ])
}

fn refused(report: &Report, error: &str) {
    let retryable = false;
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::SpawnFailed, retryable }, "{report:?}");
    let text = report.error.as_deref().unwrap();
    assert!(text.contains(error), "{text:?} should contain {error:?}");
    assert!(!text.contains('\n') && !text.contains('\0'), "{text:?}");
}

async fn a_program_that_cannot_be_started_is_explained(rig: Rig) {
    let file = |name: &str, text: &str, mode: u32| {
        let path = rig.path(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path.to_string_lossy().into_owned()
    };
    let dir = rig.dir.path().to_string_lossy().into_owned();
    let plain = file("plain", "#!/bin/sh\n", 0o600);
    let orphan = file("orphan", "#!/no/such/interpreter -x\n", 0o700);
    // Refused by `execve` itself, as another machine's program would be.
    let garbage = file("garbage", "\u{7f}ELF\u{1}\u{1}", 0o700);
    for (argv, error) in [
        (vec![], "run has no program"),
        (vec![""], "the program's name is empty"),
        (vec!["no-such-program"], "cannot start no-such-program: not found in PATH (on this node: /"),
        (vec!["/no/such/program"], "/no/such/program does not exist"),
        (vec![dir.as_str()], "is a directory"),
        (vec![plain.as_str()], "is not executable"),
        (vec![orphan.as_str()], " does not exist (on this node: /no/such/interpreter)"),
        (vec!["a\0b"], "the program's name has a NUL byte in it"),
        (vec!["./\nfake log line"], "fake log line"),
    ] {
        let started_at = Instant::now();
        refused(&rig.run(support::argv(&argv)).await.report, error);
        assert!(started_at.elapsed() < Duration::from_secs(10));
    }
    let report = rig.run(argv(&[&garbage])).await.report;
    assert!(matches!(report.outcome, Outcome::Failed { retryable: _, .. }), "{report:?}");

    // A directory of the `PATH` is not for everybody.
    let mut work = Work { cwd: Some(dir.clone()), ..argv(&["plain"]) };
    work.env.insert("PATH".into(), dir.clone());
    let error = format!("plain is not executable; chmod +x would make it so (on this node: {plain})");
    refused(&rig.run(work).await.report, &format!("cannot start plain: {error}"));

    // `PATH=` finds nothing, not even in the directory of the agent.
    let mut work = Work { cwd: Some(dir), ..argv(&["plain"]) };
    std::fs::set_permissions(&plain, PermissionsExt::from_mode(0o700)).unwrap();
    work.env.insert("PATH".into(), String::new());
    refused(&rig.run(work).await.report, "cannot start plain: not found in PATH (on this node: )");
    let mut work = argv(&["plain"]);
    work.env.insert("PATH".into(), "/opt/${API_TOKEN}/bin".into());
    refused(
        &rig.run(work).await.report,
        "cannot start plain: not found in PATH (on this node: /opt/***/bin)",
    );
}

async fn an_argument_that_no_program_can_get_is_explained(rig: Rig) {
    refused(&rig.run(argv(&["echo", "ok", "a\0b"])).await.report, "argument 2 has a NUL byte in it");
    let mut attempt = rig.attempt(argv(&["echo", "{{ payload.x }}"]));
    attempt.payload = payload(json!({"x": "a\u{0}b"}));
    refused(&rig.run_attempt(attempt.clone()).await.report, "argument 1 has a NUL byte in it");
    attempt.payload = payload(json!({ "x": "x".repeat(3 << 20) }));
    refused(&rig.run_attempt(attempt.clone()).await.report, "arguments (3145729 bytes)");
    let mut work = shell("echo \"$X\"");
    work.env.insert("X".into(), "{{ payload.x }}".into());
    attempt.agent_definition = rig.attempt(work).agent_definition;
    refused(&rig.run_attempt(attempt).await.report, "are longer than the system takes");
}

async fn a_payload_that_cannot_be_read_starts_nothing(rig: Rig) {
    let (mark, deep) = (rig.path("mark"), "[".repeat(1000));
    for stored in ["{\"broken", "", "1e999", "\"\\ud800\"", &deep] {
        let mut attempt = rig.attempt(argv(&["touch", mark.to_str().unwrap()]));
        attempt.payload = StoredPayload::new(Trigger::Manual, stored);
        refused(&rig.run_attempt(attempt).await.report, "its stored payload cannot be read: ");
    }
    assert!(!mark.exists());
}

async fn a_variable_that_no_environment_can_hold_is_explained(rig: Rig) {
    for (name, value, error) in [
        ("", "1", "env \"\": a variable needs a name"),
        ("A=B", "1", "env \"A=B\": a variable's name cannot contain '='"),
        ("A\nB", "1", "env \"A\\nB\": a variable's name cannot contain a line end"),
        ("A", "a\0b", "env A: the value has a NUL byte in it"),
        ("BELFRY_RUN_ID", "1", "BELFRY_ are Belfry's own"),
        ("A", "${BELFRY_STORE}", "BELFRY_ are Belfry's own"),
    ] {
        let mut work = argv(&["true"]);
        work.env.insert(name.into(), value.into());
        refused(&rig.run(work).await.report, error);
    }
    refused(
        &rig.run(Work { env_pass: vec!["BELFRY_STORE".into()], ..argv(&["true"]) }).await.report,
        "Belfry's own",
    );
}

async fn hostile_variables_reach_only_the_program(rig: Rig) {
    let mut work = argv(&["/bin/sh", "-c", "echo $LD_PRELOAD"]);
    work.env.insert("LD_PRELOAD".into(), "/no/such/library.so".into());
    work.env.insert("LD_LIBRARY_PATH".into(), "/no/such".into());
    let done = rig.run(work).await;
    assert_eq!(done.stdout, "/no/such/library.so\n");
    // Once, from the program itself.
    assert_eq!(done.stderr.matches("/no/such/library.so").count(), 1, "{}", done.stderr);
}

async fn a_directory_that_is_not_there_is_explained(rig: Rig) {
    let gone = rig.path("gone").to_string_lossy().into_owned();
    let file = rig.path("file").to_string_lossy().into_owned();
    std::fs::write(&file, "").unwrap();
    for (cwd, error) in [
        (gone.as_str(), "does not exist"),
        (file.as_str(), "is not a directory"),
        ("relative", "is not absolute"),
    ] {
        refused(&rig.run(Work { cwd: Some(cwd.into()), ..argv(&["true"]) }).await.report, error);
    }
    // The child's own root, not the way to anything else.
    let done = rig.run(Work { cwd: Some("/proc/self/root".into()), ..argv(&["/bin/pwd", "-P"]) }).await;
    assert_eq!(done.stdout, "/\n");
}

/// Starts `line`, which writes pids into the files that `$A` and `$B` name, and waits for both.
async fn start_two(rig: &Rig, line: &str, grace_ms: u64) -> (support::Live, i32, i32) {
    let (a, b) = (rig.path("a"), rig.path("b"));
    let live =
        rig.start(Work { grace_ms, ..shell(&format!("A={}; B={}; {line}", a.display(), b.display())) });
    let pids = (pid_in(&a).await, pid_in(&b).await);
    (live, pids.0, pids.1)
}

async fn a_group_that_ignores_term_is_gone_before_the_report(rig: Rig) {
    let line = "trap '' TERM; sh -c 'echo $$ > '$B'; while :; do sleep 1; done' & echo $$ > $A; while :; do sleep 1; done";
    let (live, a, b) = start_two(&rig, line, 100).await;
    live.stop(Stop::Cancel(Reason::Overlap));
    let done = live.done().await;
    assert_eq!(done.report.outcome, Outcome::Cancelled(Reason::Overlap));
    assert!(!lives(a) && !lives(b));
}

async fn a_background_process_ends_with_its_leader(rig: Rig) {
    let line = "trap '' TERM; sh -c 'echo $$ > '$B'; exec sleep 1000' & echo $$ > $A; while [ ! -s $B ]; do :; done; exit 3";
    let (live, _, b) = start_two(&rig, line, 100).await;
    let done = live.done().await;
    assert_eq!(done.report.exit_code, Some(3));
    assert!(!lives(b));
}

const DAEMON: &str = "setsid sh -c 'trap \"\" TERM; echo $$ > '$B'; while :; do sleep 1; done'";

async fn a_daemon_that_holds_the_pipe_cannot_keep_the_run_open(rig: Rig) {
    let line = format!("{DAEMON} & echo $$ > $A; while [ ! -s $B ]; do :; done; echo done");
    let started_at = Instant::now();
    let (live, _, b) = start_two(&rig, &line, 100).await;
    let done = live.done().await;
    assert_eq!((done.report.outcome, done.stdout.as_str()), (Outcome::Completed, "done\n"));
    assert!(started_at.elapsed() < Duration::from_secs(20), "{:?}", started_at.elapsed());
    assert!(!lives(b));
}

async fn a_daemon_that_hides_cannot_keep_the_run_open(rig: Rig) {
    // No child id, no group, and by the time we look no parent: it can be neither found nor waited for.
    let line = format!("env -i {DAEMON} & echo $$ > $A; while [ ! -s $B ]; do :; done; echo done");
    let (live, _, b) = start_two(&rig, &line, 100).await;
    let done = live.done().await;
    assert_eq!((done.report.outcome, done.stdout.as_str()), (Outcome::Completed, "done\n"));
    if lives(b) {
        support::signal(b, nix::sys::signal::Signal::SIGKILL);
    }
}

async fn a_daemon_without_the_pipe_may_outlive_a_run_that_ends_by_itself(rig: Rig) {
    let line = format!("{DAEMON} >/dev/null 2>&1 & echo $$ > $A; while [ ! -s $B ]; do :; done");
    let (live, _, b) = start_two(&rig, &line, 100).await;
    assert_eq!(live.done().await.report.outcome, Outcome::Completed);
    assert!(lives(b));
    support::signal(b, nix::sys::signal::Signal::SIGKILL);
}

async fn a_cancel_also_ends_who_left_the_group(rig: Rig) {
    // Its parent is gone, it has another session, and does not hold the pipes: only the child id is left.
    let line = format!("({DAEMON} >/dev/null 2>&1 &); trap '' TERM; echo $$ > $A; while :; do sleep 1; done");
    let (live, a, b) = start_two(&rig, &line, 100).await;
    live.stop(Stop::Cancel(Reason::Overlap));
    live.done().await;
    assert!(!lives(a) && !lives(b));
}

async fn a_cancel_ends_who_has_cleaned_its_environment(rig: Rig) {
    let line =
        format!("env -i {DAEMON} >/dev/null 2>&1 & trap '' TERM; echo $$ > $A; while :; do sleep 1; done");
    let (live, a, b) = start_two(&rig, &line, 100).await;
    live.stop(Stop::Cancel(Reason::Overlap));
    live.done().await;
    assert!(!lives(a) && !lives(b));
}

async fn a_child_that_forks_and_forks_is_ended(rig: Rig) {
    let pids = rig.path("pids");
    // A thousand that wait, some of them in other sessions, and a parent that never stops.
    let line = format!(
        "trap '' TERM; i=0; while :; do i=$((i+1)); \
         if [ $i -le 300 ]; then sh -c 'trap \"\" TERM; echo $$ >> {0}; exec sleep 1000' & \
         else setsid sh -c 'echo $$ >> {0}; exec sleep 0.2' >/dev/null & fi; \
         [ $i -eq 400 ] && echo started; done",
        pids.display()
    );
    let mut live = rig.start(Work { grace_ms: 50, ..shell(&line) });
    live.says("started").await;
    live.stop(Stop::Cancel(Reason::Requested));
    live.done().await;
    let all = std::fs::read_to_string(&pids).unwrap();
    let left: Vec<&str> = all.lines().filter(|pid| pid.parse().is_ok_and(lives)).collect();
    assert!(left.is_empty(), "{left:?} of {}", all.lines().count());
}

async fn a_child_in_another_group_is_ended(rig: Rig) {
    // Job control puts each job into a group of its own.
    let line =
        "set -m; sh -c 'trap \"\" TERM; echo $$ > '$B'; while :; do sleep 1; done' & echo $$ > $A; wait";
    let (live, a, b) = start_two(&rig, line, 100).await;
    live.stop(Stop::Cancel(Reason::Requested));
    live.done().await;
    assert!(!lives(a) && !lives(b));
}

async fn a_stopped_child_is_ended(rig: Rig) {
    let pid = rig.path("pid");
    let line = format!("trap 'echo bye; exit' TERM; echo $$ > {}; kill -STOP $$; sleep 1000", pid.display());
    let live = rig.start(Work { grace_ms: 60_000, ..shell(&line) });
    pid_in(&pid).await;
    live.stop(Stop::Cancel(Reason::Requested));
    assert_eq!(live.done().await.stdout, "bye\n");
}

async fn a_process_whose_first_thread_has_ended_is_ended(rig: Rig) {
    // It looks like a zombie. Python is the shortest way to one.
    let code = "import ctypes, threading, time, os, signal, sys\n\
                signal.signal(signal.SIGTERM, signal.SIG_IGN)\n\
                os.setsid()\n\
                open(sys.argv[1], 'w').write(f'{os.getpid()}\\n')\n\
                threading.Thread(target=lambda: time.sleep(1000)).start()\n\
                ctypes.CDLL(None).pthread_exit(None)";
    if std::process::Command::new("python3").arg("-V").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    let line =
        "python3 -c \"$CODE\" $B >/dev/null 2>&1 & echo $$ > $A; trap '' TERM; while :; do sleep 1; done";
    let (a, b) = (rig.path("a"), rig.path("b"));
    let mut work = Work { grace_ms: 100, ..shell(&format!("A={}; B={}; {line}", a.display(), b.display())) };
    work.env.insert("CODE".into(), code.into());
    let live = rig.start(work);
    let (leader, hidden) = (pid_in(&a).await, pid_in(&b).await);
    live.stop(Stop::Cancel(Reason::Requested));
    live.done().await;
    assert!(!lives(leader));
    let threads = std::fs::read_dir(format!("/proc/{hidden}/task")).map_or(0, Iterator::count);
    assert!(!lives(hidden) && threads <= 1, "{threads} threads");
}

async fn a_hundred_that_ignore_term_are_ended_at_once(rig: Rig) {
    let pids = rig.path("pids");
    std::fs::create_dir(&pids).unwrap();
    let line = format!("trap '' TERM; echo > {}/$$; while :; do sleep 1; done", pids.display());
    let all: Vec<_> = (0..100).map(|_| rig.start(Work { grace_ms: 100, ..shell(&line) })).collect();
    while std::fs::read_dir(&pids).unwrap().count() < 100 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    all.iter().for_each(|live| live.stop(Stop::Shutdown));
    for live in all {
        assert_eq!(live.done().await.report.outcome, Outcome::Shutdown);
    }
    for pid in std::fs::read_dir(&pids).unwrap().flatten() {
        assert!(!lives(pid.file_name().to_str().unwrap().parse().unwrap()));
    }
}

async fn closed_pipes_are_not_the_end(rig: Rig) {
    let go = rig.path("go");
    let closed = rig.path("closed");
    let line = format!(
        "exec >&- 2>&- 0>&-; echo > {}; while [ ! -e {} ]; do sleep 0.01; done; exit 7",
        closed.display(),
        go.display()
    );
    let live = rig.start(shell(&line));
    support::line_in(&closed).await;
    assert!(!live.task.is_finished());
    std::fs::write(&go, "").unwrap();
    assert_eq!(live.done().await.report.exit_code, Some(7));
}

async fn output_without_a_line_end_is_passed_on_while_it_runs(rig: Rig) {
    let mut live = rig.start(shell("printf 'progress 50%%'; exec sleep 1000"));
    live.says("progress 50%").await;
    live.stop(Stop::Cancel(Reason::Requested));
    live.done().await;
}

async fn output_is_bytes_and_nothing_is_read_into_it(rig: Rig) {
    let text = r"\377\376\000 \033]52;c;aGk=\007\033[31mred\033[0m 10%%\r20%%\n2026-01-01 ERROR event=fake\n";
    let done = rig.run(shell(&format!("printf '{text}'; printf err >&2"))).await;
    assert_eq!(
        done.bytes,
        b"\xff\xfe\0 \x1b]52;c;aGk=\x07\x1b[31mred\x1b[0m 10%\r20%\n2026-01-01 ERROR event=fake\n"
    );
    assert_eq!(done.stderr, "err");
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

async fn endless_output_is_capped_and_memory_with_it(rig: Rig) {
    // One line of 200 MB, then its end.
    let before = resident_kib();
    let line = "head -c 200000000 /dev/zero | tr '\\0' x; echo the end";
    let done = rig.run(Work { output_bytes: 1 << 20, ..shell(line) }).await;
    let grown = resident_kib().saturating_sub(before);
    assert_eq!(done.report.outcome, Outcome::Completed);
    assert!(done.bytes.len() <= 1 << 20 && done.bytes.len() > 1_000_000, "{}", done.bytes.len());
    assert!(done.stdout.contains(" bytes of output left out …]\n"));
    assert!(done.stdout.ends_with("xxthe end\n"));
    // Others run beside us.
    assert!(grown < 100 << 10, "{grown} KiB");

    let pid = rig.path("pid");
    let line = format!("echo $$ > {}; exec yes", pid.display());
    let live = rig.start(Work { output_bytes: 100_000, timeout_ms: Some(500), ..shell(&line) });
    let done = live.done().await;
    assert_eq!(done.report.outcome, Outcome::Failed { reason: Reason::Timeout, retryable: true });
    assert!(done.bytes.len() <= 100_000);
    assert!(!lives(pid_in(&pid).await));
}

async fn the_pipe_drains_although_nobody_takes_the_output(rig: Rig) {
    let mark = rig.path("mark");
    let line = format!("head -c 5000000 /dev/zero; echo > {}", mark.display());
    let live = rig.start(shell(&line));
    // The child ends although the receiver has not taken a single chunk.
    support::line_in(&mark).await;
    let done = live.done().await;
    assert_eq!(done.report.outcome, Outcome::Completed);
    assert!(done.bytes.len() <= 1 << 20 && done.bytes.len() > 1_000_000, "{}", done.bytes.len());
}

async fn nobody_wants_the_output(rig: Rig) {
    let mut live = rig.start(shell("head -c 5000000 /dev/zero"));
    live.output.close();
    while live.output.recv().await.is_some() {}
    assert_eq!(live.task.await.unwrap().outcome, Outcome::Completed);
}

async fn a_secret_is_masked_over_two_writes(rig: Rig) {
    let go = rig.path("go");
    let line = format!(
        "printf 'ready '; printf 'key hunter2-'; while [ ! -e {} ]; do sleep 0.01; done; printf 'secret, '; printf hunter2-",
        go.display()
    );
    let mut work = shell(&line);
    work.env.insert("KEY".into(), "${API_TOKEN}".into());
    let mut live = rig.start(work);
    live.says("key ").await;
    assert!(!String::from_utf8_lossy(&live.stdout).contains("hunter2"));
    std::fs::write(&go, "").unwrap();
    // What only looked like one is shown in the end.
    assert_eq!(live.done().await.stdout, "ready key ***, hunter2-");
}

async fn what_was_written_last_is_not_lost(rig: Rig) {
    // Someone holds the pipe, whom nobody can find: what was there is taken all the same.
    let line = "env -i setsid sleep 3 & head -c 60000 /dev/zero; echo last";
    let done = rig.run(shell(line)).await;
    assert_eq!(done.bytes.len(), 60_005);
    assert!(done.stdout.ends_with("last\n"));
}

async fn a_link_in_the_place_of_private_directories_leads_nothing_away(rig: Rig) {
    let elsewhere = rig.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let line = format!(
        r#"d=$(dirname "$(dirname "$BELFRY_RESULT_FILE")"); mv "$d" "$d.moved" && ln -s '{}' "$d""#,
        elsewhere.display()
    );
    assert_eq!(rig.run(shell(&line)).await.report.outcome, Outcome::Completed);
    let done =
        rig.run(shell(r#"dirname "$BELFRY_RESULT_FILE"; ls "$(dirname "$BELFRY_RESULT_FILE")""#)).await;
    assert_eq!((done.report.outcome, &done.report.summary), (Outcome::Completed, &None), "{done:?}");
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}

async fn a_private_directory_of_any_depth_is_removed(rig: Rig) {
    // Three thousand levels, put together from chains that a path can still name.
    let line = r#"
        cd "$(dirname "$BELFRY_PAYLOAD_FILE")" && chain=$(printf 'd/%.0s' $(seq 1000)) && mkdir all
        for _ in $(seq 3); do mkdir -p "next/$chain" && mv all "next/$chain" && mv next all || exit 1; done
    "#;
    let done = rig.run(shell(line)).await;
    assert_eq!((done.report.outcome, &done.report.summary), (Outcome::Completed, &None), "{done:?}");
    assert_eq!(std::fs::read_dir(rig.path("state/attempts")).unwrap().count(), 0);
    assert_eq!(rig.run(argv(&["true"])).await.report.outcome, Outcome::Completed);
}
