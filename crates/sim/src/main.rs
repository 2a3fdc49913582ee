//! `belfry-sim [--seed N] [--seeds N] [--from N] [--trace N]`: lives seeds and says what they broke.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool for developers")]

use std::process::ExitCode;
use std::time::Instant;

use belfry_sim::{Other, SQLITE_EVERY, Sim, impossible, live_all, notice_all, states, verbs};

const USAGE: &str = "\
usage: cargo xtask sim [--seed N | --seeds N [--from N]] [--trace LINES] [--keep-going] [--met] [--broken] [--postgres URL]

  --seed N       one life
  --seeds N      so many lives (100), from seed 1 or --from on
  --trace LINES  of the first life that breaks something, so many of the last lines of what happened (60)
  --postgres URL replay the life beside an empty PostgreSQL database, and show its trace
  --keep-going   go on after a life that breaks something
  --met          how often each verb met a schedule in each state
  --broken       break each thing on purpose, and say which seed notices it first";

struct Arguments {
    from: u64,
    count: u64,
    lines: usize,
    keeps_going: bool,
    shows_met: bool,
    breaks: bool,
    postgres: Option<String>,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let seeds = arguments.from..arguments.from.saturating_add(arguments.count);
    println!("seeds {} to {}", seeds.start, seeds.end.saturating_sub(1));
    let began = Instant::now();
    if arguments.breaks {
        return show_broken(&seeds);
    }
    if let Some(url) = &arguments.postgres {
        return show_beside(arguments.from, arguments.lines, url);
    }
    let summary = live_all(seeds, arguments.keeps_going, &stores);
    let took = began.elapsed().as_secs_f64();
    for (seed, what) in &summary.broken {
        println!("seed {seed}: {what}");
    }
    println!(
        "{} lives, {} broken; {} ticks checked (at least {} in a life), {} attempts, {} events; {took:.1} s, {:.3} s each",
        summary.lives,
        summary.broken.len(),
        summary.ticks,
        summary.ticks_min.unwrap_or(0),
        summary.attempts,
        summary.events,
        took / summary.lives.max(1) as f64
    );
    for (name, count) in &summary.again {
        println!("lived again on {name}: {count}");
    }
    if arguments.shows_met {
        for verb in verbs() {
            for state in states() {
                let count = summary.met.get(&(verb, state)).copied().unwrap_or(0);
                let why = impossible(verb, state).filter(|_| count == 0).unwrap_or_default();
                println!("{verb:24} {state:24} {count:8} {why}");
            }
        }
    }
    match summary.broken.iter().next() {
        Some((seed, what)) => {
            if !arguments.keeps_going {
                show(*seed, arguments.lines, what.starts_with("on sqlite"));
            }
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    }
}

/// Breaks each thing on purpose, and shows which seed notices it first.
fn show_broken(seeds: &std::ops::Range<u64>) -> ExitCode {
    let noticed = notice_all(seeds, |broken, found| {
        let broken = format!("{broken:?}");
        match found {
            Some((seed, what)) => {
                let words = what.lines().next().unwrap_or_default();
                println!("{broken:24} {:4}  {words}", seed - seeds.start + 1);
            }
            None => println!("{broken:24}    -  no seed notices it"),
        }
    });
    let is_unnoticed = noticed.iter().any(|(_, found)| found.is_none());
    if is_unnoticed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Replays a life beside a PostgreSQL database.
fn show_beside(seed: u64, lines: usize, url: &str) -> ExitCode {
    let other = match Other::postgres(url) {
        Ok(other) => other,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let report = Sim::run_beside(seed, lines, Some(other));
    println!("{:?}", report.params);
    for line in report.lines {
        println!("  {line}");
    }
    match report.broken {
        Some(what) => {
            println!("seed {seed}: {what}");
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    }
}

/// Some seeds are replayed on SQLite.
fn stores(seed: u64) -> Vec<(&'static str, Other)> {
    match seed.is_multiple_of(SQLITE_EVERY).then(|| Other::sqlite(seed)) {
        Some(Ok(other)) => vec![("sqlite", other)],
        Some(Err(error)) => {
            eprintln!("seed {seed} is not replayed on SQLite: {error}");
            Vec::new()
        }
        None => Vec::new(),
    }
}

/// Lives a seed again, and shows how it came to break something.
fn show(seed: u64, lines: usize, is_beside: bool) {
    let other = if is_beside { Other::sqlite(seed).ok() } else { None };
    let report = Sim::run_beside(seed, lines, other);
    println!("{:?}", report.params);
    println!("again: cargo xtask sim --seed {seed} --trace {}", 5 * lines);
    for line in report.lines {
        println!("  {line}");
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut parsed = Arguments {
        from: 1,
        count: 100,
        lines: 60,
        keeps_going: false,
        shows_met: false,
        breaks: false,
        postgres: None,
    };
    while let Some(argument) = arguments.next() {
        if argument == "--postgres" {
            parsed.postgres = Some(arguments.next()?);
            continue;
        }
        let mut number = || arguments.next()?.parse::<u64>().ok();
        match argument.as_str() {
            "--seed" => (parsed.from, parsed.count) = (number()?, 1),
            "--seeds" => parsed.count = number()?,
            "--from" => parsed.from = number()?,
            "--trace" => parsed.lines = number()? as usize,
            "--keep-going" => parsed.keeps_going = true,
            "--met" => parsed.shows_met = true,
            "--broken" => parsed.breaks = true,
            _ => return None,
        }
    }
    Some(parsed)
}
