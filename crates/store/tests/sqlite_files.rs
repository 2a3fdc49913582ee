//! What SQLite is asked to live through: kills, full disks, foreign and damaged files, two servers.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod suite;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use belfry_core::RunState;
use belfry_store::sqlite::Sqlite;
use belfry_store::{Error, Finished, Holder, LaneSettings, Store};
use suite::Random;
use suite::world::{World, agent, every, unlimited};

/// Makes, claims and finishes runs as fast as it can, and prints what was acknowledged. Started again by its own test.
async fn write_for_ever(path: &Path) {
    let store = Sqlite::serve(path).unwrap();
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
async fn what_was_acknowledged_survives_a_kill() {
    if let Ok(path) = std::env::var("BELFRY_WRITE_FOR_EVER") {
        write_for_ever(Path::new(&path)).await;
    }
    let rounds = std::env::var("BELFRY_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(20);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("belfry.db");
    let mut random = Random(suite::seed());
    let (mut made, mut done) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "what_was_acknowledged_survives_a_kill", "--nocapture"])
            .env("BELFRY_WRITE_FOR_EVER", &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // It is killed in the middle of its work: after a number of lines, not after a time.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for _ in 0..20 + random.below(400) {
            note(&lines.next().unwrap().unwrap(), &mut made, &mut done);
        }
        child.kill().unwrap();
        // What it has still said counts, but a line may be cut.
        for line in lines.map_while(Result::ok) {
            note(&line, &mut made, &mut done);
        }
        child.wait().unwrap();
        let store = Sqlite::serve(&path).unwrap();
        assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
        for id in made.drain(..) {
            assert!(store.run(id).await.unwrap().is_some(), "{id} was acknowledged and is gone");
        }
        for id in done.drain(..) {
            assert_eq!(store.run(id).await.unwrap().unwrap().state, RunState::Completed);
        }
        for node in store.nodes().await.unwrap() {
            store.fence(suite::world::start(), node.id, node.lease_until).await.unwrap();
        }
    }
    let ended = Sqlite::open(&path).unwrap().counts().await.unwrap().ended;
    println!("{rounds} kills, {ended} runs ended");
    assert!(ended > 0);
}

fn note(line: &str, made: &mut Vec<belfry_core::RunId>, done: &mut Vec<belfry_core::RunId>) {
    let Some((what, id)) = line.split_once(' ') else { return };
    let Ok(id) = id.parse() else { return };
    match what {
        "made" => made.push(belfry_core::RunId(id)),
        "done" => done.push(belfry_core::RunId(id)),
        _ => {}
    }
}

