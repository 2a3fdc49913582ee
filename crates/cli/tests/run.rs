//! `belfry run`, `cancel` and `retry`, with a server and without.

#![allow(clippy::unwrap_used)]

mod support;

use belfry_core::{Reason, RunState, Trigger};
use belfry_store::{RunFilter, RunRecord, Store};
use nix::sys::signal::Signal;
use serde_json::json;
use support::Site;

/// `block` ends when the file `go` is there; it says so before it waits.
const CONFIG: &str = r#"
agents:
  a:
    shell: 'echo "$1 $BELFRY_PAYLOAD" >&2; echo "says $PROMPT"'
    env: {PROMPT: "{{ prompt }}"}
    prompt: hello
    retry: {max: 0}
    schedules:
      plain: {cron: "0 0 1 1 *"}
      other: {cron: "0 0 1 1 *", prompt: "other {{ payload.n }}{{ payload.m | default('') }}", payload: {n: 1}}
  failing:
    shell: 'echo try >> tries; exit 3'
    retry: {max: 1, base: 100ms}
    schedules: {s: {cron: "0 0 1 1 *"}}
  block:
    shell: 'echo $BELFRY_ATTEMPT >> started; echo blocking; while ! [ -e go ]; do sleep 0.02; done; echo free'
    retry: {max: 3, base: 100ms}
    schedules: {s: {cron: "0 0 1 1 *"}, t: {cron: "0 0 1 1 *"}}
"#;

fn runs(site: &Site) -> Vec<RunRecord> {
    site.store(async |store| {
        let mut runs = Vec::new();
        for listed in store.runs(&RunFilter::default(), None, 100).await.unwrap().items {
            // With what lists leave out.
            runs.extend(store.run(listed.id).await.unwrap());
        }
        runs
    })
}

