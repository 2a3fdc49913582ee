//! What an edit does to a schedule: a new definition, a pause, a resume, a disable, an enable, a removal.
//!
//! Stores read a schedule as [`Found`], ask here, and write the [`Change`]. Two rules hold in all of it. Every tick has
//! one result: ticks that nobody planned are counted in a range by the edit that takes their timer away, or by the one
//! that ends the span which took it. No tick is armed at or before the last one that has a result, whatever the clock
//! says: `planned_at` remembers that one while no timer tells it, and `cursor_at` where the ticks of a span without a
//! timer begin.

use belfry_time::{Allowed, Anchor, Every, Kind, SignedDuration, Tick, Timestamp, Timing};

use crate::broken::{self, Broken};
use crate::check::Status;
use crate::definition::{Schedule, ScheduleDefinition};
use crate::model::{SkipRange, SkipReason, Token, TokenKind};
use crate::plan::{left_out, with_origin};

/// The resolution of stored instants.
const MICROSECOND: SignedDuration = SignedDuration::from_micros(1);

/// How far something that has happened may lie ahead before it is said that the clock was set back.
pub const CLOCK_BACK_MIN: SignedDuration = SignedDuration::from_mins(1);

/// How many definitions of a schedule are kept, the present one with those before it.
pub const REVISIONS_KEPT: i64 = 100;

/// Whether something happened at an instant that lies so far ahead that the clock was set back since.
pub fn is_of_later_clock(at: Timestamp, now: Timestamp) -> bool {
    at.duration_since(now) > CLOCK_BACK_MIN
}

/// A schedule's definition that can be used, or why it cannot.
pub type Compiled<'a> = Result<&'a Schedule, &'a str>;

/// A schedule as an edit finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Where it stands.
    pub status: Status,
    /// Since when.
    pub since: Timestamp,
    /// Its timer in the due index.
    pub timer: Option<Token>,
    /// Its tick that waits for room in a lane.
    pub deferred: Option<Timestamp>,
    /// Whether the end of a run arms it.
    pub waits: bool,
    /// Its first tick, once known.
    pub origin: Option<Timestamp>,
    /// The skips that are still being counted.
    pub open_skip: Option<SkipRange>,
    /// No tick of this timing is armed at or before this instant: those are planned, or belong to a time before. It need
    /// not be a tick, and may lie shortly before one to come. While there is a timer of a tick, this may be older than the
    /// truth, which is the instant before that tick.
    pub cursor_at: Option<Timestamp>,
    /// The last tick of any timing that has a result. While there is a timer of a tick, this may be older than the truth,
    /// which is the tick before that one: see [`tells_last`].
    pub planned_at: Option<Timestamp>,
}

/// A schedule after an edit. Skips that were being counted are closed, and no tick waits for a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Where it stands.
    pub status: Status,
    /// Since when.
    pub since: Timestamp,
    /// Its timer in the due index.
    pub timer: Option<Token>,
    /// Whether the end of the run that it waited for still arms it.
    pub waits: bool,
    /// Its first tick, where it is known.
    pub origin: Option<Timestamp>,
    /// See [`Found::cursor_at`].
    pub cursor_at: Option<Timestamp>,
    /// See [`Found::planned_at`].
    pub planned_at: Option<Timestamp>,
    /// Ranges of skips and misses that are complete, counted by the definition before the edit.
    pub closed: Vec<SkipRange>,
    /// Whether a new revision begins.
    pub new_revision: bool,
}

impl Change {
    /// How many ticks a pause, or `enabled: false`, has left out that this edit ends.
    pub fn skipped(&self) -> u64 {
        let disabled = self.closed.iter().filter(|range| range.reason == SkipReason::Disabled);
        disabled.map(|range| range.count).sum()
    }
}

/// How a pause ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// The ticks of the pause are skipped, and the next one comes after now.
    Skip,
    /// The ticks of the pause are planned by `catch_up`.
    CatchUp,
    /// As `Skip`, and the last planned tick is forgotten: after the clock was set back, ticks may come again.
    FromNow,
}

