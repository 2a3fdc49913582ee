//! `belfry up` on a PostgreSQL that crashes and comes back. In a file of its own: its server is nobody else's.
//!
//! `BELFRY_KILLS=50` for more crashes.

#![allow(clippy::unwrap_used)]

#[path = "outside/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use belfry_time::Timestamp;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::{Site, eventually, number};

/// The throw-away server of this test, found by its socket.
struct Server {
    folder: PathBuf,
    database: String,
}

impl Server {
    /// Nothing where it is somebody's own server.
    fn of(store: &str) -> Option<Server> {
        let (_, address) = store.split_once('@')?;
        let (host, database) = address.split_once('/')?;
        let folder = PathBuf::from(host.replace("%2F", "/"));
        folder.join("data/postmaster.pid").exists().then(|| Server { folder, database: database.to_owned() })
    }

    fn pid(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.folder.join("data/postmaster.pid")).ok()?;
        text.lines().next()?.trim().parse().ok()
    }

    fn execute(&self, sql: &str) -> Result<(), tokio_postgres::Error> {
        let url = format!("host={} user=postgres dbname={}", self.folder.display(), self.database);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            client.batch_execute(sql).await
        })
    }

    /// What is answered is kept, as on any server that is not a throw-away one.
    fn keep_what_is_committed(&self) {
        self.execute(&format!("alter database {} set synchronous_commit = on", self.database)).unwrap();
    }

    /// As if its machine was reset: no checkpoint, no goodbye.
    fn crash(&self) {
        let pid = self.pid().unwrap();
        kill(Pid::from_raw(pid), Signal::SIGQUIT).unwrap();
        eventually("the end of PostgreSQL", || (!support::lives(&pid.to_string())).then_some(()));
    }

    fn start(&self) {
        let data = self.folder.join("data");
        let line = std::fs::read_to_string(data.join("postmaster.opts")).unwrap();
        let log = std::fs::OpenOptions::new().append(true).open(self.folder.join("log")).unwrap();
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!("exec {line}"))
            .env_clear()
            .env("LC_ALL", "C")
            .current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).process_group(0);
        let owner_of = |path: &Path| std::fs::metadata(path).unwrap().uid();
        let owner = owner_of(&data);
        if owner_of(Path::new("/proc/self")) != owner {
            command.uid(owner).gid(owner);
        }
        // It is ended with the folder, by the watchdog of its first start.
        drop(command.spawn().unwrap());
        eventually("PostgreSQL", || self.execute("select 1").ok());
    }
}

/// Every tick one run, none lost, each attempt started once.
fn each_tick_once(site: &Site) {
    let mut ticks: BTreeMap<i64, (String, u32)> = BTreeMap::new();
    for line in site.side() {
        let tick = line[3].parse::<Timestamp>().unwrap().as_millisecond();
        let attempt = line[2].parse().unwrap();
        let (run, newest) = ticks.entry(tick).or_insert_with(|| (line[1].clone(), 0));
        assert_eq!(*run, line[1], "two runs of one tick");
        assert!(attempt > *newest, "attempt {attempt} of {run} started after {newest}");
        *newest = attempt;
    }
    let all: Vec<i64> = ticks.keys().copied().collect();
    let gaps: Vec<_> = all.windows(2).filter(|pair| pair[1] - pair[0] != 200).collect();
    assert!(gaps.is_empty(), "ticks were lost: {gaps:?}");
    let known = site.runs("a/all");
    for (run, _) in ticks.values() {
        let record = known.iter().find(|record| record["id"] == run.as_str());
        assert!(record.is_some_and(|record| record["state"] == "completed"), "{run}: {record:?}");
    }
}

/// There is one server for all tests here, and each of them crashes it.
fn alone() -> Option<(std::sync::MutexGuard<'static, ()>, Site, Server)> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let site = Site::postgres()?;
    let Some(server) = Server::of(&site.store) else {
        use std::io::Write;
        let words = "\nSKIPPED: this test restarts PostgreSQL, and this one is not its own\n";
        drop(std::io::stderr().write_all(words.as_bytes()));
        return None;
    };
    server.keep_what_is_committed();
    Some((turn, site, server))
}

