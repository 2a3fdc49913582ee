//! Browser logins, streams that end with their token, and `belfry api` and `open`.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Answer, Api, CONFIG, Stream};
use crate::remote::Said;
use crate::support::{Site, eventually};

/// A browser that is logged in.
struct Browser {
    /// The cookie as a header.
    cookie: String,
    /// The secret as a header.
    auth: String,
    id: String,
}

fn code(link: &str) -> &str {
    link.split_once("/login#").unwrap_or_else(|| panic!("{link} is no login link")).1
}

fn post_code(api: &Api, code: &str, headers: &[&str]) -> Answer {
    let body = json!({"code": code}).to_string();
    api.bare("POST", "/login", &[headers, &["content-type: application/json"]].concat(), body.as_bytes())
}

fn log_in(site: &Site, api: &Api) -> Browser {
    let link = site.json(&["open"]);
    let answer = post_code(api, code(link["url"].as_str().unwrap()), &[]);
    let login = answer.is(200);
    let cookie = answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    Browser {
        cookie: format!("cookie: {cookie}"),
        auth: format!("authorization: Bearer {}", login["secret"].as_str().unwrap()),
        id: login["id"].as_str().unwrap().to_owned(),
    }
}

#[test]
fn a_code_logs_one_browser_in_once() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let link = site.json(&["open"]);
        let url = link["url"].as_str().unwrap();
        assert!(url.starts_with(&format!("http://{}/login#", api.address)), "{url}");
        let said = Said::of(site.belfry(&["open"]));
        assert!(said.code == 0 && said.out.contains("/login#") && said.out.lines().count() == 1, "{said:?}");

        let answer = post_code(&api, code(url), &[]);
        let login = answer.is(200);
        let set = answer.header("set-cookie").unwrap().to_owned();
        let port = api.address.rsplit(':').next().unwrap();
        assert!(set.starts_with(&format!("belfry_{port}=bf_")), "{set}");
        for part in ["; HttpOnly", "; SameSite=Strict", "; Path=/", "; Max-Age=43200"] {
            assert!(set.contains(part), "{set}");
        }
        assert!(!set.contains("Secure"), "there is no TLS: {set}");
        assert_ne!(set.split(['=', ';']).nth(1), login["secret"].as_str(), "the cookie is not the secret");
        post_code(&api, code(url), &[]).refused(401, "code_wrong");
        let listed = api.get("/api/v1/tokens").is(200)["items"].clone();
        assert_eq!((&listed[0]["kind"], &listed[0]["id"]), (&json!("login"), &login["id"]));
        let audit = api.get("/api/v1/audit").is(200)["items"].clone();
        let actions: Vec<_> = audit.as_array().unwrap().iter().map(|row| row["action"].clone()).collect();
        assert_eq!(actions, ["login", "create_login", "create_login"], "the second use has no row");
    }
}

#[test]
fn a_cookie_reads_and_a_secret_changes() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let Browser { cookie, auth, id } = log_in(&site, &api);
    let me = |header: &str| api.bare("GET", "/api/v1/me", &[header], b"").is(200);
    assert_eq!((&me(&cookie)["actor"], &me(&cookie)["scope"]), (&json!(id), &json!("read")));
    assert_eq!((&me(&auth)["actor"], &me(&auth)["scope"]), (&json!(id), &json!("admin")));
    assert!(me(&cookie)["expires_at"].is_string());
    api.bare("GET", "/api/v1/runs", &[&cookie], b"").is(200);
    api.bare("GET", "/api/v1/tokens", &[&cookie], b"").refused(403, "scope_too_small");
    let pause = "/api/v1/schedules/hello/quiet/pause";
    api.bare("POST", pause, &[&cookie], b"").refused(401, "token_missing");
    api.bare("POST", pause, &[&auth], b"").is(200);
    let row = api.get("/api/v1/audit?limit=1").is(200)["items"][0].clone();
    assert_eq!((&row["actor"], &row["action"]), (&json!(id), &json!("pause_schedule")));
    // Neither half stands for the other.
    let (bare_cookie, bare_auth) =
        (cookie.split_once('=').unwrap(), auth.strip_prefix("authorization: Bearer ").unwrap());
    let swapped = format!("authorization: Bearer {}", bare_cookie.1);
    api.bare("GET", "/api/v1/runs", &[&swapped], b"").refused(401, "token_wrong");
    let swapped = format!("{}={bare_auth}", bare_cookie.0);
    api.bare("GET", "/api/v1/runs", &[&swapped], b"").refused(401, "token_wrong");
    // A page of another port of this host sends the cookie too, and gets nothing for it.
    for site in ["sec-fetch-site: same-site", "sec-fetch-site: cross-site"] {
        api.bare("GET", "/api/v1/runs", &[&cookie, site], b"").refused(401, "token_missing");
    }
    api.bare("GET", "/api/v1/runs", &[&cookie, "sec-fetch-site: same-origin"], b"").is(200);
    let other = cookie.replacen("belfry_", "belfry_1", 1);
    api.bare("GET", "/api/v1/runs", &[&other], b"").refused(401, "token_missing");
    let several = format!("cookie: a=b; {}; c=d", cookie.strip_prefix("cookie: ").unwrap());
    api.bare("GET", "/api/v1/runs", &[&several], b"").is(200);
}

