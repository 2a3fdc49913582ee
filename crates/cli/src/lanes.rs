//! `belfry lanes`: pools of slots, what they hold, and changing that at run time.

use belfry::RunId;
use belfry::api::{Lane, List};
use clap::{Args, Subcommand};
use comfy_table::Color;
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::{Client, encoded};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reach::{self, answer};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

/// Show lanes, change them at run time, or end what waits in one
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry lanes
  belfry lanes set main 50
  belfry lanes set nightly 2 --limit 4 --queue-limit 50
  belfry lanes set main --reset
  belfry lanes clear nightly

Slots are for each node, a limit is for all of them together. What is set here holds on every node within a second, and until it
is reset; the file says what holds otherwise. Lowering a number ends nothing.")]
pub struct Lanes {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the lanes (the default)
    Ls,
    /// Make a lane, or make it hold something else than the file says
    Set(Set),
    /// End all runs that wait in a lane, cancelled(lane_cleared)
    Clear {
        /// Which
        lane: String,
    },
}

#[derive(Debug, Args)]
struct Set {
    /// Which
    lane: String,

    /// Runs at once, on each node
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    slots: Option<u32>,

    /// Runs at once, over all nodes; `none` is no limit
    #[arg(long, value_name = "N", value_parser = number_or_none)]
    limit: Option<Number>,

    /// Ticks wait while so many runs wait; `none` is no limit
    #[arg(long, value_name = "N", value_parser = number_or_none)]
    queue_limit: Option<Number>,

    /// Again what the file says
    #[arg(long, conflicts_with_all = ["slots", "limit", "queue_limit"])]
    reset: bool,
}

/// A number, or none.
#[derive(Debug, Clone, Copy)]
struct Number(Option<u32>);

fn number_or_none(text: &str) -> Result<Number, String> {
    match text {
        "none" => Ok(Number(None)),
        _ => match text.parse() {
            Ok(number) if number > 0 => Ok(Number(Some(number))),
            _ => Err("write a whole number from 1 on, or none".into()),
        },
    }
}

impl Lanes {
    /// Lists, sets or clears.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            match &self.verb {
                None | Some(Verb::Ls) => {
                    print(client.get::<List<Lane>>("/api/v1/lanes").await?.items, output)
                }
                Some(Verb::Set(set)) => set.run(&client, output).await,
                Some(Verb::Clear { lane }) => {
                    let path = format!("/api/v1/lanes/{}/clear", encoded(lane));
                    let cleared: Cleared = client.send(Method::POST, &path, None, &[]).await?;
                    let words = format!("{} cancelled", words::count(cleared.ended.len(), "waiting run"));
                    answer(output, &cleared, &words)
                }
            }
        })
    }
}

/// What was cleared.
#[derive(Serialize, Deserialize)]
struct Cleared {
    lane: String,
    ended: Vec<RunId>,
}

fn print(lanes: Vec<Lane>, output: &Output) -> Result<(), Failure> {
    if output.format != Format::Table {
        return reading::print_items(output.format, lanes);
    }
    let mut sheet = Sheet::new(&[
        column("LANE").wraps(30),
        column("SLOTS").right(),
        column("LIMIT").right().rank(4),
        column("QUEUE LIMIT").right().rank(2),
        column("ACTIVE").right(),
        column("PENDING").right(),
        column("OLDEST").right().rank(3),
        column("SET BY").rank(1),
    ]);
    for lane in &lanes {
        let number = |number: Option<u32>| number.map_or_else(String::new, |number| number.to_string());
        let oldest = lane.oldest_pending_ms.map(|ms| belfry_time::SignedDuration::from_millis(ms as i64));
        sheet.row(vec![
            lane.name.clone(),
            number(lane.slots),
            number(lane.limit),
            number(lane.queue_limit),
            lane.active.to_string(),
            lane.pending.to_string(),
            oldest.map_or_else(String::new, words::rough),
            (if lane.set { "belfry lanes set" } else { "file" }).into(),
        ]);
        sheet.colour("PENDING", (lane.pending > 0).then_some(Color::Yellow));
    }
    reading::print_text(&sheet.render())
}

impl Set {
    async fn run(&self, client: &Client, output: &Output) -> Result<(), Failure> {
        if !belfry::is_lane_name(&self.lane) {
            let words = "the name of a lane has letters, digits, `-`, `_` and `.`, and at most 64 of them";
            return Err(Failure::Usage(words.into()));
        }
        let path = format!("/api/v1/lanes/{}", encoded(&self.lane));
        let lane: Option<Lane> = client.send(Method::PATCH, &path, Some(&self.change()?), &[]).await?;
        match lane {
            Some(lane) => told(&lane, output),
            None => answer(output, &json!({"name": self.lane}), &format!("the lane {} is gone", self.lane)),
        }
    }

    /// What is to be changed, as a server takes it.
    fn change(&self) -> Result<Value, Failure> {
        if self.reset {
            return Ok(json!({"reset": true}));
        }
        let mut change = json!({});
        if let Some(slots) = self.slots {
            change["slots"] = slots.into();
        }
        for (name, number) in [("limit", self.limit), ("queue_limit", self.queue_limit)] {
            if let Some(Number(number)) = number {
                change[name] = json!(number);
            }
        }
        match change.as_object().is_some_and(serde_json::Map::is_empty) {
            true => Err(Failure::Usage(NOTHING_SAID.into())),
            false => Ok(change),
        }
    }
}

const NOTHING_SAID: &str = "say what to change: a number of slots, --limit, --queue-limit, or --reset";

fn told(lane: &Lane, output: &Output) -> Result<(), Failure> {
    let limit = |limit: Option<u32>| limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
    let words = format!(
        "{}: {} slots on each node, limit {}, queue limit {}",
        lane.name,
        lane.slots.unwrap_or(0),
        limit(lane.limit),
        limit(lane.queue_limit)
    );
    answer(output, &lane, &words)
}
