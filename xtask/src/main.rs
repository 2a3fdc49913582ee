//! `cargo xtask …`: what a developer or CI runs. Needs nothing but Rust and a C compiler.
//!
//! - `test`: everything that decides whether a change lands, each part timed
//! - `test --full`: the same, then what needs more time or tools
//! - `golden`: writes the golden files anew, to be read in the diff
//! - `sim`: simulated nodes, clocks and faults; `--help` says what it takes
//! - `bench`: the benchmarks, `time` of expressions, `store` of the verbs of a store

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod full;
mod postgres;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The parts of `cargo xtask test`, in order: the cheap ones first.
const PARTS: [(&str, &[&str]); 5] = [
    ("format", &["fmt", "--all", "--check"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny", "warnings"]),
    ("unit", &["test", "--workspace", "--locked", "--lib", "--bins"]),
    ("golden and end to end", &["test", "--workspace", "--locked", "--test", "*"]),
    ("doc", &["test", "--workspace", "--locked", "--doc"]),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["test"] => test(&PARTS, &[]),
        ["test", "--full"] => test(&PARTS, &full::PARTS),
        ["golden"] => {
            let packages = ["--package", "belfry-cli", "--package", "belfry-config"];
            exit(cargo(&["test", "--test", "*"]).args(packages).env("BELFRY_GOLDEN", "write"))
        }
        ["sim", rest @ ..] => exit(cargo(&["run", "--quiet", "--package", "belfry-sim", "--"]).args(rest)),
        ["bench", "time", rest @ ..] => {
            exit(cargo(&["bench", "--package", "belfry-time", "--bench", "next", "--"]).args(rest))
        }
        ["bench", "store", rest @ ..] => {
            exit(cargo(&["bench", "--package", "belfry-store", "--bench", "verbs", "--"]).args(rest))
        }
        _ => {
            eprintln!(
                "usage: cargo xtask test [--full] | golden | sim [--seed N | --seeds N] | bench time [FILTER] \
                 | bench store [sqlite | postgres]"
            );
            ExitCode::from(2)
        }
    }
}

fn test(parts: &[(&'static str, &[&str])], more: &[full::Part]) -> ExitCode {
    let mut times: Vec<(&str, Duration)> = Vec::new();
    let start = Instant::now();
    let postgres = match postgres::ensure(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")) {
        Ok(postgres) => postgres,
        Err(reason) => {
            eprintln!("== {reason}");
            return ExitCode::FAILURE;
        }
    };
    times.push(("PostgreSQL", start.elapsed()));
    let with_postgres = |mut command: Command| {
        if let Some(folder) = &postgres {
            command.env("PG_BIN", folder);
        }
        command
    };
    for (name, arguments) in parts {
        println!("== {name}: cargo {}", arguments.join(" "));
        let start = Instant::now();
        let mut command = with_postgres(cargo(arguments));
        command.env("RUST_TEST_THREADS", test_threads());
        let passed = succeeds(&mut command);
        times.push((name, start.elapsed()));
        if !passed {
            return failed(name, &times);
        }
    }
    let mut missing = Vec::new();
    for part in more {
        let start = Instant::now();
        match part.run(&with_postgres) {
            full::Ended::Passed => times.push((part.name, start.elapsed())),
            full::Ended::Failed => {
                times.push((part.name, start.elapsed()));
                return failed(part.name, &times);
            }
            full::Ended::ToolMissing(way_out) => missing.push((part.name, way_out)),
        }
    }
    print_times(&times);
    println!("== all {} parts passed", parts.len() + more.len() - missing.len());
    for (name, way_out) in &missing {
        println!("== SKIPPED {name}: {way_out}");
    }
    ExitCode::SUCCESS
}

fn failed(name: &str, times: &[(&str, Duration)]) -> ExitCode {
    print_times(times);
    eprintln!("== {name}: failed");
    ExitCode::FAILURE
}

fn print_times(times: &[(&str, Duration)]) {
    for (name, time) in times {
        println!("== {name:<22} {:>7.1} s", time.as_secs_f64());
    }
    let total: Duration = times.iter().map(|(_, time)| *time).sum();
    println!("== {:<22} {:>7.1} s", "total", total.as_secs_f64());
}

/// Most tests wait for processes and databases: twice as many as there are cores run at once.
fn test_threads() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::env::var("RUST_TEST_THREADS").unwrap_or_else(|_| (2 * cores).to_string())
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command
}

fn succeeds(command: &mut Command) -> bool {
    match command.status() {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("cannot start {}: {error}", command.get_program().display());
            false
        }
    }
}

fn exit(command: &mut Command) -> ExitCode {
    if succeeds(command) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::{Path, PathBuf};

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    /// A verb of a store can only be called where its trait is in scope. Routes and the command line read through `Reader`.
    #[test]
    fn only_the_engine_changes_a_store() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
        let mut found = Vec::new();
        for package in ["server", "cli"] {
            sources(&root.join(package).join("src"), &mut found);
        }
        assert!(found.len() > 50, "{} files", found.len());
        let is_trait = |word: &str| ["Store", "Hooks", "Watch", "Access", "*"].contains(&word);
        for path in found {
            let text = std::fs::read_to_string(&path).unwrap();
            // Up to the end of the import, which may take several lines.
            for import in text.split("belfry_store::").skip(1) {
                let import = import.split(';').next().unwrap_or_default();
                let mut words = import.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '*');
                let is_import = text.contains(&format!("use belfry_store::{import}"));
                assert!(!is_import || !words.any(is_trait), "{}: use belfry_store::{import}", path.display());
            }
        }
    }
}
