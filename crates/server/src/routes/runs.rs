//! Runs: listed, shown, cancelled, repeated.

use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::response::Response;
use belfry::Cancelling;
use belfry::api::{List, Run};
use belfry_core::{RunId, RunState};
use belfry_store::RunFilter;
use belfry_time::Timestamp;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::routes;

use super::actions::{Wait, answer_run, wait_of};
use super::{Routes, json};
use crate::audit;
use crate::bodies::Share;
use crate::extract::{Key, MaybeObject, Params, RunPath, is_name};
use crate::guard::Actor;
use crate::page::{self, Cursor};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;
use crate::trace::Trace;

/// What the copy of a run's prompt and payload takes of the memory for documents.
const COPIED_BYTES: usize = 4 << 20;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(show)).routes(routes!(cancel)).routes(routes!(retry))
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
    /// Those of a session with this key.
    #[param(nullable = false)]
    session: Option<String>,
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
                return Err(
                    Problem::meaningless("bad_query", "agent and schedule must be names").field("schedule")
                );
            }
            (None, Some(_)) => {
                return Err(Problem::meaningless("bad_query", "a schedule is named together with its agent")
                    .field("agent"));
            }
        };
        Ok(RunFilter {
            agent: self.agent.clone().filter(|_| schedule.is_none()),
            schedule,
            states: self.state.into_iter().collect(),
            lane: self.lane.clone(),
            session: self.session.clone(),
            since: self.since,
        })
    }
}

/// List runs, the newest first
///
/// A page may hold fewer than `limit`, even none, while `next` says that there may be more.
#[utoipa::path(get, path = "/api/v1/runs", operation_id = "list_runs", tag = "runs", params(ListParams), security(("token" = ["read"])), responses(
    (status = 200, description = "A page", body = List<Run>),
))]
async fn list(
    State(shared): State<Arc<Shared>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)?;
    let after = Cursor::run(params.cursor.as_deref())?;
    let found = shared.store().runs(&params.filter()?, after, limit).await?;
    let items = shared.runs_of(&found.items).await?;
    Ok(json(StatusCode::OK, &List { items, next: found.next.map(|run| Cursor::Run(run).write()) }))
}

/// Show a run
#[utoipa::path(get, path = "/api/v1/runs/{id}", operation_id = "show_run", tag = "runs", security(("token" = ["read"])),
    params(("id" = belfry_core::RunId, Path, description = "Which")),
    responses(
        (status = 200, description = "As it stands", body = Run),
    ))]
async fn show(State(shared): State<Arc<Shared>>, RunPath(id): RunPath) -> Result<Response, Problem> {
    let run = shared.run(id).await?;
    Ok(json(StatusCode::OK, &shared.runs_of(&[run]).await?.first()))
}

/// Whether to wait.
#[derive(Deserialize, Default, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct CancelBody {
    /// Answer when it has ended, or when this many milliseconds have passed.
    #[schema(minimum = 0, maximum = 60000)]
    wait_ms: Option<u64>,
}

/// Cancel a run: one that waits ends at once, one that runs is told to end
#[utoipa::path(post, path = "/api/v1/runs/{id}/cancel", operation_id = "cancel_run", tag = "runs", security(("token" = ["trigger"])),
    params(("id" = RunId, Path, description = "Which")), request_body(content = Option<CancelBody>),
    responses(
        (status = 200, description = "It has ended, or is about to", body = Run),
        (status = 409, description = "It had ended otherwise", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn cancel(
    State(shared): State<Arc<Shared>>,
    Extension(actor): Extension<Actor>,
    Extension(share): Extension<Share>,
    RunPath(id): RunPath,
    body: MaybeObject,
) -> Result<Response, Problem> {
    let body: CancelBody = body.read()?;
    let wait = wait_of(&shared, &actor, share, body.wait_ms)?;
    let done = shared.engine.cancel(id).await?;
    audit::made(done != Cancelling::Before);
    answer_run(&shared, StatusCode::OK, id, wait).await
}

/// Repeat a run that has ended: a new one with the prompt and payload that came with it
#[utoipa::path(post, path = "/api/v1/runs/{id}/retry", operation_id = "retry_run", tag = "runs", security(("token" = ["trigger"])),
    params(("id" = RunId, Path, description = "Which"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first run", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    responses(
        (status = 201, description = "The new run", body = Run, headers(("Location" = String))),
        (status = 200, description = "The run that the first request with this key made", body = Run, headers(("Location" = String))),
        (status = 409, description = "It has not ended, or the key was used for something else", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn retry(
    State(shared): State<Arc<Shared>>,
    Extension(trace): Extension<Trace>,
    Extension(share): Extension<Share>,
    RunPath(id): RunPath,
    Key(key): Key,
) -> Result<Response, Problem> {
    shared.refuse_draining()?;
    // How much memory its payload takes is not known before it is read.
    shared.bodies.open(&share, COPIED_BYTES).await?;
    let made = shared.engine.retry(id, key, Some(trace.id)).await?;
    audit::made(made.is_new);
    let status = if made.is_new { StatusCode::CREATED } else { StatusCode::OK };
    answer_run(&shared, status, made.run, Wait::default()).await
}
