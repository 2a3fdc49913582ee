//! Nodes: who runs from this store, and which of them takes new work; and reading the files again.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::NodeId;
use belfry::api::{List, Node};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::audit;
use crate::extract::{MaybeObject, Segment};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;

/// Files are read sooner than this.
const RELOAD_WITHIN: Duration = Duration::from_secs(60);

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(drain)).routes(routes!(reload))
}

/// List the nodes that run from the store
#[utoipa::path(get, path = "/api/v1/nodes", operation_id = "list_nodes", tag = "nodes", security(("token" = ["read"])),
    responses((status = 200, description = "All of them", body = List<Node>)))]
async fn list(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let (nodes, live) = (shared.store().nodes().await?, shared.store().live_runs().await?);
    let (now, silence_max) = (shared.now(), shared.options.silence_max());
    let nodes = nodes.iter().map(|node| Node::of(node, &live, now, silence_max));
    Ok(json(StatusCode::OK, &List::whole(nodes.collect())))
}

/// How a node is to drain.
#[derive(Deserialize, Default, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct DrainBody {
    /// It is to take new work again.
    undo: bool,
}

/// Let a node take no new work
///
/// It plans and claims nothing, lets what runs end and stays up, until that is undone; `/readyz` says so. Any node can be
/// asked for any other; `this` is the one that answers. Others notice within a second.
#[utoipa::path(post, path = "/api/v1/nodes/{id}/drain", operation_id = "drain_node", tag = "nodes", security(("token" = ["manage"])),
    params(("id" = String, Path, description = "Which; `this` is the one that answers")), request_body(content = Option<DrainBody>),
    responses(
        (status = 200, description = "As it stands", body = Node),
        (status = 409, description = "It is dead", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn drain(
    State(shared): State<Arc<Shared>>,
    Segment(id): Segment,
    body: MaybeObject,
) -> Result<Response, Problem> {
    let body: DrainBody = body.read()?;
    let none = || {
        Problem::not_found(format!("there is no node {id}"))
            .way_out("GET /api/v1/nodes lists them")
            .field("id")
    };
    // As ids are written, and in no other way.
    let written = || Some(&id).filter(|text| text.len() == 36).and_then(|text| text.parse().ok()).map(NodeId);
    let node = if id == "this" { shared.engine.node() } else { written().ok_or_else(none)? };
    audit::made(shared.engine.drain(node, !body.undo).await?);
    let (nodes, live) = (shared.store().nodes().await?, shared.store().live_runs().await?);
    let found = nodes.iter().find(|each| each.id == node).ok_or_else(none)?;
    Ok(json(StatusCode::OK, &Node::of(found, &live, shared.now(), shared.options.silence_max())))
}

/// What reading the files again changed.
#[derive(Serialize, ToSchema)]
struct ReloadAnswer {
    /// In words.
    detail: String,
    /// The process that has read them.
    pid: u32,
    /// What the store runs from now: the same files give the same.
    digest: Option<String>,
}

/// Read the files again
///
/// A file that is wrong changes nothing, and the answer says what is wrong.
#[utoipa::path(post, path = "/api/v1/reload", operation_id = "reload", tag = "nodes", security(("token" = ["admin"])),
    responses(
        (status = 200, description = "They were read", body = ReloadAnswer),
        (status = 409, description = "They are wrong, and changed nothing", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn reload(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let (tell, told) = oneshot::channel();
    let gone = || Problem::unavailable("draining", "this node is ending, and reads no files");
    shared.reload.try_send(tell).map_err(|_| {
        audit::made(false);
        gone()
    })?;
    match tokio::time::timeout(RELOAD_WITHIN, told).await {
        Ok(Ok(Ok(detail))) => {
            let digest = shared.store().source_digest("files").await?;
            Ok(json(StatusCode::OK, &ReloadAnswer { detail, pid: std::process::id(), digest }))
        }
        Ok(Ok(Err(detail))) => {
            let problem = Problem::conflict("config_rejected", detail.clone()).report(detail);
            Err(problem.way_out(format!("correct {}", shared.file)))
        }
        Ok(Err(_)) => Err(gone()),
        Err(_) => Err(Problem::unavailable("too_slow", "the files took too long to read")),
    }
}
