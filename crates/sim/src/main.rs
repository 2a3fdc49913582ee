//! `belfry-sim [--seed N] [--seeds N] [--from N] [--trace N]`: lives seeds and stops at the first that breaks something.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool for developers")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use belfry_sim::{Report, Sim};

const USAGE: &str = "usage: belfry-sim [--seed N | --seeds N [--from N]] [--trace LINES] [--keep-going]";

struct Arguments {
    from: u64,
    count: u64,
    lines: usize,
    keeps_going: bool,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let began = Instant::now();
    let (mut ticks, mut attempts, mut events, mut broken) = (0, 0, 0, 0);
    let mut met: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for seed in arguments.from..arguments.from + arguments.count {
        let report = Sim::run(seed, 0);
        let twice = seed.is_multiple_of(10).then(|| Sim::run(seed, 0).trace);
        if twice.is_some_and(|trace| trace != report.trace) {
            println!("seed {seed}: two lives of one seed differ");
            return ExitCode::FAILURE;
        }
        if let Some(what) = &report.broken {
            broken += 1;
            println!("seed {seed}: {what}");
            if !arguments.keeps_going {
                show(&report, arguments.lines);
                return ExitCode::FAILURE;
            }
        }
        ticks += report.ticks;
        attempts += report.attempts;
        events += report.events;
        for (pair, count) in report.met {
            *met.entry(pair).or_default() += count;
        }
    }
    let took = began.elapsed();
    println!(
        "{} seeds, {broken} broken, {ticks} ticks checked, {attempts} attempts, {events} events, {:.1} s, {:.3} s each",
        arguments.count,
        took.as_secs_f64(),
        took.as_secs_f64() / arguments.count as f64
    );
    for ((verb, state), count) in met {
        println!("{verb:24} {state:24} {count}");
    }
    if broken > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Lives a broken seed again, and shows how it came to that.
fn show(report: &Report, lines: usize) {
    let params = &report.params;
    println!("{params:?}");
    println!("again: cargo xtask sim --seed {} --trace {}", params.seed, lines.max(200));
    for line in Sim::run(params.seed, lines.max(60)).lines {
        println!("  {line}");
    }
}

fn parse(arguments: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut parsed = Arguments { from: 1, count: 100, lines: 0, keeps_going: false };
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next()?.parse::<u64>().ok();
        match argument.as_str() {
            "--seed" => (parsed.from, parsed.count) = (number()?, 1),
            "--seeds" => parsed.count = number()?,
            "--from" => parsed.from = number()?,
            "--trace" => parsed.lines = number()? as usize,
            "--keep-going" => parsed.keeps_going = true,
            _ => return None,
        }
    }
    Some(parsed)
}
