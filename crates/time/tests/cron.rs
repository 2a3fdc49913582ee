//! Cron expressions: what is read, what is refused, what comes next on an even clock.

#![allow(clippy::unwrap_used)]

use belfry_time::{Cron, ErrorKind, Field, Timing, Zone};
use proptest::prelude::*;

/// The next ticks in UTC, as `MM-DD HH:MM` with the year in front where it is another.
fn next(expression: &str, from: &str, n: usize) -> Vec<String> {
    next_in(expression, "UTC", from, n)
}

fn next_in(expression: &str, zone: &str, from: &str, n: usize) -> Vec<String> {
    let zone = Zone::get(zone).unwrap();
    let cron = Cron::parse(expression).unwrap_or_else(|error| panic!("{error}"));
    let timing = Timing::cron(cron, zone.clone()).build().unwrap();
    timing
        .ticks(from.parse().unwrap())
        .take(n)
        .map(|tick| zone.local(tick.tick_at).strftime("%Y-%m-%dT%H:%M").to_string())
        .collect()
}

fn refusal(expression: &str) -> (String, Option<Field>) {
    let error = Cron::parse(expression).expect_err(expression);
    let ErrorKind::Cron { field } = error.kind() else { panic!("{error:?}") };
    (error.to_string(), field)
}

#[test]
fn the_next_match_is_strictly_after() {
    let table = [
        ("@hourly", "2024-01-15T12:00:00Z", "2024-01-15T13:00"),
        ("@daily", "2024-01-15T12:00:00Z", "2024-01-16T00:00"),
        ("@midnight", "2024-01-15T12:00:00Z", "2024-01-16T00:00"),
        ("0 9 * * *", "2024-01-15T12:00:00Z", "2024-01-16T09:00"),
        ("0 18 * * *", "2024-01-15T12:00:00Z", "2024-01-15T18:00"),
        ("@weekly", "2024-01-15T12:00:00Z", "2024-01-21T00:00"),
        ("@monthly", "2024-01-15T12:00:00Z", "2024-02-01T00:00"),
        ("@yearly", "2024-01-15T12:00:00Z", "2025-01-01T00:00"),
        ("@annually", "2024-01-15T12:00:00Z", "2025-01-01T00:00"),
        ("0 9 * * 1-5", "2024-01-19T12:00:00Z", "2024-01-22T09:00"),
        ("*/15 * * * *", "2024-01-15T10:00:00Z", "2024-01-15T10:15"),
        ("*/15 * * * *", "2024-01-15T10:07:00Z", "2024-01-15T10:15"),
        ("*/15 * * * *", "2024-01-15T10:14:59.999Z", "2024-01-15T10:15"),
        ("*/15 * * * *", "2024-01-15T10:15:00Z", "2024-01-15T10:30"),
        ("*/15 * * * *", "2024-01-15T10:45:00Z", "2024-01-15T11:00"),
        ("0 9 * * *", "2024-01-15T08:00:00Z", "2024-01-15T09:00"),
        ("0 9 * * *", "2024-01-15T08:59:59.999999999Z", "2024-01-15T09:00"),
        ("0 9 * * *", "2024-01-15T09:00:00Z", "2024-01-16T09:00"),
        ("0 9 * * *", "2024-01-31T10:00:00Z", "2024-02-01T09:00"),
        ("0 9 * * *", "2024-04-30T10:00:00Z", "2024-05-01T09:00"),
        ("0 9 * * *", "2024-12-31T10:00:00Z", "2025-01-01T09:00"),
        ("0 9 * * *", "2024-02-28T10:00:00Z", "2024-02-29T09:00"),
        ("0 9 * * *", "2023-02-28T10:00:00Z", "2023-03-01T09:00"),
        ("0 0 29 * *", "2024-01-15T12:00:00Z", "2024-01-29T00:00"),
        ("0 9 * * MON", "2024-01-14T00:00:00Z", "2024-01-15T09:00"),
        ("0 9 * * mon", "2024-01-15T10:00:00Z", "2024-01-22T09:00"),
        ("0 0 * * SAT,SUN", "2024-01-17T00:00:00Z", "2024-01-20T00:00"),
        ("0 0 * * 0", "2024-01-15T00:00:00Z", "2024-01-21T00:00"),
        ("0 0 * * 7", "2024-01-15T00:00:00Z", "2024-01-21T00:00"),
        ("0 0 1 * *", "2026-03-15T00:00:00Z", "2026-04-01T00:00"),
        ("0 * * * *", "2026-03-20T12:00:00Z", "2026-03-20T13:00"),
        ("15 10 * 3,6 *", "2026-03-31T23:59:30Z", "2026-06-01T10:15"),
        ("5/15 * * * *", "2026-03-20T12:00:00Z", "2026-03-20T12:05"),
        ("0 0 29 2 *", "2026-01-01T00:00:00Z", "2028-02-29T00:00"),
        ("0 0 29 2 *", "2096-03-01T00:00:00Z", "2104-02-29T00:00"),
        ("0 0 13 * 5", "2026-03-14T00:00:00Z", "2026-03-20T00:00"),
        ("0 0 */2 * 1", "2026-03-20T12:00:00Z", "2026-03-21T00:00"),
        ("59 23 31 12 *", "1969-06-01T00:00:00Z", "1969-12-31T23:59"),
    ];
    for (expression, from, expected) in table {
        assert_eq!(next(expression, from, 1), [expected], "{expression} from {from}");
    }
}

