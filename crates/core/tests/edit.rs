//! Given a schedule, when it is edited, paused, resumed, disabled, enabled or removed, then this is what changes.

#![allow(clippy::unwrap_used)]

use belfry_core::check::Status;
use belfry_core::definition::{AnchorName, CatchUp, Options, ScheduleDefinition, When};
use belfry_core::edit::{self, Change, Found, NeverFired, Resume};
use belfry_core::plan::{Next, Standing};
use belfry_core::{Facts, Schedule, SkipRange, SkipReason, Token, TokenKind, plan};
use belfry_time::Timestamp;

fn at(text: &str) -> Timestamp {
    format!("2026-03-{text}Z").parse().unwrap()
}

fn schedule(when: When, options: Options) -> Schedule {
    ScheduleDefinition { when, options }.compile("agent/schedule").unwrap()
}

fn cron(expression: &str) -> Schedule {
    schedule(When::Cron(expression.into()), Options::default())
}

fn every(interval: &str, anchor: AnchorName) -> Schedule {
    schedule(When::Every(interval.into()), Options { anchor, ..Options::default() })
}

fn once(when: When) -> Schedule {
    schedule(when, Options::default())
}

fn disabled(schedule: &Schedule) -> Schedule {
    let options = Options { enabled: false, ..schedule.definition.options.clone() };
    ScheduleDefinition { options, ..(*schedule.definition).clone() }.compile("agent/schedule").unwrap()
}

fn tick(tick: &str) -> Option<Token> {
    Some(Token { kind: TokenKind::Tick, tick_at: at(tick), due_at: at(tick) })
}

fn active(timer: Option<Token>) -> Found {
    Found {
        status: Status::Active,
        since: at("01T00:00:00"),
        timer,
        deferred: None,
        waits: false,
        origin: Some(at("01T00:00:00")),
        open_skip: None,
        cursor_at: None,
        planned_at: None,
    }
}

/// A schedule as the next edit finds it.
fn found(change: Change) -> Found {
    let Change { status, since, timer, waits, origin, cursor_at, planned_at, .. } = change;
    Found { status, since, timer, deferred: None, waits, origin, open_skip: None, cursor_at, planned_at }
}

fn is_expired(schedule: &Schedule, change: &Change) -> bool {
    edit::never_fired(schedule, &found(change.clone())) == Some(NeverFired::TimePassed)
}

fn paused(until: Option<&str>) -> Status {
    Status::Paused { reason: None, until: until.map(at) }
}

fn pause(found: &Found, schedule: &Schedule, now: &str) -> Found {
    self::found(edit::pause(found, Ok(schedule), paused(None), at(now)).unwrap())
}

fn resume(found: &Found, schedule: &Schedule, how: Resume, now: &str) -> Change {
    edit::resume(found, &schedule.definition, Ok(schedule), how, at(now)).unwrap()
}

fn define(found: &Found, old: &Schedule, new: &Schedule, now: &str) -> Change {
    edit::define(found, (Some(&old.definition), Ok(old)), (&new.definition, Ok(new)), at(now))
}

fn range(reason: SkipReason, from: &str, to: &str, count: u64) -> SkipRange {
    SkipRange { reason, from: at(from), to: at(to), count }
}

/// The tick that a change arms, once the planner has looked at its timer.
fn armed(change: &Change, schedule: &Schedule, now: &str) -> Option<Timestamp> {
    let token = change.timer?;
    if token.kind == TokenKind::Tick {
        return Some(token.tick_at);
    }
    let standing = Standing { origin: change.origin, cursor_at: change.cursor_at, ..Standing::of(token) };
    match plan(schedule, &standing, &Facts::CLEAR, at(now)).next {
        Next::Token(token) => Some(token.tick_at),
        _ => None,
    }
}

