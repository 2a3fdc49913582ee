//! The binary `belfry`: parse, call, print. Nothing is decided here.
//!
//! `main` hands each command its arguments and turns what comes back into an exit code.

mod add;
mod apply;
mod backfill;
mod cancel;
mod failure;
mod keys;
mod lines;
mod next;
mod output;
mod pause;
mod place;
mod reach;
mod reload;
mod resume;
mod retry;
mod rm;
mod run;
mod set;
mod timing;
mod up;
mod wait;

use std::process::ExitCode;

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
}

fn main() -> ExitCode {
    // The same binary is also the keeper of a node's children, and what they start as.
    if let Some(code) = belfry_runner::keeper::main_if_asked() {
        return code;
    }
    let cli = Cli::parse();
    cli.output.set_colours();
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
        Command::Next(next) => next.run(&cli.output),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
