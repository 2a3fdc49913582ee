//! Random operations on a store and on the one in memory: every answer must be the same.

use std::collections::BTreeMap;

use belfry_core::edit::Resume;
use belfry_core::rescue::Rescues;
use belfry_core::retry::Outcome;
use belfry_core::session::{Mode, RunUsage, Usage};
use belfry_core::{AgentDefinition, Reason, RunId};
use belfry_store::memory::Memory;
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};
use serde_json::json;

use super::Random;
use super::hooks::knock_of;
use super::listing::{all_runs, all_schedules};
use super::world::*;

/// One side of the comparison.
struct Side<'a, S> {
    world: World<'a, S>,
    /// Names by the numbers this store gave out.
    names: BTreeMap<i64, String>,
    claimed: Vec<Claimed>,
    /// Plans that were decided and not yet committed.
    kept: Vec<Commit>,
    runs: Vec<RunId>,
    /// Where pruning goes on.
    walked: Option<RunId>,
    /// The last tick of each schedule that has made a run.
    planned: BTreeMap<i64, Timestamp>,
}

const NAMES: [&str; 17] = [
    "limited/completion",
    "limited/start",
    "limited/slot",
    "limited/agentwide",
    "fragile/cancel",
    "fragile/command",
    "fragile/jittered",
    "free/allow",
    "free/once",
    "free/hook",
    "free/broken",
    "limited/api",
    "free/api",
    "limited/talk",
    "free/talk",
    "made/one",
    "made/two",
];

/// Schedules that messages go to.
const CHATS: [&str; 2] = ["limited/talk", "free/talk"];

/// Schedules whose past ticks are asked for.
const TICKED: [&str; 3] = ["limited/slot", "free/allow", "fragile/cancel"];

/// Schedules that requests from outside come for.
const KNOCKED: [&str; 6] =
    ["free/hook", "free/allow", "limited/start", "limited/agentwide", "fragile/cancel", "fragile/command"];

/// What the API puts there.
const PUT: [(&str, &str); 3] = [("limited", "api"), ("free", "api"), ("free", "once")];

/// What the API puts, or tries to.
const MADE: [&str; 2] = ["free", "made"];

#[derive(Debug, Clone)]
enum Operation {
    Advance(i64),
    Apply(usize),
    Plan(u32),
    KeepPlan,
    CommitKept,
    Enqueue(usize, Option<usize>),
    /// Several at once: which schedule, with which key, for a tick so many minutes ago.
    EnqueueMany(Vec<(usize, Option<usize>, Option<i64>)>),
    Backfill {
        which: usize,
        minutes: i64,
        key: Option<usize>,
    },
    Knock {
        which: usize,
        max_pending: u32,
        signed: Option<usize>,
        key: Option<usize>,
    },
    Claim(u128, u32, Rescues, u32),
    Finish {
        which: usize,
        outcome: usize,
        stale: bool,
    },
    Cancel(usize),
    GiveBack(usize),
    Join(u128),
    Renew(u128),
    Drain(u128, bool),
    Fence(u128),
    Pause(usize, Option<i64>),
    Resume(usize, Resume),
    Prune,
    ResetBreaker,
    ResetBudget,
    Put(usize, usize),
    Remove(usize),
    PutAgent {
        whose: usize,
        variant: usize,
        whole: bool,
    },
    RemoveAgent(usize),
    Append {
        which: usize,
        stale: bool,
    },
    Send {
        chat: usize,
        session: usize,
        how: usize,
    },
    Session {
        chat: usize,
        session: usize,
        verb: usize,
    },
    SetLane(usize, Option<(Option<u32>, Option<u32>)>),
    ClearLane(usize),
}

