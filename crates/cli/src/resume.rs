//! `belfry resume`: the end of a pause, by hand.

use belfry_store::API;
use belfry_time::Timestamp;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::client::schedule_path;
use crate::failure::Failure;
use crate::output::Output;
use crate::pause::all_of;
use crate::place::{Need, Place, SOURCE};
use crate::reach;
use crate::words;

/// Resume schedules that were paused: they tick from now on
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry resume reporter/morning
  belfry resume reporter
  belfry resume prices/poll --catch-up
  belfry resume prices/poll --from-now

What the pause left out, with what was overdue when it began, is recorded as skipped. With --catch-up the schedule's
`catch_up` says what becomes of it. A schedule whose last tick lies ahead of a clock that was set back waits for that tick
to pass; with --from-now it does not.")]
pub struct Resume {
    /// Which schedules; an agent's name alone means all of its
    #[arg(value_name = "AGENT[/SCHEDULE]", required = true)]
    names: Vec<String>,

    /// Plan what the pause left out, as after downtime
    #[arg(long)]
    catch_up: bool,

    /// Tick from now on, also where the clock was set back: ticks may come a second time
    #[arg(long, conflicts_with = "catch_up")]
    from_now: bool,
}

#[derive(Serialize)]
struct Answer {
    resumed: Vec<One>,
    unchanged: Vec<String>,
}

#[derive(Serialize)]
struct One {
    schedule: String,
    /// Ticks that the pause left out.
    skipped: u64,
}

impl Resume {
    /// Resumes them.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let mut answer = Answer { resumed: Vec::new(), unchanged: Vec::new() };
            let (mut lines, mut failure) = (Vec::new(), None);
            for name in all_of(&client, &self.names).await? {
                let body = json!({"catch_up": self.catch_up, "from_now": self.from_now});
                let came: Came = match client.post(&schedule_path(&name, "/resume")?, &body).await {
                    Ok(came) => came,
                    // The others are resumed all the same.
                    Err(error) => {
                        lines.push(format!("{name} left as it is"));
                        answer.unchanged.push(name);
                        failure = failure.or(Some(error));
                        continue;
                    }
                };
                let disabled = came.disabled_words(&name);
                if !came.resumed {
                    let why = match (came.ended_at, disabled) {
                        (Some(until), _) => {
                            format!("its pause has ended at {}", crate::up::local(until, &zone))
                        }
                        (None, Some(disabled)) => format!("it is disabled: {disabled}"),
                        (None, None) if self.from_now => {
                            "it is not paused, and does not wait for the clock".into()
                        }
                        (None, None) => "it is not paused".into(),
                    };
                    lines.push(format!("{name} left as it is: {why}"));
                    answer.unchanged.push(name);
                    continue;
                }
                lines.push(match (disabled, self.catch_up, came.skipped) {
                    (Some(disabled), ..) => {
                        format!("{name} is no longer paused, but stays disabled: {disabled}")
                    }
                    (None, true, _) => format!("{name} resumed from where the pause began"),
                    (None, false, 0) => format!("{name} resumed"),
                    (None, false, skipped) => {
                        let ticks = words::count(skipped as usize, "tick");
                        format!("{name} resumed; the pause left out {ticks}")
                    }
                });
                answer.resumed.push(One { schedule: name, skipped: came.skipped });
            }
            match failure {
                Some(failure) if answer.resumed.is_empty() && answer.unchanged.len() == 1 => Err(failure),
                failure => {
                    reach::answer(output, &answer, &lines.join("\n"))?;
                    failure.map_or(Ok(()), Err)
                }
            }
        })
    }
}

/// What became of a pause.
#[derive(Deserialize)]
struct Came {
    resumed: bool,
    skipped: u64,
    ended_at: Option<Timestamp>,
    /// Who owns its definition.
    origin: String,
    /// The keys of it that differ from the defaults.
    definition: Map<String, Value>,
}

impl Came {
    /// Where `enabled: false` is written, and how to change that.
    fn disabled_words(&self, name: &str) -> Option<String> {
        let is_disabled = self.definition.get("enabled") == Some(&Value::Bool(false));
        is_disabled.then(|| match self.origin.as_str() {
            API => {
                format!("its definition says `enabled: false`; `belfry set {name} enabled=true` enables it")
            }
            SOURCE => "its file says `enabled: false`; `enabled: true` there and `belfry apply` enable it"
                .to_owned(),
            other => format!("its definition says `enabled: false`; {other} owns it, and can enable it"),
        })
    }
}