#[test]
fn zones_are_looked_up_for_every_tick() {
    assert_eq!(next_in("0 9 * * *", "America/New_York", "2026-03-20T12:00:00Z", 1), ["2026-03-20T09:00"]);
    assert_eq!(next_in("0 6 * * *", "Asia/Tokyo", "2026-03-20T12:00:00Z", 1), ["2026-03-21T06:00"]);
    assert_eq!(next_in("0 0 * * *", "Asia/Kolkata", "2026-03-20T12:00:00Z", 1), ["2026-03-21T00:00"]);
    assert_eq!(
        next_in("0 9 28-31 3 *", "Europe/Paris", "2026-03-27T12:00:00Z", 3),
        ["2026-03-28T09:00", "2026-03-29T09:00", "2026-03-30T09:00"]
    );
}

#[test]
fn steps_and_ranges_fill_the_right_minutes() {
    assert_eq!(
        next("5/15 3 * * *", "2026-01-01T00:00:00Z", 5),
        ["2026-01-01T03:05", "2026-01-01T03:20", "2026-01-01T03:35", "2026-01-01T03:50", "2026-01-02T03:05"]
    );
    assert_eq!(
        next("1-9/4 3 * * *", "2026-01-01T00:00:00Z", 4),
        ["2026-01-01T03:01", "2026-01-01T03:05", "2026-01-01T03:09", "2026-01-02T03:01"]
    );
    assert_eq!(next("1-1/5 3 * * *", "2026-01-01T00:00:00Z", 2), ["2026-01-01T03:01", "2026-01-02T03:01"]);
    assert_eq!(next("*/60 3 * * *", "2026-01-01T00:00:00Z", 2), ["2026-01-01T03:00", "2026-01-02T03:00"]);
    assert_eq!(
        next("0 0 * * 5-7", "2026-01-01T00:00:00Z", 4),
        ["2026-01-02T00:00", "2026-01-03T00:00", "2026-01-04T00:00", "2026-01-09T00:00"]
    );
    assert_eq!(
        next("0 0 * * FRI-SUN", "2026-01-01T00:00:00Z", 4),
        next("0 0 * * 5-7", "2026-01-01T00:00:00Z", 4)
    );
    assert_eq!(
        next("0 0 1 jan-mar/2 *", "2026-01-01T00:00:00Z", 3),
        ["2026-03-01T00:00", "2027-01-01T00:00", "2027-03-01T00:00"]
    );
    assert_eq!(
        next("0 0 * * MON-FRI/2", "2026-01-01T00:00:00Z", 3),
        ["2026-01-02T00:00", "2026-01-05T00:00", "2026-01-07T00:00"]
    );
}

