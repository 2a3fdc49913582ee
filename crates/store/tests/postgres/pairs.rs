//! Every pair of verbs that may share a lock: one is held in the middle while the other comes, and then all that waits must still
//! come to its end.
//!
//! A quarter of the pairs, by the seed; `BELFRY_PAIRS=all` for all of them. The points are after the first statement and before the commit. Both orders of each pair are tried. Whatever the two
//! answer, the rows keep their promises afterwards, nobody is left parked, and nothing takes longer than a lock should.

use std::sync::Arc;
use std::time::Duration;

use crate::suite::world::{World, agent, chat, retention, schedule};
use belfry_core::definition::{Breaker, Budget, IfRunning, Options, When};
use belfry_core::rescue::Rescues;
use belfry_core::retry::Outcome;
use belfry_core::session::Usage;
use belfry_core::{AgentDefinition, NodeId, Reason, RunId};
use belfry_store::pauses::Point;
use belfry_store::postgres::Postgres;
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};
use serde_json::json;

use crate::{pg, suite};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Commit,
    Enqueue,
    Claim,
    ClaimElsewhere,
    ClaimOnly,
    Finish,
    Retry,
    FinishMessage,
    CancelRunning,
    CancelWaiting,
    GiveBack,
    Fence,
    Send,
    Stop,
    StopAll,
    Reset,
    Use,
    Pause,
    Edit,
    SetLane,
    ClearLane,
    Prune,
}

const VERBS: [Verb; 22] = [
    Verb::Commit,
    Verb::Enqueue,
    Verb::Claim,
    Verb::ClaimElsewhere,
    Verb::ClaimOnly,
    Verb::Finish,
    Verb::Retry,
    Verb::FinishMessage,
    Verb::CancelRunning,
    Verb::CancelWaiting,
    Verb::GiveBack,
    Verb::Fence,
    Verb::Send,
    Verb::Stop,
    Verb::StopAll,
    Verb::Reset,
    Verb::Use,
    Verb::Pause,
    Verb::Edit,
    Verb::SetLane,
    Verb::ClearLane,
    Verb::Prune,
];

/// A second is far more than any of them needs; locks of a database are noticed to be crossed after one.
const PROMPT: Duration = Duration::from_millis(900);
/// How long one is given to run into the lock of the other.
const MEANWHILE: Duration = Duration::from_millis(40);

/// All that two verbs may meet at: an agent with one place and books, a schedule that queues, a session, a lane.
struct Stage {
    store: Arc<Postgres>,
    name: String,
    now: Timestamp,
    ids: u128,
    nodes: [NodeId; 2],
    running: Claimed,
    talking: Claimed,
    waiting: RunId,
    due: Commit,
}

fn spec(name: &str, limit: u32) -> AgentSpec {
    let definition = AgentDefinition {
        max_concurrent: Some(limit),
        limits_sessions: true,
        breaker: Some(Breaker { threshold: 100, reset_after_ms: 1000 }),
        budget: Some(Budget { max: 1000, period_ms: 1000 }),
        lane: name.into(),
        ..AgentDefinition::default()
    };
    let options = Options { if_running: IfRunning::Queue, ..Options::default() };
    let talk = Options { lane: Some(name.into()), ..Options::default() };
    agent(
        name,
        definition,
        &[
            ("tick", schedule(When::Every("1h".into()), options)),
            ("talk", schedule(chat(json!({"debounce": "0s"})).when, talk)),
        ],
    )
}

impl Stage {
    async fn set(store: &Arc<Postgres>, n: u128, now: Timestamp) -> Stage {
        let mut world = World::new(&**store);
        (world.now, _) = (now, world.ids_from(n * 10_000));
        let name = format!("a{n}");
        // Two places: one for the schedule, one for the session; all else waits.
        store.apply(now, &name, "", &[spec(&name, 2)]).await.unwrap();
        let nodes = [world.join(n * 10).await, world.join(n * 10 + 1).await];
        let tick = world.schedule(&format!("{name}/tick")).await;
        let due = store.due(now, None, 1000).await.unwrap();
        let due = due.into_iter().find(|due| due.schedule == tick.id).unwrap();
        let due = world.decide(&due);
        let (first, _) = enqueue(&mut world, &format!("{name}/tick")).await;
        for text in ["one", "two", "three"] {
            world.send(&format!("{name}/talk"), "ada", text, |_| {}).await;
        }
        let claimed = claim(store, now, nodes[0], &name, 5).await;
        assert_eq!(claimed.len(), 2);
        let (waiting, _) = enqueue(&mut world, &format!("{name}/tick")).await;
        // It meets the full gates, and is parked.
        assert_eq!(claim(store, now, nodes[1], &name, 5).await, []);
        let running = claimed.iter().find(|claimed| claimed.run == first).unwrap().clone();
        let talking = claimed.into_iter().find(|claimed| claimed.run != first).unwrap();
        Stage {
            store: store.clone(),
            name,
            now,
            ids: n * 10_000 + 500,
            nodes,
            running,
            talking,
            waiting,
            due,
        }
    }

