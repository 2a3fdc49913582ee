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
    // Tests look for `zz` in what is said, which may name the folder.
    let folder = std::iter::repeat_with(|| TempDir::new().unwrap())
        .find(|folder| !folder.path().to_string_lossy().contains("zz"))
        .unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let env: HashMap<String, String> = env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    let lookup = |name: &str| env.get(name).cloned();
    let host = Host::new(&lookup, "Europe/Vienna");
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

#[test]
fn defaults_lie_under_every_agent() {
    let loaded = load_text(
        "defaults:\n  timeout: 2m\n  shell: date\n  retry: {max: 1, base: 1s}\n  env: {A: a, B: b}\n  breaker: {threshold: 2, reset_after: 1m}\n\
         agents:\n  one:\n  two: {run: [x], timeout: none, retry: {max: 5}, env: {B: c}, breaker: none, max_concurrent: none}\n",
    );
    let [one, two] = [0, 1].map(|i| &loaded.agents[i].definition);
    assert_eq!(one.work.action, Action::Shell("date".into()));
    assert_eq!((one.work.timeout_ms, one.retry.max, one.max_concurrent), (Some(120_000), 1, Some(1)));
    assert_eq!(two.work.action, Action::Run(vec!["x".into()]));
    assert_eq!((two.work.timeout_ms, two.retry.max, two.retry.base_ms), (None, 5, 1_000));
    assert_eq!((two.work.env["A"].as_str(), two.work.env["B"].as_str()), ("a", "c"));
    assert_eq!((two.breaker, two.max_concurrent), (None, None));
    assert!(one.breaker.is_some());
}

#[test]
fn a_schedule_takes_over_zone_and_lateness() {
    let text = "engine: {late_after: 2m}\nagents: {a: {shell: x, schedules: {s: {every: 5m}, t: {every: 5m, late_after: auto}}}}";
    let loaded = load_text(text);
    let options = |i: usize| loaded.agents[0].schedules[i].1.options.clone();
    assert_eq!(options(0).timezone.as_deref(), Some("Europe/Vienna"));
    assert_eq!((options(0).late_after_ms, options(1).late_after_ms), (Some(120_000), None));
}

#[test]
fn a_local_time_needs_a_zone_that_somebody_names() {
    let at = |top: &str| {
        load_text(&format!(
            "{top}\nagents: {{a: {{shell: x, schedules: {{s: {{at: 2027-02-03T09:00:00}}}}}}}}"
        ))
    };
    let nameless = at("");
    assert_eq!(nameless.invalid.len(), 1);
    assert!(nameless.agents[0].schedules[0].1.compile("a/s").is_err());
    assert_eq!(at("timezone: Europe/Vienna").invalid, []);
}

#[test]
fn references_stay_in_env_and_secrets_and_are_filled_in_elsewhere() {
    let text = "store: \"postgres://me:${PW}@db/x\"\nlisten: 127.0.0.1:${PORT:-81}\ntimezone: ${ZONE}\n\
        agents:\n  a:\n    shell: echo ${HOME}\n    cwd: ${DIR}/x\n    env: {T: \"${TOKEN}\"}\n    timeout: ${TIMEOUT:-5m}\n\
        \x20   schedules: {w: {webhook: {secret: \"${S:-d}\"}, enabled: \"${ON:-false}\"}}\n";
    let env = [("PW", "hunter2"), ("ZONE", "Asia/Tokyo"), ("DIR", "/d")];
    let loaded = load_files(&[("belfry.yaml", text)], &env).1.unwrap();
    assert_eq!(loaded.settings.store.expose(), "postgres://me:hunter2@db/x");
    assert!(!format!("{:?} {}", loaded.settings, loaded.settings.store).contains("hunter2"));
    assert_eq!(loaded.settings.listen.port(), 81);
    assert_eq!(loaded.settings.timezone, "Asia/Tokyo");
    let agent = &loaded.agents[0];
    assert_eq!(agent.definition.work.cwd.as_deref(), Some("/d/x"));
    assert_eq!(agent.definition.work.timeout_ms, Some(300_000));
    assert_eq!(agent.definition.work.env["T"], "${TOKEN}");
    assert_eq!(agent.definition.work.action, Action::Shell("echo ${HOME}".into()));
    assert_eq!(agent.schedules[0].1.when, When::Webhook(serde_json::json!({"secret": "${S:-d}"})));
    assert!(!agent.schedules[0].1.options.enabled);
}