#[test]
fn last_nearest_and_nth_days_are_found() {
    assert_eq!(
        next("0 0 L * *", "2026-01-01T00:00:00Z", 3),
        ["2026-01-31T00:00", "2026-02-28T00:00", "2026-03-31T00:00"]
    );
    assert_eq!(
        next("0 0 LW * *", "2026-01-01T00:00:00Z", 5),
        ["2026-01-30T00:00", "2026-02-27T00:00", "2026-03-31T00:00", "2026-04-30T00:00", "2026-05-29T00:00"]
    );
    assert_eq!(
        next("0 0 1W * *", "2026-01-01T00:00:00Z", 3),
        ["2026-02-02T00:00", "2026-03-02T00:00", "2026-04-01T00:00"]
    );
    // The first is a Saturday: the nearest weekday in the same month is the third.
    assert_eq!(next("0 0 1w 8 *", "2026-01-01T00:00:00Z", 1), ["2026-08-03T00:00"]);
    // The last is a Sunday: the nearest weekday in the same month is two days before.
    assert_eq!(next("0 0 31W 5 *", "2026-01-01T00:00:00Z", 1), ["2026-05-29T00:00"]);
    assert_eq!(
        next("0 0 31W * *", "2026-01-01T00:00:00Z", 3),
        ["2026-01-30T00:00", "2026-03-31T00:00", "2026-05-29T00:00"]
    );
    assert_eq!(
        next("0 0 1,15W * *", "2026-01-01T00:00:00Z", 3),
        ["2026-01-15T00:00", "2026-02-01T00:00", "2026-02-16T00:00"]
    );
    assert_eq!(next("0 0 * * 5#2", "2026-01-01T00:00:00Z", 2), ["2026-01-09T00:00", "2026-02-13T00:00"]);
    assert_eq!(next("0 0 * * fri#5", "2026-01-01T00:00:00Z", 2), ["2026-01-30T00:00", "2026-05-29T00:00"]);
    assert_eq!(next("0 0 * * 7L", "2026-01-01T00:00:00Z", 2), ["2026-01-25T00:00", "2026-02-22T00:00"]);
    assert_eq!(next("0 0 * * FRIL", "2026-01-01T00:00:00Z", 2), ["2026-01-30T00:00", "2026-02-27T00:00"]);
    assert_eq!(
        next("0 0 * * 1#1,5L", "2026-01-01T00:00:00Z", 4),
        ["2026-01-05T00:00", "2026-01-30T00:00", "2026-02-02T00:00", "2026-02-27T00:00"]
    );
}

#[test]
fn only_a_bare_star_leaves_a_day_field_unrestricted() {
    let every_day = next("0 0 * * *", "2026-01-01T00:00:00Z", 10);
    for expression in [
        "0 0 ? * ?",
        "0 0 * * ?",
        "0 0 ? * *",
        "0 0 */1 * 1",
        "0 0 1 * */1",
        "0 0 *,5 * 1",
        "0 0 1-31 * 1",
        "0 0 1 * 0-7",
    ] {
        assert_eq!(next(expression, "2026-01-01T00:00:00Z", 10), every_day, "{expression}");
    }
    assert_eq!(next("0 0 13 * ?", "2026-01-01T00:00:00Z", 2), ["2026-01-13T00:00", "2026-02-13T00:00"]);
    // Either may match, so a date that does not exist does no harm beside a weekday.
    assert_eq!(next("0 0 30 2 1", "2026-01-01T00:00:00Z", 2), ["2026-02-02T00:00", "2026-02-09T00:00"]);
}

#[test]
fn outer_blanks_tabs_and_case_do_not_matter() {
    assert_eq!(Cron::parse("  0 9 * * *\t").unwrap().text(), "0 9 * * *");
    assert_eq!(Cron::parse("0\t9  *\t*   *").unwrap().describe(), "at 09:00, every day");
    assert_eq!(Cron::parse("  @DAILY ").unwrap().describe(), "at 00:00, every day");
    assert_eq!(
        Cron::parse("0 0 lw JAN mon").unwrap().describe(),
        Cron::parse("0 0 LW jan MON").unwrap().describe()
    );
}

