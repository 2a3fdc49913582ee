//! `belfry why`: why a schedule runs or does not, now or at an instant.

use belfry::api::{Check, Why as Answer};
use clap::Args;
use comfy_table::Color;

use crate::client::schedule_path;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::sheet::{self, Sheet, column};
use crate::words;

/// Say why a schedule runs or does not, now or at an instant
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry why reporter/morning
  belfry why reporter/morning --at 2026-03-02T09:00:00
  belfry why prices/poll --at 2026-03-02T09:00:00Z -o json

A time without an offset is read in the zone of --tz, else in the host's. Where it is a whole second, any tick within that
second is meant.")]
pub struct Why {
    /// Which schedule
    #[arg(value_name = "AGENT/SCHEDULE")]
    name: String,

    /// At this instant instead of now: RFC 3339, or a local date and time
    #[arg(long, value_name = "TIME")]
    at: Option<String>,
}

impl Why {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let at = self.at.as_ref().map(|text| reading::instant(text, "--at", output)).transpose()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let at = at.map_or(String::new(), |at| format!("?at={at}"));
            let answer: Answer = client.get(&schedule_path(&self.name, &format!("/why{at}"))?).await?;
            match output.format {
                Format::Table => print(&answer),
                format => reading::print_item(format, &answer),
            }
        })
    }
}

fn print(answer: &Answer) -> Result<(), Failure> {
    reading::print_text(&sentence(answer, sheet::width()))?;
    if answer.checks.len() < 2 {
        return Ok(());
    }
    let mut sheet = Sheet::new(&[column("CHECK"), column("OK"), column("DETAIL").wraps(24)]);
    let mut failed = false;
    for Check { check, ok, detail } in &answer.checks {
        sheet.row(vec![check.clone(), if *ok { "yes" } else { "no" }.into(), detail.clone()]);
        // The first that is not ok is the reason.
        let colour = if failed { Color::Yellow } else { Color::Red };
        sheet.colour("OK", Some(if *ok { Color::Green } else { colour }));
        failed |= !ok;
    }
    reading::print_text(&format!("\n{}", sheet.render()))
}

/// The answer in a sentence. It may quote texts from outside, such as the reason of a pause.
fn sentence(answer: &Answer, width: Option<u16>) -> String {
    let reason = answer.reason.as_deref().map_or(String::new(), |reason| format!(" ({reason})"));
    let style = anstyle::Style::new().bold();
    let head = words::one_line(&format!("{}{reason}:", answer.decision.as_str()), usize::MAX);
    let text = words::wrapped(&format!("{head} {}", words::one_line(&answer.words, usize::MAX)), width);
    match text.strip_prefix(&head) {
        Some(rest) => format!("{style}{head}{style:#}{rest}\n"),
        // A narrow terminal has broken it into lines.
        None => format!("{text}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_shows_the_sentence_once() {
        let answer = serde_json::json!({
            "agent": "a", "schedule": "s", "at": "2026-01-05T12:00:00Z", "decision": "skipped", "reason": "paused",
            "words": "paused by hand", "checks": [],
        });
        let answer: Answer = serde_json::from_value(answer).unwrap();
        for width in [Some(0), Some(10), Some(80), None] {
            let text = sentence(&answer, width);
            assert_eq!(text.matches("skipped").count(), 1, "{width:?}: {text:?}");
        }
    }
}
