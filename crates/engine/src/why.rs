//! Why a schedule runs or does not: now, or at any instant that is still remembered.
//!
//! `why` takes the planner's checks; `why_at` finds the tick that is meant, and what the store says became of it.

mod lane;
mod waiting;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use belfry_core::breaker::Breaker;
use belfry_core::budget;
use belfry_core::check::{self, Check, Status};
use belfry_core::definition::Options;
use belfry_core::edit::REVISIONS_KEPT;
use belfry_core::overlap::Overlap;
use belfry_core::plan::Standing;
use belfry_core::{
    AgentDefinition, Facts, RunId, RunState, Schedule, ScheduleId, SkipRange, SkipReason, Token, TokenKind,
    Trigger,
};
use belfry_store::{AnyStore, Refusal, RunFilter, RunRecord, ScheduleRecord, Store, TickFate};
use belfry_time::{Anchor, Kind, SignedDuration, Timestamp, Timing, Zone, format_duration};
use serde::{Deserialize, Serialize};

use crate::api::{self, Why};
use crate::driver::GUEST;
use crate::engine::Engine;
use crate::error::Error;

/// What became of an instant of a schedule, or would become of it now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It made a run.
    Fired,
    /// It made none, for a reason.
    Skipped,
    /// It went by while nobody was there.
    Missed,
    /// Nothing yet.
    Waiting,
}

impl Decision {
    /// Of a tick that made no run for a reason.
    pub fn of(reason: SkipReason) -> Decision {
        if reason.is_missed() { Decision::Missed } else { Decision::Skipped }
    }

    /// As it stands in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Decision::Fired => "fired",
            Decision::Skipped => "skipped",
            Decision::Missed => "missed",
            Decision::Waiting => "waiting",
        }
    }
}

/// The reason for an instant that is no tick.
const NO_TICK: &str = "no_tick";
/// The reason for a run that no node here can start.
const NO_NODE: &str = "no_node";
/// The reason while the store refuses to keep its plan, or the end of its run.
const REFUSED: &str = "refused";
/// The reason for a run whose row cannot be read.
const UNREADABLE: &str = "unreadable";
/// What is said of a run that no node can start.
const UNSTARTABLE: &str = "is never started: its stored epoch or attempt is out of range. `belfry cancel` ends it, and `belfry retry` makes another";
/// The reason while the last tick lies ahead of a clock that was set back.
const CLOCK_BACK: &str = "clock_back";
/// The reason for a tick of which nothing is remembered.
const FORGOTTEN: &str = "forgotten";
/// Pages of runs that are looked through for the ticks around an instant, and runs on a page.
const PAGES_MAX: usize = 20;
const PAGE: u32 = 500;
/// Ranges of skips that are looked through for the same.
const RANGES_MAX: u32 = 10_000;

impl Engine {
    /// Why a schedule does or does not run now; with an instant, what became of that, or will. Where it is a whole second, any
    /// tick within that second is meant.
    pub async fn why(&self, name: &str, at: Option<Timestamp>) -> Result<Why, Error> {
        let now = self.store_now().await?;
        match at {
            Some(at) => why_at(self.store(), name, at, now).await,
            None => why(self.store(), name, now).await,
        }
    }
}

/// Why a schedule does or does not run now.
pub async fn why(store: &AnyStore, name: &str, now: Timestamp) -> Result<Why, Error> {
    let known = Known::read(store, name, now).await?;
    let checks = known.checks();
    let failed = checks.iter().find(|check| !check.ok);
    let live = known.live.iter().filter(|run| run.schedule == known.record.id);
    // What runs says more than what waits.
    let live = live.max_by_key(|run| (run.state == RunState::Running, std::cmp::Reverse(run.id)));
    let (mut reason, mut words) = match failed {
        Some(check) => (Some(check.check.to_owned()), format!("It does not run now: {}.", check.detail)),
        None => (None, "It is due and nothing stands in its way: it runs now.".into()),
    };
    if let Some(run) = live {
        let (waits_for, sentence) = known.run_words(run);
        words = format!("Run {} {sentence}.", run.id);
        reason = waits_for.map(str::to_owned).or(reason.filter(|_| run.state == RunState::Running));
    }
    let run_id = live.map(|run| run.id);
    Ok(Why { reason, run_id, words, ..known.answer(now, Decision::Waiting, checks) })
}

