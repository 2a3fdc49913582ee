//! Given a schedule, its standing and the facts, when its token is due, then this is the plan.

#![allow(clippy::unwrap_used)]

use belfry_core::breaker::Admits;
use belfry_core::definition::{AnchorName, CatchUp, IfRunning, Options, ScheduleDefinition, When};
use belfry_core::plan::{Next, PlannedRun, Spread, Standing, spread_catch_up};
use belfry_core::{Facts, Plan, Schedule, SkipRange, SkipReason, Token, TokenKind, Trigger, plan};
use belfry_time::{SignedDuration, Timestamp};

fn at(text: &str) -> Timestamp {
    format!("2026-03-{text}Z").parse().unwrap()
}

fn schedule(when: When, options: Options) -> Schedule {
    ScheduleDefinition { when, options }.compile("agent/schedule").unwrap()
}

fn cron(expression: &str, catch_up: CatchUp) -> Schedule {
    schedule(When::Cron(expression.into()), Options { catch_up: Some(catch_up), ..Options::default() })
}

fn every(interval: &str, anchor: AnchorName, catch_up: Option<CatchUp>) -> Schedule {
    schedule(When::Every(interval.into()), Options { anchor, catch_up, ..Options::default() })
}

fn due(tick: &str) -> Standing {
    let tick_at = at(tick);
    Standing::of(Token { kind: TokenKind::Tick, tick_at, due_at: tick_at })
}

fn ticks(plan: &Plan) -> Vec<Timestamp> {
    plan.runs.iter().map(|run| run.tick_at).collect()
}

