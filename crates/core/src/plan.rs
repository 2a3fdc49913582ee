//! What becomes of a tick: a run, a skip with its reason, or a miss; and when the planner looks again.
//!
//! A plan covers the interval from the schedule's token to now, so that an on-time tick, a late one, and the return from
//! three days of downtime are one code path. Every tick in it gets exactly one result.

use belfry_time::{SignedDuration, Tick, Timestamp, Timing};

use crate::breaker::Admits;
use crate::definition::{CatchUp, IfRunning, Schedule};
use crate::model::{SkipRange, SkipReason, Token, TokenKind, Trigger};

/// What the planner knows about the world around a schedule, read together with its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Live runs in the schedule's overlap scope.
    pub live: u32,
    /// Those of them that wait.
    pub pending: u32,
    /// Whether the breaker lets a run through.
    pub breaker: Admits,
    /// Whether the failure budget is used up.
    pub budget_exhausted: bool,
}

impl Facts {
    /// Nothing lives and nothing stands in the way.
    pub const CLEAR: Facts = Facts { live: 0, pending: 0, breaker: Admits::Yes, budget_exhausted: false };
}

/// A schedule's own state, as far as planning needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Its place in the due index.
    pub token: Token,
    /// Its first tick, once known.
    pub origin: Option<Timestamp>,
    /// The skips that are still being counted.
    pub open_skip: Option<SkipRange>,
    /// No tick at or before this one is armed: see [`crate::edit::Found::cursor_at`].
    pub cursor_at: Option<Timestamp>,
    /// Whether it waits for the end of a run; only a pause can end meanwhile.
    pub waits: bool,
}

impl Standing {
    /// A schedule with this token, of which nothing else is known.
    pub fn of(token: Token) -> Standing {
        Standing { token, origin: None, open_skip: None, cursor_at: None, waits: false }
    }

    /// From where the clock of its token starts: not before what is planned.
    fn from(&self, at: Timestamp) -> Timestamp {
        self.cursor_at.map_or(at, |cursor| cursor.max(at))
    }
}

/// A run that a tick makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedRun {
    /// The tick.
    pub tick_at: Timestamp,
    /// When it may start.
    pub not_before: Timestamp,
    /// On time, or caught up.
    pub trigger: Trigger,
    /// It is the one probe of a half-open breaker.
    pub probe: bool,
}

/// What is to be committed for a schedule, all or nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Runs to make, in tick order.
    pub runs: Vec<PlannedRun>,
    /// Ranges of skips and misses that are complete.
    pub closed: Vec<SkipRange>,
    /// The skips that are still being counted.
    pub open_skip: Option<SkipRange>,
    /// What lives in the overlap scope is to be cancelled.
    pub cancel_live: bool,
    /// When the planner looks again.
    pub next: Next,
    /// The schedule's first tick, where this plan found it.
    pub origin: Option<Timestamp>,
    /// The last tick that it planned, where no token remembers that.
    pub cursor_at: Option<Timestamp>,
}

/// When the planner looks at a schedule again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Next {
    /// When this token is due.
    Token(Token),
    /// When the last of the planned runs has ended.
    Wait,
    /// Never: it has fired for the last time.
    #[default]
    Exhausted,
    /// Never: its one instant had passed when it was first seen.
    Expired,
}

/// Ticks that are looked at one by one; older ones are counted.
const WALKED_MAX: usize = 1000;

