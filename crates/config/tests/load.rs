//! Files to definitions, as `belfry up` and `belfry check` meet them.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use belfry_config::{Errors, Host, Loaded, load};
use belfry_core::definition::{Breaker, CatchUp, Options, When};
use belfry_core::work::Action;
use tempfile::TempDir;

/// Writes files into a new folder and loads the first.
fn load_files(files: &[(&str, &str)], env: &[(&str, &str)]) -> (TempDir, Result<Loaded, Errors>) {
    let folder = TempDir::new().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let env: HashMap<String, String> = env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    let lookup = |name: &str| env.get(name).cloned();
    let host = Host { env: &lookup, timezone: "Europe/Vienna" };
    let loaded = load(&folder.path().join(files[0].0), &host);
    (folder, loaded)
}

fn load_text(text: &str) -> Loaded {
    load_files(&[("belfry.yaml", text)], &[]).1.unwrap()
}

fn errors_of(text: &str) -> Vec<String> {
    let errors = load_files(&[("belfry.yaml", text)], &[]).1.unwrap_err();
    errors.problems.iter().map(|problem| problem.message().to_owned()).collect()
}

const EXAMPLE: &str = r#"
store: sqlite:.belfry/belfry.db            # or postgres://user@host/db ; BELFRY_STORE overrides
timezone: Australia/Sydney
lanes: {main: 30, cron: 10, nightly: {slots: 2, limit: 4, queue_limit: 50}}
include: [agents/*.yaml]
agents:
  reporter:
    run: ["claude", "-p", "{{ prompt }}"]  # argv, no shell; `shell:` for a shell line
    cwd: ./report
    env: {MODE: quiet, TOKEN: "${REPORT_TOKEN}"}     # ${VAR} and ${VAR:-default}
    breaker: {threshold: 3, reset_after: 30m}
    schedules:
      morning: {cron: "0 9 * * 1-5", timezone: Europe/London, prompt: "Write the daily report."}
      sweep:   {every: 20m, jitter: 30s, only_between: "08:00-18:00", not_on: [sat, sun], catch_up: run_once}
      launch:  {at: "2027-02-03T09:00:00+01:00"}
      warm:    {after: 90s}
      pushed:  {webhook: {secret: "${HOOK_SECRET}"}, prompt: "Handle {{ payload.ref }}."}
      talk:    {chat: {mode: queue, debounce: 800ms}}
"#;

#[test]
fn the_example_says_what_it_means() {
    let more = "agents: {night: {shell: 'date', lane: nightly, schedules: {poll: {every: 15m}}}}";
    let (folder, loaded) = load_files(&[("belfry.yaml", EXAMPLE), ("agents/night.yaml", more)], &[]);
    let loaded = loaded.unwrap();
    assert_eq!((loaded.invalid, loaded.warnings), (vec![], vec![]));
    let reporter = &loaded.agents[0];
    assert_eq!(reporter.name, "reporter");
    let definition = &reporter.definition;
    let argv = ["claude", "-p", "{{ prompt }}"].map(str::to_owned);
    assert_eq!(definition.work.action, Action::Run(argv.into()));
    assert_eq!(definition.work.cwd.as_deref(), folder.path().join("report").to_str());
    assert_eq!(definition.work.env["TOKEN"], "${REPORT_TOKEN}");
    assert_eq!(definition.breaker, Some(Breaker { threshold: 3, reset_after_ms: 1_800_000 }));
    let names: Vec<_> = reporter.schedules.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["morning", "sweep", "launch", "warm", "pushed", "talk"]);
    let zones = [0, 1].map(|i| reporter.schedules[i].1.options.timezone.as_deref());
    assert_eq!(zones, [Some("Europe/London"), Some("Australia/Sydney")]);
    let sweep = &reporter.schedules[1].1;
    assert_eq!(sweep.when, When::Every("20m".into()));
    let expected = Options {
        timezone: Some("Australia/Sydney".into()),
        jitter: Some("30s".into()),
        only_between: Some("08:00-18:00".into()),
        not_on: vec!["sat".into(), "sun".into()],
        catch_up: Some(CatchUp::RunOnce),
        ..Options::default()
    };
    assert_eq!(sweep.options, expected);
    assert_eq!(loaded.agents[1].name, "night");
    let lane = loaded.settings.lanes["nightly"];
    assert_eq!((lane.slots, lane.limit, lane.queue_limit), (2, Some(4), Some(50)));
    assert_eq!(loaded.settings.lanes["team"].slots, 100);
    assert_eq!(
        loaded.files,
        [folder.path().join("belfry.yaml"), folder.path().join("agents/night.yaml")].map(|p| p.to_owned())
    );
    assert_eq!(loaded.folders, [folder.path().join("agents")]);
    let store = loaded.settings.store.sqlite_path().unwrap().to_owned();
    assert_eq!(store, Path::new(folder.path()).join(".belfry/belfry.db"));
}

#[test]
fn a_wrong_schedule_is_invalid_alone_and_still_there() {
    let loaded =
        load_text("agents: {a: {shell: x, schedules: {bad: {cron: '0 25 * * *'}, good: {every: 5m}}}}");
    assert_eq!(loaded.invalid.len(), 1);
    let problem = &loaded.invalid[0];
    assert_eq!(problem.schedule(), Some("a/bad"));
    let place = problem.place().unwrap();
    assert_eq!((place.line, place.column), (1, 51));
    let (_, bad) = &loaded.agents[0].schedules[0];
    // The store will call it invalid with the same words.
    assert_eq!(format!("a/bad: {}", bad.compile("a/bad").unwrap_err()), problem.message());
}

#[test]
fn all_errors_are_reported_at_once() {
    let errors = errors_of("agnets: {}\nlisten: 80\nagents: {a: {schedules: {b: {}}}, 'x/y': {run: []}}");
    assert_eq!(errors.len(), 6, "{errors:#?}");
}