/// Why a one-shot never had a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeverFired {
    /// Its time had passed when it was first seen.
    TimePassed,
    /// Its time is not after the last planned tick of its schedule: the clock was set back after that.
    ClockBack {
        /// That tick.
        planned_at: Timestamp,
    },
}

/// A schedule that is new at `now`. `planned_before` is the last planned tick of a removed schedule of the same name: if the
/// clock was set back since, none of its ticks comes again.
pub fn add(
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    planned_before: Option<Timestamp>,
    now: Timestamp,
) -> Change {
    let is_known = |planned_at: &Timestamp| *planned_at > now && !broken::is(Broken::ReturnsWithoutPast);
    let planned_at = planned_before.filter(is_known);
    let change = Change {
        status: Status::Active,
        since: now,
        timer: None,
        waits: false,
        origin: None,
        cursor_at: planned_at,
        planned_at,
        closed: Vec::new(),
        new_revision: true,
    };
    let timer = if planned_at.is_some() { Token::next(now) } else { Token::first(now) };
    begin(change, definition, compiled, timer)
}

/// Whether a new definition changes more than the definition itself: then [`define`] says what.
pub fn redefines(
    status: &Status,
    old: Option<&ScheduleDefinition>,
    new: &ScheduleDefinition,
    compiled: Compiled<'_>,
) -> bool {
    is_new_timing(status, old, new, compiled)
        || old.is_none_or(|old| old.options.enabled != new.options.enabled)
}

fn is_new_timing(
    status: &Status,
    old: Option<&ScheduleDefinition>,
    new: &ScheduleDefinition,
    compiled: Compiled<'_>,
) -> bool {
    let heals = matches!(status, Status::Invalid { .. }) && compiled.is_ok();
    heals || old.is_none_or(|old| old.timing_key() != new.timing_key())
}

