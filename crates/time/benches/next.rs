//! Parsing and the next tick, beside the cron crates of the field, in one run:
//!
//!     cargo bench -p belfry-time
//!
//! Each crate gets the instants it works on natively and gives back what it gives back. `belfry_zoned` takes and
//! gives jiff's `Zoned`, as croner does.

#![allow(clippy::unwrap_used)]

use std::str::FromStr;

use belfry_time::{Cron, Timestamp, Timing, Zone};
use divan::{Bencher, black_box};

const EXPRESSIONS: [&str; 4] = ["*/5 * * * *", "0 9 * * 1-5", "0 0 29 2 *", "0 0 L * *"];
const ZONES: [&str; 2] = ["UTC", "America/New_York"];
const FROM: &str = "2026-03-20T12:03:17Z";

fn main() {
    divan::main();
}

fn from() -> Timestamp {
    FROM.parse().unwrap()
}

/// Every crate must give the answer that is being timed.
fn check(expression: &str, zone: &str, found: i64) {
    let zone = Zone::get(zone).unwrap();
    let expected = Cron::parse(expression).unwrap().next(from(), &zone).unwrap();
    assert_eq!(found, expected.as_second(), "{expression} in {zone}");
}

macro_rules! parse_group {
    ($name:ident, $parse:expr) => {
        #[divan::bench(args = EXPRESSIONS)]
        fn $name(bencher: Bencher, expression: &str) {
            bencher.bench(|| $parse(black_box(expression)));
        }
    };
}

#[divan::bench_group]
mod parse {
    use super::*;

    parse_group!(belfry, |text: &str| Cron::parse(text).unwrap());
    parse_group!(croner, |text: &str| croner::Cron::from_str(text).unwrap());
    parse_group!(cronexpr, |text: &str| cronexpr::parse_crontab_with(text, zone_optional()).unwrap());

    #[divan::bench(args = EXPRESSIONS[..3].iter())]
    fn cron(bencher: Bencher, expression: &str) {
        let expression = for_cron_crate(expression);
        bencher.bench(|| cron::Schedule::from_str(black_box(&expression)).unwrap());
    }
}

/// The cron crate wants a field of seconds, counts Sunday as 1, and has no `L`.
fn for_cron_crate(expression: &str) -> String {
    format!("0 {}", expression.replace("1-5", "2-6"))
}

fn zone_optional() -> cronexpr::ParseOptions {
    let mut options = cronexpr::ParseOptions::default();
    options.fallback_timezone_option = cronexpr::FallbackTimezoneOption::UTC;
    options
}

macro_rules! next_group {
    ($group:ident, $expression:expr) => {
        #[divan::bench_group]
        mod $group {
            use super::*;

            #[divan::bench(args = ZONES)]
            fn belfry(bencher: Bencher, zone: &str) {
                let (cron, zone) = (Cron::parse($expression).unwrap(), Zone::get(zone).unwrap());
                let from = from();
                bencher.bench(|| black_box(&cron).next(black_box(from), &zone));
            }

            #[divan::bench(args = ZONES)]
            fn belfry_timing(bencher: Bencher, zone: &str) {
                let cron = Cron::parse($expression).unwrap();
                let timing = Timing::cron(cron, Zone::get(zone).unwrap()).build().unwrap();
                let from = from();
                bencher.bench(|| black_box(&timing).next(black_box(from)));
            }

            #[divan::bench(args = ZONES)]
            fn belfry_zoned(bencher: Bencher, zone: &str) {
                let (cron, zone) = (Cron::parse($expression).unwrap(), Zone::get(zone).unwrap());
                let from = zone.local(from());
                bencher.bench(|| {
                    black_box(&cron).next(black_box(&from).timestamp(), &zone).map(|at| zone.local(at))
                });
            }

            #[divan::bench(args = ZONES)]
            fn croner(bencher: Bencher, zone: &str) {
                let cron = croner::Cron::from_str($expression).unwrap();
                let from = Zone::get(zone).unwrap().local(from());
                check(
                    $expression,
                    zone,
                    cron.find_next_occurrence(&from, false).unwrap().timestamp().as_second(),
                );
                bencher.bench(|| black_box(&cron).find_next_occurrence(black_box(&from), false));
            }

            #[divan::bench(args = ZONES)]
            fn cronexpr(bencher: Bencher, zone: &str) {
                let cron = cronexpr::parse_crontab(&format!("{} {zone}", $expression)).unwrap();
                let from = from();
                check($expression, zone, cron.find_next(from).unwrap().timestamp().as_second());
                bencher.bench(|| black_box(&cron).find_next(black_box(from)));
            }

            #[divan::bench(args = ZONES[..if $expression.contains('L') { 0 } else { 2 }].iter())]
            fn cron(bencher: Bencher, zone: &str) {
                let cron = cron::Schedule::from_str(&for_cron_crate($expression)).unwrap();
                let zone_id = chrono_tz::Tz::from_str(zone).unwrap();
                let from =
                    chrono::DateTime::from_timestamp(from().as_second(), 0).unwrap().with_timezone(&zone_id);
                check($expression, zone, cron.after(&from).next().unwrap().timestamp());
                bencher.bench(|| black_box(&cron).after(black_box(&from)).next());
            }
        }
    };
}

next_group!(next_every_5_minutes, "*/5 * * * *");
next_group!(next_weekdays_at_9, "0 9 * * 1-5");
next_group!(next_leap_day, "0 0 29 2 *");
next_group!(next_last_of_month, "0 0 L * *");