#[test]
fn the_environment_overrides_store_lanes_and_the_limit() {
    let env =
        [("BELFRY_STORE", "sqlite:/x.db"), ("BELFRY_LANE_MY_LANE", "7"), ("BELFRY_MAX_CONCURRENT", "9")];
    let loaded = load_files(&[("belfry.yaml", "lanes: {my-lane: 1}")], &env).1.unwrap();
    assert_eq!(loaded.settings.store.expose(), "sqlite:/x.db");
    let lane = loaded.settings.lanes["my-lane"];
    assert_eq!((lane.slots, lane.own_slots), (1, Some(7)));
    assert_eq!(loaded.settings.engine.max_concurrent, Some(9));
    let env =
        [("BELFRY_STORE", "mysql://u:secret@h"), ("BELFRY_LANE_CRON", "x"), ("BELFRY_MAX_CONCURRENT", "0")];
    let errors = load_files(&[("belfry.yaml", "agents: {}")], &env).1.unwrap_err();
    assert_eq!(errors.problems.len(), 3);
    assert!(!errors.to_string().contains("secret"));
}

#[test]
fn includes_are_found_sorted_and_read_once() {
    let files = [
        (
            "belfry.yaml",
            "include: [agents/*.yaml, ./agents/b.yaml, more]\nagents: {main: {shell: x, cwd: y}}",
        ),
        ("agents/b.yaml", "agents: {b: {shell: x, cwd: y}}\ninclude: deep/?.yaml"),
        ("agents/a.yaml", "agents: {a: {shell: x}}"),
        ("agents/.hidden.yaml", "not: read"),
        ("agents/deep/c.yaml", "agents: {c: {shell: x}}"),
        ("more", "agents: {}"),
    ];
    let (folder, loaded) = load_files(&files, &[]);
    let loaded = loaded.unwrap();
    let names: Vec<_> = loaded.agents.iter().map(|agent| agent.name.as_str()).collect();
    assert_eq!(names, ["main", "a", "b", "c"]);
    assert_eq!(loaded.files.len(), 5);
    // Each file's paths are relative to it.
    let cwd = loaded.agents[2].definition.work.cwd.clone();
    assert_eq!(cwd.as_deref(), folder.path().join("agents/y").to_str());
}

#[test]
fn includes_that_go_wrong_say_where() {
    let said = |files: &[(&str, &str)]| load_files(files, &[]).1.unwrap_err().problems;
    let problems =
        said(&[("belfry.yaml", "include: [gone.yaml, ../x.yaml, /etc/passwd, sub]"), ("sub/x", "")]);
    let messages: Vec<_> = problems.iter().map(|problem| problem.message()).collect();
    assert!(messages[0].ends_with("gone.yaml`: there is no such file"), "{messages:?}");
    assert!(messages[1].contains("leaves the folder") && messages[2].contains("leaves the folder"));
    assert!(messages[3].ends_with("sub`: it is a directory"));
    assert!(problems.iter().all(|problem| problem.place().is_some()));

    let twice = said(&[
        ("belfry.yaml", "include: [b.yaml]\nagents: {a: {shell: x}}"),
        ("b.yaml", "\n\nagents: {A: {shell: x}}"),
    ]);
    let shown = twice[0].to_string();
    assert!(shown.contains("b.yaml:3:10") && shown.contains("belfry.yaml:2:10"), "{shown}");

    let circle = said(&[("belfry.yaml", "include: [b.yaml]"), ("b.yaml", "include: [belfry.yaml]")]);
    assert!(circle[0].message().contains("includes itself"));
    let settings = said(&[("belfry.yaml", "include: [b.yaml]"), ("b.yaml", "store: sqlite:x")]);
    assert_eq!(settings[0].message(), "`store` belongs into the main file");
    let broken = said(&[("belfry.yaml", "include: [b.yaml]\nx: 1"), ("b.yaml", "\ta")]);
    assert_eq!(broken.len(), 2);
}

