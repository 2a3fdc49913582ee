//! `belfry-sim [--seed N] [--seeds N] [--from N] [--trace N]`: lives seeds and says what they broke.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool for developers")]

use std::process::ExitCode;
use std::time::Instant;

use belfry_sim::{Sim, live_all, states, verbs};

const USAGE: &str = "\
usage: cargo xtask sim [--seed N | --seeds N [--from N]] [--trace LINES] [--keep-going] [--met]

  --seed N       one life
  --seeds N      so many lives (100), from seed 1 or --from on
  --trace LINES  of the first life that breaks something, so many of the last lines of what happened (60)
  --keep-going   go on after a life that breaks something
  --met          how often each verb met a schedule in each state";

struct Arguments {
    from: u64,
    count: u64,
    lines: usize,
    keeps_going: bool,
    shows_met: bool,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let seeds = arguments.from..arguments.from.saturating_add(arguments.count);
    println!("seeds {} to {}", seeds.start, seeds.end.saturating_sub(1));
    let began = Instant::now();
    let summary = live_all(seeds, arguments.keeps_going);
    let took = began.elapsed().as_secs_f64();
    for (seed, what) in &summary.broken {
        println!("seed {seed}: {what}");
    }
    println!(
        "{} lives, {} broken; {} ticks checked, {} attempts, {} events; {took:.1} s, {:.3} s each",
        summary.lives,
        summary.broken.len(),
        summary.ticks,
        summary.attempts,
        summary.events,
        took / summary.lives.max(1) as f64
    );
    if arguments.shows_met {
        for verb in verbs() {
            for state in states() {
                let count = summary.met.get(&(verb, state)).copied().unwrap_or(0);
                println!("{verb:24} {state:24} {count:8}");
            }
        }
    }
    match summary.broken.keys().next() {
        Some(seed) => {
            if !arguments.keeps_going {
                show(*seed, arguments.lines);
            }
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    }
}

/// Lives a seed again, and shows how it came to break something.
fn show(seed: u64, lines: usize) {
    let report = Sim::run(seed, lines);
    println!("{:?}", report.params);
    println!("again: cargo xtask sim --seed {seed} --trace {}", 5 * lines);
    for line in report.lines {
        println!("  {line}");
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut parsed = Arguments { from: 1, count: 100, lines: 60, keeps_going: false, shows_met: false };
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next()?.parse::<u64>().ok();
        match argument.as_str() {
            "--seed" => (parsed.from, parsed.count) = (number()?, 1),
            "--seeds" => parsed.count = number()?,
            "--from" => parsed.from = number()?,
            "--trace" => parsed.lines = number()? as usize,
            "--keep-going" => parsed.keeps_going = true,
            "--met" => parsed.shows_met = true,
            _ => return None,
        }
    }
    Some(parsed)
}