/// Plans a schedule whose token is due.
pub fn plan(schedule: &Schedule, standing: &Standing, facts: &Facts, now: Timestamp) -> Plan {
    let Some(timing) = &schedule.timing else {
        return Plan { open_skip: standing.open_skip, ..Plan::default() };
    };
    let token = standing.token;
    // What was read as due is due, also where the clock was set back since.
    let now = now.max(token.due_at);
    match token.kind {
        TokenKind::First => plan_first(schedule, timing, standing),
        TokenKind::Next => plan_next(timing, standing, token.tick_at),
        TokenKind::Resume => {
            let with_origin = with_origin(timing, standing.origin);
            let since = standing.cursor_at.unwrap_or(token.tick_at);
            let skipped = left_out(&with_origin, SkipReason::Disabled, since, token.due_at);
            let next = plan_next(timing, standing, token.due_at);
            Plan { closed: skipped.filter(|_| !standing.waits).into_iter().collect(), ..next }
        }
        TokenKind::Tick => {
            let timing = with_origin(timing, standing.origin);
            Pass {
                schedule,
                timing: &timing,
                now,
                facts: *facts,
                plan: Plan { open_skip: standing.open_skip, ..Plan::default() },
            }
            .run(Tick { tick_at: token.tick_at, due_at: token.due_at })
        }
        TokenKind::Deferred => {
            let timing = with_origin(timing, standing.origin);
            let first = timing.tick(token.tick_at);
            let plan = Plan { open_skip: standing.open_skip, ..Plan::default() };
            let since = token.due_at.max(first.due_at);
            let plan = Pass { schedule, timing: &timing, now: since, facts: *facts, plan }.run(first);
            match plan.next {
                Next::Token(next) if next.due_at <= now => {
                    Pass { schedule, timing: &timing, now, facts: *facts, plan }
                        .leave_out(Tick { tick_at: next.tick_at, due_at: next.due_at })
                }
                _ => plan,
            }
        }
    }
}

/// The clock starts at `from`.
fn plan_next(timing: &Timing, standing: &Standing, from: Timestamp) -> Plan {
    let tick = with_origin(timing, standing.origin).next(standing.from(from));
    let next = tick.map_or(Next::Exhausted, |tick| Next::Token(tick.into()));
    // A new revision counts its calendar steps from here.
    let origin = tick.filter(|_| standing.origin.is_none()).map(|tick| tick.tick_at);
    Plan { next, origin, open_skip: standing.open_skip, ..Plan::default() }
}

/// What a span without planning has left out: the ticks after `since` up to `until`, as one range.
pub fn left_out(
    timing: &Timing,
    reason: SkipReason,
    since: Timestamp,
    until: Timestamp,
) -> Option<SkipRange> {
    let first = timing.next(since).filter(|tick| tick.tick_at <= until)?;
    let last = timing.newest_between(since, until, 1).pop()?;
    let count = timing.count_between(since, until);
    Some(SkipRange { reason, from: first.tick_at, to: last.tick_at, count })
}

/// A timing that knows its first tick, where there is one.
pub(crate) fn with_origin(timing: &Timing, origin: Option<Timestamp>) -> Timing {
    match origin {
        Some(origin) => timing.clone().with_origin(origin),
        None => timing.clone(),
    }
}

fn plan_first(schedule: &Schedule, timing: &Timing, standing: &Standing) -> Plan {
    let first = timing.first(standing.from(standing.token.tick_at));
    let next = match first {
        Some(tick) => Next::Token(tick.into()),
        None if schedule.is_one_shot() => Next::Expired,
        None => Next::Exhausted,
    };
    Plan { next, origin: first.map(|tick| tick.tick_at), open_skip: standing.open_skip, ..Plan::default() }
}

/// One pass over the ticks of a schedule that are due.
struct Pass<'a> {
    schedule: &'a Schedule,
    timing: &'a Timing,
    now: Timestamp,
    facts: Facts,
    plan: Plan,
}

