//! The command line as a client: over a server it says the same, in the same words and with the same exit codes, as where it
//! opens the store itself.

use std::process::Output;

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

/// What a command said and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn of(output: Output) -> Said {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Said { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Said {
    fn masked(&self) -> (i32, String, String) {
        (self.code, masked(&self.out), masked(&self.err))
    }
}

/// A server, and the two ways to ask it.
struct Both<'a> {
    site: &'a Site,
    api: Api,
    elsewhere: Site,
}

impl Both<'_> {
    fn of(site: &Site) -> Both<'_> {
        let api = Api::start(site);
        // Nobody finds the server but by its address.
        std::fs::remove_file(site.state_file("server.json")).unwrap();
        Both { site, api, elsewhere: Site::sqlite() }
    }

    /// Beside the server, from the store.
    fn here(&self, arguments: &[&str]) -> Said {
        Said::of(self.site.belfry(arguments))
    }

    /// Where there is no file and no store.
    fn there_with(&self, token: &str, arguments: &[&str]) -> Said {
        let server = format!("http://{}", self.api.address);
        let all = [&["--server", &server, "--token", token, "--tz", "UTC"], arguments].concat();
        Said::of(self.elsewhere.belfry(&all))
    }

    fn there(&self, arguments: &[&str]) -> Said {
        self.there_with(&self.api.local, arguments)
    }

    /// A command that only looks says the same either way, in every format.
    fn looks(&self, code: i32, arguments: &[&str]) {
        for format in ["table", "json"] {
            let arguments = [arguments, &["-o", format]].concat();
            // A second may pass between the two.
            let (here, there) = eventually(&format!("{arguments:?} says the same"), || {
                let (here, there) =
                    (self.here(&[&["--tz", "UTC"], &arguments[..]].concat()), self.there(&arguments));
                // The instant of asking is part of the answer to why.
                let same = here == there || (arguments[0] == "why" && here.masked() == there.masked());
                (same || !is_about_time(&here, &there)).then_some((here, there))
            });
            assert_eq!(here.masked(), there.masked(), "{arguments:?}");
            assert_eq!(here.code, code, "{arguments:?}: {}", here.err);
        }
    }

    /// A command that changes something, done to `one` here and to `two` there.
    fn does(&self, code: i32, arguments: &[&str]) {
        for format in ["table", "json"] {
            let numbered: Vec<String> = arguments.iter().map(|word| word.replace("FORMAT", format)).collect();
            let one: Vec<&str> = numbered.iter().map(String::as_str).collect();
            let renamed: Vec<String> = numbered.iter().map(|word| word.replace("one", "two")).collect();
            let two: Vec<&str> = renamed.iter().map(String::as_str).collect();
            let here = self.here(&[&["--tz", "UTC", "-o", format], &one[..]].concat());
            let there = self.there(&[&["-o", format], &two[..]].concat());
            assert_eq!(here.code, code, "{one:?}: {}", here.err);
            assert_eq!(there.code, code, "{two:?}: {}", there.err);
            assert_eq!(masked(&here.out), masked(&there.out.replace("two", "one")), "{one:?}");
            if code != 0 {
                let err = |said: &Said| masked(&said.err.replace("two", "one"));
                assert_eq!(err(&here), err(&there), "{one:?}");
            }
        }
    }

    /// The newest run of a schedule.
    fn newest(&self, schedule: &str) -> String {
        self.site.runs(schedule)[0]["id"].as_str().unwrap().to_owned()
    }
}

/// Whether two texts differ by nothing but digits and the units and blanks around them, as where time has passed.
fn is_about_time(here: &Said, there: &Said) -> bool {
    let bare = |said: &Said| -> String {
        let text = format!("{}{}", said.out, said.err);
        text.chars()
            .filter(|c| !c.is_ascii_digit() && !c.is_whitespace() && !"smhdZ.-".contains(*c))
            .collect()
    };
    here.code == there.code && bare(here) == bare(there)
}

/// Ids, tokens and times are drawn or pass; what is compared has stars for them.
fn masked(text: &str) -> String {
    let is_part = |c: char| c.is_ascii_hexdigit() || "-:.TZ_".contains(c);
    let (mut out, mut word) = (String::new(), String::new());
    for c in text.chars().chain(['\n']) {
        if is_part(c) {
            word.push(c);
            continue;
        }
        let is_drawn = word.len() >= 8 && word.chars().any(|c| c.is_ascii_digit());
        out.push_str(if is_drawn { "*" } else { &word });
        word.clear();
        out.push(c);
    }
    out
}