#[test]
fn without_a_server_it_runs_here_and_leaves() {
    let site = Site::new(CONFIG);
    let said = site.run(&["run", "a/plain"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("a/plain completed in"), "{said:?}");
    let ended = runs(&site).remove(0);
    assert_eq!(ended.id.to_string(), said.out.trim());
    assert_eq!((ended.state, ended.trigger, ended.tick_at), (RunState::Completed, Trigger::Manual, None));
    let nodes = site.store(async |store| store.nodes().await.unwrap());
    assert!(nodes.is_empty(), "it has left: {nodes:?}");
}

#[test]
fn what_it_writes_is_followed_on_both_streams() {
    let site = Site::new(CONFIG);
    let said = site.run(&["run", "a/plain", "--follow", "--prompt", "good morning"]);
    assert_eq!((said.code, said.out.as_str()), (0, "says good morning\n"), "{said:?}");
    assert!(said.err.contains("run 0"), "{said:?}");
    site.refused(&["run", "a/plain", "--follow", "-o", "json"], 2, "use --wait with -o json");
}

#[test]
fn prompt_and_payload_are_the_schedules_but_for_what_is_given() {
    let site = Site::new(CONFIG);
    let said = site.run(&["run", "a/other", "--follow", "--payload", r#"{"m": 2}"#]);
    assert_eq!((said.code, said.out.as_str()), (0, "says other 12\n"), "{said:?}");
    let run = runs(&site).remove(0);
    assert_eq!((run.prompt, run.payload), (None, json!({"m": 2})), "a run keeps what came with it");
    site.refused(&["run", "a/other", "--payload", "[1]"], 2, "must be a JSON object");
    site.refused(&["run", "a/other", "--payload", "{x"], 2, "in single quotes for the shell");
    assert_eq!(runs(&site).len(), 1);
}

#[test]
fn a_prompt_that_comes_with_a_run_is_no_template() {
    let site = Site::new(CONFIG);
    for prompt in [format!("{{{{ {}1 }}}}", "-".repeat(6000)), "{{ payload.nope }}{% if".to_owned()] {
        let said = site.run(&["run", "a/plain", "--follow", "--prompt", &prompt]);
        assert_eq!((said.code, said.out), (0, format!("says {prompt}\n")), "{}", said.err);
        let again = site.run(&["retry", &runs(&site)[0].id.to_string(), "--follow"]);
        assert_eq!((again.code, again.out), (0, format!("says {prompt}\n")), "{}", again.err);
    }
}

#[test]
fn a_value_that_is_missing_fails_the_run_for_good() {
    let site = Site::new(&CONFIG.replace("{{ payload.n }}", "{{ payload.nope }}"));
    let said = site.run(&["run", "a/other", "--follow"]);
    assert_eq!(said.code, 1, "{said:?}");
    let run = runs(&site).remove(0);
    assert_eq!((run.state, run.reason, run.attempt), (RunState::Failed, Some(Reason::Template), 1));
    let error = run.error.unwrap();
    assert!(error.starts_with("the template `prompt`: `payload.nope` is missing"), "{error}");
}

#[test]
fn a_run_that_fails_is_retried_and_then_exit_code_1() {
    let site = Site::new(CONFIG);
    let said = site.run(&["run", "failing/s", "-o", "json"]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("failing/s failed after 2 attempts: exit code 3"), "{said:?}");
    let answer: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((&answer["state"], &answer["exit_code"]), (&json!("failed"), &json!(3)));
    assert_eq!(site.read("tries"), "try\ntry\n");
}

#[test]
fn what_is_not_there_is_named_with_what_is() {
    let site = Site::new(CONFIG);
    site.refused(&["run", "a/nope"], 3, "there is no schedule a/nope; agent a has a/other, a/plain");
    site.refused(&["run", "nope/x"], 3, "there are the agents a, block, failing");
    site.refused(&["run", "plain"], 2, "write AGENT/SCHEDULE");
    let empty = Site::new("agents: {}");
    std::fs::remove_file(empty.path().join("belfry.yaml")).unwrap();
    empty.refused(&["run", "a/plain"], 3, "there is no store");
    empty.refused(&["-c", "nope.yaml", "run", "a/plain"], 2, "nope.yaml");
}

#[test]
fn the_files_are_applied_first_where_no_server_runs() {
    let site = Site::new(CONFIG);
    site.ok(&["run", "a/plain"]);
    site.write("belfry.yaml", &CONFIG.replace("plain:", "fancy:"));
    site.ok(&["run", "a/fancy"]);
    site.refused(&["run", "a/plain"], 3, "there is no schedule a/plain");
}

#[test]
fn a_server_starts_what_is_asked_for_beside_it() {
    let site = Site::new(CONFIG);
    let server = site.up();
    let said = site.run(&["run", "a/plain"]);
    assert_eq!(said.code, 0);
    assert!(said.err.contains(&format!("process {} starts it", server.child.id())), "{said:?}");
    server.wait_for(&format!(r#""run_id":"{}""#, said.out.trim()));
    let said = site.run(&["run", "a/plain", "--follow"]);
    assert_eq!((said.code, said.out.as_str()), (0, "says hello\n"));
    let answer = site.json(&["run", "a/plain", "--wait"]);
    assert_eq!(answer["state"], "completed");
    assert_eq!(site.run(&["run", "failing/s", "--wait"]).code, 1);
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_key_answers_with_the_first_run() {
    let site = Site::new(CONFIG);
    let first = site.json(&["run", "a/plain", "--key", "k"]);
    let again = site.json(&["run", "a/plain", "--key", "k"]);
    assert_eq!(first, again);
    assert_eq!(runs(&site).len(), 1);
    site.refused(&["run", "a/plain", "--key", "k", "--prompt", "other"], 2, "the key was used for run");
}

#[test]
fn a_run_that_is_not_started_waits_for_the_next_server() {
    let site = Site::new(CONFIG);
    let said = site.run(&["run", "a/plain", "--no-start"]);
    assert!(said.err.contains("it waits for the next `belfry up`"), "{said:?}");
    assert_eq!(runs(&site)[0].state, RunState::Pending);
    let server = site.up();
    server.wait_for(r#""state":"completed""#);
    assert_eq!(runs(&site)[0].id.to_string(), said.out.trim());
}

#[test]
fn a_timeout_cancels_what_runs_here_and_leaves_what_runs_elsewhere() {
    let site = Site::new(CONFIG);
    site.refused(&["run", "block/s", "--timeout", "300ms"], 6, "has not ended in time, and was cancelled");
    assert_eq!(runs(&site)[0].state, RunState::Cancelled);
    site.refused(&["run", "block/s", "--timeout", "soon"], 2, "--timeout");
    let server = site.up();
    site.refused(&["run", "block/s", "--wait", "--timeout", "300ms"], 6, "and goes on");
    site.write("go", "");
    server.wait_for(r#""state":"completed""#);
}

#[test]
fn an_interrupted_guest_cancels_its_run() {
    let site = Site::new(CONFIG);
    let guest = site.start(&["run", "block/s", "--follow"]);
    guest.wait_for("blocking");
    guest.signal(Signal::SIGINT);
    guest.wait_for_error("block/s cancelled: requested");
    assert_eq!(guest.end(), 1);
    assert_eq!(runs(&site)[0].state, RunState::Cancelled);
    assert!(site.store(async |store| store.nodes().await.unwrap()).is_empty());
}

#[test]
fn a_guest_holds_its_agents_limit_for_everybody() {
    let site = Site::new(CONFIG);
    let guest = site.start(&["run", "block/s", "--follow"]);
    guest.wait_for("blocking");
    let second = site.start(&["run", "block/t", "--follow"]);
    second.wait_for_error("run 0");
    let server = site.up();
    site.ok(&["run", "a/plain", "--wait"]);
    let waiting = runs(&site).into_iter().find(|run| run.name == "block/t").unwrap();
    assert_eq!(waiting.state, RunState::Pending, "one at a time");
    site.write("go", "");
    assert_eq!(guest.end(), 0);
    second.wait_for("free");
    assert_eq!(second.end(), 0);
    assert_eq!(site.read("started"), "1\n1\n");
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_killed_guests_run_is_rescued_by_the_next_server() {
    let site = Site::new(CONFIG);
    let guest = site.start(&["run", "block/s", "--follow"]);
    guest.wait_for("blocking");
    guest.kill();
    site.write("go", "");
    let server = site.up();
    server.wait_for("run_rescued");
    server.wait_for(r#""state":"completed""#);
    let run = runs(&site).remove(0);
    assert_eq!((run.state, run.attempt), (RunState::Completed, 2));
    assert_eq!(site.read("started"), "1\n2\n");
}

#[test]
fn a_guest_is_not_held_up_by_one_that_was_killed() {
    let site = Site::new(CONFIG);
    let guest = site.start(&["run", "block/s", "--follow"]);
    guest.wait_for("blocking");
    guest.kill();
    site.write("go", "");
    let said = site.run(&["run", "block/t", "--follow"]);
    assert_eq!((said.code, said.out.as_str()), (0, "blocking\nfree\n"), "{said:?}");
}

#[test]
fn the_callers_trace_goes_on() {
    let site = Site::new(CONFIG);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    for (given, kept) in [
        (format!("00-{trace}-b7ad6b7169203331-01"), true),
        (format!("00-{trace}"), false),
        (format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)), false),
    ] {
        let mut command = site.command(&["run", "a/plain", "--no-start"]);
        assert!(command.env("TRACEPARENT", given).output().unwrap().status.success());
        let found = runs(&site).remove(0).trace_id.map(|trace| trace.simple().to_string());
        // What is no trace begins a new one.
        assert_eq!(found.as_deref() == Some(trace), kept, "{found:?}");
        assert!(found.is_some_and(|found| found != "0".repeat(32)));
        site.ok(&["cancel", "a/plain"]);
    }
}

#[test]
fn what_this_node_cannot_run_is_refused() {
    let site = Site::new(&CONFIG.replace("prompt: hello", "prompt: hello\n    needs: [gpu]"));
    site.refused(&["run", "a/plain"], 2, "a/plain needs a node with the label gpu");
    assert!(runs(&site).is_empty());
    site.ok(&["run", "a/plain", "--no-start"]);
}

#[test]
fn whoever_waits_is_told_why() {
    let site = Site::new(CONFIG);
    let first = site.start(&["run", "block/s", "--follow"]);
    first.wait_for("blocking");
    let second = site.start(&["run", "block/t", "--follow"]);
    second.wait_for_error("it waits: 1 of agent block run, which is its limit");
    second.signal(Signal::SIGTERM);
    second.wait_for_error("block/t cancelled: requested");
    site.write("go", "");
    assert_eq!(first.end(), 0);
}

#[test]
fn a_second_signal_does_not_wait_for_the_grace() {
    let stubborn = r#"
agents:
  a:
    shell: "trap '' TERM INT; echo stubborn; while true; do sleep 0.05; done"
    grace: 10m
    schedules: {s: {cron: "0 0 1 1 *"}}
"#;
    let site = Site::new(stubborn);
    let guest = site.start(&["run", "a/s", "--follow"]);
    guest.wait_for("stubborn");
    guest.signal(Signal::SIGINT);
    // The mark is there once the first one was heard.
    let told =
        || site.store(async |store| store.marks(store.nodes().await.unwrap()[0].id).await.unwrap().cancels);
    while told().is_empty() {
        std::thread::yield_now();
    }
    guest.signal(Signal::SIGINT);
    assert_eq!(guest.end(), 1);
    assert_eq!(runs(&site)[0].state, RunState::Cancelled);
}

#[test]
fn cancel_ends_what_waits_and_tells_what_runs() {
    let site = Site::new(CONFIG);
    let waiting = site.ok(&["run", "a/plain", "--no-start"]);
    assert_eq!(site.ok(&["cancel", &waiting]), format!("{waiting} cancelled"));
    assert_eq!(site.ok(&["cancel", &waiting]), format!("{waiting} cancelled"), "twice is no harm");
    let server = site.up();
    let run = site.ok(&["run", "block/s"]);
    server.wait_for("run_started");
    let answer = site.json(&["cancel", "block/s", "--wait"]);
    assert_eq!(answer, json!({"cancelled": [{"run_id": run, "state": "cancelled"}]}));
    assert_eq!(server.stop(), 0);
}

#[test]
fn cancel_ends_the_run_of_a_schedule_that_was_removed() {
    let site = Site::new(CONFIG);
    let server = site.up();
    let run = site.ok(&["run", "block/s"]);
    server.wait_for("run_started");
    site.write("belfry.yaml", "agents: {}");
    site.ok(&["apply"]);
    let answer = site.json(&["cancel", "block/s", "--wait"]);
    assert_eq!(answer, json!({"cancelled": [{"run_id": run, "state": "cancelled"}]}));
    site.refused(&["cancel", "block/s"], 3, "there is no schedule block/s");
    assert_eq!(server.stop(), 0);
}

#[test]
fn cancel_says_what_it_cannot_do() {
    let site = Site::new(CONFIG);
    let done = site.ok(&["run", "a/plain"]);
    site.refused(&["cancel", &done], 2, "has ended already: it is completed");
    site.refused(&["cancel", "a/plain"], 3, "there is nothing to cancel");
    site.refused(&["cancel", "a/nope"], 3, "there is no schedule a/nope");
    site.refused(&["cancel", "nonsense"], 2, "is no id of a run");
    site.refused(&["cancel", "0198c0de-7a11-7000-8000-0123456789ab"], 3, "there is no run");
    site.refused(&["cancel", "a/plain", "--timeout", "1s"], 2, "--wait");
    for _ in 0..3 {
        site.ok(&["run", "a/plain", "--no-start"]);
    }
    site.refused(&["cancel", "a/plain"], 2, "a/plain has 3 live runs: --all cancels them all");
    assert_eq!(site.ok(&["cancel", "a/plain", "--all"]).lines().count(), 3);
}

#[test]
fn cancel_waits_no_longer_than_it_is_told() {
    let site = Site::new(CONFIG);
    let guest = site.start(&["run", "block/s", "--follow"]);
    guest.wait_for("blocking");
    let run = runs(&site)[0].id.to_string();
    // Nobody is left who could end it.
    guest.kill();
    site.refused(&["cancel", &run, "--wait", "--timeout", "200ms"], 6, "still there after 200ms");
}

#[test]
fn retry_makes_a_new_run_of_an_ended_one() {
    let site = Site::new(CONFIG);
    let first = site.ok(&["run", "a/other", "--prompt", "once", "--payload", r#"{"m": 2}"#]);
    let said = site.run(&["retry", &first, "--follow"]);
    assert_eq!((said.code, said.out.as_str()), (0, "says once\n"), "{said:?}");
    let runs = runs(&site);
    assert_eq!(runs.len(), 2);
    assert_ne!(runs[0].id, runs[1].id);
    assert_eq!((&runs[0].prompt, &runs[0].payload), (&runs[1].prompt, &runs[1].payload));
    let waiting = site.ok(&["run", "a/plain", "--no-start"]);
    site.refused(&["retry", &waiting], 2, "is pending and has not ended");
    site.refused(&["retry", "0198c0de-7a11-7000-8000-0123456789ab"], 3, "there is no run");
    site.write("belfry.yaml", "agents: {}");
    site.ok(&["apply"]);
    site.refused(&["retry", &first], 3, "a/other is gone");
}
