//! A schedule on the command line: `key=value` pairs, options for the common keys, or a file. All go through one parser,
//! which is also that of the files.

use std::io::Read;
use std::path::PathBuf;

use belfry_config::{About, Inherited, Input, parse_schedule};
use belfry_core::{AgentDefinition, ScheduleDefinition};
use belfry_time::Timestamp;
use clap::Args;

use crate::failure::Failure;
use crate::output::{Output, host_zone};
use crate::place::{Place, SOURCE};
use crate::reach::{self, Reach};

/// A schedule in a file longer than this is a mistake.
const FILE_MAX: u64 = 1 << 20;

/// The keys of a schedule.
#[derive(Debug, Args)]
pub struct Keys {
    /// Any key of a schedule, as in a file: if_running=queue, not_on=sat,sun
    #[arg(value_name = "KEY=VALUE")]
    pairs: Vec<String>,

    /// Read the keys from a file with a YAML map or a JSON object; - is standard input
    #[arg(short = 'f', long, value_name = "FILE", conflicts_with_all = ["pairs", "every", "cron", "at", "after", "prompt", "payload", "command", "jitter", "only_between", "not_on", "catch_up", "if_running", "lane"])]
    file: Option<PathBuf>,

    /// A distance: 90s, 1.5h, 1h30m; or hourly, daily, weekly, monthly
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    every: Option<String>,

    /// Wall-clock times: five fields, or @hourly @daily @weekly @monthly @yearly
    #[arg(long, value_name = "EXPR", allow_hyphen_values = true)]
    cron: Option<String>,

    /// Once, at this instant: RFC 3339, or a local date and time with --tz
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    at: Option<String>,

    /// Once, so long from now
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    after: Option<String>,

    /// The prompt, instead of the agent's
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// A JSON object, merged over the agent's payload key by key
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,

    /// Which of the agent's commands
    #[arg(long, value_name = "NAME")]
    command: Option<String>,

    /// Delay each tick by up to this long, or by a share of the distance to the next (10%)
    #[arg(long, value_name = "DURATION|N%")]
    jitter: Option<String>,

    /// Only at these local times, for example 08:00-18:00
    #[arg(long, value_name = "HH:MM-HH:MM")]
    only_between: Option<String>,

    /// Not on these days, for example sat,sun
    #[arg(long, value_name = "DAYS")]
    not_on: Option<String>,

    /// What becomes of missed ticks: skip, run_once, run_all
    #[arg(long, value_name = "POLICY")]
    catch_up: Option<String>,

    /// What a tick does while a run lives: skip, queue, cancel, allow
    #[arg(long, value_name = "POLICY")]
    if_running: Option<String>,

    /// The pool it takes a slot from
    #[arg(long, value_name = "LANE")]
    lane: Option<String>,
}

/// What keys are read for.
pub struct Target<'a> {
    /// `agent/schedule`.
    pub name: &'a str,
    pub agent: &'a AgentDefinition,
    /// What it is now, where it is changed.
    pub base: Option<&'a ScheduleDefinition>,
}

impl Keys {
    /// Reads them to a definition that works, and tells what hardly works as meant.
    pub fn read(
        &self,
        target: &Target<'_>,
        reach: &Reach,
        output: &Output,
    ) -> Result<ScheduleDefinition, Failure> {
        let host = host_zone();
        let settings = reach.loaded.as_ref().map(|loaded| &loaded.settings);
        let named = settings.filter(|s| s.timezone_is_named).map(|s| s.timezone.as_str());
        let inherited = Inherited {
            timezone: output.tz.as_deref().or(named),
            host_timezone: settings.map_or(host.name(), |settings| &settings.timezone),
            late_after_ms: settings.and_then(|settings| settings.engine.late_after_ms),
        };
        let mut origin = "command line".to_owned();
        let (text, pairs);
        let input = match &self.file {
            Some(path) => {
                origin = path.display().to_string();
                text = read_file(path)?;
                Input::Text(&text)
            }
            None => {
                pairs = self.all_pairs(output)?;
                if pairs.is_empty() {
                    return Err(nothing_said(target));
                }
                Input::Pairs(&pairs)
            }
        };
        let about = About { name: target.name, origin: &origin, inherited, agent: Some(target.agent) };
        let parsed = parse_schedule(input, target.base, &about)?;
        for warning in &parsed.warnings {
            reach::say(&warning.render(true));
        }
        Ok(parsed.definition)
    }

    /// What was written, as pairs: options are short for `key=value`.
    fn all_pairs(&self, output: &Output) -> Result<Vec<(String, String)>, Failure> {
        let options = [
            ("every", &self.every),
            ("cron", &self.cron),
            ("at", &self.at),
            ("after", &self.after),
            ("timezone", &output.tz),
            ("prompt", &self.prompt),
            ("payload", &self.payload),
            ("command", &self.command),
            ("jitter", &self.jitter),
            ("only_between", &self.only_between),
            ("not_on", &self.not_on),
            ("catch_up", &self.catch_up),
            ("if_running", &self.if_running),
            ("lane", &self.lane),
        ];
        let mut pairs: Vec<(String, String)> =
            options.iter().filter_map(|(key, value)| Some(((*key).to_owned(), (*value).clone()?))).collect();
        for pair in &self.pairs {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(Failure::Usage(format!(
                    "{pair:?} is no pair: write KEY=VALUE, for example every=20m or prompt=\"Write the report.\""
                )));
            };
            pairs.push((key.trim().to_owned(), value.to_owned()));
        }
        Ok(pairs)
    }
}

fn nothing_said(target: &Target<'_>) -> Failure {
    let name = target.name;
    Failure::Usage(match target.base {
        Some(_) => {
            format!(
                "what should change? For example `belfry set {name} every=30m`; `prompt=null` goes back to the default"
            )
        }
        None => {
            format!(
                "when should it run? For example `belfry add {name} --every 20m` or `belfry add {name} --cron \"0 9 * * 1-5\"`"
            )
        }
    })
}

fn read_file(path: &PathBuf) -> Result<String, Failure> {
    let cannot =
        |error: std::io::Error| Failure::Usage(format!("--file {} cannot be read: {error}", path.display()));
    let mut text = String::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().lock().take(FILE_MAX + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(FILE_MAX + 1).read_to_string(&mut text))
    };
    match read.map_err(cannot)? as u64 {
        FILE_MAX.. => {
            Err(Failure::Usage(format!("--file {} is longer than {FILE_MAX} bytes", path.display())))
        }
        _ => Ok(text),
    }
}

/// A one-shot whose time has passed never fires: it is refused, with both times.
pub fn refuse_past(name: &str, definition: &ScheduleDefinition, now: Timestamp) -> Result<(), Failure> {
    match belfry::past_words(name, definition, now) {
        Some(words) => {
            Err(Failure::Usage(format!("{words}. Use a later time, or `belfry run` to run it now")))
        }
        None => Ok(()),
    }
}

/// Why a schedule that belongs to somebody else is not touched.
pub fn owned(name: &str, source: &str, place: &Place) -> Failure {
    Failure::Usage(match source {
        SOURCE => {
            let file = place.file();
            format!("{name} is not touched: it belongs to {}; edit it there", file.display())
        }
        other => format!("{name} is not touched: it belongs to {other:?}, which alone changes it"),
    })
}
