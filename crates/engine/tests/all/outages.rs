//! A store that cannot be written for a while: what runs goes on, and what it writes is not lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use belfry::event::Name;
use belfry::{AgentBuilder, AnyStore, Engine, Options, RunId, RunRequest, StopOptions, When};
use belfry_core::RunState;
use belfry_store::{RunRecord, Store};

use crate::support::pg;

/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(90);

/// A run that writes a numbered line every few milliseconds, until it has written as many as it may.
struct Writer {
    engine: Engine,
    store: Arc<AnyStore>,
    run: RunId,
    written: Arc<AtomicUsize>,
    wanted: Arc<AtomicUsize>,
}

impl Writer {
    async fn start(store: AnyStore, lease: Duration) -> Writer {
        let store = Arc::new(store);
        let (written, wanted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(usize::MAX)));
        let (count, limit) = (written.clone(), wanted.clone());
        let agent = AgentBuilder::new("a")
            .schedule("s", When::Cron("0 0 1 1 *".into()))
            .define(|agent| agent.retry.max = 0)
            .build();
        let engine = Engine::builder()
            .store(store.clone())
            .agents([agent])
            .options(Options { lease, ..Options::default() })
            .handler("a", move |run| {
                let (count, limit) = (count.clone(), limit.clone());
                async move {
                    while count.load(Ordering::SeqCst) < limit.load(Ordering::SeqCst) {
                        run.log(format!("line {}", count.load(Ordering::SeqCst))).await;
                        count.fetch_add(1, Ordering::SeqCst);
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    Ok(())
                }
            })
            .build();
        engine.start().await.unwrap();
        let run = engine.trigger("a/s", RunRequest::default()).await.unwrap().run;
        Writer { engine, store, run, written, wanted }
    }

    async fn has_written(&self, lines: usize) {
        let enough = async {
            while self.written.load(Ordering::SeqCst) < lines {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(DEADLINE, enough).await.expect("the run goes on");
    }

    /// Lets it write a few lines more, and waits for its end. Every line must be stored.
    async fn ends(&self) -> RunRecord {
        let lines = self.written.load(Ordering::SeqCst) + 20;
        self.wanted.store(lines, Ordering::SeqCst);
        let ended = async {
            loop {
                match self.store.run(self.run).await {
                    Ok(Some(run)) if !run.state.is_live() => return run,
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let ended = tokio::time::timeout(DEADLINE, ended).await.expect("the run ends");
        let (mut text, mut after) = (String::new(), None);
        loop {
            let chunks = self.store.output(self.run, after, 1 << 20).await.unwrap();
            let Some(last) = chunks.last() else { break };
            after = Some(last.seq);
            chunks.iter().for_each(|chunk| text.push_str(&String::from_utf8_lossy(&chunk.bytes)));
        }
        let stored: Vec<&str> = text.lines().collect();
        let wanted: Vec<String> = (0..stored.len().max(lines)).map(|n| format!("line {n}")).collect();
        assert_eq!(stored, wanted);
        self.engine.stop(StopOptions::default()).await.unwrap();
        ended
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_is_kept_while_the_database_is_away() {
    let Some(mut server) = pg::Own::fresh() else { return };
    let store = belfry_store::postgres::Postgres::open(&server.url()).await.unwrap();
    let writer = Writer::start(AnyStore::Postgres(store), Duration::from_secs(30)).await;
    writer.has_written(20).await;
    let before = writer.written.load(Ordering::SeqCst);
    let server = tokio::task::spawn_blocking(move || {
        server.kill_and_restart();
        server
    });
    let _server = server.await.unwrap();
    writer.has_written(before + 20).await;
    let ended = writer.ends().await;
    assert_eq!((ended.state, ended.attempt), (RunState::Completed, 1), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_another_process_has_locked_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("belfry.db");
    let store = AnyStore::open(&format!("sqlite:{}", path.display()), true).await.unwrap();
    let lease = Duration::from_secs(3);
    let writer = Writer::start(store, lease).await;
    let mut events = writer.engine.events();
    writer.has_written(20).await;
    let other = rusqlite::Connection::open(&path).unwrap();
    other.busy_timeout(DEADLINE).unwrap();
    other.execute_batch("begin immediate").unwrap();
    // No event tells that nothing happens: for much longer than the lease.
    tokio::time::sleep(lease * 4).await;
    other.execute_batch("rollback").unwrap();
    let mut told = Vec::new();
    let is_over = async {
        while told.last() != Some(&Name::StoreAvailable) {
            told.extend(events.recv().await.ok().map(|event| event.event).filter(is_of_outage));
        }
    };
    tokio::time::timeout(DEADLINE, is_over).await.expect("the outage ends");
    let ended = writer.ends().await;
    assert_eq!((ended.state, ended.attempt), (RunState::Completed, 1), "{ended:?}");
    told.extend(std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.event).filter(is_of_outage));
    assert_eq!(told, [Name::StoreUnavailable, Name::StoreAvailable], "the outage is told once");
}

fn is_of_outage(event: &Name) -> bool {
    matches!(event, Name::StoreUnavailable | Name::StoreAvailable)
}
