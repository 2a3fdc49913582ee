//! What holds for every file: nothing panics, what is written out is read back, and order does not matter.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use belfry_config::{DEMO, Host, Input, Loaded, STARTER, export, load_text, parse_schedule};
use belfry_core::definition::{AnchorName, Breaker, Budget, CatchUp, IfRunning, Options, Retry, Scope, When};
use belfry_core::work::{Action, Stdin, Work};
use belfry_core::{AgentDefinition, AgentSpec, ScheduleDefinition};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn load(text: &str) -> Result<Loaded, belfry_config::Errors> {
    let env = |name: &str| (name.len() == 1).then(|| "value".to_owned());
    load_text(text, Path::new("/srv/belfry.yaml"), &Host::new(&env, "Europe/Vienna"))
}

const SEED: &str = r#"
store: sqlite:x.db
timezone: Europe/London
lanes: {main: 3, night: {slots: 2, limit: none}}
engine: {lease: 30s, late_after: auto, labels: [gpu]}
retention: {runs: 30d, audit: 1y}
defaults: &d {timeout: 1h, retry: {max: 3, ok_codes: [0]}, env: {A: "${B:-c}"}}
agents:
  reporter:
    run: ["claude", "-p", "{{ prompt }}"]
    cwd: ./report
    commands: {x: [date], y: {shell: "date; exit 1"}}
    breaker: {threshold: 3, reset_after: 30m}
    schedules:
      morning: {cron: "0 9 * * 1-5", timezone: Europe/London, prompt: "Write ünïcode."}
      sweep: {every: 20m, jitter: 10%, only_between: "08:00-18:00", not_on: [sat, 0]}
      launch: {at: "2027-02-03T09:00:00+01:00"}
      pushed: {webhook: {secret: "${HOOK_SECRET}"}, payload: {a: [1, 2.5, null, true]}}
      talk:
        chat: {mode: queue, debounce: 800ms}
        prompt: |
          several
            lines
  other:
    <<: *d
    shell: date
"#;

/// A text with some of its pieces replaced, dropped or doubled.
fn mutated() -> impl Strategy<Value = String> {
    let pieces = vec![
        "",
        " ",
        "\n",
        "\t",
        ":",
        ": ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "'",
        "*",
        "&a ",
        "*a",
        "!!x ",
        "|",
        ">",
        "#",
        "~",
        "\u{0}",
        "\u{202e}",
        "ü",
        "\u{feff}",
        "${",
        "}",
        "$",
        "<<: ",
        "---\n",
        "...",
        "none",
        "null",
        "1e999",
        "-1",
        "99999999999999999999",
        "\\",
        "%",
        "@",
        "`",
        ",",
        "?",
        "? ",
        "\r",
    ];
    let edit = (any::<prop::sample::Index>(), 0usize..12, prop::sample::select(pieces));
    vec(edit, 1..8).prop_map(|edits| {
        let mut text = SEED.to_owned();
        for (at, drop, piece) in edits {
            let start = text.floor_char_boundary(at.index(text.len() + 1));
            let end = text.ceil_char_boundary((start + drop).min(text.len()));
            text.replace_range(start..end, piece);
        }
        text
    })
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ -~]{0,20}",
        "\\PC{0,12}",
        "[a-z \n\t${}:#'\"|-]{0,30}",
        prop::sample::select(vec![
            "none",
            "null",
            "true",
            "~",
            "${A}",
            "$${A}",
            "$$",
            "a: b",
            "- x",
            "line\nline",
            "0x1",
            "1.0",
            "{{ payload.x | default('a') }} $${{ item }}",
            "{% if not payload.x %}\n${A}{% endif %}",
            "{{.Names}}",
            "{{ \"{{\" }}"
        ])
        .prop_map(str::to_owned),
        any::<String>().prop_map(|text| text.replace('\0', "")),
    ]
}

fn some_text() -> impl Strategy<Value = String> {
    text().prop_filter("not blank", |text| !text.trim().is_empty())
}

fn name() -> impl Strategy<Value = String> {
    "[A-Za-z0-9][A-Za-z0-9_.-]{0,20}"
}