#[test]
fn a_login_survives_a_restart_and_is_revoked_as_a_whole() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let port = api.address.rsplit(':').next().unwrap().to_owned();
        let (first, second) = (log_in(&site, &api), log_in(&site, &api));
        let unused = site.json(&["open"]);
        api.stop();
        let api = Api::start_with(&site, |command| {
            command.env("BELFRY_LISTEN", format!("127.0.0.1:{port}"));
        });
        for browser in [&first, &second] {
            api.bare("GET", "/api/v1/runs", &[&browser.cookie], b"").is(200);
            api.bare("GET", "/api/v1/tokens", &[&browser.auth], b"").is(200);
        }
        post_code(&api, code(unused["url"].as_str().unwrap()), &[]).refused(401, "code_wrong");
        let listed = String::from_utf8(site.belfry(&["token", "ls"]).stdout).unwrap();
        assert!(listed.contains(&first.id) && listed.contains("browser login from 127.0.0.1"), "{listed}");
        assert!(site.belfry(&["token", "revoke", &first.id]).status.success());
        for header in [&first.cookie, &first.auth] {
            api.bare("GET", "/api/v1/runs", &[header], b"").refused(401, "token_revoked");
        }
        api.bare("GET", "/api/v1/runs", &[&second.cookie], b"").is(200);
        // A browser logs itself out.
        let own = format!("/api/v1/tokens/{}", second.id);
        assert_eq!(api.bare("DELETE", &own, &[&second.auth], b"").status, 204);
        api.bare("GET", "/api/v1/runs", &[&second.cookie], b"").refused(401, "token_revoked");
    }
}

#[test]
fn wrong_codes_are_counted_and_a_right_one_still_works() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let link = site.json(&["open"]);
    let statuses: Vec<_> = (0..12).map(|n| post_code(&api, &format!("{n:040}"), &[]).status).collect();
    assert_eq!(statuses, [&[401; 10][..], &[429; 2]].concat());
    let send = |headers: &[&str], body: &[u8]| api.bare("POST", "/login", headers, body);
    let json_body = "content-type: application/json";
    send(&[], b"{\"code\": \"x\"}").refused(415, "not_json");
    send(&[json_body], b"").refused(400, "bad_json");
    send(&[json_body], b"{\"code\": 7}").refused(400, "bad_json");
    send(&[json_body], &[b' '; 5000]).refused(413, "too_large");
    send(&[json_body, "origin: http://evil.example"], b"{}").refused(403, "cross_site");
    post_code(&api, code(link["url"].as_str().unwrap()), &[]).is(200);
}

#[test]
fn the_login_page_needs_nothing_and_runs_nothing_inline() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let root = api.bare("GET", "/", &[], b"");
    assert_eq!((root.status, root.header("location")), (303, Some("/login")));
    for (path, kind) in [
        ("/login", "text/html; charset=utf-8"),
        ("/login.js", "text/javascript; charset=utf-8"),
        ("/login.css", "text/css; charset=utf-8"),
    ] {
        let answer = api.bare("GET", path, &[], b"");
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)));
        assert!(answer.header("content-security-policy").unwrap().starts_with("default-src 'self'"));
    }
    let page = String::from_utf8(api.bare("GET", "/login", &[], b"").body).unwrap();
    assert!(
        page.contains("<script src=\"/login.js\" defer></script>") && page.matches("<script").count() == 1
    );
    assert!(!page.contains("style=") && !page.contains("<style") && !page.contains("onclick"));
}