impl Pass<'_> {
    fn run(mut self, first: Tick) -> Plan {
        let (older, walked) = self.due_ticks(first);
        let late = walked.iter().take_while(|(tick, next)| self.is_late(tick, *next)).count();
        let (missed, on_time): (Vec<_>, Vec<_>) =
            walked.iter().map(|(tick, _)| *tick).enumerate().partition(|(i, _)| *i < late);
        let missed: Vec<Tick> = missed.into_iter().map(|(_, tick)| tick).collect();
        self.catch_up(first, older, &missed);
        for (_, tick) in on_time {
            self.offer(tick, tick.due_at, Trigger::Schedule);
        }
        let last = walked.last().map_or(first, |(tick, _)| *tick);
        self.then(last)
    }

    /// Ticks from `first` on that have come while one before them was deferred.
    fn leave_out(mut self, first: Tick) -> Plan {
        let (older, walked) = self.due_ticks(first);
        let last = walked.last().map_or(first, |(tick, _)| *tick);
        let count = older + walked.len() as u64;
        self.skip(SkipRange { reason: SkipReason::QueueFull, from: first.tick_at, to: last.tick_at, count });
        self.then(last)
    }

    /// The ticks from `first` on that are due: how many older ones there are, and the newest with what follows each.
    fn due_ticks(&self, first: Tick) -> (u64, Vec<(Tick, Option<Timestamp>)>) {
        let total = 1 + self.timing.count_between(first.tick_at, self.now);
        let mut ticks = self.timing.newest_between(first.tick_at, self.now, WALKED_MAX);
        if total <= WALKED_MAX as u64 {
            ticks.insert(0, first);
        }
        let older = total - ticks.len() as u64;
        // The last one may still wait for its jitter.
        ticks.retain(|tick| tick.due_at <= self.now);
        let next_of = |i: usize| match ticks.get(i + 1) {
            Some(next) => Some(next.tick_at),
            None => self.timing.next(ticks[i].tick_at).map(|next| next.tick_at),
        };
        let walked = (0..ticks.len()).map(|i| (ticks[i], next_of(i))).collect();
        (older, walked)
    }

    fn is_late(&self, tick: &Tick, next: Option<Timestamp>) -> bool {
        self.now.duration_since(tick.due_at) > self.schedule.late_after(tick.due_at, next)
    }

    /// Missed ticks: `older` of them before those in `missed`, the first of all being `first`.
    fn catch_up(&mut self, first: Tick, older: u64, missed: &[Tick]) {
        let policy = self.schedule.catch_up();
        let kept = match policy {
            CatchUp::Skip => 0,
            CatchUp::RunOnce => 1,
            CatchUp::RunAll => self.schedule.options().catch_up_limit as usize,
        };
        let kept = kept.min(missed.len());
        let (dropped, kept) = missed.split_at(missed.len() - kept);
        let count = older + dropped.len() as u64;
        if count > 0 {
            let reason = match policy {
                CatchUp::Skip => SkipReason::MissedSkip,
                CatchUp::RunOnce => SkipReason::MissedRunOnce,
                CatchUp::RunAll => SkipReason::MissedRunAll,
            };
            let to = match (dropped.last(), missed.first()) {
                (Some(last), _) => last.tick_at,
                (None, Some(kept)) => self.before(first, *kept),
                (None, None) => first.tick_at,
            };
            self.close_skip();
            self.plan.closed.push(SkipRange { reason, from: first.tick_at, to, count });
        }
        for tick in kept {
            self.offer(*tick, self.now, Trigger::CatchUp);
        }
    }

    /// The tick before another, not before `first`.
    fn before(&self, first: Tick, tick: Tick) -> Timestamp {
        let just_before = tick.tick_at.saturating_sub(SignedDuration::from_nanos(1)).unwrap_or(first.tick_at);
        self.timing
            .newest_between(first.tick_at, just_before, 1)
            .first()
            .map_or(first.tick_at, |tick| tick.tick_at)
    }

    /// A tick that could make a run: the first failing check names the reason why it does not.
    fn offer(&mut self, tick: Tick, not_before: Timestamp, trigger: Trigger) {
        if let Some(reason) = self.refusal(trigger) {
            return self.skip(SkipRange::one(reason, tick.tick_at));
        }
        self.close_skip();
        self.plan.cancel_live |=
            self.schedule.options().if_running == IfRunning::Cancel && self.facts.live > 0;
        let probe = self.facts.breaker == Admits::Probe;
        if probe {
            self.facts.breaker = Admits::No;
        }
        self.facts.live += 1;
        self.facts.pending += 1;
        self.plan.runs.push(PlannedRun { tick_at: tick.tick_at, not_before, trigger, probe });
    }

    fn refusal(&self, trigger: Trigger) -> Option<SkipReason> {
        let options = self.schedule.options();
        let caught_up = trigger == Trigger::CatchUp;
        if caught_up && let Some(reason) = self.outside() {
            return Some(reason);
        }
        if self.facts.breaker == Admits::No {
            return Some(SkipReason::CircuitOpen);
        }
        if self.facts.budget_exhausted {
            return Some(SkipReason::BudgetExhausted);
        }
        // A batch of missed ticks waits as a whole.
        if caught_up && self.schedule.catch_up() == CatchUp::RunAll {
            return None;
        }
        match options.if_running {
            IfRunning::Skip if self.facts.live > 0 => Some(SkipReason::AlreadyRunning),
            IfRunning::Queue if self.facts.pending >= options.max_pending => Some(SkipReason::QueueFull),
            _ => None,
        }
    }

    /// A missed tick runs now, so now must be allowed.
    fn outside(&self) -> Option<SkipReason> {
        match self.timing.allows(self.now) {
            belfry_time::Allowed::Yes => None,
            belfry_time::Allowed::NotOnThatDay => Some(SkipReason::OutsideDay),
            belfry_time::Allowed::NotAtThatTime => Some(SkipReason::OutsideWindow),
        }
    }

    fn skip(&mut self, range: SkipRange) {
        match &mut self.plan.open_skip {
            Some(open) if open.reason == range.reason => {
                open.to = range.to;
                open.count += range.count;
            }
            _ => {
                self.close_skip();
                self.plan.open_skip = Some(range);
            }
        }
    }

    fn close_skip(&mut self) {
        self.plan.closed.extend(self.plan.open_skip.take());
    }

    /// The plan, once its last tick is known.
    fn then(mut self, last: Tick) -> Plan {
        self.plan.next = self.next_after(last);
        self.plan.cursor_at = (!matches!(self.plan.next, Next::Token(_))).then_some(last.tick_at);
        self.plan
    }

    fn next_after(&self, last: Tick) -> Next {
        if self.schedule.is_one_shot() {
            return Next::Exhausted;
        }
        if self.schedule.waits_for_runs() && !self.plan.runs.is_empty() {
            return Next::Wait;
        }
        self.timing.next(last.tick_at).map_or(Next::Exhausted, |tick| Next::Token(tick.into()))
    }
}