#[test]
fn a_pattern_may_fit_the_file_it_stands_in() {
    let files = [("belfry.yaml", "include: ['*.yaml']"), ("b.yaml", "agents: {b: {shell: x}}")];
    assert_eq!(load_files(&files, &[]).1.unwrap().agents.len(), 1);
}

/// Hostile input 49: none of these may hang, grow or panic.
#[cfg(unix)]
#[test]
fn what_is_not_a_file_of_text_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("directory")).unwrap();
    fs::write(path("latin"), b"a: 1\nb: \xff\n").unwrap();
    fs::File::create(path("huge")).unwrap().set_len(1 << 30).unwrap();
    std::os::unix::fs::symlink(path("loop"), path("loop")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
    let host = Host::new(&|_| None, "UTC");
    for (name, cause) in [
        ("directory", "it is a directory"),
        ("latin", "line 2 is not UTF-8"),
        ("huge", "it is larger than 8 MiB"),
        ("loop", "its symbolic links go in a circle"),
        ("fifo", "it is not a regular file"),
        ("missing", "there is no such file"),
        ("latin/x", "a part of its path is not a directory"),
    ] {
        let errors = load(&path(name), &host).unwrap_err();
        let message = errors.problems[0].message().to_owned();
        assert!(message.starts_with("cannot read") && message.ends_with(cause), "{message}");
    }
    let device = load(Path::new("/dev/zero"), &host).unwrap_err();
    assert!(device.problems[0].message().ends_with("it is not a regular file"));
}

#[cfg(unix)]
#[test]
fn a_link_out_of_the_folder_is_refused_and_one_inside_is_fine() {
    let (folder, _) = load_files(&[("etc/belfry.yaml", ""), ("secret.yaml", "agents: {s: {shell: x}}")], &[]);
    let main = folder.path().join("etc/belfry.yaml");
    let host = Host::new(&|_| None, "UTC");
    std::os::unix::fs::symlink(folder.path().join("secret.yaml"), folder.path().join("etc/out.yaml"))
        .unwrap();
    for include in ["out.yaml", "o*.yaml"] {
        fs::write(&main, format!("include: [{include}]")).unwrap();
        let errors = load(&main, &host).unwrap_err();
        assert!(errors.problems[0].message().contains("leads out of the folder"));
    }
    fs::write(folder.path().join("etc/real.yaml"), "agents: {r: {shell: x}}").unwrap();
    std::os::unix::fs::symlink("real.yaml", folder.path().join("etc/in.yaml")).unwrap();
    fs::write(&main, "include: [in.yaml]").unwrap();
    assert_eq!(load(&main, &host).unwrap().agents.len(), 1);
}

/// Files that name no program, and decide what runs all the same.
#[cfg(unix)]
const NO_PROGRAM: [&str; 6] = [
    "timezone: UTC",
    "include: [a.yaml]",
    "api: {allow_agents: true}",
    "defaults: {env: {PATH: /elsewhere}}",
    "store: sqlite:/elsewhere",
    "{not yaml",
];

/// Whether this is root, which alone can give something to another user; says so if not.
#[cfg(unix)]
fn can_give_away(folder: &std::path::Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let is_root = folder.metadata().unwrap().uid() == 0;
    if !is_root {
        let words = "\nSKIPPED: only root can give something to another user\n";
        drop(std::io::Write::write_all(&mut std::io::stderr(), words.as_bytes()));
    }
    is_root
}