#[test]
fn refusals_name_the_field_and_its_bounds() {
    let table = [
        ("60 * * * *", "minute must be 0-59", Field::Minute),
        ("0 24 * * *", "hour must be 0-23", Field::Hour),
        ("0 25 * * *", "hour must be 0-23", Field::Hour),
        ("0 9,25 * * *", "hour must be 0-23", Field::Hour),
        ("0 0 32 * *", "day-of-month must be 1-31", Field::DayOfMonth),
        ("0 0 0 * *", "day-of-month must be 1-31", Field::DayOfMonth),
        ("0 0 * 13 *", "month must be 1-12 or JAN-DEC", Field::Month),
        ("0 0 * * 8", "day-of-week must be 0-7 or SUN-SAT", Field::DayOfWeek),
        ("* * * * 8", "day-of-week must be 0-7 or SUN-SAT", Field::DayOfWeek),
        ("0 9 * * 1-8", "day-of-week must be 0-7 or SUN-SAT", Field::DayOfWeek),
        ("-1 * * * *", "minute must be 0-59", Field::Minute),
        ("*/-5 * * * *", "minute step must be 1-60", Field::Minute),
        ("*/0 * * * *", "a step cannot be 0", Field::Minute),
        ("1-10/0 * * * *", "a step cannot be 0", Field::Minute),
        ("*/61 * * * *", "minute step must be 1-60", Field::Minute),
        ("0 */25 * * *", "hour step must be 1-24", Field::Hour),
        ("5-1 * * * *", "a range must not descend", Field::Minute),
        ("0 0 * * 5-1", "a range must not descend", Field::DayOfWeek),
        ("0 0 * * 5-0", "a range must not descend", Field::DayOfWeek),
        ("0 0 * * 5#6", "the number after # must be 1-5", Field::DayOfWeek),
        ("0 0 * * L", "L needs a day of the week before it, such as 5L or FRIL", Field::DayOfWeek),
        ("0 0 30 2 *", "no month that it names has such a day, so it would never run", Field::DayOfMonth),
        ("0 0 31 2 *", "no month that it names has such a day, so it would never run", Field::DayOfMonth),
        (
            "0 0 31 4,6,9,11 ?",
            "no month that it names has such a day, so it would never run",
            Field::DayOfMonth,
        ),
        ("0 0 31W 2 *", "no month that it names has such a day, so it would never run", Field::DayOfMonth),
        ("99999999999999999999 * * * *", "minute must be 0-59", Field::Minute),
    ];
    for (expression, reason, field) in table {
        let expected = format!("Invalid cron expression \"{expression}\" - {reason}");
        assert_eq!(refusal(expression), (expected, Some(field)));
    }
}

#[test]
fn the_number_of_fields_and_foreign_characters_are_named() {
    for (expression, got) in
        [("", 0), ("   ", 0), ("* * *", 3), ("* * * *", 4), ("0 9 * * * *", 6), ("CRON_TZ=UTC 0 0 * * *", 6)]
    {
        let shown = expression.trim();
        assert_eq!(
            refusal(expression).0,
            format!("Invalid cron expression \"{shown}\" - expected 5 fields, got {got}")
        );
    }
    for expression in [
        "０ 0 * * *",
        "0\u{a0}0 * * *",
        "0 0 * *\u{200b} *",
        "\u{feff}0 0 * * *",
        "\n0 0 * * *",
        "0 0 * * *\n",
        "0 0 * * \0*",
        "0 0\r* * *",
    ] {
        assert!(
            refusal(expression).0.contains(" - unexpected character "),
            "{expression:?}: {}",
            refusal(expression).0
        );
    }
    for expression in ["@every 5x", "@every5m", "@reboot", "@", "@invalid"] {
        let expected = format!(
            "Unknown cron shorthand \"{expression}\". Valid shorthands are: \
             @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually"
        );
        assert_eq!(refusal(expression), (expected, None));
    }
    let long = format!("{}0 * * * *", "1,".repeat(50_000));
    assert!(refusal(&long).0.ends_with("- longer than 1024 characters"));
    assert!(refusal(&"1,".repeat(50_000)).0.len() < 200);
}

#[test]
fn malformed_tokens_are_refused() {
    for expression in [
        "1,,2 * * * *",
        ",1 * * * *",
        "1, * * * *",
        "1-2-3 * * * *",
        "*-5 * * * *",
        "5-* * * * *",
        "** * * * *",
        "*5 * * * *",
        "5* * * * *",
        "1- * * * *",
        "- * * * *",
        "/ * * * *",
        "*/ * * * *",
        "/5 * * * *",
        "*/5/5 * * * *",
        "1/2/3 * * * *",
        "+5 * * * *",
        "1.5 * * * *",
        "0x5 * * * *",
        "a * * * *",
        "? 0 * * *",
        "0 ? * * *",
        "0 0 * ? *",
        "0 0 ?/2 * *",
        "0 0 1,? * *",
        "0 0 L-2 * *",
        "0 0 WL * *",
        "0 0 W * *",
        "0 0 32W * *",
        "0 0 0W * *",
        "0 0 1-5W * *",
        "0 0 L/2 * *",
        "0 0 15W/2 * *",
        "0 0 * L *",
        "L 0 * * *",
        "0 0 * * 5W",
        "0 0 5L * *",
        "0 0 * * 5#0",
        "0 0 * * 5#",
        "0 0 * * #2",
        "0 0 * * 5#2#3",
        "0 0 * * 1-5#2",
        "0 0 * * *#2",
        "0 0 * * 1-5L",
        "0 0 * * MONDAY",
        "0 0 * JANUARY *",
        "0 0 * MON *",
        "0 0 * * JAN",
        "MON 0 * * *",
        "0 0 * * MO",
        "0 0 * * fri-mon",
        "0 0 * NOV-FEB *",
        "22-2 * * * *",
        "0 22-2 * * *",
        "H * * * *",
        "%5 * * * *",
        "0 0 * * 1,8",
        "0 0 * * -1",
    ] {
        let (message, _) = refusal(expression);
        assert!(message.starts_with(&format!("Invalid cron expression \"{expression}\" - ")), "{message}");
    }
}