/// A disk that becomes full. `BELFRY_SMALL_DISK` names a folder on a real one, such as a tmpfs of a few megabytes; else the
/// file is kept from growing, which SQLite reports in the same way.
#[tokio::test]
async fn a_full_disk_loses_nothing_and_goes_on_when_there_is_room() {
    let disk = std::env::var_os("BELFRY_SMALL_DISK");
    let folder = match &disk {
        Some(disk) => tempfile::tempdir_in(disk).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let path = folder.path().join("belfry.db");
    let filler = folder.path().join("filler");
    let store = Sqlite::open(&path).unwrap();
    let mut world = World::new(&store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    match &disk {
        Some(_) => std::fs::write(&filler, vec![0; 1 << 20]).unwrap(),
        None => store.limit_pages(Some(80)).await.unwrap(),
    }
    let mut made = Vec::new();
    let record = world.schedule("a/s").await;
    let compiled = record.definition.compile("a/s").unwrap();
    let error = loop {
        let id = world.run_id();
        let mut run = belfry_store::NewRun::by_hand(
            belfry_store::Defined::new(record.agent, record.id, &compiled, &unlimited()),
            id,
            world.now,
        );
        run.payload = serde_json::json!({ "text": "x".repeat(2000) });
        match store.enqueue(world.now, &belfry_store::Enqueue { run, key: None }).await {
            Ok(_) => made.push(id),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Full { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().starts_with("no space left for "), "{error}");
    assert!(!made.is_empty());
    // Reading goes on, and nothing that was acknowledged is lost.
    assert_eq!(store.counts().await.unwrap().pending, made.len() as u64);
    match &disk {
        Some(_) => std::fs::remove_file(&filler).unwrap(),
        None => store.limit_pages(None).await.unwrap(),
    }
    world.enqueue("a/s", None).await;
    for id in &made {
        assert!(store.run(*id).await.unwrap().is_some());
    }
    assert_eq!(store.counts().await.unwrap().pending, made.len() as u64 + 1);
    world.assert_whole().await;
}

#[test]
fn what_is_not_ours_is_refused_and_left_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("text.db"), "this is a diary, not a database. ".repeat(100)).unwrap();
    std::fs::write(path("empty.db"), "").unwrap();
    std::fs::create_dir(path("folder.db")).unwrap();
    let foreign = rusqlite::Connection::open(path("foreign.db")).unwrap();
    foreign.execute_batch("create table recipes (name text); insert into recipes values ('soup')").unwrap();
    drop(foreign);
    drop(Sqlite::open(&path("newer.db")).unwrap());
    rusqlite::Connection::open(path("newer.db")).unwrap().pragma_update(None, "user_version", 99).unwrap();
    drop(Sqlite::open(&path("damaged.db")).unwrap());
    // All into one file, which nobody has open any more.
    rusqlite::Connection::open(path("damaged.db"))
        .unwrap()
        .pragma_update(None, "journal_mode", "delete")
        .unwrap();
    let mut bytes = std::fs::read(path("damaged.db")).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..].fill(0xa5);
    std::fs::write(path("damaged.db"), &bytes).unwrap();

    for (name, words) in [
        ("text.db", "is not a Belfry store: it is not a SQLite file. It was left untouched"),
        ("empty.db", "is damaged: it is empty, and a store never is. It was left untouched; restore it"),
        ("folder.db", "is not a Belfry store: it is not a file"),
        ("foreign.db", "is not a Belfry store: another program made it"),
        ("newer.db", "has schema version 99, and this Belfry knows versions up to 2. Use a newer Belfry"),
        ("damaged.db", "is damaged: "),
    ] {
        let before = std::fs::read(path(name)).ok();
        let Err(error) = Sqlite::open(&path(name)) else { panic!("{name} was opened") };
        assert!(error.to_string().contains(words), "{name}: {error}");
        assert_eq!(std::fs::read(path(name)).ok(), before, "{name}");
    }
}

#[test]
fn a_second_name_of_a_file_is_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::os::unix::fs::symlink("none.db", path("dangling.db")).unwrap();
    let Err(error) = Sqlite::serve(&path("dangling.db")) else { panic!("a link to nothing was served") };
    assert!(error.to_string().contains("leads to no file"), "{error}");
    let server = Sqlite::serve(&path("real.db")).unwrap();
    std::os::unix::fs::symlink("real.db", path("link.db")).unwrap();
    let Err(error) = Sqlite::serve(&path("link.db")) else { panic!("two servers") };
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    assert_eq!(Sqlite::server(&path("link.db")), Some(Holder { pid: Some(std::process::id()) }));
    drop(server);
    std::fs::hard_link(path("real.db"), path("hard.db")).unwrap();
    let Err(error) = Sqlite::serve(&path("real.db")) else { panic!("a file with two names was served") };
    assert!(error.to_string().contains("has 2 names (hard links)"), "{error}");
    std::fs::remove_file(path("hard.db")).unwrap();
    drop(Sqlite::serve(&path("link.db")).unwrap());
}

