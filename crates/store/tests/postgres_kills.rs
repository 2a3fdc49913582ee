//! What PostgreSQL is asked to live through: kills of whoever writes, and of the server itself.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "support/pg.rs"]
mod pg;
mod suite;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use belfry_core::{RunId, RunState};
use belfry_store::postgres::Postgres;
use belfry_store::{Finished, Store};
use suite::Random;
use suite::world::{World, agent, every, unlimited};

/// Makes, claims and finishes runs as fast as it can, and prints what was acknowledged. Started again by its own test.
async fn write_for_ever(url: &str) {
    let store = Postgres::open(url).await.unwrap();
    let mut world = World::new(&store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    let node = world.join(u128::from(std::process::id())).await;
    world.ids_from(u128::from(std::process::id()) << 32);
    loop {
        let (run, _) = world.enqueue("a/s", None).await;
        println!("made {run}");
        for claimed in world.claim(node, 10).await {
            if world.complete(&claimed).await == Finished::Ended(RunState::Completed) {
                println!("done {}", claimed.run);
            }
        }
    }
}

#[tokio::test]
async fn what_was_acknowledged_survives_kills_of_the_writer_and_of_the_server() {
    if let Ok(url) = std::env::var("BELFRY_WRITE_FOR_EVER") {
        write_for_ever(&url).await;
    }
    let rounds = std::env::var("BELFRY_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(12);
    let Some(mut server) = pg::Own::fresh() else { return };
    let mut random = Random(suite::seed());
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "what_was_acknowledged_survives_kills_of_the_writer_and_of_the_server",
                "--nocapture",
            ])
            .env("BELFRY_WRITE_FOR_EVER", server.url())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (mut made, mut done) = (Vec::new(), Vec::new());
        // It is killed in the middle of its work: after a number of lines, not after a time.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for _ in 0..20 + random.below(200) {
            note(&lines.next().unwrap().unwrap(), &mut made, &mut done);
        }
        // Each fourth time the server goes down under it.
        if round % 4 == 3 {
            server.kill_and_restart();
        }
        child.kill().unwrap();
        // What it has still said counts, but a line may be cut.
        for line in lines.map_while(Result::ok) {
            note(&line, &mut made, &mut done);
        }
        child.wait().unwrap();
        let store = Postgres::open(&server.url()).await.unwrap();
        assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
        for id in made {
            assert!(store.run(id).await.unwrap().is_some(), "{id} was acknowledged and is gone");
        }
        for id in done {
            assert_eq!(store.run(id).await.unwrap().unwrap().state, RunState::Completed);
        }
        for node in store.nodes().await.unwrap() {
            store.fence(suite::world::start(), node.id, node.lease_until).await.unwrap();
        }
        store.tend().await.unwrap();
        assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
    }
    let ended = Postgres::open(&server.url()).await.unwrap().counts().await.unwrap().ended;
    println!("{rounds} kills, {ended} runs ended");
    assert!(ended > 0);
}

fn note(line: &str, made: &mut Vec<RunId>, done: &mut Vec<RunId>) {
    let Some((what, id)) = line.split_once(' ') else { return };
    let Ok(id) = id.parse() else { return };
    match what {
        "made" => made.push(RunId(id)),
        "done" => done.push(RunId(id)),
        _ => {}
    }
}
