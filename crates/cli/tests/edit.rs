//! `belfry pause`, `resume`, `add`, `set`, `rm`, `apply`, `reload` and `backfill`.

#![allow(clippy::unwrap_used)]

mod support;

use belfry_core::check::Status;
use belfry_core::definition::{IfRunning, When};
use belfry_core::{RunState, SkipReason, Trigger};
use belfry_store::{RunFilter, RunRecord, ScheduleRecord, Store};
use belfry_time::{SignedDuration, Timestamp};
use serde_json::json;
use support::Site;

const CONFIG: &str = r#"
timezone: Europe/Vienna
agents:
  a:
    shell: 'echo "$BELFRY_TICK_AT" >> ticks'
    retry: {max: 0}
    schedules:
      five: {cron: "*/5 * * * *", if_running: allow}
      slot: {every: 100ms, anchor: slot, enabled: false}
      rest: {every: 1h}
  b:
    shell: "true"
    schedules: {hook: {webhook: {secret: none}}, never: {cron: "0 0 1 1 *"}}
"#;

fn site() -> Site {
    let site = Site::new(CONFIG);
    site.ok(&["apply"]);
    site
}

fn schedule(site: &Site, name: &str) -> ScheduleRecord {
    site.store(async |store| store.schedule(name).await.unwrap().unwrap())
}

fn runs(site: &Site) -> Vec<RunRecord> {
    site.store(async |store| store.runs(&RunFilter::default(), None, 1000).await.unwrap().items)
}

fn now() -> Timestamp {
    Timestamp::now()
}

#[test]
fn a_pause_has_a_reason_and_an_end() {
    let site = site();
    let answer = site.json(&["pause", "a/five", "--reason", "holiday", "--for", "2h"]);
    assert_eq!(answer["paused"], json!(["a/five"]));
    let Status::Paused { reason, until } = schedule(&site, "a/five").status else { panic!("not paused") };
    assert_eq!(reason.as_deref(), Some("holiday"));
    let left = until.unwrap().duration_since(now());
    assert!(left > SignedDuration::from_mins(119) && left <= SignedDuration::from_mins(120));
    assert!(site.ok(&["pause", "a/five", "--until", "2099-01-01T00:00:00+01:00"]).contains("2099-01-01"));
    for (until, means) in [
        ("2098-12-01", "2098-11-30T23:00:00Z"),
        ("2098-12-01 10:30", "2098-12-01T09:30:00Z"),
        ("2098-12-01T10:30", "2098-12-01T09:30:00Z"),
    ] {
        site.ok(&["--tz", "Europe/Vienna", "pause", "a/five", "--until", until]);
        let Status::Paused { until: Some(found), .. } = schedule(&site, "a/five").status else {
            panic!("{until}")
        };
        assert_eq!(found, means.parse::<Timestamp>().unwrap(), "{until}");
    }
    assert!(site.ok(&["pause", "a/five"]).contains("until it is resumed"));
    assert!(site.ok(&["pause", "a/five"]).contains("it is paused like that already"));
}

#[test]
fn an_agents_name_alone_means_all_its_schedules() {
    let site = site();
    let answer = site.json(&["pause", "a", "b/never"]);
    assert_eq!(answer["paused"], json!(["a/five", "a/rest", "b/never"]));
    assert_eq!(answer["unchanged"], json!(["a/slot"]), "it is disabled");
    let answer = site.json(&["resume", "a", "a/five"]);
    let resumed: Vec<_> = answer["resumed"].as_array().unwrap().iter().map(|one| &one["schedule"]).collect();
    assert_eq!(resumed, ["a/five", "a/rest"]);
    assert_eq!(schedule(&site, "a/five").status, Status::Active);
}

