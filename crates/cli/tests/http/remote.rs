//! The command line as a client: with `--server` it says the same as beside the store.

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::support::Site;

/// A command in a folder where there is no store, and what came of it.
fn away(folder: &Site, api: &Api, token: &str, arguments: &[&str]) -> (i32, String, String) {
    let server = format!("http://{}", api.address);
    let said = folder.belfry(&[&["--server", &server, "--token", token], arguments].concat());
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (said.status.code().unwrap(), text(said.stdout), text(said.stderr))
}

#[test]
fn a_command_says_the_same_over_a_server() {
    for site in Site::each() {
        site.config(&CONFIG.replace("      often: {every: 200ms}\n", ""));
        let (api, elsewhere) = (Api::start(&site), Site::sqlite());
        let json = |arguments: &[&str]| -> Value {
            let (code, out, err) = away(&elsewhere, &api, &api.local, &[arguments, &["-o", "json"]].concat());
            assert_eq!(code, 0, "{arguments:?}: {err}");
            serde_json::from_str(&out).unwrap()
        };
        let made = json(&["run", "hello/quiet", "--wait", "--payload", r#"{"ref": "x"}"#, "--key", "k"]);
        assert_eq!(made["state"], "completed");
        let again = json(&["run", "hello/quiet", "--payload", r#"{"ref": "x"}"#, "--key", "k"]);
        assert_eq!(made["run_id"], again["run_id"]);
        for command in [
            &["ls"][..],
            &["ls", "hello"],
            &["runs"],
            &["runs", "hello/quiet", "--state", "completed,failed"],
        ] {
            assert_eq!(json(command), site.json(command), "{command:?}");
        }
        let table = |out: &str| out.lines().next().unwrap().to_owned();
        let (_, ours, _) = away(&elsewhere, &api, &api.local, &["ls"]);
        let theirs = String::from_utf8(site.belfry(&["ls"]).stdout).unwrap();
        assert_eq!(table(&ours), table(&theirs));
        assert_eq!(json(&["why", "hello/quiet"])["reason"], "not_due");
        assert_eq!(json(&["nodes"])["items"][0]["id"], site.json(&["nodes"])["items"][0]["id"]);
        let paused = json(&["pause", "hello/quiet", "--reason", "x", "--for", "1h"]);
        assert_eq!(paused["paused"], json!(["hello/quiet"]));
        assert_eq!(site.json(&["show", "hello/quiet"])["reason"], "x");
        assert_eq!(json(&["resume", "hello/quiet", "slow/quiet"])["unchanged"], json!(["slow/quiet"]));
        let slow = json(&["run", "slow/quiet"]);
        let id = slow["run_id"].as_str().unwrap();
        assert_eq!(json(&["cancel", id, "--wait"])["cancelled"][0]["state"], "cancelled");
        site.file("go", "");
        assert_eq!(json(&["retry", id, "--wait"])["state"], "completed");
        assert!(site.belfry(&["add", "hello/x", "every=1h"]).status.success());
        assert_eq!(json(&["rm", "hello/x"])["result"], "removed");
        json(&["reload"]);
    }
}

#[test]
fn what_goes_wrong_has_its_exit_code() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let (api, elsewhere) = (Api::start(&site), Site::sqlite());
    let made = site.json(&["token", "create", "--scope", "read"]);
    let reader = made["token"].as_str().unwrap();
    let fails = |token: &str, arguments: &[&str], code: i32, words: &str| {
        let (found, _, err) = away(&elsewhere, &api, token, arguments);
        assert_eq!(found, code, "{arguments:?}: {err}");
        assert!(err.contains(words), "{words:?} is not in {err}");
    };
    fails(reader, &["run", "hello/quiet"], 4, "scope");
    fails("bf_wrong_token", &["ls"], 4, "token");
    fails(&api.local, &["why", "hello/nobody"], 3, "there is no schedule");
    fails(&api.local, &["rm", "hello/quiet"], 2, "belongs to");
    fails(&api.local, &["doctor"], 2, "does nothing over --server");
    fails(&api.local, &["run", "hello/quiet", "--payload", "[]"], 2, "--payload");
    let gone = elsewhere.belfry(&["--server", "http://127.0.0.1:1", "ls"]);
    assert_eq!(gone.status.code(), Some(5));
    let wrong = elsewhere.belfry(&["--server", "ftp://x", "ls"]);
    assert_eq!(wrong.status.code(), Some(2));
}
