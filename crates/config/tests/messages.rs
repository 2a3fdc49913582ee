//! What people read when a file is wrong, as one golden file: `BELFRY_GOLDEN=write` writes it anew, and the diff is read.
#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::path::{Path, PathBuf};

use belfry_config::{Host, load_text};

/// Everything that is said about a text, or what it was taken for.
fn said(text: &str) -> String {
    let env = |name: &str| (name == "SET").then(|| "value".to_owned());
    let host = Host::new(&env, "Europe/Vienna");
    match load_text(text, Path::new("belfry.yaml"), &host) {
        Err(errors) => errors.to_string(),
        Ok(loaded) => {
            let problems: Vec<_> =
                loaded.invalid.iter().chain(&loaded.warnings).map(ToString::to_string).collect();
            if problems.is_empty() { "fine".into() } else { problems.join("\n\n") }
        }
    }
}

fn golden(name: &str, found: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("BELFRY_GOLDEN").is_some() {
        std::fs::write(&path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "{} differs:\n{found}", path.display());
}

fn said_about(cases: &[(&str, String)]) -> String {
    let mut out = String::new();
    for (title, text) in cases {
        let said = said(text);
        let said: Vec<_> = said.lines().map(str::trim_end).collect();
        writeln!(out, "### {title}\n{}\n", said.join("\n")).unwrap();
    }
    out
}

/// One schedule with these keys.
fn schedule(keys: &str) -> String {
    format!("agents:\n  a:\n    shell: date\n    schedules:\n      s: {{{keys}}}\n")
}

#[test]
fn wrong_times_say_what_is_wrong() {
    let cases = [
        ("21 a zone that is not on this planet", "every: 5m, timezone: Mars/Phobos"),
        ("22 a zone that is a path", "every: 5m, timezone: ../../etc/passwd"),
        ("23 an empty zone", "every: 5m, timezone: \"\""),
        ("23 a POSIX zone", "every: 5m, timezone: EST5EDT4"),
        ("23 an impossible offset", "every: 5m, timezone: UTC+25"),
        ("23 a zone in small letters", "every: 5m, timezone: america/new_york"),
        ("24 no interval at all", "every: 0s"),
        ("25 a negative interval", "every: -5m"),
        ("26 infinity", "every: 1e309s"),
        ("27 too long", "every: 99999999999d"),
        ("28 no unit", "every: 5"),
        ("29 a unit that is not there", "every: 1ns"),
        ("30 a day that is not there", "at: 2025-02-30T00:00:00Z"),
        ("31 the first day", "at: 0001-01-01"),
        ("31 a leap second", "at: 9999-12-31T23:59:60Z"),
        ("31 after the end", "at: +292277026596-12-04T15:30:08Z"),
        ("32 a local time without a zone", "at: 2027-02-03T09:00:00"),
        ("33 hours that are not there", "every: 5m, only_between: \"25:00-26:00\""),
        ("33 half a window", "every: 5m, only_between: \"08:00\""),
        ("33 an empty window", "every: 5m, only_between: \"08:00-08:00\""),
        ("33 a short window", "every: 5m, only_between: \"8-9\""),
        ("34 days that are not there", "every: 5m, not_on: [funday, 8, -1, 7.5]"),
        ("35 no day left", "every: 5m, not_on: [0, 1, 2, 3, 4, 5, 6]"),
        ("35 no tick left", "cron: \"0 12 * * *\", only_between: \"13:00-14:00\""),
        ("36 jitter longer than the interval", "every: 5m, jitter: 6m"),
        ("36 negative jitter", "every: 5m, jitter: -5s"),
        ("36 too much jitter", "every: 5m, jitter: 100%"),
        ("36 a phase longer than the interval", "every: 5m, anchor: slot, phase: 6m"),
        ("36 a phase without a unit", "every: 5m, anchor: slot, phase: 6"),
        ("37 two kinds", "cron: \"* * * * *\", every: 5m"),
        ("37 no kind", ""),
        ("37 a kind without a value", "cron: "),
        ("a wrong field of cron", "cron: \"0 9 * 13 1-5\""),
        ("cron with too many fields", "cron: \"0 0 9 * * 1-5\""),
        ("several wrong parts", "cron: \"0 9 * 13 *\", timezone: Nowhere, jitter: 5, only_between: 9-17"),
        ("late_after without a unit", "every: 5m, late_after: 5"),
        ("late_after below a second", "every: 5m, late_after: 999ms"),
        ("a list for cron", "cron: [\"0 9 * * *\"]"),
    ];
    let cases: Vec<_> = cases.iter().map(|(title, keys)| (*title, schedule(keys))).collect();
    golden("times.txt", &said_about(&cases));
}

#[test]
fn wrong_names_and_bodies_say_what_is_wrong() {
    let name =
        |name: &str| format!("agents:\n  a:\n    shell: date\n    schedules:\n      {name}: {{every: 5m}}\n");
    let cases = [
        ("38 a name that climbs", name("../../x")),
        ("38 a name with a slash", name("a/b")),
        ("38 an endless name", name(&format!("\"{}\"", "x".repeat(900)))),
        ("38 an empty name", name("\"\"")),
        ("38 a name with a picture", name("\"\u{1f514}\"")),
        ("38 a name from right to left", name("\"a\u{202e}b\"")),
        ("38 a name of JavaScript", name("__proto__")),
        ("38 a name of DOS is a name", name("con")),
        ("39 names that differ by case", "agents:\n  a: {shell: date}\n  A: {shell: date}\n".into()),
        ("46 a key twice", schedule("every: 5m, payload: {a: 1, a: 2}")),
        ("46 a number that is too large", schedule("every: 5m, payload: {a: [1, 1e400]}")),
        ("46 half a character", schedule("every: 5m, payload: {a: \"\\ud800\"}")),
        ("46 a NUL", schedule("every: 5m, payload: {a: \"x\\u0000\"}")),
        (
            "47 keys of other languages are data",
            schedule("every: 5m, payload: {\"$where\": 1, \"{{7*7}}\": 2, \"${jndi:x}\": 3}"),
        ),
        (
            "45 nested too deeply",
            schedule(&format!("every: 5m, payload: {{a: {}1{}}}", "[".repeat(200), "]".repeat(200))),
        ),
    ];
    golden("names.txt", &said_about(&cases));
}

#[test]
fn wrong_yaml_says_what_is_wrong() {
    let bomb = (1..12).fold("a0: &a0 [x, x]\n".to_owned(), |text, i| {
        let before = format!("*a{}", i - 1);
        format!("{text}a{i}: &a{i} [{}]\n", [before.as_str(); 10].join(", "))
    });
    let cases = [
        ("48 a bomb of aliases", bomb),
        ("48 an alias inside of itself", "agents: &x {a: *x}\n".into()),
        ("48 tabs", "agents:\n\ta:\n\t\tshell: date\n".into()),
        ("48 a tag", "agents:\n  a:\n    shell: !!python/object:os.system date\n".into()),
        ("48 no is no boolean", schedule("every: 5m, enabled: no")),
        ("48 on is no boolean", schedule("every: 5m, delete_after_run: on")),
        ("48 underscores in numbers", schedule("every: 5m, max_pending: 1_000, if_running: queue")),
        (
            "cron without quotes",
            "agents:\n  a:\n    shell: date\n    schedules:\n      s:\n        cron: */5 * * * *\n".into(),
        ),
        (
            "a nickname without quotes",
            "agents:\n  a:\n    shell: date\n    schedules:\n      s:\n        cron: @daily\n".into(),
        ),
        ("a template without quotes", "agents:\n  a:\n    shell: date\n    prompt: {{ payload.x }}\n".into()),
        ("a bracket that stays open", "agents: {a: {shell: date\n".into()),
        ("two documents", "agents: {}\n---\nagents: {}\n".into()),
        ("a list instead of a file", "- a\n- b\n".into()),
        ("a text instead of a file", "hello\n".into()),
        ("text with a colon", "agents:\n  a:\n    shell: echo key: value\n".into()),
        ("a control character in plain text", "agents:\n  a:\n    shell: echo a\u{9b}b\n".into()),
        ("a control character in single quotes", "agents:\n  a:\n    shell: 'echo a\u{9b}b'\n".into()),
        ("a control character in double quotes", "agents:\n  a:\n    shell: \"echo \u{1}\"\n".into()),
        (
            "a control character in a block",
            "agents:\n  a:\n    shell: |\n      echo 1\n      echo \u{7f}\n".into(),
        ),
        ("a control character in a comment", "agents: # ü\u{1b}[2J\n  a: {shell: date}\n".into()),
        ("a control character in a key", "agents:\n  a\u{8}: {shell: date}\n".into()),
        ("a control character alone", "\u{9b}\n".into()),
        ("half of a byte order mark", "agents:\n  a: {shell: \u{fffe}}\n".into()),
        ("a NUL", "agents:\n  a: {shell: \"a\0b\"}\n".into()),
        ("an empty file", String::new()),
        ("a key twice", "agents:\n  a: {shell: date}\n  b: {shell: date}\n  a: {shell: date}\n".into()),
    ];
    golden("yaml.txt", &said_about(&cases));
}

#[test]
fn wrong_templates_say_what_is_wrong() {
    let agent = |keys: &str| format!("agents:\n  a:\n    {}\n", keys.replace('\n', "\n    "));
    let cases = [
        ("a value in a shell line", agent("shell: 'find {{ payload.dir }} -name x'")),
        ("a value in quotes in a shell line", agent("shell: echo \"says {{ prompt }}\"")),
        ("a value where quotes are not plain to see", agent("shell: |\n  # don't\n  echo '{{ payload.x }}'")),
        (
            "a value in a shell line of a command",
            agent("run: [date]\ncommands: {x: {shell: \"ls {{ payload.x }}\"}}"),
        ),
        ("other templates in a shell line are text", agent("shell: docker ps --format '{{.Names}}'")),
        ("an unknown name", agent("run: [echo, \"{{ payloda.x }}\"]")),
        (
            "an unknown filter",
            agent("run: [echo, \"{{ payload.x | uppper }}\"]\ncommands: {x: [\"{{ x }}\"]}"),
        ),
        ("a loop", agent("run: [date]\nprompt: \"{% for x in payload.list %}\"")),
        ("a prompt in itself", agent("run: [date]\nprompt: \"{{ prompt }}\"")),
        (
            "in env",
            agent(
                "run: [date]\nenv: {A: \"{{ 1 + 1 }}\", B: \"${X:-{{ prompt }}}\", C: \"${D} {{ payload.x }}\"}",
            ),
        ),
        ("in a schedule", schedule("every: 5m, prompt: \"Hi {{ name }}\"")),
    ];
    golden("templates.txt", &said_about(&cases));
}

#[test]
fn wrong_keys_and_values_say_what_is_wrong() {
    let agent = |keys: &str| format!("agents:\n  a:\n    {}\n", keys.replace('\n', "\n    "));
    let cases = [
        ("an unknown key, nearly right", agent("shell: date\ntimeuot: 5m")),
        ("a key of another scheduler", agent("cmd: date")),
        ("a key of a schedule", agent("shell: date\ncron: \"0 9 * * *\"")),
        ("an unknown key at the top", "agent: {}\n".into()),
        ("an unknown key, far from all", agent("shell: date\nretry: {colour: blue}")),
        ("run as text", agent("run: claude -p \"hi\"")),
        ("run without a program", agent("run: []")),
        ("both run and shell", agent("run: [date]\nshell: date")),
        ("nothing to run", agent("timeout: 5m")),
        ("an agent of nothing", "agents:\n  a:\n".into()),
        ("a command of nothing", agent("shell: date\ncommands: {x: {}, y: }")),
        ("a reference in run", agent("run: [curl, \"https://x/?t=${TOKEN}\"]")),
        ("a reference in a prompt", agent("shell: date\nprompt: \"Use ${TOKEN:-x}.\"")),
        ("a reference in shell is the shell's", agent("shell: echo ${HOME}")),
        ("a broken reference in env", agent("shell: date\nenv: {A: \"${B\", C: \"${1}\", D: \"$$ $x\"}")),
        ("a reference that is not set", agent("shell: date\ncwd: /srv/${UNSET}")),
        ("a home", agent("shell: date\ncwd: ~/x")),
        ("names of variables", agent("shell: date\nenv: {\"A=B\": x, E: }\nenv_pass: [\"A B\", BELFRY_STORE]")),
        ("variables of Belfry's own", agent("shell: date\nenv: {BELFRY_RUN_ID: x, BELFRY_X: y, A: \"${BELFRY_STORE}\"}\nenv_pass: [BELFRY_TOKEN]")),
        ("variables for a `belfry` that a job calls", agent("shell: date\nenv: {BELFRY_SERVER: \"http://h:1\", BELFRY_TOKEN: \"${JOB_TOKEN}\"}")),
        ("features to come", agent("fetch: {url: x}\npreset: claude\nhooks: {before: x}\nresume_session: true")),
        ("settings to come", "log: {file: belfry.log}\nretention: {keys: none}\nrate_limits: {api.example.com: {max: 300, per: 1m}}\n".into()),
        ("defaults of what is to come", "log: {file: none}\nretention: {keys: 24h}\nrate_limits: {}\nagents: {a: {shell: x, hooks: {}, spend: none, resume_session: false}}\n".into()),
        ("half a breaker", agent("shell: date\nbreaker: {threshold: 3}")),
        ("a breaker of nothing", agent("shell: date\nbreaker: {threshold: 0, reset_after: 0s}")),
        ("exit codes", agent("shell: date\nretry: {ok_codes: [256], no_retry_codes: 78}")),
        ("sizes", agent("shell: date\noutput: 1TB")),
        ("settings", "listen: 80\ntimezone: Berlin\nstore: mysql://u:secret@h/db\napi: {rate: fast}\nlog: {level: inform}\nlanes: {cron: -1, x: {limit: 3}}\nengine: {lease: 1s}\nretention: {runs: 0d, audit: 1y}\n".into()),
        ("schedules in defaults", "defaults: {schedules: {x: {every: 5m}}}\n".into()),
        ("a wrong default is said once", "defaults: {timeout: 5}\nagents: {a: {shell: x}, b: {shell: x}}\n".into()),
        ("words", schedule("every: 5m, if_running: skipp, catch_up: all, overlap: none")),
        ("a payload that a chat writes itself", agent("shell: date\nschedules:\n  c: {chat: {}, payload: {text: x, own: 1}}")),
        ("chat and webhook", agent("shell: date\nschedules:\n  c: {chat: {mode: que, cap: 0, debounce: 5}}\n  w: {webhook: {secert: x}}")),
    ];
    golden("keys.txt", &said_about(&cases));
}

#[test]
fn policies_that_never_act_are_pointed_at() {
    let cases = [
        ("a bound on a queue that is none", schedule("every: 5m, max_pending: 3")),
        ("a limit of one", schedule("every: 5m, catch_up: run_once, catch_up_limit: 5")),
        ("a grid that is none", schedule("every: 5m, phase: 30s")),
        ("clock changes without a clock", schedule("every: 5m, dst_gap: skip, dst_fold: both")),
        ("an anchor without a distance", schedule("cron: \"0 9 * * *\", anchor: slot")),
        (
            "secrets in the environment",
            "agents:\n  a:\n    shell: date\n    env: {API_KEY: hunter2, MODE: quiet, DB_PASSWORD: \"${P}\", AUTH_TOKEN: \"Bearer ${T}\", MAIL_PASSWORD: \"${M:-hunter2}\", MAX_TOKENS: 5, EMPTY_TOKEN: \"\"}\n".into(),
        ),
        ("a webhook has no ticks", schedule("webhook: {secret: \"${S}\"}, jitter: 5s, catch_up: skip")),
        ("a webhook without a secret", schedule("webhook: {}")),
        ("a webhook without anything", schedule("webhook:")),
        ("a webhook that asks for a token", schedule("webhook: {secret: none}")),
        ("a secret that is a number", schedule("webhook: {secret: 12345678}")),
        ("a secret that is a number too large", schedule("webhook: {secret: 1e999}")),
        ("a secret that is true", schedule("webhook: {secret: true, github: true}")),
        ("a secret that is empty", schedule("webhook: {secret: \"\"}")),
        ("a secret that is nothing", schedule("webhook: {secret: ~}")),
        ("secrets that are numbers", schedule("webhook: {secret: [\"${S}\", 5]}")),
        ("more secrets that are numbers", schedule("webhook: {secret: \"${S}\", secrets: [5]}")),
        ("a secret and none", schedule("webhook: {secret: none, secrets: [\"${S}\"]}")),
        ("a secret that is text in quotes", schedule("webhook: {secret: \"12345678\"}")),
        ("a reference with a default", schedule("webhook: {secret: \"${S:-hunter2}\"}")),
        ("a reference with an empty default", schedule("webhook: {secret: \"${S:-}\"}")),
        ("text beside a reference", schedule("webhook: {secret: [\"${S}\", \"hunter2${S}\"]}")),
        (
            "two webhooks with one secret",
            "agents:\n  a:\n    shell: date\n    schedules:\n      one: {webhook: {secret: \"${S}\"}}\n      two: {webhook: {secret: [\"${T}\", \"${S}\"]}}\n      three: {webhook: {secret: \"${U}\"}}\n".into(),
        ),
        ("a secret that is none", schedule("webhook: {secret: hunter2}")),
        ("what never ends is not removed", schedule("every: 5m, delete_after_run: true")),
        ("allowed, but not possible", schedule("every: 5m, if_running: allow, overlap: agent")),
        ("a lane that nobody made", schedule("every: 5m, lane: nigthly")),
        ("a command that nobody wrote", "agents:\n  a:\n    shell: date\n    commands: {fetch: [date]}\n    schedules: {s: {every: 5m, command: fecth}}\n".into()),
        ("retries", "agents:\n  a:\n    shell: date\n    retry: {base: 1m, no_retry_codes: [0]}\n".into()),
        ("a pattern that fits nothing", "include: [\"nothing/*.yaml\"]\n".into()),
    ];
    golden("warnings.txt", &said_about(&cases));
}

#[test]
fn wrong_settings_of_the_api_say_what_is_wrong() {
    let cases = [
        ("an open API on this host", "api: {open: true}\n".to_owned()),
        ("an open API for others", "listen: 0.0.0.0:7400\napi: {open: true}\n".into()),
        ("an open API with a name", "api: {open: true, allowed_hosts: [belfry.example]}\n".into()),
        ("a closed API with a name", "api: {open: false, allowed_hosts: [belfry.example]}\n".into()),
        ("flags", "api: {open: yes please, open_metrics: 1}\n".into()),
        ("proxies", "api: {trusted_proxies: [10.0.0.0/8, 192.0.2.7, \"2001:db8::/32\"]}\n".into()),
        ("what is no proxy", "api: {trusted_proxies: [localhost, 10.0.0.0/33, 10.0.0.1:80]}\n".into()),
    ];
    golden("api.txt", &said_about(&cases));
}

#[test]
fn colours_are_for_terminals() {
    let env = |_: &str| None;
    let host = Host::new(&env, "UTC");
    let errors = load_text("x: 1", Path::new("belfry.yaml"), &host).unwrap_err();
    assert!(errors.render(true).contains('\u{1b}'));
    assert!(!errors.render(false).contains('\u{1b}'));
}
