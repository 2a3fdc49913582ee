//! One client of a store, with a clock of its own and ids that repeat: what the other parts of the suite drive.

use belfry_core::definition::{AnchorName, Breaker, Budget, CatchUp, IfRunning, Options, Retry, Scope, When};
use belfry_core::rescue::Rescues;
use belfry_core::retry::{Outcome, verdict};
use belfry_core::session::Message;
use belfry_core::{AgentDefinition, NodeId, Reason, RunId, ScheduleDefinition, Trigger, plan};
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

pub struct World<'a, S> {
    pub store: &'a S,
    pub now: Timestamp,
    pub ids: u128,
    /// Whether some of its texts are odd.
    pub odd: bool,
}

pub fn start() -> Timestamp {
    "2026-03-02T12:00:00Z".parse().unwrap()
}

pub fn node_id(n: u128) -> NodeId {
    NodeId(Uuid::from_u128(0x0dd5_0000 + n))
}

pub fn agent(name: &str, definition: AgentDefinition, schedules: &[(&str, ScheduleDefinition)]) -> AgentSpec {
    let schedules =
        schedules.iter().map(|(name, definition)| ((*name).to_owned(), definition.clone())).collect();
    AgentSpec { name: name.into(), definition, schedules }
}

pub fn schedule(when: When, options: Options) -> ScheduleDefinition {
    ScheduleDefinition { when, options }
}

/// Text that stores might keep differently; mostly none.
pub fn odd_text(n: usize) -> Option<String> {
    match n % 12 {
        0 => Some("a\0b".into()),
        1 => Some("\u{FFFF}\u{1}\u{FFFD}\r\n\u{2028}".into()),
        2 => Some("ü\0".repeat(2_100)),
        3 => Some("\\u0000 \\ud800".into()),
        _ => None,
    }
}

/// By age alone.
pub fn retention(before: Timestamp, failures_before: Timestamp, batch: u32) -> Retention {
    Retention {
        runs_before: before,
        failures_before,
        runs_per_schedule: None,
        after: None,
        skips_before: before,
        output_before: before,
        retired_before: before,
        batch,
    }
}

pub fn every(interval: &str) -> ScheduleDefinition {
    ScheduleDefinition::new(When::Every(interval.into()))
}

pub fn cron(expression: &str) -> ScheduleDefinition {
    ScheduleDefinition::new(When::Cron(expression.into()))
}

pub fn chat(value: serde_json::Value) -> ScheduleDefinition {
    ScheduleDefinition::new(When::Chat(value))
}

pub fn unlimited() -> AgentDefinition {
    AgentDefinition { max_concurrent: None, ..AgentDefinition::default() }
}

