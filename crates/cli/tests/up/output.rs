//! What children write, and what of it is kept.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use crate::support::Site;

#[test]
fn a_secret_that_is_written_in_two_parts_is_masked() {
    const SECRET: &str = "hunter2-is-not-a-good-one";
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: 'printf "before %s" "${TOKEN%-good-one}"; sleep 0.3; printf "%s after\n" "-good-one"; echo "$TOKEN" >&2; env | sort'
    env: {TOKEN: "${SECRET_OF_TEST}"}
    schedules: {s: {every: 1h}}
"#,
        );
        let mut up = site.up_with(|command| {
            command.env("SECRET_OF_TEST", SECRET).env("OTHER_SECRET", "not-for-children");
        });
        assert_eq!(up.event("run_finished")["state"], "completed");
        let logs = site.belfry(&["logs", "a/s"]);
        let (out, err) = (String::from_utf8(logs.stdout).unwrap(), String::from_utf8(logs.stderr).unwrap());
        assert!(out.starts_with("before *** after\n"), "{out}");
        assert!(err.contains("***"), "{err}");
        for text in [&out, &err, &up.errors(), &format!("{:?}", up.seen)] {
            assert!(!text.contains(SECRET), "{text}");
        }
        assert!(!out.contains("not-for-children") && !out.contains("postgres://"), "{out}");
        up.stop();
        if let Some(path) = site.store.strip_prefix("sqlite:") {
            let kept = std::fs::read(path).unwrap();
            assert!(!kept.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()), "kept in the store");
        }
    }
}

#[test]
fn much_output_is_cut_in_the_middle_and_says_so() {
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: 'echo first; head -c 5000000 /dev/zero | tr "\0" x; echo; echo last'
    schedules: {s: {every: 1h}}
"#,
        );
        let mut up = site.up();
        assert_eq!(up.event("run_finished")["state"], "completed");
        let logs = site.belfry(&["logs", "a/s"]);
        assert!(logs.status.success());
        let out = String::from_utf8(logs.stdout).unwrap();
        assert!(out.starts_with("first\nxxx") && out.ends_with("xxx\nlast\n"), "{} bytes", out.len());
        assert!(out.len() <= (1 << 20) + 200, "{} bytes", out.len());
        let mark: String = out.chars().filter(|letter| *letter != 'x').collect();
        let missing = 5_000_012 - (out.len() - mark.len());
        assert!(mark.len() > "first\n\nlast\n".len() && mark.contains("bytes"), "{mark}");
        assert!(missing > 3_900_000, "{mark}");
        up.stop();
    }
}

#[test]
fn following_shows_output_while_it_is_written() {
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: 'echo one; while [ ! -e go ]; do sleep 0.05; done; echo two'
    schedules: {s: {every: 1h}}
"#,
        );
        let mut up = site.up();
        up.event("run_started");
        let mut following = site.command();
        following.args(["logs", "a/s", "-f"]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut following = following.spawn().unwrap();
        let mut lines = BufReader::new(following.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert_eq!(line, "one\n");
        site.file("go", "");
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "two\n");
        assert!(following.wait().unwrap().success());
        up.stop();
    }
}

#[test]
fn what_a_program_says_that_it_used_is_kept_and_shown() {
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: |
      echo '{"summary": "done", "tokens": 1200, "cost_usd": 0.25}' > "$BELFRY_RESULT_FILE"
    schedules: {s: {every: 1h}}
"#,
        );
        let mut up = site.up();
        let ended = up.event_of("run_finished", "s");
        let usage = serde_json::json!({"tokens": 1200, "context_window": null, "cost_usd": 0.25});
        assert_eq!(ended["usage"], usage, "{ended}");
        let runs = site.runs("a/s");
        assert_eq!(runs[0]["usage"], usage, "{runs:?}");
        for command in [&["runs"][..], &["show", "a/s"]] {
            let table = site.belfry(command);
            let table = String::from_utf8_lossy(&table.stdout).into_owned();
            assert!(table.contains("1200 LLM tokens") && table.contains("0.25 USD"), "{table}");
        }
        let nodes = site.json(&["nodes"]);
        assert_eq!(nodes["items"][0]["version"], env!("CARGO_PKG_VERSION"), "{nodes}");
        up.stop();
    }
}