/// What became of an instant of a schedule, or will. Where the instant is a whole second, any tick within that second is meant.
pub async fn why_at(store: &AnyStore, name: &str, at: Timestamp, now: Timestamp) -> Result<Why, Error> {
    let known = Known::read(store, name, now).await?;
    let then = store.revision_at(known.record.id, at).await?;
    let Some((revision, definition)) = then else {
        // Of an earlier life of the schedule, what became of its ticks is kept. And somebody may have made up for a tick since.
        if let fate @ (TickFate::Run(_) | TickFate::Skipped(_)) = store.tick(known.record.id, at).await?
            && let Ok(Some(timing)) = known.record.definition.timing(name)
        {
            return known.of_tick(at, fate, &timing);
        }
        let gone = match known.record.revision > REVISIONS_KEPT {
            true => format!(", or had a definition that is no longer kept (the last {REVISIONS_KEPT} are)"),
            false => String::new(),
        };
        let words = format!("{name} was not defined at {}{gone}.", known.time(at));
        return Ok(known.nothing(at, NO_TICK, words));
    };
    let timing = match definition.timing(name) {
        Ok(Some(timing)) => timing,
        Ok(None) => {
            let words = "It runs on request only, and never ticks by itself.".to_owned();
            return Ok(known.nothing(at, "unsupported_type", words));
        }
        Err(error) => {
            let words = format!("At {} its definition was wrong: {error}.", known.time(at));
            let check = Check { check: SkipReason::Invalid.as_str(), ok: false, detail: error.to_string() };
            let reason = Some(SkipReason::Invalid.as_str().to_owned());
            return Ok(Why { reason, words, ..known.answer(at, Decision::Skipped, vec![check]) });
        }
    };
    let is_current = revision == known.record.revision;
    let origin = known.record.origin.filter(|_| is_current);
    let timing = match origin {
        Some(origin) => timing.with_origin(origin),
        None => timing,
    };
    let around = match grid(&timing) {
        true => Around::on_grid(&timing, at),
        false => Around::in_history(store, &known.record, at).await?,
    };
    match around.tick {
        Some(tick_at) => known.of_tick(tick_at, store.tick(known.record.id, tick_at).await?, &timing),
        None => known.of_no_tick(at, store.tick(known.record.id, at).await?, &around, &timing),
    }
}

/// Takes all checks of a schedule now.
pub(crate) async fn checks(store: &AnyStore, name: &str, now: Timestamp) -> Result<Vec<Check>, Error> {
    Ok(Known::read(store, name, now).await?.checks())
}

/// Whether ticks are instants of their own, rather than distances from what happened.
fn grid(timing: &Timing) -> bool {
    match timing.kind() {
        Kind::Cron(_) | Kind::At(_) => true,
        Kind::Every { anchor, .. } => matches!(anchor, Anchor::Slot { .. }),
        Kind::After(_) => false,
    }
}

/// What is known of a schedule and of what surrounds it.
struct Known {
    now: Timestamp,
    record: ScheduleRecord,
    schedule: Result<Schedule, String>,
    /// Why this version cannot read it or its agent.
    unreadable: Option<Arc<str>>,
    agent: AgentDefinition,
    facts: Facts,
    /// Until when its agent's failure budget is used up.
    budget_until: Option<Timestamp>,
    /// All live runs, in the order of starting.
    live: Vec<RunRecord>,
    /// The policies of its agent's schedules that have live runs.
    options: HashMap<ScheduleId, Options>,
    nodes: Vec<belfry_store::Node>,
    /// The lane that its tick was deferred in, or that it runs in.
    lane: lane::Lane,
    zone: Zone,
    /// What the store refuses to keep of it.
    refusals: Vec<Refusal>,
}

