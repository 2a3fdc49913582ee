//! `only_between` and `not_on`: which ticks move, and which are none.

#![allow(clippy::unwrap_used)]

use belfry_time::{Anchor, Cron, ErrorKind, Every, SignedDuration, Timestamp, Timing, Window, Zone};

fn window(between: &str, not_on: &[&str]) -> Window {
    let window = Window::ALWAYS.not_on(not_on).unwrap();
    if between.is_empty() { window } else { window.only_between(between).unwrap() }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn every(interval: &str, anchor: Anchor, window: Window, zone: &str) -> Timing {
    Timing::every(Every::parse(interval).unwrap(), anchor, Zone::get(zone).unwrap())
        .window(window)
        .build()
        .unwrap()
}

const SLOT: Anchor = Anchor::Slot { phase: SignedDuration::ZERO };

fn next(timing: &Timing, after: &str) -> String {
    timing.next(at(after)).unwrap().tick_at.to_string()
}

#[test]
fn the_start_is_in_and_the_end_is_out() {
    let timing = every("1m", Anchor::Start, window("08:00-12:00", &[]), "UTC");
    assert_eq!(next(&timing, "2026-03-02T07:59:00Z"), "2026-03-02T08:00:00Z");
    assert_eq!(next(&timing, "2026-03-02T11:58:00Z"), "2026-03-02T11:59:00Z");
    assert_eq!(next(&timing, "2026-03-02T11:58:59.999Z"), "2026-03-02T11:59:59.999Z");
    assert_eq!(next(&timing, "2026-03-02T11:59:00Z"), "2026-03-03T08:00:00Z");
}

#[test]
fn an_interval_moves_to_the_next_allowed_instant() {
    let timing =
        every("20m", Anchor::Completion, window("08:00-18:00", &["sat", "Sunday"]), "Australia/Sydney");
    // Friday evening in Sydney to Monday morning.
    assert_eq!(next(&timing, "2026-03-06T17:50:00+11:00"), "2026-03-08T21:00:00Z");
    assert_eq!(
        timing.first(at("2026-03-07T12:00:00+11:00")).unwrap().tick_at,
        at("2026-03-09T08:00:00+11:00")
    );
    assert_eq!(
        timing.first(at("2026-03-09T12:00:00+11:00")).unwrap().tick_at,
        at("2026-03-09T12:00:00+11:00")
    );
}

#[test]
fn one_shots_move_too() {
    let day = window("08:00-18:00", &[]);
    let timing = Timing::at(at("2026-03-02T03:00:00Z"), Zone::utc()).window(day).build().unwrap();
    assert_eq!(timing.first(at("2026-03-01T00:00:00Z")).unwrap().tick_at, at("2026-03-02T08:00:00Z"));
    assert_eq!(next(&timing, "2026-03-02T03:00:00Z"), "2026-03-02T08:00:00Z");
    assert_eq!(timing.next(at("2026-03-02T08:00:00Z")), None);
    let timing = Timing::after(SignedDuration::from_hours(2), Zone::utc()).window(day).build().unwrap();
    assert_eq!(timing.first(at("2026-03-02T17:00:00Z")).unwrap().tick_at, at("2026-03-03T08:00:00Z"));
}

#[test]
fn cron_and_slot_ticks_outside_are_not_ticks() {
    let zone = Zone::utc();
    let cron = |expression: &str, window: Window| {
        Timing::cron(Cron::parse(expression).unwrap(), zone.clone()).window(window).build()
    };
    let timing = cron("*/30 * * * *", window("09:00-10:00", &["mon"])).unwrap();
    let found: Vec<_> =
        timing.ticks(at("2026-03-01T00:00:00Z")).take(4).map(|tick| tick.tick_at.to_string()).collect();
    assert_eq!(
        found,
        ["2026-03-01T09:00:00Z", "2026-03-01T09:30:00Z", "2026-03-03T09:00:00Z", "2026-03-03T09:30:00Z"]
    );
    let timing = every("25m", SLOT, window("09:00-10:00", &[]), "UTC");
    let found: Vec<_> = timing.ticks(at("2026-03-01T00:00:00Z")).take(3).map(|tick| tick.tick_at).collect();
    assert_eq!(found.len(), 3);
    for tick in &found {
        assert_eq!(tick.as_second() % 1500, 0);
        assert_eq!(Zone::utc().local(*tick).hour(), 9);
    }
}

#[test]
fn a_window_over_midnight_looks_at_the_date_of_the_instant() {
    let timing = every("1h", SLOT, window("22:00-02:00", &["sat"]), "UTC");
    // 2026-03-06 is a Friday: its night ends at midnight, because then it is Saturday.
    let found: Vec<_> =
        timing.ticks(at("2026-03-06T12:00:00Z")).take(5).map(|tick| tick.tick_at.to_string()).collect();
    assert_eq!(
        found,
        [
            "2026-03-06T22:00:00Z",
            "2026-03-06T23:00:00Z",
            "2026-03-08T00:00:00Z",
            "2026-03-08T01:00:00Z",
            "2026-03-08T22:00:00Z"
        ]
    );
    let timing = every("1h", SLOT, window("18:00-00:00", &[]), "UTC");
    assert_eq!(next(&timing, "2026-03-06T23:00:00Z"), "2026-03-07T18:00:00Z");
}

#[test]
fn the_window_is_local_also_when_the_clocks_change() {
    // New York, 2026-03-08: 02:00 becomes 03:00, so the window 02:30-04:00 opens at 03:00.
    let timing = every("10m", Anchor::Start, window("02:30-04:00", &[]), "America/New_York");
    assert_eq!(next(&timing, "2026-03-08T01:00:00-05:00"), "2026-03-08T07:00:00Z");
    // A window inside the gap does not open that day.
    let timing = every("10m", Anchor::Start, window("02:00-03:00", &[]), "America/New_York");
    assert_eq!(next(&timing, "2026-03-08T01:00:00-05:00"), "2026-03-09T06:00:00Z");
    // In a repeated hour it opens twice.
    let timing = every("20m", Anchor::Start, window("01:00-01:30", &[]), "America/New_York");
    assert_eq!(next(&timing, "2026-11-01T01:20:00-04:00"), "2026-11-01T06:00:00Z");
}

#[test]
fn what_can_never_be_allowed_is_refused() {
    let all = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    let never = |timing: Result<Timing, belfry_time::Error>| {
        let error = timing.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NeverAllowed);
        error.to_string()
    };
    let cron = |expression: &str, window: Window| {
        Timing::cron(Cron::parse(expression).unwrap(), Zone::utc()).window(window).build()
    };
    let hour = Every::parse("1h").unwrap();
    assert_eq!(
        never(Timing::every(hour, Anchor::Start, Zone::utc()).window(window("", &all)).build()),
        "not_on names all seven days, so it would never run. Leave at least one out"
    );
    assert_eq!(
        never(cron("0 3 * * *", window("08:00-18:00", &[]))),
        "Cron expression \"0 3 * * *\" has no tick in UTC that is allowed (only between 08:00 and 18:00), so it would never run"
    );
    never(cron("0 9 * * 6", window("", &["sat"])));
    never(cron("0 9 * * 5#2,5L", window("", &["5"])));
    let day = Every::parse("24h").unwrap();
    never(Timing::every(day, SLOT, Zone::utc()).window(window("08:00-18:00", &[])).build());
    // Local midnight is never in the window, on no day of the week; Thursdays are all there are.
    never(Timing::every(Every::Daily, SLOT, Zone::utc()).window(window("08:00-09:00", &[])).build());
    never(Timing::every(Every::Weekly, SLOT, Zone::utc()).window(window("", &["thu"])).build());
    // Kathmandu has been 05:45 ahead since 1986, whatever it was in 1970.
    never(
        Timing::every(hour, SLOT, Zone::get("Asia/Kathmandu").unwrap())
            .window(window("10:30-10:31", &[]))
            .build(),
    );
    // These can, if rarely.
    let moved = Timing::cron(Cron::parse("30 2 * * *").unwrap(), Zone::get("America/New_York").unwrap());
    let moved = moved.window(window("03:00-04:00", &[])).build().unwrap();
    assert_eq!(next(&moved, "2026-01-01T00:00:00Z"), "2026-03-08T07:00:00Z");
    let timing = cron("0 0 29 2 *", window("", &all[..6])).unwrap();
    assert_eq!(next(&timing, "2026-01-01T00:00:00Z"), "2032-02-29T00:00:00Z");
    cron("0 9 1 * 6", window("", &["sat"])).unwrap();
}