fn operation(random: &mut Random) -> Operation {
    match random.below(139) {
        136..=138 => {
            let mut one = |_| {
                let key = random.chance(30).then(|| random.below(3));
                match random.chance(40) {
                    true => (random.below(TICKED.len()), key, Some(random.below(4) as i64)),
                    false => (random.below(NAMES.len()), key, None),
                }
            };
            Operation::EnqueueMany((0..6).map(&mut one).collect())
        }
        126..=128 => Operation::Backfill {
            which: random.below(TICKED.len()),
            minutes: random.below(4) as i64,
            key: random.chance(60).then(|| random.below(3)),
        },
        129..=135 => Operation::Knock {
            which: random.below(KNOCKED.len()),
            max_pending: random.below(3) as u32,
            signed: random.chance(30).then(|| random.below(3)),
            key: random.chance(40).then(|| random.below(6)),
        },
        100..=109 => {
            Operation::Send { chat: random.below(2), session: random.below(2), how: random.below(12) }
        }
        110..=115 => {
            Operation::Session { chat: random.below(2), session: random.below(2), verb: random.below(8) }
        }
        116..=118 => {
            let mut most = |percent| random.chance(percent).then(|| random.below(4) as u32);
            let (limit, queue_limit) = (most(40), most(60));
            Operation::SetLane(random.below(2), random.chance(80).then_some((limit, queue_limit)))
        }
        119 => Operation::ClearLane(random.below(2)),
        122..=124 => {
            let (whose, variant) = (random.below(4).min(1), random.below(8));
            Operation::PutAgent { whose, variant, whole: random.chance(50) }
        }
        125 => Operation::RemoveAgent(random.below(3).min(1)),
        120..=121 => Operation::Drain(random.below(4) as u128, random.chance(60)),
        0..=14 => Operation::Plan(1 + random.below(20) as u32),
        15..=16 => Operation::Put(random.below(PUT.len()), random.below(4)),
        17 => Operation::Remove(random.below(NAMES.len())),
        18..=19 => Operation::Append { which: random.below(1000), stale: random.chance(20) },
        20..=29 => {
            let ms =
                [100, 1_000, 10_000, 60_000, 120_000, 600_000, 60_000, 120_000, 600_000][random.below(9)];
            // A step back by less may count as a claim that comes late.
            Operation::Advance(if random.chance(8) { -ms.max(10_000) } else { ms })
        }
        30..=47 => {
            let total = if random.chance(30) { random.below(5) as u32 } else { u32::MAX };
            let rescues = match random.below(10) {
                0..2 => Rescues::None,
                2 => Rescues::Soon,
                3..5 => Rescues::Unsuspected,
                _ => Rescues::Any,
            };
            Operation::Claim(random.below(3) as u128, random.below(4) as u32, rescues, total)
        }
        48..=69 => {
            Operation::Finish { which: random.below(1000), outcome: random.below(7), stale: random.chance(5) }
        }
        70..=74 => Operation::Enqueue(random.below(NAMES.len()), random.chance(40).then(|| random.below(3))),
        75..=79 => Operation::Cancel(random.below(1000)),
        80..=81 => Operation::GiveBack(random.below(1000)),
        82..=83 => Operation::Join(random.below(3) as u128),
        84 => Operation::Renew(random.below(3) as u128),
        85..=86 => Operation::Fence(random.below(3) as u128),
        87..=88 => Operation::Pause(
            random.below(NAMES.len()),
            random.chance(60).then(|| [5_000, 61_000, 600_000][random.below(3)]),
        ),
        89..=91 => {
            let how = [Resume::Skip, Resume::CatchUp, Resume::FromNow][random.below(7).min(6) / 3];
            Operation::Resume(random.below(NAMES.len()), how)
        }
        92 => Operation::Apply(random.below(40)),
        93 => Operation::Prune,
        94 => Operation::ResetBreaker,
        95 => Operation::ResetBudget,
        96..=97 => Operation::KeepPlan,
        _ => Operation::CommitKept,
    }
}

/// Runs `count` operations on both stores and compares all answers.
pub async fn equal_answers<S: Store + Hooks>(store: &S, seed: u64, count: usize) {
    let memory = Memory::new();
    let mut random = Random(seed);
    let (mut ours, mut theirs) = (Side::new(store), Side::new(&memory));
    for n in 0..count {
        let operation = match n {
            0 => Operation::Apply(0),
            1..=3 => Operation::Join(n as u128 - 1),
            _ => operation(&mut random),
        };
        // The clock of every other round is set back at times. By then ends are in no order of age, by which one prunes.
        let operation = match operation {
            Operation::Advance(ms) if seed.is_multiple_of(2) => Operation::Advance(ms.abs()),
            Operation::Prune if !seed.is_multiple_of(2) => continue,
            operation => operation,
        };
        let (answer, expected) = (ours.take(&operation).await, theirs.take(&operation).await);
        assert_eq!(answer, expected, "seed {seed}, operation {n}: {operation:?}");
        if n % 25 == 0 || n + 1 == count {
            let lists = n % 500 == 0 || n + 1 == count;
            let (state, expected) = (ours.snapshot(lists).await, theirs.snapshot(lists).await);
            if state != expected {
                let only = |a: &[String], b: &[String]| {
                    a.iter().filter(|line| !b.contains(line)).cloned().collect::<Vec<_>>()
                };
                let order = state.iter().zip(&expected).find(|(one, other)| one != other);
                let order = order.map(|(one, other)| format!("{one}\ninstead of\n{other}"));
                let (found, expected) = (only(&state, &expected), only(&expected, &state));
                panic!(
                    "seed {seed}: after operation {n} ({operation:?}) the stores differ:\nfound {found:#?}\nexpected {expected:#?}\nfirst {}",
                    order.unwrap_or_default()
                );
            }
            let broken = store.integrity().await.unwrap();
            assert!(broken.is_empty(), "seed {seed}: after operation {n} ({operation:?}): {broken:#?}");
        }
    }
}

