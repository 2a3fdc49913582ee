//! What becomes of a tick: a run, a skip with its reason, or a miss; and when the planner looks again.
//!
//! A plan covers the interval from the schedule's token to now, so that an on-time tick, a late one, and the return from
//! three days of downtime are one code path. Every tick in it gets exactly one result.

use belfry_time::{Allowed, Every, Kind, SignedDuration, Tick, Timestamp, Timing};

use crate::breaker::{Admits, Breaker};
use crate::broken::{self, Broken};
use crate::budget::{self, Budget};
use crate::check::{Asking, Status};
use crate::definition::{AgentDefinition, CatchUp, Schedule};
use crate::edit;
use crate::model::{SkipRange, SkipReason, Token, TokenKind, Trigger};
use crate::overlap::Overlap;

/// What the planner knows about the world around a schedule, read together with its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Live runs in the schedule's overlap scope.
    pub live: u32,
    /// Those of them that `max_pending` counts: see [`Overlap::is_queued`].
    pub pending: u32,
    /// Whether the breaker lets a run through.
    pub breaker: Admits,
    /// Whether the failure budget is used up.
    pub budget_exhausted: bool,
}

impl Facts {
    /// Nothing lives and nothing stands in the way.
    pub const CLEAR: Facts = Facts { live: 0, pending: 0, breaker: Admits::Yes, budget_exhausted: false };

