//! Who may, from where, and how often.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

fn token(site: &Site, arguments: &[&str]) -> (String, String) {
    let made = site.json(&[&["token", "create"], arguments].concat());
    let part = |key: &str| made[key].as_str().unwrap().to_owned();
    (part("token"), part("id"))
}

#[test]
fn nothing_goes_without_a_token() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let bare =
            |method: &str, path: &str| api.bare(method, path, &["content-type: application/json"], b"{}");
        bare("POST", "/api/v1/tokens").refused(401, "token_missing");
        bare("GET", "/api/v1/agents").refused(401, "token_missing");
        bare("GET", "/metrics").refused(401, "token_missing");
        let (good, id) = token(&site, &["--scope", "read"]);
        assert!(good.starts_with("bf_") && good.len() > 64, "{good}");
        let with = |token: &str| {
            api.send("GET", "/api/v1/agents", &[&format!("authorization: Bearer {token}")], b"")
        };
        let refused = bare("GET", "/api/v1/agents");
        refused.refused(401, "token_missing");
        assert!(refused.header("www-authenticate").unwrap().starts_with("Bearer"));
        eventually("the new one is known", || (with(&good).status == 200).then_some(()));
        with(&api.local).is(200);
        let bent = format!("{}{}", &good[..good.len() - 1], if good.ends_with('0') { '1' } else { '0' });
        for wrong in [bent.as_str(), "", "bf_", "x", &good[..20], &"a".repeat(300), "bf_00000000_0", "é"] {
            with(wrong).refused(401, "token_wrong");
        }
        api.send("GET", "/api/v1/agents", &["authorization: Basic YTpi"], b"").refused(401, "token_wrong");
        let two = format!("authorization: Bearer {good}");
        api.send("GET", "/api/v1/agents", &[&two, &two], b"").refused(401, "token_wrong");

        let (short, _) = token(&site, &["--scope", "admin", "--ttl", "1500ms"]);
        eventually("the new one is known", || (with(&short).status == 200).then_some(()));
        eventually("it expires", || (with(&short).status == 401).then_some(()));
        with(&short).refused(401, "token_expired");

        assert!(site.belfry(&["token", "revoke", &id]).status.success());
        eventually("it is revoked", || (with(&good).status == 401).then_some(()));
        with(&good).refused(401, "token_revoked");
        bare("GET", "/api/v1/agents").refused(401, "token_missing");
        let kept = std::fs::read(site.state_file("server.json")).unwrap();
        assert!(String::from_utf8(kept).unwrap().contains(&api.local));
    }
}

#[test]
fn an_error_of_the_store_shows_its_place_to_few() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start_with(&site, |command| {
        command.env("HOOK_SECRET", "a secret of sixteen").env("HOOK_OLD", "an old one of sixteen");
    });
    let (reader, _) = token(&site, &["--scope", "read"]);
    let reader = format!("authorization: Bearer {reader}");
    eventually("it is known", || {
        (api.bare("GET", "/api/v1/runs", &[&reader], b"").status == 200).then_some(())
    });
    let mut events = api.listen_as(&reader, "/api/v1/events", &[]);
    let store = Path::new(site.store.strip_prefix("sqlite:").unwrap());
    let away = store.with_extension("away");
    std::fs::rename(store, &away).unwrap();
    let told = api.up.lock().unwrap().event("store_unavailable");
    let place = store.to_str().unwrap();
    assert!(told["detail"].as_str().unwrap().contains(place), "the log has it: {told}");
    let words = "the store was removed or replaced while it was in use";
    assert_eq!(events.wait_for("store_unavailable").data["detail"], words);

    let wrong = format!("authorization: Bearer bf_00000000_{}", "0".repeat(61));
    let (stamp, signature) =
        ("x-belfry-timestamp: 1", format!("x-belfry-signature: sha256={}", "0".repeat(64)));
    for (method, path, headers) in [
        ("GET", "/readyz", vec![]),
        ("GET", "/readyz", vec![reader.as_str()]),
        ("POST", "/hooks/hello/pushed", vec![]),
        ("POST", "/hooks/hello/pushed", vec![stamp, signature.as_str()]),
        ("GET", "/api/v1/me", vec![wrong.as_str()]),
        ("GET", "/api/v1/runs", vec![reader.as_str()]),
        ("GET", "/metrics", vec![reader.as_str()]),
    ] {
        // The tokens that were read last count for a second.
        let answer = eventually("the store to be asked", || {
            Some(api.bare(method, path, &headers, b"")).filter(|answer| answer.status == 503)
        });
        let said = String::from_utf8_lossy(&answer.body);
        assert!(said.contains(words), "{method} {path}: {said}");
        assert!(!said.contains(place) && !said.contains("on this node"), "{method} {path}: {said}");
    }
    for path in ["/readyz", "/api/v1/runs"] {
        let said = api.get(path).is(503).to_string();
        assert!(said.contains(place), "{path}: {said}");
    }
    std::fs::rename(&away, store).unwrap();
}