/// Everything twice: what is done to `one` here is done to `two` there.
fn twice() -> String {
    let mut text = "timezone: UTC\nengine: {check_interval: 100ms}\napi: {rate: 100000/s}\nlanes: {one: 1, two: 1}\nagents:\n".to_owned();
    for name in ["one", "two"] {
        text.push_str(&format!(
            r#"
  {name}:
    shell: 'echo hello; echo oops >&2; printf "\377%s" "$REF"'
    env: {{REF: "{{{{ payload.ref }}}}"}}
    payload: {{ref: none}}
    schedules:
      quiet: {{cron: "0 0 1 1 *"}}
      past: {{cron: "*/5 * * * *", enabled: false}}
      pushed: {{webhook: {{secret: "${{HOOK_SECRET}}"}}}}
      never: {{cron: "0 0 1 1 *"}}
  {name}-bad:
    run: [sh, -c, "echo no; exit 3"]
    retry: {{max: 0}}
    breaker: {{threshold: 9, reset_after: 30m}}
    schedules: {{quiet: {{cron: "0 0 1 1 *"}}}}
  {name}-slow:
    shell: 'echo begun; while ! [ -e go ]; do sleep 0.02; done; echo done'
    grace: 100ms
    max_concurrent: 5
    schedules: {{quiet: {{cron: "0 0 1 1 *"}}, table: {{cron: "0 0 1 1 *"}}, json: {{cron: "0 0 1 1 *"}}}}
  {name}-long:
    shell: 'while ! [ -e go ]; do sleep 0.02; done'
    schedules: {{past: {{cron: "*/5 * * * *", enabled: false}}}}
  {name}-bot:
    shell: 'echo begun; while ! [ -e go ]; do sleep 0.02; done; echo done'
    grace: 100ms
    schedules: {{talk: {{chat: {{debounce: 0s}}}}}}
"#
        ));
    }
    text
}

#[test]
fn what_looks_says_the_same_over_a_server() {
    for site in Site::each() {
        site.config(&twice());
        let both = Both::of(&site);
        assert!(site.belfry(&["run", "one/quiet", "--wait"]).status.success());
        assert_eq!(site.belfry(&["run", "one-bad/quiet", "--wait"]).status.code(), Some(1));
        assert!(site.belfry(&["pause", "two/quiet", "--reason", "noise"]).status.success());
        assert!(site.belfry(&["send", "one-bot", "ada", "x"]).status.success());
        both.api.up.lock().unwrap().event_of("run_started", "talk");
        let (run, none) = (both.newest("one/quiet"), "0198c0de-7a11-7000-8000-0123456789ab");
        for (code, command) in [
            (0, &["ls"][..]),
            (0, &["ls", "one"]),
            (3, &["ls", "nobody"]),
            (3, &["ls", "oen-bot"]),
            (0, &["show", "one/quiet"]),
            (0, &["show", "two/quiet"]),
            (0, &["show", "one/pushed"]),
            (0, &["show", "one-bad/quiet"]),
            (3, &["show", "one/nobody"]),
            (3, &["show", "nobody/quiet"]),
            (2, &["show", "one"]),
            (0, &["next", "one/quiet", "-n", "2"]),
            (0, &["next", "one/past", "--from", "2026-03-29T00:00:00", "-n", "2000"]),
            (0, &["next", "two/quiet"]),
            (2, &["next", "one/pushed"]),
            (3, &["next", "one/nobody"]),
            (2, &["next", "one/quiet", "--from", "noon"]),
            (0, &["why", "one/quiet"]),
            (0, &["why", "one/past", "--at", "2026-03-29T00:05:00Z"]),
            (3, &["why", "one/nobody"]),
            (2, &["why", "one/quiet", "--at", "noon"]),
            (0, &["runs"]),
            (0, &["runs", "one"]),
            (0, &["runs", "one/quiet", "--state", "completed,failed", "-n", "1"]),
            (0, &["runs", "--session", "ada", "--lane", "main"]),
            (0, &["runs", "one/never"]),
            (3, &["runs", "one/nobody"]),
            (3, &["runs", "nobody"]),
            (2, &["runs", "--since", "noon"]),
            (0, &["logs", &run]),
            (0, &["logs", "one/quiet"]),
            (0, &["logs", "one-bad/quiet", "-f"]),
            (0, &["logs", "one-bot/talk"]),
            (3, &["logs", "one/never"]),
            (3, &["logs", "one/nobody"]),
            (3, &["logs", none]),
            (2, &["logs", "one"]),
            (0, &["breaker"]),
            (0, &["breaker", "show", "one-bad"]),
            (0, &["breaker", "show", "one-bad/poll"]),
            (0, &["breaker", "show", "one"]),
            (3, &["breaker", "show", "nobody"]),
            (0, &["sessions"]),
            (0, &["sessions", "one-bot/talk"]),
            (0, &["sessions", "one"]),
            (3, &["sessions", "nobody"]),
            (0, &["lanes"]),
            (0, &["nodes"]),
            (0, &["token", "ls"]),
        ] {
            both.looks(code, command);
        }
        let bytes = |said: Output| said.stdout;
        let server = format!("http://{}", both.api.address);
        let there = both.elsewhere.belfry(&["--server", &server, "--token", &both.api.local, "logs", &run]);
        assert_eq!(bytes(there), b"hello\n\xffnone", "and every byte");
        site.file("go", "");
        both.api.stop();
    }
}

