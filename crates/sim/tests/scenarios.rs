//! Faults that seeds have found, as short scenarios. `a_draining_node_follows_the_clock_of_the_store` is in `src/slow.rs`, beside
//! the store with a clock that it needs. Those of one verb of one store are in the suite of the store, which runs
//! on all three:
//! - `a_repeated_backfill_does_not_spoil_a_plan`: PostgreSQL changed the timer before it knew that the run was there already.
//! - usage in `crates/store/tests/suite/sessions.rs`: PostgreSQL stored the usage of a report before it compared the epochs.
//! - `runs_that_an_edit_brings_under_a_limit_were_not_let_in_by_it`: PostgreSQL's integrity check counted them as too many.
//! - `a_tick_whose_run_lives_already_is_deferred_like_any_other`: the store in memory refused its plan.
//! - `a_run_that_has_come_back_keeps_its_place_when_the_clock_is_set_back`: runs that had had no attempt overtook it.
//! - `a_new_number_of_retries_holds_for_runs_that_exist`: a run waited for a second attempt of one.
//! - `a_run_that_comes_back_before_a_claim_notices_the_clock_does_not_wait_for_it`: it waited for as long as the step was.
//! - `a_run_that_reaches_the_store_after_the_clock_was_set_back_does_not_wait_for_it`: it waited for as long as the step was.
//! - `a_node_that_joins_again_keeps_its_mark` (578): it joined as one that drains, although it had been told to take work again.
//! - `after_the_clock_was_set_back_a_tick_that_was_deferred_comes_after_earlier_ones` (1126, by the seed alone): a run that was due
//!   at the very instant of the claim which noticed the step came after later ones.
//! - `plans_of_one_commit_send_one_probe` (7800): on PostgreSQL both plans sent a probe, if the first cancelled a run.
//!
//! Those of one rule are beside its home:
//! - `an_edit_by_a_clock_that_was_set_back_goes_on_after_the_last_tick_that_was_planned` in `crates/core/tests/edit.rs`: the new
//!   timing went on from the next tick of the old one, and lost its own ticks up to there.
//! - `a_plan_that_was_refused_for_a_run_that_has_ended_since_is_written_as_it_is` in `crates/store/src/apart.rs`: its schedule was
//!   made invalid.
//! - `a_schedule_that_comes_back_while_the_clock_is_behind_goes_on_after_its_last_tick` in `crates/core/tests/edit.rs`: its last
//!   tick fired once more.
//!
//! These were faults of a check, which is mended: the lane of a run that was claimed before an edit moved its agent to another
//! lane; calls by which a store notices a clock that was set back, and which the other store was not asked; a wait for the end
//! of a failure budget, and one for a window (44, 371), that looked like waits for a later clock; a run whose plan was still on
//! its way to the store (245), also by a node that had been frozen meanwhile (3359, 8449, 8991); messages in back-off, which hold
//! no turn (6982, 8935); the suspicion of a run that had come back otherwise since, which stores told differently and nobody
//! asks for (2200); a pause of a schedule that people leave alone, whose ticks were missed then.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use belfry::testing::{Ask, Driver, Effect, Input, Now, Options};
use belfry::{AgentDefinition, AgentSpec, NodeId, ScheduleDefinition, SignedDuration, Time, Timestamp, When};
use belfry_core::definition::Retry;
use belfry_core::retry::Outcome;
use belfry_core::{Reason, RunId};
use belfry_runner::Report;
use belfry_store::memory::Memory;
use belfry_store::{Drained, Enqueue, Error, Finished, NewRun, Node, NodeProcess, Renewed, Store, Written};
use parking_lot::Mutex;
use uuid::Uuid;

struct Clock(Mutex<Now>);

impl Time for Clock {
    fn now(&self) -> Now {
        *self.0.lock()
    }

    fn follow(&self, _: Timestamp) {}
}

impl Clock {
    fn advance(&self, seconds: u64) {
        let mut now = self.0.lock();
        now.wall += SignedDuration::from_secs(seconds as i64);
        now.mono += Duration::from_secs(seconds);
    }
}

/// A node on a store that answers at once, but for the ends of attempts: those are stored, and their answers are kept.
struct World {
    store: Memory,
    clock: Clock,
    driver: Driver,
    started: Vec<(RunId, i32)>,
    given_back: usize,
    finished: usize,
    keeps_answers: bool,
}

impl World {
    async fn step(&mut self, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            for effect in self.driver.step(self.clock.now(), input) {
                match effect {
                    Effect::Start { attempt, .. } => self.started.push((attempt.run, attempt.epoch)),
                    Effect::Ask(Ask::Finish(_)) if self.keeps_answers => self.finished += 1,
                    Effect::Ask(ask) => {
                        self.given_back += usize::from(matches!(ask, Ask::GiveBack(..)));
                        inputs.push(belfry::testing::carry_out(&self.store, &self.clock, ask).await);
                    }
                    _ => {}
                }
            }
        }
    }
}

fn node(started_at: Timestamp, lease_until: Timestamp) -> Node {
    Node {
        id: NodeId(Uuid::from_u128(2)),
        host: "here".into(),
        pid: 1,
        labels: Vec::new(),
        started_at,
        lease_until,
        fenced: false,
        draining: false,
        last_seen_at: started_at,
        max_concurrent: None,
        process: NodeProcess::default(),
    }
}