#[test]
fn ticks_that_are_overdue_at_a_pause_belong_to_it() {
    // Schedule, its timer; what is skipped by a pause from 12:12 to 12:21, and the next tick.
    let cases = [
        (cron("*/5 * * * *"), "02T12:00:00", ("02T12:00:00", "02T12:20:00", 5), "02T12:25:00"),
        (every("5m", AnchorName::Slot), "02T12:10:00", ("02T12:10:00", "02T12:20:00", 3), "02T12:25:00"),
        (every("5m", AnchorName::Start), "02T12:01:00", ("02T12:01:00", "02T12:21:00", 5), "02T12:26:00"),
        (
            every("5m", AnchorName::Completion),
            "02T12:14:00",
            ("02T12:14:00", "02T12:19:00", 2),
            "02T12:26:00",
        ),
        (every("daily", AnchorName::Start), "02T00:00:00", ("02T00:00:00", "02T00:00:00", 1), "03T00:00:00"),
    ];
    for (schedule, timer, (from, to, count), next) in cases {
        let paused = pause(&active(tick(timer)), &schedule, "02T12:12:00");
        assert_eq!((paused.timer, paused.since), (None, at("02T12:12:00")));
        let resumed = resume(&paused, &schedule, Resume::Skip, "02T12:21:00");
        assert_eq!(resumed.closed, [range(SkipReason::Disabled, from, to, count)], "{schedule:?}");
        assert_eq!(armed(&resumed, &schedule, "02T12:21:00"), Some(at(next)), "{schedule:?}");
        // Planned by `catch_up`, nothing else is recorded.
        let caught_up = resume(&paused, &schedule, Resume::CatchUp, "02T12:21:00");
        assert_eq!(caught_up.closed, []);
        assert_eq!(armed(&caught_up, &schedule, "02T12:21:00"), Some(at(from)), "{schedule:?}");
        // The same for `enabled: false`, which nothing catches up.
        let off = disabled(&schedule);
        let switched_off = found(define(&active(tick(timer)), &schedule, &off, "02T12:12:00"));
        assert_eq!((&switched_off.status, switched_off.timer), (&Status::Disabled, None));
        let switched_on = define(&switched_off, &off, &schedule, "02T12:21:00");
        assert_eq!((&switched_on.closed, &switched_on.timer), (&resumed.closed, &resumed.timer));
        assert!(!switched_on.new_revision);
    }
}

#[test]
fn a_deferred_tick_is_overdue_like_any_other() {
    let schedule = cron("*/5 * * * *");
    let open = SkipRange::one(SkipReason::CircuitOpen, at("02T11:55:00"));
    for timer in [None, Some(Token::deferred(at("02T12:00:00"), at("02T12:00:01")))] {
        let deferred = Found { deferred: Some(at("02T12:00:00")), open_skip: Some(open), ..active(timer) };
        let paused = edit::pause(&deferred, Ok(&schedule), paused(None), at("02T12:07:00")).unwrap();
        assert_eq!(paused.closed, [open]);
        let resumed = resume(&found(paused), &schedule, Resume::Skip, "02T12:08:00");
        assert_eq!(resumed.closed, [range(SkipReason::Disabled, "02T12:00:00", "02T12:05:00", 2)]);
        let edited = define(&deferred, &schedule, &cron("0 * * * *"), "02T12:07:00");
        assert_eq!(edited.closed, [open, range(SkipReason::Edited, "02T12:00:00", "02T12:05:00", 2)]);
        assert_eq!(edit::remove(&deferred, Ok(&schedule), at("02T12:07:00")).closed, edited.closed);
    }
}

#[test]
fn a_schedule_that_is_paused_before_its_first_tick_was_found_has_one() {
    let schedule = every("5m", AnchorName::Completion);
    let new = found(edit::add(&schedule.definition, Ok(&schedule), None, at("02T12:00:00")));
    let paused = pause(&new, &schedule, "02T12:01:00");
    let resumed = resume(&paused, &schedule, Resume::CatchUp, "02T12:02:00");
    assert_eq!(armed(&resumed, &schedule, "02T12:02:00"), Some(at("02T12:00:00")));
    let resumed = resume(&paused, &schedule, Resume::Skip, "02T12:02:00");
    assert_eq!(resumed.closed, [range(SkipReason::Disabled, "02T12:00:00", "02T12:00:00", 1)]);
}

