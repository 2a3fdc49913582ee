//! What an attempt gets, and how its end is judged.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use belfry_core::model::Reason;
use belfry_core::retry::Outcome;
use belfry_core::work::{Action, Stdin, Work};
use belfry_runner::{Stop, Usage};
use serde_json::json;
use support::{Rig, argv, is_gone, line_in, lives, payload, pid_in, set_template, shell};

fn main() -> ExitCode {
    support::main(both_ways![
        arguments_are_templates_and_never_split,
        a_value_is_one_word_of_a_shell_line_or_the_line_is_refused,
        what_looks_like_another_template_is_text_of_a_shell_line,
        a_prompt_of_a_definition_is_a_template_and_a_payload_is_not,
        a_prompt_of_a_run_is_used_as_it_is,
        an_error_is_one_line,
        a_command_can_be_another_program,
        the_environment_is_an_allow_list,
        a_reference_that_is_not_set_is_named,
        the_child_inherits_no_other_file,
        stdin_is_what_was_asked_for,
        a_child_that_never_reads_its_stdin_ends,
        the_directory_is_the_agents,
        exit_codes_are_judged,
        a_signal_is_named,
        a_timeout_is_a_failure_that_may_be_retried,
        a_cancelled_child_is_asked_first,
        a_cancel_before_the_start_starts_nothing,
        a_shutdown_is_told_apart,
        a_shutdown_in_a_hurry_cuts_the_grace_short,
        a_dropped_future_leaves_no_child,
        a_handler_is_not_a_process,
        the_result_file_is_read,
        a_bad_result_file_is_no_failure,
        the_private_directory_is_private_and_goes_away,
        a_disk_that_takes_nothing_is_waited_for,
        a_start_that_hangs_can_be_cancelled_and_is_in_nobodys_way,
    ])
}

async fn arguments_are_templates_and_never_split(rig: Rig) {
    let argv = [
        "printf",
        "[%s]",
        "{{ payload.x }}",
        "{{ agent }}/{{ schedule }} {{ command }} {{ tick_at }}",
        "{{ payload.n | json }}",
    ];
    let mut attempt = rig.attempt(support::argv(&argv));
    attempt.payload = payload(json!({"x": "a 'b' \"c\" $(id) `id` ; * \n --flag", "n": 41}));
    let done = rig.run_attempt(attempt).await;
    assert_eq!(done.report.outcome, Outcome::Completed, "{done:?}");
    assert_eq!(
        done.stdout,
        "[a 'b' \"c\" $(id) `id` ; * \n --flag][reporter/morning poll 2026-05-04T09:00:00Z][41]"
    );
}

/// Lines in which `"$X"` is one word, whatever quotes, comments, substitutions and documents stand around it. `./args` prints
/// how many arguments it got, and which.
const LINES: [&str; 40] = [
    r#"./args "$X""#,
    r#"./args "$(printf %s "$X")""#,
    r#"./args "`printf %s "$X"`""#,
    r#"(./args "$X")"#,
    r#"{ ./args "$X"; }"#,
    r#"case a in a) ./args "$X";; esac"#,
    r#"./args "$(case a in a) printf %s "$X";; esac)""#,
    r#"./args "$( (printf %s "$X") )""#,
    "# don't\n./args \"$X\"",
    r#": "it's"; ./args "$X""#,
    r#": 'a "quote'; ./args "$X""#,
    "cat <<'E' >/dev/null\nit's \"odd\nE\n./args \"$X\"",
    "cat <<E >/dev/null\nit's `printf x` odd\nE\n./args \"$X\"",
    r#"if [ -n "$X" ]; then ./args "$X"; fi"#,
    r#"for f in "$X"; do ./args "$f"; done"#,
    r#"set -- "$X"; ./args "$@""#,
    r#"Y="$X"; ./args "$Y""#,
    r#"Y="$X" sh -c './args "$Y"'"#,
    r#"f() { ./args "$1"; }; f "$X""#,
    r#"printf '%s\0' "$X" | xargs -0 ./args"#,
    r#"./args "$X" | cat"#,
    r#"./args "$X" 2>&1 | sed -n p"#,
    r#"true && ./args "$X""#,
    r#"false || ./args "$X""#,
    r#"! false && ./args "$X""#,
    r#"test "$X" = zzz || ./args "$X""#,
    r#"eval './args "$X"'"#,
    r#"printf %s \" >/dev/null; ./args "$X""#,
    r#"printf %s \' >/dev/null; ./args "$X""#,
    r#"./args "$X" # it's a comment"#,
    r#"./args "$X" </dev/null"#,
    r#"exec ./args "$X""#,
    r#"cd .; ./args "$X""#,
    r#"while :; do ./args "$X"; break; done"#,
    r#"n=$((1 + 1)); ./args "$X""#,
    r#"./args "$(printf %s "`printf %s "$X"`")""#,
    r#"find . -maxdepth 0 -exec ./args "$X" \;"#,
    r#"env ./args "$X""#,
    r#"trap './args "$X"' EXIT"#,
    r#"(cd /; cd "$OLDPWD"; ./args "$X")"#,
];

