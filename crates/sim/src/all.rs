//! Many seeds at once, on all processors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::available_parallelism;

use parking_lot::Mutex;

use crate::sim::{Report, Sim};

/// How many lives went.
#[derive(Debug, Default)]
pub struct Summary {
    /// Seeds that broke something, with what, by seed.
    pub broken: BTreeMap<u64, String>,
    /// Lives.
    pub lives: u64,
    /// Ticks whose result was checked.
    pub ticks: u64,
    /// The fewest ticks that were checked in one life in which nothing broke.
    pub ticks_min: Option<u64>,
    /// Attempts that were started.
    pub attempts: u64,
    /// Everything that happened.
    pub events: u64,
    /// How often each verb met a schedule in each state.
    pub met: BTreeMap<(&'static str, &'static str), u64>,
}

/// Lives many seeds, every tenth twice. Goes on after a seed that broke something if `keeps_going`.
pub fn live_all(seeds: Range<u64>, keeps_going: bool) -> Summary {
    let next = AtomicU64::new(seeds.start);
    let summary = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, |count| count.get()) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || (!keeps_going && !summary.lock().broken.is_empty()) {
                        return;
                    }
                    let report = Sim::run(seed, 0);
                    let again = seed.is_multiple_of(10).then(|| Sim::run(seed, 0));
                    let mut summary = summary.lock();
                    if again.is_some_and(|again| again.trace != report.trace) {
                        summary.broken.insert(seed, "two lives of this seed differ".into());
                    }
                    summary.add(seed, report);
                }
            });
        }
    });
    summary.into_inner()
}

impl Summary {
    fn add(&mut self, seed: u64, report: Report) {
        self.lives += 1;
        self.ticks += report.ticks;
        self.attempts += report.attempts;
        self.events += report.events;
        for (pair, count) in report.met {
            *self.met.entry(pair).or_default() += count;
        }
        match report.broken {
            Some(what) => drop(self.broken.insert(seed, what)),
            None => {
                self.ticks_min = Some(self.ticks_min.map_or(report.ticks, |least| least.min(report.ticks)))
            }
        }
    }
}