#[cfg(unix)]
#[test]
fn a_file_that_anybody_may_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, _) = load_files(&[("belfry.yaml", "agents: {a: {shell: x}}")], &[]);
    let main = folder.path().join("belfry.yaml");
    let host = Host::new(&|_| None, "UTC");
    fs::set_permissions(&main, fs::Permissions::from_mode(0o666)).unwrap();
    for text in NO_PROGRAM {
        fs::write(&main, text).unwrap();
        let errors = load(&main, &host).unwrap_err();
        assert_eq!(errors.problems.len(), 1, "{errors}");
        assert!(errors.problems[0].message().starts_with("every user of this host can write"), "{errors}");
        assert!(errors.to_string().contains("chmod o-w "), "{errors}");
    }
}

#[cfg(unix)]
#[test]
fn root_takes_no_file_that_another_group_can_write_or_replace() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let (folder, _) = load_files(&[("in/belfry.yaml", "timezone: UTC")], &[]);
    if !can_give_away(folder.path()) {
        return;
    }
    let host = Host::new(&|_| None, "UTC");
    let main = folder.path().join("in/belfry.yaml");
    for (path, said) in [(main.clone(), "can write"), (folder.path().join("in"), "can replace")] {
        let before = path.metadata().unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(load(&main, &host).is_ok(), "a group of root's");
        chown(&path, None, Some(65_534)).unwrap();
        let errors = load(&main, &host).unwrap_err().to_string();
        assert!(errors.contains(&format!("group 65534 {said}")), "{errors}");
        assert!(errors.contains(&format!("chmod g-w {}", path.display())), "{errors}");
        fs::set_permissions(&path, before).unwrap();
        assert!(load(&main, &host).is_ok(), "the group may only read");
    }
}

#[cfg(unix)]
#[test]
fn a_folder_that_is_open_to_all_is_refused_to_root_and_warned_of_to_others() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let text = "agents: {a: {shell: x}}";
    let (folder, _) = load_files(&[("belfry.yaml", text), ("deep/down/belfry.yaml", text)], &[]);
    let path = |name: &str| folder.path().join(name);
    std::os::unix::fs::symlink(path("deep/down"), path("link")).unwrap();
    let host = Host::new(&|_| None, "UTC");
    let is_root = path("belfry.yaml").metadata().unwrap().uid() == 0;
    let mode = |name, mode| fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
    // Its own folder, one further up, and one above where a link leads.
    for (name, open) in [
        ("belfry.yaml", ""),
        ("deep/down/belfry.yaml", ""),
        ("deep/down/belfry.yaml", "deep"),
        ("link/belfry.yaml", "deep"),
    ] {
        mode(open, 0o777);
        let said = match load(&path(name), &host) {
            Ok(loaded) => (false, loaded.warnings[0].message().to_owned()),
            Err(errors) => (true, errors.problems[0].message().to_owned()),
        };
        assert_eq!(said.0, is_root);
        assert!(said.1.starts_with("every user of this host can replace"), "{}", said.1);
        // With the sticky bit only its owner can replace a file.
        mode(open, 0o1777);
        assert!(load(&path(name), &host).unwrap().warnings.is_empty());
    }
}

#[cfg(unix)]
#[test]
fn root_takes_no_file_of_another_user() {
    use std::os::unix::fs::chown;
    let files = [("belfry.yaml", "include: [a.yaml]"), ("a.yaml", "agents: {}")];
    let (folder, _) = load_files(&files, &[]);
    let (main, included) = (folder.path().join("belfry.yaml"), folder.path().join("a.yaml"));
    if !can_give_away(folder.path()) {
        return;
    }
    let host = Host::new(&|_| None, "UTC");
    assert!(load(&main, &host).is_ok());
    chown(&included, Some(65_534), None).unwrap();
    let errors = load(&main, &host).unwrap_err().to_string();
    assert!(errors.contains("user 65534 owns `"), "{errors}");
    assert!(errors.contains("run as user 65534, or take the file over: chown root"), "{errors}");
    chown(&included, Some(0), None).unwrap();
    chown(&main, Some(65_534), None).unwrap();
    for text in NO_PROGRAM {
        fs::write(&main, text).unwrap();
        let errors = load(&main, &host).unwrap_err();
        assert_eq!(errors.problems.len(), 1, "{errors}");
        assert!(errors.problems[0].message().starts_with("user 65534 owns `"), "{errors}");
    }
}

