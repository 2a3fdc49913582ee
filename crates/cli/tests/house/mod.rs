//! A folder with a configuration and a store in which things have happened, on a clock that was moved by hand; and the real
//! binary in it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use belfry::{AnyStore, Engine, HandlerError, ManualClock, Options, StopOptions, Timestamp};
use belfry_core::rescue::Rescues;
use belfry_core::work::Action;
use belfry_core::{NodeId, RunId, ScheduleId};
use belfry_store::{Claim, Claimed, Defined, Enqueue, Enqueued, NewRun, Node, Store};
use serde_json::Value;
use uuid::Uuid;

pub const CONFIG: &str = r#"timezone: UTC
agents:
  hello:
    shell: echo hello
    schedules:
      grid: {every: 1m, anchor: slot}
      often: {every: 5m}
      later: {at: "2099-01-01T00:00:00Z"}
      quiet: {cron: "0 * * * *"}
      off: {every: 5m, enabled: false}
      bad: {cron: "0 9 * * *", timezone: Mars/Phobos}
  reporter:
    run: [sh, -c, "exit 3"]
    max_concurrent: 2
    retry: {max: 0}
    breaker: {threshold: 2, reset_after: 30m}
    schedules:
      fails: {every: 10m, anchor: slot}
      morning: {cron: "0 9 * * 1-5", timezone: Europe/London, prompt: "Write the daily report."}
      pushed: {webhook: {secret: "${HOOK_SECRET}"}}
"#;

/// A Monday.
pub const START: &str = "2026-01-05T12:00:00Z";

pub struct House {
    pub folder: tempfile::TempDir,
}

impl House {
    /// An empty folder.
    pub fn empty() -> House {
        House { folder: tempfile::tempdir().unwrap() }
    }

    /// A folder with a configuration.
    pub fn with_config(text: &str) -> House {
        let house = House::empty();
        std::fs::write(house.path("belfry.yaml"), text).unwrap();
        house
    }

    /// An hour of the configuration above has passed, and `hello/quiet` is paused.
    pub fn after_an_hour() -> House {
        let house = House::with_config(CONFIG);
        house.block_on(live_an_hour(&house));
        house
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    /// The store, beside whoever else has it open.
    pub async fn store(&self) -> AnyStore {
        let address = format!("sqlite:{}", self.path(".belfry/belfry.db").display());
        AnyStore::open(&address, false).await.unwrap()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_belfry"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env("TZ", "UTC")
            .env("BELFRY_LISTEN", "127.0.0.1:0")
            .env_remove("NO_COLOR")
            .env_remove("COLUMNS")
            .env_remove("BELFRY_STORE")
            .env_remove("BELFRY_CONFIG")
            .stdin(Stdio::null());
        command
    }

    pub fn belfry(&self, arguments: &[&str]) -> Said {
        Said::of(self.command(arguments).output().unwrap())
    }

    /// What a command that must succeed prints as JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let said = self.belfry(&[arguments, &["-o", "json"]].concat());
        assert_eq!(said.code, 0, "{arguments:?}: {}", said.err);
        serde_json::from_str(&said.out).unwrap()
    }
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Said {
    pub out: String,
    pub err: String,
    pub code: i32,
}

impl Said {
    pub fn of(output: Output) -> Said {
        Said {
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
            code: output.status.code().unwrap(),
        }
    }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

async fn live_an_hour(house: &House) {
    let nothing = |_: &str| None;
    let loaded =
        belfry_config::load(&house.path("belfry.yaml"), &belfry_config::Host::new(&nothing, "UTC")).unwrap();
    let clock = ManualClock::new(at(START));
    let address = format!("sqlite:{}", house.path(".belfry/belfry.db").display());
    let store = Arc::new(AnyStore::open(&address, true).await.unwrap());
    let engine = Engine::builder()
        .store(store.clone())
        .clock(clock.clone())
        .options(Options { lease: Duration::from_secs(86_400 * 365), ..Options::default() })
        .handler("hello", |run| async move {
            run.log(format!("hello from {}", run.schedule())).await;
            Ok(())
        })
        .handler("reporter", |run| async move {
            run.log("trying").await;
            Err(HandlerError::from("no paper"))
        })
        .build();
    // For an hour they are functions of this process; then they are what the file says.
    let mut agents = loaded.agents.clone();
    for agent in &mut agents {
        agent.definition.work.action = Action::Handler;
    }
    engine.apply("files", "handlers", &agents).await.unwrap();
    engine.start().await.unwrap();
    for _ in 0..60 {
        engine.quiet().await;
        clock.advance(Duration::from_secs(60));
    }
    engine.quiet().await;
    let quiet = store.schedule("hello/quiet").await.unwrap().unwrap();
    store.pause(engine.now(), quiet.id, Some("too noisy"), None).await.unwrap();
    let now = engine.now();
    engine.stop(StopOptions::default()).await.unwrap();
    store.apply(now, "files", &loaded.digest, &loaded.agents).await.unwrap();
}

/// A run of `hello/often` that was claimed by a node of this test.
pub async fn claimed(store: &AnyStore) -> (NodeId, Claimed) {
    let now = whole(Timestamp::now());
    let node = Node {
        id: NodeId(Uuid::now_v7()),
        host: "here".into(),
        pid: std::process::id(),
        labels: Vec::new(),
        started_at: now,
        lease_until: now + belfry::SignedDuration::from_hours(1),
        fenced: false,
        draining: false,
        last_seen_at: now,
        max_concurrent: None,
        process: Default::default(),
    };
    store.join(&node, None).await.unwrap();
    let record = store.schedule("hello/often").await.unwrap().unwrap();
    enqueue(store, record.id, now).await;
    let lanes = vec![("cron".to_owned(), 1)];
    let mut claimed = store
        .claim(
            now,
            &Claim {
                node: node.id,
                lanes,
                total: u32::MAX,
                labels: Vec::new(),
                only: None,
                rescues: Rescues::Any,
            },
        )
        .await
        .unwrap();
    (node.id, claimed.pop().unwrap())
}

async fn enqueue(store: &AnyStore, schedule: ScheduleId, now: Timestamp) -> RunId {
    let found = store.definitions(&[schedule]).await.unwrap().pop().unwrap().unwrap();
    let compiled = found.compiled.unwrap();
    let id = RunId(Uuid::now_v7());
    let run =
        NewRun::by_hand(Defined::new(found.agent, schedule, &compiled, &found.agent_definition), id, now);
    assert_eq!(store.enqueue(now, &Enqueue { run, key: None }).await.unwrap(), Enqueued::Made);
    id
}

/// Stores keep microseconds.
pub fn whole(at: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(at.as_microsecond()).unwrap()
}

/// Ids are drawn; what is compared has letters for them.
pub fn masked(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((found, length)) = rest.char_indices().find_map(|(i, _)| {
        let is_id =
            |length: &usize| rest.get(i..i + length).is_some_and(|word| Uuid::parse_str(word).is_ok());
        Some(i).zip([36, 32].into_iter().find(is_id))
    }) {
        out.push_str(&rest[..found]);
        out.push_str("xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx");
        rest = &rest[found + length..];
    }
    out + rest
}

pub fn golden(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("BELFRY_GOLDEN").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let expected =
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(found == expected, "{name} differs.\n--- expected\n{expected}\n--- found\n{found}");
}
