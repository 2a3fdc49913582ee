//! Many clients at once, with cancels, retries and lost nodes. What they were answered is judged afterwards: no limit was
//! ever exceeded, nobody was overtaken at a gate, nobody was forgotten there.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use belfry_core::definition::{Retry, When};
use belfry_core::rescue::Rescues;
use belfry_core::retry::Verdict;
use belfry_core::{AgentDefinition, NodeId, Reason, RunId, RunState, ScheduleDefinition};
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

use super::Random;
use super::world::agent;

const AGENTS: usize = 20;
const CLIENTS: usize = 8;
/// No more wait at once than this.
const WAITING_MAX: i64 = 400;
/// Whoever is overtaken is overtaken by one of the next so many.
const LOOK_AHEAD: usize = 200;

/// What the judge found.
#[derive(Debug, Default)]
pub struct Verdicts {
    pub enqueued: u64,
    pub claims: u64,
    pub limit_breaches: u64,
    pub order_breaches: u64,
    /// Runs that nobody could claim although nothing stood in the way.
    pub left: u64,
    /// Broken promises among the rows.
    pub integrity: Vec<String>,
}

impl Verdicts {
    pub fn is_clean(&self) -> bool {
        self.limit_breaches + self.order_breaches + self.left == 0 && self.integrity.is_empty()
    }
}

