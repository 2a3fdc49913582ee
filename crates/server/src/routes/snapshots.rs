//! Snapshots: how nodes and their machines did at each heartbeat.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::api::{List, Snapshot};
use belfry::{NodeId, SnapshotFilter};
use belfry_time::Timestamp;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::Params;
use crate::page::{self, Cursor};
use crate::problem::Problem;
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list))
}

/// Which snapshots to list.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListParams {
    /// Those of this node; `this` is the one that answers.
    #[param(nullable = false)]
    node: Option<String>,
    /// Those that were taken then or later.
    #[param(nullable = false)]
    since: Option<Timestamp>,
    /// How many, 1-1000; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// List snapshots of nodes and their machines, the last first
///
/// Each node takes one when it starts and every `engine.heartbeat`; they are kept for `retention.snapshots`.
#[utoipa::path(get, path = "/api/v1/snapshots", operation_id = "list_snapshots", tag = "nodes", params(ListParams),
    security(("token" = ["read"])), responses((status = 200, description = "A page", body = List<Snapshot>)))]
async fn list(
    State(shared): State<Arc<Shared>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)?;
    let before = Cursor::snapshot(params.cursor.as_deref())?;
    let node = match params.node.as_deref() {
        None => None,
        Some("this") => Some(shared.engine.node()),
        Some(text) => Some(text.parse().map(NodeId).map_err(|_| {
            Problem::meaningless("bad_query", "the node's id is none")
                .field("node")
                .way_out("GET /api/v1/nodes lists them")
        })?),
    };
    let filter = SnapshotFilter { node, since: params.since };
    let found = shared.engine.snapshots(&filter, before, limit).await?;
    let next = found.next.map(|number| Cursor::Snapshot(number).write());
    let items = found.items.into_iter().map(|(_, snapshot)| Snapshot::of(snapshot)).collect();
    Ok(json(StatusCode::OK, &List { items, next }))
}
