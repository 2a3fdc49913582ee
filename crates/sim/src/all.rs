//! Many seeds at once, on all processors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

use belfry_core::broken::{self, Broken};
#[cfg(target_os = "linux")]
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
#[cfg(target_os = "linux")]
use nix::unistd::Pid;
use parking_lot::Mutex;

use crate::beside::Other;
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
    /// Second lives, by the store that they were lived on.
    pub again: BTreeMap<&'static str, u64>,
    /// How often each verb met a schedule in each state.
    pub met: BTreeMap<(&'static str, &'static str), u64>,
}

/// One of so many seeds is replayed on SQLite.
pub const SQLITE_EVERY: u64 = 20;
/// And one of so many on PostgreSQL.
pub const POSTGRES_EVERY: u64 = 200;

/// Gives the stores that a seed is replayed on, each with its name.
pub type Stores<'a> = &'a (dyn Fn(u64) -> Vec<(&'static str, Other)> + Sync);

/// Lives many seeds, every tenth twice, and some again beside other stores. Goes on after a seed that broke something if
/// `keeps_going`.
pub fn live_all(seeds: Range<u64>, keeps_going: bool, stores: Stores<'_>) -> Summary {
    // Those that take longest first, so that no processor waits for another in the end.
    let mut order: Vec<u64> = seeds.collect();
    order.sort_by_key(|seed| (!seed.is_multiple_of(POSTGRES_EVERY), !seed.is_multiple_of(SQLITE_EVERY)));
    let next = AtomicUsize::new(0);
    let summary = Mutex::new(Summary::default());
    on_all_cores(|| {
        loop {
            let seed = order.get(next.fetch_add(1, Ordering::Relaxed));
            let Some(&seed) = seed.filter(|_| keeps_going || summary.lock().broken.is_empty()) else {
                return;
            };
            let report = Sim::run(seed, 0);
            let others = if report.broken.is_none() { stores(seed) } else { Vec::new() };
            // A life beside another store is a second life, too.
            let is_twice = seed.is_multiple_of(10) && others.is_empty();
            let mut again: Vec<(&str, Report)> =
                is_twice.then(|| ("memory", Sim::run(seed, 0))).into_iter().collect();
            for (name, other) in others {
                again.push((name, Sim::run_beside(seed, 0, Some(other))));
            }
            let mut summary = summary.lock();
            summary.add(seed, &report);
            for (name, again) in again {
                *summary.again.entry(name).or_default() += 1;
                let differs = (again.trace != report.trace)
                    .then(|| "two lives of this seed differ".to_owned())
                    .filter(|_| report.broken.is_none());
                if let Some(what) = again.broken.filter(|_| report.broken.is_none()).or(differs) {
                    summary.broken.insert(seed, format!("on {name}: {what}"));
                }
            }
        }
    });
    summary.into_inner()
}

/// Calls a function on each core. What it starts stays on that core, too: threads that only wait for each other are several
/// times faster there.
fn on_all_cores(work: impl Fn() + Sync) {
    let work = &work;
    std::thread::scope(|scope| {
        for place in 0..available_parallelism().map_or(1, |count| count.get()) {
            scope.spawn(move || {
                #[cfg(target_os = "linux")]
                stay_on_core(place);
                work();
            });
        }
    });
}

/// Keeps this thread, and those that it starts, on one of the cores that it may use. Where it may not, it is slower.
#[cfg(target_os = "linux")]
fn stay_on_core(place: usize) {
    let this = Pid::from_raw(0);
    let Ok(all) = sched_getaffinity(this) else { return };
    let own = (0..CpuSet::count()).filter(|core| all.is_set(*core).unwrap_or(false)).nth(place);
    let mut one = CpuSet::new();
    if own.is_some_and(|core| one.set(core).is_ok()) {
        let _ = sched_setaffinity(this, &one);
    }
}

impl Summary {
    fn add(&mut self, seed: u64, report: &Report) {
        self.lives += 1;
        self.ticks += report.ticks;
        self.attempts += report.attempts;
        self.events += report.events;
        for (pair, count) in &report.met {
            *self.met.entry(*pair).or_default() += count;
        }
        match &report.broken {
            Some(what) => drop(self.broken.insert(seed, what.clone())),
            None => {
                self.ticks_min = Some(self.ticks_min.map_or(report.ticks, |least| least.min(report.ticks)))
            }
        }
    }
}

/// The first seed that notices that something is broken on purpose, with what it notices. Seeds that break something anyway
/// do not count. Some seeds are lived beside SQLite.
pub fn notice(broken: Broken, seeds: Range<u64>) -> Option<(u64, String)> {
    for seed in seeds {
        let other = if seed.is_multiple_of(SQLITE_EVERY) { Other::sqlite(seed).ok() } else { None };
        let report = broken::with(broken, || Sim::run_beside(seed, 0, other));
        if let Some(what) = report.broken
            && Sim::run(seed, 0).broken.is_none()
        {
            return Some((seed, what));
        }
    }
    None
}

/// The first seed that noticed something, with what it noticed.
pub type Noticed = (u64, String);

/// For everything that can be broken, what [`notice`] finds, on all processors. `each` hears of it at once.
pub fn notice_all(
    seeds: &Range<u64>,
    each: impl Fn(Broken, Option<&Noticed>) + Sync,
) -> Vec<(Broken, Option<Noticed>)> {
    let next = AtomicUsize::new(0);
    let noticed = Mutex::new(BTreeMap::new());
    on_all_cores(|| {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(broken) = Broken::ALL.get(place) else { return };
            let found = notice(*broken, seeds.clone());
            each(*broken, found.as_ref());
            noticed.lock().insert(place, found);
        }
    });
    let noticed = noticed.into_inner();
    noticed.into_iter().map(|(place, found)| (Broken::ALL[place], found)).collect()
}
