//! What PostgreSQL is asked to live through: kills of whoever writes and of the server itself, full disks.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::suite::Random;
use crate::suite::world::{World, agent, every, unlimited};
use belfry_core::{RunId, RunState};
use belfry_store::postgres::Postgres;
use belfry_store::{Defined, Enqueue, Error, Finished, NewRun, Store};

use crate::{pg, suite};

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
                "kills::what_was_acknowledged_survives_kills_of_the_writer_and_of_the_server",
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

/// Takes all of a disk but a little.
fn fill(disk: &Path) -> std::path::PathBuf {
    let filler = disk.join("filler");
    let mut file = File::create(&filler).unwrap();
    let block = vec![0x5a; 1 << 16];
    while file.write_all(&block).is_ok() {}
    let size = file.metadata().unwrap().len();
    file.set_len(size.saturating_sub(4 << 20)).unwrap();
    filler
}

/// Only with `BELFRY_SMALL_DISK`, which names a folder on a disk of some fifty megabytes that is used for nothing else, such
/// as a tmpfs: the tables are put there. (Where the server's log of changes finds no room the server itself goes down,
/// which is a kill.)
#[tokio::test]
async fn a_full_disk_loses_nothing_and_goes_on_when_there_is_room() {
    let Some(disk) = std::env::var_os("BELFRY_SMALL_DISK").map(std::path::PathBuf::from) else { return };
    let Some(server) = pg::Own::fresh() else { return };
    let url = server.database_at(&disk.join("belfry"));
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    let filler = fill(&disk);
    let record = world.schedule("a/s").await;
    let compiled = record.definition.compile("a/s").unwrap();
    let mut made = Vec::new();
    let error = loop {
        let id = world.run_id();
        let mut run =
            NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, &unlimited()), id, world.now);
        run.payload = serde_json::json!({ "text": "x".repeat(1500) });
        match store.enqueue(world.now, &Enqueue { run, key: None }).await {
            Ok(_) => made.push(id),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Full { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().starts_with("no space left for "), "{error}");
    assert!(!made.is_empty());
    // Reading goes on, and nothing that was acknowledged is lost.
    assert_eq!(store.counts().await.unwrap().pending, made.len() as u64);
    std::fs::remove_file(&filler).unwrap();
    world.enqueue("a/s", None).await;
    for id in &made {
        assert!(store.run(*id).await.unwrap().is_some());
    }
    assert_eq!(store.counts().await.unwrap().pending, made.len() as u64 + 1);
    world.assert_whole().await;
}
