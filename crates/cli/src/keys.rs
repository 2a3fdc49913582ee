//! A schedule on the command line: `key=value` pairs, options for the common keys, or a file. All go to one parser, which is
//! also that of the files.

use std::io::Read;
use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::{Client, schedule_path};
use crate::failure::Failure;
use crate::output::Output;
use crate::reach;
use crate::words;

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

impl Keys {
    /// What was written, as the server reads it.
    pub fn body(&self, name: &str, add: bool, output: &Output) -> Result<Value, Failure> {
        match &self.file {
            Some(path) => Ok(json!({
                "add": add,
                "text": read_file(path)?,
                "origin": path.display().to_string(),
                "timezone": output.tz,
            })),
            None => {
                let pairs = self.all_pairs(output)?;
                if pairs.is_empty() {
                    return Err(nothing_said(name, add));
                }
                Ok(json!({"add": add, "pairs": pairs, "origin": "command line", "timezone": output.tz}))
            }
        }
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

/// Makes or changes a schedule, and tells what hardly works as meant.
pub async fn write(client: &Client, name: &str, body: &Value, output: &Output) -> Result<(), Failure> {
    let written: Written = client.post(&schedule_path(name, "/write")?, body).await?;
    for warning in &written.warnings {
        reach::say(&words::one_line(warning, usize::MAX));
    }
    let words = match written.result.as_str() {
        "unchanged" => format!("{name} is like that already"),
        result => format!("{name} {result}"),
    };
    reach::answer(output, &Answer { schedule: name, result: &written.result }, &words)
}

/// What became of it.
#[derive(Deserialize)]
struct Written {
    result: String,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Answer<'a> {
    schedule: &'a str,
    result: &'a str,
}

fn nothing_said(name: &str, add: bool) -> Failure {
    Failure::Usage(match add {
        false => {
            format!(
                "what should change? For example `belfry set {name} every=30m`; `prompt=null` goes back to the default"
            )
        }
        true => {
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