/// Serves a file until its input ends, in a process of its own. Started again by its own test.
#[test]
fn a_file_behind_a_bind_mount_has_one_server() {
    if let Ok(path) = std::env::var("BELFRY_SERVE_FILE") {
        let _server = Sqlite::serve(Path::new(&path)).unwrap();
        println!("\nserved");
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [own, other] = ["own.db", "other.db"].map(|name| folder.path().join(name));
    drop(Sqlite::serve(&own).unwrap());
    std::fs::write(&other, "").unwrap();
    let mount = |program: &str, paths: &[&Path]| {
        Command::new(program).args(paths).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    if !mount("mount", &[Path::new("--bind"), &own, &other]) {
        let words = "\nSKIPPED: this process may not mount a file\n";
        drop(std::io::stderr().write_all(words.as_bytes()));
        return;
    }
    let mut server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_file_behind_a_bind_mount_has_one_server", "--nocapture"])
        .env("BELFRY_SERVE_FILE", &own)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    let served = lines.any(|line| line == "served");
    let second = Sqlite::serve(&other).err();
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
    let after = Sqlite::serve(&other).err();
    let unmounted = mount("umount", &[&other]);
    assert!(served && unmounted);
    let second = second.expect("two servers").to_string();
    assert!(second.contains("the same file under another path"), "{second}");
    assert!(after.is_none(), "{after:?}");
}

#[tokio::test]
async fn a_file_that_was_taken_away_takes_and_gives_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for taken in ["belfry.db", "belfry.db.lock", "belfry.db-wal", "belfry.db-shm"] {
        let store = Sqlite::serve(&path("belfry.db")).unwrap();
        let world = World::new(&store);
        world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
        std::fs::rename(path(taken), path("away")).unwrap();
        let error = store.counts().await.unwrap_err();
        assert!(error.is_replaced() && error.is_retryable(), "{error}");
        assert!(error.to_string().contains("removed or replaced"), "{error}");
        let agents = [agent("b", unlimited(), &[("s", every("1h"))])];
        assert!(store.apply(world.now, "files", "b", &agents).await.unwrap_err().is_replaced());
        // Another file in its place is not it.
        std::fs::write(path(taken), "").unwrap();
        assert!(store.counts().await.unwrap_err().is_replaced());
        // Once it is back all is well, and nothing that was refused has happened.
        std::fs::rename(path("away"), path(taken)).unwrap();
        assert_eq!(store.agents().await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn a_log_without_its_file_is_left_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let (path, log) = (folder.path().join("belfry.db"), folder.path().join("belfry.db-wal"));
    let store = Sqlite::serve(&path).unwrap();
    World::new(&store).apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    // What a killed server leaves, without its file.
    let left = std::fs::read(&log).unwrap();
    drop(store);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&log, &left).unwrap();
    let error = Sqlite::open(&path).err().unwrap();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("Put the file back"), "{error}");
    assert!(!path.exists() && std::fs::read(&log).unwrap() == left, "nothing was touched");
    std::fs::remove_file(&log).unwrap();
    Sqlite::open(&path).unwrap();
}

#[tokio::test]
async fn the_log_of_a_small_disk_stays_small() {
    let Some(disk) = std::env::var_os("BELFRY_SMALL_DISK") else {
        let words = "\nSKIPPED: BELFRY_SMALL_DISK names no small disk to fill\n";
        drop(std::io::stderr().write_all(words.as_bytes()));
        return;
    };
    let folder = tempfile::tempdir_in(disk).unwrap();
    let path = folder.path().join("belfry.db");
    let store = Sqlite::serve(&path).unwrap();
    let world = World::new(&store);
    let mut largest = 0;
    // The same few pages, over and over: only the log can grow.
    for i in 0..2_000 {
        let settings = LaneSettings { slots: i % 100, limit: None, queue_limit: None };
        store.set_lane(world.now, "main", Some(settings)).await.unwrap();
        largest = largest.max(folder.path().join("belfry.db-wal").metadata().unwrap().len());
    }
    assert!(largest < 1 << 20, "the log had {largest} bytes");
}

#[tokio::test]
async fn a_file_has_one_server_and_any_number_of_guests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/down/belfry.db");
    let server = Sqlite::serve(&path).unwrap();
    let Err(error) = Sqlite::serve(&path) else { panic!("two servers") };
    assert_eq!(error.to_string(), format!("{} is in use by process {}", path.display(), std::process::id()));
    assert_eq!(Sqlite::server(&path), Some(Holder { pid: Some(std::process::id()) }));
    let guest = Sqlite::open(&path).unwrap();
    let world = World::new(&guest);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    assert_eq!(World::new(&server).plan_all().await, 1, "the server sees what its guest wrote");
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(server);
    assert_eq!(Sqlite::server(&path), None, "a guest is no server");
    drop(guest);
    drop(Sqlite::serve(&path).unwrap());
}