impl Known {
    async fn read(store: &AnyStore, name: &str, now: Timestamp) -> Result<Known, Error> {
        let record = store.schedule(name).await?.ok_or_else(|| Error::NotFound { name: name.to_owned() })?;
        let schedule = record.definition.compile(name);
        let definitions = store.definitions(&[record.id]).await?.into_iter().next().flatten();
        let unreadable = definitions.as_ref().and_then(|found| found.unreadable.clone());
        // What nobody has found yet to be unreadable may be so all the same.
        let unreadable = unreadable.or_else(|| record.unreadable.as_deref().map(Arc::from));
        let agent = definitions.map(|found| (*found.agent_definition).clone()).unwrap_or_default();
        let breaker = match &agent.breaker {
            Some(_) => store.breaker(record.agent, &record.definition.options.command).await?.breaker,
            None => Breaker::default(),
        };
        let policy = agent.budget.as_ref();
        let budget_until = policy.and_then(|policy| budget::exhausted_until(record.budget, policy, now));
        let live = store.live_runs().await?;
        let of_agent = live.iter().filter(|run| run.agent == record.agent);
        let of_agent: Vec<ScheduleId> =
            of_agent.map(|run| run.schedule).collect::<BTreeSet<_>>().into_iter().collect();
        let of_agent = store.definitions(&of_agent).await?.into_iter().flatten();
        let options = of_agent
            .filter_map(|found| Some((found.schedule, found.definition()?.options.clone())))
            .collect();
        let in_scope: Vec<&RunRecord> = live.iter().filter(|run| in_scope(&record, run)).collect();
        let queued = in_scope.iter().map(|run| is_queued(run));
        let facts = Facts::of(&agent, queued, breaker, record.budget, now);
        let mut nodes = store.nodes().await?;
        // A guest is there for one run alone.
        let is_guest = |node: &belfry_store::Node| node.labels.iter().any(|label| label == GUEST);
        nodes.retain(|node| node.is_alive(now) && !node.draining && !is_guest(node));
        let own_lane = record.definition.lane(&agent);
        let lane = record.deferred.as_ref().map_or(own_lane, |deferred| &deferred.lane).to_owned();
        let known = store.lane_settings().await?.into_iter().find(|known| known.name == lane);
        let queue_limit = known.and_then(|known| known.settings()?.queue_limit);
        let queued = match queue_limit {
            Some(_) => store.lanes(now).await?.into_iter().find(|known| known.name == lane),
            None => None,
        };
        let queued = queued.and_then(|known| known.queued).unwrap_or(0);
        let lane = lane::Lane { name: lane, queue_limit, queued };
        let zone = record.definition.options.timezone.as_deref().map(Zone::get);
        let zone = zone.and_then(Result::ok).unwrap_or_else(Zone::utc);
        let mut refusals = store.refusals().await?;
        refusals.retain(|refusal| refusal.schedule == record.id);
        Ok(Known {
            now,
            schedule,
            unreadable,
            agent,
            facts,
            budget_until,
            live,
            options,
            nodes,
            lane,
            zone,
            record,
            refusals,
        })
    }

    /// The planner's checks, and what a run would have to wait for.
    fn checks(&self) -> Vec<Check> {
        if let Some(why) = &self.unreadable {
            return vec![Check { check: NO_NODE, ok: false, detail: why.to_string() }];
        }
        let schedule = match &self.schedule {
            Ok(schedule) => schedule,
            Err(reason) => {
                let check = SkipReason::Invalid.as_str();
                return vec![Check { check, ok: false, detail: reason.clone() }];
            }
        };
        let record = &self.record;
        let deferred = record.deferred.as_ref().map(|it| Token::deferred(it.tick_at, it.since));
        let standing = record.token.or(deferred).map(|token| Standing {
            token,
            origin: record.origin,
            open_skip: record.open_skip,
            cursor_at: record.cursor_at,
            waits: record.waits_for.is_some(),
        });
        let mut checks = check::checks(schedule, &record.status, standing.as_ref(), &self.facts, self.now);
        if let Some(not_due) = checks.iter_mut().find(|check| check.check == "not_due") {
            not_due.detail = self.due_words();
        }
        if let Some(exhausted) = checks.iter_mut().find(|check| check.check == SkipReason::Exhausted.as_str())
            && record.status == Status::Exhausted
        {
            exhausted.detail = crate::exhausted_words(record);
        }
        if let (Some(until), Some(exhausted)) = (
            self.budget_until,
            checks.iter_mut().find(|check| check.check == SkipReason::BudgetExhausted.as_str()),
        ) {
            exhausted.detail = self.budget_words(until);
        }
        if let Some(at) = crate::clock_back(record, self.now) {
            let place = checks.iter().position(|check| check.check == "not_due").unwrap_or(checks.len());
            checks.insert(place, Check { check: CLOCK_BACK, ok: false, detail: self.clock_back_words(at) });
        }
        if let Some(refusal) = self.refused_plan() {
            checks.insert(0, Check { check: REFUSED, ok: false, detail: refusal.words() });
        }
        let waits = [("at_capacity", self.at_capacity()), (NO_NODE, self.no_node())];
        for (check, waits) in self.lane_full().map(|full| ("lane_full", full)).into_iter().chain(waits) {
            let (ok, detail) = match waits {
                Ok(detail) => (true, detail),
                Err(detail) => (false, detail),
            };
            checks.push(Check { check, ok, detail });
        }
        checks
    }