#[test]
fn a_schedule_that_waits_for_its_run_leaves_nothing_out() {
    let schedule = every("5m", AnchorName::Completion);
    let waits = Found { waits: true, cursor_at: Some(at("02T12:00:00")), ..active(None) };
    let paused = pause(&waits, &schedule, "02T12:01:00");
    assert!(paused.waits);
    for how in [Resume::Skip, Resume::CatchUp] {
        let resumed = resume(&paused, &schedule, how, "02T12:31:00");
        assert_eq!((resumed.closed.len(), resumed.timer, resumed.waits), (0, None, true));
    }
    // Its run has ended at 12:10.
    let ended = Found { waits: false, cursor_at: Some(at("02T12:10:00")), ..paused };
    let resumed = resume(&ended, &schedule, Resume::Skip, "02T12:31:00");
    assert_eq!(resumed.closed, [range(SkipReason::Disabled, "02T12:15:00", "02T12:30:00", 4)]);
}

#[test]
fn an_edit_of_the_timing_records_what_is_overdue_as_missed() {
    let hourly = cron("0 * * * *");
    // Timing before, its timer; what was missed at 12:12:03.
    let cases = [
        (cron("*/5 * * * *"), "02T12:00:00", Some(("02T12:00:00", "02T12:10:00", 3))),
        (cron("*/5 * * * *"), "02T12:15:00", None),
        (every("5m", AnchorName::Start), "02T11:59:00", Some(("02T11:59:00", "02T12:09:00", 3))),
        // Three days, which nobody walks.
        (every("100ms", AnchorName::Slot), "01T00:00:03", Some(("01T00:00:03", "02T12:12:03", 1_303_201))),
    ];
    for (old, timer, missed) in cases {
        let edited = define(&active(tick(timer)), &old, &hourly, "02T12:12:03");
        let missed = missed.map(|(from, to, count)| range(SkipReason::Edited, from, to, count));
        assert_eq!((edited.closed.clone(), edited.new_revision), (Vec::from_iter(missed), true));
        assert_eq!((edited.waits, edited.origin), (false, None));
        assert_eq!(armed(&edited, &hourly, "02T12:12:03"), Some(at("02T13:00:00")));
        let removed = edit::remove(&active(tick(timer)), Ok(&old), at("02T12:12:03"));
        assert_eq!((&removed.closed, removed.timer), (&edited.closed, None), "a removal is an edit");
        let back = edit::restore(&found(removed), &hourly.definition, Ok(&hourly), at("02T12:40:00"));
        assert!(back.closed.is_empty() && back.new_revision, "it had no ticks meanwhile");
        assert_eq!(armed(&back, &hourly, "02T12:40:00"), Some(at("02T13:00:00")));
    }
}

#[test]
fn a_schedule_that_is_restored_by_an_earlier_clock_fires_nothing_again() {
    let minutely = cron("* * * * *");
    let removed = edit::remove(&active(tick("02T12:10:00")), Ok(&minutely), at("02T12:05:00"));
    let back = edit::restore(&found(removed), &minutely.definition, Ok(&minutely), at("02T12:06:00"));
    assert_eq!(armed(&back, &minutely, "02T12:06:00"), Some(at("02T12:10:00")));
}

#[test]
fn a_pause_outlasts_a_removal() {
    let minutely = cron("* * * * *");
    let status = paused(Some("02T13:00:00"));
    let pause = edit::pause(&active(tick("02T12:00:00")), Ok(&minutely), status.clone(), at("02T11:59:00"));
    let removed = edit::remove(&found(pause.unwrap()), Ok(&minutely), at("02T12:10:00"));
    let back = |now| edit::restore(&found(removed.clone()), &minutely.definition, Ok(&minutely), at(now));
    assert_eq!(back("02T12:20:00").status, status);
    assert_eq!(back("02T12:20:00").timer.map(|timer| timer.due_at), Some(at("02T13:00:00")));
    assert_eq!(back("02T13:20:00").status, Status::Active);
}

