//! How late attempts start, and what an engine costs that has nothing to do:
//!
//!     cargo bench -p belfry --bench late [-- sqlite|postgres]
//!
//! `BELFRY_SCHEDULES` (10,000) exist, `BELFRY_DUE` (1,000) of them are due in the same second, three times, with Rust
//! handlers; then nothing is due for ten seconds.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry::{AgentBuilder, AnyStore, Engine, Options, ScheduleOptions, StopOptions, Timestamp, When};
use belfry_core::definition::AnchorName;
use belfry_store::Store;
use parking_lot::Mutex;

#[path = "../../store/tests/support/pg.rs"]
mod pg;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn main() {
    let only = std::env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    if let Ok(address) = std::env::var(FILL) {
        return runtime.block_on(fill(&address));
    }
    runtime.block_on(async {
        if "sqlite".contains(&only) {
            let folder = tempfile::tempdir().unwrap();
            let address = format!("sqlite:{}/belfry.db", folder.path().display());
            measure("sqlite", &address).await;
        }
        if "postgres".contains(&only)
            && let Some(url) = pg::fresh_database()
        {
            measure("postgres", &url).await;
        }
    });
}

/// Set for the process that fills the store, so that the one that is measured never holds the definitions.
const FILL: &str = "BELFRY_BENCH_FILL";

fn sizes() -> (usize, usize) {
    (number("BELFRY_SCHEDULES", 10_000), number("BELFRY_DUE", 1_000))
}

async fn open(address: &str) -> AnyStore {
    if address.starts_with("sqlite:") {
        return AnyStore::open(address, true).await.unwrap();
    }
    AnyStore::Postgres(belfry_store::postgres::Postgres::open(address).await.unwrap())
}

async fn fill(address: &str) {
    let (schedules, due) = sizes();
    let store = open(address).await;
    apply(&store, "idle", schedules.saturating_sub(due), &When::Cron("0 0 1 1 *".into())).await;
    apply(&store, "busy", due, &When::Every("10s".into())).await;
}

async fn measure(name: &str, address: &str) {
    let (schedules, due) = sizes();
    let began = Instant::now();
    let filled =
        std::process::Command::new(std::env::current_exe().unwrap()).env(FILL, address).status().unwrap();
    assert!(filled.success());
    println!("{name}: {schedules} schedules applied in {:.1} s", began.elapsed().as_secs_f64());
    let late: Arc<Mutex<Vec<i64>>> = Arc::default();
    let store = Arc::new(open(address).await);
    let seen = late.clone();
    let lanes = [("cron".to_owned(), 1000)].into_iter().collect();
    let engine = Engine::builder()
        .store(store.clone())
        .options(Options { lanes, ..Options::default() })
        .handler("busy", move |run| {
            let tick = run.tick_at().unwrap();
            seen.lock().push(Timestamp::now().duration_since(tick).as_micros() as i64);
            async { Ok(()) }
        })
        .build();
    let started = Instant::now();
    engine.start().await.unwrap();
    // First each schedule is seen for the first time, and its first tick is found.
    engine.quiet().await;
    late.lock().clear();
    println!(
        "{name}: first ticks found in {:.1} s   {} MB resident",
        started.elapsed().as_secs_f64(),
        resident_mb()
    );
    let mut view = engine.events();
    // Three times all that is due.
    while late.lock().len() < 3 * due {
        let _ = view.recv().await;
    }
    let mut late = std::mem::take(&mut *late.lock());
    late.sort_unstable();
    let at = |share: f64| late[((late.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{name}: {due} due at once   p50 {:.1} ms   p99 {:.1} ms   max {:.1} ms late, over {} starts",
        at(0.5),
        at(0.99),
        at(1.0),
        late.len()
    );
    store.apply(engine.now(), "busy", "gone", &[]).await.unwrap();
    engine.hint().await;
    engine.quiet().await;
    let (cpu, began) = (cpu_time(), Instant::now());
    tokio::time::sleep(Duration::from_secs(10)).await;
    let share = (cpu_time() - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    println!("{name}: idle   {:.2} % of a core   {} MB resident", share * 100.0, resident_mb());
    engine.stop(StopOptions::default()).await.unwrap();
}

async fn apply(store: &AnyStore, agent: &str, count: usize, when: &When) {
    let mut builder = AgentBuilder::new(agent);
    for n in 0..count {
        // What goes by while the store is filled is not what is measured.
        let catch_up = Some(belfry_core::definition::CatchUp::Skip);
        let options = ScheduleOptions { anchor: AnchorName::Slot, catch_up, ..ScheduleOptions::default() };
        builder = builder.schedule_with(format!("s{n}"), when.clone(), options);
    }
    store.apply(Timestamp::now(), agent, "1", &[builder.build()]).await.unwrap();
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let numbers: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = numbers[11].parse::<u64>().unwrap() + numbers[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn resident_mb() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096 / 1_000_000
}