const VALUES: [&str; 20] = [
    ". -exec touch PWNED ;",
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED",
    "| touch PWNED",
    "&& touch PWNED",
    "x\n touch PWNED\n x",
    "'; touch PWNED; '",
    "\"; touch PWNED; \"",
    "a  b *",
    "\\",
    "${PATH}",
    "'\"'\"'",
    "{{ payload.x }} {% if x %}",
    "$((1+1))",
    "# x",
    "~",
    "-n",
    "é\u{202e}x",
    "x\ty\u{1}",
];

async fn a_value_is_one_word_of_a_shell_line_or_the_line_is_refused(rig: Rig) {
    let dir = rig.dir.path().to_string_lossy().into_owned();
    let script = rig.path("args");
    let text = "#!/bin/sh\nprintf '%s:' \"$#\"\nfor a; do printf '<%s>' \"$a\"; done\n";
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o700)).unwrap();
    for line in LINES {
        let mut work = Work { cwd: Some(dir.clone()), ..shell(line) };
        work.env.insert("X".into(), "{{ payload.x }}".into());
        work.check_templates().unwrap();
        let live: Vec<_> = VALUES
            .iter()
            .map(|x| {
                let mut attempt = rig.attempt(work.clone());
                attempt.payload = payload(json!({ "x": x }));
                rig.start_attempt(attempt)
            })
            .collect();
        for (live, x) in live.into_iter().zip(VALUES) {
            let done = live.done().await;
            assert_eq!(done.stdout, format!("1:<{x}>"), "{line}\n{x:?}: {done:?}");
        }
        // The same line as a template is refused when it is accepted, and starts nothing where it was stored before.
        let written = Work { action: Action::Shell(line.replace("\"$X\"", "{{ payload.x }}")), ..work };
        if matches!(&written.action, Action::Shell(written) if *written != line) {
            assert!(
                written.check_templates().unwrap_err().to_string().contains("`shell` line is not a template")
            );
            let mut attempt = rig.attempt(written);
            attempt.payload = payload(json!({"x": VALUES[0]}));
            let report = rig.run_attempt(attempt).await.report;
            assert_eq!(report.outcome, Outcome::Failed { reason: Reason::Template, retryable: false });
        }
    }
    assert!(!rig.path("PWNED").exists());
}

async fn what_looks_like_another_template_is_text_of_a_shell_line(rig: Rig) {
    let done = rig.run(shell("printf '%s' '{{.Names}} {{ json . }} {{ $x }} {% if %}'")).await;
    assert_eq!(done.stdout, "{{.Names}} {{ json . }} {{ $x }} {% if %}");
}

async fn a_prompt_of_a_definition_is_a_template_and_a_payload_is_not(rig: Rig) {
    let mut attempt = rig.attempt(argv(&["printf", "%s", "{{ prompt }}"]));
    set_template(&mut attempt, "Handle {{ payload.ref }}.");
    attempt.payload = payload(json!({"ref": "{{ 7*7 }} {{ prompt }} ${jndi:x} $where"}));
    let done = rig.run_attempt(attempt.clone()).await;
    assert_eq!(done.stdout, "Handle {{ 7*7 }} {{ prompt }} ${jndi:x} $where.");

    set_template(&mut attempt, "{{ payload.nope }}");
    let report = rig.run_attempt(attempt).await.report;
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::Template, retryable: false });
    let error = report.error.unwrap();
    assert!(error.starts_with("the template `prompt`: `payload.nope` is missing"), "{error}");
}

