//! Several nodes on one PostgreSQL: what one of them is told holds on all of them.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Answer, Api};
use crate::support::{Site, eventually};

const CONFIG: &str = r#"
timezone: Europe/London
api: {rate: 100000/s}
agents:
  hello:
    shell: 'echo hello'
    schedules:
      quiet: {cron: "0 0 1 1 *"}
  far:
    shell: 'sleep 0.6'
    needs: [far]
    schedules:
      quiet: {cron: "0 0 1 1 *"}
  near:
    shell: 'true'
    needs: [far]
    schedules:
      quiet: {cron: "0 0 1 1 *"}
"#;

const PLACE: &str = "/api/v1/schedules/hello/x";

/// Two nodes, each with a folder of its own; what needs `far` runs on the second. Nothing, with a loud word, where there is no PostgreSQL.
fn two() -> Option<([Site; 2], [Api; 2])> {
    let first = Site::postgres()?;
    let sites = [first.beside(), first];
    sites[0].config(CONFIG);
    sites[1].config(&format!("engine: {{labels: [far]}}\n{CONFIG}"));
    let nodes = [Api::start(&sites[0]), Api::start(&sites[1])];
    Some((sites, nodes))
}

/// Sends a request to each node at the same moment.
fn at_once(nodes: &[Api; 2], requests: [&(dyn Fn(&Api) -> Answer + Sync); 2]) -> [Answer; 2] {
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        let sent = [0, 1].map(|which| {
            let (barrier, node, request) = (&barrier, &nodes[which], requests[which]);
            scope.spawn(move || {
                barrier.wait();
                request(node)
            })
        });
        sent.map(|thread| thread.join().unwrap())
    })
}

fn patch(node: &Api, tag: Option<&str>, keys: &Value) -> Answer {
    let tag = tag.map(|tag| format!("if-match: {tag}"));
    let headers: Vec<&str> = ["content-type: application/json"].into_iter().chain(tag.as_deref()).collect();
    node.send("PATCH", PLACE, &headers, keys.to_string().as_bytes())
}

fn make(node: &Api, definition: &Value) -> Answer {
    let body = json!({"agent": "hello", "schedule": "x", "definition": definition});
    node.post("/api/v1/schedules", &body)
}

#[test]
fn of_what_two_nodes_change_at_once_nothing_is_lost() {
    let Some((_sites, nodes)) = two() else { return };
    make(&nodes[0], &json!({"cron": "0 0 1 1 *"})).is(201);
    for round in 1..=25 {
        let (one, other) = (json!({"priority": round}), json!({"prompt": format!("round {round}")}));
        let answers = at_once(&nodes, [&|node| patch(node, None, &one), &|node| patch(node, None, &other)]);
        answers.iter().for_each(|answer| drop(answer.is(200)));
        let definition = &nodes[0].get(PLACE).is(200)["definition"];
        assert_eq!((&definition["priority"], &definition["prompt"]), (&one["priority"], &other["prompt"]));
    }
}

#[test]
fn of_two_who_change_what_they_know_one_is_refused() {
    let Some((_sites, nodes)) = two() else { return };
    let hourly = |node: &Api| make(node, &json!({"every": "1h"}));
    let made = at_once(&nodes, [&hourly, &hourly]);
    let mut status = made.each_ref().map(|answer| answer.status);
    status.sort_unstable();
    assert_eq!(status, [201, 409], "{made:?}");
    for round in 1..=25 {
        let shown = nodes[round % 2].get(PLACE);
        let tag = shown.header("etag").unwrap();
        let (one, other) = (json!({"priority": round}), json!({"prompt": format!("round {round}")}));
        let answers =
            at_once(&nodes, [&|node| patch(node, Some(tag), &one), &|node| patch(node, Some(tag), &other)]);
        let lost = answers.iter().find(|answer| answer.status != 200).expect("one of them was too late");
        assert_eq!(lost.refused(412, "changed")["field"], "If-Match");
        let won = answers.iter().find(|answer| answer.status == 200).expect("one of them was not");
        assert_eq!(won.is(200)["definition"], nodes[0].get(PLACE).is(200)["definition"]);
    }
    // One removes what the other changes: whichever comes first, the other hears of it.
    let shown = nodes[0].get(PLACE);
    let tag = shown.header("etag").unwrap();
    let remove = |node: &Api| node.send("DELETE", PLACE, &[&format!("if-match: {tag}")], b"");
    let answers = at_once(&nodes, [&remove, &|node| patch(node, Some(tag), &json!({"priority": 7}))]);
    match answers[0].status {
        200 => assert!([404, 412].contains(&answers[1].status), "{answers:?}"),
        _ => {
            answers[0].refused(412, "changed");
            answers[1].is(200);
        }
    }
}

/// The id of a node.
fn id_of(node: &Api) -> Value {
    let up = node.up.lock().unwrap();
    up.seen.iter().find(|event| event["event"] == "node_started").unwrap()["node"].clone()
}

/// Asks the database itself.
fn count(site: &Site, sql: &str) -> i64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(&site.store, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        client.query_one(sql, &[]).await.unwrap().get(0)
    })
}