#[test]
fn a_stream_ends_within_a_second_when_its_token_does() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201);
        let run = eventually("the run", || {
            let runs = api.get("/api/v1/runs?agent=slow").is(200);
            runs["items"][0]["id"].as_str().map(str::to_owned)
        });
        let made = |scope: &str, ttl: Option<u64>| -> Value {
            api.post("/api/v1/tokens", &json!({"scope": scope, "ttl_ms": ttl})).is(201)
        };
        let auth = |token: &Value| format!("authorization: Bearer {}", token["token"].as_str().unwrap());
        let streams = |auth: &str| {
            let log = format!("/api/v1/runs/{run}/log?follow=true");
            ["/api/v1/events", &log].map(|path| api.listen_as(auth, path, &[]))
        };
        let kept = made("read", None);
        let mut kept = api.listen_as(&auth(&kept), "/api/v1/events?event=run_cancelled", &[]);
        // By the server itself, by a command beside it, and by time.
        let token = made("read", None);
        let open = streams(&auth(&token));
        let place = format!("/api/v1/tokens/{}", token["id"].as_str().unwrap());
        assert_eq!(api.send("DELETE", &place, &[], b"").status, 204);
        for stream in open {
            let took = stream.ends();
            assert!(took < Duration::from_secs(1), "revoked here: {took:?}");
        }
        let token = made("read", None);
        let open = streams(&auth(&token));
        std::fs::rename(site.state_file("server.json"), site.path("aside.json")).unwrap();
        assert!(site.belfry(&["token", "revoke", token["id"].as_str().unwrap()]).status.success());
        std::fs::rename(site.path("aside.json"), site.state_file("server.json")).unwrap();
        for stream in open {
            let took = stream.ends();
            assert!(took < Duration::from_millis(1500), "revoked in the store: {took:?}");
        }
        let token = made("read", Some(1500));
        let open = streams(&auth(&token));
        let took = open.map(Stream::ends);
        assert!(
            took[0] > Duration::from_millis(500) && took[0] < Duration::from_millis(2500),
            "expired: {took:?}"
        );
        // The cookie of a browser login.
        let browser = log_in(&site, &api);
        let open = streams(&browser.cookie);
        assert!(site.belfry(&["token", "revoke", &browser.id]).status.success());
        for stream in open {
            let took = stream.ends();
            assert!(took < Duration::from_secs(1), "logged out: {took:?}");
        }
        // Nobody else notices.
        api.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).is(200);
        assert_eq!(kept.wait_for("run_cancelled").data["run_id"], run.as_str());
    }
}

#[test]
fn a_reply_ends_when_its_token_is_revoked() {
    let site = Site::sqlite();
    site.config(&format!(
        "{CONFIG}  bot:\n    shell: 'echo begun; while ! [ -e go ]; do sleep 0.02; done'\n    schedules: {{talk: {{chat: {{debounce: 0s}}}}}}\n"
    ));
    let api = Api::start(&site);
    let token = api.post("/api/v1/tokens", &json!({"scope": "trigger"})).is(201);
    let body = json!({"text": "hello", "stream": true}).to_string();
    let head = format!(
        "POST /api/v1/sessions/bot/talk/ada/messages HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        api.address,
        token["token"].as_str().unwrap(),
        body.len()
    );
    let mut reply = Stream::of(api.raw(head.as_bytes()));
    reply.wait_for("output");
    let place = format!("/api/v1/tokens/{}", token["id"].as_str().unwrap());
    assert_eq!(api.send("DELETE", &place, &[], b"").status, 204);
    // The connection is kept, so that its end shows as the last chunk and not as an end of the bytes.
    let began = Instant::now();
    reply.wait_for_last_chunk();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // So does a request that waits for its run.
    let token = api.post("/api/v1/tokens", &json!({"scope": "trigger"})).is(201);
    let auth = format!("authorization: Bearer {}", token["token"].as_str().unwrap());
    let body = json!({"wait_ms": 20_000}).to_string();
    let waited = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let headers = [auth.as_str(), "content-type: application/json"];
            api.send("POST", "/api/v1/schedules/slow/quiet/run", &headers, body.as_bytes())
        });
        eventually("the run", || {
            let runs = api.get("/api/v1/runs?agent=slow").is(200);
            runs["items"][0]["id"].is_string().then_some(())
        });
        let place = format!("/api/v1/tokens/{}", token["id"].as_str().unwrap());
        assert_eq!(api.send("DELETE", &place, &[], b"").status, 204);
        asked.join().unwrap()
    });
    waited.refused(401, "token_revoked");
}