#[test]
fn an_edit_of_a_paused_schedule_skips_by_the_old_timing_and_goes_on_by_the_new() {
    let (old, new) = (cron("*/5 * * * *"), cron("*/7 * * * *"));
    let paused = pause(&active(tick("02T12:00:00")), &old, "02T12:02:00");
    let edited = define(&paused, &old, &new, "02T12:12:00");
    assert_eq!(edited.closed, [range(SkipReason::Disabled, "02T12:00:00", "02T12:10:00", 3)]);
    assert!(matches!(edited.status, Status::Paused { .. }));
    let resumed = resume(&found(edited), &new, Resume::CatchUp, "02T12:30:00");
    assert_eq!(armed(&resumed, &new, "02T12:30:00"), Some(at("02T12:14:00")));
    // A pause that has ended meanwhile: what came after it is overdue.
    let until = Found { status: self::paused(Some("02T12:07:00")), ..paused };
    let edited = define(&until, &old, &new, "02T12:12:00");
    let expected = [
        range(SkipReason::Disabled, "02T12:00:00", "02T12:05:00", 2),
        range(SkipReason::Edited, "02T12:10:00", "02T12:10:00", 1),
    ];
    assert_eq!((edited.closed.as_slice(), &edited.status), (&expected[..], &Status::Active));
}

#[test]
fn an_edit_that_keeps_the_timing_moves_nothing() {
    let schedule = cron("*/5 * * * *");
    let more = ScheduleDefinition {
        options: Options { priority: 3, ..Options::default() },
        ..(*schedule.definition).clone()
    };
    assert!(!edit::redefines(&Status::Active, Some(&schedule.definition), &more, Ok(&schedule)));
    let invalid = Status::Invalid { reason: "bad".into() };
    assert!(edit::redefines(&invalid, Some(&schedule.definition), &more, Ok(&schedule)), "it heals");
}

#[test]
fn nothing_is_armed_before_what_was_planned_when_the_clock_was_set_back() {
    // 12:00 was planned; the clock says 11:00.
    let cases = [
        cron("*/5 * * * *"),
        every("5m", AnchorName::Slot),
        every("5m", AnchorName::Start),
        cron("*/5 * * * *"),
    ];
    for schedule in cases {
        let ahead = active(tick("02T12:05:00"));
        let next = Some(at("02T12:05:00"));
        assert_eq!(edit::clock_back(&ahead, &schedule, at("02T11:00:00")), next, "{schedule:?}");
        assert_eq!(edit::clock_back(&ahead, &schedule, at("02T12:00:30")), None);
        let paused = pause(&ahead, &schedule, "02T11:00:00");
        for how in [Resume::Skip, Resume::CatchUp] {
            let resumed = resume(&paused, &schedule, how, "02T11:00:10");
            assert_eq!((armed(&resumed, &schedule, "02T11:00:10"), resumed.closed.len()), (next, 0));
        }
        let off = disabled(&schedule);
        let switched_off = found(define(&ahead, &schedule, &off, "02T11:00:00"));
        let switched_on = define(&switched_off, &off, &schedule, "02T11:00:10");
        assert_eq!(armed(&switched_on, &schedule, "02T11:00:10"), next);
        let minutely = cron("* * * * *");
        for before in [ahead.clone(), paused, switched_off] {
            let edited = define(&before, &schedule, &minutely, "02T11:00:10");
            let edited = Change { timer: Some(Token::next(at("02T11:00:10"))), ..edited };
            let first = armed(&edited, &minutely, "02T11:00:10").unwrap();
            assert!(first > at("02T12:00:00") && first <= at("02T12:05:00"), "{schedule:?}: {first}");
        }
        // A person may say that the clock is right now.
        let anew = resume(&ahead, &schedule, Resume::FromNow, "02T11:00:10");
        assert!(armed(&anew, &schedule, "02T11:00:10").unwrap() <= at("02T11:05:10"), "{schedule:?}");
    }
    let planned_at = Some(at("02T12:00:00"));
    let exhausted = Found { status: Status::Exhausted, cursor_at: planned_at, planned_at, ..active(None) };
    let edited =
        define(&exhausted, &once(When::At("2026-03-02T12:00:00Z".into())), &cron("* * * * *"), "02T11:00:00");
    assert_eq!(armed(&edited, &cron("* * * * *"), "02T11:00:00"), Some(at("02T12:01:00")));
}

