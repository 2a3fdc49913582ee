//! `every` and other durations as people write them.

#![allow(clippy::unwrap_used)]

use belfry_time::{ErrorKind, Every, SignedDuration, format_duration, parse_duration};
use proptest::prelude::*;

fn ms(input: &str) -> i64 {
    match Every::parse(input).unwrap_or_else(|error| panic!("{input:?}: {error}")) {
        Every::Interval(every) => every.as_millis() as i64,
        other => panic!("{input:?} is {other:?}"),
    }
}

fn refusal(input: &str) -> String {
    let error = Every::parse(input).expect_err(input);
    assert_eq!(error.kind(), ErrorKind::Interval);
    error.to_string()
}

#[test]
fn numbers_with_units_are_read() {
    let table = [
        ("1s", 1_000),
        ("30s", 30_000),
        ("60s", 60_000),
        ("1000s", 1_000_000),
        ("5m", 300_000),
        ("999m", 59_940_000),
        ("1h", 3_600_000),
        ("24h", 86_400_000),
        ("100h", 360_000_000),
        ("13h", 46_800_000),
        ("1d", 86_400_000),
        ("3d", 259_200_000),
        ("7d", 604_800_000),
        ("365d", 31_536_000_000),
        ("2w", 1_209_600_000),
        ("500ms", 500),
        ("100ms", 100),
        ("hourly", 3_600_000),
    ];
    for (input, expected) in table {
        assert_eq!(ms(input), expected, "{input}");
    }
}

#[test]
fn case_and_outer_blanks_do_not_matter() {
    for input in ["5M", "  5m  ", "\t5m\t", "\n5m\n", "5 m"] {
        assert_eq!(ms(input), 300_000, "{input:?}");
    }
    assert_eq!(
        (ms("5S"), ms("1H"), ms("1D"), ms("1W"), ms("250MS")),
        (5_000, 3_600_000, 86_400_000, 604_800_000, 250)
    );
    assert_eq!(Every::parse(" Daily ").unwrap(), Every::Daily);
    assert_eq!(Every::parse("WEEKLY").unwrap(), Every::Weekly);
    assert_eq!(Every::parse("monthly").unwrap(), Every::Monthly);
}

#[test]
fn decimals_and_compounds_are_exact() {
    assert_eq!((ms("1.5h"), ms("2.5m"), ms("0.5s"), ms("0.5d")), (5_400_000, 150_000, 500, 43_200_000));
    assert_eq!((ms("1h30m"), ms("1h 30m"), ms("1w2d3h4m5s6ms")), (5_400_000, 5_400_000, 788_645_006));
    assert_eq!(ms("0.1s"), 100);
    assert_eq!(ms("1.50000000000000000000h"), 5_400_000);
    assert_eq!((ms("0000005m"), ms("0.0009765625d")), (300_000, 84_375));
    assert_eq!(refusal("1.0005s"), "Interval \"1.0005s\" is not a whole number of milliseconds");
    assert_eq!(
        refusal("0.33333333333333h"),
        "Interval \"0.33333333333333h\" is not a whole number of milliseconds"
    );
}

#[test]
fn refusals_carry_the_input_and_the_way_out() {
    let expected = "Expected \"{number}{unit}\", for example \"5m\" or \"1h30m\"";
    for input in ["5", "42", "9999", "1h30"] {
        assert_eq!(refusal(input), format!("Missing time unit in \"{input}\". {expected}"));
    }
    for input in ["abc", "m5", "five minutes", ".5h", "h"] {
        assert_eq!(refusal(input), format!("Missing numeric value in \"{input}\". {expected}"));
    }
    for input in ["", "   ", "\t"] {
        assert_eq!(refusal(input), format!("Interval cannot be empty. {expected}"));
    }
    for input in ["0s", "0m", "0h", "0d", "0.0h", "0h0m"] {
        assert_eq!(
            refusal(input),
            format!("Zero interval is not allowed: \"{input}\". The shortest is 100ms")
        );
    }
    for input in ["-5m", "-1s", "-100h"] {
        assert_eq!(
            refusal(input),
            format!("Negative intervals are not allowed: \"{input}\". Drop the minus sign")
        );
    }
    for (input, unit) in [
        ("5x", "x"),
        ("5sec", "sec"),
        ("5min", "min"),
        ("5hr", "hr"),
        ("5y", "y"),
        ("1ns", "ns"),
        ("1e309s", "e"),
    ] {
        assert_eq!(
            refusal(input),
            format!("Invalid time unit \"{unit}\". Valid units are: ms, s, m, h, d, w (in \"{input}\")")
        );
    }
    for input in ["99ms", "1ms", "0.05s"] {
        assert_eq!(refusal(input), format!("Interval \"{input}\" is too short. The shortest is 100ms"));
    }
    for input in ["99999999999d", "36526d", "99999999999999999999999s", "36525d1ms"] {
        assert_eq!(refusal(input), format!("Interval \"{input}\" is too long. The longest is 36525d"));
    }
    for input in ["5@m", "5.m", "1.2.3w", "5,5m", "5%"] {
        assert!(refusal(input).starts_with("Unexpected \""), "{}", refusal(input));
    }
    for input in ["30m1h", "1m1m", "1h1h", "1s5h"] {
        assert!(
            refusal(input).starts_with("Units must come in falling order, each once, as in \"1h30m\""),
            "{input}"
        );
    }
    for input in ["5 m 5", "invalid", "foo", "５m", "5\u{a0}m", "1h\0", &"9".repeat(100_000)] {
        assert!(refusal(input).len() < 300, "{input}");
    }
}

#[test]
fn the_wrong_part_is_underlined() {
    assert_eq!(Every::parse("1h5x").unwrap_err().underline().unwrap(), "1h5x\n   ^");
    assert_eq!(Every::parse(" 30m1h").unwrap_err().underline().unwrap(), "30m1h\n    ^");
}

#[test]
fn zero_is_a_duration_though_not_an_interval() {
    assert_eq!(parse_duration("0s").unwrap(), SignedDuration::ZERO);
    assert_eq!(format_duration(SignedDuration::ZERO).to_string(), "0s");
    assert_eq!(format_duration(SignedDuration::from_millis(-90_000)).to_string(), "-1m30s");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_printed_reads_back_the_same(ms in 100i64..36_525 * 86_400_000) {
        let every = Every::Interval(SignedDuration::from_millis(ms));
        prop_assert_eq!(Every::parse(&every.to_string()).unwrap(), every);
        prop_assert_eq!(parse_duration(&format_duration(SignedDuration::from_millis(ms)).to_string()).unwrap().as_millis(), i128::from(ms));
    }

    #[test]
    fn no_text_makes_it_panic(input in "\\PC{0,4096}|[0-9.smhdw -]{0,40}") {
        if let Err(error) = Every::parse(&input) {
            prop_assert!(error.to_string().len() < 600);
            let _ = error.underline();
        }
    }
}