#[test]
fn a_pause_that_makes_no_sense_is_refused() {
    let site = site();
    site.refused(&["pause", "a/five", "--until", "2020-01-01T00:00:00Z"], 2, "has passed, it is");
    site.refused(&["pause", "a/five", "--until", "whenever"], 2, "--until");
    site.refused(&["pause", "a/five", "--for", "soon"], 2, "--for");
    site.refused(
        &["pause", "a/five", "--for", "1h", "--until", "2099-01-01T00:00:00Z"],
        2,
        "cannot be used with",
    );
    site.refused(&["pause", "a/slot"], 2, "it is disabled, `enabled: false`");
    site.refused(&["pause", "a/nope"], 3, "agent a has a/five, a/rest, a/slot");
    site.refused(&["resume", "nope"], 3, "there are the agents a, b");
}

#[test]
fn resume_records_what_the_pause_left_out() {
    let site = Site::new(&CONFIG.replace(", enabled: false", ""));
    site.ok(&["apply"]);
    site.ok(&["pause", "a/slot"]);
    let since = schedule(&site, "a/slot").status_since;
    // On a grid of 100 ms: until at least one tick has been left out.
    while now().duration_since(since) < SignedDuration::from_millis(250) {
        std::thread::yield_now();
    }
    let answer = site.json(&["resume", "a/slot"]);
    let skipped = answer["resumed"][0]["skipped"].as_u64().unwrap();
    assert!(skipped >= 2, "{answer}");
    let record = schedule(&site, "a/slot");
    let ranges = site.store(async |store| store.skips(record.id, None, 10).await.unwrap());
    let range = ranges.last().unwrap();
    assert_eq!((range.reason, range.count), (SkipReason::Disabled, skipped));
    // Ticks that were overdue at the pause belong to it: nobody has planned since `apply`.
    assert!(range.to > since && range.to <= record.status_since);
    assert_eq!(range.to.duration_since(range.from).as_millis(), 100 * (i128::from(skipped) - 1));
    site.ok(&["pause", "a/slot"]);
    let since = schedule(&site, "a/slot").status_since;
    assert!(site.ok(&["resume", "a/slot", "--catch-up"]).contains("from where the pause began"));
    let record = schedule(&site, "a/slot");
    assert!(record.token.unwrap().tick_at <= since, "also what was overdue at the pause is caught up");
    assert_eq!(site.store(async |store| store.skips(record.id, None, 10).await.unwrap()).len(), ranges.len());
    assert!(site.ok(&["resume", "a/slot"]).contains("it is not paused"));
}

#[test]
fn resume_says_where_a_schedule_is_disabled_and_how_to_enable_it() {
    let site = site();
    let said = site.ok(&["resume", "a/slot"]);
    let words = "a/slot left as it is: it is disabled: its file says `enabled: false`; `enabled: true` there and `belfry apply` enable it";
    assert_eq!(said, words);
    site.ok(&["add", "b/own", "--every", "1h", "enabled=false"]);
    let said = site.ok(&["resume", "b/own"]);
    assert!(said.contains("it is disabled") && said.contains("`belfry set b/own enabled=true`"), "{said}");
    site.ok(&["set", "b/own", "enabled=true"]);
    assert_eq!(site.ok(&["resume", "b/own"]), "b/own left as it is: it is not paused");
    // A pause that ends while `enabled` is false does not make it tick.
    site.ok(&["pause", "b/own"]);
    site.ok(&["set", "b/own", "enabled=false"]);
    let said = site.ok(&["resume", "b/own"]);
    assert!(said.starts_with("b/own is no longer paused, but stays disabled: its definition says"), "{said}");
}

#[test]
fn a_pause_that_has_ended_by_itself_is_not_ended_again() {
    let site = site();
    site.ok(&["pause", "a/five", "--for", "500ms"]);
    let Status::Paused { until: Some(until), .. } = schedule(&site, "a/five").status else {
        panic!("not paused until a time")
    };
    while now() <= until {
        std::thread::yield_now();
    }
    assert!(site.ok(&["resume", "a/five"]).contains("its pause has ended at"));
    assert_eq!(schedule(&site, "a/five").token.unwrap().due_at, until, "the planner goes on from there");
}

