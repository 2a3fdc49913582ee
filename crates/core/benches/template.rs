//! Time and memory of the templates that try to take most: `cargo bench -p belfry-core --bench template`.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

#[path = "../tests/hostile/mod.rs"]
mod hostile;

use std::time::Instant;

use belfry_core::template::{Budget, Template, Values};
use belfry_time::Zone;

/// A figure of this process, in KiB.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

fn main() {
    let payload = hostile::payload();
    let zone = Zone::get("Europe/London").unwrap();
    let values = Values {
        prompt: Some("Go."),
        payload: &payload,
        command: "poll",
        agent: "a",
        schedule: "s",
        session: None,
        run: "0199",
        attempt: 2,
        tick_at: Some("2026-07-01T08:30:00Z".parse().unwrap()),
        last_success_at: None,
        zone: &zone,
    };
    let templates = hostile::templates();
    let (mut refused, mut slowest, mut largest) = (0, (0.0, ""), (0, ""));
    for source in &templates {
        // Makes the peak what is in use now.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let (before, began) = (memory("VmRSS"), Instant::now());
        let result = Template::parse(source).map(|template| template.render(&values, &mut Budget::default()));
        let took = began.elapsed().as_secs_f64() * 1e3;
        let took_kib = memory("VmHWM").saturating_sub(before);
        refused += u32::from(result.is_err());
        let head = || source.get(..source.len().min(60)).unwrap_or("");
        if took > slowest.0 {
            slowest = (took, head());
        }
        if took_kib > largest.0 {
            largest = (took_kib, head());
        }
    }
    println!("{} templates, {refused} refused when parsed", templates.len());
    println!("slowest  {:6.1} ms   {}", slowest.0, slowest.1);
    println!("largest  {:6.1} MiB  {}", largest.0 as f64 / 1024.0, largest.1);
}
