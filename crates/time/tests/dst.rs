//! The daylight-saving rules, against tables and against a slow oracle that knows only jiff and the rules.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use belfry_time::{Cron, Dst, Fold, Gap, Timestamp, Timing, Zone};
use jiff::civil::{Date, DateTime};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, ToSpan};
use proptest::prelude::*;

/// Zones with changes of an hour, half an hour and two hours; at midnight and before it; with missing and with
/// repeated days; on both halves of the globe; with rules for ever, and with lists of single changes.
const ZONES: [&str; 20] = [
    "America/New_York",
    "Europe/London",
    "Europe/Berlin",
    "Australia/Sydney",
    "Australia/Lord_Howe",
    "America/Sao_Paulo",
    "Asia/Beirut",
    "Pacific/Apia",
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Havana",
    "America/St_Johns",
    "America/Santiago",
    "America/Scoresbysund",
    "Antarctica/Troll",
    "Asia/Amman",
    "Asia/Gaza",
    "Asia/Tehran",
    "Atlantic/Azores",
    "Pacific/Kwajalein",
];

fn ticks(expression: &str, zone: &str, from: &str, n: usize) -> Vec<String> {
    ticks_with(expression, Dst::default(), zone, from, n)
}

fn ticks_with(expression: &str, dst: Dst, zone: &str, from: &str, n: usize) -> Vec<String> {
    let zone = Zone::get(zone).unwrap();
    let cron = Cron::parse(expression).unwrap().with_dst(dst);
    let timing = Timing::cron(cron, zone.clone()).build().unwrap();
    timing.ticks(from.parse().unwrap()).take(n).map(|tick| zone.rfc3339(tick.tick_at)).collect()
}

#[test]
fn a_fixed_time_in_a_gap_moves_to_its_end() {
    assert_eq!(
        ticks("30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", 3),
        ["2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00", "2026-03-10T02:30:00-04:00"]
    );
}

#[test]
fn all_that_move_to_one_instant_are_one_tick() {
    for expression in ["0,30 2 * * *", "0 2,3 * * *", "15-45 2 * * *", "0,59 2,3 * * *"] {
        let found = ticks(expression, "America/New_York", "2026-03-08T01:59:59-05:00", 2);
        assert_eq!(found[0], "2026-03-08T03:00:00-04:00", "{expression}");
        assert_ne!(found[1], found[0], "{expression}");
    }
    assert_eq!(
        ticks("0 2,3 * * *", "America/New_York", "2026-03-08T03:00:00-04:00", 1),
        ["2026-03-09T02:00:00-04:00"]
    );
}

#[test]
fn a_wildcard_job_does_not_fire_in_a_gap() {
    assert_eq!(
        ticks("*/15 2 * * *", "America/New_York", "2026-03-08T01:00:00-05:00", 1),
        ["2026-03-09T02:00:00-04:00"]
    );
    assert_eq!(
        ticks("30 * * * *", "America/New_York", "2026-03-08T01:30:00-05:00", 1),
        ["2026-03-08T03:30:00-04:00"]
    );
}

#[test]
fn a_fixed_time_in_a_fold_fires_once_in_the_first_pass() {
    for expression in ["30 1 * * *", "0,30 1 * * *"] {
        let found = ticks(expression, "America/New_York", "2026-11-01T01:29:00-04:00", 2);
        assert_eq!(found[0], "2026-11-01T01:30:00-04:00");
        assert!(found[1].starts_with("2026-11-02T01:"), "{found:?}");
    }
    // Asked in the second pass, too.
    assert_eq!(
        ticks("30 1 * * *", "America/New_York", "2026-11-01T01:10:00-05:00", 1),
        ["2026-11-02T01:30:00-05:00"]
    );
}

#[test]
fn a_wildcard_job_fires_in_both_passes_of_a_fold() {
    assert_eq!(
        ticks("*/30 1 * * *", "America/New_York", "2026-11-01T00:59:59-04:00", 5),
        [
            "2026-11-01T01:00:00-04:00",
            "2026-11-01T01:30:00-04:00",
            "2026-11-01T01:00:00-05:00",
            "2026-11-01T01:30:00-05:00",
            "2026-11-02T01:00:00-05:00"
        ]
    );
}

#[test]
fn the_options_for_fixed_jobs_turn_the_rule_around() {
    let skip = Dst { gap: Gap::Skip, ..Dst::default() };
    assert_eq!(
        ticks_with("30 2 * * *", skip, "America/New_York", "2026-03-07T12:00:00Z", 1),
        ["2026-03-09T02:30:00-04:00"]
    );
    let both = Dst { fold: Fold::Both, ..Dst::default() };
    assert_eq!(
        ticks_with("30 1 * * *", both, "America/New_York", "2026-11-01T00:00:00-04:00", 2),
        ["2026-11-01T01:30:00-04:00", "2026-11-01T01:30:00-05:00"]
    );
    // A wildcard job follows real time whatever they say.
    assert_eq!(
        ticks_with(
            "30 */1 * * *",
            Dst { gap: Gap::Run, fold: Fold::First },
            "America/New_York",
            "2026-11-01T01:30:00-04:00",
            1
        ),
        ["2026-11-01T01:30:00-05:00"]
    );
}

