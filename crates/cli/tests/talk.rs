//! Conversations through the real binary on either store: messages, stops, lanes; and a crowd that is stopped, interrupted and
//! killed at random, judged by the log that only the children write.
//!
//! `BELFRY_SESSIONS=200 BELFRY_MESSAGES=50 BELFRY_KILLS=10` for more; the seed is printed, and `BELFRY_SEED` takes one.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod outside;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use belfry::{Mode, Reply, RunId, RunState, SendOptions};
use belfry_core::Reason;
use belfry_store::{AnyStore, RunRecord, Store};
use nix::sys::signal::Signal;
use outside::{Site, Up, all_runs, eventually, number};
use serde_json::Value;

const LANE: usize = 8;

/// A child says when it starts, that it lives, and when it ends.
fn config(chat: &str, work: &str) -> String {
    let says = r#"say() { echo "$1 $BELFRY_SESSION $BELFRY_RUN_ID $BELFRY_ATTEMPT" >> side.log; }"#;
    format!(
        r#"
engine: {{lease: 3s}}
retention: {{runs_per_schedule: 1000000}}
lanes: {{main: {LANE}, narrow: 1}}
agents:
  bot:
    shell: '{says}; {work}'
    env: {{PROMPT: "{{{{ prompt }}}}"}}
    grace: 1s
    retry: {{max: 50, base: 100ms}}
    schedules:
      talk: {{chat: {chat}}}
"#
    )
}

const SHORT: &str =
    "trap \"say end; exit 1\" TERM; say start; for i in 1 2; do sleep 0.01; say beat; done; say end";
/// Goes on until there is a file `go`.
const LONG: &str = "say start; until [ -e go ]; do sleep 0.02; done; say end";

fn run_of(sent: &Value) -> String {
    sent["run_id"].as_str().unwrap().to_owned()
}