/// How long the clients are let loose: from the environment, else a few seconds.
pub fn duration() -> Duration {
    let seconds = std::env::var("BELFRY_MANY_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(8))
}

/// A gate as its clients see it.
struct Gate {
    name: String,
    cap: i64,
    running: AtomicI64,
}

/// The life of a run as its clients saw it.
struct Seen {
    gate: usize,
    not_before: Timestamp,
    acknowledged: Instant,
    /// The call that claimed its first attempt.
    claimed: Option<(Instant, Instant)>,
}

struct Arena<S> {
    gates: Vec<Gate>,
    schedules: Vec<ScheduleRecord>,
    seen: parking_lot::Mutex<HashMap<RunId, Seen>>,
    limit_breaches: AtomicU64,
    claims: AtomicU64,
    draining: AtomicBool,
    over: AtomicBool,
    ids: AtomicU64,
    waiting: AtomicI64,
    store: Arc<S>,
}

fn now() -> Timestamp {
    Timestamp::from_millisecond(Timestamp::now().as_millisecond()).unwrap()
}

fn definition(cap: u32) -> AgentDefinition {
    AgentDefinition {
        max_concurrent: Some(cap),
        retry: Retry { max: 3, ..Retry::default() },
        ..AgentDefinition::default()
    }
}

/// Lets the clients loose for a while, then lets them work off what is left, and judges.
pub async fn loose<S: Store>(store: Arc<S>, seed: u64, duration: Duration) -> Verdicts {
    let cap = |n: usize| 1 + n as u32 % 3;
    let hook = ScheduleDefinition::new(When::Webhook(serde_json::json!({})));
    let specs: Vec<_> = (0..AGENTS)
        .map(|n| agent(&format!("agent{n}"), definition(cap(n)), &[("hook", hook.clone())]))
        .collect();
    store.apply(now(), "files", "digest", &specs).await.unwrap();
    let mut schedules = Vec::new();
    for spec in &specs {
        schedules.push(store.schedule(&format!("{}/hook", spec.name)).await.unwrap().unwrap());
    }
    let gates = specs.iter().enumerate().map(|(n, spec)| Gate {
        name: spec.name.clone(),
        cap: i64::from(cap(n)),
        running: AtomicI64::new(0),
    });
    let arena = Arc::new(Arena {
        gates: gates.collect(),
        schedules,
        seen: parking_lot::Mutex::default(),
        limit_breaches: AtomicU64::new(0),
        claims: AtomicU64::new(0),
        draining: AtomicBool::new(false),
        over: AtomicBool::new(false),
        ids: AtomicU64::new(0),
        waiting: AtomicI64::new(0),
        store,
    });
    let clients: Vec<_> = (0..CLIENTS)
        .map(|n| tokio::spawn(client(arena.clone(), Random(seed.wrapping_add(n as u64 * 7919)))))
        .collect();
    tokio::time::sleep(duration).await;
    arena.draining.store(true, Ordering::SeqCst);
    let counts = async || arena.store.counts().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline && counts().await.pending + counts().await.running > 0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    arena.over.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    let left = counts().await;
    let seen = std::mem::take(&mut *arena.seen.lock());
    Verdicts {
        enqueued: seen.len() as u64,
        claims: arena.claims.load(Ordering::SeqCst),
        limit_breaches: arena.limit_breaches.load(Ordering::SeqCst),
        order_breaches: overtaken(&seen),
        left: left.pending + left.running,
        integrity: arena.store.integrity().await.unwrap(),
    }
}

/// Runs that were certainly claimable when a later one of the same gate was claimed, and were not.
fn overtaken(seen: &HashMap<RunId, Seen>) -> u64 {
    let mut breaches = 0;
    let mut by_gate: HashMap<usize, Vec<&Seen>> = HashMap::new();
    for run in seen.values().filter(|run| run.claimed.is_some()) {
        by_gate.entry(run.gate).or_default().push(run);
    }
    for mut runs in by_gate.into_values() {
        runs.sort_by_key(|run| run.not_before);
        for (i, early) in runs.iter().enumerate() {
            let Some((early_start, _)) = early.claimed else { continue };
            let overtakes = |late: &&&Seen| {
                late.not_before > early.not_before
                    && late
                        .claimed
                        .is_some_and(|(start, end)| early.acknowledged < start && end < early_start)
            };
            breaches += runs[i + 1..].iter().take(LOOK_AHEAD).filter(overtakes).count() as u64;
        }
    }
    breaches
}

async fn client<S: Store>(arena: Arc<Arena<S>>, mut random: Random) {
    let mut node = join(&arena).await;
    let mut running: Vec<Claimed> = Vec::new();
    while !arena.over.load(Ordering::SeqCst) {
        let draining = arena.draining.load(Ordering::SeqCst);
        match random.below(100) {
            0..=34 if !draining => enqueue(&arena, &mut random).await,
            35..=66 => claim(&arena, node, &mut random, &mut running).await,
            67..=68 if !draining => node = lose_node(&arena, node, &mut running).await,
            69..=72 if !draining => cancel(&arena, &mut random).await,
            _ => finish(&arena, &mut random, &mut running, draining).await,
        }
        tokio::task::yield_now().await;
    }
}

async fn join<S: Store>(arena: &Arena<S>) -> NodeId {
    let id = NodeId(Uuid::from_u128(0xffff_0000 + u128::from(arena.ids.fetch_add(1, Ordering::SeqCst))));
    let lease_until = now() + SignedDuration::from_hours(1);
    let node = Node {
        id,
        host: "here".into(),
        pid: 1,
        labels: Vec::new(),
        started_at: now(),
        lease_until,
        fenced: false,
        draining: false,
        last_seen_at: now(),
        max_concurrent: None,
        process: Default::default(),
    };
    arena.store.join(&node, None).await.unwrap();
    id
}

async fn enqueue<S: Store>(arena: &Arena<S>, random: &mut Random) {
    if arena.waiting.load(Ordering::SeqCst) >= WAITING_MAX {
        return;
    }
    arena.waiting.fetch_add(1, Ordering::SeqCst);
    let gate = random.below(AGENTS);
    let id = RunId(Uuid::from_u128(
        u128::from(random.next()) << 64 | u128::from(arena.ids.fetch_add(1, Ordering::SeqCst)),
    ));
    let record = &arena.schedules[gate];
    let compiled = record.definition.compile(&record.name).unwrap();
    let not_before = now();
    let run = NewRun::by_hand(
        Defined::new(record.agent, record.id, &compiled, &definition(arena.gates[gate].cap as u32)),
        id,
        not_before,
    );
    assert_eq!(arena.store.enqueue(not_before, &Enqueue { run, key: None }).await.unwrap(), Enqueued::Made);
    arena.seen.lock().insert(id, Seen { gate, not_before, acknowledged: Instant::now(), claimed: None });
}

async fn claim<S: Store>(arena: &Arena<S>, node: NodeId, random: &mut Random, running: &mut Vec<Claimed>) {
    let claim = Claim {
        node,
        lanes: vec![("cron".into(), 1 + random.below(8) as u32)],
        labels: Vec::new(),
        total: u32::MAX,
        only: None,
        rescues: Rescues::Any,
    };
    let start = Instant::now();
    let claimed = arena.store.claim(now(), &claim).await.unwrap();
    let end = Instant::now();
    arena.claims.fetch_add(claimed.len() as u64, Ordering::SeqCst);
    for claimed in claimed {
        let gate = arena.schedules.iter().position(|record| record.agent == claimed.agent).unwrap();
        if arena.gates[gate].running.fetch_add(1, Ordering::SeqCst) + 1 > arena.gates[gate].cap {
            arena.limit_breaches.fetch_add(1, Ordering::SeqCst);
        }
        if claimed.attempt == 1
            && claimed.epoch == 1
            && let Some(seen) = arena.seen.lock().get_mut(&claimed.run)
        {
            seen.claimed = Some((start, end));
            arena.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        running.push(claimed);
    }
}

/// It stops counting here before the store knows, so that what is counted is never more than what runs.
fn stop_counting<S>(arena: &Arena<S>, claimed: &Claimed) {
    let gate = arena.schedules.iter().position(|record| record.agent == claimed.agent).unwrap();
    arena.gates[gate].running.fetch_sub(1, Ordering::SeqCst);
}

async fn finish<S: Store>(arena: &Arena<S>, random: &mut Random, running: &mut Vec<Claimed>, draining: bool) {
    if running.is_empty() {
        return;
    }
    let claimed = running.swap_remove(random.below(running.len()));
    stop_counting(arena, &claimed);
    let verdict = match random.below(10) {
        0 | 1 if !draining && claimed.attempt < claimed.max_attempts => {
            Verdict::Retry { at: now() + SignedDuration::from_millis(random.below(20) as i64) }
        }
        2 if !draining => Verdict::Return,
        _ => Verdict::End { state: RunState::Completed, reason: None },
    };
    let finish = Finish {
        run: claimed.run,
        epoch: claimed.epoch,
        verdict,
        failed: false,
        exit_code: None,
        error: None,
        summary: None,
        usage: None,
        arm: None,
    };
    let answers = arena.store.finish(now(), &[finish]).await.unwrap();
    assert_ne!(answers, [Finished::Stale], "nobody else had this claim");
}

async fn cancel<S: Store>(arena: &Arena<S>, random: &mut Random) {
    let waiting = {
        let seen = arena.seen.lock();
        let waiting: Vec<RunId> =
            seen.iter().filter(|(_, run)| run.claimed.is_none()).map(|(id, _)| *id).take(50).collect();
        random.pick(&waiting)
    };
    if let Some(run) = waiting
        && arena.store.cancel(now(), run, Reason::Requested).await.unwrap() == Cancelled::Ended
    {
        arena.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The node is lost with all it ran, and another comes in its place.
async fn lose_node<S: Store>(arena: &Arena<S>, node: NodeId, running: &mut Vec<Claimed>) -> NodeId {
    for claimed in running.drain(..) {
        stop_counting(arena, &claimed);
    }
    let lease =
        arena.store.nodes().await.unwrap().into_iter().find(|known| known.id == node).unwrap().lease_until;
    arena.store.fence(now(), node, lease).await.unwrap().unwrap();
    join(arena).await
}
