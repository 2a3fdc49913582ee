//! An engine on every store, with a clock that is moved by hand and handlers that do as they are told.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use belfry::{AgentSpec, AnyStore, Engine, ManualClock, Options, StopOptions, Timestamp};
use belfry_store::memory::Memory;
use belfry_store::{RunFilter, RunRecord, Store};
use parking_lot::Mutex;
use tokio::sync::Notify;

#[path = "../../../../store/tests/support/pg.rs"]
pub mod pg;

/// What the handlers of an agent do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    Succeed,
    Fail,
    /// Runs until it is let go of, or cancelled.
    Wait,
}

/// A start, as its handler saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub name: String,
    pub tick_at: Option<Timestamp>,
    pub attempt: u32,
    pub at: Timestamp,
    pub prompt: String,
    pub payload: serde_json::Value,
}

pub struct World {
    pub store: Arc<AnyStore>,
    pub clock: ManualClock,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    pub does: Arc<Mutex<HashMap<String, Does>>>,
    pub let_go: Arc<Notify>,
}

pub fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

pub fn start() -> Timestamp {
    at("2026-03-02T12:00:00Z")
}

/// Runs a scenario on each kind of store.
pub async fn on_each<F: Future<Output = ()>>(scenario: impl Fn(World) -> F) {
    scenario(World::new(AnyStore::Memory(Memory::new()))).await;
    let folder = tempfile::tempdir().unwrap();
    let sqlite = format!("sqlite:{}/belfry.db", folder.path().display());
    scenario(World::new(AnyStore::open(&sqlite, true).await.unwrap())).await;
    if let Some(url) = pg::fresh_database() {
        let postgres = belfry_store::postgres::Postgres::open(&url).await.unwrap();
        scenario(World::new(AnyStore::Postgres(postgres))).await;
    }
}

impl World {
    fn new(store: AnyStore) -> World {
        World {
            store: Arc::new(store),
            clock: ManualClock::new(start()),
            seen: Arc::default(),
            does: Arc::default(),
            let_go: Arc::default(),
        }
    }

    /// An engine whose agents do as they are told. Not what is tried here: leases.
    pub async fn engine(&self, agents: &[AgentSpec]) -> Engine {
        self.engine_with(agents, Options::default()).await
    }

    pub async fn engine_with(&self, agents: &[AgentSpec], options: Options) -> Engine {
        let names: Vec<_> = agents.iter().map(|agent| agent.name.as_str()).collect();
        self.start(agents, &names, options).await
    }

    /// An engine with handlers for some agents of the store, which it leaves as they are.
    pub async fn engine_of(&self, names: &[&str]) -> Engine {
        self.start(&[], names, Options::default()).await
    }

    async fn start(&self, agents: &[AgentSpec], names: &[&str], options: Options) -> Engine {
        let options = Options { lease: Duration::from_secs(86_400 * 400), ..options };
        let mut builder = Engine::builder()
            .store(self.store.clone())
            .clock(self.clock.clone())
            .options(options)
            .agents(agents.to_vec());
        for name in names {
            let (seen, does, let_go, clock) =
                (self.seen.clone(), self.does.clone(), self.let_go.clone(), self.clock.clone());
            builder = builder.handler(*name, move |run| {
                let (seen, let_go) = (seen.clone(), let_go.clone());
                let name = format!("{}/{}", run.agent(), run.schedule());
                seen.lock().push(Seen {
                    name: name.clone(),
                    tick_at: run.tick_at(),
                    attempt: run.attempt(),
                    at: clock.now().wall,
                    prompt: run.prompt().to_owned(),
                    payload: run.payload().clone(),
                });
                let does = does.lock().get(&name).copied().unwrap_or(Does::Succeed);
                async move {
                    match does {
                        Does::Succeed => Ok(()),
                        Does::Fail => Err("told to fail".into()),
                        Does::Wait => {
                            tokio::select! {
                                () = let_go.notified() => {}
                                () = run.cancelled() => {}
                            }
                            Ok(())
                        }
                    }
                }
            });
        }
        let engine = builder.build();
        engine.start().await.unwrap();
        self.settle(&engine).await;
        engine
    }

    /// Waits until everything that can happen now has happened; what is told to wait goes on.
    pub async fn settle(&self, engine: &Engine) {
        if self.does.lock().values().any(|does| *does == Does::Wait) {
            engine.idle().await;
        } else {
            engine.quiet().await;
        }
    }

    /// Lets time pass in steps, and everything happen that is due at each.
    pub async fn pass(&self, engine: &Engine, time: Duration, step: Duration) {
        let mut left = time;
        while !left.is_zero() {
            let step = step.min(left);
            self.clock.advance(step);
            self.settle(engine).await;
            left -= step;
        }
    }

    pub fn tell(&self, name: &str, does: Does) {
        self.does.lock().insert(name.into(), does);
    }

    pub fn starts(&self, name: &str) -> Vec<Seen> {
        self.seen.lock().iter().filter(|seen| seen.name == name).cloned().collect()
    }

    pub async fn runs(&self) -> Vec<RunRecord> {
        let mut runs = Vec::new();
        for listed in self.store.runs(&RunFilter::default(), None, 1000).await.unwrap().items {
            // With what lists leave out.
            runs.extend(self.store.run(listed.id).await.unwrap());
        }
        runs.reverse();
        runs
    }
}

pub async fn stop(engine: &Engine) {
    engine.stop(StopOptions::default()).await.unwrap();
}
