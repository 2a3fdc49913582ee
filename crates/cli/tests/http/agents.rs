//! Agents over HTTP: where that is allowed, what they may be, and what becomes of them.

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

const ALL: &str = "/api/v1/agents";

fn open(config: &str) -> String {
    config.replace("api: {rate: 100000/s}", "api: {rate: 100000/s, allow_agents: true}")
}

#[test]
fn agents_are_closed_unless_a_file_opens_them() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let new = json!({"agent": "made", "definition": {"run": ["true"]}});
    let refused = api.post(ALL, &new).refused(403, "agents_closed");
    assert!(refused["way_out"].as_str().unwrap().contains("api: {allow_agents: true}"), "{refused}");
    api.json("PUT", "/api/v1/agents/made", &new["definition"]).refused(403, "agents_closed");
    api.send("DELETE", "/api/v1/agents/hello", &[], b"").refused(403, "agents_closed");
    assert_eq!(api.get(ALL).is(200)["items"].as_array().unwrap().len(), 2);
    // A file that is read again opens them.
    site.config(&open(CONFIG));
    api.post("/api/v1/reload", &json!({})).is(200);
    api.post(ALL, &new).is(201);
}

#[test]
fn templates_are_parsed_when_they_are_accepted() {
    for site in Site::each() {
        site.config(&open(CONFIG));
        let api = Api::start(&site);
        let cron = json!({"s": {"cron": "0 0 1 1 *", "prompt": "{{ prompt }}"}});
        for (definition, said) in [
            (json!({"shell": "find {{ payload.dir }}"}), "shell: find \"$DIR\""),
            (json!({"run": ["true"], "commands": {"c": {"shell": "ls {{payload.x}}"}}}), "shell: ls \"$X\""),
            (json!({"run": ["echo", "{{ payloda.x }}"]}), "did you mean `payload`?"),
            (json!({"run": ["true"], "prompt": "{% for x in payload %}"}), "expected `if`"),
            (json!({"run": ["true"], "env": {"A": "{{ 1 + 1 }}"}}), "expected a path"),
            (json!({"run": ["true"], "schedules": cron}), "a prompt cannot refer to `prompt`"),
        ] {
            for refused in [
                api.post(ALL, &json!({"agent": "made", "definition": definition})),
                api.json("PUT", "/api/v1/agents/made", &definition),
            ] {
                let refused = refused.refused(422, "invalid").to_string().replace("\\\"", "\"");
                assert!(refused.contains(said), "{definition}: {refused}");
            }
        }
        let wrong = json!({"cron": "0 0 1 1 *", "prompt": "{{ nope }}"});
        let new = json!({"agent": "hello", "schedule": "new", "definition": wrong});
        let refusals = [
            api.post("/api/v1/schedules", &new),
            api.json("PUT", "/api/v1/schedules/hello/new", &wrong),
            api.json("PUT", "/api/v1/schedules/hello/new", &json!({"cron": "0 0 1 1 *", "prompt": "{% if"})),
        ];
        for refused in refusals {
            refused.refused(422, "invalid");
        }
        api.json("PUT", "/api/v1/schedules/hello/new", &json!({"cron": "0 0 1 1 *", "prompt": "x"})).is(201);
        api.json("PATCH", "/api/v1/schedules/hello/new", &json!({"prompt": "{{ nope }}"}))
            .refused(422, "invalid");
        // What comes with a run is data, whatever it looks like.
        let prompt = format!("{{{{ {}1 }}}}", "-".repeat(6000));
        let body = json!({"prompt": prompt, "payload": {"ref": "{{ prompt }}"}, "wait_ms": 20_000});
        assert_eq!(api.post("/api/v1/schedules/hello/quiet/run", &body).is(201)["state"], "completed");
    }
}