const LONG: &str = r#"
engine: {lease: 3s, shutdown_timeout: 5m}
agents:
  a:
    shell: 'trap "" TERM; while [ ! -e go ]; do echo "beat $BELFRY_ATTEMPT $$" >> side.log; sleep 0.03; done; echo "end $BELFRY_ATTEMPT" >> side.log'
    retry: {max: 3, base: 100ms}
    schedules: {s: {every: 1h}}
"#;

#[test]
fn a_database_that_is_away_for_longer_than_the_lease_ends_what_runs() {
    let Some((_turn, site, server)) = alone() else { return };
    site.config(LONG);
    let mut up = site.up();
    let old = site.wait_for_line("beat 1");
    server.crash();
    eventually("the end of its children", || (!support::lives(&old[2])).then_some(()));
    server.start();
    site.wait_for_line("beat 2");
    site.file("go", "");
    let finished = up.event("run_finished");
    assert_eq!((&finished["state"], &finished["attempt"]), (&"completed".into(), &2.into()), "{finished}");
    up.stop();
    let mut newest = 0;
    for line in site.side() {
        let attempt: u32 = line[1].parse().unwrap();
        assert!(attempt >= newest, "attempt {attempt} lives beside attempt {newest}");
        newest = attempt;
    }
}

#[test]
fn it_stops_while_the_database_is_away() {
    let Some((_turn, site, server)) = alone() else { return };
    site.config(&LONG.replace("lease: 3s", "lease: 5s"));
    let mut up = site.up();
    site.wait_for_line("beat 1");
    server.crash();
    up.event("store_unavailable");
    // Its end cannot be stored.
    site.file("go", "");
    site.wait_for_line("end 1");
    let refused = site.belfry(&["up"]);
    assert_eq!(refused.status.code(), Some(5), "{}", String::from_utf8_lossy(&refused.stderr));
    up.signal(Signal::SIGTERM);
    let asked = std::time::Instant::now();
    let status = loop {
        // Signals of one kind that come together are one.
        up.signal(Signal::SIGTERM);
        if let Some(status) = up.ends_within(std::time::Duration::from_secs(1)) {
            break status;
        }
        assert!(asked.elapsed() < std::time::Duration::from_secs(15), "it does not stop");
    };
    assert_eq!(status.code(), Some(6), "{}", up.errors());
    server.start();
    // Nobody knows how it ended, so it counts as an attempt.
    let mut up = site.up();
    let finished = up.event("run_finished");
    assert_eq!((&finished["state"], &finished["attempt"]), (&"completed".into(), &2.into()), "{finished}");
    up.stop();
}

#[test]
fn a_database_that_crashes_loses_no_tick_and_doubles_none() {
    let Some((_turn, site, server)) = alone() else { return };
    site.config(
        r#"
engine: {jitter_threshold: 1000}
agents:
  a:
    shell: 'echo "start $BELFRY_RUN_ID $BELFRY_ATTEMPT $BELFRY_TICK_AT" >> side.log; sleep 0.1'
    max_concurrent: none
    retry: {max: 20, base: 200ms}
    schedules:
      all: {every: 200ms, anchor: slot, catch_up: run_all, catch_up_limit: 1000, if_running: allow}
"#,
    );
    let mut nodes = [site.up(), site.up()];
    for node in &mut nodes {
        node.event("node_started");
    }
    for _ in 0..number("BELFRY_KILLS", 2) {
        site.wait_for_side("a few more starts", {
            let before = site.side().len();
            move |lines| lines.len() > before + 3
        });
        server.crash();
        for node in &mut nodes {
            node.event("store_unavailable");
        }
        server.start();
        for node in &mut nodes {
            node.event("store_available");
        }
        let healed = Timestamp::now();
        site.wait_for_side("a tick after it", |lines| {
            lines.iter().any(|line| line[3].parse::<Timestamp>().unwrap() > healed)
        });
    }
    nodes.iter_mut().for_each(support::Up::stop);
    each_tick_once(&site);
}