fn env_name() -> impl Strategy<Value = String> {
    "[A-Z$][A-Z0-9_$]{0,8}"
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9).prop_map(|float: f64| Value::from(float)),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(text(), inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn object() -> impl Strategy<Value = Map<String, Value>> {
    btree_map(text(), json(), 0..3).prop_map(|map| map.into_iter().collect())
}

fn action() -> impl Strategy<Value = Action> {
    let argv = (some_text(), vec(text(), 0..3)).prop_map(|(program, mut rest)| {
        rest.insert(0, program);
        Action::Run(rest)
    });
    prop_oneof![argv, some_text().prop_map(Action::Shell)]
}

fn work() -> impl Strategy<Value = Work> {
    let stdin = prop_oneof![Just(Stdin::None), Just(Stdin::Prompt), Just(Stdin::Payload)];
    let env_value = prop_oneof!["[ -#%-~]{0,10}", Just("${A:-b} $$ ${C}".to_owned()), Just(String::new())];
    (
        action(),
        btree_map(name(), action(), 0..3),
        option::of(some_text()),
        object(),
        stdin,
        option::of("/[a-z $]{1,10}[a-z]"),
        btree_map(env_name(), env_value, 0..3),
        vec(env_name(), 0..3),
        (option::of(1u64..10_000_000), 0u64..100_000, 1024u64..1 << 30),
        (vec(0i32..256, 0..3), vec(0i32..256, 0..3)),
    )
        .prop_map(|(action, commands, prompt, payload, stdin, cwd, env, env_pass, numbers, codes)| Work {
            action,
            commands,
            prompt,
            payload,
            stdin,
            cwd: cwd.map(|cwd| cwd.to_owned()),
            env,
            env_pass,
            timeout_ms: numbers.0,
            grace_ms: numbers.1,
            output_bytes: numbers.2,
            ok_codes: codes.0,
            no_retry_codes: codes.1,
        })
        .prop_filter("templates", |work| work.check_templates().is_ok())
}

fn when() -> impl Strategy<Value = When> {
    let secret = json!({"secret": "${A}", "secrets": ["${B}", "12345"]});
    prop_oneof![
        prop::sample::select(vec!["5m", "1h30m", "daily", " 90s ", "broken $", "5"])
            .prop_map(|t| When::Every(t.into())),
        prop::sample::select(vec!["*/5 * * * *", "@daily", "0 9 * * MON", "x"])
            .prop_map(|t| When::Cron(t.into())),
        prop::sample::select(vec!["2027-02-03T09:00:00+01:00", "2027-02-03T09:00:00"])
            .prop_map(|t| When::At(t.into())),
        Just(When::After("90s".into())),
        Just(When::Webhook(secret)),
        Just(When::Webhook(json!({"secret": "none"}))),
        Just(When::Chat(json!({"mode": "followup", "cap": 3, "debounce": "1s"}))),
        Just(When::Chat(json!({}))),
    ]
}

fn schedule() -> impl Strategy<Value = ScheduleDefinition> {
    let anchor = prop::sample::select(vec![AnchorName::Completion, AnchorName::Start, AnchorName::Slot]);
    let catch_up = option::of(prop::sample::select(vec![CatchUp::Skip, CatchUp::RunOnce, CatchUp::RunAll]));
    let if_running =
        prop::sample::select(vec![IfRunning::Skip, IfRunning::Queue, IfRunning::Cancel, IfRunning::Allow]);
    let overlap = prop::sample::select(vec![Scope::Schedule, Scope::Command, Scope::Agent]);
    let zone = prop::sample::select(vec!["UTC", "Europe/London", "America/Port-au-Prince", "Nowhere"]);
    (
        when(),
        (zone, anchor, option::of("[1-9]s"), option::of("[1-9]{1,2}%"), option::of("0[0-9]:00-1[0-9]:30")),
        (vec("sat|Sunday|[0-9]|no", 0..3), any::<bool>(), any::<bool>(), any::<bool>()),
        (catch_up, any::<u32>(), option::of(1_000u64..1_000_000), if_running, overlap, any::<u32>()),
        (name(), option::of(some_text()), object(), option::of(name()), any::<i16>(), any::<bool>()),
    )
        .prop_map(|(when, timing, days, policy, what)| ScheduleDefinition {
            when,
            options: Options {
                timezone: Some(timing.0.to_owned()),
                anchor: timing.1,
                phase: timing.2,
                jitter: timing.3,
                only_between: timing.4,
                not_on: days.0,
                dst_gap_skip: days.1,
                dst_fold_both: days.2,
                enabled: days.3,
                catch_up: policy.0,
                catch_up_limit: policy.1,
                late_after_ms: policy.2,
                if_running: policy.3,
                overlap: policy.4,
                max_pending: policy.5,
                command: what.0,
                prompt: what.1,
                payload: what.2,
                lane: what.3,
                priority: what.4,
                delete_after_run: what.5,
            },
        })
}

fn agent() -> impl Strategy<Value = AgentDefinition> {
    let retry = (0u32..1_000_000, 0u64..100_000, 0u64..100_000);
    let budget = option::of((1u32.., 1u64..1_000_000));
    let breaker = option::of((1u32.., 1u64..1_000_000));
    (option::of(1u32..), retry, budget, breaker, name(), vec(name(), 0..3), work()).prop_map(
        |(max_concurrent, retry, budget, breaker, lane, needs, work)| AgentDefinition {
            max_concurrent,
            // Written, whatever it is.
            limits_sessions: true,
            retry: Retry { max: retry.0, base_ms: retry.1, max_delay_ms: retry.2 },
            budget: budget.map(|(max, period_ms)| Budget { max, period_ms }),
            breaker: breaker.map(|(threshold, reset_after_ms)| Breaker { threshold, reset_after_ms }),
            lane,
            needs,
            work,
        },
    )
}

/// Names by their small letters, so that none differs from another by case only.
fn by_name<T>(map: BTreeMap<String, T>) -> Vec<(String, T)> {
    let folded: BTreeMap<String, (String, T)> =
        map.into_iter().map(|(name, value)| (name.to_lowercase(), (name, value))).collect();
    folded.into_values().collect()
}

fn agents() -> impl Strategy<Value = Vec<AgentSpec>> {
    let agent = (agent(), btree_map(name(), schedule(), 0..4));
    btree_map(name(), agent, 0..3).prop_map(|map| {
        let agents = by_name(map).into_iter();
        agents
            .map(|(name, (mut definition, schedules))| {
                definition.work.commands = by_name(definition.work.commands).into_iter().collect();
                AgentSpec { name, definition, schedules: by_name(schedules) }
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_it_panic(text in mutated()) {
        match load(&text) {
            Ok(loaded) => {
                for problem in loaded.invalid.iter().chain(&loaded.warnings) {
                    let _ = (problem.render(false), problem.render(true));
                }
            }
            Err(errors) => {
                prop_assert!(!errors.problems.is_empty());
                let _ = (errors.render(false), errors.render(true));
            }
        }
    }

    #[test]
    fn no_garbage_makes_it_panic(text in any::<String>()) {
        let _ = load(&text).map_err(|errors| errors.to_string());
    }

    #[test]
    fn what_is_exported_is_loaded_again(agents in agents()) {
        let text = export(&agents);
        let loaded = load(&text);
        prop_assert!(loaded.is_ok(), "{}\n{text}", loaded.unwrap_err());
        prop_assert_eq!(loaded.unwrap().agents, agents, "{}", text);
    }

    #[test]
    fn an_empty_edit_changes_nothing(schedule in schedule()) {
        let about = belfry_config::About {
            name: "a/s",
            origin: "request",
            inherited: belfry_config::Inherited {
                timezone: None,
                host_timezone: "UTC",
                late_after_ms: schedule.options.late_after_ms,
            },
            agent: None,
        };
        // One that does not compile cannot be left so by an edit.
        if schedule.compile("a/s").is_ok() {
            let parsed = parse_schedule(Input::Text("{}"), Some(&schedule), &about);
            prop_assert_eq!(parsed.map(|parsed| parsed.definition), Ok(schedule));
        }
    }
}

#[test]
fn the_digest_is_of_what_it_means() {
    let digest = |text: &str| load(text).unwrap().digest;
    let one = digest("agents: {a: {shell: x, schedules: {s: {every: 5m}, t: {every: 6m}}}, b: {shell: y}}");
    let two = digest(
        "# a comment\nagents:\n  b: {shell: y, timeout: 1h}\n  a:\n    schedules: {t: {every: 6m}, s: {every: 5m}}\n    shell: 'x'\n",
    );
    assert_eq!(one, two);
    assert_eq!(one.len(), 64);
    assert_ne!(
        one,
        digest("agents: {a: {shell: x, schedules: {s: {every: 5m}, t: {every: 7m}}}, b: {shell: y}}")
    );
    let lanes = |text: &str| digest(&format!("lanes: {text}\nagents: {{a: {{shell: x}}}}"));
    assert_eq!(lanes("{one: 2, main: 30}"), lanes("{one: {slots: 2}}"));
    assert_ne!(lanes("{one: 2}"), lanes("{one: {slots: 2, limit: 3}}"));
}

#[test]
fn the_starter_and_the_demo_are_fine() {
    for text in [STARTER, DEMO] {
        let loaded = load(text).unwrap();
        assert_eq!((loaded.invalid, loaded.warnings), (vec![], vec![]));
        let soon = loaded.agents.iter().flat_map(|agent| &agent.schedules);
        assert!(
            soon.clone()
                .any(|(_, schedule)| matches!(&schedule.when, When::Every(every) if every.len() == 2))
        );
    }
    // What is commented out is right, too.
    let all: Vec<_> = STARTER
        .lines()
        .map(|line| match line.trim_start().strip_prefix("# ") {
            Some(rest)
                if rest.contains(": ")
                    && !rest.ends_with(':')
                    && !rest.contains(". ")
                    && !rest.contains(';') =>
            {
                line.replacen("# ", "", 1)
            }
            Some(rest) if ["reporter:", "  schedules:"].contains(&rest) => line.replacen("# ", "", 1),
            _ => line.to_owned(),
        })
        .collect();
    let loaded = load(&all.join("\n")).unwrap();
    assert_eq!(loaded.agents.len(), 2, "{}", all.join("\n"));
    assert_eq!(loaded.agents[0].schedules.len() + loaded.agents[1].schedules.len(), 3);
    assert_eq!((loaded.invalid, loaded.warnings), (vec![], vec![]));
}
