//! Anchors, calendar steps, one-shots, jitter; and the laws that hold for every timing.

#![allow(clippy::unwrap_used)]

use belfry_time::{
    Allowed, Anchor, Cron, Dst, ErrorKind, Every, Gap, Jitter, Shift, SignedDuration, Tick, Timestamp,
    Timing, Window, Zone, parse_instant,
};
use proptest::prelude::*;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn zone(name: &str) -> Zone {
    Zone::get(name).unwrap()
}

fn every(interval: &str, anchor: Anchor, zone_name: &str) -> Timing {
    Timing::every(Every::parse(interval).unwrap(), anchor, zone(zone_name)).build().unwrap()
}

fn slot(phase_s: i64) -> Anchor {
    Anchor::Slot { phase: SignedDuration::from_secs(phase_s) }
}

fn listed(timing: &Timing, from: &str, n: usize) -> Vec<String> {
    timing.ticks(at(from)).take(n).map(|tick| timing.zone().rfc3339(tick.tick_at)).collect()
}

#[test]
fn an_interval_counts_from_what_it_is_given() {
    for anchor in [Anchor::Completion, Anchor::Start] {
        let timing = every("5m", anchor, "UTC");
        assert_eq!(
            timing.first(at("2026-01-01T12:00:00.123Z")).unwrap().tick_at,
            at("2026-01-01T12:00:00.123Z")
        );
        // A run of ten minutes on `5m` that started at 12:00 ends at 12:10 and starts again at 12:15.
        assert_eq!(timing.next(at("2026-01-01T12:10:00Z")).unwrap().tick_at, at("2026-01-01T12:15:00Z"));
    }
}

#[test]
fn slots_are_multiples_since_1970_plus_phase() {
    let timing = every("5s", slot(1), "UTC");
    let next_ms =
        |ms: i64| timing.next(Timestamp::from_millisecond(ms).unwrap()).unwrap().tick_at.as_millisecond();
    assert_eq!(
        [6_500, 1_000, 6_000, 22_000, 999, -1, -4_000].map(next_ms),
        [11_000, 6_000, 11_000, 26_000, 1_000, 1_000, 1_000]
    );
    assert_eq!(
        every("1s", slot(0), "UTC").first(at("1970-01-02T00:00:00Z")).unwrap().tick_at.as_millisecond(),
        86_401_000
    );
    assert_eq!(
        listed(&every("100ms", slot(0), "UTC"), "2026-01-01T00:00:00.05Z", 2),
        ["2026-01-01T00:00:00.1+00:00", "2026-01-01T00:00:00.2+00:00"]
    );
    let error = Timing::every(Every::parse("5m").unwrap(), slot(300), Zone::utc()).build().unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().as_str()),
        (ErrorKind::Phase, "Phase 5m must be smaller than the distance between two ticks, 5m")
    );
}