/// A new definition. `old` is none where the stored one cannot be read.
pub fn define(
    found: &Found,
    (old, old_compiled): (Option<&ScheduleDefinition>, Compiled<'_>),
    (new, compiled): (&ScheduleDefinition, Compiled<'_>),
    now: Timestamp,
) -> Change {
    if is_new_timing(&found.status, old, new, compiled) {
        return revise(found, old_compiled, new, compiled, now);
    }
    let kept = keep(found);
    match (&found.status, new.options.enabled) {
        (Status::Active, false) => unarm(found, compiled, Status::Disabled, now),
        (Status::Disabled, true) => rearm(found, new, compiled, Resume::Skip, now),
        _ => kept,
    }
}

/// A pause, or another in its place. None where there is nothing to pause, or where it is paused like that.
pub fn pause(found: &Found, compiled: Compiled<'_>, paused: Status, now: Timestamp) -> Option<Change> {
    let until = match &paused {
        Status::Paused { until, .. } => *until,
        _ => None,
    };
    let change = match &found.status {
        Status::Active => unarm(found, compiled, paused, now),
        Status::Paused { .. } if found.status != paused => Change { status: paused, ..keep(found) },
        _ => return None,
    };
    let timer = until.map(|until| Token::resume(change.since, until));
    Some(Change { timer, ..change })
}

/// The end of a pause by hand, or another try with a schedule that is invalid although its definition is right. Of any
/// other schedule, only [`Resume::FromNow`] changes something, and only while the clock is behind its ticks.
pub fn resume(
    found: &Found,
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    how: Resume,
    now: Timestamp,
) -> Option<Change> {
    match found.status {
        Status::Paused { .. } => Some(rearm(found, definition, compiled, how, now)),
        // Its definition is right: a tick of it could not be stored, and may be by now.
        Status::Invalid { .. } if compiled.is_ok() => Some(rearm(found, definition, compiled, how, now)),
        Status::Active if how == Resume::FromNow => {
            clock_back(found, compiled.ok()?, now)?;
            let change = Change { planned_at: last_planned(found, compiled, now), ..keep(found) };
            Some(arm_from(forget(change, now), definition, compiled, now))
        }
        Status::Exhausted if how == Resume::FromNow => {
            let never_fired = never_fired(compiled.ok()?, found)?;
            let change = Change { since: now, ..forget(keep(found), now) };
            let begun = begin(change, definition, compiled, Token::next(now));
            Some(begun).filter(|begun| never_fired != NeverFired::TimePassed && begun.timer.is_some())
        }
        _ => None,
    }
}

/// The end of a pause by the clock, whose plan found this timer; none if it found that there is no tick to come.
pub fn pause_ended(
    found: &Found,
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    planned: Option<Token>,
    until: Timestamp,
) -> Change {
    let (status, is_armed) = standing(definition, compiled);
    let left_out = unarmed(found, compiled, until).map(|range| range.to);
    let planned_at = found.planned_at.max(left_out);
    let cursor_at = found.cursor_at.max(Some(until));
    let kept = Change { since: until, cursor_at, planned_at, ..keep(found) };
    match (is_armed, planned) {
        _ if found.waits => Change { status, timer: None, ..kept },
        (true, None) => Change { status: Status::Exhausted, timer: None, ..kept },
        (true, planned) => Change { status, timer: planned, ..kept },
        (false, _) => Change { status, timer: None, ..kept },
    }
}

/// A schedule that is removed: nothing arms it any more.
pub fn remove(found: &Found, compiled: Compiled<'_>, now: Timestamp) -> Change {
    let change = end_timing(found, compiled, now);
    Change { timer: None, new_revision: false, origin: found.origin, ..change }
}

/// A removed schedule that comes back while a run of it lives: a new revision of the same schedule, so that this run counts
/// for it. It had no ticks meanwhile. A pause that has not ended lasts.
pub fn restore(
    found: &Found,
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    now: Timestamp,
) -> Change {
    revise(found, Err("it was removed"), definition, compiled, now)
}

/// What a span without a timer has left out up to an instant: a pause, `enabled: false`, a definition that is wrong.
pub fn unarmed(found: &Found, compiled: Compiled<'_>, at: Timestamp) -> Option<SkipRange> {
    let (reason, until) = match &found.status {
        Status::Disabled => (SkipReason::Disabled, at),
        Status::Paused { until, .. } => (SkipReason::Disabled, until.map_or(at, |until| until.min(at))),
        Status::Invalid { .. } => (SkipReason::Invalid, at),
        Status::Active | Status::Exhausted => return None,
    };
    if found.waits {
        return None;
    }
    let timing = with_origin(compiled.ok()?.timing.as_ref()?, found.origin);
    left_out(&timing, reason, found.cursor_at.unwrap_or(found.since), until)
}

/// When a schedule goes on whose ticks lie ahead of the clock, because that was set back. None if it does not wait for
/// that.
pub fn clock_back(found: &Found, schedule: &Schedule, now: Timestamp) -> Option<Timestamp> {
    let timer = found.timer.filter(|_| found.status == Status::Active)?;
    let soon = now.saturating_add(CLOCK_BACK_MIN).ok()?;
    let timing = with_origin(schedule.timing.as_ref()?, found.origin);
    // The tick of a timing that counts from the last planned one is its next, however far ahead.
    let is_planned_ahead = found.planned_at > Some(soon);
    let is_back = match timer.kind {
        TokenKind::Tick => is_planned_ahead || is_ahead(&timing, timer.tick_at, soon),
        TokenKind::First | TokenKind::Next => is_planned_ahead || timer.due_at > soon,
        TokenKind::Resume | TokenKind::Deferred => false,
    };
    is_back.then(|| found.planned_at.map_or(timer.due_at, |planned_at| planned_at.max(timer.due_at)))
}

/// Why a one-shot is exhausted that never had a tick. None of any other schedule.
pub fn never_fired(schedule: &Schedule, found: &Found) -> Option<NeverFired> {
    if found.status != Status::Exhausted || !schedule.is_one_shot() || found.origin.is_some() {
        return None;
    }
    // The cursor is the later one of that tick and of the instant at which it was first seen.
    let planned_at = found.planned_at.filter(|planned_at| found.cursor_at <= Some(*planned_at));
    Some(planned_at.map_or(NeverFired::TimePassed, |planned_at| NeverFired::ClockBack { planned_at }))
}

/// The latest instant whose next tick is the given one. Without a timing, the instant before it.
pub fn before<'a>(timing: impl Into<Option<&'a Timing>>, tick_at: Timestamp) -> Timestamp {
    let distance = timing.into().and_then(chain).unwrap_or(MICROSECOND);
    tick_at.checked_sub(distance).unwrap_or(tick_at)
}

/// Whether a timer of this tick tells which tick before it has a result: on a grid the one before it, otherwise the instant
/// that its interval counts from. A tick of an interval at which the window opens does not: the window may have moved it.
pub fn tells_last(timing: &Timing, tick_at: Timestamp) -> bool {
    let just_before = tick_at.checked_sub(MICROSECOND).unwrap_or(tick_at);
    chain(timing).is_none() || timing.allows(just_before) == Allowed::Yes
}

/// The distance of ticks that count from each other, or from what happened, rather than lie on a grid.
fn chain(timing: &Timing) -> Option<SignedDuration> {
    match timing.kind() {
        Kind::Every { every: Every::Interval(every), anchor: Anchor::Completion | Anchor::Start } => {
            Some(*every)
        }
        _ => None,
    }
}

/// The tick that a timer stands for, where that is known without a plan.
pub fn tick_of(
    timing: &Timing,
    timer: Token,
    origin: Option<Timestamp>,
    cursor_at: Option<Timestamp>,
) -> Option<Tick> {
    let timing = with_origin(timing, origin);
    let cursor_at = cursor_at.filter(|_| !broken::is(Broken::FiresAgain));
    let from = |at: Timestamp| cursor_at.map_or(at, |cursor| cursor.max(at));
    match timer.kind {
        TokenKind::Tick => Some(Tick { tick_at: timer.tick_at, due_at: timer.due_at }),
        TokenKind::Deferred => Some(timing.tick(timer.tick_at)),
        TokenKind::First => timing.first(from(timer.tick_at)),
        TokenKind::Next => timing.next(from(timer.tick_at)),
        TokenKind::Resume => timing.next(from(timer.due_at)),
    }
}

/// Where a schedule stands by its definition alone, and whether it has a timer then.
fn standing(definition: &ScheduleDefinition, compiled: Compiled<'_>) -> (Status, bool) {
    match compiled {
        Err(reason) => (Status::Invalid { reason: reason.to_owned() }, false),
        Ok(_) if !definition.options.enabled => (Status::Disabled, false),
        Ok(schedule) => (Status::Active, schedule.timing.is_some()),
    }
}

/// Nothing but the skips that were being counted is different.
fn keep(found: &Found) -> Change {
    Change {
        status: found.status.clone(),
        since: found.since,
        timer: found.timer,
        waits: found.waits,
        origin: found.origin,
        cursor_at: found.cursor_at,
        planned_at: found.planned_at,
        closed: found.open_skip.into_iter().collect(),
        new_revision: false,
    }
}

/// Takes the timer of an active schedule away. The ticks that it stood for, also those that are overdue, belong to the
/// span that begins.
fn unarm(found: &Found, compiled: Compiled<'_>, status: Status, now: Timestamp) -> Change {
    let (cursor_at, origin) = unplanned(found, compiled);
    let cursor_at = cursor_at.or(found.cursor_at).or(Some(now));
    let cursor_at = if broken::is(Broken::PauseDropsOverdue) { Some(now) } else { cursor_at };
    let planned_at = last_planned(found, compiled, now);
    Change { status, since: now, timer: None, cursor_at, planned_at, origin, ..keep(found) }
}

/// Ends a span without a timer.
fn rearm(
    found: &Found,
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    how: Resume,
    now: Timestamp,
) -> Change {
    let (status, is_armed) = standing(definition, compiled);
    let end = span_end(&found.status, now);
    let cursor_at = found.cursor_at.unwrap_or(found.since);
    let kept = keep(found);
    let change = match how {
        Resume::CatchUp => {
            Change { timer: Some(Token::next(cursor_at.min(now))), cursor_at: Some(cursor_at), ..kept }
        }
        Resume::Skip | Resume::FromNow => {
            let left_out = unarmed(found, compiled, end);
            let planned_at = kept.planned_at.max(left_out.map(|range| range.to));
            let closed = kept.closed.iter().copied().chain(left_out).collect();
            let cursor_at = Some(cursor_at.max(end));
            Change { timer: Some(Token::next(end)), cursor_at, planned_at, closed, ..kept }
        }
    };
    let change = Change { status, ..change };
    let change = match how {
        Resume::FromNow => arm_from(forget(change, now), definition, compiled, end),
        Resume::Skip | Resume::CatchUp => change,
    };
    let timer = change.timer.filter(|_| is_armed && !found.waits);
    Change { since: now, timer, ..change }
}

/// Arms a schedule that goes on after an instant. Without a first tick it counts from there.
fn arm_from(
    change: Change,
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    at: Timestamp,
) -> Change {
    match change.origin {
        Some(_) => Change { timer: Some(Token::next(at)), ..change },
        None => begin(change, definition, compiled, Token::next(at)),
    }
}

/// Forgets the last planned tick. The first one goes with it if both lie ahead: it counts from the other, and calendar steps
/// would count from there.
fn forget(change: Change, now: Timestamp) -> Change {
    let origin = change.origin.filter(|origin| *origin <= now || change.planned_at <= Some(now));
    Change { cursor_at: None, planned_at: None, origin, ..change }
}

/// A timing ends: its ticks that have come are recorded. No tick of another one fires at or before now, and none fires
/// again.
fn end_timing(found: &Found, compiled: Compiled<'_>, now: Timestamp) -> Change {
    let closed = close(found, compiled, now);
    let planned_at = last_planned(found, compiled, now).max(closed.iter().map(|range| range.to).max());
    Change {
        waits: false,
        origin: None,
        cursor_at: planned_at.max(Some(now)),
        planned_at,
        closed,
        new_revision: true,
        ..keep(found)
    }
}

/// A new timing: no tick before now fires, and none fires again.
fn revise(
    found: &Found,
    old: Compiled<'_>,
    definition: &ScheduleDefinition,
    compiled: Compiled<'_>,
    now: Timestamp,
) -> Change {
    let change = end_timing(found, old, now);
    if let Status::Paused { until, .. } = found.status
        && until.is_none_or(|until| until > now)
    {
        let timer = until.map(|until| Token::resume(found.since, until));
        let begun = begin(change, definition, compiled, Token::next(now));
        return Change { status: found.status.clone(), since: found.since, timer, ..begun };
    }
    let begun = begin(Change { since: now, ..change }, definition, compiled, Token::next(now));
    let since = if begun.status == found.status { found.since } else { now };
    Change { since, ..begun }
}

/// A revision begins with a timer that asks for a tick. That of a one-shot is known at once.
fn begin(change: Change, definition: &ScheduleDefinition, compiled: Compiled<'_>, timer: Token) -> Change {
    let (status, is_armed) = standing(definition, compiled);
    let from = change.cursor_at.map_or(timer.tick_at, |cursor| cursor.max(timer.tick_at));
    let cursor_at = change.cursor_at.or((!is_armed).then_some(from));
    let change = Change { status, cursor_at, ..change };
    let one_shot = compiled.ok().filter(|schedule| schedule.is_one_shot());
    let Some(timing) = one_shot.and_then(|schedule| schedule.timing.as_ref()) else {
        return Change { timer: is_armed.then_some(timer), ..change };
    };
    match timing.first(from) {
        Some(tick) if is_armed => Change { timer: Some(tick.into()), origin: Some(tick.tick_at), ..change },
        Some(tick) => Change {
            timer: None,
            origin: Some(tick.tick_at),
            cursor_at: Some(before(timing, tick.tick_at)),
            ..change
        },
        None if is_armed => Change { status: Status::Exhausted, timer: None, ..change },
        None => Change { timer: None, ..change },
    }
}

/// When a span without a timer has ended: a pause may have ended before anybody planned its end.
fn span_end(status: &Status, now: Timestamp) -> Timestamp {
    match status {
        Status::Paused { until: Some(until), .. } => now.min(*until),
        _ => now,
    }
}

/// The instant after which an active schedule's ticks are not planned, and its first tick where that is known; none
/// where it has no tick to come that is known.
fn unplanned(found: &Found, compiled: Compiled<'_>) -> (Option<Timestamp>, Option<Timestamp>) {
    let timing = compiled.ok().and_then(|schedule| schedule.timing.as_ref());
    let deferred = found.deferred.map(|tick_at| Token::deferred(tick_at, tick_at));
    let (Some(timing), Some(timer)) = (timing, found.timer.or(deferred)) else {
        return (None, found.origin);
    };
    let tick = tick_of(timing, timer, found.origin, found.cursor_at);
    let origin = found.origin.or(tick.map(|tick| tick.tick_at));
    let cursor_at = match timer.kind {
        // The clock of such a timer starts at an instant of its own.
        TokenKind::Next | TokenKind::Resume => {
            Some(found.cursor_at.map_or(timer.tick_at, |at| at.max(timer.tick_at)))
        }
        _ => tick.map(|tick| before(timing, tick.tick_at)),
    };
    (cursor_at, origin)
}

/// The last tick of any timing that has a result, or the instant that the tick to come counts from.
fn last_planned(found: &Found, compiled: Compiled<'_>, now: Timestamp) -> Option<Timestamp> {
    let timer = found.timer.filter(|timer| timer.is_of_tick());
    let tick_at = timer.map(|timer| timer.tick_at).or(found.deferred);
    let Some(tick_at) = tick_at.filter(|_| found.status == Status::Active) else { return found.planned_at };
    let Some(timing) = compiled.ok().and_then(|schedule| schedule.timing.as_ref()) else {
        // It cannot be read: what is before its tick and has come may be planned.
        return found.planned_at.max(Some(before(None, tick_at).min(now)));
    };
    // Before its first tick, a timing has planned nothing.
    let Some(origin) = found.origin.filter(|origin| *origin < tick_at) else { return found.planned_at };
    let last = match chain(timing) {
        _ if !tells_last(timing, tick_at) => None,
        Some(_) => Some(before(timing, tick_at)),
        None => last_before(&with_origin(timing, Some(origin)), tick_at, origin),
    };
    found.planned_at.max(last)
}

/// The last tick of a grid before one of its ticks, not before the first.
fn last_before(timing: &Timing, tick_at: Timestamp, first: Timestamp) -> Option<Timestamp> {
    let (floor, just_before) = (before(None, first), before(None, tick_at));
    // So far back, and eight times as far if there is none.
    let mut back = SignedDuration::from_mins(1);
    loop {
        let from = tick_at.checked_sub(back).map_or(floor, |from| from.max(floor));
        let last = timing.newest_between(from, just_before, 1).pop();
        if last.is_some() || from == floor {
            return last.map(|tick| tick.tick_at);
        }
        back = back.checked_mul(8).unwrap_or(SignedDuration::MAX);
    }
}

/// Whether a timer's tick is another than the next one after an instant: then those between them are planned.
fn is_ahead(timing: &Timing, tick_at: Timestamp, now: Timestamp) -> bool {
    tick_at > now && timing.next(now).is_some_and(|next| next.tick_at < tick_at)
}

/// Ranges of the ticks that have come and will not be planned: those of a span without a timer, and those that are
/// overdue.
fn close(found: &Found, compiled: Compiled<'_>, now: Timestamp) -> Vec<SkipRange> {
    let mut closed: Vec<SkipRange> = found.open_skip.into_iter().collect();
    closed.extend(unarmed(found, compiled, now));
    let timing = compiled.ok().and_then(|schedule| schedule.timing.as_ref());
    let overdue_from = match &found.status {
        Status::Active if broken::is(Broken::EditForgetsOverdue) => None,
        Status::Active => unplanned(found, compiled).0,
        Status::Paused { until: Some(until), .. } if *until < now && !found.waits => {
            Some(found.cursor_at.map_or(*until, |cursor| cursor.max(*until)))
        }
        _ => None,
    };
    let origin = unplanned(found, compiled).1;
    closed.extend(
        timing
            .zip(overdue_from)
            .and_then(|(timing, from)| left_out(&with_origin(timing, origin), SkipReason::Edited, from, now)),
    );
    closed
}