/// Agents and schedules of every kind and policy. `variant` edits some of them.
pub fn fleet(variant: usize) -> Vec<AgentSpec> {
    let options = |if_running, overlap| Options { if_running, overlap, ..Options::default() };
    let limited = AgentDefinition {
        max_concurrent: Some(1 + variant as u32 % 3),
        limits_sessions: variant.is_multiple_of(2),
        retry: Retry { max: 1, ..Retry::default() },
        lane: if variant % 4 == 1 { "main" } else { "cron" }.into(),
        ..AgentDefinition::default()
    };
    let fragile = AgentDefinition {
        breaker: (variant % 5 != 3).then_some(Breaker { threshold: 2, reset_after_ms: 600_000 }),
        budget: match variant % 6 {
            4 => None,
            2 => Some(Budget { max: 5, period_ms: 3_600_000 }),
            _ => Some(Budget { max: 3, period_ms: 3_600_000 }),
        },
        retry: Retry { max: if variant.is_multiple_of(2) { 0 } else { 2 }, ..Retry::default() },
        max_concurrent: if variant % 3 == 1 { Some(2) } else { None },
        ..AgentDefinition::default()
    };
    let scope = [Scope::Schedule, Scope::Agent, Scope::Command][variant / 2 % 3];
    let hook = match variant % 4 {
        2 => options(IfRunning::Queue, scope),
        3 => options(IfRunning::Cancel, scope),
        0 => options(IfRunning::Allow, scope),
        _ => Options::default(),
    };
    let mut agents = vec![
        agent(
            "limited",
            limited,
            &[
                ("completion", every(if variant.is_multiple_of(5) { "1m" } else { "90s" })),
                (
                    "start",
                    schedule(
                        When::Every("30s".into()),
                        Options { anchor: AnchorName::Start, ..options(IfRunning::Queue, Scope::Schedule) },
                    ),
                ),
                (
                    "slot",
                    schedule(
                        When::Every("2m".into()),
                        Options {
                            anchor: AnchorName::Slot,
                            enabled: !variant.is_multiple_of(4),
                            priority: 2,
                            ..Options::default()
                        },
                    ),
                ),
                (
                    "talk",
                    chat(
                        serde_json::json!({"mode": if variant.is_multiple_of(3) { "interrupt" } else { "queue" }, "debounce": "0s", "drop": "new", "cap": 3}),
                    ),
                ),
                (
                    "agentwide",
                    schedule(
                        When::Cron("*/3 * * * *".into()),
                        options(
                            if variant % 5 == 2 { IfRunning::Queue } else { IfRunning::Skip },
                            Scope::Agent,
                        ),
                    ),
                ),
            ],
        ),
        agent(
            "fragile",
            fragile,
            &[
                ("cancel", schedule(When::Cron("* * * * *".into()), options(IfRunning::Cancel, scope))),
                (
                    "command",
                    schedule(
                        When::Cron("*/2 * * * *".into()),
                        Options {
                            command: "sync".into(),
                            catch_up: Some(CatchUp::RunAll),
                            catch_up_limit: 5,
                            ..options(IfRunning::Queue, Scope::Command)
                        },
                    ),
                ),
                (
                    "jittered",
                    schedule(
                        When::Every("1m".into()),
                        Options {
                            jitter: Some("20s".into()),
                            anchor: AnchorName::Slot,
                            ..Options::default()
                        },
                    ),
                ),
            ],
        ),
        agent(
            "free",
            AgentDefinition {
                lane: "main".into(),
                needs: vec![if variant % 8 == 6 { "tpu" } else { "gpu" }.into()],
                ..unlimited()
            },
            &[
                (
                    "allow",
                    schedule(
                        When::Cron("* * * * *".into()),
                        Options {
                            catch_up: Some(CatchUp::RunOnce),
                            ..options(IfRunning::Allow, Scope::Schedule)
                        },
                    ),
                ),
                (
                    "once",
                    schedule(
                        When::After("5m".into()),
                        Options { delete_after_run: variant.is_multiple_of(2), ..Options::default() },
                    ),
                ),
                ("hook", schedule(When::Webhook(serde_json::json!({})), hook)),
                (
                    "talk",
                    chat(
                        serde_json::json!({"cap": 2, "debounce": "5s", "max_concurrent": 1 + variant % 2, "max_bytes": "1KiB"}),
                    ),
                ),
                ("broken", cron(if variant % 3 == 1 { "0 0 30 2 *" } else { "30 * * * *" })),
            ],
        ),
    ];
    if variant % 7 == 3 {
        agents.remove(2);
    }
    if variant % 6 == 5 {
        agents[0].schedules.pop();
    }
    agents
}

impl<'a, S: Store> World<'a, S> {
    pub fn new(store: &'a S) -> World<'a, S> {
        World { store, now: start(), ids: 0, odd: false }
    }

    /// Ids from another range, so that they do not repeat from one process to the next.
    pub fn ids_from(&mut self, first: u128) {
        self.ids = first;
    }

    pub fn run_id(&mut self) -> RunId {
        self.ids += 1;
        RunId(Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_0000 + self.ids))
    }

    pub fn advance(&mut self, ms: i64) {
        self.now += SignedDuration::from_millis(ms);
    }

    pub async fn apply(&self, agents: &[AgentSpec]) -> Applied {
        self.store.apply(self.now, "files", "digest", agents).await.unwrap()
    }

    pub async fn schedule(&self, name: &str) -> ScheduleRecord {
        self.store.schedule(name).await.unwrap().unwrap_or_else(|| panic!("no schedule {name}"))
    }

    /// Decides about a due schedule as a planner does.
    pub fn decide(&mut self, due: &Due) -> Commit {
        match due.compiled.clone() {
            Ok(schedule) => {
                let plan = plan(&schedule, &due.standing, &due.facts(self.now), self.now);
                due.commit(&schedule, plan, || self.run_id())
            }
            Err(reason) => due.invalid(&reason),
        }
    }

