//! `belfry nodes snapshots`: how nodes and their machines did at each heartbeat.

use belfry::api::Snapshot;
use belfry_time::{Timestamp, Zone};
use clap::Args;

use crate::client::{Client, encoded};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

#[derive(Debug, Args)]
pub struct Snapshots {
    /// Those of this node
    #[arg(value_name = "ID")]
    node: Option<String>,

    /// Those that were taken then or later
    #[arg(long, value_name = "T")]
    since: Option<String>,

    /// How many, the last first
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    count: u32,
}

impl Snapshots {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        let since = self.since.as_ref().map(|text| reading::since(text, "--since", output)).transpose()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let found = self.find(&client, since).await?;
            match output.format {
                Format::Table => print(&found, client.now(), &zone),
                format => reading::print_items(format, found),
            }
        })
    }

    async fn find(&self, client: &Client, since: Option<Timestamp>) -> Result<Vec<Snapshot>, Failure> {
        let node = self.node.as_ref().map(|node| format!("node={}", encoded(node)));
        let since = since.map(|since| format!("since={since}"));
        let query: Vec<String> = node.into_iter().chain(since).collect();
        let join = if query.is_empty() { "" } else { "?" };
        client.list(&format!("/api/v1/snapshots{join}{}", query.join("&")), self.count as usize).await
    }
}

fn print(snapshots: &[Snapshot], now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if snapshots.is_empty() {
        reading::remark("there are no snapshots; each node takes one every `engine.heartbeat`");
        return Ok(());
    }
    let mut sheet = Sheet::new(&[
        column("AT"),
        column("CPU").right(),
        column("MEMORY").right(),
        column("LOAD").right().rank(3),
        column("RUNS").right(),
        column("SESSIONS").right().rank(2),
        column("TMUX").right().rank(1),
        column("NODE").rank(4),
        column("HOST").wraps(30),
    ]);
    for one in snapshots {
        let percent = |share: f64| format!("{share:.0} %");
        let memory = one.memory_used_bytes.zip(one.memory_total_bytes.filter(|total| *total > 0));
        sheet.row(vec![
            words::short(one.at, now, zone),
            one.cpu_percent.map_or_else(String::new, percent),
            memory.map_or_else(String::new, |(used, total)| percent(used as f64 * 100.0 / total as f64)),
            one.load
                .as_ref()
                .and_then(|load| load.first())
                .map_or_else(String::new, |load| format!("{load:.2}")),
            one.lanes.values().sum::<u32>().to_string(),
            one.sessions_active.to_string(),
            one.tmux_sessions.as_ref().map_or_else(String::new, |names| names.len().to_string()),
            one.node.to_string(),
            words::one_line(&one.host, 60),
        ]);
    }
    reading::print_text(&sheet.render())
}