impl<'a, S: Store + Hooks> Side<'a, S> {
    fn new(store: &'a S) -> Side<'a, S> {
        Side {
            world: World { odd: true, ..World::new(store) },
            names: BTreeMap::new(),
            claimed: Vec::new(),
            kept: Vec::new(),
            runs: Vec::new(),
            walked: None,
            planned: BTreeMap::new(),
        }
    }

    async fn take(&mut self, operation: &Operation) -> String {
        let store = self.world.store;
        let now = self.world.now;
        match operation {
            Operation::Advance(ms) => {
                self.world.advance(*ms);
                String::new()
            }
            Operation::Apply(variant) => {
                let applied = self.world.apply(&fleet(*variant)).await;
                self.learn_names().await;
                format!("{applied:?}")
            }
            Operation::Plan(limit) => {
                let due = Due::take_turns(store.due(now, None, *limit).await.unwrap());
                let mut words = Vec::new();
                for due in &due {
                    // Nobody asks what lives of a schedule that cannot be read.
                    let facts = due
                        .compiled
                        .as_ref()
                        .ok()
                        .map(|_| (due.live, due.pending, due.breaker, due.budget, due.last_start));
                    words.push(format!("{} {:?} {facts:?}", due.name, due.standing));
                    let commit = self.world.decide(due);
                    self.runs.extend(commit.runs.iter().map(|run| run.id));
                    // The run of one of its ticks may live, because somebody has made up for that: every store refuses it.
                    let committed = match store.commit(now, std::slice::from_ref(&commit)).await {
                        Ok(committed) => committed,
                        Err(error) if error.is_refused() => {
                            words.push("refused".into());
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    };
                    self.note_ticks(&[commit], &committed);
                    words.push(format!("{committed:?}"));
                }
                words.join("\n")
            }
            Operation::KeepPlan => {
                // As a node does that has more than a batch to plan.
                let mut due = store.due(now, None, 3).await.unwrap();
                if let Some(mark) = due.last().map(Due::mark) {
                    due.extend(store.due(now, Some(mark), 3).await.unwrap());
                }
                let commits: Vec<Commit> = due.iter().map(|due| self.world.decide(due)).collect();
                self.kept.extend(commits);
                String::new()
            }
            Operation::CommitKept => {
                let kept = std::mem::take(&mut self.kept);
                self.runs.extend(kept.iter().flat_map(|commit| commit.runs.iter().map(|run| run.id)));
                let committed = match store.commit(now, &kept).await {
                    Ok(committed) => committed,
                    Err(error) if error.is_refused() => return "refused".into(),
                    Err(error) => panic!("{error}"),
                };
                self.note_ticks(&kept, &committed);
                format!("{committed:?}")
            }
            Operation::Enqueue(which, key) => {
                let name = NAMES[*which];
                let readable = store
                    .schedule(name)
                    .await
                    .unwrap()
                    .is_some_and(|record| record.definition.compile(name).is_ok());
                if !readable {
                    return "none".into();
                }
                let key = key.map(|key| (["a", "b", "c"][key], (which % 2) as u8));
                let (run, answer) = self.world.enqueue(name, key).await;
                self.runs.push(run);
                format!("{answer:?}")
            }
            Operation::EnqueueMany(requests) => {
                let mut asked = Vec::new();
                for (which, key, minutes) in requests {
                    let name = if minutes.is_some() { TICKED[*which] } else { NAMES[*which] };
                    let record = store.schedule(name).await.unwrap();
                    if record.is_none_or(|record| record.definition.compile(name).is_err()) {
                        continue;
                    }
                    let key = key.map(|key| (["a", "b", "c"][key], (which % 2) as u8));
                    asked.push(match minutes {
                        Some(minutes) => {
                            let tick_at = start() - SignedDuration::from_mins(1 + minutes);
                            self.world.past_request(name, tick_at, key).await
                        }
                        None => self.world.request_at(name, now, key).await,
                    });
                }
                self.runs.extend(asked.iter().map(|request| request.run.id));
                format!("{:?}", store.enqueue_many(now, &asked).await.unwrap())
            }
            Operation::Backfill { which, minutes, key } => {
                let name = TICKED[*which];
                if store.schedule(name).await.unwrap().is_none() {
                    return "none".into();
                }
                // Behind everything that the planner may still come upon.
                let tick_at = start() - SignedDuration::from_mins(1 + minutes);
                let key = key.map(|key| (["a", "b", "c"][key], (minutes % 2) as u8));
                let (run, answer) = self.world.backfill(name, tick_at, key).await;
                self.runs.push(run);
                format!("{answer:?}")
            }
            Operation::Knock { which, max_pending, signed, key } => {
                let name = KNOCKED[*which];
                if store.schedule(name).await.unwrap().is_none() {
                    return "none".into();
                }
                let signed = signed.map(|signed| ["s", "t", "u"][signed]);
                let mut knock = knock_of(&mut self.world, name, signed).await;
                knock.options.max_pending = 1 + max_pending;
                let expires_at = now + SignedDuration::from_mins(15);
                knock.keys.extend(key.map(|key| Key {
                    key: ["a", "b", "c"][key % 3].into(),
                    body_hash: vec![(key / 3) as u8],
                    expires_at,
                }));
                self.runs.push(knock.run.id);
                format!("{:?}", store.knock(now, &knock).await.unwrap())
            }
            Operation::Claim(node, slots, rescues, total) => {
                let claimed = self.world.claim_in_total(node_id(*node), *slots, *total, *rescues).await;
                let words: Vec<_> = claimed.iter().map(|claimed| self.claimed_words(claimed)).collect();
                self.claimed.extend(claimed);
                words.join("\n")
            }
            Operation::Finish { which, outcome, stale } => {
                if self.claimed.is_empty() {
                    return String::new();
                }
                let place = which % self.claimed.len();
                let mut claimed =
                    if *stale { self.claimed[place].clone() } else { self.claimed.remove(place) };
                claimed.epoch -= i32::from(*stale);
                let failed = |retryable| Outcome::Failed { reason: Reason::ExitCode, retryable };
                let outcome = [
                    Outcome::Completed,
                    failed(true),
                    failed(true),
                    failed(false),
                    Outcome::Cancelled(Reason::Requested),
                    Outcome::Shutdown,
                    Outcome::NotStarted,
                ][*outcome];
                let mut finish = self.world.outcome(&claimed, outcome);
                if let Some(odd) = odd_text(*which) {
                    finish.error = finish.error.map(|error| error + &odd);
                    finish.summary = Some(odd);
                } else if which % 5 == 4 {
                    let (tokens, context_window) = (Some(*which as u64), Some(1_000));
                    finish.usage = Some(RunUsage { tokens, context_window, cost_usd: Some(0.25) });
                } else if which % 100 == 50 {
                    finish.error = finish.error.map(|_| "x".repeat(1 << 20));
                }
                format!("{:?}", self.world.store.finish(now, &[finish]).await.unwrap())
            }
            Operation::Cancel(which) => {
                let Some(run) = self.runs.get(which % self.runs.len().max(1)).copied() else {
                    return String::new();
                };
                format!("{:?}", store.cancel(now, run, Reason::Requested).await.unwrap())
            }
            Operation::GiveBack(which) => {
                let Some(claimed) = self.claimed.get(which % self.claimed.len().max(1)) else {
                    return String::new();
                };
                let given = [(claimed.run, claimed.epoch)];
                let mut words = String::new();
                for node in 0..3 {
                    words.push_str(&format!(
                        "{:?} ",
                        store.give_back(now, node_id(node), &given).await.unwrap()
                    ));
                }
                words
            }
            Operation::Join(node) => {
                // A node that was fenced comes back as another process would: under its name, for this test.
                self.world.join(*node).await;
                String::new()
            }
            Operation::Renew(node) => {
                let marks = store.marks(node_id(*node)).await.unwrap();
                let renewed = store.renew(node_id(*node), now + SignedDuration::from_secs(30)).await.unwrap();
                format!("{marks:?} {renewed:?}")
            }
            Operation::Drain(node, draining) => {
                format!("{:?}", store.drain(now, node_id(*node), *draining).await.unwrap())
            }
            Operation::Fence(node) => {
                let nodes = store.nodes().await.unwrap();
                let Some(node) = nodes.iter().find(|known| known.id == node_id(*node)) else {
                    return "gone".into();
                };
                format!("{:?}", store.fence(now, node.id, node.lease_until).await.unwrap())
            }
            Operation::Pause(which, until) => match store.schedule(NAMES[*which]).await.unwrap() {
                Some(record) => {
                    let until = until.map(|ms| now + SignedDuration::from_millis(ms));
                    let reason = odd_text(*which).unwrap_or_else(|| "because".into());
                    format!("{}", store.pause(now, record.id, Some(&reason), until).await.unwrap())
                }
                None => "none".into(),
            },
            Operation::Resume(which, how) => match store.schedule(NAMES[*which]).await.unwrap() {
                Some(record) => {
                    let resumed = store.resume(now, record.id, *how).await.unwrap();
                    if *how == Resume::FromNow && resumed.is_some() {
                        self.planned.remove(&record.id);
                    }
                    format!("{resumed:?}")
                }
                None => "none".into(),
            },
            Operation::Prune => {
                let ago = |minutes| now - SignedDuration::from_mins(minutes);
                let retention = Retention {
                    runs_per_schedule: Some(6),
                    after: self.walked,
                    skips_before: ago(60),
                    output_before: ago(5),
                    retired_before: ago(10),
                    ..retention(ago(30), ago(90), 1000)
                };
                let pruned = store.prune(now, &retention).await.unwrap();
                self.walked = pruned.next;
                format!("{pruned:?}")
            }
            Operation::ResetBreaker => match store.schedule("fragile/cancel").await.unwrap() {
                Some(record) => format!("{}", store.reset_breaker(now, record.agent, "poll").await.unwrap()),
                None => "none".into(),
            },
            Operation::Put(which, variant) => {
                let (agent, name) = PUT[*which];
                let definitions = [every("1m"), every("45s"), cron("*/2 * * * *"), cron("0 0 30 2 *")];
                let expect = match (which + variant) % 3 {
                    0 => {
                        let seen = definitions[(variant + 1) % 4].clone();
                        Expect::Same { revision: 1, definition: Box::new(seen) }
                    }
                    _ => Expect::Any,
                };
                let put =
                    store.put_schedule(now, agent, name, &definitions[*variant], &expect).await.unwrap();
                self.learn_names().await;
                match put {
                    Put::Added(_) => "added".into(),
                    Put::Changed(_) => "changed".into(),
                    Put::Unchanged(_) => "unchanged".into(),
                    other => format!("{other:?}"),
                }
            }
            Operation::Remove(which) => match store.schedule(NAMES[*which]).await.unwrap() {
                Some(record) => {
                    format!("{:?}", store.remove_schedule(now, record.id, &Expect::Any).await.unwrap())
                }
                None => "none".into(),
            },
            Operation::PutAgent { whose, variant, whole } => {
                let max_concurrent = [Some(1), Some(2), None][variant % 3];
                let definition = AgentDefinition { max_concurrent, ..AgentDefinition::default() };
                let schedules = [("one", every("1m")), ("two", cron("*/2 * * * *")), ("one", every("45s"))];
                let put = agent(MADE[*whose], definition, &schedules[*variant % 2..][..1 + variant / 6]);
                let put = store.put_agent(now, &put, *whole, &Expect::Any).await.unwrap();
                self.learn_names().await;
                format!("{put:?}")
            }
            Operation::RemoveAgent(whose) => {
                format!("{:?}", store.remove_agent(now, MADE[*whose], &Expect::Any).await.unwrap())
            }
            Operation::Append { which, stale } => {
                let Some(claimed) = self.claimed.get(which % self.claimed.len().max(1)) else {
                    return String::new();
                };
                let chunk = OutputChunk {
                    seq: OutputChunk::first_seq(claimed.epoch) + *which as u64 % 3,
                    attempt: claimed.attempt,
                    stream: Stream::Out,
                    bytes: which.to_string().into(),
                };
                let epoch = claimed.epoch - i32::from(*stale);
                let kept = store.append_output(claimed.run, epoch, &[chunk]).await.unwrap();
                format!("{kept} {:?}", store.output(claimed.run, None, 5).await.unwrap())
            }
            Operation::Send { chat, session, how } => {
                self.send(CHATS[*chat], ["x", "y"][*session], *how).await
            }
            Operation::Session { chat, session, verb } => {
                let used = |tokens| SessionVerb::Use(Usage { tokens, context_window: 100 });
                let verb = match verb {
                    0..=2 => SessionVerb::Stop,
                    3 => SessionVerb::StopAll,
                    4 => SessionVerb::Reset,
                    5 => used(80),
                    _ => used(10),
                };
                match store.schedule(CHATS[*chat]).await.unwrap() {
                    Some(record) => {
                        let key = ["x", "y"][*session];
                        format!("{:?}", store.session(now, record.id, key, verb).await.unwrap())
                    }
                    None => "none".into(),
                }
            }
            Operation::SetLane(which, limit) => {
                let settings =
                    limit.map(|(limit, queue_limit)| LaneSettings { slots: 5, limit, queue_limit });
                store.set_lane(now, ["cron", "main"][*which], settings).await.unwrap();
                String::new()
            }
            Operation::ClearLane(which) => {
                format!("{:?}", store.clear_lane(now, ["cron", "main"][*which]).await.unwrap())
            }
            Operation::ResetBudget => match store.schedule("fragile/cancel").await.unwrap() {
                Some(record) => format!("{}", store.reset_budget(now, record.agent).await.unwrap()),
                None => "none".into(),
            },
        }
    }

    /// No tick makes a run after a later one has, whatever the clock did.
    fn note_ticks(&mut self, commits: &[Commit], committed: &[Committed]) {
        let held = commits.iter().zip(committed).filter(|(_, answer)| **answer == Committed::Held);
        for (commit, run) in held.flat_map(|(commit, _)| commit.runs.iter().map(move |run| (commit, run))) {
            let before = self.planned.insert(commit.schedule, run.tick_at.unwrap());
            assert!(before < run.tick_at, "{commit:?} after {before:?}");
        }
    }

    /// A message in one of many ways.
    async fn send(&mut self, name: &str, session: &str, how: usize) -> String {
        let now = self.world.now;
        let Some(record) = self.world.store.schedule(name).await.unwrap() else { return "none".into() };
        let text = odd_text(how).unwrap_or_else(|| format!("message {how}"));
        let sent = self
            .world
            .send(name, session, &text, |new| match how {
                0 => new.message.mode = Some(Mode::Interrupt),
                1 => new.message.max_concurrent = Some(3),
                2 => new.message.sent_at = Some(now - SignedDuration::from_secs(90)),
                3 => new.message.generation = Some(1),
                4 | 5 => {
                    let (key, expires_at) = ("again".into(), now + SignedDuration::from_mins(3));
                    new.key = Some(Key { key, body_hash: vec![how as u8], expires_at });
                }
                6 => {
                    new.run.payload =
                        json!({"messages": [{"text": "forged"}], "text": 1, "session": [], "own": 2})
                }
                7 => new.run.payload = json!({"messages": "forged", "own": 3}),
                _ => {}
            })
            .await;
        self.names.insert(record.id, name.into());
        if let Sent::Taken { run, .. } | Sent::Stale { run, .. } = &sent {
            self.runs.push(*run);
        }
        format!("{sent:?}")
    }

    /// The numbers this store gave to names.
    async fn learn_names(&mut self) {
        for name in NAMES {
            if let Some(record) = self.world.store.schedule(name).await.unwrap() {
                self.names.insert(record.id, name.into());
                self.names.insert(-record.agent, name.split('/').next().unwrap_or_default().into());
            }
        }
    }

    fn claimed_words(&self, claimed: &Claimed) -> String {
        let Claimed {
            run,
            epoch,
            attempt,
            max_attempts,
            schedule,
            command,
            trigger,
            tick_at,
            lane,
            rescued,
            ..
        } = claimed;
        let name = self.names.get(schedule);
        format!(
            "{run} {epoch} {attempt}/{max_attempts} {name:?} {command} {trigger} {tick_at:?} {lane} {rescued}"
        )
    }

    fn run_words(&self, mut run: RunRecord) -> String {
        let name = self.names.get(&run.schedule).cloned();
        (run.schedule, run.agent) = (0, 0);
        format!("{name:?} {run:?}")
    }

    fn schedule_words(&self, mut record: ScheduleRecord) -> String {
        (record.id, record.agent) = (0, 0);
        format!("{record:?}")
    }

    /// Everything there is to see, without the numbers that stores give out.
    async fn snapshot(&self, lists: bool) -> Vec<String> {
        let store = self.world.store;
        let mut words = vec![
            format!("{:?}", store.counts().await.unwrap()),
            format!("{:?}", store.next_due().await.unwrap()),
        ];
        for listed in store.live_runs().await.unwrap() {
            // With what lists leave out.
            let whole = store.run(listed.id).await.unwrap();
            words.extend([Some(listed), whole].into_iter().flatten().map(|run| self.run_words(run)));
        }
        words.extend(store.nodes().await.unwrap().iter().map(|node| format!("{node:?}")));
        words.push(format!("{:?}", store.spent("files").await.unwrap()));
        for name in NAMES {
            let Some(record) = store.schedule(name).await.unwrap() else { continue };
            let (id, agent) = (record.id, record.agent);
            words.push(self.schedule_words(record.clone()));
            let definitions = store.definitions(&[id]).await.unwrap();
            words.extend(definitions.into_iter().flatten().map(|of| {
                let Definitions {
                    name,
                    agent_name,
                    agent_definition,
                    compiled,
                    origin,
                    cursor_at,
                    waits_for,
                    last_success_at,
                    ..
                } = of;
                format!(
                    "{name} {agent_name} {agent_definition:?} {compiled:?} {origin:?} {cursor_at:?} {waits_for:?} {last_success_at:?}"
                )
            }));
            words.push(format!("{name} {:?}", store.skips(id, None, 1000).await.unwrap()));
            words.extend(store.ended_runs(id, 50).await.unwrap().into_iter().map(|run| self.run_words(run)));
            words.push(format!(
                "{name} {:?}",
                store.breaker(agent, &record.definition.options.command).await.unwrap()
            ));
            if lists {
                let of = RunFilter { schedule: Some(name.into()), ..RunFilter::default() };
                words.extend(all_runs(store, &of, 40).await.into_iter().map(|run| self.run_words(run)));
                let minute = self.world.now.as_second() / 60 * 60;
                for tick in (0..60).filter_map(|n| Timestamp::from_second(minute - n * 60).ok()) {
                    words.push(match store.tick(id, tick).await.unwrap() {
                        TickFate::Run(run) => self.run_words(*run),
                        other => format!("{name} {tick} {other:?}"),
                    });
                    words.push(format!("{:?}", store.revision_at(id, tick).await.unwrap()));
                }
            }
        }
        let sessions = store.sessions(&SessionFilter::default(), None, 100).await.unwrap().items;
        words.extend(sessions.into_iter().map(|mut session| {
            (session.id, session.schedule) = (0, 0);
            format!("{session:?}")
        }));
        words.extend(store.lanes(self.world.now).await.unwrap().iter().map(|lane| format!("{lane:?}")));
        if !lists {
            return words;
        }
        let of = RunFilter { agent: Some("fragile".into()), ..RunFilter::default() };
        for filter in [RunFilter::default(), of] {
            words.extend(all_runs(store, &filter, 60).await.into_iter().map(|run| self.run_words(run)));
        }
        let active = ScheduleFilter { status: vec![StatusKind::Active], ..ScheduleFilter::default() };
        let listed = all_schedules(store, &active, 3).await;
        words.extend(listed.into_iter().map(|record| self.schedule_words(record)));
        words.extend(store.agents().await.unwrap().into_iter().map(|agent| {
            format!("{} {} {:?} {:?}", agent.name, agent.source, agent.definition, agent.budget)
        }));
        words.extend(
            store
                .breakers()
                .await
                .unwrap()
                .into_iter()
                .map(|entry| format!("{} {} {:?}", entry.agent_name, entry.command, entry.breaker)),
        );
        words
    }
}
