//! Schedules: listed, shown, made, changed, removed. What a file owns is only shown.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::AgentDefinition;
use belfry::api::{List, Schedule, ScheduleStatus};
use belfry_store::{ScheduleFilter, ScheduleRecord, StatusKind, Store};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::{Named, Params};
use crate::page::{self, Cursor};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(show))
}

/// Which schedules to list.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListParams {
    /// Those of this agent.
    #[param(nullable = false)]
    agent: Option<String>,
    /// Those that stand like this.
    #[param(nullable = false)]
    status: Option<ScheduleStatus>,
    /// How many, 1-1000; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// List schedules, in the order of their names
#[utoipa::path(get, path = "/api/v1/schedules", tag = "schedules", params(ListParams), security(("token" = ["read"])), responses(
    (status = 200, description = "A page", body = List<Schedule>),
    (status = 400, description = "The query is wrong", body = ProblemBody, content_type = "application/problem+json"),
))]
async fn list(
    State(shared): State<Arc<Shared>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)?;
    let after = Cursor::schedule(params.cursor.as_deref())?;
    let status = match params.status {
        None => vec![],
        Some(ScheduleStatus::Active) => vec![StatusKind::Active],
        Some(ScheduleStatus::Paused) => vec![StatusKind::Paused, StatusKind::Disabled],
        Some(ScheduleStatus::Invalid) => vec![StatusKind::Invalid],
        Some(ScheduleStatus::Exhausted) => vec![StatusKind::Exhausted],
    };
    let filter = ScheduleFilter { agent: params.agent, status, source: None };
    let found = shared.store().schedules(&filter, after.as_deref(), limit).await?;
    let items = shown(&shared, &found.items).await?;
    let next = found.next.map(|name| Cursor::Schedule(name).write());
    Ok(json(StatusCode::OK, &List { items, next }))
}

/// Schedules as they are shown, with their agents read at once.
async fn shown(shared: &Shared, records: &[ScheduleRecord]) -> Result<Vec<Schedule>, Problem> {
    let ids: Vec<_> = records.iter().map(|record| record.id).collect();
    let agents = shared.store().definitions(&ids).await?;
    let (now, fallback) = (shared.now(), AgentDefinition::default());
    let shown = records.iter().zip(&agents).map(|(record, found)| {
        let agent = found.as_ref().map_or(&fallback, |found| &*found.agent_definition);
        Schedule::of(record, agent, now)
    });
    Ok(shown.collect())
}

/// Show a schedule
#[utoipa::path(get, path = "/api/v1/schedules/{agent}/{name}", tag = "schedules", security(("token" = ["read"])),
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which")),
    responses(
        (status = 200, description = "As it stands", body = Schedule),
        (status = 404, description = "There is none", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn show(State(shared): State<Arc<Shared>>, named: Named) -> Result<Response, Problem> {
    let record = shared.schedule(&named.full()).await?;
    let agent = shared.agent_of(&record).await?;
    Ok(json(StatusCode::OK, &Schedule::of(&record, &agent, shared.now())))
}
