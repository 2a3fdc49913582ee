//! Single schedules and agents, as `belfry add`, `belfry set` and the API bring them.
#![allow(clippy::unwrap_used)]

use belfry_config::{About, Errors, Inherited, Input, parse_agent, parse_schedule};
use belfry_core::ScheduleDefinition;
use belfry_core::definition::{IfRunning, When};

fn about(name: &str) -> About<'_> {
    let inherited = Inherited { timezone: None, host_timezone: "Europe/Vienna", late_after_ms: None };
    About { name, origin: "command line", inherited, agent: None }
}

fn pairs(pairs: &[(&str, &str)], base: Option<&ScheduleDefinition>) -> Result<ScheduleDefinition, Errors> {
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    parse_schedule(Input::Pairs(&pairs), base, &about("a/s")).map(|parsed| parsed.definition)
}

#[test]
fn pairs_need_no_quotes() {
    let schedule = pairs(
        &[
            ("cron", "*/5 * * * *"),
            ("prompt", "{{ payload.x }}: @everybody"),
            ("not_on", "sat, sun"),
            ("payload", r#"{"x": [1, "two"]}"#),
            ("if_running", "queue"),
        ],
        None,
    )
    .unwrap();
    assert_eq!(schedule.when, When::Cron("*/5 * * * *".into()));
    assert_eq!(schedule.options.prompt.as_deref(), Some("{{ payload.x }}: @everybody"));
    assert_eq!(schedule.options.not_on, ["sat", "sun"]);
    assert_eq!(schedule.options.payload["x"], serde_json::json!([1, "two"]));
    assert_eq!(schedule.options.if_running, IfRunning::Queue);
    assert_eq!(schedule.options.timezone.as_deref(), Some("Europe/Vienna"));
}

#[test]
fn a_wrong_pair_is_underlined() {
    let errors = pairs(&[("if_running", "skip"), ("cron", "0 25 * * *")], None).unwrap_err();
    let expected = "\
invalid: a/s: Invalid cron expression \"0 25 * * *\" - hour must be 0-23
 --> command line:2:8
  |
2 | cron=0 25 * * *
  |        ^^";
    assert_eq!(errors.to_string(), expected);
    for (wrong, message) in [
        (vec![("crno", "0 9 * * *")], "unknown key `crno` in `a/s`"),
        (vec![("every", "5m"), ("every", "6m")], "the key `every` is written twice"),
        (vec![("every", "5m"), ("cron", "0 9 * * *")], "the schedule `a/s` has both `every` and `cron`"),
        (vec![("every", "5m"), ("payload", "{a: ")], "not YAML: unclosed bracket '{'"),
        (vec![("every", "5m"), ("payload", "{a: 1e999}")], "`payload`: a number is out of range"),
        (
            vec![("every", "5m"), ("not_on", "sat,funday")],
            "a/s: Invalid day \"funday\". Expected a day such as \"sat\" or \"Saturday\", or 0-7",
        ),
        (vec![("prompt", "x")], "the schedule `a/s` does not say when it runs"),
        (vec![("every", "5m\0")], "a value holds a NUL character"),
    ] {
        let errors = pairs(&wrong, None).unwrap_err();
        assert_eq!(errors.problems[0].message(), message);
    }
}

#[test]
fn an_edit_keeps_what_it_does_not_name() {
    let before = pairs(
        &[("cron", "0 9 * * *"), ("jitter", "5m"), ("prompt", "costs ${x} $$"), ("lane", "main")],
        None,
    );
    assert!(before.unwrap_err().to_string().contains("cannot hold references"));
    let before = pairs(
        &[("cron", "0 9 * * *"), ("jitter", "5m"), ("prompt", "costs $${x} $$"), ("lane", "main")],
        None,
    )
    .unwrap();
    assert_eq!(before.options.prompt.as_deref(), Some("costs ${x} $$"));
    let after = pairs(&[("every", "20m"), ("jitter", "1m")], Some(&before)).unwrap();
    assert_eq!(after.when, When::Every("20m".into()));
    assert_eq!(after.options.jitter.as_deref(), Some("1m"));
    assert_eq!(after.options.prompt, before.options.prompt);
    let reset =
        parse_schedule(Input::Text(r#"{"lane": null, "prompt": null}"#), Some(&before), &about("a/s"));
    let reset = reset.unwrap().definition.options;
    assert_eq!((reset.lane, reset.prompt), (None, None));
}

#[test]
fn json_is_read_as_it_is() {
    let text = r#"{"webhook": {"secret": "${S}"}, "payload": {"t": "\ud83d\udd14 a\/b \"q\"", "n": null}}"#;
    let parsed = parse_schedule(Input::Text(text), None, &about("a/s")).unwrap().definition;
    assert_eq!(parsed.when, When::Webhook(serde_json::json!({"secret": "${S}"})));
    assert_eq!(parsed.options.payload["t"], "\u{1f514} a/b \"q\"");
}

#[test]
fn names_are_checked_where_they_come_in() {
    for name in ["a/../x", "/s", "a/", "a/b/c", "../a/s", "a/\u{202e}"] {
        let errors = parse_schedule(Input::Text("every: 5m"), None, &about(name)).unwrap_err();
        assert!(errors.problems[0].message().starts_with("the name"), "{name}");
    }
}

#[test]
fn an_agent_comes_with_its_schedules() {
    let text = "run: [date]\ncwd: /srv\nschedules: {s: {every: 5m}}";
    let agent = parse_agent(text, &about("a")).unwrap().definition;
    assert_eq!((agent.name.as_str(), agent.schedules.len()), ("a", 1));
    assert_eq!(agent.definition.work.cwd.as_deref(), Some("/srv"));
    let relative = parse_agent("run: [date]\ncwd: x", &about("a")).unwrap_err();
    assert_eq!(relative.problems[0].message(), "`cwd` must be an absolute path, got `x`");
    assert!(parse_agent("run: [date]\nschedules: {s: {cron: x}}", &about("a")).is_err());
}

#[test]
fn the_word_none_is_no_secret_and_can_be_written_again() {
    let none = r#"{"webhook": {"secret": "none"}}"#;
    let about = about("a/b");
    let definition = parse_schedule(Input::Text(none), None, &about).unwrap().definition;
    let shown = serde_json::Value::Object(belfry_config::schedule_keys(&definition));
    assert_eq!(shown["webhook"]["secret"], "none");
    let again = parse_schedule(Input::Text(&shown.to_string()), None, &about).unwrap().definition;
    assert_eq!(again, definition);
    for wrong in ["None", "none ", " NONE"] {
        let text = format!(r#"{{"webhook": {{"secret": "{wrong}"}}}}"#);
        let errors = parse_schedule(Input::Text(&text), None, &about).unwrap_err().to_string();
        assert!(errors.contains("`none` is written in small letters"), "{errors}");
        assert!(errors.contains("`secret: none` asks for a token"), "{errors}");
    }
}

/// Of very many mistakes 500 are shown, of whatever kind they are; the last entry says that there are more.
#[test]
fn of_very_many_mistakes_some_are_shown() {
    let schedule = |text: &str| parse_schedule(Input::Text(text), None, &about("a/s")).unwrap_err();
    let agent = |text: &str| belfry_config::parse_agent(text, &about("a")).unwrap_err();
    let names: String = (0..20_000).map(|n| format!("  BELFRY_{n}: x\n")).collect();
    // Each line is a part of the one above it, and has many keys that may be those of secrets.
    let deep: String =
        (1..180).map(|depth| format!("{}{}x,\n", " ".repeat(depth), "sceret:".repeat(100))).collect();
    for errors in [
        schedule(&format!("every: 1h\npayload: {{{}}}\n", vec!["a: 1"; 40_000].join(","))),
        schedule(&format!("every: 1h\nnot_on:\n{}", " - x\n".repeat(3_000))),
        schedule(&format!("every: 1h\nnot_on: [{}]\n", vec!["x"; 3_000].join(","))),
        schedule(&format!(
            "every: 1h\nnot_on: [\n{deep}{}{}]\n",
            " ".repeat(200),
            vec!["x"; 1_000].join(",")
        )),
        agent(&format!("run: [x, {}]\n", vec!["\"{{ x }}\""; 60_000].join(","))),
        agent(&format!("run: [x, {}]\n", vec!["\"${X}\""; 60_000].join(","))),
        agent(&format!("shell: x\nenv:\n{names}")),
    ] {
        assert_eq!(errors.others().as_deref(), Some("at least 500 more"));
        let last = errors.problems.last().unwrap();
        assert_eq!(
            last.message(),
            "there are more mistakes than the 500 that are shown",
            "{}",
            errors.problems[0]
        );
        assert_eq!(errors.problems.len(), 501);
        assert!(errors.problems[..500].iter().all(|problem| problem.place().is_some()));
    }
}

/// Aliases are copied: what they stand for is bounded in bytes, not only in values.
#[test]
fn a_schedule_has_a_largest_size() {
    let parsed = |text: &str| parse_schedule(Input::Text(text), None, &about("a/s"));
    let keys = |count: usize| (0..count).map(|n| format!("k{n}: [],")).collect::<String>();
    let many = |count: usize| format!("every: 1h\npayload: {{{}}}\n", keys(count));
    assert!(parsed(&many(1_000)).is_ok());
    let errors = parsed(&many(40_000)).unwrap_err();
    assert!(errors.to_string().contains("more than 4096 values"), "{errors}");
    let long = |length: usize| format!("every: 1h\npayload: {{a: \"{}\"}}\n", "y".repeat(length));
    assert!(parsed(&long(250_000)).is_ok());
    let errors = parsed(&long(270_000)).unwrap_err().to_string();
    assert!(errors.contains("at most 256 KiB") && errors.contains("keep large data in a file"), "{errors}");
    // Also one that is put together from several pieces, or over a stored one.
    let payload = ("payload".to_owned(), format!("{{a: \"{}\"}}", "y".repeat(200_000)));
    let prompt = ("prompt".to_owned(), "y".repeat(100_000));
    let pairs = [("every".to_owned(), "1h".to_owned()), payload, prompt];
    assert!(parse_schedule(Input::Pairs(&pairs[..2]), None, &about("a/s")).is_ok());
    assert!(parse_schedule(Input::Pairs(&pairs), None, &about("a/s")).is_err());
    let pairs: Vec<_> = (0..40_000).map(|n| (format!("k{n}"), String::new())).collect();
    let errors = parse_schedule(Input::Pairs(&pairs), None, &about("a/s")).unwrap_err();
    assert!(errors.to_string().contains("at most 100 keys"), "{errors}");
    let base = parsed(&long(200_000)).unwrap().definition;
    let more = format!("prompt: \"{}\"\n", "y".repeat(16_000));
    assert!(parse_schedule(Input::Text(&more), Some(&base), &about("a/s")).is_ok());
    let more = format!("payload: {{b: \"{}\"}}\n", "y".repeat(270_000));
    assert!(parse_schedule(Input::Text(&more), Some(&base), &about("a/s")).is_err());
    // One that was stored before can be made smaller, and is not called something else.
    let mut large = base.clone();
    large.options.payload.insert("many".into(), vec![1; 10_000].into());
    assert!(parse_schedule(Input::Text("payload: {a: 1}"), Some(&large), &about("a/s")).is_ok());
    let errors = parse_schedule(Input::Text("priority: 1"), Some(&large), &about("a/s")).unwrap_err();
    assert!(errors.problems.len() == 1 && errors.to_string().contains("at most 256 KiB"), "{errors}");
    // Also one that comes with its agent.
    let numbers = vec!["1"; 5_000].join(", ");
    let agent = format!("shell: \"true\"\nschedules:\n  s: {{every: 1h, payload: {{a: [{numbers}]}}}}\n");
    let errors = parse_agent(&agent, &about("a")).unwrap_err();
    assert!(errors.to_string().contains("at most 256 KiB"), "{errors}");
}

#[test]
fn what_aliases_stand_for_is_bounded() {
    let bomb = |length: usize, levels: usize| {
        let mut text = format!("every: 1h\npayload:\n  a0: &a0 \"{}\"\n", "y".repeat(length));
        for level in 1..=levels {
            let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
            text += &format!("  a{level}: &a{level} [{aliases}]\n");
        }
        text
    };
    let parsed = |text: &str| parse_schedule(Input::Text(text), None, &about("a/s"));
    assert_eq!(
        parsed(&bomb(100, 1)).unwrap().definition.options.payload["a1"][9].as_str().unwrap().len(),
        100
    );
    for (length, levels) in [(10_000, 1), (1_000, 4), (200_000, 1), (1, 6)] {
        let errors = parsed(&bomb(length, levels)).unwrap_err();
        assert!(errors.to_string().contains("its aliases stand for more than 64 KiB"), "{errors}");
    }
    // Values with anchors are copied as well, each with all that is inside of it.
    let nested: String = (0..50).map(|n| format!("&a{n} [")).collect();
    let text =
        format!("every: 1h\npayload: {{a: {nested}{}{}}}\n", vec!["1"; 2_000].join(","), "]".repeat(50));
    assert!(parsed(&text).unwrap_err().to_string().contains("its aliases stand for more than 64 KiB"));
    // A key that could be read here and not where the definition is shown.
    let long = |key: &str| format!("every: 1h\npayload:\n  ? \"{key}\"\n  : 1\n");
    assert!(parsed(&long(&"k".repeat(900))).is_ok());
    for key in ["k".repeat(2_000), "\\u0001".repeat(300)] {
        let errors = parsed(&long(&key)).unwrap_err();
        assert!(errors.to_string().contains("a key of more than 1000 characters"), "{errors}");
    }
    let many = format!("every: 1h\npayload: {{a: [{}]}}\n", vec!["1"; 140_000].join(","));
    assert!(parsed(&many).unwrap_err().to_string().contains("more than 4096 values"));
}
