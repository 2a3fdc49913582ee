//! Whether the process lives, and whether it can work.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::problem::Problem;
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(healthz)).routes(routes!(readyz)).routes(routes!(metrics))
}

/// The process lives.
#[derive(Serialize, ToSchema)]
struct Health {
    /// `ok`.
    status: &'static str,
    /// The version of the binary.
    version: &'static str,
}

/// Whether the process lives
#[utoipa::path(get, path = "/healthz", operation_id = "healthz", tag = "health", security(()), responses((status = 200, description = "It does", body = Health)))]
async fn healthz(State(shared): State<Arc<Shared>>) -> Response {
    json(StatusCode::OK, &Health { status: "ok", version: shared.version })
}

/// Whether the node can work.
#[derive(Serialize, ToSchema)]
pub struct Ready {
    /// Whether it can.
    pub ready: bool,
    /// What was looked at.
    pub checks: Vec<ReadyCheck>,
}

/// One thing that was looked at.
#[derive(Serialize, ToSchema)]
pub struct ReadyCheck {
    /// `engine`, `planner`, `store`, `lag`, `starts`.
    pub check: &'static str,
    /// Whether it is well.
    pub ok: bool,
    /// In words.
    pub detail: String,
}

/// Whether the node can work: its store takes writes, its loops turn
#[utoipa::path(get, path = "/readyz", operation_id = "readyz", tag = "health", security(()), responses(
    (status = 200, description = "It can", body = Ready),
    (status = 503, description = "It cannot", body = Ready),
))]
async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    let ready = shared.ready().await;
    let status = if ready.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &ready)
}

/// What is counted, as OpenMetrics
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", tag = "health", security(("token" = ["read"])),
    responses((status = 200, description = "OpenMetrics", body = String, content_type = "application/openmetrics-text")))]
async fn metrics(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let text = shared.metrics().await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok((StatusCode::OK, [(header::CONTENT_TYPE, kind)], text).into_response())
}