    /// The facts about a schedule of an agent: for each live run in its overlap scope whether `max_pending` counts it, the
    /// breaker of the agent and the schedule's command, and what is used of the agent's failure budget.
    pub fn of(
        agent: &AgentDefinition,
        scope: impl IntoIterator<Item = bool>,
        breaker: Breaker,
        budget: Option<Budget>,
        now: Timestamp,
    ) -> Facts {
        let policy = agent.budget.as_ref();
        let budget_exhausted =
            policy.and_then(|policy| budget::exhausted_until(budget, policy, now)).is_some();
        let breaker = agent.breaker.as_ref().map_or(Admits::Yes, |policy| breaker.admits(policy, now));
        let facts = Facts { breaker, budget_exhausted, ..Facts::CLEAR };
        scope.into_iter().fold(facts, |facts, is_queued| Facts {
            live: facts.live + 1,
            pending: facts.pending + u32::from(is_queued),
            ..facts
        })
    }
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
    /// The last tick that it planned, where no token tells that.
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

/// Runs that one plan makes at most.
const RUNS_MAX: usize = 1000;

/// The ticks to come of a schedule with this token, in order. What follows a deferred tick depends on how long it waits.
pub fn upcoming(timing: &Timing, standing: &Standing) -> impl Iterator<Item = Tick> {
    let timing = with_origin(timing, standing.origin);
    let first = edit::tick_of(&timing, standing.token, standing.origin, standing.cursor_at);
    let origin = standing.origin.or(first.map(|tick| tick.tick_at));
    let timing = with_origin(&timing, origin);
    let goes_on = standing.token.kind != TokenKind::Deferred;
    std::iter::successors(first, move |tick| if goes_on { timing.next(tick.tick_at) } else { None })
}

/// Plans a schedule whose token is due.
pub fn plan(schedule: &Schedule, standing: &Standing, facts: &Facts, now: Timestamp) -> Plan {
    let nothing = Plan { open_skip: standing.open_skip, ..Plan::default() };
    let Some(timing) = &schedule.timing else { return nothing };
    let timing = with_origin(timing, standing.origin);
    let token = standing.token;
    // What was read as due is due, also where the clock was set back since.
    let now = if broken::is(Broken::PlansWithEarlierClock) { now } else { now.max(token.due_at) };
    let first = edit::tick_of(&timing, token, standing.origin, standing.cursor_at);
    let Some(first) = first else { return armed(schedule, &timing, standing, None) };
    match token.kind {
        TokenKind::First | TokenKind::Next | TokenKind::Resume => {
            armed(schedule, &timing, standing, Some(first))
        }
        TokenKind::Tick => Pass { schedule, timing: &timing, now, facts: *facts, plan: nothing }.run(first),
        TokenKind::Deferred => {
            let since = token.due_at.max(first.due_at);
            let mut plan =
                Pass { schedule, timing: &timing, now: since, facts: *facts, plan: nothing }.run(first);
            // It has waited long enough, also if the clock was set back since and its tick lies ahead.
            for run in &mut plan.runs {
                run.not_before = run.not_before.min(now);
            }
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

/// A schedule whose clock has just started: it waits for this tick, which is its first if it has none yet.
fn armed(schedule: &Schedule, timing: &Timing, standing: &Standing, tick: Option<Tick>) -> Plan {
    let token = standing.token;
    let next = match tick {
        Some(tick) => Next::Token(tick.into()),
        None if token.kind == TokenKind::First && schedule.is_one_shot() => Next::Expired,
        None => Next::Exhausted,
    };
    let skipped = match token.kind {
        TokenKind::Resume if !standing.waits => {
            let since = standing.cursor_at.unwrap_or(token.tick_at);
            left_out(timing, SkipReason::Disabled, since, token.due_at)
        }
        _ => None,
    };
    // A new revision counts its calendar steps from here.
    let origin = tick.filter(|_| token.kind == TokenKind::First || standing.origin.is_none());
    let origin = origin.map(|tick| tick.tick_at);
    Plan { next, origin, closed: Vec::from_iter(skipped), open_skip: standing.open_skip, ..Plan::default() }
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

/// One pass over the ticks of a schedule that are due.
struct Pass<'a> {
    schedule: &'a Schedule,
    timing: &'a Timing,
    now: Timestamp,
    facts: Facts,
    plan: Plan,
}

/// Ticks that are due.
struct DueTicks {
    /// How many.
    total: u64,
    /// The newest of them, at most [`RUNS_MAX`], in order.
    newest: Vec<Tick>,
}

const NANOSECOND: SignedDuration = SignedDuration::from_nanos(1);

impl Pass<'_> {
    fn run(mut self, first: Tick) -> Plan {
        let due = self.due_ticks(first);
        let last_late = self.last_late(first, &due);
        let late = last_late.map_or(0, |last| self.count(first, last));
        self.catch_up(first, last_late, late, due.total);
        let room = RUNS_MAX - self.plan.runs.len();
        let on_time = due.newest.iter().filter(|tick| last_late.is_none_or(|last| tick.tick_at > last));
        let on_time: Vec<Tick> = on_time.copied().collect();
        let offered = &on_time[on_time.len().saturating_sub(room)..];
        let crowded = due.total - late - offered.len() as u64;
        if let (true, Some(newer)) = (crowded > 0, offered.first()) {
            let oldest = last_late.map_or(Some(first), |last| self.timing.next(last)).unwrap_or(first);
            let (from, to) = (oldest.tick_at, self.before(first, newer.tick_at));
            self.skip(SkipRange { reason: SkipReason::QueueFull, from, to, count: crowded });
        }
        // They start after those that were missed: runs that wait start in the order of these instants.
        let missed = self.plan.runs.last().filter(|_| !broken::is(Broken::MissedAfterOnTime));
        let behind = missed.map(|missed| missed.not_before);
        for tick in offered {
            self.offer(
                *tick,
                behind.map_or(tick.due_at, |behind| behind.max(tick.due_at)),
                Trigger::Schedule,
            );
        }
        self.then(due.newest.last().copied().unwrap_or(first))
    }

    /// Ticks from `first` on that have come while one before them was deferred.
    fn leave_out(mut self, first: Tick) -> Plan {
        let due = self.due_ticks(first);
        let last = due.newest.last().copied().unwrap_or(first);
        let (from, to) = (first.tick_at, last.tick_at);
        self.skip(SkipRange { reason: SkipReason::QueueFull, from, to, count: due.total });
        self.then(last)
    }

    fn due_ticks(&self, first: Tick) -> DueTicks {
        let mut newest = self.newest(first, self.now, RUNS_MAX);
        let mut total = self.count(first, self.now);
        // The last one may still wait for its jitter.
        if newest.pop_if(|tick| tick.due_at > self.now).is_some() {
            total -= 1;
        }
        DueTicks { total, newest }
    }

    /// How many ticks there are from `first` on, up to and with `until`.
    fn count(&self, first: Tick, until: Timestamp) -> u64 {
        if until < first.tick_at { 0 } else { 1 + self.timing.count_between(first.tick_at, until) }
    }

    /// The newest of the ticks from `first` on, up to and with `until`, in order.
    fn newest(&self, first: Tick, until: Timestamp, limit: usize) -> Vec<Tick> {
        let mut ticks = self.timing.newest_between(first.tick_at, until, limit);
        if ticks.len() < limit && until >= first.tick_at {
            ticks.insert(0, first);
        }
        ticks
    }

    /// The instant of the last tick that is late; those before it are late, too.
    fn last_late(&self, first: Tick, due: &DueTicks) -> Option<Timestamp> {
        let next_of = |place: usize, tick: &Tick| match due.newest.get(place + 1) {
            Some(next) => Some(*next),
            None => self.timing.next(tick.tick_at),
        };
        let is_late = |place: usize, tick: &Tick| {
            let next = next_of(place, tick).map(|next| next.tick_at);
            self.now.duration_since(tick.due_at) > self.schedule.late_after(tick.due_at, next)
        };
        let late = due.newest.iter().enumerate().take_while(|(place, tick)| is_late(*place, tick));
        if let Some((_, last)) = late.last() {
            return Some(last.tick_at);
        }
        let oldest = due.newest.first()?;
        if due.total as usize == due.newest.len() {
            return None;
        }
        // So many are on time only where `late_after` is written, and then it is the same for all of them.
        let late_after = self.schedule.late_after(oldest.due_at, None);
        let before = self.now.saturating_sub(late_after).ok()?.saturating_sub(NANOSECOND).ok()?;
        // The due instant of a tick lies before the next tick, so that only the last one can still be on time.
        self.newest(first, before, 2).iter().rfind(|tick| tick.due_at <= before).map(|tick| tick.tick_at)
    }

    /// Missed ticks: so many that are `late`, from `first` to `last`, of a `total` that is due.
    fn catch_up(&mut self, first: Tick, last: Option<Timestamp>, late: u64, total: u64) {
        let Some(last) = last else { return };
        let (reason, kept) = match self.schedule.catch_up() {
            CatchUp::Skip => (SkipReason::MissedSkip, 0),
            CatchUp::RunOnce => (SkipReason::MissedRunOnce, 1),
            CatchUp::RunAll => (SkipReason::MissedRunAll, self.schedule.options().catch_up_limit as usize),
        };
        // The newest tick is never left out for those that were missed.
        let kept = kept.min(RUNS_MAX - usize::from(total > late));
        let kept = if kept == 0 { Vec::new() } else { self.newest(first, last, kept) };
        let missed = late - kept.len() as u64;
        if missed > 0 && !broken::is(Broken::MissedNotRecorded) {
            let to = kept.first().map_or(last, |kept| self.before(first, kept.tick_at));
            self.close_skip();
            self.plan.closed.push(SkipRange { reason, from: first.tick_at, to, count: missed });
        }
        for tick in kept {
            self.offer(tick, self.now, Trigger::CatchUp);
        }
    }

    /// The instant of the tick before another one, not before `first`.
    fn before(&self, first: Tick, tick_at: Timestamp) -> Timestamp {
        let until = tick_at.saturating_sub(NANOSECOND).unwrap_or(first.tick_at);
        self.newest(first, until, 1).pop().map_or(first.tick_at, |tick| tick.tick_at)
    }

    /// A tick that could make a run: the first failing check names the reason why it does not.
    fn offer(&mut self, tick: Tick, not_before: Timestamp, trigger: Trigger) {
        let is_missed = trigger == Trigger::CatchUp;
        let asking = Asking {
            options: self.schedule.options(),
            // What is paused, invalid or exhausted has no timer.
            status: &Status::Active,
            // A missed tick runs now, so now must be allowed.
            allowed: match is_missed && !broken::is(Broken::CatchUpOutsideWindow) {
                true => self.timing.allows(self.now),
                false => Allowed::Yes,
            },
            facts: &self.facts,
            in_batch: is_missed && self.schedule.catch_up() == CatchUp::RunAll,
        };
        let admitted = match asking.admit() {
            Ok(admitted) => admitted,
            Err(reason) => return self.skip(SkipRange::one(reason, tick.tick_at)),
        };
        self.close_skip();
        self.plan.cancel_live |= admitted.cancel_live;
        let probe = admitted.probe;
        if probe {
            self.facts.breaker = Admits::No;
        }
        self.facts.live += 1;
        self.facts.pending += u32::from(Overlap::is_queued(false, trigger));
        self.plan.runs.push(PlannedRun { tick_at: tick.tick_at, not_before, trigger, probe });
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
        let is_told =
            matches!(self.plan.next, Next::Token(next) if edit::tells_last(self.timing, next.tick_at));
        self.plan.cursor_at = (!is_told).then_some(last.tick_at);
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

/// Spreads the catch-up runs of a batch of plans, each with its schedule and that one's name, by hash. The runs of one
/// schedule keep their order, also with those of ticks that were on time.
pub fn spread_catch_up(plans: &mut [(&str, &Schedule, &mut Plan)], spread: Spread, now: Timestamp) {
    let caught_up = |run: &PlannedRun| run.trigger == Trigger::CatchUp;
    let total: usize =
        plans.iter().map(|(.., plan)| plan.runs.iter().filter(|run| caught_up(run)).count()).sum();
    if total <= spread.threshold {
        return;
    }
    for (name, schedule, plan) in plans {
        let Some(first) = plan.runs.iter().find(|run| caught_up(run)) else { continue };
        let longest = spread.longest.min(longest_delay(schedule, plan.next, first.not_before, now));
        let mut delays: Vec<SignedDuration> = plan
            .runs
            .iter()
            .filter(|run| caught_up(run))
            .map(|run| belfry_time::hashed_delay(name, run.tick_at, longest))
            .collect();
        delays.sort_unstable();
        for (run, delay) in plan.runs.iter_mut().filter(|run| caught_up(run)).zip(delays) {
            run.not_before = run.not_before.saturating_add(delay).unwrap_or(run.not_before);
        }
        // Ticks that were on time stay behind them.
        let last = plan.runs.iter().filter(|run| caught_up(run)).map(|run| run.not_before).max();
        for run in plan.runs.iter_mut().filter(|run| !caught_up(run)) {
            run.not_before = last.map_or(run.not_before, |last| last.max(run.not_before));
        }
    }
}

/// By how much a catch-up run may be delayed that could start at `from`: a tenth of the time to the schedule's next tick,
/// so that it is over by then, and not beyond the end of its window.
fn longest_delay(schedule: &Schedule, next: Next, from: Timestamp, now: Timestamp) -> SignedDuration {
    let Some(timing) = &schedule.timing else { return SignedDuration::ZERO };
    let until_next = match (next, timing.kind()) {
        (Next::Token(token), _) => token.due_at.duration_since(now),
        (Next::Wait, Kind::Every { every: Every::Interval(every), .. }) => *every,
        (Next::Wait, _) => {
            timing.next(now).map_or(SignedDuration::MAX, |next| next.tick_at.duration_since(now))
        }
        (Next::Exhausted | Next::Expired, _) => SignedDuration::MAX,
    };
    if until_next < SignedDuration::from_mins(1) {
        return SignedDuration::ZERO;
    }
    let window = timing.window_end(from).map_or(SignedDuration::MAX, |end| end.duration_since(from));
    (until_next / 10).min(window - SignedDuration::from_millis(1)).max(SignedDuration::ZERO)
}
