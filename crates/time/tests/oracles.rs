//! Random expressions against two independent crates, away from where they are known to depart from our rules:
//! cronexpr takes two restricted day fields as "and" where one starts with `*`, croner knows no `5/15` and no
//! range that ends on `SUN`; both count a fold differently, so zones here have no change of clocks nearby.

#![allow(clippy::unwrap_used)]

use std::str::FromStr;

use belfry_time::{Cron, Timestamp, Zone};
use proptest::prelude::*;

fn field(min: u32, max: u32, plain: bool) -> BoxedStrategy<String> {
    let number = min..=max;
    let range = (min..=max, min..=max).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b)));
    let stepped = (range.clone(), 1..=(max - min)).prop_map(|(range, step)| format!("{range}/{step}"));
    let item = prop_oneof![4 => number.prop_map(|n| n.to_string()), 2 => range, 1 => stepped];
    let list = proptest::collection::vec(item, 1..5).prop_map(|items| items.join(","));
    if plain {
        return list.boxed();
    }
    let star_step = (1..=(max - min)).prop_map(|step| format!("*/{step}"));
    prop_oneof![3 => Just("*".to_owned()), 2 => star_step, 4 => list].boxed()
}

/// A day field: `*`, a plain list, or one of the specials that both know.
fn days_of_month() -> BoxedStrategy<String> {
    let special = prop_oneof![
        Just("L".to_owned()),
        (1u32..=28).prop_map(|n| format!("{n}W")),
        (1u32..=28).prop_map(|n| format!("{n},L"))
    ];
    prop_oneof![4 => Just("*".to_owned()), 4 => field(1, 28, true), 2 => special].boxed()
}

fn days_of_week() -> BoxedStrategy<String> {
    let special = prop_oneof![
        (0u32..=6, 1u32..=5).prop_map(|(day, k)| format!("{day}#{k}")),
        (0u32..=6).prop_map(|day| format!("{day}L")),
        Just("mon-fri".to_owned()),
        Just("5-7".to_owned()),
        Just("SAT".to_owned()),
    ];
    prop_oneof![4 => Just("*".to_owned()), 3 => field(0, 6, true), 3 => special].boxed()
}

fn expression() -> impl Strategy<Value = String> {
    let month =
        prop_oneof![3 => Just("*".to_owned()), 2 => field(1, 12, false), 1 => Just("jan,JUL-sep".to_owned())];
    (field(0, 59, false), field(0, 23, false), days_of_month(), month, days_of_week())
        .prop_map(|(minute, hour, dom, month, dow)| format!("{minute} {hour} {dom} {month} {dow}"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_three_agree_on_an_even_clock(
        expression in expression(),
        zone in proptest::sample::select(&["UTC", "Asia/Tokyo", "Asia/Kolkata", "America/Phoenix"][..]),
        from in 946_684_800i64..4_000_000_000,
    ) {
        let from = Timestamp::from_second(from).unwrap();
        let zone = Zone::get(zone).unwrap();
        let ours = Cron::parse(&expression).unwrap();
        let croner = croner::Cron::from_str(&expression).unwrap();
        let cronexpr = cronexpr::parse_crontab(&format!("{expression} {zone}")).unwrap();
        let mut at = from;
        for _ in 0..4 {
            let next = ours.next(at, &zone).unwrap();
            let theirs = croner.find_next_occurrence(&zone.local(at), false).unwrap().timestamp();
            prop_assert_eq!(next, theirs, "croner: {} in {} from {}", expression, zone, at);
            // cronexpr gives up after four years, and on the evening of a last day jumps over the next one.
            if let Ok(theirs) = cronexpr.find_next(at)
                && !expression.contains('L')
            {
                prop_assert_eq!(next, theirs.timestamp(), "cronexpr: {} in {} from {}", expression, zone, at);
            }
            at = next;
        }
    }

    #[test]
    fn what_both_refuse_we_refuse(
        expression in "([0-9*/,-]{1,5} ){4}[0-9*/,#L-]{1,5}",
    ) {
        let croner = croner::Cron::from_str(&expression).is_ok();
        let cronexpr = cronexpr::parse_crontab(&format!("{expression} UTC")).is_ok();
        if !croner && !cronexpr {
            prop_assert!(Cron::parse(&expression).is_err(), "{}", expression);
        }
    }
}