async fn a_prompt_of_a_run_is_used_as_it_is(rig: Rig) {
    for prompt in
        [format!("{{{{ {}1 }}}}", "-".repeat(6000)), "{{ payload.nope }} {% if".into(), String::new()]
    {
        let mut attempt = rig.attempt(argv(&["printf", "%s", "{{ prompt }}"]));
        attempt.prompt = Some(prompt.clone());
        assert_eq!(rig.run_attempt(attempt).await.stdout, prompt);
    }
}

async fn an_error_is_one_line(rig: Rig) {
    let mut attempt = rig.attempt(argv(&["echo", "{{ payload.x | date }}", "{{ nope\n\n }}"]));
    attempt.payload = payload(json!({"x": "1\n2026-01-01 ERROR event=fake\u{1b}[31m"}));
    let error = rig.run_attempt(attempt.clone()).await.report.error.unwrap();
    assert!(error.contains("run[1]") && !error.contains(char::is_control), "{error:?}");
    attempt.payload = payload(json!({"x": "2026-05-04T09:00:00Z"}));
    let error = rig.run_attempt(attempt).await.report.error.unwrap();
    assert!(error.contains("run[2]") && !error.contains(char::is_control), "{error:?}");
}

async fn a_command_can_be_another_program(rig: Rig) {
    let mut work = argv(&["false"]);
    work.commands.insert("poll".into(), Action::Run(vec!["echo".into(), "{{ command }}".into()]));
    assert_eq!(rig.run(work).await.stdout, "poll\n");
}

async fn the_environment_is_an_allow_list(rig: Rig) {
    let mut work = argv(&["env"]);
    work.env.insert("MODE".into(), "quiet".into());
    work.env.insert("TOKEN".into(), "x ${API_TOKEN}".into());
    work.env.insert("REGION".into(), "${NO_SUCH_VARIABLE:-eu}".into());
    let attempt = rig.attempt(work);
    let run = attempt.run;
    let done = rig.run_attempt(attempt).await;
    let mut lines: Vec<String> = done.stdout.lines().map(str::to_owned).collect();
    lines.sort();
    let state = rig.path("state").join("attempts").join(rig.node.to_string()).join(format!("{run}.3"));
    let path = std::env::var("PATH").unwrap();
    let span = lines.iter().find_map(|line| line.strip_prefix("TRACEPARENT=")).unwrap()[36..52].to_owned();
    let mut wanted = vec![
        "BELFRY_AGENT=reporter".to_owned(),
        "BELFRY_ATTEMPT=2".into(),
        "BELFRY_COMMAND=poll".into(),
        "BELFRY_EPOCH=3".into(),
        format!("BELFRY_PAYLOAD_FILE={}/payload.json", state.display()),
        format!("BELFRY_RESULT_FILE={}/result.json", state.display()),
        format!("BELFRY_RUN_ID={run}"),
        "BELFRY_SCHEDULE=morning".into(),
        "BELFRY_TICK_AT=2026-05-04T09:00:00Z".into(),
        "BELFRY_CHILD_ID=***".into(),
        "BELFRY_TRACE_ID=00000000000000000000000000001234".into(),
        "HOME=/".into(),
        "LC_ALL=C".into(),
        "MODE=quiet".into(),
        format!("PATH={path}"),
        "REGION=eu".into(),
        "TOKEN=x ***".into(),
        format!("TRACEPARENT=00-00000000000000000000000000001234-{span}-01"),
    ];
    wanted.sort();
    assert_eq!(lines, wanted);
    assert!(u64::from_str_radix(&span, 16).unwrap() != 0);
}

async fn a_reference_that_is_not_set_is_named(rig: Rig) {
    let mut work = argv(&["env"]);
    work.env.insert("TOKEN".into(), "${NO_SUCH_VARIABLE}".into());
    let report = rig.run(work).await.report;
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::SpawnFailed, retryable: false });
    let error = report.error.unwrap();
    assert!(error.contains("env TOKEN: its variable is not set"), "{error}");
    assert!(error.ends_with("(on this node: NO_SUCH_VARIABLE)"), "{error}");
}

async fn the_child_inherits_no_other_file(rig: Rig) {
    // Nothing may come to what any child of this process has open.
    let line = "for f in /proc/$$/fd/*; do echo ${f##*/}; done";
    let before = std::process::Command::new("sh").args(["-c", line]).output().unwrap().stdout;
    let before = String::from_utf8(before).unwrap();
    // Several at once, so that some start while the pipes of others are open.
    let live: Vec<_> = (0..8).map(|_| rig.start(shell(line))).collect();
    for live in live {
        assert_eq!(live.done().await.stdout, before);
    }
}