#[test]
fn a_schedule_is_added_changed_and_removed() {
    let site = site();
    let arguments =
        ["add", "a/new", "--cron", "0 9 * * 1-5", "--prompt", "Report: {{ payload.x }}", "if_running=queue"];
    assert_eq!(site.json(&arguments), json!({"schedule": "a/new", "result": "added"}));
    let made = schedule(&site, "a/new");
    assert_eq!(made.definition.when, When::Cron("0 9 * * 1-5".into()));
    assert_eq!(made.definition.options.if_running, IfRunning::Queue);
    assert_eq!(made.definition.options.timezone.as_deref(), Some("Europe/Vienna"), "the file's");
    assert_eq!(made.source, "api");
    assert_eq!(site.json(&["set", "a/new", "not_on=sat,sun", "prompt=null"])["result"], "changed");
    let changed = schedule(&site, "a/new");
    assert_eq!(changed.definition.options.not_on, ["sat", "sun"]);
    assert_eq!(changed.definition.options.prompt, None, "null goes back to the default");
    assert_eq!(changed.definition.options.if_running, IfRunning::Queue, "what is not written stays");
    assert_eq!(site.json(&["set", "a/new", "--every", "20m", "--tz", "Asia/Tokyo"])["result"], "changed");
    let changed = schedule(&site, "a/new");
    assert_eq!(changed.definition.when, When::Every("20m".into()), "one kind takes the place of the other");
    assert_eq!(changed.definition.options.timezone.as_deref(), Some("Asia/Tokyo"));
    assert_eq!(site.ok(&["set", "a/new", "every=20m"]), "a/new is like that already");
    site.ok(&["run", "a/new", "--no-start"]);
    let answer = site.json(&["rm", "a/new"]);
    assert_eq!(answer, json!({"schedule": "a/new", "result": "removed", "cancelled": 1}));
    site.refused(&["rm", "a/new"], 3, "there is no schedule a/new");
}

#[test]
fn a_schedule_is_added_from_a_file() {
    let site = site();
    site.write("new.yaml", "every: 20m\npayload: {x: [1, two]}\n");
    site.ok(&["add", "a/new", "--file", "new.yaml"]);
    assert_eq!(schedule(&site, "a/new").definition.options.payload["x"], json!([1, "two"]));
    site.write("bad.yaml", "every: 20m\njiter: 5s\n");
    site.refused(&["add", "a/bad", "--file", "bad.yaml"], 2, "bad.yaml:2:1");
    site.refused(&["add", "a/bad", "--file", "none.yaml"], 2, "none.yaml cannot be read");
    site.refused(&["add", "a/bad", "--file", "new.yaml", "every=5m"], 2, "cannot be used with");
}

#[test]
fn what_is_wrong_with_a_schedule_is_underlined() {
    let site = site();
    site.refused(&["add", "a/new", "--cron", "0 25 * * *"], 2, "hour must be 0-23");
    site.refused(&["add", "a/new", "crno=0 9 * * *"], 2, "unknown key `crno`");
    site.refused(&["add", "a/new", "every"], 2, "write KEY=VALUE");
    site.refused(&["add", "a/new"], 2, "when should it run?");
    site.refused(&["add", "a/new", "prompt=x"], 2, "does not say when it runs");
    site.refused(&["add", "a/new", "every=5m", "--cron", "0 9 * * *"], 2, "has both `cron` and `every`");
    site.refused(&["add", "a/no spaces", "every=5m"], 2, "schedule");
    site.refused(&["add", "a", "every=5m"], 2, "write AGENT/SCHEDULE");
    site.refused(&["add", "zz/new", "every=5m"], 3, "there is no agent zz; there are the agents a, b");
    site.ok(&["add", "a/new", "every=5m"]);
    site.refused(&["add", "a/new", "every=5m"], 2, "`belfry set` changes it");
    site.refused(&["set", "a/new"], 2, "what should change?");
    site.refused(&["set", "a/nope", "every=5m"], 3, "there is no schedule a/nope");
    site.refused(&["set", "a/new", "every=0s"], 2, "every=0s");
}