fn next_tick(plan: &Plan) -> Timestamp {
    match plan.next {
        Next::Token(token) => token.tick_at,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tick_on_time_makes_one_run_and_arms_the_next() {
    let schedule = cron("*/5 * * * *", CatchUp::Skip);
    let plan = plan(&schedule, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:00:00.2"));
    let run = PlannedRun {
        tick_at: at("02T12:00:00"),
        not_before: at("02T12:00:00"),
        trigger: Trigger::Schedule,
        probe: false,
    };
    assert_eq!((plan.runs.as_slice(), next_tick(&plan)), (&[run][..], at("02T12:05:00")));
    assert!(plan.closed.is_empty() && plan.open_skip.is_none() && !plan.cancel_live);
}

#[test]
fn a_tick_is_late_after_half_the_distance_and_not_before() {
    let schedule = cron("*/5 * * * *", CatchUp::Skip);
    assert_eq!(plan(&schedule, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:02:30")).runs.len(), 1);
    let late = plan(&schedule, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:02:30.001"));
    assert_eq!(late.closed, [SkipRange::one(SkipReason::MissedSkip, at("02T12:00:00"))]);
    assert_eq!((late.runs.len(), next_tick(&late)), (0, at("02T12:05:00")));
    let hourly = cron("0 * * * *", CatchUp::Skip);
    assert_eq!(plan(&hourly, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:10:00")).runs.len(), 1);
    assert_eq!(plan(&hourly, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:10:00.001")).runs.len(), 0);
    let patient = schedule_with_late_after(3_600_000);
    assert_eq!(ticks(&plan(&patient, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:59:00"))).len(), 1);
}

fn schedule_with_late_after(ms: u64) -> Schedule {
    schedule(When::Cron("0 * * * *".into()), Options { late_after_ms: Some(ms), ..Options::default() })
}

#[test]
fn three_days_of_downtime_follow_the_catch_up_policy() {
    let standing = due("02T12:00:00");
    let now = at("05T12:00:00.5");
    // 3 days × 288 ticks, and the one on time.
    let skip = plan(&cron("*/5 * * * *", CatchUp::Skip), &standing, &Facts::CLEAR, now);
    assert_eq!(
        skip.closed,
        [SkipRange {
            reason: SkipReason::MissedSkip,
            from: at("02T12:00:00"),
            to: at("05T11:55:00"),
            count: 864
        }]
    );
    assert_eq!(ticks(&skip), [at("05T12:00:00")]);

    let once = plan(&cron("*/5 * * * *", CatchUp::RunOnce), &standing, &Facts::CLEAR, now);
    assert_eq!(once.closed[0].count, 863);
    assert_eq!(ticks(&once), [at("05T11:55:00")]);
    assert_eq!(once.runs[0].trigger, Trigger::CatchUp);
    // The tick on time meets the run that was caught up.
    assert_eq!(once.open_skip, Some(SkipRange::one(SkipReason::AlreadyRunning, at("05T12:00:00"))));

    let all = plan(&cron("*/5 * * * *", CatchUp::RunAll), &standing, &Facts::CLEAR, now);
    assert_eq!((all.closed[0].count, all.runs.len()), (764, 100));
    assert_eq!(all.closed[0].to, at("05T03:35:00"));
    assert_eq!((all.runs[0].tick_at, all.runs[99].tick_at), (at("05T03:40:00"), at("05T11:55:00")));
    assert!(all.runs.is_sorted_by_key(|run| run.tick_at));
    for plan in [skip, once, all] {
        assert_eq!(next_tick(&plan), at("05T12:05:00"));
        let accounted: u64 = plan.closed.iter().chain(&plan.open_skip).map(|range| range.count).sum();
        assert_eq!(accounted + plan.runs.len() as u64, 865, "every tick has one result");
    }
}

#[test]
fn three_days_of_100ms_are_counted_and_not_walked() {
    let standing = due("02T12:00:00");
    let now = at("05T12:00:00.02");
    for (policy, runs) in [(CatchUp::Skip, 0), (CatchUp::RunOnce, 1), (CatchUp::RunAll, 100)] {
        let plan = plan(&every("100ms", AnchorName::Slot, Some(policy)), &standing, &Facts::CLEAR, now);
        let caught_up = plan.runs.iter().filter(|run| run.trigger == Trigger::CatchUp).count();
        assert_eq!(caught_up, runs);
        let accounted: u64 = plan.closed.iter().chain(&plan.open_skip).map(|range| range.count).sum();
        assert_eq!(accounted + plan.runs.len() as u64, 2_592_001);
        assert_eq!(plan.closed[0].from, at("02T12:00:00"));
        assert_eq!(next_tick(&plan), at("05T12:00:00.1"));
    }
}

#[test]
fn an_overdue_interval_is_simply_due() {
    for (last, expected) in [("02T11:55:00", 1), ("02T10:00:00", 1)] {
        let plan =
            plan(&every("5m", AnchorName::Completion, None), &due(last), &Facts::CLEAR, at("02T12:00:00"));
        assert_eq!((plan.runs.len(), plan.next), (expected, Next::Wait));
    }
    let plan =
        plan(&every("5m", AnchorName::Start, None), &due("02T10:02:00"), &Facts::CLEAR, at("02T12:00:00"));
    assert_eq!((ticks(&plan), next_tick(&plan)), (vec![at("02T11:57:00")], at("02T12:02:00")));
    assert_eq!(
        plan.closed,
        [SkipRange {
            reason: SkipReason::MissedRunOnce,
            from: at("02T10:02:00"),
            to: at("02T11:52:00"),
            count: 23
        }]
    );
}

#[test]
fn a_completion_anchored_tick_that_made_no_run_arms_the_next() {
    let schedule = every("5m", AnchorName::Completion, None);
    let busy = Facts { live: 1, ..Facts::CLEAR };
    let plan = plan(&schedule, &due("02T12:00:00"), &busy, at("02T12:00:00.1"));
    assert_eq!(plan.open_skip, Some(SkipRange::one(SkipReason::AlreadyRunning, at("02T12:00:00"))));
    assert_eq!(next_tick(&plan), at("02T12:05:00"));
}

#[test]
fn the_first_tick_is_found_and_remembered() {
    let first = Standing::of(Token::first(at("02T12:00:07")));
    let found = plan(&every("5m", AnchorName::Completion, None), &first, &Facts::CLEAR, at("02T12:00:08"));
    assert_eq!((next_tick(&found), found.origin), (at("02T12:00:07"), Some(at("02T12:00:07"))));
    let found = plan(&every("5m", AnchorName::Slot, None), &first, &Facts::CLEAR, at("02T12:00:08"));
    assert_eq!(next_tick(&found), at("02T12:05:00"));
    let past = schedule(When::At("2026-03-01T00:00:00Z".into()), Options::default());
    assert_eq!(plan(&past, &first, &Facts::CLEAR, at("02T12:00:08")).next, Next::Expired);
    let soon = schedule(When::After("90s".into()), Options::default());
    let found = plan(&soon, &first, &Facts::CLEAR, at("02T12:00:08"));
    assert_eq!((next_tick(&found), found.origin), (at("02T12:01:37"), Some(at("02T12:01:37"))));
    // The clock starts at the end of the awaited run, at an edit, at a resume.
    let next = Standing { token: Token::next(at("02T12:10:00")), ..first };
    assert_eq!(
        next_tick(&plan(&every("5m", AnchorName::Completion, None), &next, &Facts::CLEAR, at("02T12:10:01"))),
        at("02T12:15:00")
    );
}

#[test]
fn one_shots_fire_once_also_late_and_end_exhausted() {
    let once = schedule(When::At("2026-03-02T12:00:00Z".into()), Options::default());
    for now in ["02T12:00:00", "05T00:00:00"] {
        let plan = plan(&once, &due("02T12:00:00"), &Facts::CLEAR, at(now));
        assert_eq!((plan.runs.len(), plan.next), (1, Next::Exhausted));
    }
    let skip = schedule(
        When::At("2026-03-02T12:00:00Z".into()),
        Options { catch_up: Some(CatchUp::Skip), ..Options::default() },
    );
    let plan = plan(&skip, &due("02T12:00:00"), &Facts::CLEAR, at("05T00:00:00"));
    assert_eq!((plan.runs.len(), plan.closed.len(), plan.next), (0, 1, Next::Exhausted));
}

#[test]
fn the_first_failing_check_names_the_reason() {
    let now = at("02T12:00:00.1");
    let overlap = |if_running: IfRunning| {
        schedule(
            When::Cron("*/5 * * * *".into()),
            Options { if_running, max_pending: 2, ..Options::default() },
        )
    };
    let reason = |schedule: &Schedule, facts: Facts| {
        plan(schedule, &due("02T12:00:00"), &facts, now).open_skip.map(|skip| skip.reason)
    };
    let live = Facts { live: 1, pending: 1, ..Facts::CLEAR };
    assert_eq!(reason(&overlap(IfRunning::Skip), live), Some(SkipReason::AlreadyRunning));
    assert_eq!(reason(&overlap(IfRunning::Queue), live), None);
    assert_eq!(
        reason(&overlap(IfRunning::Queue), Facts { live: 3, pending: 2, ..Facts::CLEAR }),
        Some(SkipReason::QueueFull)
    );
    assert_eq!(reason(&overlap(IfRunning::Allow), Facts { live: 50, pending: 50, ..Facts::CLEAR }), None);
    assert_eq!(
        reason(&overlap(IfRunning::Skip), Facts { breaker: Admits::No, budget_exhausted: true, ..live }),
        Some(SkipReason::CircuitOpen)
    );
    assert_eq!(
        reason(&overlap(IfRunning::Skip), Facts { budget_exhausted: true, ..live }),
        Some(SkipReason::BudgetExhausted)
    );
    let cancelled = plan(&overlap(IfRunning::Cancel), &due("02T12:00:00"), &live, now);
    assert!(cancelled.cancel_live && cancelled.runs.len() == 1);
    let probed = plan(
        &overlap(IfRunning::Skip),
        &due("02T12:00:00"),
        &Facts { breaker: Admits::Probe, ..Facts::CLEAR },
        now,
    );
    assert!(probed.runs[0].probe);
}

#[test]
fn equal_skips_are_one_range_until_the_reason_changes() {
    let schedule = cron("*/5 * * * *", CatchUp::Skip);
    let busy = Facts { live: 1, ..Facts::CLEAR };
    let mut standing = due("02T12:00:00");
    for minute in [0, 5, 10] {
        let tick_at = at(&format!("02T12:{minute:02}:00"));
        standing.token = Token { kind: TokenKind::Tick, tick_at, due_at: tick_at };
        let plan = plan(&schedule, &standing, &busy, tick_at);
        assert!(plan.closed.is_empty());
        standing.open_skip = plan.open_skip;
    }
    let range = SkipRange {
        reason: SkipReason::AlreadyRunning,
        from: at("02T12:00:00"),
        to: at("02T12:10:00"),
        count: 3,
    };
    assert_eq!(standing.open_skip, Some(range));
    let tick_at = at("02T12:15:00");
    standing.token = Token { kind: TokenKind::Tick, tick_at, due_at: tick_at };
    let other = plan(&schedule, &standing, &Facts { breaker: Admits::No, ..busy }, tick_at);
    assert_eq!(
        (other.closed.as_slice(), other.open_skip),
        (&[range][..], Some(SkipRange::one(SkipReason::CircuitOpen, tick_at)))
    );
    let ran = plan(&schedule, &standing, &Facts::CLEAR, tick_at);
    assert_eq!((ran.closed.as_slice(), ran.open_skip, ran.runs.len()), (&[range][..], None, 1));
}

#[test]
fn missed_ticks_run_only_while_the_window_is_open() {
    let window = Options {
        only_between: Some("08:00-18:00".into()),
        not_on: vec!["sat".into()],
        catch_up: Some(CatchUp::RunOnce),
        ..Options::default()
    };
    let schedule = schedule(When::Cron("0 9 * * *".into()), window);
    let reason = |now: &str| {
        plan(&schedule, &due("02T09:00:00"), &Facts::CLEAR, at(now)).open_skip.map(|skip| skip.reason)
    };
    assert_eq!(reason("02T17:00:00"), None);
    assert_eq!(reason("02T19:00:00"), Some(SkipReason::OutsideWindow));
    assert_eq!(reason("07T12:00:00"), Some(SkipReason::OutsideDay));
}

#[test]
fn a_batch_of_missed_ticks_is_cut_by_nothing_but_windows_breaker_and_budget() {
    let all = Options {
        catch_up: Some(CatchUp::RunAll),
        if_running: IfRunning::Queue,
        max_pending: 2,
        ..Options::default()
    };
    let schedule = schedule(When::Cron("0 * * * *".into()), all);
    let plan = |facts: Facts| plan(&schedule, &due("02T01:00:00"), &facts, at("02T12:30:00"));
    assert_eq!(plan(Facts { live: 5, pending: 5, ..Facts::CLEAR }).runs.len(), 12);
    assert_eq!(plan(Facts { budget_exhausted: true, ..Facts::CLEAR }).runs.len(), 0);
    // A tick that is on time joins the end of the batch, which takes no room from it.
    let on_time = |pending| {
        let facts = Facts { live: pending, pending, ..Facts::CLEAR };
        let plan = belfry_core::plan::plan(&schedule, &due("02T01:00:00"), &facts, at("02T12:01:00"));
        plan.runs.last().map(|run| run.trigger)
    };
    assert_eq!(on_time(1), Some(Trigger::Schedule));
    assert_eq!(on_time(2), Some(Trigger::CatchUp), "two wait already that are no missed ticks");
    // One probe, and nothing behind it.
    let probed = plan(Facts { breaker: Admits::Probe, ..Facts::CLEAR });
    assert_eq!(
        (probed.runs.len(), probed.open_skip.unwrap().reason, probed.open_skip.unwrap().count),
        (1, SkipReason::CircuitOpen, 11)
    );
}

/// By how much the runs of a plan are delayed, which is decided at `now`.
fn delays(schedule: &Schedule, from: &str, now: Timestamp) -> Vec<SignedDuration> {
    let mut plan = plan(schedule, &due(from), &Facts::CLEAR, now);
    spread_catch_up(&mut [("agent/schedule", schedule, &mut plan)], Spread::default(), now);
    plan.runs.iter().map(|run| run.not_before.duration_since(now)).collect()
}

#[test]
fn many_caught_up_runs_are_spread_in_tick_order() {
    let schedule = cron("0 * * * *", CatchUp::RunAll);
    let now = at("02T12:30:00");
    assert_eq!(delays(&schedule, "02T10:00:00", now), [SignedDuration::ZERO; 3]);
    let spread = delays(&schedule, "02T01:00:00", now);
    assert!(
        spread.is_sorted()
            && spread[11] <= SignedDuration::from_secs(30)
            && spread[11] > SignedDuration::from_secs(10),
        "{spread:?}"
    );
    assert_eq!(spread, delays(&schedule, "02T01:00:00", now), "a hash, not a draw");
}

#[test]
fn a_tick_that_is_on_time_starts_behind_those_that_were_missed() {
    for catch_up in [CatchUp::RunOnce, CatchUp::RunAll] {
        // 12:00 is on time at 12:04; those before it were missed, and more than three of them are spread.
        for first in ["02T11:00:00", "02T01:00:00"] {
            let options = Options {
                catch_up: Some(catch_up),
                if_running: IfRunning::Queue,
                max_pending: 1_000,
                ..Options::default()
            };
            let hourly = schedule(When::Cron("0 * * * *".into()), options);
            let now = at("02T12:04:00");
            let mut plan = plan(&hourly, &due(first), &Facts::CLEAR, now);
            assert!(plan.runs.len() >= 2);
            assert_eq!(plan.runs.last().map(|run| run.trigger), Some(Trigger::Schedule));
            let in_order = |plan: &Plan| plan.runs.is_sorted_by_key(|run| (run.not_before, run.tick_at));
            assert!(in_order(&plan), "{plan:?}");
            spread_catch_up(&mut [("agent/schedule", &hourly, &mut plan)], Spread::default(), now);
            assert!(in_order(&plan), "{plan:?}");
        }
    }
}

#[test]
fn a_spread_is_over_before_the_next_tick_and_before_the_window_ends() {
    let all = |when: When, options: Options| {
        let (catch_up, if_running) = (Some(CatchUp::RunAll), IfRunning::Allow);
        schedule(when, Options { catch_up, if_running, late_after_ms: Some(1_000), ..options })
    };
    let every = |text: &str, anchor| all(When::Every(text.into()), Options { anchor, ..Options::default() });
    let cron = |text: &str| all(When::Cron(text.into()), Options::default());
    let only = |between: &str, not_on: &[&str]| {
        let not_on = not_on.iter().map(|day| (*day).to_owned()).collect();
        let options = Options { only_between: Some(between.into()), not_on, ..Options::default() };
        all(When::Cron("*/5 * * * *".into()), options)
    };
    // The first tick that is due, now; the longest delay in milliseconds. 2026-03-07 is a Saturday.
    let cases = [
        (cron("0 * * * *"), "02T01:00:00", "02T12:30:00", 30_000),
        // A tenth of the time to the next tick.
        (cron("0 * * * *"), "02T01:00:00", "02T12:58:00", 12_000),
        (cron("*/2 * * * *"), "02T01:00:00", "02T12:00:30", 9_000),
        // None where the next tick is less than a minute away.
        (cron("0 * * * *"), "02T01:00:00", "02T12:59:01", 0),
        (every("5s", AnchorName::Slot), "02T12:00:00", "02T12:30:02", 0),
        (every("5s", AnchorName::Completion), "02T12:00:00", "02T12:30:02", 0),
        (every("59s", AnchorName::Completion), "02T12:00:00", "02T13:00:02", 0),
        // By completion the next tick is a whole interval away, whatever the grid of those that were missed.
        (every("2m", AnchorName::Completion), "02T12:00:00", "02T13:01:58", 12_000),
        (every("daily", AnchorName::Completion), "01T12:00:00", "20T11:59:50", 30_000),
        // The window ends at 13:00, and at midnight before a day that is left out.
        (only("08:00-13:00", &[]), "02T08:00:00", "02T12:59:54", 5_999),
        (only("22:00-02:00", &["sat"]), "06T22:00:00", "06T23:59:54", 5_999),
        (only("08:00-13:00", &[]), "02T08:00:00", "02T12:59:59.9", 99),
    ];
    for (schedule, from, now, longest) in cases {
        let now = at(now);
        let delays = delays(&schedule, from, now);
        let longest = SignedDuration::from_millis(longest);
        let words = schedule.timing.as_ref().unwrap().describe();
        let caught_up = delays.iter().filter(|delay| !delay.is_negative()).max().copied().unwrap();
        assert!(delays.len() > 3 && caught_up <= longest, "{words} at {now}: {caught_up:?}");
        // With so many of them the last is near the end.
        assert!(caught_up >= longest * 3 / 4, "{words} at {now}: {caught_up:?}");
    }
}

#[test]
fn each_schedule_of_a_batch_has_its_own_spread() {
    let now = at("02T12:30:02");
    let slow = cron("0 * * * *", CatchUp::RunOnce);
    let fast = every("5s", AnchorName::Slot, Some(CatchUp::RunOnce));
    let once = schedule(When::At("2026-03-02T12:00:00Z".into()), Options::default());
    let mut plans: Vec<Plan> = Vec::new();
    let schedules: Vec<&Schedule> = (0..8).flat_map(|_| [&slow, &fast, &once]).collect();
    for schedule in &schedules {
        plans.push(plan(schedule, &due("02T12:00:00"), &Facts::CLEAR, now));
    }
    let names: Vec<String> = (0..plans.len()).map(|n| format!("agent/{n}")).collect();
    let mut batch: Vec<_> = names
        .iter()
        .zip(&schedules)
        .zip(&mut plans)
        .map(|((name, schedule), plan)| (name.as_str(), *schedule, plan))
        .collect();
    spread_catch_up(&mut batch, Spread::default(), now);
    let latest = |kind: &Schedule| {
        let of = schedules.iter().zip(&plans).filter(|(schedule, _)| **schedule == kind);
        of.flat_map(|(_, plan)| &plan.runs).map(|run| run.not_before).max().unwrap()
    };
    assert!(latest(&slow) > now && latest(&once) > now);
    assert!(
        latest(&slow) <= now + SignedDuration::from_secs(30)
            && latest(&once) <= now + SignedDuration::from_secs(30)
    );
    assert_eq!(latest(&fast), now, "its next tick is seconds away");
}

#[test]
fn the_end_of_a_pause_records_what_it_left_out_and_finds_the_next_tick() {
    let paused = |since: &str, until: &str, origin: Option<&str>| Standing {
        origin: origin.map(at),
        ..Standing::of(Token::resume(at(since), at(until)))
    };
    let disabled = |from: &str, to: &str, count| SkipRange {
        reason: SkipReason::Disabled,
        from: at(from),
        to: at(to),
        count,
    };
    let slot = every("10m", AnchorName::Slot, None);
    let completion = every("10m", AnchorName::Completion, None);
    let daily = every("daily", AnchorName::Start, None);
    let origin = Some("01T12:00:00");
    // Schedule, begin and end of the pause, first tick; what was left out, and the next tick.
    let cases = [
        (
            &slot,
            "02T12:00:00",
            "02T12:35:00.001",
            None,
            Some(("02T12:10:00", "02T12:30:00", 3)),
            "02T12:40:00",
        ),
        (&slot, "02T12:01:00", "02T12:09:59.999", None, None, "02T12:10:00"),
        (&slot, "02T12:01:00", "02T12:10:00", None, Some(("02T12:10:00", "02T12:10:00", 1)), "02T12:20:00"),
        (&completion, "02T12:00:00", "02T12:05:00", origin, None, "02T12:15:00"),
        (
            &daily,
            "02T13:00:00",
            "04T11:00:00",
            origin,
            Some(("03T12:00:00", "03T12:00:00", 1)),
            "04T12:00:00",
        ),
    ];
    for (schedule, since, until, origin, skipped, next) in cases {
        let standing = paused(since, until, origin);
        // However late it is looked at.
        for now in [until, "09T00:00:00"] {
            let plan = plan(schedule, &standing, &Facts::CLEAR, at(now));
            let expected: Vec<_> =
                skipped.map(|(from, to, count)| disabled(from, to, count)).into_iter().collect();
            assert_eq!((plan.closed.clone(), next_tick(&plan)), (expected, at(next)), "{since} to {until}");
            assert!(plan.runs.is_empty() && !plan.cancel_live);
        }
    }
    let once = schedule(When::At("2026-03-02T12:00:00Z".into()), Options::default());
    let plan = plan(&once, &paused("02T11:00:00", "02T13:00:00", None), &Facts::CLEAR, at("02T13:00:00"));
    assert_eq!(plan.closed, [disabled("02T12:00:00", "02T12:00:00", 1)], "its one instant is gone");
    assert_eq!(plan.next, Next::Exhausted);
}

#[test]
fn missed_ticks_of_an_interval_are_counted_on_its_grid() {
    // Minutes since the tick that is due, policy; runs, missed ticks, the next tick.
    let cases = [
        (0, CatchUp::Skip, 1, 0, 5),
        (4, CatchUp::Skip, 0, 1, 5),
        (5, CatchUp::Skip, 1, 1, 10),
        (10, CatchUp::Skip, 1, 2, 15),
        (13, CatchUp::Skip, 0, 3, 15),
        // One for all that were missed, and the one on time.
        (20, CatchUp::RunOnce, 2, 3, 25),
        (1000, CatchUp::RunAll, 101, 100, 1005),
    ];
    for (minutes, policy, runs, missed, next) in cases {
        let schedule = every("5m", AnchorName::Slot, Some(policy));
        let now = at("02T12:00:00") + SignedDuration::from_mins(minutes);
        let facts = Facts::CLEAR;
        let allow = ScheduleDefinition {
            options: Options { if_running: IfRunning::Allow, ..schedule.definition.options.clone() },
            ..(*schedule.definition).clone()
        };
        let plan = plan(&allow.compile("agent/schedule").unwrap(), &due("02T12:00:00"), &facts, now);
        let counted: u64 = plan.closed.iter().map(|range| range.count).sum();
        let expected = at("02T12:00:00") + SignedDuration::from_mins(next);
        assert_eq!(
            (plan.runs.len(), counted, next_tick(&plan)),
            (runs, missed, expected),
            "{minutes} minutes"
        );
    }
}

#[test]
fn a_grid_counts_from_its_phase() {
    // Phase, interval, now and the next tick, in milliseconds since 1970.
    let cases = [
        (1_000, 5_000, 6_500, 11_000),
        (2_000, 5_000, 6_500, 7_000),
        (1_000, 5_000, 6_000, 11_000),
        (1_000, 5_000, 22_000, 26_000),
        (0, 1_000, 86_400_000, 86_401_000),
    ];
    for (phase, interval, now, next) in cases {
        let phase = (phase > 0).then(|| format!("{phase}ms"));
        let options = Options { anchor: AnchorName::Slot, phase, ..Options::default() };
        let schedule = schedule(When::Every(format!("{interval}ms")), options);
        let tick = schedule.timing.unwrap().next(Timestamp::from_millisecond(now).unwrap()).unwrap();
        assert_eq!(tick.tick_at.as_millisecond(), next, "{interval} at {now}");
    }
}

fn deferred(tick: &str, since: &str) -> Standing {
    Standing::of(Token::deferred(at(tick), at(since)))
}

#[test]
fn a_deferred_tick_is_planned_as_if_it_were_then() {
    let schedule = cron("*/5 * * * *", CatchUp::Skip);
    // Hours later: it is not late, and what came meanwhile is left out.
    let plan = plan(&schedule, &deferred("02T12:00:00", "02T12:00:01"), &Facts::CLEAR, at("02T14:02:00"));
    let run = PlannedRun {
        tick_at: at("02T12:00:00"),
        not_before: at("02T12:00:00"),
        trigger: Trigger::Schedule,
        probe: false,
    };
    assert_eq!((plan.runs.as_slice(), next_tick(&plan)), (&[run][..], at("02T14:05:00")));
    let skipped = SkipRange {
        reason: SkipReason::QueueFull,
        from: at("02T12:05:00"),
        to: at("02T14:00:00"),
        count: 24,
    };
    assert_eq!((plan.closed.as_slice(), plan.open_skip), (&[][..], Some(skipped)));
}

#[test]
fn a_deferred_batch_is_the_batch_it_was() {
    let schedule = cron("*/5 * * * *", CatchUp::RunAll);
    let then = plan(&schedule, &due("02T12:00:00"), &Facts::CLEAR, at("02T12:32:00"));
    let later = plan(&schedule, &deferred("02T12:00:00", "02T12:32:00"), &Facts::CLEAR, at("02T12:34:59"));
    assert_eq!((later.runs.len(), &later), (6, &then), "nothing has come since");
    let later = plan(&schedule, &deferred("02T12:00:00", "02T12:32:00"), &Facts::CLEAR, at("02T12:35:00"));
    assert_eq!((later.runs, later.closed), (then.runs, Vec::from_iter(then.open_skip)));
    assert_eq!(later.open_skip, Some(SkipRange::one(SkipReason::QueueFull, at("02T12:35:00"))));
}

#[test]
fn a_deferred_interval_waits_for_its_run_and_leaves_out_nothing() {
    let schedule = every("5m", AnchorName::Completion, None);
    let standing = deferred("02T12:00:00", "02T12:00:00");
    let plan_of = |facts: &Facts| plan(&schedule, &standing, facts, at("02T12:31:00"));
    let made = plan_of(&Facts::CLEAR);
    assert_eq!((made.runs.len(), made.next, made.open_skip), (1, Next::Wait, None));
    // One that makes no run after all goes on from here.
    let refused = plan_of(&Facts { breaker: Admits::No, ..Facts::CLEAR });
    assert_eq!((refused.runs.len(), next_tick(&refused)), (0, at("02T12:35:00")));
    let open = SkipRange::one(SkipReason::CircuitOpen, at("02T12:00:00"));
    let left_out =
        SkipRange { reason: SkipReason::QueueFull, from: at("02T12:05:00"), to: at("02T12:30:00"), count: 6 };
    assert_eq!((refused.closed.as_slice(), refused.open_skip), (&[open][..], Some(left_out)));
}

#[test]
fn a_deferred_tick_keeps_its_jitter() {
    let options = Options { jitter: Some("4m".into()), catch_up: Some(CatchUp::Skip), ..Options::default() };
    let schedule = schedule(When::Cron("*/5 * * * *".into()), options);
    let first = schedule.timing.as_ref().unwrap().next(at("02T11:59:00")).unwrap();
    let standing = Standing::of(Token::deferred(first.tick_at, first.due_at));
    let next = schedule.timing.as_ref().unwrap().next(first.tick_at).unwrap();
    assert!(next.due_at > next.tick_at, "the next one has come, but is not due");
    let plan = plan(&schedule, &standing, &Facts::CLEAR, next.tick_at);
    assert_eq!(plan.runs[0].not_before, first.due_at);
    assert_eq!((plan.next, plan.open_skip), (Next::Token(next.into()), None));
}

#[test]
fn a_tick_that_was_read_as_due_is_planned_as_due() {
    // The clock was set back by a minute since it was read.
    let once = schedule(When::At("2026-03-02T12:00:00Z".into()), Options::default());
    for schedule in [&once, &cron("*/5 * * * *", CatchUp::Skip), &every("5m", AnchorName::Completion, None)] {
        let plan = plan(schedule, &due("02T12:00:00"), &Facts::CLEAR, at("02T11:59:00"));
        assert_eq!((ticks(&plan), plan.closed.len()), (vec![at("02T12:00:00")], 0));
        assert_eq!(plan.runs[0].trigger, Trigger::Schedule);
    }
}

#[test]
fn nothing_is_armed_at_or_before_the_cursor() {
    let cursor_at = Some(at("02T12:00:00"));
    let next = |schedule: &Schedule, token| {
        let standing = Standing { cursor_at, ..Standing::of(token) };
        next_tick(&plan(schedule, &standing, &Facts::CLEAR, at("02T11:00:00")))
    };
    let (now, cron) = (at("02T11:00:00"), cron("*/5 * * * *", CatchUp::Skip));
    assert_eq!(next(&cron, Token::next(now)), at("02T12:05:00"));
    assert_eq!(next(&cron, Token::first(now)), at("02T12:05:00"));
    assert_eq!(next(&cron, Token::resume(at("02T10:00:00"), now)), at("02T12:05:00"));
    assert_eq!(next(&every("5m", AnchorName::Completion, None), Token::next(now)), at("02T12:05:00"));
}

#[test]
fn a_plan_without_a_next_token_names_its_last_tick() {
    let plan_of = |schedule: &Schedule, now| plan(schedule, &due("02T12:00:00"), &Facts::CLEAR, at(now));
    let completion = every("5m", AnchorName::Completion, Some(CatchUp::RunAll));
    assert_eq!(plan_of(&completion, "02T12:21:00").cursor_at, Some(at("02T12:20:00")));
    let once = schedule(When::At("2026-03-02T12:00:00Z".into()), Options::default());
    assert_eq!(plan_of(&once, "05T00:00:00").cursor_at, Some(at("02T12:00:00")));
    assert_eq!(plan_of(&cron("*/5 * * * *", CatchUp::Skip), "02T12:00:01").cursor_at, None);
}

/// Every tick of a plan with what became of it, counted on its own: run, or the reason of its range.
fn results(schedule: &Schedule, plan: &Plan, ticks: &[Timestamp]) -> Vec<&'static str> {
    let timing = schedule.timing.as_ref().unwrap();
    let ranges: Vec<SkipRange> = plan.closed.iter().chain(&plan.open_skip).copied().collect();
    for range in &ranges {
        let inside = ticks.iter().filter(|tick| (range.from..=range.to).contains(tick)).count();
        assert_eq!(range.count, inside as u64, "{range:?} of {}", timing.describe());
        assert!(ticks.contains(&range.from) && ticks.contains(&range.to), "{range:?}");
    }
    let of = |tick: &Timestamp| {
        let run = plan.runs.iter().find(|run| run.tick_at == *tick).map(|run| run.trigger.as_str());
        let mut skips = ranges.iter().filter(|range| (range.from..=range.to).contains(tick));
        let skip = skips.next().map(|range| range.reason.as_str());
        assert!(skips.next().is_none() && run.is_some() != skip.is_some(), "{tick} {run:?} {skip:?}");
        run.or(skip).unwrap()
    };
    ticks.iter().map(of).collect()
}

/// Results with how many ticks in a row have each.
type Counts = &'static [(&'static str, usize)];

#[test]
fn one_plan_makes_a_thousand_runs_and_leaves_out_the_oldest_that_are_on_time() {
    let second = |n: usize| at("02T12:00:00") + SignedDuration::from_secs(n as i64);
    // Policy, `late_after` in seconds, jitter, minutes of downtime; how many of each result, in order.
    let cases: [(CatchUp, u64, Option<&str>, usize, Counts); 8] = [
        (CatchUp::RunOnce, 7200, None, 30, &[("queue_full", 801), ("schedule", 1000)]),
        (CatchUp::RunAll, 7200, Some("900ms"), 30, &[("queue_full", 801), ("schedule", 1000)]),
        (
            CatchUp::RunAll,
            999,
            None,
            30,
            &[("missed_run_all", 701), ("catch_up", 100), ("queue_full", 100), ("schedule", 900)],
        ),
        (CatchUp::RunAll, 600, None, 30, &[("missed_run_all", 1100), ("catch_up", 100), ("schedule", 601)]),
        (
            CatchUp::RunOnce,
            1500,
            None,
            30,
            &[("missed_run_once", 299), ("catch_up", 1), ("queue_full", 502), ("schedule", 999)],
        ),
        (CatchUp::Skip, 1500, None, 30, &[("missed_skip", 300), ("queue_full", 501), ("schedule", 1000)]),
        (CatchUp::Skip, 1, None, 30, &[("missed_skip", 1799), ("schedule", 2)]),
        (CatchUp::Skip, 1500, None, 10, &[("schedule", 601)]),
    ];
    for (catch_up, late_after, jitter, minutes, expected) in cases {
        let options = Options {
            anchor: AnchorName::Slot,
            catch_up: Some(catch_up),
            late_after_ms: Some(late_after * 1000),
            jitter: jitter.map(str::to_owned),
            if_running: IfRunning::Allow,
            ..Options::default()
        };
        let schedule = schedule(When::Every("1s".into()), options);
        let ticks: Vec<_> = (0..=minutes * 60).map(second).collect();
        let now =
            ticks[ticks.len() - 1] + SignedDuration::from_millis(if jitter.is_some() { 999 } else { 0 });
        let plan = plan(&schedule, &due("02T12:00:00"), &Facts::CLEAR, now);
        assert!(plan.runs.len() <= 1000);
        let results = results(&schedule, &plan, &ticks);
        let expected: Vec<_> =
            expected.iter().flat_map(|(words, count)| std::iter::repeat_n(*words, *count)).collect();
        assert_eq!(results.len(), expected.len());
        let differs = results.iter().zip(&expected).position(|(one, other)| one != other);
        let differs = differs.map(|place| (place, results[place], expected[place]));
        assert_eq!(differs, None, "{catch_up:?} late after {late_after}s, {jitter:?}");
        assert_eq!(next_tick(&plan), second(minutes * 60 + 1));
    }
}

#[test]
fn jitter_decides_whether_the_last_of_many_is_late() {
    let options = Options {
        anchor: AnchorName::Slot,
        catch_up: Some(CatchUp::Skip),
        late_after_ms: Some(1_500_000),
        jitter: Some("9s".into()),
        if_running: IfRunning::Allow,
        ..Options::default()
    };
    let schedule = schedule(When::Every("10s".into()), options);
    let timing = schedule.timing.as_ref().unwrap();
    let first = at("02T00:00:00");
    let standing = Standing::of(timing.tick(first).into());
    for ms in (0..20_000).step_by(500) {
        let now = at("02T08:00:00") + SignedDuration::from_millis(ms);
        let plan = plan(&schedule, &standing, &Facts::CLEAR, now);
        let on_time = |tick: &belfry_time::Tick| {
            tick.due_at <= now && now.duration_since(tick.due_at) <= SignedDuration::from_secs(1500)
        };
        let all = std::iter::once(timing.tick(first))
            .chain(timing.ticks(first))
            .take_while(|tick| tick.tick_at <= now);
        let expected: Vec<_> = all.filter(on_time).map(|tick| tick.tick_at).collect();
        assert_eq!(ticks(&plan), expected, "{now}");
    }
}

#[test]
fn a_tick_is_never_late_within_a_second() {
    let tight = |jitter: Option<&str>, every: &str| {
        let options = Options {
            anchor: AnchorName::Slot,
            jitter: jitter.map(str::to_owned),
            catch_up: Some(CatchUp::Skip),
            if_running: IfRunning::Allow,
            ..Options::default()
        };
        schedule(When::Every(every.into()), options)
    };
    // Close to the next tick, or to many of them.
    for (schedule, runs) in [(tight(Some("9.999s"), "10s"), 1), (tight(None, "100ms"), 10)] {
        let timing = schedule.timing.as_ref().unwrap();
        let tick = timing.tick(at("02T12:00:00"));
        let standing = Standing::of(tick.into());
        let now = tick.due_at + SignedDuration::from_millis(999);
        let plan = plan(&schedule, &standing, &Facts::CLEAR, now);
        assert!(plan.runs.len() >= runs && plan.closed.is_empty(), "{plan:?}");
        assert!(plan.runs.iter().all(|run| run.trigger == Trigger::Schedule));
    }
}
