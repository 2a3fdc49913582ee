//! Agents: what runs. They come from files.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::api::{Agent, List};
use belfry_store::Store;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::Segment;
use crate::problem::Problem;
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(show))
}

/// List agents, in the order of their names
#[utoipa::path(get, path = "/api/v1/agents", operation_id = "list_agents", tag = "agents", security(("token" = ["read"])),
    responses((status = 200, description = "All of them", body = List<Agent>)))]
async fn list(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let now = shared.now();
    let agents = shared.store().agents().await?;
    Ok(json(StatusCode::OK, &List::whole(agents.iter().map(|agent| Agent::of(agent, now)).collect())))
}

/// Show an agent
#[utoipa::path(get, path = "/api/v1/agents/{agent}", operation_id = "show_agent", tag = "agents", security(("token" = ["read"])),
    params(("agent" = String, Path, description = "Which")),
    responses((status = 200, description = "As it is", body = Agent)))]
async fn show(State(shared): State<Arc<Shared>>, Segment(name): Segment) -> Result<Response, Problem> {
    let agent = shared.agent(&name).await?;
    Ok(json(StatusCode::OK, &Agent::of(&agent, shared.now())))
}