#[test]
fn what_a_file_owns_is_not_touched() {
    let site = site();
    let words = "a/five belongs to belfry.yaml";
    site.refused(&["add", "a/five", "every=5m"], 2, words);
    site.refused(&["set", "a/five", "every=5m"], 2, words);
    site.refused(&["rm", "a/five"], 2, words);
}

#[test]
fn a_one_shot_in_the_past_is_refused_with_both_times() {
    let site = site();
    let said = site.run(&["add", "a/once", "--at", "2020-02-03T09:00:00+01:00"]);
    assert_eq!(said.code, 2, "{said:?}");
    assert!(said.err.contains("its time 2020-02-03T09:00:00+01:00 has passed, it is 20"), "{said:?}");
    site.ok(&["add", "a/once", "--at", "2099-02-03T09:00:00", "delete_after_run=true"]);
    site.refused(&["set", "a/once", "at=2020-02-03T09:00:00Z"], 2, "has passed");
    site.ok(&["add", "a/soon", "--after", "1h"]);
    let nowhere = Site::new(&CONFIG.replace("timezone: Europe/Vienna", ""));
    nowhere.ok(&["apply"]);
    nowhere.refused(&["add", "a/once", "--at", "2099-02-03T09:00:00"], 2, "at=2099-02-03T09:00:00");
    nowhere.ok(&["add", "a/once", "--at", "2099-02-03T09:00:00", "--tz", "Asia/Tokyo"]);
}

#[test]
fn a_server_follows_what_is_added() {
    let site = site();
    let server = site.up();
    site.ok(&["add", "b/quick", "--every", "1h"]);
    server.wait_for(r#""schedule":"quick""#);
    assert_eq!(server.stop(), 0);
}

#[test]
fn apply_is_all_or_nothing() {
    let site = Site::new(CONFIG);
    let answer = site.json(&["apply"]);
    assert_eq!((&answer["added"], &answer["retired"]), (&json!(5), &json!(0)));
    assert!(site.ok(&["apply"]).contains("nothing has changed"));
    let changed = CONFIG.replace("*/5", "*/10").replace(", never: {cron: \"0 0 1 1 *\"}", "");
    site.write("belfry.yaml", &changed);
    assert_eq!(site.ok(&["apply"]), "0 added, 1 changed, 1 retired");
    site.write(
        "belfry.yaml",
        &changed.replace("*/10 * * * *", "61 * * * *").replace("every: 1h", "every: 2h"),
    );
    site.refused(&["apply"], 2, "minute must be 0-59");
    assert_eq!(schedule(&site, "a/rest").definition.when, When::Every("1h".into()), "nothing has changed");
    site.write("belfry.yaml", "agentz: {}");
    site.refused(&["apply"], 2, "unknown key `agentz`");
    std::fs::remove_file(site.path().join("belfry.yaml")).unwrap();
    site.refused(&["apply"], 2, "there is no belfry.yaml in this folder");
}

#[test]
fn apply_leaves_what_was_added_by_hand() {
    let site = site();
    site.ok(&["add", "b/mine", "every=5m"]);
    site.write("belfry.yaml", &CONFIG.replace("{hook:", "{mine: {every: 1h}, hook:"));
    assert!(site.ok(&["apply"]).contains("1 left alone"));
    assert_eq!(schedule(&site, "b/mine").definition.when, When::Every("5m".into()));
}

#[test]
fn reload_reaches_the_server_that_runs() {
    let site = Site::new(CONFIG);
    site.refused(&["reload"], 5, "no server runs on");
    let server = site.up();
    site.write("belfry.yaml", &CONFIG.replace("every: 1h", "every: 2h"));
    let words = format!("process {} has read its files again", server.child.id());
    let said = site.ok(&["reload"]);
    assert!(said.starts_with(&words), "{said}");
    server.wait_for("0 added, 1 changed, 0 retired");
    assert_eq!(schedule(&site, "a/rest").definition.when, When::Every("2h".into()));
    site.write("belfry.yaml", "agents: [");
    site.refused(&["reload"], 2, "belfry.yaml");
    site.write("belfry.yaml", CONFIG);
    // From another file, the server does not get there.
    site.write("other.yaml", &CONFIG.replace("every: 1h", "every: 3h"));
    site.refused(&["-c", "other.yaml", "reload", "--timeout", "300ms"], 6, "does not run from these files");
    assert_eq!(server.stop(), 0);
}

/// Noon to one o'clock of a day that was.
const SPAN: [&str; 4] = ["--from", "2026-03-02T12:00:00", "--to", "2026-03-02T13:00:00"];

fn backfill<'a>(name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["backfill", name], &SPAN[..], more].concat()
}