fn said(output: &std::process::Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn starts(site: &Site) -> Vec<String> {
    site.side().iter().filter(|line| line[0] == "start").map(|line| line[2].clone()).collect()
}

#[test]
fn messages_close_together_are_one_run_that_lists_them_all() {
    for site in Site::each() {
        site.config(&config(
            "{debounce: 2s}",
            "say start; cat $BELFRY_PAYLOAD_FILE > payload.json; echo \"$PROMPT\"",
        ));
        let mut up = site.up();
        up.event("node_started");
        let sent: Vec<Value> =
            (0..5).map(|n| site.json(&["send", "bot", "ada", &format!("m{n} {{{{ 7*7 }}}}")])).collect();
        assert!(sent.iter().all(|one| run_of(one) == run_of(&sent[0])), "{sent:#?}");
        let finished = up.event_of("run_finished", "talk");
        assert_eq!((&finished["run_id"], &finished["session"]), (&sent[0]["run_id"], &Value::from("ada")));
        let payload: Value =
            serde_json::from_slice(&std::fs::read(site.path("payload.json")).unwrap()).unwrap();
        let texts: Vec<_> =
            payload["messages"].as_array().unwrap().iter().map(|m| m["text"].as_str().unwrap()).collect();
        assert_eq!(texts, (0..5).map(|n| format!("m{n} {{{{ 7*7 }}}}")).collect::<Vec<_>>());
        let logs = site.belfry(&["logs", &run_of(&sent[0])]);
        let logs = String::from_utf8_lossy(&logs.stdout).into_owned();
        assert!(logs.contains("m0 {{ 7*7 }}\nm1 {{ 7*7 }}"), "what was said is no template: {logs}");
        let sessions = site.json(&["sessions", "bot"]);
        assert_eq!(
            (&sessions["items"][0]["key"], &sessions["items"][0]["active"]),
            (&"ada".into(), &0.into())
        );
        up.stop();
    }
}

#[test]
fn of_eleven_that_wait_the_first_is_dropped_and_its_sender_told() {
    for site in Site::each() {
        site.config(&config("{debounce: 0s}", LONG));
        let mut up = site.up();
        up.event("node_started");
        site.json(&["send", "bot", "ada", "runs"]);
        up.event_of("run_started", "talk");
        let mut waits = site.command();
        waits.args(["send", "bot", "ada", "victim", "--wait"]);
        let waits =
            waits.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        eventually("the victim to wait", || {
            let sessions = site.json(&["sessions"]);
            (sessions["items"][0]["queued"] == 1).then_some(())
        });
        for n in 0..10 {
            site.json(&["send", "bot", "ada", &format!("m{n}")]);
        }
        let (code, words) = said(&waits.wait_with_output().unwrap());
        assert_eq!(code, Some(1));
        assert!(words.contains("queue_dropped"), "{words}");
        let queued = &site.json(&["sessions"])["items"][0]["queued"];
        assert_eq!(queued, 10);
        // And where the new one is refused instead:
        site.config(&config("{debounce: 0s, drop: new}", LONG));
        up.event("config_loaded");
        let (code, words) = said(&site.belfry(&["send", "bot", "ada", "one too many"]));
        assert_eq!(code, Some(1));
        assert!(words.contains("the queue of session bot/talk:ada is full: 10 runs wait"), "{words}");
        site.belfry(&["stopall", "bot", "ada"]);
        up.event_of("run_cancelled", "talk");
        up.stop();
    }
}

#[test]
fn stopall_ends_one_that_ignores_it_and_nine_that_wait() {
    for site in Site::each() {
        site.config(&config("{debounce: 0s}", "trap \"\" TERM; say start; while true; do sleep 0.05; done"));
        let mut up = site.up();
        up.event("node_started");
        for n in 0..10 {
            site.json(&["send", "bot", "ada", &n.to_string()]);
        }
        up.event_of("run_started", "talk");
        let began = Instant::now();
        let stopped = site.json(&["send", "bot", "ada", "/stopall"]);
        let counts = (stopped["told"].as_array().unwrap().len(), stopped["ended"].as_array().unwrap().len());
        assert_eq!((counts, &stopped["code"]), ((1, 9), &"stopped".into()));
        let told = &stopped["told"][0];
        let cancelled = up.wait_for("the end of what ran", |event| {
            event["event"] == "run_cancelled" && event["run_id"] == *told
        });
        assert_eq!((&cancelled["reason"], &cancelled["outbound"]), (&"stopped".into(), &"".into()));
        eprintln!("answered and gone after {} ms, grace 1 s", began.elapsed().as_millis());
        assert_eq!(starts(&site).len(), 1, "nothing of it starts afterwards");
        let runs = site.runs("bot/talk");
        assert_eq!(runs.len(), 10);
        assert!(
            runs.iter().all(|run| run["state"] == "cancelled" && run["reason"] == "stopped"),
            "{runs:#?}"
        );
        // What was sent before the stop comes too late, what is new runs.
        let (code, words) =
            said(&site.belfry(&["send", "bot", "ada", "late", "--sent-at", "2020-01-01T00:00:00Z"]));
        assert_eq!(code, Some(1));
        assert!(words.contains("stale"), "{words}");
        site.json(&["send", "bot", "ada", "new"]);
        up.event_of("run_started", "talk");
        assert_eq!(site.json(&["stop", "bot", "ada"])["code"], "stopped");
        up.event_of("run_cancelled", "talk");
        assert_eq!(site.json(&["stop", "bot", "ada"])["code"], "nothing_running");
        up.stop();
    }
}

#[test]
fn a_full_lane_delays_no_other_and_is_changed_and_cleared_without_a_restart() {
    for site in Site::each() {
        site.config(&config("{debounce: 0s}", LONG));
        let mut up = site.up();
        up.event("node_started");
        for n in 0..4 {
            site.json(&["send", "bot", &format!("n{n}"), "x", "--lane", "narrow"]);
        }
        up.event_of("run_started", "talk");
        site.json(&["send", "bot", "other", "x"]);
        let other = up.event_of("run_started", "talk");
        assert_eq!(other["session"], "other");
        let narrow = |site: &Site| {
            let lanes = site.json(&["lanes"]);
            let lanes = lanes["items"].as_array().unwrap();
            lanes.iter().find(|lane| lane["name"] == "narrow").unwrap().clone()
        };
        let lane = narrow(&site);
        assert_eq!((&lane["slots"], &lane["active"], &lane["pending"]), (&1.into(), &1.into(), &3.into()));
        assert!(lane["oldest_pending_ms"].is_u64());
        site.json(&["lanes", "set", "narrow", "2"]);
        up.event_of("run_started", "talk");
        assert_eq!(site.json(&["lanes", "clear", "narrow"])["ended"].as_array().unwrap().len(), 2);
        assert_eq!(narrow(&site)["active"], 2);
        let (code, words) = said(&site.belfry(&["send", "bot", "z", "x", "--lane", "nowhere"]));
        assert_eq!(code, Some(0));
        assert!(words.contains("there is no lane nowhere: it goes to main"), "{words}");
        // All sessions begin anew; what runs goes on.
        up.event_of("run_started", "talk");
        up.signal(Signal::SIGUSR1);
        eventually("new generations", || {
            let sessions = site.json(&["sessions"]);
            sessions["items"].as_array().unwrap().iter().all(|one| one["generation"] == 2).then_some(())
        });
        site.file("go", "");
        up.stop();
        let ends = site.side().iter().filter(|line| line[0] == "end").count();
        assert_eq!(ends, 4, "two of the narrow lane, the other, and the lost one");
    }
}

#[test]
fn mistakes_are_named() {
    let site = Site::sqlite();
    site.config(&config("{debounce: 0s}", SHORT));
    for (arguments, code, words) in [
        (vec!["send", "bot/walk", "ada", "x"], 3, "there is no schedule bot/walk"),
        (vec!["send", "nobody", "ada", "x"], 3, "there is no agent nobody"),
        (vec!["send", "bot", "", "x"], 2, "the key of a session is empty"),
        (vec!["send", "bot", "ada", "x", "--payload", "[]"], 2, "--payload must be a JSON object"),
        (
            vec!["stop", "bot", "nobody"],
            3,
            "session bot/talk:nobody; `belfry sessions` lists those that somebody has",
        ),
        (vec!["sessions", "reset", "bot", "nobody"], 3, "nobody has spoken to the session bot/talk:nobody"),
        (vec!["stop", "bot/walk", "nobody"], 3, "there is no schedule bot/walk"),
        (vec!["lanes", "set", "nowhere", "--limit", "5"], 3, "name its slots to make it"),
        (vec!["lanes", "set", "narrow"], 2, "say what to change"),
        (vec!["lanes", "set", "narrow", "0"], 2, "0 is not in 1..=1000000"),
        (vec!["lanes", "set", "narrow", "--limit", "-1"], 2, "unexpected argument"),
        (vec!["lanes", "clear", "nowhere"], 3, "there is no lane nowhere"),
        (vec!["lanes", "set", "a/b", "1"], 2, "the name of a lane"),
    ] {
        let (found, said) = said(&site.belfry(&arguments));
        assert_eq!(found, Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    assert_eq!(
        site.json(&["stopall", "bot", "nobody"])["code"],
        "nothing_running",
        "it marks what comes later"
    );
    site.config(&config("{debounce: 0s}", SHORT).replace("talk: ", "walk: {chat: {}}\n      talk: "));
    assert!(site.belfry(&["apply"]).status.success());
    for verb in [&["send", "bot", "ada", "x"][..], &["stop", "bot", "ada"]] {
        let (code, words) = said(&site.belfry(verb));
        assert_eq!(code, Some(2), "{words}");
        assert!(words.contains("several chats: say which, bot/talk or bot/walk"), "{words}");
    }
    let output = site.belfry_with(&["up"], |command| {
        command.env("BELFRY_LANE_MAIN", "many");
    });
    let (code, words) = said(&output);
    assert_eq!(code, Some(2));
    assert!(words.contains("`BELFRY_LANE_MAIN` must be a whole number from 1 to 1000000"), "{words}");
}

/// A message that was taken, and where it is said to be.
struct Taken {
    session: String,
    seq: i64,
    run: RunId,
}

#[derive(Clone)]
struct Lot(u64);

impl Lot {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Talks to some sessions at once, now and then with a stop or an interrupt.
async fn talk(store: Arc<AnyStore>, sessions: Vec<u64>, messages: u64, mut lot: Lot) -> (Vec<Taken>, usize) {
    let engine = belfry::Engine::builder().store(store).build();
    let (mut taken, mut stale) = (Vec::new(), 0);
    for _ in 0..messages {
        for session in &sessions {
            let key = format!("s{session}");
            // Some are said in one breath.
            let address = format!("bot/talk:{key}");
            if lot.below(100) < 30 {
                let more = engine.send(&address, "hello", SendOptions::default()).await.unwrap();
                let Reply::Taken(one) = more.reply else { panic!("no stop") };
                taken.push(Taken { session: key.clone(), seq: one.seq.unwrap(), run: one.run });
            }
            let mode = (lot.below(100) < 5).then_some(Mode::Interrupt);
            let text = match lot.below(100) {
                0..3 => "/stop",
                3 => "/stopall",
                _ => "hello",
            };
            // Some were a while on their way.
            let now = engine.store_now().await.unwrap();
            let sent_at = (lot.below(100) < 10).then(|| now - belfry::SignedDuration::from_secs(1));
            let with = SendOptions { mode, sent_at, ..SendOptions::default() };
            match engine.send(&address, text, with).await.map(|sent| sent.reply) {
                Ok(Reply::Taken(one)) => {
                    taken.push(Taken { session: key, seq: one.seq.unwrap(), run: one.run });
                }
                Ok(Reply::Stopped(_)) => {}
                Err(belfry::Error::Stale { .. }) => stale += 1,
                Err(error) => panic!("{error}"),
            }
        }
    }
    (taken, stale)
}

/// Kills servers again and again until the talk is over, and says so in the log. Gives the one that is left.
fn kill_again_and_again(site: &Site, kills: u64, lot: &mut Lot, over: &AtomicBool) -> (Up, u64) {
    let mut killed = 0;
    loop {
        let mut up = site.up();
        if killed == kills || over.load(Ordering::SeqCst) {
            return (up, killed);
        }
        // Far fewer than there are left to come.
        for _ in 0..3 + lot.below(12) {
            up.event("run_started");
        }
        up.kill();
        killed += 1;
        let mut log = std::fs::File::options().create(true).append(true).open(site.path("side.log")).unwrap();
        log.write_all(b"kill - - 0\n").unwrap();
    }
}

fn a_crowd_keeps_its_order(site: &Site) {
    let (sessions, messages) = (number("BELFRY_SESSIONS", 24), number("BELFRY_MESSAGES", 12));
    let kills = number("BELFRY_KILLS", 2);
    let seed = number("BELFRY_SEED", u64::from(std::process::id()) << 20 ^ 0x9e37_79b9);
    eprintln!("seed {seed}, {sessions} sessions, {messages} messages, {kills} kills, store {}", site.store);
    site.config(&config("{debounce: 20ms, cap: 5}", SHORT));
    // So that the chat is there before the first message.
    let mut up = site.up();
    up.event("node_started");
    up.stop();
    let began = Instant::now();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let store = Arc::new(runtime.block_on(AnyStore::open(&site.store, false)).unwrap());
    let over = Arc::new(AtomicBool::new(false));
    let mut lot = Lot(seed);
    let talkers: Vec<_> = (0..8)
        .map(|n| {
            let own = (0..sessions).filter(|session| session % 8 == n).collect();
            runtime.spawn(talk(store.clone(), own, messages, Lot(seed ^ ((n + 1) * 7919))))
        })
        .collect();
    let told = over.clone();
    let taken = runtime.spawn(async move {
        let (mut all, mut stale) = (Vec::new(), 0);
        for talker in talkers {
            let (taken, late) = talker.await.unwrap();
            all.extend(taken);
            stale += late;
        }
        told.store(true, Ordering::SeqCst);
        (all, stale)
    });
    let (mut up, killed) = kill_again_and_again(site, kills, &mut lot, &over);
    let (taken, stale) = runtime.block_on(taken).unwrap();
    // All that was said comes to its end.
    let live = || {
        let counts = runtime.block_on(store.counts()).unwrap();
        counts.pending + counts.running
    };
    let ends = ["run_finished", "run_cancelled", "run_rescued", "node_fenced"];
    while live() > 0 {
        up.wait_for("an end", |event| ends.contains(&event["event"].as_str().unwrap()));
    }
    up.stop();
    let runs = runtime.block_on(all_runs(&store));
    assert_eq!(runtime.block_on(store.integrity()).unwrap(), Vec::<String>::new());
    let fates = check_runs(&taken, stale, &runs, &site.side());
    check_side(&runs, &site.side());
    eprintln!(
        "{} messages in {} runs, {killed} kills, {:.0} s: {fates:?}",
        taken.len(),
        runs.len(),
        began.elapsed().as_secs_f64()
    );
}

/// Every message that was taken is in exactly the run that was named, and that has ended in one way.
fn check_runs(
    taken: &[Taken],
    stale: usize,
    runs: &[RunRecord],
    side: &[Vec<String>],
) -> BTreeMap<&'static str, usize> {
    let ran: BTreeSet<&str> = side.iter().map(|line| line[2].as_str()).collect();
    let mut places: HashMap<(String, i64), RunId> = HashMap::new();
    let mut fates: BTreeMap<RunId, &'static str> = BTreeMap::new();
    for run in runs {
        for message in run.payload["messages"].as_array().unwrap() {
            let place = (run.session().unwrap().to_owned(), message["seq"].as_i64().unwrap());
            assert_eq!(places.insert(place.clone(), run.id), None, "{place:?} is in two runs");
        }
        let fate = match (run.state, run.reason) {
            (RunState::Completed, _) => "ran",
            (RunState::Cancelled, Some(Reason::QueueDropped)) => "dropped",
            (RunState::Cancelled, Some(Reason::Stopped | Reason::Interrupted)) => "cancelled",
            (RunState::Cancelled, Some(Reason::Stale)) => "stale",
            other => panic!("{} ended {other:?}: {:?}", run.id, run.error),
        };
        if fate == "ran" {
            assert!(
                ran.contains(run.id.to_string().as_str()),
                "{} never ran, and is said to be completed",
                run.id
            );
        }
        fates.insert(run.id, fate);
    }
    let mut counts = BTreeMap::new();
    for Taken { session, seq, run } in taken {
        assert_eq!(places.get(&(session.clone(), *seq)), Some(run), "message {seq} of {session}");
        *counts.entry(fates[run]).or_insert(0) += 1;
    }
    assert_eq!(places.len(), taken.len() + stale, "messages that nobody sent");
    let ended_stale = fates.values().filter(|fate| **fate == "stale").count();
    assert_eq!(ended_stale, stale, "each that came too late has a run that says so");
    counts.insert("stale", stale);
    counts
}

/// By the children alone: a session's runs one after the other and in order, a lane never fuller than it is wide.
fn check_side(runs: &[RunRecord], side: &[Vec<String>]) {
    let first = |run: &RunRecord| run.payload["messages"][0]["seq"].as_i64().unwrap();
    let order: HashMap<String, i64> = runs.iter().map(|run| (run.id.to_string(), first(run))).collect();
    let mut last: HashMap<&str, (i64, &str)> = HashMap::new();
    let mut live: BTreeSet<&str> = BTreeSet::new();
    let mut most = 0;
    for line in side {
        let [what, session, run, _attempt] = line.as_slice() else { panic!("half a line: {line:?}") };
        if what == "kill" {
            live.clear();
            continue;
        }
        let seq = order[run];
        if let Some((before, other)) = last.insert(session, (seq, run)) {
            assert!(seq >= before, "{session}: {run} ({seq}) after {other} ({before})");
        }
        match what.as_str() {
            "start" => drop(live.insert(run)),
            "end" => drop(live.remove(run.as_str())),
            _ => {}
        }
        most = most.max(live.len());
    }
    assert!(most <= LANE, "{most} at once");
    eprintln!("at most {most} at once");
}

#[test]
fn a_crowd_keeps_its_order_on_sqlite() {
    a_crowd_keeps_its_order(&Site::sqlite());
}

#[test]
fn a_crowd_keeps_its_order_on_postgres() {
    if let Some(site) = Site::postgres() {
        a_crowd_keeps_its_order(&site);
    }
}
