//! `belfry nodes`: who runs from this store, and which of them takes new work.

use belfry::api::{List, Node, NodeStatus};
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use comfy_table::Color;
use serde_json::json;

use crate::client::encoded;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::sheet::{Sheet, column};
use crate::snapshots::Snapshots;
use crate::words;
use crate::{reach, reading};

/// List the nodes that run from the store, or let one take no new work
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry nodes
  belfry nodes -o json
  belfry nodes drain 0198c0de-7a11-7000-8000-0123456789ab
  belfry nodes drain this --undo
  belfry nodes snapshots -n 5

A node is dead when its lease has lapsed; its runs go to others as soon as one of them has seen that. One that drains lets what it
runs end, takes nothing new and stays up; it ends by TERM, as always.")]
pub struct Nodes {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the nodes (the default)
    Ls,
    /// Let a node take no new work; it notices within a second
    Drain(Drain),
    /// How nodes and their machines did at each heartbeat, the last first
    Snapshots(Snapshots),
}

#[derive(Debug, Args)]
struct Drain {
    /// Which; `this` is the server that --server names, or the one that runs on this machine
    #[arg(value_name = "ID|this")]
    node: String,

    /// Let it take new work again
    #[arg(long)]
    undo: bool,
}

impl Drain {
    fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let path = format!("/api/v1/nodes/{}/drain", encoded(&self.node));
            let node: Node = client.post(&path, &json!({"undo": self.undo})).await?;
            let words = match self.undo {
                true => format!("node {} takes new work again", node.id),
                false => format!("node {} takes no new work; {} running", node.id, node.active),
            };
            reach::answer(output, &node, &words)
        })
    }
}

impl Nodes {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        match &self.verb {
            Some(Verb::Drain(drain)) => return drain.run(place, output),
            Some(Verb::Snapshots(snapshots)) => return snapshots.run(place, output),
            None | Some(Verb::Ls) => {}
        }
        let zone = output.zone()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let (nodes, now) = (client.get::<List<Node>>("/api/v1/nodes").await?.items, client.now());
            match output.format {
                Format::Table => print(&nodes, now, &zone),
                format => reading::print_items(format, nodes),
            }
        })
    }
}

fn print(nodes: &[Node], now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if nodes.is_empty() {
        reading::remark("no node is running; `belfry up` starts one");
        return Ok(());
    }
    let mut sheet = Sheet::new(&[
        column("NODE"),
        column("STATUS"),
        column("ACTIVE").right(),
        column("LEASE").right(),
        column("STARTED").rank(2),
        column("PID").right().rank(1),
        column("LABELS").rank(3).wraps(20),
        column("HOST").wraps(30),
    ]);
    for node in nodes {
        let lease = node.lease_until.duration_since(now);
        sheet.row(vec![
            node.id.to_string(),
            node.status.as_str().into(),
            node.active.to_string(),
            if lease.is_positive() { words::rough(lease) } else { format!("-{}", words::rough(-lease)) },
            words::short(node.started_at, now, zone),
            node.pid.to_string(),
            node.labels.join(","),
            words::one_line(&node.host, 60),
        ]);
        let colour = match node.status {
            NodeStatus::Idle => None,
            NodeStatus::Busy => Some(Color::Cyan),
            NodeStatus::Draining => Some(Color::Yellow),
            NodeStatus::Dead => Some(Color::Red),
        };
        sheet.colour("STATUS", colour);
    }
    reading::print_text(&sheet.render())
}