#[test]
fn the_wrong_token_is_underlined() {
    let underlined = |expression: &str| Cron::parse(expression).unwrap_err().underline().unwrap();
    assert_eq!(underlined("0 25 * * *"), "0 25 * * *\n  ^^");
    assert_eq!(underlined("0 9,25 * * *"), "0 9,25 * * *\n    ^^");
    assert_eq!(underlined("  */0 * * * *"), "*/0 * * * *\n  ^");
    assert_eq!(underlined("0 0 * * MON-XYZ"), "0 0 * * MON-XYZ\n            ^^^");
    assert_eq!(underlined("0 0 30 2 *"), "0 0 30 2 *\n    ^^");
    assert_eq!(underlined("1,,2 * * * *"), "1,,2 * * * *\n  ^");
    assert_eq!(underlined("0 0 * * 5#9"), "0 0 * * 5#9\n          ^");
}

#[test]
fn expressions_read_as_plain_english() {
    let table = [
        ("0 9 * * 1-5", "at 09:00, Monday to Friday"),
        ("* * * * *", "every minute"),
        ("*/5 * * * *", "every 5 minutes"),
        ("@hourly", "every hour"),
        ("30 * * * *", "at minute 30 of every hour"),
        ("0,30 * * * *", "every 30 minutes"),
        ("5,20 * * * *", "at minutes 5 and 20 of every hour"),
        ("0 */6 * * *", "at 00:00, 06:00, 12:00 and 18:00, every day"),
        ("0 */2 * * *", "every 2 hours, at minute 0, every day"),
        ("*/15 9-17 * * 1-5", "every 15 minutes from 09:00 to 17:45, Monday to Friday"),
        ("*/10 0,12 * * *", "every 10 minutes in hours 0 and 12, every day"),
        ("* 3 * * *", "every minute in hour 3, every day"),
        ("@weekly", "at 00:00, Sunday"),
        ("0 0 * * 5-7", "at 00:00, Friday to Sunday"),
        ("0 0 * * 1,3,5", "at 00:00, Monday, Wednesday and Friday"),
        ("@monthly", "at 00:00, on day 1 of the month"),
        ("@yearly", "at 00:00, on day 1 of the month, in January"),
        ("30 8 1,15 * *", "at 08:30, on days 1 and 15 of the month"),
        ("0 0 L * *", "at 00:00, on the last day of the month"),
        ("0 0 LW * *", "at 00:00, on the last weekday of the month"),
        ("0 0 15W * *", "at 00:00, on the weekday nearest day 15 of the month"),
        ("0 0 * * 5#2", "at 00:00, on the second Friday of the month"),
        ("0 0 * * 5L", "at 00:00, on the last Friday of the month"),
        ("0 0 13 * 5", "at 00:00, on day 13 of the month or on Friday"),
        ("0 0 * 6-8 *", "at 00:00, in June to August"),
        ("0 0 29 2 *", "at 00:00, on day 29 of the month, in February"),
    ];
    for (expression, words) in table {
        assert_eq!(Cron::parse(expression).unwrap().describe(), words, "{expression}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_it_panic(input in "\\PC{0,4096}|[0-9*/,#LW?a-z@ -]{0,60}|([0-9*/,-]{1,6} ){4}[0-9*/,#L-]{1,6}") {
        match Cron::parse(&input) {
            Ok(cron) => {
                prop_assert_eq!(&Cron::parse(cron.text()).unwrap(), &cron);
                let _ = cron.describe();
                prop_assert!(cron.next("2026-01-01T00:00:00Z".parse().unwrap(), &Zone::utc()).is_some(), "{} never fires", input);
            }
            Err(error) => {
                prop_assert!(error.to_string().len() < 800);
                let _ = error.underline();
            }
        }
    }
}