    /// Plans all that is due, until nothing is. Gives the number of runs made.
    pub async fn plan_all(&mut self) -> usize {
        let mut made = 0;
        for _ in 0..100 {
            let due = self.store.due(self.now, None, 100).await.unwrap();
            if due.is_empty() {
                return made;
            }
            for due in &Due::take_turns(due) {
                let commit = self.decide(due);
                if self.store.commit(self.now, std::slice::from_ref(&commit)).await.unwrap()
                    == [Committed::Held]
                {
                    made += commit.runs.len();
                }
            }
        }
        panic!("planning does not come to an end");
    }

    pub async fn join(&self, n: u128) -> NodeId {
        let node = Node {
            id: node_id(n),
            host: "here".into(),
            pid: n as u32,
            labels: vec!["gpu".into()],
            started_at: self.now,
            lease_until: self.now + SignedDuration::from_secs(30),
            fenced: false,
            draining: false,
            last_seen_at: self.now,
            max_concurrent: Some(n as u32 + 10),
            process: NodeProcess {
                boot_id: "boot".into(),
                pid_ns: "pid:[1]".into(),
                start_time: u64::from(n as u32) + (1 << 40),
                state_dir: "/var/lib/bel'fry".into(),
                version: "0.1.0-x".into(),
                lease_ms: 30_000 + n as u64,
            },
        };
        self.store.join(&node, None).await.unwrap();
        node.id
    }

    /// As a node without a rescued run that has yet to start.
    pub async fn claim(&self, node: NodeId, slots: u32) -> Vec<Claimed> {
        self.claim_with(node, slots, Rescues::Any).await
    }

    pub async fn claim_with(&self, node: NodeId, slots: u32, rescues: Rescues) -> Vec<Claimed> {
        self.claim_in_total(node, slots, u32::MAX, rescues).await
    }

    pub async fn claim_in_total(
        &self,
        node: NodeId,
        slots: u32,
        total: u32,
        rescues: Rescues,
    ) -> Vec<Claimed> {
        let claim = Claim {
            node,
            lanes: vec![("cron".into(), slots), ("main".into(), slots)],
            total,
            labels: vec!["gpu".into()],
            only: None,
            rescues,
        };
        self.store.claim(self.now, &claim).await.unwrap()
    }

    pub async fn claim_only(&self, node: NodeId, run: RunId) -> Vec<Claimed> {
        let claim = Claim {
            node,
            lanes: Vec::new(),
            total: 1,
            labels: vec!["gpu".into()],
            only: Some(run),
            rescues: Rescues::Any,
        };
        self.store.claim(self.now, &claim).await.unwrap()
    }

    pub fn outcome(&self, claimed: &Claimed, outcome: Outcome) -> Finish {
        let retry = Retry::default();
        let failed = matches!(outcome, Outcome::Failed { .. });
        Finish {
            run: claimed.run,
            epoch: claimed.epoch,
            verdict: verdict(outcome, claimed.run, claimed.attempt, claimed.max_attempts, &retry, self.now),
            failed,
            exit_code: Some(i32::from(failed)),
            error: failed.then(|| format!("attempt {} failed", claimed.attempt)),
            summary: None,
            usage: None,
            arm: None,
        }
    }

    pub async fn finish(&self, claimed: &Claimed, outcome: Outcome) -> Finished {
        self.store.finish(self.now, &[self.outcome(claimed, outcome)]).await.unwrap()[0]
    }

    pub async fn complete(&self, claimed: &Claimed) -> Finished {
        self.finish(claimed, Outcome::Completed).await
    }

    pub async fn fail(&self, claimed: &Claimed) -> Finished {
        self.finish(claimed, Outcome::Failed { reason: Reason::ExitCode, retryable: true }).await
    }