#[cfg(unix)]
#[test]
fn root_takes_no_file_below_a_folder_of_another_user() {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    let (folder, _) = load_files(&[("belfry.yaml", "timezone: UTC")], &[]);
    let path = |name: &str| folder.path().join(name);
    if !can_give_away(folder.path()) {
        return;
    }
    fs::create_dir_all(path("other/own")).unwrap();
    fs::rename(path("belfry.yaml"), path("other/own/belfry.yaml")).unwrap();
    symlink(path("other/own"), path("link")).unwrap();
    let host = Host::new(&|_| None, "UTC");
    for mode in [0o755, 0o1755] {
        for name in ["other/own/belfry.yaml", "link/belfry.yaml"] {
            chown(path("other"), Some(0), None).unwrap();
            assert!(load(&path(name), &host).is_ok(), "{name}");
            chown(path("other"), Some(65_534), None).unwrap();
            fs::set_permissions(path("other"), fs::Permissions::from_mode(mode)).unwrap();
            let errors = load(&path(name), &host).unwrap_err().to_string();
            let other = path("other");
            assert!(
                errors.contains(&format!("user 65534 owns {} and can replace", other.display())),
                "{errors}"
            );
            assert!(errors.contains(&format!("chown root {}", other.display())), "{errors}");
        }
    }
}

#[test]
fn a_million_errors_are_bounded() {
    let text: String = (0..30_000).map(|i| format!("k{i}: 1\n")).collect();
    assert_eq!(errors_of(&text).len(), 501);
    let unset = vec!["\"${NOPE}\""; 100_000].join(", ");
    let text = format!("agents: {{a: {{shell: x, schedules: {{s: {{every: 1h, not_on: [{unset}]}}}}}}}}");
    let errors = errors_of(&text);
    assert_eq!(errors[0], "the environment variable `NOPE` is not set");
    assert_eq!(errors.last().unwrap(), "there are more mistakes than the 500 that are shown");
    assert_eq!(errors.len(), 501);
    let warnings: String = (0..2_000).map(|i| format!("  a{i}: {{shell: x, lane: l{i}}}\n")).collect();
    assert_eq!(load_text(&format!("agents:\n{warnings}")).agents.len(), 2_000);
    let told = load_text(&format!("agents:\n{warnings}")).warnings;
    assert_eq!(told.len(), 501);
    assert_eq!(told[500].message(), "there are more warnings than the 500 that are shown");
    // However many warnings there are, an error is seen.
    assert_eq!(errors_of(&format!("agents:\n{warnings}  b: {{}}\n")).len(), 1);
}

/// The store says why each of them is invalid, and not only those that are shown.
#[test]
fn every_wrong_schedule_is_there_also_if_not_all_are_shown() {
    let schedules: String = (0..2_000).map(|i| format!("      s{i}: {{every: 1x}}\n")).collect();
    let loaded = load_text(&format!("agents:\n  a:\n    shell: x\n    schedules:\n{schedules}"));
    assert_eq!(loaded.invalid.len(), 501);
    assert_eq!(loaded.invalid[499].schedule(), Some("a/s499"));
    assert_eq!(loaded.agents[0].schedules.len(), 2_000);
    assert!(loaded.agents[0].schedules.iter().all(|(name, schedule)| schedule.timing(name).is_err()));
}

#[test]
fn what_an_alias_stands_for_is_wrong_once() {
    let days = vec!["*x"; 1_000].join(", ");
    let text =
        format!("agents: {{a: {{shell: x, schedules: {{s: {{every: 1h, not_on: [&x nay, {days}]}}}}}}}}");
    assert_eq!(load_text(&text).invalid.len(), 1);
}

#[test]
fn of_many_commands_some_are_named() {
    let commands: String = (10..40).map(|i| format!("      c{i}: [x]\n")).collect();
    let text = format!(
        "agents:\n  a:\n    shell: x\n    commands:\n{commands}    schedules:\n      s: {{every: 1h, command: other}}\n"
    );
    let help = load_text(&text).warnings[0].way_out().unwrap().to_owned();
    assert!(help.contains("`c10`") && help.contains("`c29`, …; the agent's own"), "{help}");
}

