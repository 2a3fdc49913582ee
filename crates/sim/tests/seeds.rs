//! Many lives: nothing breaks, two lives of a seed are alike, other stores answer as the one in memory does, and every verb
//! meets every state.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

#[path = "../../store/tests/support/pg.rs"]
mod pg;

use belfry_sim::{Other, POSTGRES_EVERY, SQLITE_EVERY, impossible, live_all, states, verbs};

/// Seeds that are lived, from `BELFRY_FROM` on: from the environment, else as many as take less than two minutes on two cores.
fn count() -> u64 {
    number("BELFRY_SEEDS").unwrap_or(SEEDS)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

const SEEDS: u64 = 500;

/// Ticks that a life has at least.
const TICKS_MIN: u64 = 2000;

/// Seeds within which every verb meets every state.
const SEEDS_MET: u64 = 500;

fn stores(seed: u64) -> Vec<(&'static str, Other)> {
    let sqlite = seed.is_multiple_of(SQLITE_EVERY).then(|| ("sqlite", Other::sqlite(seed).unwrap()));
    let url = if seed.is_multiple_of(POSTGRES_EVERY) { pg::fresh_database() } else { None };
    let postgres = url.map(|url| ("postgres", Other::postgres(&url).unwrap()));
    sqlite.into_iter().chain(postgres).collect()
}

#[test]
fn nothing_is_lost_and_nothing_runs_twice() {
    let from = number("BELFRY_FROM").unwrap_or(1);
    // A server that a thread of a life started would stay on the core of that thread.
    pg::fresh_database();
    let summary = live_all(from..from + count(), true, &stores);
    for (seed, what) in &summary.broken {
        println!("seed {seed}: {what}\n  again: cargo xtask sim --seed {seed} --trace 300");
    }
    assert_eq!(summary.broken.len(), 0, "of {} lives", summary.lives);
    println!("{} ticks, at least {:?} in a life", summary.ticks, summary.ticks_min);
    assert!(summary.ticks_min >= Some(TICKS_MIN), "a life has {:?} ticks", summary.ticks_min);
    let unmet: Vec<_> = verbs()
        .flat_map(|verb| states().map(move |state| (verb, state)))
        .filter(|pair| !summary.met.contains_key(pair) && impossible(pair.0, pair.1).is_none())
        .collect();
    assert!(unmet.is_empty() || count() < SEEDS_MET, "verbs that never met a state: {unmet:?}");
}