#[test]
fn a_token_is_kept_only_as_its_hash() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let made = api.post("/api/v1/tokens", &json!({"scope": "admin", "label": "x"})).is(201);
    let (token, id) = (made["token"].as_str().unwrap().to_owned(), made["id"].as_str().unwrap());
    let auth = format!("authorization: Bearer {token}");
    let listed = api.send("GET", "/api/v1/tokens", &[&auth], b"").is(200);
    assert!(listed["items"][0].get("token").is_none() && listed["items"][0]["id"] == *id);
    let secret = token.rsplit('_').next().unwrap().to_owned();
    let place = format!("/api/v1/tokens/{id}");
    assert_eq!(api.send("DELETE", &place, &[&auth], b"").status, 204);
    api.send("GET", "/api/v1/tokens", &[&auth], b"").refused(401, "token_revoked");
    api.stop();
    for entry in
        std::fs::read_dir(site.path("")).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file())
    {
        let bytes = std::fs::read(entry.path()).unwrap();
        assert!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()), "{:?}", entry.path());
    }
}

#[test]
fn another_site_and_another_name_are_refused() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let port = api.address.rsplit(':').next().unwrap();
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        for header in [
            "origin: http://evil.example",
            "origin: null",
            "sec-fetch-site: cross-site",
            "sec-fetch-site: same-site",
        ] {
            let answer = api.send(method, "/api/v1/schedules/hello/quiet", &[header], b"{}");
            answer.refused(403, "cross_site");
        }
        api.send(method, "/hooks/hello/pushed", &["origin: http://evil.example"], b"")
            .refused(403, "cross_site");
    }
    let ours = format!("origin: http://{}", api.address);
    api.send("POST", "/api/v1/schedules/hello/quiet/resume", &[&ours, "sec-fetch-site: same-origin"], b"")
        .is(200);
    for host in ["evil.example", "evil.example:7400", "169.254.169.254", "localhost."] {
        api.send("GET", "/healthz", &[&format!("host: {host}")], b"").refused(403, "host_not_allowed");
    }
    api.send("GET", "/healthz", &[&format!("host: localhost:{port}")], b"").is(200);
    api.send("GET", "/healthz", &["host: a", "host: b"], b"").refused(400, "bad_host");
    api.send("GET", "http://evil.example/healthz", &[], b"").refused(403, "host_not_allowed");
    let answer = api.get("/api/v1/agents");
    for (name, value) in [
        (
            "content-security-policy",
            "default-src 'self'; frame-ancestors 'none'; object-src 'none'; base-uri 'none'",
        ),
        ("x-content-type-options", "nosniff"),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
    ] {
        assert_eq!(answer.header(name), Some(value));
    }
    assert!(answer.header("access-control-allow-origin").is_none());
}

#[test]
fn who_asks_too_often_has_to_wait() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("100000/s", "5/m"));
    let api = Api::start(&site);
    let answers: Vec<_> = (0..8).map(|_| api.bare("GET", "/api/v1/agents", &[], b"")).collect();
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [401, 401, 401, 401, 401, 429, 429, 429]);
    answers[7].refused(429, "too_many_requests");
    let wait: u64 = answers[7].header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
    for probe in ["/healthz", "/readyz", "/healthz"] {
        api.bare("GET", probe, &[], b"").is(200);
    }
    api.get("/api/v1/agents").is(200);
}

#[test]
fn a_server_that_others_reach_needs_a_token_first() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let public = |command: &mut std::process::Command| {
        command.env("BELFRY_LISTEN", "0.0.0.0:0");
    };
    let refused = site.belfry_with(&["up"], public);
    assert_eq!(refused.status.code(), Some(2));
    let words = String::from_utf8(refused.stderr).unwrap();
    assert!(words.contains("can be reached by others") && words.contains("belfry token create"), "{words}");
    let (good, id) = token(&site, &["--scope", "read"]);
    let api = Api::start_with(&site, public);
    let port = api.address.rsplit(':').next().unwrap();
    let api = Api { address: format!("127.0.0.1:{port}"), ..api };
    api.bare("GET", "/api/v1/agents", &[], b"").refused(401, "token_missing");
    api.get("/api/v1/agents").is(200);
    let auth = format!("authorization: Bearer {good}");
    api.send("GET", "/api/v1/agents", &[&auth], b"").is(200);
    assert!(site.belfry(&["token", "revoke", &id]).status.success());
    eventually("revoked", || (api.send("GET", "/api/v1/agents", &[&auth], b"").status == 401).then_some(()));
    api.bare("GET", "/api/v1/agents", &[], b"").refused(401, "token_missing");
}

#[test]
fn the_file_for_commands_is_private_and_goes_with_the_server() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let file = site.state_file("server.json");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        api.stop();
        assert!(!file.exists());
    }
}

#[test]
fn an_address_that_is_taken_is_said_so() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = site.belfry(&["up", "--listen", &address]);
    assert_eq!(refused.status.code(), Some(2));
    let words = String::from_utf8(refused.stderr).unwrap();
    assert!(words.contains(&format!("cannot listen on {address}")) && words.contains("--listen"), "{words}");
}

#[test]
fn a_trace_goes_in_and_out() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let header = format!("traceparent: 00-{trace}-00f067aa0ba902b7-01");
    let answer = api.send("POST", "/api/v1/schedules/hello/quiet/run", &[&header], b"");
    assert_eq!(answer.is(201)["trace_id"], trace);
    assert!(answer.header("traceparent").unwrap().starts_with(&format!("00-{trace}-")));
    let mut up = api.up.lock().unwrap();
    let started =
        up.wait_for("its start", |event| event["event"] == "run_started" && event["trace_id"] == trace);
    assert_eq!(started["schedule"], "quiet");
}