    /// Does a verb; what it answers is its own business.
    async fn act(&self, verb: Verb, offset: u128) {
        let (store, now) = (&*self.store, self.now);
        let mut world = World::new(store);
        (world.now, _) = (now, world.ids_from(self.ids + offset));
        let tick = format!("{}/tick", self.name);
        let talk = format!("{}/talk", self.name);
        let failed = Outcome::Failed { reason: Reason::ExitCode, retryable: true };
        match verb {
            Verb::Commit => drop(store.commit(now, std::slice::from_ref(&self.due)).await.unwrap()),
            Verb::Enqueue => drop(enqueue(&mut world, &tick).await),
            Verb::Claim => drop(claim(store, now, self.nodes[0], &self.name, 5).await),
            Verb::ClaimElsewhere => drop(claim(store, now, self.nodes[1], &self.name, 5).await),
            Verb::ClaimOnly => drop(world.claim_only(self.nodes[1], self.waiting).await),
            Verb::Finish => drop(world.complete(&self.running).await),
            Verb::Retry => drop(world.finish(&self.running, failed).await),
            Verb::FinishMessage => drop(world.complete(&self.talking).await),
            Verb::CancelRunning => {
                store.cancel(now, self.running.run, Reason::Requested).await.unwrap();
            }
            Verb::CancelWaiting => {
                store.cancel(now, self.waiting, Reason::Requested).await.unwrap();
            }
            Verb::GiveBack => {
                let runs = [(self.running.run, self.running.epoch), (self.talking.run, self.talking.epoch)];
                store.give_back(now, self.nodes[0], &runs).await.unwrap();
            }
            Verb::Fence => {
                let nodes = store.nodes().await.unwrap();
                if let Some(node) = nodes.iter().find(|node| node.id == self.nodes[0]) {
                    store.fence(now, node.id, node.lease_until).await.unwrap();
                }
            }
            Verb::Send => drop(world.send(&talk, "ada", "more", |_| {}).await),
            Verb::Stop => drop(world.session(&talk, "ada", SessionVerb::Stop).await),
            Verb::StopAll => drop(world.session(&talk, "ada", SessionVerb::StopAll).await),
            Verb::Reset => drop(world.session(&talk, "ada", SessionVerb::Reset).await),
            Verb::Use => {
                let usage = Usage { tokens: 9, context_window: 10 };
                world.session(&talk, "ada", SessionVerb::Use(usage)).await;
            }
            Verb::Pause => {
                let id = world.schedule(&tick).await.id;
                store.pause(now, id, None, None).await.unwrap();
            }
            Verb::Edit => drop(store.apply(now, &self.name, "", &[spec(&self.name, 1)]).await.unwrap()),
            Verb::SetLane => {
                let settings = LaneSettings { slots: 5, limit: Some(3), queue_limit: None };
                store.set_lane(now, &self.name, Some(settings)).await.unwrap();
            }
            Verb::ClearLane => drop(store.clear_lane(now, &self.name).await.unwrap()),
            Verb::Prune => drop(store.prune(now, &retention(now, now, 100)).await.unwrap()),
        }
    }

    /// Ends all that is left, as nodes would that go on; says what would not.
    async fn drain(&self, n: u128) -> Vec<RunRecord> {
        let store = &*self.store;
        let mut world = World::new(store);
        world.now = self.now + SignedDuration::from_hours(1);
        let fresh = world.join(n * 10 + 5).await;
        let own = async || {
            let live = store.live_runs().await.unwrap().into_iter();
            live.filter(|run| run.agent_name == self.name).collect::<Vec<_>>()
        };
        for _ in 0..20 {
            for run in own().await.into_iter().filter(|run| run.node.is_some()) {
                let ended =
                    Claimed { run: run.id, epoch: run.epoch, attempt: run.attempt, ..self.running.clone() };
                world.complete(&ended).await;
            }
            let claimed = claim(store, world.now, fresh, &self.name, 5).await;
            if claimed.is_empty() && own().await.is_empty() {
                return Vec::new();
            }
        }
        own().await
    }
}

async fn enqueue(world: &mut World<'_, Postgres>, name: &str) -> (RunId, Enqueued) {
    let record = world.schedule(name).await;
    let id = world.run_id();
    let compiled = record.definition.compile(name).unwrap();
    let definitions = world.store.definitions(&[record.id]).await.unwrap().remove(0).unwrap();
    let run = NewRun::by_hand(
        Defined::new(record.agent, record.id, &compiled, &definitions.agent_definition),
        id,
        world.now,
    );
    (id, world.store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap())
}

