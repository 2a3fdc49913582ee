//! The commands that change something, on PostgreSQL, where any number of nodes may serve.

#![allow(clippy::unwrap_used)]

#[path = "../../store/tests/support/pg.rs"]
mod pg;
mod support;

use belfry_core::{RunState, Trigger};
use belfry_store::{RunFilter, RunRecord, Store};
use serde_json::json;
use support::{Site, ask};

/// A site whose store is a new database, and its address.
fn site() -> Option<(Site, String)> {
    let url = pg::fresh_database()?;
    let address = if url.starts_with("postgres") {
        url
    } else {
        // `host=/folder user=… dbname=…`; the last word of a kind counts.
        let part = |name: &str| url.rsplit(' ').find_map(|word| word.strip_prefix(name)).unwrap_or_default();
        format!("postgres://{}@{}/{}", part("user="), part("host=").replace('/', "%2F"), part("dbname="))
    };
    let config = format!(
        r#"
store: "{address}"
engine: {{lease: 3s, orphan_check: 1s}}
agents:
  a:
    shell: 'echo "$BELFRY_TICK_AT" >> ticks; echo "says $PROMPT"'
    env: {{PROMPT: "{{{{ prompt }}}}"}}
    prompt: hello
    schedules: {{s: {{cron: "0 0 1 1 *"}}, five: {{cron: "*/5 * * * *"}}}}
  block:
    shell: 'echo blocking; while ! [ -e go ]; do sleep 0.02; done; echo free'
    retry: {{max: 3, base: 100ms}}
    schedules: {{s: {{cron: "0 0 1 1 *"}}, t: {{cron: "0 0 1 1 *"}}}}
"#
    );
    Some((Site::new(&config), address))
}

fn runs(address: &str) -> Vec<RunRecord> {
    ask(address, async |store| store.runs(&RunFilter::default(), None, 100).await.unwrap().items)
}

#[test]
fn a_guest_runs_it_where_nobody_serves() {
    let Some((site, address)) = site() else { return };
    let said = site.run(&["run", "a/s", "--follow"]);
    assert_eq!((said.code, said.out.as_str()), (0, "says hello\n"), "{said:?}");
    assert!(ask(&address, async |store| store.nodes().await.unwrap()).is_empty(), "it has left");
    // A guest is no server: the next one does not rely on it, and finds the limit that it holds.
    let first = site.start(&["run", "block/s", "--follow"]);
    first.wait_for("blocking");
    let second = site.start(&["run", "block/t", "--follow"]);
    second.wait_for_error("run 0");
    site.refused(&["run", "block/t", "--timeout", "500ms"], 6, "and was cancelled");
    site.write("go", "");
    assert_eq!(first.end(), 0);
    second.wait_for("free");
    assert_eq!(second.end(), 0);
}

#[test]
fn nodes_start_what_is_asked_for_and_rescue_a_killed_guests_run() {
    let Some((site, address)) = site() else { return };
    let guest = site.start(&["run", "block/s", "--follow"]);
    guest.wait_for("blocking");
    guest.kill();
    site.write("go", "");
    let server = site.up();
    let said = site.run(&["run", "a/s", "--wait"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(site.run(&["run", "a/s"]).err.contains("node"), "it says who starts it");
    server.wait_for("run_rescued");
    server.wait_for(r#""agent":"block","schedule":"s""#);
    let rescued = site.ok(&["run", "block/t", "--wait"]);
    let runs = runs(&address);
    let ended = |name: &str| runs.iter().find(|run| run.name == name).unwrap();
    assert_eq!((ended("block/s").state, ended("block/s").attempt), (RunState::Completed, 2));
    assert_eq!(ended("block/t").id.to_string(), rescued);
    assert_eq!(server.stop(), 0);
}

#[test]
fn schedules_are_edited_beside_the_nodes() {
    let Some((site, address)) = site() else { return };
    let server = site.up();
    site.ok(&["add", "a/quick", "--every", "1h"]);
    server.wait_for(r#""schedule":"quick""#);
    site.ok(&["pause", "a"]);
    site.ok(&["resume", "a"]);
    site.ok(&["set", "a/quick", "every=2h"]);
    site.ok(&["rm", "a/quick"]);
    let config = site.read("belfry.yaml");
    site.write("belfry.yaml", &config.replace("*/5", "*/10"));
    // It may have seen the file itself by now.
    let reloaded = site.json(&["reload"]);
    assert!(reloaded["detail"].as_str().unwrap().starts_with("0 added"), "{reloaded}");
    assert!(site.ok(&["apply"]).contains("nothing has changed"));
    let five = ask(&address, async |store| store.schedule("a/five").await.unwrap().unwrap());
    assert_eq!(five.definition.when, belfry_core::definition::When::Cron("*/10 * * * *".into()));
    assert_eq!(server.stop(), 0);
}

#[test]
fn past_ticks_are_made_once_and_run_in_order() {
    let Some((site, address)) = site() else { return };
    site.ok(&["apply"]);
    let span = ["--from", "2026-03-02T12:00:00Z", "--to", "2026-03-02T12:30:00Z"];
    let all = [&["backfill", "a/five"], &span[..]].concat();
    assert_eq!(site.json(&all)["runs"].as_array().unwrap().len(), 6);
    let again = site.json(&all);
    assert_eq!((&again["runs"], &again["left_out"]), (&json!([]), &json!(6)), "they live");
    assert!(runs(&address).iter().all(|run| run.trigger == Trigger::Backfill));
    let server = site.up();
    for _ in 0..6 {
        server.wait_for(r#""event":"run_finished","agent":"a","schedule":"five","tick_at":"2026-03-02"#);
    }
    assert_eq!(server.stop(), 0);
    let ticks = site.read("ticks");
    let ticks: Vec<_> = ticks.lines().filter(|tick| tick.starts_with("2026-03-02")).collect();
    assert!(ticks.len() == 6 && ticks.is_sorted(), "{ticks:?}");
    let missing = [&all[..], &["--missing"]].concat();
    assert_eq!(site.json(&missing)["left_out"], 6);
}
