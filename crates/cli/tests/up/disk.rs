//! A disk that becomes full under a working server.

use std::collections::BTreeMap;
use std::io::Write;

use belfry_time::Timestamp;

use crate::support::{Site, eventually};

/// `BELFRY_SMALL_DISK` names a folder on a real one, such as a tmpfs of eight megabytes.
#[test]
fn a_full_disk_stops_no_server_and_loses_no_tick() {
    let Some(disk) = std::env::var_os("BELFRY_SMALL_DISK") else {
        let words = "\nSKIPPED: BELFRY_SMALL_DISK names no small disk to fill\n";
        drop(std::io::stderr().write_all(words.as_bytes()));
        return;
    };
    let small = tempfile::tempdir_in(disk).unwrap();
    let mut site = Site::sqlite();
    site.store = format!("sqlite:{}/belfry.db", small.path().display());
    site.config(
        r#"
engine: {jitter_threshold: 1000}
agents:
  a:
    shell: 'echo "start $BELFRY_RUN_ID $BELFRY_ATTEMPT $BELFRY_TICK_AT" >> side.log'
    max_concurrent: none
    retry: {max: 20, base: 200ms}
    schedules:
      all: {every: 200ms, anchor: slot, catch_up: run_all, catch_up_limit: 1000, if_running: allow}
"#,
    );
    let mut up = site.up();
    for _ in 0..3 {
        up.event("run_finished");
    }
    let filler = small.path().join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    // What is freed meanwhile is filled as well, until it is noticed.
    eventually("the disk to be full", || {
        while file.write_all(&[0; 4096]).is_ok() {}
        up.heard().iter().any(|event| event["event"] == "store_unavailable").then_some(())
    });
    let unavailable = up.event("store_unavailable");
    assert!(unavailable["detail"].as_str().unwrap().contains("no space left"), "{unavailable}");
    // While it is full nothing new starts: what has started was claimed before.
    let before = site.side().len();
    let full_at = Timestamp::now();
    eventually("two seconds without room", || {
        while file.write_all(&[0; 512]).is_ok() {}
        (Timestamp::now().duration_since(full_at).as_secs() >= 2).then_some(())
    });
    assert!(site.side().len() <= before + 3, "{} started without room", site.side().len() - before);
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    up.event("store_available");
    let healed = Timestamp::now();
    up.wait_for("a tick after it", |event| {
        let tick = event["tick_at"].as_str().and_then(|tick| tick.parse::<Timestamp>().ok());
        event["event"] == "run_finished" && tick.is_some_and(|tick| tick > healed)
    });
    up.stop();
    let mut ticks: BTreeMap<i64, (String, u32)> = BTreeMap::new();
    for line in site.side() {
        let tick = line[3].parse::<Timestamp>().unwrap().as_millisecond();
        let attempt = line[2].parse().unwrap();
        let (run, newest) = ticks.entry(tick).or_insert_with(|| (line[1].clone(), 0));
        assert_eq!(*run, line[1], "two runs of one tick");
        assert!(attempt > *newest, "attempt {attempt} of {run} started after {newest}");
        *newest = attempt;
    }
    let all: Vec<i64> = ticks.keys().copied().collect();
    let gaps: Vec<_> = all.windows(2).filter(|pair| pair[1] - pair[0] != 200).collect();
    assert!(gaps.is_empty(), "ticks were lost: {gaps:?}");
    let known = site.runs("a/all");
    for (run, _) in ticks.values() {
        let record = known.iter().find(|record| record["id"] == run.as_str());
        assert!(record.is_some_and(|record| record["state"] == "completed"), "{run}: {record:?}");
    }
}