async fn stdin_is_what_was_asked_for(rig: Rig) {
    let mut attempt = rig.attempt(Work { stdin: Stdin::Prompt, ..argv(&["cat"]) });
    set_template(&mut attempt, "Hello {{ payload.who }}\n");
    attempt.payload = payload(json!({"who": "you"}));
    assert_eq!(rig.run_attempt(attempt).await.stdout, "Hello you\n");

    let work = Work { stdin: Stdin::Payload, ..shell("cat; cat $BELFRY_PAYLOAD_FILE") };
    let mut attempt = rig.attempt(work);
    attempt.payload = payload(json!({"a": 1, "b": 3}));
    assert_eq!(rig.run_attempt(attempt).await.stdout, r#"{"a":1,"b":3}{"a":1,"b":3}"#);

    assert_eq!(rig.run(argv(&["cat"])).await.stdout, "");
}

async fn a_child_that_never_reads_its_stdin_ends(rig: Rig) {
    let mut attempt = rig.attempt(Work { stdin: Stdin::Prompt, ..argv(&["true"]) });
    attempt.prompt = Some("x".repeat(4 << 20));
    assert_eq!(rig.run_attempt(attempt).await.report.outcome, Outcome::Completed);
}

async fn the_directory_is_the_agents(rig: Rig) {
    let dir = rig.dir.path().canonicalize().unwrap();
    let work = Work { cwd: Some(dir.to_string_lossy().into_owned()), ..argv(&["./here"]) };
    let here = rig.path("here");
    std::fs::write(&here, "#!/bin/sh\npwd\n").unwrap();
    std::fs::set_permissions(&here, PermissionsExt::from_mode(0o700)).unwrap();
    let done = rig.run(work).await;
    assert_eq!(done.stdout, format!("{}\n", dir.display()), "{done:?}");
}

async fn exit_codes_are_judged(rig: Rig) {
    let failed = |retryable| Outcome::Failed { reason: Reason::ExitCode, retryable };
    for (code, outcome) in [
        (0, Outcome::Completed),
        (1, failed(true)),
        (78, failed(false)),
        (255, failed(true)),
        (3, Outcome::Completed),
    ] {
        let work = Work { ok_codes: vec![0, 3], ..shell(&format!("exit {code}")) };
        let report = rig.run(work).await.report;
        assert_eq!((report.outcome, report.exit_code), (outcome, Some(code)));
        assert_eq!(report.error, (outcome != Outcome::Completed).then(|| format!("exit code {code}")));
    }
}

async fn a_signal_is_named(rig: Rig) {
    let report = rig.run(shell("ulimit -c 0; kill -SEGV $$")).await.report;
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::ExitCode, retryable: true });
    assert_eq!(report.error.unwrap(), "killed by signal 11 (SIGSEGV)");
    assert_eq!(report.exit_code, None);
}

async fn a_timeout_is_a_failure_that_may_be_retried(rig: Rig) {
    let pid = rig.path("pid");
    let work = Work {
        timeout_ms: Some(200),
        ..shell(&format!("echo $$ > {}; trap '' TERM; sleep 1000", pid.display()))
    };
    let started_at = Instant::now();
    let report = rig.run(work).await.report;
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::Timeout, retryable: true });
    assert_eq!(report.error.unwrap(), "took longer than 200ms");
    assert!(started_at.elapsed() >= Duration::from_millis(500));
    assert!(!lives(pid_in(&pid).await));
}

async fn a_cancelled_child_is_asked_first(rig: Rig) {
    let pid = rig.path("pid");
    let line = format!(
        "trap 'echo tidied up; exit 0' TERM; echo $$ > {}; while :; do sleep 0.05; done",
        pid.display()
    );
    let live = rig.start(Work { grace_ms: 60_000, ..shell(&line) });
    let pid = pid_in(&pid).await;
    live.stop(Stop::Cancel(Reason::Requested));
    let done = live.done().await;
    assert_eq!(done.report.outcome, Outcome::Cancelled(Reason::Requested));
    assert_eq!(done.stdout, "tidied up\n");
    assert!(!lives(pid));
}