    /// The plan of it that the store refuses.
    fn refused_plan(&self) -> Option<&Refusal> {
        self.refusals.iter().find(|refusal| refusal.run.is_none())
    }

    fn clock_back_words(&self, at: Timestamp) -> String {
        format!(
            "the clock was set back, and its last tick lies ahead: it goes on at {}, in {}; \
             `belfry resume --from-now` lets it tick at once",
            self.time(at),
            length(self.now, at)
        )
    }

    fn due_words(&self) -> String {
        let next = api::upcoming(&self.record, 1).first().copied();
        let Some(token) = self.record.token else {
            if let (Some(tick), Some(_)) = (next, &self.record.deferred) {
                return format!("due since {}", self.time(tick.due_at));
            }
            return match self.record.waits_for {
                Some(run) => format!("the next tick counts from the end of run {run}"),
                None => "nothing arms it".into(),
            };
        };
        match (token.kind, next) {
            (TokenKind::Resume, _) => format!("the pause ends at {}", self.time(token.due_at)),
            (_, Some(tick)) if tick.due_at > self.now => format!(
                "the next tick is due at {}, in {}",
                self.time(tick.due_at),
                length(self.now, tick.due_at)
            ),
            (_, Some(tick)) => format!("due since {}", self.time(tick.due_at)),
            (_, None) => "there is no tick to come".into(),
        }
    }

    /// How a run goes or went, and the reason it waits or ended so.
    fn run_words(&self, run: &RunRecord) -> (Option<&'static str>, String) {
        let took = run.started_at.map(|started| length(started, run.finished_at.unwrap_or(self.now)));
        let took = took.unwrap_or_default();
        let attempt = match run.attempt {
            0 | 1 => String::new(),
            attempt => format!(", at attempt {attempt} of {}", run.max_attempts),
        };
        let why = run.reason.map_or(String::new(), |reason| format!(" ({reason})"));
        let reason = run.reason.map(|reason| reason.as_str());
        match run.state {
            RunState::Pending if run.is_unstartable() => (Some(UNREADABLE), UNSTARTABLE.into()),
            RunState::Pending => match &self.unreadable {
                Some(why) => (Some(NO_NODE), format!("waits for a node that can read its definition: {why}")),
                None => self.waits_for(run),
            },
            RunState::Running => match self.refusals.iter().find(|refusal| refusal.run == Some(run.id)) {
                Some(refusal) => (Some(REFUSED), format!("ran{attempt}, but {}", refusal.words())),
                None => (None, format!("has been running for {took}{attempt}")),
            },
            RunState::Completed => (None, format!("completed after {took}{attempt}")),
            RunState::Failed => {
                let error = run.error.as_deref().map_or(String::new(), |error| format!(": {}", line(error)));
                (reason, format!("failed{why} after {took}{attempt}{error}"))
            }
            RunState::Cancelled => (reason, format!("was cancelled{why}{attempt}")),
        }
    }