/// Seeds 429 and 463. A single node was draining when its lease lapsed, in an outage or frozen. Whoever lets it work again in
/// that time is told that it is dead, and the node goes on draining after its next renewal: one has to ask again. The
/// simulator did not.
#[tokio::test]
async fn a_draining_node_that_is_late_with_its_renewal_has_to_be_told_again_to_take_work() {
    let start: Timestamp = "2026-03-02T12:00:00Z".parse().unwrap();
    let at = |minutes| start + SignedDuration::from_mins(minutes);
    let store = Memory::new();
    let node = node(start, at(60));
    store.join(&node, None).await.unwrap();
    assert_eq!(store.drain(start, node.id, true).await.unwrap(), Drained::Marked { is_news: true });
    assert_eq!(store.drain(at(61), node.id, false).await.unwrap(), Drained::Dead);
    assert!(matches!(store.renew(node.id, at(122)).await.unwrap(), Renewed::Held { .. }));
    assert_eq!(store.marks(node.id).await.unwrap().draining, Some(true));
    assert_eq!(store.drain(at(62), node.id, false).await.unwrap(), Drained::Marked { is_news: true });
    assert_eq!(store.marks(node.id).await.unwrap().draining, Some(false));
}

/// Seed 200, beside PostgreSQL. A retention of `none` became the earliest instant there is, which PostgreSQL does not know: the
/// whole call failed, and nothing was ever removed.
#[test]
fn what_is_kept_for_ever_is_asked_for_by_an_instant_that_every_store_knows() {
    let start: Timestamp = "2026-03-02T12:00:00Z".parse().unwrap();
    let mut options = Options::default();
    let keep = &mut options.keep;
    (keep.runs, keep.failures, keep.skips, keep.runs_per_schedule) = (None, None, None, None);
    let prune_every = options.prune_every;
    let lease_until = start + SignedDuration::from_hours(1);
    let now = Now { wall: start, mono: Duration::ZERO };
    let mut driver =
        Driver::new(options, NodeId(Uuid::from_u128(2)), now, lease_until, Box::new(|_| Uuid::from_u128(3)));
    let now = Now { wall: start + SignedDuration::try_from(prune_every).unwrap(), mono: prune_every };
    let asked = driver.step(now, Input::Woken).into_iter().find_map(|effect| match effect {
        Effect::Ask(Ask::Prune { retention, .. }) => Some(retention),
        _ => None,
    });
    let asked = asked.expect("it prunes");
    for before in [asked.runs_before, asked.failures_before, asked.skips_before] {
        assert_eq!(before, Timestamp::UNIX_EPOCH);
    }
}

/// An end whose answer is lost is repeated. The same node had claimed the run again in between, and took the answer to the
/// repeated end, which is stale, for one about the new attempt: that was dropped and given back while it ran.
#[tokio::test]
async fn a_repeated_end_whose_answer_was_lost_leaves_the_next_attempt_alone() {
    let start: Timestamp = "2026-03-02T12:00:00Z".parse().unwrap();
    let clock = Clock(Mutex::new(Now { wall: start, mono: Duration::ZERO }));
    let store = Memory::new();
    let options = Options::default();
    let retry = Retry { max: 3, base_ms: 1_000, max_delay_ms: 1_000 };
    let agent = AgentSpec {
        name: "a".into(),
        definition: AgentDefinition { retry, ..AgentDefinition::default() },
        schedules: vec![("s".into(), ScheduleDefinition::new(When::Cron("0 0 1 1 *".into())))],
    };
    store.apply(start, "files", "1", &[agent]).await.unwrap();
    let (run, _) = belfry::testing::prepare(&store, &options, start, "a/s").await.unwrap();
    let run = NewRun { id: RunId(Uuid::from_u128(1)), ..run };
    store.enqueue(start, &Enqueue { run, key: None }).await.unwrap();
    let lease_until = start + SignedDuration::try_from(options.lease).unwrap();
    let node = node(start, lease_until);
    store.join(&node, None).await.unwrap();
    let ids = std::sync::atomic::AtomicU64::new(10);
    let new_id = move |_| Uuid::from_u128(u128::from(ids.fetch_add(1, std::sync::atomic::Ordering::Relaxed)));
    let lease = options.lease;
    let driver = Driver::new(options, node.id, clock.now(), lease_until, Box::new(new_id));
    let mut world =
        World { store, clock, driver, started: Vec::new(), given_back: 0, finished: 0, keeps_answers: true };
    world.step(Input::Woken).await;
    // It is alone.
    world.step(Input::Nodes(Ok(Vec::new()))).await;
    let (run, epoch) = world.started[0];

    // The first attempt fails. Its end is stored, and the answer is on its way.
    let failed = Outcome::Failed { reason: Reason::ExitCode, retryable: true };
    let report = Report { outcome: failed, exit_code: Some(1), error: None, summary: None, usage: None };
    world.step(Input::Ended { run, epoch, report }).await;
    assert_eq!(world.finished, 1);
    let finish = belfry_store::Finish {
        run,
        epoch,
        verdict: belfry_core::retry::Verdict::Retry { at: start },
        failed: true,
        exit_code: Some(1),
        error: None,
        summary: None,
        usage: None,
        arm: None,
    };
    let stored = world.store.finish(world.clock.now().wall, &[finish]).await.unwrap();
    assert_eq!(stored, [Finished::Pending]);

    // The second attempt starts, then the answer is lost: the end is repeated, and is stale.
    world.clock.advance(2);
    world.step(Input::Hint).await;
    assert_eq!(world.started, [(run, epoch), (run, epoch + 1)]);
    world.keeps_answers = false;
    let error = Error::Unavailable { detail: "lost".into(), ambiguous: true };
    let lost = Written { answers: vec![None], changed: Vec::new(), error: Some(error) };
    world.step(Input::Finished(lost)).await;
    for _ in 0..20 {
        world.clock.advance((lease / 4).as_secs().max(1));
        world.step(Input::Woken).await;
    }
    assert_eq!((world.started.len(), world.given_back), (2, 0), "the attempt goes on, and no other starts");
}