#[test]
fn a_large_file_loads_quickly() {
    let schedules: String =
        (0..20_000).map(|i| format!("      s{i}: {{every: 5m, prompt: \"{i}\"}}\n")).collect();
    let loaded = load_text(&format!("agents:\n  a:\n    shell: x\n    schedules:\n{schedules}"));
    assert_eq!(loaded.agents[0].schedules.len(), 20_000);
}

#[test]
fn an_agent_may_be_a_function_of_the_embedding_program() {
    let text = "agents: {mine: {timeout: 5m, schedules: {s: {every: 5m}}}, other: {}}";
    let host = Host { handlers: &["mine"], ..Host::new(&|_| None, "UTC") };
    let errors = load_text_as(text, &host).unwrap_err();
    assert_eq!(errors.problems.len(), 1);
    let loaded = load_text_as(&text.replace(", other: {}", ""), &host).unwrap();
    assert_eq!(loaded.agents[0].definition.work.action, Action::Handler);
    assert_eq!(load_text_as(&belfry_config::export(&loaded.agents), &host).unwrap().agents, loaded.agents);
}

fn load_text_as(text: &str, host: &Host<'_>) -> Result<Loaded, Errors> {
    belfry_config::load_text(text, Path::new("belfry.yaml"), host)
}

/// Each alias adds to the depth of what it stands for, so a tree can be deep although no line is.
#[test]
fn aliases_do_not_make_a_tree_deeper_than_allowed() {
    let mut text = "a0: &a0 [x]\n".to_owned();
    for i in 1..300 {
        text += &format!("a{i}: &a{i} {}*a{}{}\n", "[".repeat(50), i - 1, "]".repeat(50));
    }
    assert!(errors_of(&text)[0].starts_with("nested too deeply"));
}

#[test]
fn only_a_merge_key_without_quotes_merges() {
    let loaded = load_text("agents:\n  a: {run: [x], payload: {\"<<\": 1}}\n");
    assert_eq!(loaded.agents[0].definition.work.payload["<<"], 1);
    let loaded = load_text("agents:\n  a: &a {run: [x]}\n  b: {<<: *a}\n");
    assert_eq!(loaded.agents[1].definition.work.action, Action::Run(vec!["x".into()]));
}