#[test]
fn calendar_steps_keep_the_time_of_day_and_the_day_number() {
    assert_eq!(
        listed(&every("monthly", Anchor::Start, "Europe/London"), "2026-01-31T10:00:00Z", 5),
        [
            "2026-02-28T10:00:00+00:00",
            "2026-03-31T10:00:00+01:00",
            "2026-04-30T10:00:00+01:00",
            "2026-05-31T10:00:00+01:00",
            "2026-06-30T10:00:00+01:00"
        ]
    );
    assert_eq!(
        listed(&every("weekly", Anchor::Start, "America/New_York"), "2026-03-01T12:00:00.25Z", 2),
        ["2026-03-08T07:00:00.25-04:00", "2026-03-15T07:00:00.25-04:00"]
    );
    // A day of 24 hours is another thing.
    assert_eq!(
        listed(&every("1d", Anchor::Start, "America/New_York"), "2026-03-07T12:00:00Z", 1),
        ["2026-03-08T08:00:00-04:00"]
    );
    // Through a gap: to its end, and back to the old time on the next day.
    let daily = every("daily", Anchor::Start, "America/New_York");
    let found = listed(&daily, "2026-03-07T02:30:00-05:00", 2);
    assert_eq!(found, ["2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00"]);
    // Asked again from the moved tick, with the first tick known, as the planner does.
    let daily = daily.with_origin(at("2026-03-07T02:30:00-05:00"));
    assert_eq!(daily.next(at("2026-03-08T03:00:00-04:00")).unwrap().tick_at, at("2026-03-09T02:30:00-04:00"));
    // A run that took thirty hours: the next time of day after its end.
    assert_eq!(daily.next(at("2026-03-10T08:00:00-04:00")).unwrap().tick_at, at("2026-03-11T02:30:00-04:00"));
    // In a repeated hour, the first.
    assert_eq!(
        listed(&every("daily", Anchor::Start, "America/New_York"), "2026-10-31T01:30:00-04:00", 2),
        ["2026-11-01T01:30:00-04:00", "2026-11-02T01:30:00-05:00"]
    );
    // A missing day has no tick.
    assert_eq!(
        listed(&every("daily", Anchor::Start, "Pacific/Apia"), "2011-12-28T09:00:00-10:00", 2),
        ["2011-12-29T09:00:00-10:00", "2011-12-31T09:00:00+14:00"]
    );
    // On the grid: local midnight plus phase.
    assert_eq!(
        listed(&every("daily", slot(3600), "Europe/London"), "2026-06-01T12:00:00Z", 1),
        ["2026-06-02T01:00:00+01:00"]
    );
    assert_eq!(
        listed(&every("monthly", slot(0), "Europe/London"), "2026-06-01T12:00:00Z", 1),
        ["2026-07-01T00:00:00+01:00"]
    );
}

#[test]
fn a_calendar_tick_that_a_window_moved_is_still_to_come() {
    let friday = Window::ALWAYS.not_on(["sat", "sun"]).unwrap();
    let timing = Timing::every(Every::Daily, Anchor::Start, Zone::utc()).window(friday).build().unwrap();
    let timing = timing.with_origin(at("2026-03-06T09:00:00Z"));
    // Saturday's and Sunday's ticks both move to Monday 00:00 and are one.
    assert_eq!(timing.next(at("2026-03-06T09:00:00Z")).unwrap().tick_at, at("2026-03-09T00:00:00Z"));
    assert_eq!(timing.next(at("2026-03-08T20:00:00Z")).unwrap().tick_at, at("2026-03-09T00:00:00Z"));
    assert_eq!(timing.next(at("2026-03-09T00:00:00Z")).unwrap().tick_at, at("2026-03-09T09:00:00Z"));
}

#[test]
fn a_calendar_series_counts_from_its_origin_also_outside_the_window() {
    let day = Window::ALWAYS.only_between("08:00-18:00").unwrap();
    let timing = Timing::every(Every::Daily, Anchor::Start, Zone::utc()).window(day).build().unwrap();
    assert_eq!(
        listed(&timing, "2026-01-05T20:00:00Z", 2),
        ["2026-01-07T08:00:00+00:00", "2026-01-08T08:00:00+00:00"]
    );
    // What the window moved to the end of a gap, the clocks did not move.
    let timing = Timing::every(Every::Daily, Anchor::Start, zone("America/New_York"))
        .window(Window::ALWAYS.only_between("03:00-04:00").unwrap())
        .build()
        .unwrap()
        .with_origin(at("2026-03-06T20:00:00-05:00"));
    let tick = timing.next(at("2026-03-07T20:00:00-05:00")).unwrap();
    assert_eq!((tick.tick_at, timing.shift(tick.tick_at)), (at("2026-03-08T03:00:00-04:00"), None));
}

#[test]
fn a_grid_has_no_beginning() {
    assert_eq!(
        listed(&every("daily", slot(0), "UTC"), "1960-01-01T00:00:00Z", 1),
        ["1960-01-02T00:00:00+00:00"]
    );
    assert_eq!(
        listed(&every("monthly", slot(0), "UTC"), "1960-01-01T00:00:00Z", 1),
        ["1960-02-01T00:00:00+00:00"]
    );
}