async fn a_cancel_before_the_start_starts_nothing(rig: Rig) {
    let (cancel, receiver) = belfry_runner::cancellation();
    cancel.send(Some(Stop::Cancel(Reason::Overlap))).unwrap();
    let (sender, _output) = tokio::sync::mpsc::channel(1);
    let mark = rig.path("mark");
    let attempt = rig.attempt(shell(&format!("touch {}", mark.display())));
    let report = rig.runner.run(attempt, receiver, sender).await;
    assert_eq!(report.outcome, Outcome::Cancelled(Reason::Overlap));
    assert!(!mark.exists());
}

async fn a_shutdown_is_told_apart(rig: Rig) {
    let pid = rig.path("pid");
    let live = rig.start(shell(&format!("echo $$ > {}; sleep 1000", pid.display())));
    pid_in(&pid).await;
    live.stop(Stop::Shutdown);
    assert_eq!(live.done().await.report.outcome, Outcome::Shutdown);
}

async fn a_shutdown_in_a_hurry_cuts_the_grace_short(rig: Rig) {
    let pid = rig.path("pid");
    let asked = rig.path("asked");
    let line = format!(
        "trap 'echo > {}' TERM; echo $$ > {}; while :; do sleep 0.05; done",
        asked.display(),
        pid.display()
    );
    let live = rig.start(Work { grace_ms: 600_000, ..shell(&line) });
    pid_in(&pid).await;
    live.stop(Stop::Shutdown);
    line_in(&asked).await;
    live.stop(Stop::ShutdownNow);
    assert_eq!(live.done().await.report.outcome, Outcome::Shutdown);
}

async fn a_dropped_future_leaves_no_child(rig: Rig) {
    let pid = rig.path("pid");
    let live = rig.start(shell(&format!("trap '' TERM; echo $$ > {}; sleep 1000", pid.display())));
    let pid = pid_in(&pid).await;
    live.task.abort();
    is_gone(pid, support::DEADLINE).await;
}

async fn a_handler_is_not_a_process(rig: Rig) {
    let report = rig.run(Work::default()).await.report;
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::SpawnFailed, retryable: false });
}

async fn the_result_file_is_read(rig: Rig) {
    let mut work = shell(
        r#"echo '{"summary":"3 mails, key '$KEY'","tokens":1200,"context_window":200000,"cost_usd":0.25,"more":1}' > $BELFRY_RESULT_FILE; exit 1"#,
    );
    work.env.insert("KEY".into(), "${API_TOKEN}".into());
    let report = rig.run(work).await.report;
    assert_eq!(report.summary.unwrap(), "3 mails, key ***");
    let usage = Usage { tokens: Some(1200), context_window: Some(200_000), cost_usd: Some(0.25) };
    assert_eq!(report.usage, Some(usage));
    assert_eq!(report.outcome, Outcome::Failed { reason: Reason::ExitCode, retryable: true });
    // A secret at the place where the summary is cut.
    for before in 3980..4000 {
        let line = format!("printf '{{\"summary\":\"%0{before}d%s\"}}' 0 \"$KEY\" > $BELFRY_RESULT_FILE");
        let mut work = shell(&line);
        work.env.insert("KEY".into(), "${API_TOKEN}".into());
        let summary = rig.run(work).await.report.summary.unwrap();
        assert!(summary.trim_start_matches('0').chars().all(|c| "*…".contains(c)), "{before}: {summary}");
    }
}

async fn a_bad_result_file_is_no_failure(rig: Rig) {
    for (line, problem) in [
        ("echo '{' > $F", "EOF"),
        ("echo '[1]' > $F", "it must be a JSON object"),
        ("echo '{\"tokens\":-1}' > $F", "tokens must be a whole number up to 1000000000000"),
        ("echo '{\"tokens\":9223372036854775807}' > $F", "tokens must be a whole number up to 1000000000000"),
        (
            "printf %s '{\"tokens\":\"a \\\\ value\"}' > $F",
            "ignored: tokens must be a whole number up to 1000000000000",
        ),
        ("echo '{\"summary\":1}' > $F", "summary must be a text"),
        ("echo '{\"cost_usd\":1e999}' > $F", "number out of range"),
        ("echo '{\"cost_usd\":1e300}' > $F", "cost_usd must be a number from 0"),
        ("echo '{\"cost_usd\":-0.5}' > $F", "cost_usd must be a number from 0"),
        ("head -c 70000 /dev/zero > $F", "longer than 64 KiB"),
        ("mkfifo $F", "not a file"),
        ("mkdir $F", "not a file"),
        ("ln -s /etc/passwd $F", "symbolic links"),
        ("printf '\\377' > $F", "expected value"),
    ] {
        let report = rig.run(shell(&format!("F=$BELFRY_RESULT_FILE; {line}"))).await.report;
        assert_eq!(report.outcome, Outcome::Completed);
        let summary = report.summary.unwrap_or_default();
        assert!(summary.starts_with("the result file was ignored: "), "{line}: {summary}");
        assert!(summary.contains(problem), "{line}: {summary}");
    }
    let report = rig.run(shell("printf '{\"summary\":\"a\\\\u0000b\"}' > $BELFRY_RESULT_FILE")).await.report;
    assert_eq!(report.summary.unwrap(), "a\u{fffd}b");
    assert_eq!(rig.run(shell("echo > $BELFRY_RESULT_FILE")).await.report.summary, None);
}