#[test]
fn what_happens_on_one_node_is_heard_on_the_other_while_somebody_listens() {
    let Some((sites, nodes)) = two() else { return };
    let (here, there) = (&nodes[0], &nodes[1]);
    let mut stream = here.listen("/api/v1/events", &[]);
    // What happens between the first word of the stream and the other node's next look is not lost.
    let run = there.post("/api/v1/schedules/far/quiet/run", &json!({"wait_ms": 20000})).is(201);
    for name in ["run_created", "run_started", "run_finished"] {
        let told = stream.wait_for(name).data;
        assert_eq!((&told["run_id"], &told["node"]), (&run["id"], &id_of(there)), "{told}");
    }
    make(there, &json!({"cron": "0 0 1 1 *"})).is(201);
    for (name, answer) in [
        ("schedule_updated", patch(there, None, &json!({"priority": 3}))),
        ("schedule_paused", there.send("POST", &format!("{PLACE}/pause"), &[], b"")),
        ("schedule_resumed", there.send("POST", &format!("{PLACE}/resume"), &[], b"")),
    ] {
        answer.is(200);
        let told = stream.wait_for(name).data;
        assert_eq!((&told["schedule"], &told["node"]), (&json!("x"), &id_of(there)), "{told}");
    }
    // A reader knows its own node, too, and nothing comes twice.
    patch(here, None, &json!({"priority": 4})).is(200);
    let own = stream.wait_for("schedule_updated").data;
    assert_eq!(own["node"], id_of(here));
    let began = Instant::now();
    there.send("DELETE", PLACE, &[], b"").is(200);
    let next = stream.next().unwrap();
    assert_eq!((next.event.as_str(), &next.data["node"]), ("schedule_deleted", &id_of(there)));
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    assert!(count(&sites[0], "select count(*) from belfry.told") > 0, "it came through the store");

    let last = next.id;
    drop(stream);
    eventually("the end of the mark", || {
        let marks = "select count(*) from belfry.listeners where until > clock_timestamp()";
        (count(&sites[0], marks) == 0).then_some(())
    });
    eventually("the end of what was told", || {
        (count(&sites[0], "select count(*) from belfry.told") == 0).then_some(())
    });
    // It begins long before it ends: what would be told of its start would have been.
    there.post("/api/v1/schedules/far/quiet/run", &json!({"wait_ms": 20000})).is(201);
    assert_eq!(count(&sites[0], "select count(*) from belfry.told"), 0, "nobody listens");
    let mut again = here.listen("/api/v1/events", &[&format!("last-event-id: {last}")]);
    assert_eq!(again.next().unwrap().event, "gap", "what happened meanwhile was not heard here");
}

#[test]
fn who_comes_back_late_is_told_of_a_gap_also_where_its_node_was_alone() {
    let Some(site) = Site::postgres() else { return };
    site.config(CONFIG);
    let api = Api::start(&site);
    let mut stream = api.listen("/api/v1/events?event=run_created", &[]);
    api.post("/api/v1/schedules/hello/quiet/run", &json!({})).is(201);
    let last = stream.wait_for("run_created").id;
    let marks = "select count(*) from belfry.listeners where until > clock_timestamp()";
    eventually("its mark", || (count(&site, marks) == 1).then_some(()));
    drop(stream);
    eventually("the end of the mark", || (count(&site, marks) == 0).then_some(()));
    let mut again = api.listen("/api/v1/events", &[&format!("last-event-id: {last}")]);
    assert_eq!(again.next().unwrap().event, "gap", "another may have come and gone");
}

#[test]
fn a_change_on_one_node_takes_effect_on_the_other_at_once() {
    let Some((_sites, nodes)) = two() else { return };
    let [here, there] = nodes;
    let make = |name: &str, definition: Value| {
        let body = json!({"agent": "near", "schedule": name, "definition": definition});
        here.post("/api/v1/schedules", &body).is(201);
        there.up.lock().unwrap().event_of("run_finished", name);
    };
    let newest = || there.get("/api/v1/runs?agent=near&schedule=stops&limit=1").is(200)["items"][0].clone();
    make("stops", json!({"every": "100ms"}));
    make("hastens", json!({"every": "1h"}));
    here.send("POST", "/api/v1/schedules/near/stops/pause", &[], b"").is(200);
    let last = newest();
    let faster = json!({"every": "300ms"});
    here.json("PATCH", "/api/v1/schedules/near/hastens", &faster).is(200);
    // It is up to the other one now, which looks by itself only twice a minute.
    here.up.lock().unwrap().kill();
    let began = Instant::now();
    let mut up = there.up.lock().unwrap();
    up.heard();
    for _ in 0..3 {
        up.event_of("run_finished", "hastens");
    }
    drop(up);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(newest()["id"], last["id"], "and what is paused stands still");
}

#[test]
fn a_stream_on_one_node_ends_when_another_revokes_its_token() {
    let Some((_sites, nodes)) = two() else { return };
    let token = nodes[0].post("/api/v1/tokens", &json!({"scope": "read"})).is(201);
    let auth = format!("authorization: Bearer {}", token["token"].as_str().unwrap());
    eventually("the other node knows it", || {
        (nodes[1].send("GET", "/api/v1/me", &[&auth], b"").status == 200).then_some(())
    });
    let stream = nodes[1].listen_as(&auth, "/api/v1/events", &[]);
    let place = format!("/api/v1/tokens/{}", token["id"].as_str().unwrap());
    assert_eq!(nodes[0].send("DELETE", &place, &[], b"").status, 204);
    let took = stream.ends();
    assert!(took < Duration::from_millis(1500), "{took:?}");
    nodes[0].send("GET", "/api/v1/me", &[&nodes[1].auth()], b"").refused(401, "token_wrong");
}
