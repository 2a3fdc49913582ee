//! The binary `belfry`: parse, call, print. Nothing is decided here.
//!
//! `main` hands each command its arguments and turns what comes back into an exit code.

#![warn(clippy::disallowed_methods)]

mod add;
mod any;
mod apply;
mod backfill;
mod breaker;
mod budget;
mod cancel;
mod client;
mod config;
mod content;
mod diff;
mod doctor;
mod events;
mod failure;
mod keys;
mod lanes;
mod lines;
mod link;
mod logs;
mod ls;
mod memory;
mod next;
mod nodes;
mod noted;
mod open;
mod output;
mod pages;
mod pause;
mod place;
mod reach;
mod reading;
mod reload;
mod resume;
mod retry;
mod rm;
mod run;
mod runs;
mod send;
mod server_file;
mod serving;
mod sessions;
mod set;
mod sheet;
mod show;
mod skew;
mod snapshots;
mod stop;
mod tame;
mod terminal;
mod timing;
mod token;
mod torture;
mod up;
mod version;
mod wait;
mod why;
mod words;

use std::io::Write;
use std::process::ExitCode;

use belfry_core::display::is_unsafe;
use clap::error::ContextValue;
use clap::{Parser, Subcommand};
use output::Output;
use place::Place;

/// Decides when work runs, how much of it at once, and what happens when it goes wrong.
#[derive(Debug, Parser)]
#[command(name = "belfry", version, arg_required_else_help = true, infer_subcommands = false)]
#[command(
    after_help = "Exit codes: 0 ok, 1 the run failed, 2 usage or bad input, 3 not found, 4 denied, 5 unreachable, 6 timed out"
)]
struct Cli {
    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    place: Place,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Up),
    Run(run::Run),
    Cancel(cancel::Cancel),
    Retry(retry::Retry),
    Pause(pause::Pause),
    Resume(resume::Resume),
    Add(add::Add),
    Set(set::Set),
    Rm(rm::Rm),
    Apply(apply::Apply),
    Reload(reload::Reload),
    Backfill(backfill::Backfill),
    Next(next::Next),
    Init(config::Init),
    Check(config::Check),
    Diff(diff::Diff),
    Export(diff::Export),
    Config(config::Config),
    Ls(ls::Ls),
    Show(show::Show),
    Why(why::Why),
    Runs(runs::Runs),
    Logs(logs::Logs),
    Send(send::Send),
    Stop(stop::Stop),
    Stopall(stop::Stopall),
    Sessions(sessions::Sessions),
    Lanes(lanes::Lanes),
    Nodes(nodes::Nodes),
    Breaker(breaker::Breaker),
    Budget(budget::Budget),
    Doctor(doctor::Doctor),
    Store(doctor::StoreCommand),
    Token(token::Token),
    Open(open::Open),
    Api(any::Api),
    Completions(version::Completions),
    Version(version::Version),
}

impl Command {
    /// The name of a command that is about files and the store, and not for a server.
    fn is_for_files(&self) -> Option<&'static str> {
        Some(match self {
            Command::Up(_) => "up",
            Command::Init(_) => "init",
            Command::Check(_) => "check",
            Command::Apply(_) => "apply",
            Command::Diff(_) => "diff",
            Command::Export(_) => "export",
            Command::Config(_) => "config",
            Command::Doctor(_) => "doctor",
            Command::Store(_) => "store",
            _ => return None,
        })
    }
}

fn main() -> ExitCode {
    // The same binary is also the keeper of a node's children, and what they start as.
    if let Some(code) = belfry_runner::keeper::main_if_asked() {
        return code;
    }
    belfry_runner::close_inherited_descriptors();
    // Its environment may name the store and a token.
    belfry_runner::hide_memory();
    let cli = match Cli::try_parse() {
        Ok(cli) => Cli { place: cli.place.without_empty(), ..cli },
        Err(error) => return explain(&error),
    };
    cli.output.set_colours();
    if let Some(name) = cli.command.is_for_files()
        && let Err(failure) = cli.place.refuse_server(name)
    {
        return failure.report();
    }
    let result = match &cli.command {
        Command::Up(up) => up.run(&cli.place, &cli.output),
        Command::Run(run) => run.run(&cli.place, &cli.output),
        Command::Cancel(cancel) => cancel.run(&cli.place, &cli.output),
        Command::Retry(retry) => retry.run(&cli.place, &cli.output),
        Command::Pause(pause) => pause.run(&cli.place, &cli.output),
        Command::Resume(resume) => resume.run(&cli.place, &cli.output),
        Command::Add(add) => add.run(&cli.place, &cli.output),
        Command::Set(set) => set.run(&cli.place, &cli.output),
        Command::Rm(rm) => rm.run(&cli.place, &cli.output),
        Command::Apply(apply) => apply.run(&cli.place, &cli.output),
        Command::Reload(reload) => reload.run(&cli.place, &cli.output),
        Command::Backfill(backfill) => backfill.run(&cli.place, &cli.output),
        Command::Next(next) => next.run(&cli.place, &cli.output),
        Command::Init(init) => init.run(&cli.place),
        Command::Check(check) => check.run(&cli.place, &cli.output),
        Command::Diff(diff) => diff.run(&cli.place, &cli.output),
        Command::Export(export) => export.run(&cli.place),
        Command::Config(config) => config.run(&cli.output),
        Command::Show(show) => show.run(&cli.place, &cli.output),
        Command::Ls(ls) => ls.run(&cli.place, &cli.output),
        Command::Why(why) => why.run(&cli.place, &cli.output),
        Command::Runs(runs) => runs.run(&cli.place, &cli.output),
        Command::Logs(logs) => logs.run(&cli.place, &cli.output),
        Command::Send(send) => send.run(&cli.place, &cli.output),
        Command::Stop(stop) => stop.run(&cli.place, &cli.output),
        Command::Stopall(stopall) => stopall.run(&cli.place, &cli.output),
        Command::Sessions(sessions) => sessions.run(&cli.place, &cli.output),
        Command::Lanes(lanes) => lanes.run(&cli.place, &cli.output),
        Command::Nodes(nodes) => nodes.run(&cli.place, &cli.output),
        Command::Breaker(breaker) => breaker.run(&cli.place, &cli.output),
        Command::Budget(budget) => budget.run(&cli.place, &cli.output),
        Command::Doctor(doctor) => doctor.run(&cli.place, &cli.output),
        Command::Store(store) => store.run(&cli.place, &cli.output),
        Command::Token(token) => token.run(&cli.place, &cli.output),
        Command::Open(open) => open.run(&cli.place, &cli.output),
        Command::Api(api) => api.run(&cli.place),
        Command::Completions(completions) => completions.run(),
        Command::Version(version) => version.run(&cli.output),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Prints help, the version or what is wrong with the arguments.
fn explain(error: &clap::Error) -> ExitCode {
    let has_unsafe =
        |value: &ContextValue| matches!(value, ContextValue::String(text) if text.chars().any(is_unsafe));
    // Colours in an argument cannot be told from ours: then there are none.
    let text = match error.context().any(|(_, value)| has_unsafe(value)) {
        true => words::harmless(&error.render().to_string()),
        false => error.render().ansi().to_string(),
    };
    // If the stream is closed, nobody reads it.
    let _ = match error.use_stderr() {
        true => write!(terminal::stderr(), "{text}"),
        false => write!(terminal::stdout(), "{text}"),
    };
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