    /// What became of a tick.
    fn of_tick(&self, tick_at: Timestamp, fate: TickFate, timing: &Timing) -> Result<Why, Error> {
        let time = self.time(tick_at);
        Ok(match fate {
            TickFate::Run(run) => {
                let (reason, sentence) = self.run_words(&run);
                let late = match run.trigger {
                    Trigger::CatchUp => " was missed and caught up: it",
                    Trigger::Backfill => " was filled in later: it",
                    _ => "",
                };
                let words = format!("The tick at {time}{late} made run {}, which {sentence}.", run.id);
                let checks = passed(None);
                let (reason, run_id) = (reason.map(str::to_owned), Some(run.id));
                Why { reason, run_id, words, ..self.answer(tick_at, Decision::Fired, checks) }
            }
            TickFate::Skipped(range) => self.of_range(tick_at, &range, false),
            TickFate::Open(range) => self.of_range(tick_at, &range, true),
            TickFate::Unknown if tick_at > self.now => self.of_future(tick_at, timing),
            TickFate::Unknown => self.of_unknown(tick_at),
        })
    }

    /// A tick that made no run, with others for the same reason.
    fn of_range(&self, tick_at: Timestamp, range: &SkipRange, open: bool) -> Why {
        let reason = range.reason;
        let decision = Decision::of(reason);
        let done = decision.as_str();
        let why = match (&self.record.status, open && reason == SkipReason::Disabled) {
            (Status::Paused { reason, until }, true) => {
                let why = reason.as_ref().map_or(String::new(), |reason| format!(" ({})", line(reason)));
                let until =
                    until.map_or("until it is resumed".into(), |until| format!("until {}", self.time(until)));
                format!("it has been paused{why} since {}, {until}", self.time(self.record.status_since))
            }
            (Status::Disabled, true) => {
                format!("enabled has been false since {}", self.time(self.record.status_since))
            }
            _ => skip_words(reason).into(),
        };
        let with = match range.count {
            0 | 1 => String::new(),
            count => {
                let so_far = if open { " so far" } else { "" };
                let (from, to) = (self.time(range.from), self.time(range.to));
                format!(" It is one of {count} in a row{so_far}, from {from} to {to}.")
            }
        };
        let words = format!("The tick at {} was {done}: {why}.{with}", self.time(tick_at));
        let reason = Some(reason.as_str().to_owned());
        Why { reason, words, ..self.answer(tick_at, decision, passed(Some(range.reason))) }
    }

    fn of_future(&self, tick_at: Timestamp, timing: &Timing) -> Why {
        let time = self.time(tick_at);
        if self.record.status != Status::Active {
            let words = format!("{time} is a tick to come, but {}.", self.status_words());
            return self.nothing(tick_at, self.status_reason(), words);
        }
        let just_before = tick_at.saturating_sub(SignedDuration::from_nanos(1)).unwrap_or(tick_at);
        let due = timing.next(just_before).map_or(tick_at, |tick| tick.due_at);
        let jitter = if due == tick_at {
            String::new()
        } else {
            format!(", due at {} with its jitter", self.time(due))
        };
        let words = format!("{time} is a tick to come, in {}{jitter}.", length(self.now, tick_at));
        self.nothing(tick_at, "not_due", words)
    }

    /// A tick that has passed, and of which the store says nothing.
    fn of_unknown(&self, tick_at: Timestamp) -> Why {
        let time = self.time(tick_at);
        if let Some(deferred) = self.record.deferred.as_ref().filter(|it| it.tick_at <= tick_at) {
            return self.of_deferred(tick_at, deferred);
        }
        if let Some(token) = self.record.token.filter(|token| token.tick_at <= tick_at) {
            let (reason, words) = match (token.due_at > self.now, self.no_node()) {
                (true, _) => ("not_due", format!("it is due at {}", self.time(token.due_at))),
                (false, Err(detail)) => ("no_node", detail),
                (false, Ok(_)) if self.refused_plan().is_some() => {
                    (REFUSED, self.refused_plan().map(Refusal::words).unwrap_or_default())
                }
                (false, Ok(_)) => ("not_due", "it is about to be planned".into()),
            };
            return self.nothing(tick_at, reason, format!("The tick at {time} waits: {words}."));
        }
        if self.record.status == Status::Exhausted {
            let words = match crate::standing::never_fired_words(&self.record) {
                Some(why) => format!("The tick at {time} made no run: {why}."),
                None => format!("The tick at {time} is too long ago: what became of it is no longer kept."),
            };
            return self.nothing(tick_at, SkipReason::Exhausted.as_str(), words);
        }
        let words = format!("The tick at {time} is too long ago: what became of it is no longer kept.");
        self.nothing(tick_at, FORGOTTEN, words)
    }