#[test]
fn an_edit_does_not_wait_for_a_tick_to_come_of_the_old_timing() {
    let (weekly, hourly) = (cron("0 0 * * 0"), cron("0 * * * *"));
    let ahead = active(tick("08T00:00:00"));
    let off = disabled(&weekly);
    let paused = pause(&ahead, &weekly, "02T12:00:10");
    let resumed = found(resume(&paused, &weekly, Resume::Skip, "02T12:00:20"));
    assert_eq!(
        armed(&resume(&paused, &weekly, Resume::Skip, "02T12:00:20"), &weekly, "02T12:00:20"),
        Some(at("08T00:00:00"))
    );
    let switched_off = found(define(&ahead, &weekly, &off, "02T12:00:10"));
    assert_eq!(edit::clock_back(&ahead, &weekly, at("02T12:00:10")), None);
    assert_eq!(
        edit::resume(&ahead, &weekly.definition, Ok(&weekly), Resume::FromNow, at("02T12:00:10")),
        None
    );
    for before in [ahead, paused, resumed, switched_off] {
        let edited = define(&before, &weekly, &hourly, "02T12:01:00");
        let edited = Change { timer: Some(Token::next(at("02T12:01:00"))), ..edited };
        assert_eq!(armed(&edited, &hourly, "02T12:01:00"), Some(at("02T13:00:00")));
    }
}

#[test]
fn an_edit_by_a_clock_that_was_set_back_goes_on_after_the_last_tick_that_was_planned() {
    // 12:00 and 12:30 were planned; the clock says 11:50. The old timing has its next tick a day later.
    let (daily, hourly) = (cron("0,30 12 * * *"), cron("15 * * * *"));
    let ahead = active(tick("03T12:00:00"));
    let paused = pause(&ahead, &daily, "02T11:40:00");
    for before in [ahead, paused] {
        let edited = define(&before, &daily, &hourly, "02T11:50:00");
        assert_eq!(edited.cursor_at, Some(at("02T12:30:00")), "{before:?}");
        let edited = Change { timer: Some(Token::next(at("02T11:50:00"))), ..edited };
        assert_eq!(armed(&edited, &hourly, "02T11:50:00"), Some(at("02T13:15:00")));
    }
}

/// A change as the next edit finds it after the planner has looked at its timer.
fn looked_at(change: Change, schedule: &Schedule, now: &str) -> Found {
    let found = found(change);
    let Some(token) = found.timer.filter(|token| token.kind != TokenKind::Tick) else { return found };
    let standing = Standing { origin: found.origin, cursor_at: found.cursor_at, ..Standing::of(token) };
    let plan = plan(schedule, &standing, &Facts::CLEAR, at(now));
    let Next::Token(timer) = plan.next else { panic!("it has no tick to come: {plan:?}") };
    Found { timer: Some(timer), origin: plan.origin.or(found.origin), ..found }
}

#[test]
fn a_second_edit_by_a_clock_that_is_behind_remembers_what_was_planned_before_the_first() {
    let slot = |interval| every(interval, AnchorName::Slot);
    // Timing before, its timer after the tick at 12:00:20; a timing between; the clock of the first and second edit.
    let cases = [
        (slot("10s"), "02T12:00:30", slot("7s"), "02T12:00:01", "02T12:00:02"),
        // The clock is set back between the two edits.
        (slot("10s"), "02T12:00:30", slot("1h"), "02T12:00:25", "02T12:00:01"),
        (slot("10s"), "02T12:00:30", cron("0 0 * * 0"), "02T12:00:25", "02T12:00:01"),
        (
            every("10s", AnchorName::Start),
            "02T12:00:30",
            every("1h", AnchorName::Start),
            "02T12:00:25",
            "02T12:00:01",
        ),
        (slot("10s"), "02T12:00:30", once(When::After("1h".into())), "02T12:00:01", "02T12:00:02"),
    ];
    for (old, timer, between, first, second) in cases {
        let direct = define(&active(tick(timer)), &old, &between, first);
        let paused = pause(&active(tick(timer)), &old, first);
        let resumed = looked_at(resume(&paused, &old, Resume::Skip, first), &old, first);
        let after_pause = define(&resumed, &old, &between, first);
        for edited in [direct, after_pause] {
            let found = looked_at(edited, &between, first);
            let paused = pause(&found, &between, second);
            for before in [found, paused] {
                let edited = define(&before, &between, &slot("10s"), second);
                let edited = Change { timer: Some(Token::next(at(second))), ..edited };
                let next = armed(&edited, &slot("10s"), second);
                assert_eq!(next, Some(at("02T12:00:30")), "{old:?}, {between:?}, {before:?}");
            }
        }
    }
}