    async fn by_hand(&mut self, name: &str, not_before: Timestamp) -> NewRun {
        let record = self.schedule(name).await;
        let id = self.run_id();
        let compiled = record.definition.compile(name).unwrap();
        let definition =
            self.store.definitions(&[record.id]).await.unwrap().remove(0).unwrap().agent_definition;
        NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, &definition), id, not_before)
    }

    /// A run by hand in a lane of its own.
    pub async fn enqueue_in(&mut self, name: &str, lane: &str) -> RunId {
        let run = self.by_hand(name, self.now).await;
        let run = NewRun { lane: lane.into(), own_lane: true, ..run };
        let request = Enqueue { run, key: None };
        assert_eq!(self.store.enqueue(self.now, &request).await.unwrap(), Enqueued::Made);
        request.run.id
    }

    /// A run by hand.
    pub async fn enqueue(&mut self, name: &str, key: Option<(&str, u8)>) -> (RunId, Enqueued) {
        self.enqueue_at(name, self.now, key).await
    }

    /// A run by hand that is to start at an instant.
    pub async fn enqueue_at(
        &mut self,
        name: &str,
        not_before: Timestamp,
        key: Option<(&str, u8)>,
    ) -> (RunId, Enqueued) {
        let request = self.request_at(name, not_before, key).await;
        (request.run.id, self.store.enqueue(self.now, &request).await.unwrap())
    }

    /// A request for a run by hand that is to start at an instant.
    pub async fn request_at(
        &mut self,
        name: &str,
        not_before: Timestamp,
        key: Option<(&str, u8)>,
    ) -> Enqueue {
        let mut run = self.by_hand(name, not_before).await;
        if let Some(odd) = odd_text(self.ids as usize).filter(|_| self.odd) {
            run.payload = serde_json::json!({"odd": odd});
            run.prompt = Some(odd);
        }
        if self.odd && self.ids.is_multiple_of(9) {
            // As a retry by hand does whose schedule has another command now.
            run.command = "old".into();
        }
        if self.odd && self.ids.is_multiple_of(7) {
            (run.lane, run.own_lane) = ("main".into(), true);
        }
        let key = key.map(|(key, body)| Key {
            key: key.into(),
            body_hash: vec![body],
            expires_at: self.now + SignedDuration::from_hours(24),
        });
        Enqueue { run, key }
    }

    /// A run for a tick of the past.
    pub async fn backfill(
        &mut self,
        name: &str,
        tick_at: Timestamp,
        key: Option<(&str, u8)>,
    ) -> (RunId, Enqueued) {
        let request = self.past_request(name, tick_at, key).await;
        (request.run.id, self.store.enqueue(self.now, &request).await.unwrap())
    }

    /// A request for a run for a tick of the past.
    pub async fn past_request(&mut self, name: &str, tick_at: Timestamp, key: Option<(&str, u8)>) -> Enqueue {
        let record = self.schedule(name).await;
        let id = self.run_id();
        let definitions = self.store.definitions(&[record.id]).await.unwrap().remove(0).unwrap();
        let compiled = definitions.compiled.unwrap();
        let run = NewRun {
            tick_at: Some(tick_at),
            trigger: Trigger::Backfill,
            ..NewRun::by_hand(
                Defined::new(record.agent, record.id, &compiled, &definitions.agent_definition),
                id,
                self.now,
            )
        };
        let expires_at = self.now + SignedDuration::from_mins(20);
        let key = key.map(|(key, body)| Key { key: key.into(), body_hash: vec![body], expires_at });
        Enqueue { run, key }
    }

    /// A message for a session, as what is asked of it makes it.
    pub async fn send(
        &mut self,
        name: &str,
        session: &str,
        text: &str,
        change: impl FnOnce(&mut NewMessage),
    ) -> Sent {
        let record = self.schedule(name).await;
        let compiled = record.definition.compile(name).unwrap();
        let definition =
            self.store.definitions(&[record.id]).await.unwrap().remove(0).unwrap().agent_definition;
        let ids = (record.agent, record.id);
        let mut message = NewMessage {
            run: NewRun::of_message(
                Defined::new(ids.0, ids.1, &compiled, &definition),
                self.run_id(),
                self.now,
                None,
            ),
            session: session.into(),
            text: text.into(),
            message: Message::default(),
            policy: compiled.chat.unwrap(),
            key: None,
        };
        change(&mut message);
        self.store.send(self.now, &message).await.unwrap()
    }

    pub async fn session(&self, name: &str, key: &str, verb: SessionVerb) -> SessionDone {
        let schedule = self.schedule(name).await.id;
        self.store.session(self.now, schedule, key, verb).await.unwrap().unwrap()
    }

    pub async fn assert_whole(&self) {
        let found = self.store.integrity().await.unwrap();
        assert!(found.is_empty(), "{found:?}");
    }
}