#[test]
fn what_changes_something_does_the_same_over_a_server() {
    for site in Site::each() {
        site.config(&twice());
        let both = Both::of(&site);
        site.file("new.yaml", "every: 1h\nprompt: x\n");
        both.elsewhere.file("new.yaml", "every: 1h\nprompt: x\n");
        site.file("bad.yaml", "every: 1h\npromt: x\n");
        both.elsewhere.file("bad.yaml", "every: 1h\npromt: x\n");
        let span = ["--from", "2026-03-02T12:00:00", "--to", "2026-03-02T13:00:00"];
        let backfill = |more: &[&'static str]| [&["backfill", "one-long/past"], &span[..], more].concat();
        for (code, command) in [
            (0, vec!["add", "one/FORMAT", "--cron", "0 9 * * *", "not_on=sat,sun", "priority=5"]),
            (2, vec!["add", "one/FORMAT", "every=5m"]),
            (2, vec!["add", "one/quiet", "every=5m"]),
            (2, vec!["add", "one/x", "crno=5m"]),
            (2, vec!["add", "one/x", "--at", "2020-01-01T00:00:00Z"]),
            (2, vec!["add", "one/x"]),
            (3, vec!["add", "nobody/x", "every=5m"]),
            (0, vec!["add", "one/f-FORMAT", "--file", "new.yaml"]),
            (2, vec!["add", "one/x", "--file", "bad.yaml"]),
            (2, vec!["add", "one/x", "--file", "none.yaml"]),
            (0, vec!["set", "one/FORMAT", "every=2h"]),
            (0, vec!["set", "one/FORMAT", "every=2h"]),
            (2, vec!["set", "one/FORMAT", "every=0s"]),
            (2, vec!["set", "one/quiet", "every=5m"]),
            (3, vec!["set", "one/nobody", "every=5m"]),
            (0, vec!["pause", "one/FORMAT", "--reason", "x", "--for", "1h"]),
            (0, vec!["pause", "one/quiet"]),
            (0, vec!["pause", "one"]),
            (2, vec!["pause", "one/past"]),
            (2, vec!["pause", "one/quiet", "--until", "2020-01-01T00:00:00Z"]),
            (3, vec!["pause", "one/nobody"]),
            (3, vec!["pause", "nobody"]),
            (0, vec!["resume", "one", "--catch-up"]),
            (0, vec!["resume", "one/quiet"]),
            (3, vec!["resume", "nobody"]),
            (0, vec!["rm", "one/FORMAT"]),
            (2, vec!["rm", "one/quiet"]),
            (3, vec!["rm", "one/FORMAT"]),
            (0, backfill(&["--dry-run"])),
            (0, backfill(&["--limit", "3"])),
            (
                2,
                vec![
                    "backfill",
                    "one/pushed",
                    "--from",
                    "2026-03-02T12:00:00Z",
                    "--to",
                    "2026-03-02T13:00:00Z",
                ],
            ),
            (
                3,
                vec![
                    "backfill",
                    "one/nobody",
                    "--from",
                    "2026-03-02T12:00:00Z",
                    "--to",
                    "2026-03-02T13:00:00Z",
                ],
            ),
            (0, vec!["run", "one/quiet", "--wait", "--payload", r#"{"ref": "x"}"#, "--key", "one-FORMAT"]),
            (0, vec!["run", "one/quiet", "--payload", r#"{"ref": "x"}"#, "--key", "one-FORMAT"]),
            (2, vec!["run", "one/quiet", "--payload", r#"{"ref": "y"}"#, "--key", "one-FORMAT"]),
            (2, vec!["run", "one/quiet", "--payload", "[]"]),
            (3, vec!["run", "one/nobody"]),
            (1, vec!["run", "one-bad/quiet", "--wait"]),
            (0, vec!["breaker", "reset", "one-bad"]),
            (3, vec!["breaker", "reset", "nobody"]),
            (6, vec!["run", "one-slow/FORMAT", "--wait", "--timeout", "1s"]),
            (0, vec!["cancel", "one-slow/FORMAT", "--wait"]),
            (3, vec!["cancel", "one-slow/FORMAT"]),
            (3, vec!["cancel", "one-slow/nobody"]),
            (2, vec!["cancel", "nonsense"]),
            (3, vec!["cancel", "0198c0de-7a11-7000-8000-0123456789ab"]),
            (3, vec!["retry", "0198c0de-7a11-7000-8000-0123456789ab"]),
            (0, vec!["send", "one-bot", "ada-FORMAT", "hello"]),
            (0, vec!["send", "one-bot", "ada-FORMAT", "again", "--lane", "one"]),
            (3, vec!["stop", "one-bot", "nobody"]),
            (0, vec!["stopall", "one-bot/talk", "nobody"]),
            (0, vec!["sessions", "reset", "one-bot", "ada-FORMAT"]),
            (1, vec!["send", "one-bot", "ada-FORMAT", "late", "--generation", "0"]),
            (3, vec!["send", "one", "ada", "x"]),
            (3, vec!["send", "nobody", "ada", "x"]),
            (2, vec!["send", "one-bot", "", "x"]),
            (0, vec!["lanes", "set", "one", "3", "--limit", "7"]),
            (0, vec!["lanes", "clear", "one"]),
            (0, vec!["lanes", "set", "one", "--reset"]),
            (0, vec!["lanes", "set", "one-FORMAT", "3"]),
            (0, vec!["lanes", "set", "one-FORMAT", "--reset"]),
            (2, vec!["lanes", "set", "one"]),
            (3, vec!["lanes", "set", "nowhere", "--limit", "7"]),
            (3, vec!["lanes", "clear", "nowhere"]),
            (0, vec!["token", "create", "--scope", "read", "--label", "x", "--ttl", "30d"]),
            (2, vec!["token", "create", "--scope", "read", "--ttl", "soon"]),
            (3, vec!["token", "revoke", "00000000"]),
        ] {
            both.does(code, &command);
        }
        site.file("go", "");
        for (schedule, more) in [("one/quiet", "--wait"), ("one-slow/json", "--follow")] {
            let (here, run) = (both.newest(schedule), both.newest(&schedule.replace("one", "two")));
            let (here, there) = (both.here(&["retry", &here, more]), both.there(&["retry", &run, more]));
            assert_eq!((here.code, masked(&here.out)), (there.code, masked(&there.out)));
        }
        both.api.stop();
    }
}

#[test]
fn what_goes_wrong_has_its_exit_code() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let both = Both::of(&site);
    let made = site.json(&["token", "create", "--scope", "read"]);
    let reader = made["token"].as_str().unwrap();
    let fails = |token: &str, arguments: &[&str], code: i32, words: &str| {
        let said = both.there_with(token, arguments);
        assert_eq!((said.code, said.out.as_str()), (code, ""), "{arguments:?}: {}", said.err);
        assert!(said.err.contains(words), "{words:?} is not in {}", said.err);
    };
    for arguments in [
        &["run", "hello/quiet"][..],
        &["add", "hello/x", "every=1h"],
        &["set", "hello/x", "every=1h"],
        &["pause", "hello/quiet"],
        &["token", "ls"],
        &["reload"],
    ] {
        fails(reader, arguments, 4, "scope");
    }
    fails("bf_wrong_token", &["ls"], 4, "token");
    for arguments in [
        &["up"][..],
        &["init"],
        &["check"],
        &["apply"],
        &["diff"],
        &["export"],
        &["config", "schema"],
        &["doctor"],
        &["store", "stats"],
    ] {
        fails(&both.api.local, arguments, 2, "is about files and the store on this host");
        let said = both.there(arguments);
        assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    }
    let without = both.elsewhere.belfry(&["--server", &format!("http://{}", both.api.address), "ls"]);
    assert_eq!(without.status.code(), Some(4));
    let gone = both.elsewhere.belfry(&["--server", "http://127.0.0.1:1", "ls"]);
    assert_eq!(gone.status.code(), Some(5));
    let wrong = both.elsewhere.belfry(&["--server", "ftp://x", "ls"]);
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn what_a_run_writes_is_followed_over_a_server() {
    let site = Site::sqlite();
    site.config(&twice());
    let both = Both::of(&site);
    let server = format!("http://{}", both.api.address);
    let follow = both
        .elsewhere
        .command()
        .args(["--server", &server, "--token", &both.api.local, "run", "two-slow/quiet", "--follow"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    both.api.up.lock().unwrap().event_of("run_started", "quiet");
    site.file("go", "");
    let said = Said::of(follow.wait_with_output().unwrap());
    assert_eq!((said.code, said.out.as_str()), (0, "begun\ndone\n"), "{}", said.err);
    both.api.stop();
}