#[test]
fn an_edit_or_a_pause_by_a_clock_that_was_ahead_holds_nothing_up() {
    // The last tick was on Sunday. The clock says 14:00, and is corrected to 12:00.
    let (weekly, hourly) = (cron("0 0 * * 0"), cron("0 * * * *"));
    let before = Found { origin: Some(at("01T00:00:00")), ..active(tick("08T00:00:00")) };
    let paused = pause(&before, &weekly, "02T14:00:00");
    let resumed = looked_at(resume(&paused, &weekly, Resume::Skip, "02T14:00:10"), &weekly, "02T14:00:10");
    let monthly = cron("0 0 1 * *");
    let edited = looked_at(define(&before, &weekly, &monthly, "02T14:00:00"), &monthly, "02T14:00:00");
    for (old, before) in [(&weekly, resumed), (&monthly, edited)] {
        let edited = define(&before, old, &hourly, "02T12:00:10");
        assert_eq!(armed(&edited, &hourly, "02T12:00:10"), Some(at("02T13:00:00")), "{before:?}");
    }
}

#[test]
fn ticks_that_a_pause_left_out_are_not_planned_again_by_an_earlier_clock() {
    let (old, new) = (cron("*/5 * * * *"), cron("*/7 * * * *"));
    let paused =
        edit::pause(&active(tick("02T12:00:00")), Ok(&old), paused(Some("02T12:22:00")), at("02T11:59:00"));
    // In the pause it gets another timing, whose ticks at 12:07, 12:14 and 12:21 it leaves out.
    let edited = found(define(&found(paused.unwrap()), &old, &new, "02T12:01:00"));
    let standing = Standing { cursor_at: edited.cursor_at, ..Standing::of(edited.timer.unwrap()) };
    let plan = plan(&new, &standing, &Facts::CLEAR, at("02T12:22:00"));
    assert_eq!(plan.closed, [range(SkipReason::Disabled, "02T12:07:00", "02T12:21:00", 3)]);
    let Next::Token(timer) = plan.next else { panic!("{plan:?}") };
    let origin = Found { origin: plan.origin, ..edited };
    let ended = edit::pause_ended(&origin, &new.definition, Ok(&new), Some(timer), at("02T12:22:00"));
    let minutely = cron("* * * * *");
    let edited = define(&found(ended), &new, &minutely, "02T12:05:00");
    assert_eq!(armed(&edited, &minutely, "02T12:05:00"), Some(at("02T12:22:00")));
}

#[test]
fn an_edit_after_the_window_has_closed_does_not_wait_until_it_opens() {
    let options =
        Options { anchor: AnchorName::Start, only_between: Some("09:00-18:00".into()), ..Options::default() };
    let (old, minutely) = (schedule(When::Every("10m".into()), options), cron("* * * * *"));
    // 17:57 is planned, and the window moves the next tick to the morning.
    let due = Standing { origin: Some(at("01T09:07:00")), ..Standing::of(tick("02T17:57:00").unwrap()) };
    let planned = plan(&old, &due, &Facts::CLEAR, at("02T17:57:00"));
    let Next::Token(timer) = planned.next else { panic!("{planned:?}") };
    assert_eq!(timer.tick_at, at("03T09:00:00"));
    let before = Found { planned_at: planned.cursor_at, cursor_at: planned.cursor_at, ..active(Some(timer)) };
    let paused = pause(&before, &old, "02T17:41:00");
    for before in [before, paused] {
        let edited = define(&before, &old, &minutely, "02T17:41:00");
        let edited = Change { timer: Some(Token::next(at("02T17:41:00"))), ..edited };
        assert_eq!(armed(&edited, &minutely, "02T17:41:00"), Some(at("02T17:58:00")), "{before:?}");
    }
}

