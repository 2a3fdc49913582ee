//! `belfry nodes`: who runs from this store.

use belfry::api::{List, Node, NodeStatus};
use belfry_time::{Timestamp, Zone};
use clap::Args;
use comfy_table::Color;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

/// List the nodes that run from the store
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry nodes
  belfry nodes -o json

A node is dead when its lease has lapsed; its runs go to others as soon as one of them has seen that.")]
pub struct Nodes {}

impl Nodes {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
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
            NodeStatus::Dead => Some(Color::Red),
        };
        sheet.colour("STATUS", colour);
    }
    reading::print_text(&sheet.render())
}