/// How catch-up runs that are planned at once are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread {
    /// So many start at once.
    pub threshold: usize,
    /// More are spread over this long.
    pub longest: SignedDuration,
}

impl Default for Spread {
    fn default() -> Spread {
        Spread { threshold: 3, longest: SignedDuration::from_secs(30) }
    }
}

/// Spreads the catch-up runs of a batch of plans, each with the name of its schedule, by hash. The runs of one schedule
/// keep their order.
pub fn spread_catch_up(plans: &mut [(&str, &mut Plan)], spread: Spread) {
    let caught_up = |run: &PlannedRun| run.trigger == Trigger::CatchUp;
    let total: usize =
        plans.iter().map(|(_, plan)| plan.runs.iter().filter(|run| caught_up(run)).count()).sum();
    if total <= spread.threshold {
        return;
    }
    for (name, plan) in plans {
        let mut delays: Vec<SignedDuration> = plan
            .runs
            .iter()
            .filter(|run| caught_up(run))
            .map(|run| belfry_time::hashed_delay(name, run.tick_at, spread.longest))
            .collect();
        delays.sort_unstable();
        for (run, delay) in plan.runs.iter_mut().filter(|run| caught_up(run)).zip(delays) {
            run.not_before = run.not_before.saturating_add(delay).unwrap_or(run.not_before);
        }
    }
}