#[test]
fn a_resume_from_now_forgets_a_first_tick_that_lies_ahead() {
    for interval in ["daily", "weekly", "monthly"] {
        let schedule = every(interval, AnchorName::Start);
        // Its first tick was planned at noon of the 12th; the clock is set back to the morning of the 2nd.
        let next = schedule.timing.clone().unwrap().with_origin(at("12T12:00:00")).next(at("12T12:00:00"));
        let ahead = Found { origin: Some(at("12T12:00:00")), ..active(next.map(Token::from)) };
        let paused = pause(&ahead, &schedule, "02T06:00:00");
        let expected = schedule.timing.clone().unwrap().next(at("02T06:00:10")).unwrap().tick_at;
        for before in [ahead, paused] {
            let resumed = resume(&before, &schedule, Resume::FromNow, "02T06:00:10");
            assert_eq!((resumed.origin, resumed.planned_at), (None, None), "{before:?}");
            assert_eq!(armed(&resumed, &schedule, "02T06:00:10"), Some(expected), "{before:?}");
        }
    }
    // Also where the timing was edited by the earlier clock: its first tick counts from the last planned one.
    let changes = [
        (every("daily", AnchorName::Completion), every("weekly", AnchorName::Completion)),
        (once(When::After("1s".into())), once(When::After("3s".into()))),
    ];
    for (old, new) in changes {
        let planned_at = Some(at("12T12:00:00"));
        let fired = Found { origin: planned_at, planned_at, cursor_at: planned_at, ..active(None) };
        let edited = looked_at(define(&fired, &old, &new, "02T06:00:00"), &new, "02T06:00:01");
        let until = edit::clock_back(&edited, &new, at("02T06:00:05"));
        assert!(until > planned_at, "it is said that it waits for the clock: {edited:?}");
        let expected = new.timing.clone().unwrap().first(at("02T06:00:10")).unwrap().tick_at;
        for before in [pause(&edited, &new, "02T06:00:05"), edited] {
            let resumed = resume(&before, &new, Resume::FromNow, "02T06:00:10");
            let armed = armed(&resumed, &new, "02T06:00:10");
            assert!(armed >= Some(expected) && armed < planned_at, "{before:?} {armed:?}");
        }
    }
    // A first tick that is still to come is none of those that are forgotten.
    let soon = once(When::After("90s".into()));
    let new = found(edit::add(&soon.definition, Ok(&soon), None, at("02T12:00:00")));
    let paused = pause(&new, &soon, "02T12:00:10");
    let resumed = resume(&paused, &soon, Resume::FromNow, "02T12:00:20");
    assert_eq!(armed(&resumed, &soon, "02T12:00:20"), Some(at("02T12:01:30")));
}

#[test]
fn a_one_shot_first_seen_after_its_time_is_exhausted_at_once() {
    let past = once(When::At("2026-03-01T00:00:00Z".into()));
    let new = edit::add(&past.definition, Ok(&past), None, at("02T12:00:00"));
    assert_eq!((&new.status, new.timer, new.origin), (&Status::Exhausted, None, None));
    assert!(is_expired(&past, &new));
    let to_come = once(When::At("2026-03-03T00:00:00Z".into()));
    let new = edit::add(&to_come.definition, Ok(&to_come), None, at("02T12:00:00"));
    assert_eq!((&new.status, new.timer), (&Status::Active, tick("03T00:00:00")));
    assert_eq!(new.origin, Some(at("03T00:00:00")));
    assert!(!is_expired(&to_come, &Change { status: Status::Exhausted, ..new.clone() }), "it has fired");
    let edited = define(&found(new), &to_come, &past, "02T12:00:00");
    assert!(is_expired(&past, &edited), "also by an edit");
}

