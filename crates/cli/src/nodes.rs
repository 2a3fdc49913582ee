//! `belfry nodes`: who runs from this store, and which of them takes new work.

use std::time::Duration;

use belfry::NodeId;
use belfry::api::{List, Node, NodeStatus};
use belfry_store::Store;
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use comfy_table::Color;
use serde_json::json;

use crate::client::encoded;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reach::{self, Reach, answer};
use crate::reading::{self, Reading};
use crate::sheet::{Sheet, column};
use crate::snapshots::Snapshots;
use crate::words;

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
        reach::block_on(async {
            let node: Node = match place.client()? {
                Some(client) => {
                    let path = format!("/api/v1/nodes/{}/drain", encoded(&self.node));
                    client.post(&path, &json!({"undo": self.undo})).await?
                }
                None => self.mark(&Reach::open(place).await?, place.silence_max()).await?,
            };
            let words = match self.undo {
                true => format!("node {} takes new work again", node.id),
                false => format!("node {} takes no new work; {} running", node.id, node.active),
            };
            answer(output, &node, &words)
        })
    }

    async fn mark(&self, reach: &Reach, silence_max: Duration) -> Result<Node, Failure> {
        let now = reach.now().await?;
        let id = self.id(&reach.store.nodes().await?, now)?;
        belfry::drain(&reach.store, now, id, !self.undo).await?;
        let (nodes, live) = (reach.store.nodes().await?, reach.store.live_runs().await?);
        let node = nodes.iter().find(|node| node.id == id);
        node.map(|node| Node::of(node, &live, now, silence_max))
            .ok_or_else(|| Failure::NotFound(format!("node {id} is gone")))
    }

    fn id(&self, nodes: &[belfry_store::Node], now: Timestamp) -> Result<NodeId, Failure> {
        if self.node != "this" {
            let id = self.node.parse().map(NodeId);
            return id.map_err(|_| {
                Failure::Usage(format!("{:?} is no id of a node; `belfry nodes` lists them", self.node))
            });
        }
        let host = belfry::host();
        let here: Vec<NodeId> =
            reach::living(nodes, now).filter(|node| node.host == host).map(|node| node.id).collect();
        match here.as_slice() {
            [one] => Ok(*one),
            [] => {
                Err(Failure::NotFound("no node runs on this machine; `belfry nodes` lists them all".into()))
            }
            several => {
                let ids = reach::list(several.iter().map(ToString::to_string).collect());
                Err(Failure::Usage(format!("several nodes run on this machine, name one of them: {ids}")))
            }
        }
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
            let (nodes, now) = match place.client()? {
                Some(client) => (client.get::<List<Node>>("/api/v1/nodes").await?.items, Timestamp::now()),
                None => {
                    let reading = Reading::open(place).await?;
                    let live = reading.store.live_runs().await?;
                    let nodes = reading.store.nodes().await?;
                    let silence_max = place.silence_max();
                    let of = |node| Node::of(node, &live, reading.now, silence_max);
                    (nodes.iter().map(of).collect(), reading.now)
                }
            };
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