#[test]
fn a_midnight_gap_keeps_the_day() {
    // Sao Paulo 2018-11-04 and Beirut 2026-03-29: 00:00 becomes 01:00. The date is judged before moving.
    assert_eq!(
        ticks("@daily", "America/Sao_Paulo", "2018-11-03T12:00:00Z", 2),
        ["2018-11-04T01:00:00-02:00", "2018-11-05T00:00:00-02:00"]
    );
    assert_eq!(ticks("0 0 29 3 *", "Asia/Beirut", "2026-03-01T00:00:00Z", 1), ["2026-03-29T01:00:00+03:00"]);
    assert_eq!(ticks("30 0 * * 0", "Asia/Beirut", "2026-03-28T00:00:00Z", 1), ["2026-03-29T01:00:00+03:00"]);
}

#[test]
fn a_fold_over_midnight_fires_on_the_first_of_two_evenings() {
    // Beirut 2025-10-26: 24:00 becomes 23:00, so 23:30 on the 25th happens twice.
    assert_eq!(
        ticks("30 23 * * *", "Asia/Beirut", "2025-10-25T12:00:00Z", 2),
        ["2025-10-25T23:30:00+03:00", "2025-10-26T23:30:00+02:00"]
    );
    assert_eq!(
        ticks("*/30 23 * * *", "Asia/Beirut", "2025-10-25T19:00:00Z", 5),
        [
            "2025-10-25T23:00:00+03:00",
            "2025-10-25T23:30:00+03:00",
            "2025-10-25T23:00:00+02:00",
            "2025-10-25T23:30:00+02:00",
            "2025-10-26T23:00:00+02:00"
        ]
    );
}

#[test]
fn a_missing_day_has_no_tick() {
    // Apia skipped 2011-12-30.
    assert_eq!(
        ticks("0 12 * * *", "Pacific/Apia", "2011-12-29T00:00:00-10:00", 2),
        ["2011-12-29T12:00:00-10:00", "2011-12-31T12:00:00+14:00"]
    );
    assert_eq!(
        ticks("0 0 30 12 *", "Pacific/Apia", "2011-12-01T00:00:00Z", 1),
        ["2012-12-30T00:00:00+14:00"]
    );
}

#[test]
fn half_an_hour_is_enough_for_a_gap_and_a_fold() {
    // Lord Howe: 2026-10-04 02:00 becomes 02:30; 2026-04-05 02:00 becomes 01:30.
    assert_eq!(
        ticks("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00:00Z", 1),
        ["2026-10-04T02:30:00+11:00"]
    );
    assert_eq!(
        ticks("45 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00:00Z", 1),
        ["2026-10-04T02:45:00+11:00"]
    );
    assert_eq!(
        ticks("*/15 1 * * *", "Australia/Lord_Howe", "2026-04-05T01:29:00+11:00", 5),
        [
            "2026-04-05T01:30:00+11:00",
            "2026-04-05T01:45:00+11:00",
            "2026-04-05T01:30:00+10:30",
            "2026-04-05T01:45:00+10:30",
            "2026-04-06T01:00:00+10:30"
        ]
    );
}

#[test]
fn answers_hold_to_the_end_of_the_22nd_century() {
    assert_eq!(
        ticks("30 2 * * *", "America/New_York", "2199-03-09T12:00:00Z", 2),
        ["2199-03-10T03:00:00-04:00", "2199-03-11T02:30:00-04:00"]
    );
    assert_eq!(
        ticks("0 0 29 2 *", "Europe/London", "2096-03-01T00:00:00Z", 2),
        ["2104-02-29T00:00:00+00:00", "2108-02-29T00:00:00+00:00"]
    );
    // The fifth Friday of February: only where a leap day is a Friday, and 2100 is no leap year.
    assert_eq!(
        ticks("0 0 * 2 5#5", "UTC", "2080-03-01T00:00:00Z", 2),
        ["2092-02-29T00:00:00+00:00", "2104-02-29T00:00:00+00:00"]
    );
}

// The oracle.

/// A set of numbers and a way to write it as a field.
#[derive(Debug, Clone)]
struct Part {
    text: String,
    set: BTreeSet<u32>,
}

fn part(min: u32, max: u32) -> impl Strategy<Value = Part> {
    let star = Just(Part { text: "*".into(), set: (min..=max).collect() });
    let step = (1..=max - min + 1).prop_map(move |step| Part {
        text: format!("*/{step}"),
        set: (min..=max).step_by(step as usize).collect(),
    });
    let list = proptest::collection::btree_set(min..=max, 1..4)
        .prop_map(|set| Part { text: set.iter().map(u32::to_string).collect::<Vec<_>>().join(","), set });
    let range = (min..=max, min..=max, 1u32..6).prop_map(|(a, b, step)| {
        let (first, last) = (a.min(b), a.max(b));
        Part { text: format!("{first}-{last}/{step}"), set: (first..=last).step_by(step as usize).collect() }
    });
    prop_oneof![2 => star, 2 => step, 4 => list, 2 => range]
}