#[test]
fn a_one_shot_that_is_edited_by_an_earlier_clock_says_why_it_does_not_fire() {
    let one_shot = |at: &str| once(When::At(format!("2026-03-{at}Z")));
    let planned_at = Some(at("02T12:00:00"));
    let fired = Found {
        status: Status::Exhausted,
        origin: planned_at,
        cursor_at: planned_at,
        planned_at,
        ..active(None)
    };
    // It fired at 12:00, and the clock says 11:00.
    let noon = one_shot("02T12:00:00");
    let between = one_shot("02T11:30:00");
    let edited = found(define(&fired, &noon, &between, "02T11:00:00"));
    assert_eq!((&edited.status, edited.timer), (&Status::Exhausted, None), "nothing is armed before noon");
    let behind = NeverFired::ClockBack { planned_at: at("02T12:00:00") };
    assert_eq!(edit::never_fired(&between, &edited), Some(behind));
    for how in [Resume::Skip, Resume::CatchUp] {
        assert_eq!(edit::resume(&edited, &between.definition, Ok(&between), how, at("02T11:10:00")), None);
    }
    let resumed = resume(&edited, &between, Resume::FromNow, "02T11:10:00");
    assert_eq!((&resumed.status, resumed.timer), (&Status::Active, tick("02T11:30:00")));
    assert_eq!((resumed.new_revision, resumed.planned_at), (false, None));
    let late = edit::resume(&edited, &between.definition, Ok(&between), Resume::FromNow, at("02T11:40:00"));
    assert_eq!(late, None, "its time has passed");
    assert_eq!(edit::resume(&fired, &noon.definition, Ok(&noon), Resume::FromNow, at("02T11:00:00")), None);
    // Later, with a clock that is right, a time that has passed is only that.
    let past = one_shot("02T12:30:00");
    let edited = found(define(&edited, &between, &past, "02T13:00:00"));
    assert_eq!(edit::never_fired(&past, &edited), Some(NeverFired::TimePassed));
    // One that is to come is armed.
    let later = one_shot("02T12:30:00");
    assert_eq!(define(&fired, &noon, &later, "02T11:00:00").timer, tick("02T12:30:00"));
}

#[test]
fn the_delay_of_a_one_shot_begins_when_it_is_first_seen() {
    let soon = once(When::After("90s".into()));
    let off = disabled(&soon);
    let new = found(edit::add(&off.definition, Ok(&off), None, at("02T12:00:00")));
    assert_eq!((&new.status, new.origin), (&Status::Disabled, Some(at("02T12:01:30"))));
    let on = define(&new, &off, &soon, "02T12:01:00");
    assert_eq!((armed(&on, &soon, "02T12:01:00"), on.closed.len()), (Some(at("02T12:01:30")), 0));
    let late = define(&new, &off, &soon, "02T12:05:00");
    assert_eq!(late.closed, [range(SkipReason::Disabled, "02T12:01:30", "02T12:01:30", 1)]);
    assert_eq!(armed(&late, &soon, "02T12:05:00"), None);
}

#[test]
fn catch_up_is_planned_from_the_first_overdue_tick() {
    let options = Options { catch_up: Some(CatchUp::RunAll), anchor: AnchorName::Slot, ..Options::default() };
    let schedule = schedule(When::Every("5s".into()), options);
    let paused = pause(&active(tick("02T12:00:00")), &schedule, "02T12:00:26");
    let resumed = resume(&paused, &schedule, Resume::CatchUp, "02T12:00:41");
    let first = armed(&resumed, &schedule, "02T12:00:41").unwrap();
    let due = Standing::of(Token { kind: TokenKind::Tick, tick_at: first, due_at: first });
    let runs = plan(&schedule, &due, &Facts::CLEAR, at("02T12:00:41")).runs;
    assert_eq!((runs.len(), runs[0].tick_at), (8, at("02T12:00:00")), "the ninth meets them on time");
}

/// Seeds 133, 209, 318: an interval that came back while the clock was behind fired its last tick once more.
#[test]
fn a_schedule_that_comes_back_while_the_clock_is_behind_goes_on_after_its_last_tick() {
    let (now, planned) = (at("02T12:00:00"), at("02T13:00:00"));
    let schedules = [
        every("10m", AnchorName::Completion),
        every("10m", AnchorName::Start),
        every("10m", AnchorName::Slot),
        cron("*/10 * * * *"),
    ];
    for schedule in schedules {
        let added = edit::add(&schedule.definition, Ok(&schedule), Some(planned), now);
        let timing = schedule.timing.as_ref().unwrap();
        let tick = edit::tick_of(timing, added.timer.unwrap(), added.origin, added.cursor_at).unwrap();
        assert_eq!(tick.tick_at, at("02T13:10:00"), "{:?}", schedule.definition.when);
    }
}
