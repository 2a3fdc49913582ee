//! Failure budgets: clearing them by hand. What is used of one stands with its agent and its schedules.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::api::Agent;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::audit;
use crate::extract::Segment;
use crate::problem::Problem;
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(reset))
}

/// Clear the failure budget of an agent
#[utoipa::path(post, path = "/api/v1/budgets/{agent}/reset", operation_id = "reset_budget", tag = "agents",
    description = "Nothing of it is used any more, and what it held may start now, retries too.",
    security(("token" = ["manage"])),
    params(("agent" = String, Path, description = "Agent name")),
    responses((status = 200, description = "It is cleared", body = Agent)))]
async fn reset(State(shared): State<Arc<Shared>>, name: Segment) -> Result<Response, Problem> {
    shared.agent(&name.0).await?;
    audit::made(shared.engine.reset_budget(&name.0).await?);
    Ok(json(StatusCode::OK, &Agent::of(&shared.agent(&name.0).await?, shared.now())))
}
