//! The commands about files: `init`, `check`, `config schema`.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use belfry_config::{Errors, Problem, Severity};
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reading;
use crate::words;

/// Write a small configuration file to begin with
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry init
  belfry -c jobs/belfry.yaml init
  belfry init --force")]
pub struct Init {
    /// Write it over a file that is there
    #[arg(long)]
    force: bool,
}

impl Init {
    pub fn run(&self, place: &Place) -> Result<(), Failure> {
        let path = place.file();
        let shown = path.display();
        let mut options = std::fs::File::options();
        options.write(true).mode(0o644);
        if self.force {
            options.create(true).truncate(true)
        } else {
            options.create_new(true)
        };
        let mut file = options.open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => Failure::Usage(format!(
                "{shown} is there already and was left as it is; `--force` writes over it"
            )),
            _ => Failure::Usage(format!("cannot write {shown}: {error}")),
        })?;
        file.write_all(belfry_config::STARTER.as_bytes())?;
        reading::remark(&format!(
            "{shown} is written. `belfry up` runs it, `belfry check` says whether it is right"
        ));
        Ok(())
    }
}

/// Check the configuration files
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry check
  belfry -c jobs/belfry.yaml check
  belfry check -o json

Exit code 2 where anything is wrong, also a single schedule; warnings alone are fine. Nothing is changed.")]
pub struct Check {}

#[derive(Serialize)]
struct Checked {
    ok: bool,
    files: Vec<String>,
    agents: usize,
    schedules: usize,
    problems: Vec<Shown>,
}

#[derive(Serialize)]
struct Shown {
    severity: &'static str,
    message: String,
    help: Option<String>,
    schedule: Option<String>,
    path: Option<String>,
    line: Option<usize>,
    column: Option<usize>,
}

impl Shown {
    fn of(problem: &Problem) -> Shown {
        let place = problem.place();
        Shown {
            severity: match problem.severity() {
                Severity::Error => "error",
                Severity::Invalid => "invalid",
                Severity::Warning => "warning",
            },
            message: problem.message().to_owned(),
            help: problem.way_out().map(str::to_owned),
            schedule: problem.schedule().map(str::to_owned),
            path: place.map(|place| place.path.clone()),
            line: place.map(|place| place.line),
            column: place.map(|place| place.column),
        }
    }
}

impl Check {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let (checked, problems) = match place.load_to_check() {
            Ok(loaded) => {
                let schedules = loaded.agents.iter().map(|agent| agent.schedules.len()).sum();
                let files = loaded.files.iter().map(|file| file.display().to_string()).collect();
                let problems: Vec<Problem> = loaded.invalid.iter().chain(&loaded.warnings).cloned().collect();
                let ok = loaded.invalid.is_empty();
                let agents = loaded.agents.len();
                (Checked { ok, files, agents, schedules, problems: Vec::new() }, problems)
            }
            Err(Failure::Config(errors)) => {
                let none =
                    Checked { ok: false, files: Vec::new(), agents: 0, schedules: 0, problems: Vec::new() };
                (none, errors.problems)
            }
            Err(other) => return Err(other),
        };
        if output.format != Format::Table {
            let shown = problems.iter().map(Shown::of).collect();
            let ok = checked.ok;
            reading::print_item(output.format, &Checked { problems: shown, ..checked })?;
            return if ok { Ok(()) } else { Err(Failure::Config(Errors { problems })) };
        }
        let warnings: Vec<&Problem> =
            problems.iter().filter(|problem| problem.severity() == Severity::Warning).collect();
        for warning in &warnings {
            reading::show_problem(warning);
            reading::remark("");
        }
        if checked.ok {
            let also = match warnings.len() {
                0 => String::new(),
                number => format!(", {}", words::count(number, "warning")),
            };
            return reading::print_text(&format!(
                "{} is right: {} with {}{also}\n",
                place.file().display(),
                words::count(checked.agents, "agent"),
                words::count(checked.schedules, "schedule"),
            ));
        }
        let wrong = problems.into_iter().filter(|problem| problem.severity() != Severity::Warning).collect();
        Err(Failure::Config(Errors { problems: wrong }))
    }
}

/// About configuration files as such
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry config schema > belfry.schema.json")]
pub struct Config {
    #[command(subcommand)]
    verb: ConfigVerb,
}

#[derive(Debug, Subcommand)]
enum ConfigVerb {
    /// Print the JSON Schema of a configuration file, for editors
    Schema,
}

impl Config {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        match self.verb {
            ConfigVerb::Schema => reading::print_item(output.format, &belfry_config::schema()),
        }
    }
}
