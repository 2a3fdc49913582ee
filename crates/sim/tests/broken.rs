//! What is broken on purpose is noticed.

#![allow(clippy::print_stdout)]

use belfry_sim::notice_all;

/// Seeds within which each must be noticed.
const SEEDS_MAX: u64 = 200;

#[test]
#[ignore = "takes minutes: `cargo xtask test --full` runs it"]
fn everything_that_is_broken_on_purpose_is_noticed() {
    let noticed = notice_all(&(1..SEEDS_MAX + 1), |broken, found| {
        let (seed, what) = found.cloned().unwrap_or_default();
        println!("{:24} {seed:4}  {}", format!("{broken:?}"), what.lines().next().unwrap_or_default());
    });
    let unnoticed: Vec<_> =
        noticed.iter().filter(|(_, found)| found.is_none()).map(|(broken, _)| broken).collect();
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
