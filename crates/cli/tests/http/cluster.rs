//! Several nodes on one PostgreSQL: what one of them is told holds on all of them.

use std::sync::Barrier;

use serde_json::{Value, json};

use crate::client::{Answer, Api};
use crate::support::Site;

const CONFIG: &str = r#"
timezone: Europe/London
api: {rate: 100000/s}
agents:
  hello:
    shell: 'echo hello'
    schedules:
      quiet: {cron: "0 0 1 1 *"}
"#;

const PLACE: &str = "/api/v1/schedules/hello/x";

/// Two nodes, each with a folder of its own; nothing, with a loud word, where there is no PostgreSQL.
fn two() -> Option<([Site; 2], [Api; 2])> {
    let first = Site::postgres()?;
    let sites = [first.beside(), first];
    let nodes = [&sites[0], &sites[1]].map(|site| {
        site.config(CONFIG);
        Api::start(site)
    });
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