async fn claim(store: &Postgres, now: Timestamp, node: NodeId, lane: &str, slots: u32) -> Vec<Claimed> {
    let claim = Claim {
        node,
        lanes: vec![(lane.into(), slots)],
        labels: vec!["gpu".into()],
        total: u32::MAX,
        only: None,
        rescues: Rescues::Any,
    };
    store.claim(now, &claim).await.unwrap()
}

/// One verb is held at a point while another comes.
async fn pair(store: &Arc<Postgres>, n: u128, held: Verb, other: Verb, point: Point) {
    let stage = Arc::new(Stage::set(store, n, suite::world::start()).await);
    let what = format!("{held:?} held at {point:?} while {other:?} comes");
    let hold = store.pauses().hold(point);
    let first = tokio::spawn({
        let stage = stage.clone();
        async move { stage.act(held, 1).await }
    });
    // Some verbs read before they change anything, or find nothing to change: these are not held.
    let mut reached = hold.reached;
    let _ = tokio::time::timeout(PROMPT, async {
        while !first.is_finished() && reached.try_recv().is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let mut second = tokio::spawn({
        let stage = stage.clone();
        async move { stage.act(other, 100).await }
    });
    let early = tokio::time::timeout(MEANWHILE, &mut second).await;
    drop(hold.go);
    let both = async {
        first.await.unwrap_or_else(|error| panic!("{what}: {error}"));
        match early {
            Ok(done) => done,
            Err(_) => second.await,
        }
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    };
    tokio::time::timeout(PROMPT, both).await.unwrap_or_else(|_| panic!("{what}: they wait for each other"));
    // Nobody else is to be held by what was not reached.
    drop(store.pauses().hold(Point::Begun));
    let left = stage.drain(n).await;
    assert!(left.is_empty(), "{what}: left behind: {left:#?}");
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new(), "{what}");
}

async fn all_pairs(point: Point) {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let all = std::env::var_os("BELFRY_PAIRS").is_some_and(|pairs| pairs == "all");
    let (mut n, part) = (1, suite::seed() as usize);
    for (row, held) in VERBS.into_iter().enumerate() {
        for (column, other) in VERBS.into_iter().enumerate() {
            if all || (row + column + part).is_multiple_of(4) {
                pair(&store, n, held, other, point).await;
                n += 1;
            }
        }
        // What has ended is only in the way.
        let later = suite::world::start() + SignedDuration::from_hours(9);
        while store.prune(later, &retention(later, later, 1000)).await.unwrap().runs > 0 {}
        store.apply(later, &format!("a{}", n - 1), "", &[]).await.unwrap();
    }
    println!("{} pairs", n - 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pair_loses_anything_when_one_has_all_but_committed() {
    all_pairs(Point::Ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pair_loses_anything_when_one_has_just_begun() {
    all_pairs(Point::Begun).await;
}

/// A manual run that waited for a plan finds another token than it came for. It must change that one: else whoever planned on
/// it meanwhile, without knowing of the run, would be believed.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waited_for_a_plan_is_known_to_the_next_plan() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let mut world = World::new(&*store);
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", suite::world::cron("*/5 * * * *"))])]).await;
    world.plan_all().await;
    world.advance(5 * 60_000);
    let now = world.now;
    let later = now + SignedDuration::from_mins(5);
    let first = store.due(now, None, 1).await.unwrap();
    let first = world.decide(&first[0]);
    assert_eq!(first.runs.len(), 1);
    let planning = store.pauses().hold(Point::Ready);
    let planner = tokio::spawn({
        let store = store.clone();
        async move { store.commit(now, &[first]).await.unwrap() }
    });
    planning.reached.await.unwrap();
    // It runs into the lock of the plan, and is held in turn once it has what it waited for.
    let asking = store.pauses().hold(Point::Ready);
    let asker = tokio::spawn({
        let store = store.clone();
        async move {
            let mut world = World::new(&*store);
            (world.now, _) = (now, world.ids_from(1000));
            enqueue(&mut world, "a/s").await.1
        }
    });
    tokio::time::sleep(MEANWHILE).await;
    planning.go.send(()).unwrap();
    assert_eq!(planner.await.unwrap(), [Committed::Held]);
    asking.reached.await.unwrap();
    let second = store.due(later, None, 1).await.unwrap();
    assert_eq!(second[0].live, 1, "the run that was asked for is not there yet");
    world.now = later;
    let second = world.decide(&second[0]);
    asking.go.send(()).unwrap();
    assert_eq!(asker.await.unwrap(), Enqueued::Made);
    assert_eq!(store.commit(later, &[second]).await.unwrap(), [Committed::Lost]);
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
}