#[test]
fn one_shots_fire_once() {
    let timing = Timing::at(at("2027-02-03T09:00:00+01:00"), zone("Europe/Vienna")).build().unwrap();
    let tick = Tick { tick_at: at("2027-02-03T08:00:00Z"), due_at: at("2027-02-03T08:00:00Z") };
    assert_eq!(timing.first(at("2027-01-01T00:00:00Z")), Some(tick));
    assert_eq!(timing.first(tick.tick_at), Some(tick));
    assert_eq!(timing.first(at("2027-02-03T08:00:00.001Z")), None);
    assert_eq!((timing.next(at("2027-02-03T07:59:59Z")), timing.next(tick.tick_at)), (Some(tick), None));
    let timing = Timing::after(SignedDuration::from_secs(90), Zone::utc()).build().unwrap();
    let first = timing.first(at("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(first.tick_at, at("2026-01-01T00:01:30Z"));
    // Stored once: after a restart the same instant, and nothing afterwards.
    let timing = timing.with_origin(first.tick_at);
    assert_eq!(timing.next(at("2026-01-01T00:01:00Z")), Some(first));
    assert_eq!(timing.next(first.tick_at), None);
}

#[test]
fn instants_are_rfc_3339_or_local_where_a_zone_is_named() {
    let berlin = zone("Europe/Berlin");
    for (input, expected) in [
        ("2026-03-21T09:00:00Z", "2026-03-21T09:00:00Z"),
        ("2026-03-21t09:00:00.5z", "2026-03-21T09:00:00.5Z"),
        (" 2026-03-21 09:00:00+05:30 ", "2026-03-21T03:30:00Z"),
    ] {
        assert_eq!(parse_instant(input, None).unwrap(), at(expected));
    }
    assert_eq!(parse_instant("2026-07-01T09:00:00", Some(&berlin)).unwrap(), at("2026-07-01T07:00:00Z"));
    // In the gap to its end, in the fold to the first.
    assert_eq!(parse_instant("2026-03-29T02:30:00.5", Some(&berlin)).unwrap(), at("2026-03-29T01:00:00Z"));
    assert_eq!(parse_instant("2026-10-25T02:30:00.5", Some(&berlin)).unwrap(), at("2026-10-25T00:30:00.5Z"));
    assert_eq!(
        parse_instant("2011-12-30T09:00:00", Some(&zone("Pacific/Apia"))).unwrap_err().to_string(),
        "Time \"2011-12-30T09:00:00\" does not exist in Pacific/Apia: the clocks skip it"
    );
    assert_eq!(
        parse_instant("2027-02-03T09:00:00", None).unwrap_err().to_string(),
        "Time \"2027-02-03T09:00:00\" has no offset and no timezone is set. Add one, for example \
         \"2027-02-03T09:00:00Z\" or \"2027-02-03T09:00:00+01:00\""
    );
    for input in [
        "",
        "tomorrow",
        "not-a-date",
        "2026-03-21",
        "0001-01-01",
        "+292277026596-01-01T00:00:00Z",
        "2025-02-30T00:00:00Z",
        "2025-13-01T00:00:00Z",
        "9999-12-31T23:59:60Z",
        "2025-01-01T24:00:00Z",
        "2027-01-01T12:34:60Z",
        "9999-12-31T23:59:59Z",
        "2025-01-01T00:00:00+99:00",
        "2025-01-01T00:00:00+01",
        "2025-01-01T00:00Z",
        "2025-01-01T00:00:00[UTC]",
        "2025-01-01T00:00:00.Z",
        "٢025-01-01T00:00:00Z",
        "2025-01-01T00:00:00.1234567891Z",
        "2025-02-30T00:00:00",
    ] {
        let error = parse_instant(input, Some(&berlin)).expect_err(input);
        assert_eq!(error.kind(), ErrorKind::Instant);
        assert!(error.to_string().starts_with(&format!("Invalid time \"{input}\"")), "{error}");
    }
}

#[test]
fn ticks_that_a_change_of_clocks_touched_are_marked() {
    let cron = |expression: &str| {
        Timing::cron(Cron::parse(expression).unwrap(), zone("America/New_York")).build().unwrap()
    };
    let marks = |timing: &Timing, from: &str, n: usize| {
        timing.ticks(at(from)).take(n).map(|tick| timing.shift(tick.tick_at)).collect::<Vec<_>>()
    };
    assert_eq!(marks(&cron("30 2 * * *"), "2026-03-07T12:00:00Z", 2), [Some(Shift::Moved), None]);
    assert_eq!(marks(&cron("0 3 * * *"), "2026-03-07T12:00:00Z", 2), [None, None]);
    assert_eq!(marks(&cron("30 1 * * *"), "2026-10-31T12:00:00Z", 2), [Some(Shift::FirstPass), None]);
    assert_eq!(
        marks(&cron("30 * * * *"), "2026-11-01T00:30:00-04:00", 3),
        [Some(Shift::FirstPass), Some(Shift::SecondPass), None]
    );
    let daily =
        every("daily", Anchor::Start, "America/New_York").with_origin(at("2026-03-07T02:30:00-05:00"));
    assert_eq!(marks(&daily, "2026-03-07T12:00:00Z", 2), [Some(Shift::Moved), None]);
    assert_eq!(
        marks(&every("1h", Anchor::Start, "America/New_York"), "2026-03-08T06:00:00Z", 2),
        [None, None]
    );
}

#[test]
fn jitter_must_fit_between_two_ticks() {
    let cron = |expression: &str, jitter: &str| {
        let cron = Cron::parse(expression).unwrap();
        Timing::cron(cron, Zone::utc()).jitter(Jitter::parse(jitter).unwrap(), "a/b").build()
    };
    for (expression, distance) in [
        ("* * * * *", "1m"),
        ("*/5 * * * *", "5m"),
        ("0,7 9 * * *", "7m"),
        ("0 9 * * *", "1d"),
        ("0 9 * * 1-5", "1d"),
        ("50 23 * * *", "1d"),
        ("0,50 0,23 * * *", "10m"),
        ("5 0,23 * * *", "1h"),
        ("0 9 * * 1", "7d"),
        ("0 0 1 * *", "28d"),
        ("0 0 L * *", "28d"),
        ("0 0 1 1 *", "365d"),
    ] {
        let error = cron(expression, distance).expect_err(expression);
        assert_eq!(error.kind(), ErrorKind::Jitter);
        assert_eq!(
            error.to_string(),
            format!("Jitter {distance} must be smaller than the distance between two ticks, {distance}")
        );
        let just_below = format!("{}ms", belfry_time::parse_duration(distance).unwrap().as_millis() - 1);
        cron(expression, &just_below).unwrap();
        cron(expression, "99.99%").unwrap();
    }
    let minute = Every::parse("1m").unwrap();
    let jittered = |jitter: &str| {
        Timing::every(minute, Anchor::Start, Zone::utc())
            .jitter(Jitter::parse(jitter).unwrap(), "a/b")
            .build()
    };
    assert!(jittered("1m").is_err() && jittered("59.999s").is_ok());
    let once = Timing::at(at("2027-01-01T00:00:00Z"), Zone::utc());
    assert!(once.clone().jitter(Jitter::parse("5%").unwrap(), "a/b").build().is_err());
    assert!(once.jitter(Jitter::parse("5h").unwrap(), "a/b").build().is_ok());
}

#[test]
fn jitter_is_the_same_for_everybody() {
    let timing = || {
        let every = Every::parse("20m").unwrap();
        Timing::every(every, slot(0), Zone::utc())
            .jitter(Jitter::parse("30s").unwrap(), "reporter/sweep")
            .build()
            .unwrap()
    };
    let due: Vec<_> =
        timing().ticks(at("2026-03-08T07:50:00Z")).take(3).map(|tick| tick.due_at.to_string()).collect();
    assert_eq!(due, ["2026-03-08T08:00:11.26Z", "2026-03-08T08:20:10.241Z", "2026-03-08T08:40:14.88Z"]);
}

#[test]
fn jitter_is_clipped_to_the_end_of_the_window() {
    let window = Window::ALWAYS.only_between("08:00-09:00").unwrap();
    let every = Every::parse("59m").unwrap();
    let timing = Timing::every(every, slot(0), Zone::utc())
        .window(window)
        .jitter(Jitter::parse("58m").unwrap(), "a/b")
        .build()
        .unwrap();
    let ticks: Vec<Tick> = timing.ticks(at("2026-01-01T00:00:00Z")).take(2000).collect();
    assert_eq!(ticks.len(), 2000);
    assert!(ticks.iter().all(|tick| Zone::utc().local(tick.due_at).hour() == 8));
    assert!(ticks.iter().any(|tick| tick.due_at != tick.tick_at));
}

/// Any timing, with the instants around which it is asked.
fn timing() -> impl Strategy<Value = Timing> {
    let zones =
        ["UTC", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Beirut", "Europe/London"];
    let kinds = (0usize..9, 100i64..200_000_000, 0i64..86_400_000, 0u32..60, 0u32..24, 0usize..6);
    let windows = prop_oneof![
        3 => Just((None, 0u8)),
        2 => (0u16..1440, 0u16..1440).prop_map(|between| (Some(between), 0)),
        2 => (0u16..1440, 0u16..1440, 0u8..127).prop_map(|(a, b, days)| (Some((a, b)), days)),
        1 => (0u8..127).prop_map(|days| (None, days)),
    ];
    let jitters = prop_oneof![2 => Just(None), 1 => (0u16..10_000).prop_map(|share| Some(Jitter::Share(share))), 1 => (0i64..100_000).prop_map(|ms| Some(Jitter::Duration(SignedDuration::from_millis(ms))))];
    (kinds, proptest::sample::select(zones.to_vec()), windows, jitters).prop_filter_map(
        "parts that do not go together",
        |(kind, zone_name, (between, days), jitter)| {
            let (kind, ms, phase, minute, hour, pattern) = kind;
            let zone = zone(zone_name);
            let interval = Every::Interval(SignedDuration::from_millis(ms));
            let phase = SignedDuration::from_millis(phase % ms);
            let cron = match pattern {
                0 => format!("{minute} {hour} * * *"),
                1 => format!("*/{} * * * *", minute + 1),
                2 => format!("{minute} */{} * * 1-5", hour + 1),
                3 => format!("{minute},{} {hour},{} L * 6", (minute + 7) % 60, (hour + 1) % 24),
                4 => format!("* {hour} */3 * *"),
                _ => format!("{minute}-59/7 0-{hour} * 3,10,11 *"),
            };
            let builder = match kind {
                0 => Timing::every(interval, Anchor::Start, zone),
                1 => Timing::every(interval, Anchor::Slot { phase }, zone),
                2 => Timing::every(Every::Daily, Anchor::Start, zone),
                3 => Timing::every(Every::Weekly, Anchor::Slot { phase }, zone),
                4 => Timing::every(Every::Monthly, Anchor::Completion, zone),
                _ => Timing::cron(Cron::parse(&cron).ok()?, zone),
            };
            let names = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
            let mut window = Window::ALWAYS
                .not_on(
                    names.iter().enumerate().filter(|(day, _)| days & (1 << day) != 0).map(|(_, name)| name),
                )
                .ok()?;
            if let Some((a, b)) = between {
                window = window
                    .only_between(&format!("{:02}:{:02}-{:02}:{:02}", a / 60, a % 60, b / 60, b % 60))
                    .ok()?;
            }
            let builder = match jitter {
                Some(jitter) => builder.jitter(jitter, "agent/schedule"),
                None => builder,
            };
            builder.window(window).build().ok()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_timing_keeps_the_laws(timing in timing(), from in 1_300_000_000_000i64..1_800_000_000_000) {
        let from = Timestamp::from_millisecond(from).unwrap();
        let ticks: Vec<Tick> = timing.ticks(from).take(40).collect();
        prop_assert_eq!(ticks.len(), 40);
        let mut before = from;
        for (i, tick) in ticks.iter().enumerate() {
            prop_assert!(tick.tick_at > before, "tick {} of {:?} from {}", i, timing, from);
            prop_assert!(tick.due_at >= tick.tick_at, "jitter goes forward only: {:?}", tick);
            if let Some(next) = ticks.get(i + 1) {
                prop_assert!(tick.due_at < next.tick_at, "due order is tick order: {:?} {:?}", tick, next);
            }
            prop_assert_eq!((timing.allows(tick.tick_at), timing.allows(tick.due_at)), (Allowed::Yes, Allowed::Yes), "{:?}", tick);
            before = tick.tick_at;
        }
        // Counting is iterating.
        for end in [0, 1, 7, 39] {
            let to = ticks[end].tick_at;
            prop_assert_eq!(timing.count_between(from, to), end as u64 + 1, "{:?} from {} to {}", timing, from, to);
            let short = to - SignedDuration::from_millis(1);
            prop_assert_eq!(timing.count_between(from, short), end as u64, "{:?} from {} to {}", timing, from, short);
            let between: Vec<Tick> = timing.ticks_between(from, to, 1000).collect();
            prop_assert_eq!(&between[..], &ticks[..=end]);
        }
        prop_assert_eq!(timing.ticks_between(from, ticks[39].tick_at, 5).count(), 5);
        for limit in [1, 3, 40, 100] {
            let newest = timing.newest_between(from, ticks[39].tick_at, limit);
            prop_assert_eq!(&newest[..], &ticks[40usize.saturating_sub(limit)..], "{:?} from {}", timing, from);
        }
        // The first tick of a schedule that is new now is not before now.
        prop_assert!(timing.first(from).unwrap().tick_at >= from);
    }

    #[test]
    fn instants_never_panic(input in "\\PC{0,200}|[0-9T:Z+. -]{0,40}") {
        let _ = parse_instant(&input, None);
        let _ = parse_instant(&input, Some(&zone("America/New_York")));
        let _ = Window::ALWAYS.only_between(&input);
        let _ = Window::ALWAYS.not_on([&input]);
        let _ = Jitter::parse(&input);
        let _ = Zone::get(&input);
    }
}

#[test]
fn a_tick_counts_from_when_it_has_come() {
    let timing = every("5m", Anchor::Completion, "UTC");
    let missed = ["12:00:00", "12:04:00", "12:05:00", "12:15:00"]
        .map(|now| timing.count_between(at("2026-01-01T12:00:00Z"), at(&format!("2026-01-01T{now}Z"))));
    assert_eq!(missed, [0, 0, 1, 3]);
}

#[test]
fn three_days_of_100ms_are_counted_without_walking() {
    let from = at("2026-01-01T00:00:00Z");
    let to = at("2026-01-04T00:00:00Z");
    assert_eq!(every("100ms", Anchor::Start, "UTC").count_between(from, to), 2_592_000);
    assert_eq!(every("100ms", slot(0), "UTC").count_between(from, to), 2_592_000);
    let window = Window::ALWAYS.only_between("08:00-18:00").unwrap();
    let timing = Timing::every(Every::parse("100ms").unwrap(), Anchor::Start, Zone::utc())
        .window(window)
        .build()
        .unwrap();
    assert_eq!(timing.count_between(from, to), 3 * 360_000);
    let far = at("9999-01-01T00:00:00Z");
    let minutes = Timing::cron(Cron::parse("* * * * *").unwrap(), zone("America/New_York")).build().unwrap();
    assert_eq!(minutes.count_between(at("2026-01-01T00:00:00Z"), at("2126-01-01T00:00:00Z")), 52_594_560);
    assert_eq!(every("100ms", Anchor::Start, "UTC").count_between(from, far), 2_516_035_392_000);
}

#[test]
fn the_end_of_time_is_an_end_and_not_a_panic() {
    for timing in [
        every("5m", Anchor::Start, "America/New_York"),
        every("1d", slot(0), "America/New_York"),
        every("monthly", Anchor::Start, "America/New_York"),
        Timing::cron(Cron::parse("0 0 29 2 *").unwrap(), zone("America/New_York")).build().unwrap(),
        Timing::cron(Cron::parse("* * * * *").unwrap(), zone("Pacific/Apia")).build().unwrap(),
    ] {
        assert_eq!(timing.next(Timestamp::MAX), None, "{timing:?}");
        assert!(timing.next(Timestamp::MIN).is_some(), "{timing:?}");
    }
    // A second Sunday of March in New York has no 02:30: whoever skips it waits for ever, and is told so.
    let skip = Dst { gap: Gap::Skip, ..Dst::default() };
    let error = Timing::cron(Cron::parse("30 2 * 3 7#2").unwrap().with_dst(skip), zone("America/New_York"))
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NeverAllowed);
}