    /// An instant that is no tick.
    fn of_no_tick(
        &self,
        at: Timestamp,
        fate: TickFate,
        around: &Around,
        timing: &Timing,
    ) -> Result<Why, Error> {
        // Ticks that count from what happened have no instants of their own while nothing happens.
        if let (false, TickFate::Skipped(range) | TickFate::Open(range)) = (grid(timing), &fate) {
            let open = matches!(fate, TickFate::Open(_));
            let why = self.of_range(at, range, open);
            let words = why.words.replacen("The tick at", "What would have run at", 1);
            return Ok(Why { words, ..why });
        }
        if !grid(timing) && self.is_unarmed_at(at) {
            let range = SkipRange::one(SkipReason::Disabled, at);
            let why = self.of_range(at, &range, true);
            let words = why.words.replacen("The tick at", "What would have run at", 1);
            return Ok(Why { words, ..why });
        }
        let mut words = format!("{} is no tick of this schedule ({})", self.time(at), timing.describe());
        if let Some((run, from, to)) = &around.during {
            let until = to.map_or("and has not ended".into(), |to| format!("to {}", self.time(to)));
            words.push_str(&format!(": run {run} was running, from {} {until}", self.time(*from)));
        }
        words.push('.');
        let named = |at: Option<Timestamp>| at.map(|at| self.time(at));
        words.push_str(&match (named(around.before), named(around.after)) {
            (Some(before), Some(after)) => {
                format!(" The tick before it is {before}, the one after it {after}.")
            }
            (Some(before), None) => format!(" The last tick before it is {before}."),
            (None, Some(after)) => format!(" The first tick after it is {after}."),
            (None, None) => String::new(),
        });
        if !grid(timing) && at > self.now {
            words.push_str(" Its ticks count from its runs: which there will be is not known yet.");
        }
        if self.record.status != Status::Active && at > self.now {
            words.push_str(&format!(" Now {}.", self.status_words()));
        }
        let (tick_before, tick_after) = (around.before, around.after);
        Ok(Why { tick_before, tick_after, ..self.nothing(at, NO_TICK, words) })
    }

    /// Whether a pause that lasts, or `enabled: false`, covers an instant that has passed.
    fn is_unarmed_at(&self, at: Timestamp) -> bool {
        let since = self.record.cursor_at.unwrap_or(self.record.status_since);
        let is_covered = at > since && at <= self.now && self.record.waits_for.is_none();
        match self.record.status {
            Status::Disabled => is_covered,
            Status::Paused { until, .. } => is_covered && until.is_none_or(|until| at <= until),
            _ => false,
        }
    }

    fn status_words(&self) -> String {
        match &self.record.status {
            Status::Active => "it is active".into(),
            Status::Paused { reason, until } => {
                let why = reason.as_ref().map_or(String::new(), |reason| format!(" ({})", line(reason)));
                let until =
                    until.map_or("until it is resumed".into(), |until| format!("until {}", self.time(until)));
                format!("it is paused{why} {until}")
            }
            Status::Disabled => "enabled is false".into(),
            Status::Invalid { reason } => format!("its definition is wrong: {reason}"),
            Status::Exhausted => crate::exhausted_words(&self.record),
        }
    }

    fn status_reason(&self) -> &'static str {
        match self.record.status {
            Status::Active => "not_due",
            Status::Paused { .. } | Status::Disabled => SkipReason::Disabled.as_str(),
            Status::Invalid { .. } => SkipReason::Invalid.as_str(),
            Status::Exhausted => SkipReason::Exhausted.as_str(),
        }
    }

    fn nothing(&self, at: Timestamp, reason: &str, words: String) -> Why {
        let check = Check { check: "not_due", ok: false, detail: self.due_words() };
        let reason = Some(reason.to_owned());
        Why { reason, words, ..self.answer(at, Decision::Waiting, vec![check]) }
    }

    fn answer(&self, at: Timestamp, decision: Decision, checks: Vec<Check>) -> Why {
        let (agent, schedule) = self.record.name.split_once('/').unwrap_or((&self.record.name, ""));
        Why {
            agent: agent.into(),
            schedule: schedule.into(),
            at,
            decision,
            reason: None,
            run_id: None,
            tick_before: None,
            tick_after: None,
            checks: checks.into_iter().map(api::Check::from).collect(),
            words: String::new(),
        }
    }

    /// An instant for people, in the schedule's zone.
    fn time(&self, at: Timestamp) -> String {
        let local = self.zone.local(at);
        let millis = match local.millisecond() {
            0 => String::new(),
            millis => format!(".{millis:03}"),
        };
        format!("{}{millis} {}", local.strftime("%Y-%m-%d %H:%M:%S"), local.strftime("%Z"))
    }
}