async fn the_private_directory_is_private_and_goes_away(rig: Rig) {
    let line =
        "D=$(dirname $BELFRY_PAYLOAD_FILE); stat -c %a $D $(dirname $D) $D/../.. $D/payload.json $D/stdin";
    let work = Work { stdin: Stdin::Prompt, ..shell(line) };
    let done = rig.run(work).await;
    assert_eq!(done.stdout, "700\n700\n700\n600\n600\n", "{done:?}");
    assert_eq!(std::fs::read_dir(rig.path("state/attempts")).unwrap().count(), 0);
}

fn mount(arguments: &[&str], at: &Path) {
    let status = Command::new("mount").args(arguments).arg(at).status().unwrap();
    assert!(status.success(), "mount {arguments:?} {}", at.display());
}

/// A small disk of its own, gone when dropped.
struct Disk(PathBuf);

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

async fn a_disk_that_takes_nothing_is_waited_for(rig: Rig) {
    if !nix::unistd::Uid::effective().is_root() {
        println!("SKIPPED: only root can mount a small disk");
        return;
    }
    let disk = Disk(rig.path("state"));
    std::fs::create_dir(&disk.0).unwrap();
    mount(&["-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs"], &disk.0);
    let filler = disk.0.join("filler");
    let ran = rig.path("ran");
    for full in [true, false] {
        match full {
            true => assert!(std::fs::write(&filler, vec![0; 1 << 20]).is_err()),
            false => mount(&["-o", "remount,ro"], &disk.0),
        }
        let mut live = rig.start(shell(&format!("echo ran >> {}", ran.display())));
        // A try takes a few milliseconds; it must be followed by others.
        let waited = tokio::time::timeout(Duration::from_millis(500), &mut live.task).await;
        assert!(waited.is_err(), "{waited:?}");
        assert!(!ran.exists());
        match full {
            true => std::fs::remove_file(&filler).unwrap(),
            false => mount(&["-o", "remount,rw"], &disk.0),
        }
        let done = live.done().await;
        assert_eq!(done.report.outcome, Outcome::Completed, "{done:?}");
        assert_eq!(std::fs::read_to_string(&ran).unwrap(), "ran\n");
        std::fs::remove_file(&ran).unwrap();
    }
}

/// A file system that answers nothing, as one whose server is away.
async fn a_start_that_hangs_can_be_cancelled_and_is_in_nobodys_way(rig: Rig) {
    let fuse = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    let Some(fuse) = fuse.ok().filter(|_| nix::unistd::Uid::effective().is_root()) else {
        println!("SKIPPED: only root can mount a file system that does not answer");
        return;
    };
    let disk = Disk(rig.path("hangs"));
    std::fs::create_dir(&disk.0).unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("hangs"), &disk.0, Some("fuse"), flags, Some(options.as_str())).unwrap();
    let cwd = Some(disk.0.display().to_string());
    let hung: Vec<_> = (0..8).map(|_| rig.start(Work { cwd: cwd.clone(), ..shell("true") })).collect();
    assert_eq!(rig.run(shell("true")).await.report.outcome, Outcome::Completed);
    for live in &hung {
        live.cancel.send(Some(Stop::Cancel(Reason::Requested))).unwrap();
    }
    for live in hung {
        let done = live.done().await;
        assert_eq!(done.report.outcome, Outcome::Cancelled(Reason::Requested), "{done:?}");
    }
    // Whoever still waits for it is told that it is gone.
    drop(fuse);
}