#[test]
fn an_agent_is_made_runs_is_replaced_and_goes() {
    for site in Site::each() {
        site.config(&open(CONFIG));
        let api = Api::start(&site);
        let definition = json!({
            "shell": "until [ -e go ]; do sleep 0.02; done; echo $WHO",
            "env": {"WHO": "ada", "API_TOKEN": "${HOME}"},
            "schedules": {"s": {"cron": "0 0 1 1 *"}, "t": {"every": "1h", "enabled": false}},
        });
        let new = json!({"agent": "made", "definition": definition});
        let made = api.post(ALL, &new);
        assert_eq!(made.header("location"), Some("/api/v1/agents/made"));
        let first_tag = made.header("etag").unwrap().to_owned();
        let made = made.is(201);
        assert_eq!(
            (&made["agent"], &made["kind"], &made["origin"]),
            (&"made".into(), &"shell".into(), &"api".into())
        );
        assert_eq!(api.up.lock().unwrap().event("agent_created")["agent"], "made");
        assert_eq!(api.get("/api/v1/agents/made").header("etag"), Some(first_tag.as_str()));
        let known = api.get("/api/v1/agents/made").is(200)["definition"].clone();
        assert_eq!(known["env"], json!({"WHO": "ada", "API_TOKEN": "${HOME}"}), "as it can be written");
        assert_eq!(known["shell"], definition["shell"]);
        api.post(ALL, &new).refused(409, "exists");
        let keyed = ["content-type: application/json", "idempotency-key: k"];
        assert_eq!(api.send("POST", ALL, &keyed, new.to_string().as_bytes()).is(200), made);
        let other = json!({"agent": "made", "definition": {"run": ["true"]}}).to_string();
        api.send("POST", ALL, &keyed, other.as_bytes()).refused(409, "key_reused");
        api.post(ALL, &json!({"agent": "MADE", "definition": {"run": ["true"]}})).refused(409, "exists");

        // One runs, one waits behind it.
        let run = api.post("/api/v1/schedules/made/s/run", &json!({})).is(201);
        api.up.lock().unwrap().event_of("run_started", "s");
        let waits = api.post("/api/v1/schedules/made/t/run", &json!({})).is(201);

        // Replaced: with `schedules` it has these and no others, without they stay.
        let less = json!({"shell": "echo $WHO; until [ -e go ]; do sleep 0.02; done", "env": {"WHO": "bob"}});
        let headers = ["content-type: application/json", "if-match: \"1-00\""];
        let put = |headers: &[&str], body: &Value| {
            api.send("PUT", "/api/v1/agents/made", headers, body.to_string().as_bytes())
        };
        put(&headers, &less).refused(412, "changed");
        put(&["content-type: application/json", "if-none-match: *"], &less).refused(412, "changed");
        let matching = format!("if-match: {first_tag}");
        let changed = put(&["content-type: application/json", &matching], &less);
        assert_ne!(changed.header("etag"), Some(first_tag.as_str()));
        changed.is(200);
        put(&["content-type: application/json", &matching], &less).refused(412, "changed");
        api.get("/api/v1/schedules/made/t").is(200);
        assert_eq!(api.up.lock().unwrap().event("agent_updated")["agent"], "made");
        let mut whole = less.clone();
        whole["schedules"] = json!({"t": {"every": "2h", "enabled": false}});
        api.json("PUT", "/api/v1/agents/made", &whole).is(200);
        api.get("/api/v1/schedules/made/s").refused(404, "not_found");
        api.json("PUT", "/api/v1/agents/fresh", &json!({"run": ["true"]})).is(201);

        let removed = api.send("DELETE", "/api/v1/agents/made", &[], b"").is(200);
        assert_eq!(removed, json!({"cancelled": 1}));
        assert_eq!(api.up.lock().unwrap().event("agent_deleted")["agent"], "made");
        api.send("DELETE", "/api/v1/agents/made", &[], b"").refused(404, "not_found");
        api.get("/api/v1/agents/made").refused(404, "not_found");
        let of = |run: &Value| api.get(&format!("/api/v1/runs/{}", run["id"].as_str().unwrap())).is(200);
        let waited = of(&waits);
        assert_eq!(
            (&waited["state"], &waited["reason"]),
            (&"cancelled".into(), &"agent_removed".into()),
            "{waited}"
        );
        site.file("go", "");
        let ended =
            eventually("what ran ends by itself", || Some(of(&run)).filter(|run| run["state"] != "running"));
        assert_eq!((&ended["state"], &ended["agent"]), (&"completed".into(), &"made".into()));
    }
}

#[test]
fn what_a_file_owns_is_refused_naming_it() {
    let site = Site::sqlite();
    site.config(&open(CONFIG));
    let api = Api::start(&site);
    let before = api.get("/api/v1/agents/hello").is(200);
    let refused =
        api.json("PUT", "/api/v1/agents/hello", &json!({"run": ["true"]})).refused(409, "owned_by_file");
    assert!(refused["detail"].as_str().unwrap().contains("belfry.yaml"), "{refused}");
    api.send("DELETE", "/api/v1/agents/hello", &[], b"").refused(409, "owned_by_file");
    api.post(ALL, &json!({"agent": "hello", "definition": {"run": ["true"]}})).refused(409, "exists");
    assert_eq!(api.get("/api/v1/agents/hello").is(200), before);
    api.get("/api/v1/schedules/hello/quiet").is(200);
}