/// Whether `max_pending` counts a live run.
fn is_queued(run: &RunRecord) -> bool {
    Overlap::is_queued(run.state != RunState::Pending, run.trigger)
}

/// Whether a run is one that a schedule's overlap policy looks at.
fn in_scope(record: &ScheduleRecord, run: &RunRecord) -> bool {
    let overlap = Overlap::of(&record.definition.options, record.agent, record.id);
    overlap.includes(run.agent, run.schedule, &run.command, run.trigger)
}

/// The ticks around an instant.
#[derive(Default)]
struct Around {
    /// The tick that is meant by the instant.
    tick: Option<Timestamp>,
    before: Option<Timestamp>,
    after: Option<Timestamp>,
    /// A run that was running then.
    during: Option<(RunId, Timestamp, Option<Timestamp>)>,
}

impl Around {
    /// Asks the timing alone.
    fn on_grid(timing: &Timing, at: Timestamp) -> Around {
        /// Longer than any distance of two ticks that anybody waits for.
        const YEARS: SignedDuration = SignedDuration::from_hours(24 * 366 * 8);
        let just_before = at.saturating_sub(SignedDuration::from_nanos(1)).unwrap_or(at);
        let next = timing.next(just_before).map(|tick| tick.tick_at);
        let tick = next.filter(|tick| *tick < end_of(at));
        let from = at.saturating_sub(YEARS).unwrap_or(Timestamp::MIN);
        let before = timing.newest_between(from, just_before, 1).pop().map(|tick| tick.tick_at);
        Around { tick, before, after: next, during: None }
    }

    /// Asks what happened: where ticks count from the ends of runs, nobody else knows.
    async fn in_history(store: &AnyStore, record: &ScheduleRecord, at: Timestamp) -> Result<Around, Error> {
        let mut around = Around::default();
        let filter = RunFilter { schedule: Some(record.name.clone()), ..RunFilter::default() };
        let mut behind = None;
        for _ in 0..PAGES_MAX {
            let page = store.runs(&filter, behind, PAGE).await?;
            for run in page.items.iter().filter(|run| run.schedule == record.id) {
                around.see_run(run, at);
            }
            let is_older = page.items.last().is_some_and(|run| run.created_at < at);
            behind = page.next;
            if behind.is_none() || (is_older && around.before.is_some()) {
                break;
            }
        }
        for range in store.skips(record.id, None, RANGES_MAX).await?.iter().chain(&record.open_skip) {
            around.see(range.from, at);
            around.see(range.to, at);
        }
        for tick in api::upcoming(record, 1) {
            around.see(tick.tick_at, at);
        }
        Ok(around)
    }

    fn see_run(&mut self, run: &RunRecord, at: Timestamp) {
        if let Some(tick_at) = run.tick_at {
            self.see(tick_at, at);
        }
        if let Some(started) = run.started_at
            && started <= at
            && run.finished_at.is_none_or(|finished| at < finished)
            && run.state != RunState::Pending
        {
            self.during = Some((run.id, started, run.finished_at));
        }
    }

    fn see(&mut self, tick: Timestamp, at: Timestamp) {
        if tick < at {
            self.before = self.before.max(Some(tick));
        } else if tick < end_of(at) {
            self.tick = Some(self.tick.map_or(tick, |known| known.min(tick)));
        } else {
            self.after = Some(self.after.map_or(tick, |known| known.min(tick)));
        }
    }
}