#[test]
fn a_time_that_has_passed_is_worth_a_warning() {
    let text = "agents:\n  a:\n    shell: date\n    schedules:\n      s: {at: \"2020-01-01T00:00:00Z\"}\n      t: {at: \"2030-01-01T00:00:00Z\"}\n";
    let host =
        |now: Option<&str>| Host { now: now.map(|now| now.parse().unwrap()), ..Host::new(&|_| None, "UTC") };
    let warnings = |now| {
        let loaded = belfry_config::load_text(text, std::path::Path::new("belfry.yaml"), &host(now)).unwrap();
        loaded.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(warnings(None), [] as [&str; 0], "only for who asks");
    let found = warnings(Some("2026-03-02T12:00:00Z"));
    assert_eq!(found.len(), 1);
    for words in
        ["a/s: its time 2020-01-01T00:00:00", "has passed, it is 2026-03-02T12:00:00", "belfry.yaml:5"]
    {
        assert!(found[0].contains(words), "{words} in {}", found[0]);
    }
}

#[test]
fn no_rendering_of_a_broken_file_shows_a_secret() {
    let text = r#"
agents:
  a:
    shell: x
    env: {MY_TOKEN: "zzENV", X: "${oops"}
    schedules:
      s1: {webhook: {secret: "zzLEAKX${"}}
      s2: {webhook: {secret: "${zz-LEAK}"}}
      s3: {webhook: {secert: zzTYPO}}
      s4:
        webhook:
          secrets:
          - zzLIST${
"#;
    let errors = load_files(&[("belfry.yaml", text)], &[]).1.unwrap_err();
    assert!(errors.problems.len() >= 5, "{errors}");
    for said in [errors.to_string(), errors.render(true), errors.brief()] {
        assert!(!said.contains("zz"), "{said}");
    }
    let brief = errors.brief();
    assert!(brief.contains(":5: ") && brief.contains("`X`: a reference is not closed"), "{brief}");
    assert!(!brief.contains('\n') && !brief.contains("shell"), "{brief}");
}

#[test]
fn a_secret_in_the_place_of_a_key_or_a_map_is_not_shown() {
    for agent in [
        "{shell: x, env: {DB_PASSWORD: abc,zz}}",
        "{shell: x, env: {MODE: quiet, DB_PASS:zz}}",
        "{shell: x, env: {DB_PASS=zz-B, MODE: quiet}}",
        "{shell: x, env: {\"DB_PASS=zz\": x, BELFRY_X=zz: x, zz}}",
        "{shell: x, env_pass: [DB_PASS=zz, BELFRY_zz=zz zz]}",
        "{shell: x, env: {DB_PASS: {a: zz}, X zz-E: y}}",
        "{shell: x, schedules: {s: {webhook: {secret: abc,zz}}, t: {webhook: zz}, u: {webhook: [zz]}}}",
        "{shell: x, schedules: {DB_PASS: zz, cron: zz, s: zz}}",
        "{curl -u admin zz: x}",
        "{shell: x, payload: zz, commands: {c: --password=zz x}}",
        "curl -u admin:zz http://x/",
        "{run: mysql --password=zz -e x}",
    ] {
        let text = format!("store: me:zz@h/db\nagents:\n  a: {agent}\n  DB_PASS: zz\n");
        let errors = load_files(&[("belfry.yaml", &text)], &[]).1.unwrap_err();
        for said in [errors.to_string(), errors.brief()] {
            assert!(!said.contains("zz"), "{said}");
        }
    }
}

#[test]
fn who_may_not_read_the_file_sees_no_value_of_the_environment() {
    for wrong in [
        "needs: [\"${VALUE}!\"]",
        "timeout: \"${VALUE}\"",
        "lane: \"a ${VALUE}\"",
        "retry: {max: \"${VALUE}\"}",
    ] {
        let text = format!("agents:\n  a: {{run: [x], {wrong}}}\n");
        let errors = load_files(&[("belfry.yaml", &text)], &[("VALUE", "zzz")]).1.unwrap_err();
        let told = "/belfry.yaml:2: a value that came from the environment is wrong";
        assert!(errors.brief().ends_with(told), "{}", errors.brief());
    }
    let text =
        "timezone: \"${VALUE}\"\nagents:\n  a: {run: [x], schedules: {s: {cron: \"0 9 * * *\"}}}\n  b: {}\n";
    let errors = load_files(&[("belfry.yaml", text)], &[("VALUE", "zzzz")]).1.unwrap_err();
    assert!(errors.to_string().contains("zzzz"), "{errors}");
    assert!(!errors.brief().contains("zzzz"), "{}", errors.brief());
}

#[test]
fn who_may_not_read_the_file_sees_nothing_of_its_commands() {
    for (command, told) in [
        ("run: curl -u zz", "belfry.yaml:2: `run` must be a list: a program and its arguments"),
        ("run: [curl, \"{{ zz }}\"]", "belfry.yaml:2: `run`: unknown name"),
        ("run: [curl, \"{{ payload zz }}\"]", "belfry.yaml:2: `run`: expected `|` or `}}`"),
        (
            "shell: \"zz {{ payload.x }}\"",
            "belfry.yaml:2: `shell`: a `shell` line is not a template: values come as environment variables",
        ),
    ] {
        let text = format!("agents:\n  a: {{{command}}}\n");
        let errors = load_files(&[("belfry.yaml", &text)], &[]).1.unwrap_err();
        assert!(errors.brief().ends_with(&format!("/{told}")), "{}", errors.brief());
        assert!(errors.to_string().contains("zz"), "{errors}");
    }
}
