//! Runs: listed, shown, cancelled, repeated.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::api::{List, Run};
use belfry_core::RunState;
use belfry_store::{RunFilter, Store};
use belfry_time::Timestamp;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::{Params, RunPath, is_name};
use crate::page::{self, Cursor};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(show))
}

/// Which runs to list.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListParams {
    /// Those of this agent.
    #[param(nullable = false)]
    agent: Option<String>,
    /// Those of this schedule of the agent; `agent` must be there, too.
    #[param(nullable = false)]
    schedule: Option<String>,
    /// Those in this state.
    #[param(nullable = false)]
    state: Option<RunState>,
    /// Those in this lane.
    #[param(nullable = false)]
    lane: Option<String>,
    /// Those that were made then or later.
    #[param(nullable = false)]
    since: Option<Timestamp>,
    /// How many, 1-1000; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

impl ListParams {
    fn filter(&self) -> Result<RunFilter, Problem> {
        let schedule = match (&self.agent, &self.schedule) {
            (_, None) => None,
            (Some(agent), Some(schedule)) if is_name(agent) && is_name(schedule) => {
                Some(format!("{agent}/{schedule}"))
            }
            (Some(_), Some(_)) => {
                return Err(Problem::bad("bad_query", "agent and schedule must be names").field("schedule"));
            }
            (None, Some(_)) => {
                return Err(
                    Problem::bad("bad_query", "a schedule is named together with its agent").field("agent")
                );
            }
        };
        Ok(RunFilter {
            agent: self.agent.clone().filter(|_| schedule.is_none()),
            schedule,
            states: self.state.into_iter().collect(),
            lane: self.lane.clone(),
            since: self.since,
        })
    }
}

/// List runs, the newest first
///
/// A page may hold fewer than `limit`, even none, while `next` says that there may be more.
#[utoipa::path(get, path = "/api/v1/runs", tag = "runs", params(ListParams), security(("token" = ["read"])), responses(
    (status = 200, description = "A page", body = List<Run>),
    (status = 400, description = "The query is wrong", body = ProblemBody, content_type = "application/problem+json"),
))]
async fn list(
    State(shared): State<Arc<Shared>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)?;
    let after = Cursor::run(params.cursor.as_deref())?;
    let found = shared.store().runs(&params.filter()?, after, limit).await?;
    let items: Vec<Run> = found.items.iter().map(Run::of).collect();
    Ok(json(StatusCode::OK, &List { items, next: found.next.map(|run| Cursor::Run(run).write()) }))
}

/// Show a run
#[utoipa::path(get, path = "/api/v1/runs/{id}", tag = "runs", security(("token" = ["read"])),
    params(("id" = belfry_core::RunId, Path, description = "Which")),
    responses(
        (status = 200, description = "As it stands", body = Run),
        (status = 404, description = "There is none, or it is no longer kept", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn show(State(shared): State<Arc<Shared>>, RunPath(id): RunPath) -> Result<Response, Problem> {
    let run = shared.store().run(id).await?;
    let run =
        run.ok_or_else(|| Problem::not_found(format!("there is no run {id}, or it is no longer kept")))?;
    Ok(json(StatusCode::OK, &Run::of(&run)))
}
