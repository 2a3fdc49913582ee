//! Who a request counts for: behind a proxy, from elsewhere, and where nobody needs a token.

use serde_json::json;

use crate::client::{Api, CONFIG};
use crate::remote::Said;
use crate::support::Site;

const ELSEWHERE: &str = "x-forwarded-for: 203.0.113.9";

#[test]
fn the_local_token_is_good_on_this_host_alone() {
    for proxies in ["[]", "[127.0.0.1]"] {
        let site = Site::sqlite();
        site.config(&CONFIG.replace("100000/s}", &format!("100000/s, trusted_proxies: {proxies}}}")));
        let api = Api::start(&site);
        let get = |headers: &[&str]| api.send("GET", "/api/v1/agents", headers, b"");
        get(&[]).is(200);
        for header in
            [ELSEWHERE, "x-forwarded-for: 127.0.0.1", "forwarded: for=203.0.113.9", "x-real-ip: ::1"]
        {
            let refused = get(&[header]).refused(401, "token_local");
            assert!(refused["way_out"].as_str().unwrap().contains("belfry token create"), "{refused}");
        }
        let made = api.post("/api/v1/tokens", &json!({"scope": "read"})).is(201);
        let auth = format!("authorization: Bearer {}", made["token"].as_str().unwrap());
        get(&[&auth, ELSEWHERE]).is(200);
    }
}

#[test]
fn a_trusted_proxy_says_for_whom_it_asks() {
    for (proxies, peer, is_trusted) in
        [("[127.0.0.1]", "203.0.113.9", true), ("[10.0.0.0/8]", "127.0.0.1", false)]
    {
        let site = Site::sqlite();
        site.config(&CONFIG.replace(
            "100000/s}",
            &format!("5/m, trusted_proxies: {proxies}, allowed_hosts: [belfry.example]}}"),
        ));
        let api = Api::start(&site);
        let made = api.post("/api/v1/tokens", &json!({"scope": "manage"})).is(201);
        let auth = format!("authorization: Bearer {}", made["token"].as_str().unwrap());
        let pause = "/api/v1/schedules/hello/quiet/pause";
        api.send("POST", pause, &[&auth, ELSEWHERE], b"").is(200);
        let row = api.get("/api/v1/audit?limit=1").is(200)["items"][0].clone();
        assert_eq!((&row["action"], &row["peer"]), (&json!("pause_schedule"), &json!(peer)));
        // A token has its own rate, from wherever it comes.
        let agents = |from: &str| api.send("GET", "/api/v1/agents", &[&auth, from], b"").status;
        let first: Vec<u16> = (0..5).map(|_| agents(ELSEWHERE)).collect();
        assert_eq!(first, [200, 200, 200, 200, 429]);
        assert_eq!(agents("x-forwarded-for: 203.0.113.10"), 429);
        // Without one the rate counts for the client of a trusted proxy, and for the proxy of any other.
        let stranger = |from: &str| api.bare("GET", "/api/v1/agents", &[from], b"").status;
        assert!((0..10).any(|_| stranger(ELSEWHERE) == 429));
        assert_eq!(stranger("x-forwarded-for: 203.0.113.10"), if is_trusted { 401 } else { 429 });
        // A login behind TLS has a cookie for TLS alone, and a link to the name that the browser knows.
        let link = site.json(&["open"]);
        let code = link["url"].as_str().unwrap().split_once('#').unwrap().1.to_owned();
        let body = json!({"code": code}).to_string();
        let headers = [
            "content-type: application/json",
            "x-forwarded-for: 203.0.113.11",
            "x-forwarded-proto: https",
            "x-forwarded-host: belfry.example",
            "origin: https://belfry.example",
        ];
        let answer = api.bare("POST", "/login", &headers, body.as_bytes());
        match is_trusted {
            true => {
                answer.is(200);
                assert!(answer.header("set-cookie").unwrap().ends_with("; Secure"));
            }
            false => assert!([403, 429].contains(&answer.status), "{answer:?}"),
        }
    }
}

#[test]
fn an_open_api_is_open_on_this_host_and_says_so() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("100000/s}", "100000/s, open: true}"));
    let api = Api::start(&site);
    api.bare("POST", "/api/v1/schedules/hello/quiet/pause", &[], b"").is(200);
    api.bare("GET", "/api/v1/tokens", &[], b"").is(200);
    api.bare("GET", "/api/v1/tokens", &[ELSEWHERE], b"").refused(401, "token_missing");
    api.bare("GET", "/api/v1/agents", &["authorization: Bearer bf_0_0"], b"").refused(401, "token_wrong");
    let row = api.get("/api/v1/audit?limit=1").is(200)["items"][0].clone();
    assert_eq!(row["actor"], "anonymous");
    let made = api.post("/api/v1/tokens", &json!({"scope": "read"})).is(201);
    api.bare("GET", "/api/v1/tokens", &[], b"").is(200);
    assert!(made["token"].is_string(), "a token closes nothing");
    let warned = api.up.lock().unwrap().errors();
    assert!(warned.contains("`api.open` lets every user"), "{warned}");
    // A stream that needed no token ends once it would.
    let stream = api.listen_as("accept: */*", "/api/v1/events", &[]);
    site.config(CONFIG);
    assert!(site.belfry(&["reload"]).status.success());
    assert!(stream.ends() < std::time::Duration::from_secs(2));
    api.bare("GET", "/api/v1/tokens", &[], b"").refused(401, "token_missing");
}

#[test]
fn an_open_api_is_refused_for_others() {
    let site = Site::sqlite();
    for (listen, config, words) in [
        ("0.0.0.0:0", "api: {open: true}\n", "`api.open` would let them in without a token"),
        (
            "127.0.0.1:0",
            "listen: 0.0.0.0:0\napi: {open: true}\n",
            "`api.open` is for loopback addresses only",
        ),
        ("127.0.0.1:0", "api: {open: true, allowed_hosts: [x.example]}\n", "exclude each other"),
    ] {
        site.config(config);
        let said = Said::of(site.belfry(&["up", "--listen", listen]));
        assert_eq!(said.code, 2, "{said:?}");
        assert!(said.err.contains(words), "{said:?}");
    }
}

#[test]
fn metrics_may_be_open() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("100000/s}", "100000/s, open_metrics: true}"));
    let api = Api::start(&site);
    assert_eq!(api.bare("GET", "/metrics", &[], b"").status, 200);
    api.bare("GET", "/api/v1/agents", &[], b"").refused(401, "token_missing");
}