#[test]
fn hostile_agents_are_refused_and_leave_nothing() {
    let site = Site::sqlite();
    site.config(&open(CONFIG));
    let api = Api::start(&site);
    let run = json!({"run": ["true"]});
    let long = "x".repeat(10_000);
    let names = [
        "../../x",
        "a/b",
        "",
        &long,
        "\u{1f514}",
        "a\u{202e}b",
        "__proto__",
        ".",
        "..",
        "-x",
        " ",
        "a b",
        "a\nb",
        "a:b",
    ];
    for name in names {
        let answer = api.post(ALL, &json!({"agent": name, "definition": run}));
        assert!((400..500).contains(&answer.status), "{name:?}: {}", answer.status);
    }
    for definition in [
        json!({}),
        json!({"run": []}),
        json!({"run": [""]}),
        json!({"run": ["a\u{0}b"]}),
        json!({"run": "true"}),
        json!({"run": [{}]}),
        json!({"run": ["true"], "shell": "true"}),
        json!({"shell": ""}),
        json!({"run": ["true"], "env": {"A=B": "c"}}),
        json!({"run": ["true"], "env": {"A\nB": "c"}}),
        json!({"run": ["true"], "env": {"BELFRY_X": "c"}}),
        json!({"run": ["true"], "env": {"BELFRY_CHILD_ID": "c"}}),
        json!({"run": ["true"], "env": {"A": "${BELFRY_STORE}"}}),
        json!({"run": ["true"], "env_pass": ["BELFRY_TOKEN"]}),
        json!({"run": ["true"], "env": {"": "c"}}),
        json!({"run": ["true"], "env": {"A": "b\u{0}"}}),
        json!({"run": ["true"], "env": {"A": {"b": 1}}}),
        json!({"run": ["true"], "env": {"GITHUB_TOKEN": "ghp_written_out"}}),
        json!({"run": ["true"], "env": {"db_password": "hunter2"}}),
        json!({"run": ["true"], "env_pass": ["A=B"]}),
        json!({"run": ["true"], "cwd": "relative"}),
        json!({"run": ["true"], "timeout": "-5m"}),
        json!({"run": ["true"], "max_concurrent": 0}),
        json!({"run": ["true"], "max_concurrent": 1e300}),
        json!({"run": ["true"], "lane": "a/b"}),
        json!({"run": ["true"], "retry": {"max": -1}}),
        json!({"run": ["true"], "payload": []}),
        json!({"run": ["true"], "schedules": {"../x": {"every": "1h"}}}),
        json!({"run": ["true"], "schedules": {"s": {"every": "0s"}}}),
        json!({"run": ["true"], "schedules": {"s": {"cron": "0 0 31 2 *"}}}),
        json!({"run": ["true"], "schedules": {"s": {"every": "1h", "timezone": "Mars/Phobos"}}}),
        json!({"run": ["true"], "schedules": {"s": {"at": "2020-01-01T00:00:00Z"}}}),
        json!({"run": ["true"], "schedules": {"s": {"webhook": {"secret": "written out"}}}}),
        json!({"run": ["true"], "schedules": {"s": {"every": "1h"}, "S": {"every": "1h"}}}),
        json!({"run": ["true"], "schedules": ["s"]}),
    ] {
        let answer = api.post(ALL, &json!({"agent": "made", "definition": definition}));
        assert!((400..500).contains(&answer.status), "{definition}: {}", answer.status);
        let put = api.json("PUT", "/api/v1/agents/made", &definition);
        assert!((400..500).contains(&put.status), "{definition}: {}", put.status);
    }
    let unknown = json!({"agent": "made", "definition": {"run": ["true"], "shedules": {}}});
    let refused = api.post(ALL, &unknown).refused(422, "invalid");
    assert!(refused["way_out"].as_str().unwrap().contains("schedules"), "{refused}");
    api.post(ALL, &json!({"agent": "made"})).refused(400, "bad_field");
    api.post(ALL, &json!({"agent": "made", "definition": run, "more": 1})).refused(400, "bad_field");
    let secret = json!({"agent": "made", "definition": {"run": ["true"], "env": {"API_KEY": "abc"}}});
    let refused = api.post(ALL, &secret).refused(422, "secret_written_out");
    assert!(!refused.to_string().contains("abc"), "it is not said again");
    let deep = format!("{{\"agent\":\"made\",\"definition\":{}{}}}", "[".repeat(1000), "]".repeat(1000));
    let answer = api.send("POST", ALL, &["content-type: application/json"], deep.as_bytes());
    assert!((400..500).contains(&answer.status), "{}", answer.status);
    let left: Vec<_> =
        api.get(ALL).is(200)["items"].as_array().unwrap().iter().map(|one| one["agent"].clone()).collect();
    assert_eq!(left, ["hello", "slow"], "nothing was made");
}