#[test]
fn bad_windows_are_refused() {
    for input in [
        "25:00-26:00",
        "08:00",
        "8-9",
        "",
        "bad-window",
        "8am-10pm",
        "08:00-24:00",
        "08:60-09:00",
        "08:00-18:00-20:00",
        "08:00–18:00",
    ] {
        let error = Window::ALWAYS.only_between(input).expect_err(input);
        assert_eq!(error.kind(), ErrorKind::OnlyBetween);
        assert!(
            error
                .to_string()
                .starts_with(&format!("Invalid time window \"{input}\". Expected \"HH:MM-HH:MM\"")),
            "{error}"
        );
    }
    let error = Window::ALWAYS.only_between("08:00-08:00").unwrap_err();
    assert_eq!(
        error.to_string(),
        "Time window \"08:00-08:00\" is empty: it ends when it starts. Leave only_between out to allow the whole day"
    );
    for input in ["funday", "8", "-1", "7.5", "", "mo", "montag", "1 2"] {
        let error = Window::ALWAYS.not_on([input]).expect_err(input);
        assert_eq!(
            error.to_string(),
            format!("Invalid day \"{input}\". Expected a day such as \"sat\" or \"Saturday\", or 0-7")
        );
        assert_eq!(error.kind(), ErrorKind::NotOn);
    }
    for (names, number) in [(["sun", "SUNDAY"], "0"), (["Sun", "sunday"], "7"), (["wed", "Wednesday"], "3")] {
        assert_eq!(window("", &names), window("", &[number]));
    }
}
