//! Breakers: which have counted or opened, how they came there, and closing them by hand.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::AgentDefinition;
use belfry::api::{Breaker, List};
use utoipa_axum::routes;

use super::{Routes, json};
use crate::audit;
use crate::extract::Named;
use crate::problem::Problem;
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(reset))
}

/// List the breakers that have counted a failure or changed
#[utoipa::path(get, path = "/api/v1/breakers", operation_id = "list_breakers", tag = "breakers", security(("token" = ["read"])),
    responses((status = 200, description = "All of them", body = List<Breaker>)))]
async fn list(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    Ok(json(StatusCode::OK, &List::whole(shown(&shared).await?)))
}

async fn shown(shared: &Shared) -> Result<Vec<Breaker>, Problem> {
    let agents = shared.store().agents().await?;
    let agents: HashMap<i64, AgentDefinition> =
        agents.into_iter().map(|agent| (agent.id, agent.definition)).collect();
    let mut breakers = Vec::new();
    for entry in shared.store().breakers().await? {
        let record = shared.store().breaker(entry.agent, &entry.command).await?;
        breakers.push(Breaker::of(&entry, &record, agents.get(&entry.agent)));
    }
    Ok(breakers)
}

/// Close a breaker
#[utoipa::path(post, path = "/api/v1/breakers/{agent}/{command}/reset", operation_id = "reset_breaker", tag = "breakers",
    security(("token" = ["manage"])),
    params(("agent" = String, Path, description = "Whose"), ("command" = String, Path, description = "Of which command")),
    responses((status = 200, description = "It is closed", body = Breaker)))]
async fn reset(State(shared): State<Arc<Shared>>, named: Named) -> Result<Response, Problem> {
    let (agent, command) = (named.agent, named.schedule);
    let (entry, is_news) = shared.engine.reset_breaker(&agent, &command).await?;
    audit::made(is_news);
    let record = shared.store().breaker(entry.agent, &entry.command).await?;
    let definition = shared.agent(&agent).await?.definition;
    Ok(json(StatusCode::OK, &Breaker::of(&entry, &record, Some(&definition))))
}