#[test]
fn any_request_goes_through_the_command_line() {
    for site in Site::each() {
        site.config(CONFIG);
        let said = |arguments: &[&str]| Said::of(site.belfry(&[&["api"], arguments].concat()));
        let run = "/api/v1/schedules/hello/quiet/run";
        let check = |is_served: bool| {
            let listed = said(&["/api/v1/schedules?limit=1"]);
            assert_eq!((listed.code, listed.err.as_str()), (0, ""), "{listed:?}");
            let listed: Value = serde_json::from_str(&listed.out).unwrap();
            assert_eq!(listed["items"].as_array().unwrap().len(), 1);
            let pause = "/api/v1/schedules/hello/quiet/pause";
            let paused = said(&["post", pause, "-d", r#"{"reason": "noise"}"#]);
            assert!(
                paused.code == 0 && paused.out.contains("noise") && paused.out.ends_with("}\n"),
                "{paused:?}"
            );
            site.file("body.json", r#"{"catch_up": false}"#);
            let resumed = said(&["/api/v1/schedules/hello/quiet/resume", "-d", "@body.json"]);
            assert_eq!(resumed.code, 0, "{resumed:?}");
            for (code, words, arguments) in [
                (3, "there is nothing at this path", &["/nothing"][..]),
                (3, "nobody", &["/api/v1/schedules/hello/nobody"]),
                (2, "does not take this method", &["PUT", "/api/v1/agents"]),
                (2, "bad", &["POST", pause, "-d", "{"]),
                (2, "slash", &["api/v1/agents"]),
                (2, "one of GET", &["FETCH", "/api/v1/agents"]),
                (2, "cannot read", &["/api/v1/agents", "-d", "@nowhere.json"]),
            ] {
                let said = said(arguments);
                assert_eq!((said.code, said.out.as_str()), (code, ""), "{arguments:?}: {said:?}");
                assert!(said.err.contains(words) || words == "bad", "{arguments:?}: {said:?}");
            }
            let document = said(&["/api/openapi.json"]);
            assert!(document.out.contains("\"openapi\""), "{document:?}");
            let me: Value = serde_json::from_str(&said(&["/api/v1/me"]).out).unwrap();
            let actor = me["actor"].as_str().unwrap();
            assert!(if is_served { actor == "local" } else { actor.starts_with("cli:") }, "{me}");
        };
        assert!(site.belfry(&["apply"]).status.success());
        check(false);
        let alone = Said::of(site.belfry(&["open"]));
        assert_eq!(alone.code, 5, "{alone:?}");
        assert!(alone.err.contains("no server runs") && alone.err.contains("belfry up"), "{alone:?}");
        let api = Api::start(&site);
        check(true);
        let made = said(&["POST", run]);
        assert!(made.code == 0 && made.out.contains("\"manual\""), "{made:?}");
        // By its address, from the folder that has its file.
        for host in [api.address.clone(), api.address.replace("127.0.0.1", "localhost")] {
            let server = format!("http://{host}");
            let named = Said::of(site.belfry(&["--server", &server, "api", "/api/v1/me"]));
            assert!(named.code == 0 && named.out.contains("\"local\""), "{named:?}");
        }
        let server = format!("http://{}", api.address);
        let elsewhere = Said::of(Site::sqlite().belfry(&["--server", &server, "api", "/api/v1/me"]));
        assert_eq!(elsewhere.code, 4, "{elsewhere:?}");
        assert!(elsewhere.err.contains("--token"), "{elsewhere:?}");
    }
}