/// Where the instant ends that is meant: people do not write down milliseconds.
fn end_of(at: Timestamp) -> Timestamp {
    let nanos = at.subsec_nanosecond();
    let span = if nanos == 0 {
        SignedDuration::from_secs(1)
    } else if nanos % 1_000_000 == 0 {
        SignedDuration::from_millis(1)
    } else {
        SignedDuration::from_micros(1)
    };
    at.saturating_add(span).unwrap_or(at)
}

/// The checks of a tick that was planned: those before the one that failed have passed.
fn passed(failed: Option<SkipReason>) -> Vec<Check> {
    let mut checks = Vec::new();
    if failed.is_none_or(|reason| !reason.is_missed()) {
        let ok = check::CHECKS.into_iter().take_while(|reason| Some(*reason) != failed);
        checks.extend(ok.map(|reason| Check {
            check: reason.as_str(),
            ok: true,
            detail: passed_words(reason).into(),
        }));
    }
    let failed =
        failed.map(|reason| Check { check: reason.as_str(), ok: false, detail: skip_words(reason).into() });
    checks.extend(failed);
    checks
}

/// A check that a tick has passed, in words.
fn passed_words(check: SkipReason) -> &'static str {
    match check {
        SkipReason::Disabled => "it was enabled",
        SkipReason::Invalid => "its definition was right",
        SkipReason::Exhausted => "it had not fired for the last time",
        SkipReason::OutsideDay => "the day was allowed",
        SkipReason::OutsideWindow => "the time was allowed",
        SkipReason::CircuitOpen => "the breaker let it through",
        SkipReason::BudgetExhausted => "the failure budget had room",
        SkipReason::SpendExhausted => "the spend limit had room",
        SkipReason::AlreadyRunning => "no earlier run stood in its way",
        SkipReason::QueueFull => "there was room to wait",
        SkipReason::NoWork => "there was work",
        SkipReason::MissedSkip
        | SkipReason::MissedRunOnce
        | SkipReason::MissedRunAll
        | SkipReason::Edited => "it was planned in time",
    }
}

/// Why a tick made no run, in words.
pub fn skip_words(reason: SkipReason) -> &'static str {
    match reason {
        SkipReason::Disabled => "it was paused, or enabled was false",
        SkipReason::Invalid => "its definition was wrong",
        SkipReason::Exhausted => "it had fired for the last time",
        // A tick that is planned in time lies inside its window: only the instant of a catch-up can be outside.
        SkipReason::OutsideDay => {
            "it was missed, and the day on which it would have been caught up was not allowed"
        }
        SkipReason::OutsideWindow => {
            "it was missed, and the time at which it would have been caught up was not allowed"
        }
        SkipReason::CircuitOpen => "the breaker was open",
        SkipReason::BudgetExhausted => "the failure budget was used up",
        SkipReason::SpendExhausted => "the spend limit was used up",
        SkipReason::AlreadyRunning => "an earlier run was still alive, and if_running is skip",
        SkipReason::QueueFull => {
            "max_pending runs were waiting already, an earlier tick was waiting for its lane, or more ticks were due at \
             once than one plan makes runs of (1,000)"
        }
        SkipReason::NoWork => "there was no work",
        SkipReason::MissedSkip => "no node planned it in time, and catch_up is skip",
        SkipReason::MissedRunOnce => {
            "no node planned it in time, and catch_up is run_once: only the newest missed tick is caught up"
        }
        SkipReason::Edited => {
            "it was overdue when an edit changed or removed the schedule; `backfill` makes up for it"
        }
        SkipReason::MissedRunAll => "no node planned it in time, and more than catch_up_limit were missed",
    }
}

/// How long it is from one instant to another, without what nobody reads.
fn length(from: Timestamp, to: Timestamp) -> String {
    let exact = to.duration_since(from).max(SignedDuration::ZERO);
    let shown = match exact.as_secs() {
        0 => SignedDuration::from_millis(exact.as_millis() as i64),
        seconds @ 1..10 => return format!("{seconds}.{}s", exact.subsec_millis() / 100),
        seconds => SignedDuration::from_secs(seconds),
    };
    format_duration(shown).to_string()
}

/// Text from outside, on one line and within reason.
fn line(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
    clean.trim().to_owned()
}