#[derive(Debug, Clone)]
struct Expression {
    minute: Part,
    hour: Part,
    dom: Part,
    month: Part,
    dow: Part,
}

impl Expression {
    fn text(&self) -> String {
        [&self.minute, &self.hour, &self.dom, &self.month, &self.dow].map(|part| part.text.as_str()).join(" ")
    }

    fn is_fixed(&self) -> bool {
        !self.minute.text.starts_with('*') && !self.hour.text.starts_with('*')
    }

    fn has_date(&self, date: Date) -> bool {
        let dom = self.dom.set.contains(&(date.day() as u32));
        let dow = self.dow.set.contains(&(date.weekday().to_sunday_zero_offset() as u32));
        let day = match (self.dom.text == "*", self.dow.text == "*") {
            (true, true) => true,
            (false, true) => dom,
            (true, false) => dow,
            (false, false) => dom || dow,
        };
        day && self.month.set.contains(&(date.month() as u32))
    }

    fn has_time(&self, at: DateTime) -> bool {
        self.hour.set.contains(&(at.hour() as u32))
            && self.minute.set.contains(&(at.minute() as u32))
            && at.second() == 0
    }
}

fn expression() -> impl Strategy<Value = Expression> {
    (
        part(0, 59),
        part(0, 23),
        part(1, 31),
        prop_oneof![3 => Just(Part { text: "*".into(), set: (1..=12).collect() }), 1 => part(1, 12)],
        part(0, 6),
    )
        .prop_map(|(minute, hour, dom, month, dow)| Expression { minute, hour, dom, month, dow })
}

/// The rules read out slowly: every tick in (from, to].
fn oracle(
    expression: &Expression,
    dst: Dst,
    zone: &TimeZone,
    from: Timestamp,
    to: Timestamp,
) -> Vec<Timestamp> {
    let mut found = BTreeSet::new();
    if expression.is_fixed() {
        let (mut date, end) = (
            zone.to_datetime(from).date().yesterday().unwrap(),
            zone.to_datetime(to).date().tomorrow().unwrap(),
        );
        while date <= end {
            if expression.has_date(date) {
                for hour in &expression.hour.set {
                    for minute in &expression.minute.set {
                        let at = date.at(*hour as i8, *minute as i8, 0, 0);
                        let ambiguous = zone.to_ambiguous_timestamp(at);
                        match ambiguous.offset() {
                            AmbiguousOffset::Unambiguous { offset } => {
                                found.insert(offset.to_timestamp(at).unwrap());
                            }
                            AmbiguousOffset::Fold { before, after } => {
                                found.insert(before.to_timestamp(at).unwrap());
                                if dst.fold == Fold::Both {
                                    found.insert(after.to_timestamp(at).unwrap());
                                }
                            }
                            AmbiguousOffset::Gap { before, after } => {
                                let long = after.seconds() - before.seconds() >= 3 * 3600;
                                if dst.gap == Gap::Run && !long {
                                    // The clocks change between here and there.
                                    let early =
                                        after.to_timestamp(at).unwrap() - SignedDuration::from_secs(1);
                                    found.insert(zone.following(early).next().unwrap().timestamp());
                                }
                            }
                        }
                    }
                }
            }
            date = date.tomorrow().unwrap();
        }
    } else {
        let mut second = from.as_second() - from.as_second().rem_euclid(60);
        while second <= to.as_second() {
            let at = Timestamp::from_second(second).unwrap();
            let local = zone.to_datetime(at);
            if expression.has_date(local.date()) && expression.has_time(local) {
                found.insert(at);
            }
            second += 60;
        }
    }
    found.into_iter().filter(|at| *at > from && *at <= to).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_change_of_clocks_is_passed_as_the_rules_say(
        expression in expression(),
        zone in proptest::sample::select(&ZONES[..]),
        change in 0usize..140,
        minutes_before in 0i64..3000,
        skip in any::<bool>(),
        both in any::<bool>(),
    ) {
        let Ok(cron) = Cron::parse(&expression.text()) else { return Ok(()) };
        let dst = Dst { gap: if skip { Gap::Skip } else { Gap::Run }, fold: if both { Fold::Both } else { Fold::First } };
        let jiff_zone = TimeZone::get(zone).unwrap();
        let start: Timestamp = "1975-01-01T00:00:00Z".parse().unwrap();
        let change = jiff_zone.following(start).nth(change).map_or(start, |change| change.timestamp());
        let from = change - minutes_before.minutes();
        let to = change + 50.hours();
        let timing = Timing::cron(cron.with_dst(dst), Zone::get(zone).unwrap()).build().unwrap();
        let found: Vec<_> = timing.ticks_between(from, to, usize::MAX).map(|tick| tick.tick_at).collect();
        let expected = oracle(&expression, dst, &jiff_zone, from, to);
        prop_assert_eq!(&found, &expected, "{} in {} from {}", expression.text(), zone, from);
        prop_assert_eq!(timing.count_between(from, to), expected.len() as u64, "{} in {} from {}", expression.text(), zone, from);
    }
}