#[test]
fn a_backfill_runs_past_ticks_in_their_order() {
    let site = site();
    let said = site.ok(&backfill("a/five", &["--dry-run"]));
    assert!(said.starts_with("2026-03-02 12:00:00 CET\n2026-03-02 12:05:00 CET\n"), "{said}");
    assert!(
        said.ends_with(
            "would make 12 runs of a/five, from 2026-03-02 12:00:00 CET to 2026-03-02 12:55:00 CET"
        )
    );
    assert!(runs(&site).is_empty(), "nothing was made");
    let answer = site.json(&backfill("a/five", &["--limit", "5"]));
    assert_eq!((answer["runs"].as_array().unwrap().len(), &answer["more"]), (5, &json!(7)));
    let answer = site.json(&backfill("a/five", &[]));
    assert_eq!((answer["runs"].as_array().unwrap().len(), &answer["left_out"]), (7, &json!(5)));
    let waiting = runs(&site);
    assert!(waiting.iter().all(|run| run.state == RunState::Pending && run.trigger == Trigger::Backfill));
    let server = site.up();
    for _ in 0..12 {
        server.wait_for(r#""event":"run_finished","agent":"a","schedule":"five","tick_at":"2026-03-02"#);
    }
    assert_eq!(server.stop(), 0);
    let ticks = site.read("ticks");
    // The agent has other schedules that fire by themselves.
    let ticks: Vec<_> = ticks.lines().filter(|tick| tick.starts_with("2026-03-02")).collect();
    assert_eq!(ticks.len(), 12, "{ticks:?}");
    assert!(ticks.is_sorted(), "{ticks:?}");
    assert_eq!(site.json(&backfill("a/five", &["--missing"]))["runs"], json!([]), "each has its run");
    let why = site.json(&["why", "a/five", "--at", "2026-03-02T11:10:00Z"]);
    assert_eq!(why["decision"], "fired", "also of a time when it was not known: {why}");
    assert_eq!(site.json(&["runs", "--since", "1h"]), site.json(&["runs"]));
    assert_eq!(site.json(&backfill("a/five", &["--dry-run"]))["runs"].as_array().unwrap().len(), 12);
}

#[test]
fn a_backfill_counts_one_tick_as_one() {
    let site = site();
    site.ok(&backfill("a/five", &["--limit", "1"]));
    let said = site.ok(&backfill("a/five", &["--dry-run"]));
    assert!(said.ends_with("; 1 tick has a run that lives"), "{said}");
}

#[test]
fn only_missing_ticks_are_made_again() {
    let site = site();
    let two = ["backfill", "a/five", "--from", "2026-03-02T12:10:00", "--to", "2026-03-02T12:16:00"];
    assert_eq!(site.json(&two)["runs"].as_array().unwrap().len(), 2);
    let answer = site.json(&backfill("a/five", &["--missing"]));
    assert_eq!((answer["runs"].as_array().unwrap().len(), &answer["left_out"]), (10, &json!(2)));
    assert_eq!(runs(&site).len(), 12);
    // The store holds every promise with all of them.
    assert_eq!(site.store(async |store| store.integrity().await.unwrap()), Vec::<String>::new());
}

#[test]
fn a_backfill_of_an_interval_counts_from_its_beginning() {
    let site = site();
    let answer = site.json(&backfill("a/rest", &["--dry-run"]));
    assert_eq!(answer["runs"], json!([{"tick_at": "2026-03-02T11:00:00Z", "run_id": null}]));
    site.refused(&backfill("a/rest", &["--missing"]), 2, "`anchor: slot` gives it a grid");
}

/// The ticks that a backfill would make up for.
fn ticks(answer: &serde_json::Value) -> Vec<Timestamp> {
    let runs = answer["runs"].as_array().unwrap();
    runs.iter().map(|run| run["tick_at"].as_str().unwrap().parse().unwrap()).collect()
}

#[test]
fn a_long_backfill_of_an_interval_stays_in_step() {
    let site = site();
    let from: Timestamp = "2020-01-01T00:00:00Z".parse().unwrap();
    let hour = |n: i64| from + SignedDuration::from_hours(n);
    let to = hour(2100).to_string();
    let all = ["backfill", "a/rest", "--from", "2020-01-01T00:00:00Z", "--to", &to, "--dry-run", "--limit"];
    let answer = site.json(&[&all[..], &["2050"]].concat());
    assert_eq!(ticks(&answer), (0..2050).map(hour).collect::<Vec<_>>());
    assert_eq!((&answer["more"], &answer["next_from"]), (&json!(50), &json!(hour(2050))));
    let answer = site.json(&[&all[..], &["2100"]].concat());
    assert_eq!(ticks(&answer).last(), Some(&hour(2099)));
    assert_eq!((&answer["more"], &answer["next_from"]), (&json!(0), &json!(null)));
}

#[test]
fn a_backfill_goes_on_where_it_says() {
    let site = site();
    site.ok(&["add", "a/daily", "every=daily"]);
    let from = ["--from", "2026-03-02T12:00:00Z", "--to", "2026-03-06T12:00:00Z", "--dry-run"];
    for name in ["a/five", "a/daily"] {
        let whole = site.json(&[&["backfill", name], &from[..], &["--limit", "4"]].concat());
        let first = site.json(&[&["backfill", name], &from[..], &["--limit", "2"]].concat());
        let rest = ["backfill", name, "--from", first["next_from"].as_str().unwrap()];
        let rest = site.json(&[&rest[..], &from[2..], &["--limit", "2"]].concat());
        assert_eq!([ticks(&first), ticks(&rest)].concat(), ticks(&whole), "{name}");
        assert_eq!(ticks(&whole).len(), 4, "{name}");
    }
}

#[test]
fn a_backfill_never_goes_where_the_planner_has_not_been() {
    let site = site();
    let future = ["backfill", "a/five", "--from", "2098-03-02T12:00:00", "--to", "2098-03-02T13:00:00"];
    site.refused(&future, 2, "it plans by itself");
    site.ok(&["pause", "a/five"]);
    let since = schedule(&site, "a/five").status_since;
    let from = (since - SignedDuration::from_mins(30)).to_string();
    let to = (since + SignedDuration::from_hours(1)).to_string();
    let said = site.run(&["backfill", "a/five", "--from", &from, "--to", &to, "--dry-run", "-o", "json"]);
    assert!(said.err.contains("what comes after it plans by itself"), "{said:?}");
    let answer: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(answer["runs"].as_array().unwrap().len(), 6);
    let from = (since + SignedDuration::from_mins(30)).to_string();
    let inside = ["backfill", "a/five", "--from", &from, "--to", &to];
    site.refused(&inside, 2, "belong to the pause: `belfry resume a/five --catch-up` plans them");
}

#[test]
fn a_backfill_that_makes_no_sense_is_refused() {
    let site = site();
    site.refused(&backfill("b/hook", &[]), 2, "runs on request and has no ticks");
    site.refused(&backfill("a/nope", &[]), 3, "there is no schedule a/nope");
    let turned = ["backfill", "a/five", "--from", "2026-03-02T13:00:00", "--to", "2026-03-02T12:00:00"];
    site.refused(&turned, 2, "--from must be before --to");
    site.refused(&["backfill", "a/five", "--from", "noon", "--to", "2026-03-02T12:00:00"], 2, "--from");
    site.refused(&["backfill", "a/five", "--from", "2026-03-02T12:00:00"], 2, "--to");
    site.refused(&backfill("a/five", &["--limit", "0"]), 2, "--limit");
}
