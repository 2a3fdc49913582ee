//! One suite for every store. A room's test file opens its store and calls what is here.
//!
//! `scenarios`, `cases`, `claiming`, `deferring`, `editing`, `ending`, `hooks`, `listing`, `nodes`, `overdue`, `pausing`, `pruning`, `refusing`, `sessions`, `tokens`, `watching` and `why` are sentences about one client; `random` compares a store with the one in memory, answer by answer;
//! `many` and `many_deferred` let many clients loose on one store and judge their answers afterwards.

#![allow(dead_code, clippy::print_stdout)]

pub mod cases;
pub mod claiming;
pub mod deferring;
pub mod editing;
pub mod ending;
pub mod hooks;
pub mod listing;
pub mod many;
pub mod many_deferred;
pub mod nodes;
pub mod overdue;
pub mod pausing;
pub mod pruning;
pub mod random;
pub mod refusing;
pub mod returning;
pub mod scenarios;
pub mod sessions;
pub mod tokens;
pub mod watching;
pub mod why;
pub mod world;

/// A small generator of numbers: the same seed, the same sequence.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() { None } else { Some(from[self.below(from.len())].clone()) }
    }
}

/// The seed of this test: from the environment; else one for all under CI, so that a change is judged by what it changes, and
/// another each time elsewhere. Always printed.
pub fn seed() -> u64 {
    let given = std::env::var("BELFRY_SEED").ok().and_then(|seed| seed.parse().ok());
    let drawn = || {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |since| since.as_nanos() as u64 % 1_000_000_007)
    };
    let seed = given.unwrap_or_else(|| if std::env::var_os("CI").is_some() { 287_925_576 } else { drawn() });
    println!("seed {seed} (BELFRY_SEED={seed} repeats it)");
    seed
}

/// Whether work fails, on a thread of its own so that the failure is only heard of.
pub fn fails<F: Future<Output = ()>>(work: impl FnOnce() -> F + Send + 'static) -> bool {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::spawn(move || runtime().block_on(work())).join().is_err()
}

/// How many rounds of random operations: from the environment, else this many.
pub fn rounds(usual: u64) -> u64 {
    std::env::var("BELFRY_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}
