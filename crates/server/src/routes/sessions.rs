//! Conversations: messages for sessions, and what ends them.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::response::Response;
use belfry::api::{List, Run, Session};
use belfry::{Mode, Reply, RunId, SendOptions, SessionDone, SessionVerb, Taken, Timestamp, Usage};
use belfry_store::{SessionFilter, SessionRecord};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::routes;

use super::actions::{answer_run, wait_of};
use super::log::stream_run;
use super::{Routes, json};
use crate::audit;
use crate::bodies::Share;
use crate::extract::{self, Key, Object, Params, SessionPath, is_name};
use crate::guard::Actor;
use crate::page::{self, Cursor};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;
use crate::trace::Trace;

pub fn router() -> Routes {
    Routes::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(send))
        .routes(routes!(stop))
        .routes(routes!(stopall))
        .routes(routes!(reset))
        .routes(routes!(measure))
}

/// Which sessions to list.
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
    /// How many, 1-1000; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// List sessions, in the order in which they were first spoken to
#[utoipa::path(get, path = "/api/v1/sessions", operation_id = "list_sessions", tag = "sessions", params(ListParams),
    security(("token" = ["read"])), responses((status = 200, description = "A page", body = List<Session>)))]
async fn list(
    State(shared): State<Arc<Shared>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)?;
    let after = Cursor::session(params.cursor.as_deref())?;
    let schedule = match (&params.agent, &params.schedule) {
        (Some(agent), Some(schedule)) if is_name(agent) && is_name(schedule) => {
            Some(format!("{agent}/{schedule}"))
        }
        (_, None) => None,
        _ => {
            let detail = "a schedule is named together with its agent";
            return Err(Problem::meaningless("bad_query", detail).field("agent"));
        }
    };
    let agent = params.agent.filter(|_| schedule.is_none());
    let found = shared.store().sessions(&SessionFilter { agent, schedule, key: None }, after, limit).await?;
    let items = shown(&shared, &found.items).await?;
    Ok(json(StatusCode::OK, &List { items, next: found.next.map(|id| Cursor::Session(id).write()) }))
}

async fn shown(shared: &Shared, records: &[SessionRecord]) -> Result<Vec<Session>, Problem> {
    let mut schedules = HashMap::new();
    for record in records {
        if !schedules.contains_key(&record.name) {
            schedules.insert(record.name.clone(), shared.store().schedule(&record.name).await?);
        }
    }
    let schedule = |record: &SessionRecord| schedules.get(&record.name).and_then(Option::as_ref);
    Ok(records.iter().map(|record| Session::of(record, schedule(record))).collect())
}

async fn found(shared: &Shared, path: &SessionPath) -> Result<Session, Problem> {
    let filter = SessionFilter { agent: None, schedule: Some(path.name()), key: Some(path.key.clone()) };
    let page = shared.store().sessions(&filter, None, 1).await?;
    let session = shown(shared, &page.items).await?.pop();
    session.ok_or_else(|| belfry::Error::NoSession { session: path.address() }.into())
}

/// Show a session
#[utoipa::path(get, path = "/api/v1/sessions/{agent}/{schedule}/{key}", operation_id = "show_session", tag = "sessions",
    security(("token" = ["read"])),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Of which chat"),
        ("key" = String, Path, description = "Which")),
    responses((status = 200, description = "As it stands", body = Session)))]
async fn show(State(shared): State<Arc<Shared>>, path: SessionPath) -> Result<Response, Problem> {
    Ok(json(StatusCode::OK, &found(&shared, &path).await?))
}

/// A message.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct MessageBody {
    /// What it says. `/stop` and `/stopall` act as such.
    text: String,
    /// What it does while a run lives, where it is not the schedule's way.
    mode: Option<Mode>,
    /// The pool its run takes a slot from, where it is not the schedule's.
    lane: Option<String>,
    /// How many runs of the session may be running at once from now on.
    #[schema(minimum = 1)]
    max_concurrent: Option<u32>,
    /// When it was sent: older than a stop of the session, it is stale.
    sent_at: Option<Timestamp>,
    /// The generation of the session that its sender knows: older than a reset, it is stale.
    generation: Option<i64>,
    /// What it brings beside its text. The keys `messages`, `session` and `text` are refused: Belfry writes these.
    #[serde(default)]
    payload: Map<String, Value>,
    /// Answer when the run has ended, or when this many milliseconds have passed.
    #[schema(minimum = 0, maximum = 60000)]
    wait_ms: Option<u64>,
    /// Answer with server-sent events: `taken`, `output` for each piece of what the run writes, then `end` with the run.
    #[serde(default)]
    stream: bool,
}

/// What became of a message.
#[derive(Serialize, ToSchema)]
#[serde(tag = "code", rename_all = "snake_case")]
enum Answer {
    /// It is in a run.
    Taken(Taken),
    /// It was a stop, and ended something.
    Stopped(Stopped),
    /// It was a stop, and there was nothing to end.
    NothingRunning(Stopped),
}

/// What a stop did.
#[derive(Serialize, ToSchema)]
struct Stopped {
    /// The generation of the session.
    generation: i64,
    /// Runs that waited and have ended.
    ended: Vec<RunId>,
    /// Runs that run and are told to end.
    told: Vec<RunId>,
}

impl Answer {
    fn of(done: SessionDone) -> Answer {
        let SessionDone { generation, ended, told } = done;
        let nothing = ended.is_empty() && told.is_empty();
        let stopped = Stopped { generation, ended, told };
        if nothing { Answer::NothingRunning(stopped) } else { Answer::Stopped(stopped) }
    }
}

/// Send a message to a session, which is made where it is new
///
/// Messages of a session run in order; those that come close together are one run. With `wait_ms` the answer is the run.
#[utoipa::path(post, path = "/api/v1/sessions/{agent}/{schedule}/{key}/messages", operation_id = "send_message", tag = "sessions",
    security(("token" = ["trigger"])),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Of which chat"),
        ("key" = String, Path, description = "Which"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first run", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body(content = MessageBody),
    responses(
        (status = 202, description = "It is in a run, or was a stop", content((Answer = "application/json"), (crate::stream::ServerEvent = "text/event-stream"))),
        (status = 200, description = "The run, ended or when the time was up", body = Run, headers(("Location" = String))),
        (status = 409, description = "`queue_full`, `stale`, or the key was used for something else", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn send(
    State(shared): State<Arc<Shared>>,
    Extension(actor): Extension<Actor>,
    Extension(share): Extension<Share>,
    Extension(trace): Extension<Trace>,
    path: SessionPath,
    Key(key): Key,
    Object(body): Object,
) -> Result<Response, Problem> {
    let body: MessageBody = extract::read(body)?;
    let wait = wait_of(&shared, &actor, share, body.wait_ms)?;
    if body.max_concurrent == Some(0) {
        let detail = format!("max_concurrent must be 1-{}, got 0", u32::MAX);
        return Err(Problem::bad("bad_field", detail).field("max_concurrent"));
    }
    let with = SendOptions {
        lane: body.lane,
        mode: body.mode,
        max_concurrent: body.max_concurrent,
        sent_at: body.sent_at,
        generation: body.generation,
        payload: body.payload,
        key,
        trace_id: Some(trace.id),
    };
    shared.refuse_draining()?;
    // Before the message is in: who is told that there are too many sends it again.
    let follower = if body.stream { Some(shared.readers.follow(&actor)?) } else { None };
    let sent = shared.engine.send(&path.address(), &body.text, with).await?;
    audit::made(match &sent.reply {
        // A repeat has no number of its own.
        Reply::Taken(taken) => taken.seq.is_some(),
        Reply::Stopped(done) => has_changed(done, body.text.trim() == "/stop"),
    });
    match (sent.reply, follower) {
        (Reply::Stopped(done), _) => Ok(json(StatusCode::ACCEPTED, &Answer::of(done))),
        (Reply::Taken(taken), Some(follower)) => {
            let run = taken.run;
            let mut response = stream_run(shared, run, &Answer::Taken(taken), actor.scope, follower);
            *response.status_mut() = StatusCode::ACCEPTED;
            Ok(response)
        }
        (Reply::Taken(taken), None) if wait.is_asked() => {
            answer_run(&shared, StatusCode::OK, taken.run, wait).await
        }
        (Reply::Taken(taken), None) => Ok(json(StatusCode::ACCEPTED, &Answer::Taken(taken))),
    }
}

async fn change(shared: &Shared, path: &SessionPath, verb: SessionVerb) -> Result<SessionDone, Problem> {
    let done = shared.engine.change_session(&path.address(), verb).await?;
    audit::made(has_changed(&done, matches!(verb, SessionVerb::Stop)));
    Ok(done)
}

/// A stop of one run does nothing where none has its turn; anything else leaves a mark on the session.
fn has_changed(done: &SessionDone, is_stop: bool) -> bool {
    !is_stop || !done.ended.is_empty() || !done.told.is_empty()
}

/// Cancel the oldest run of a session that has its turn
#[utoipa::path(post, path = "/api/v1/sessions/{agent}/{schedule}/{key}/stop", operation_id = "stop_session", tag = "sessions",
    security(("token" = ["trigger"])),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Of which chat"),
        ("key" = String, Path, description = "Which")),
    responses((status = 200, description = "What it did", body = Answer)))]
async fn stop(State(shared): State<Arc<Shared>>, path: SessionPath) -> Result<Response, Problem> {
    Ok(json(StatusCode::OK, &Answer::of(change(&shared, &path, SessionVerb::Stop).await?)))
}

/// Cancel all that runs in a session, and end all that waits; what was sent before and comes later is stale
#[utoipa::path(post, path = "/api/v1/sessions/{agent}/{schedule}/{key}/stopall", operation_id = "stop_all_of_session", tag = "sessions",
    security(("token" = ["trigger"])),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Of which chat"),
        ("key" = String, Path, description = "Which")),
    responses((status = 200, description = "What it did", body = Answer)))]
async fn stopall(State(shared): State<Arc<Shared>>, path: SessionPath) -> Result<Response, Problem> {
    Ok(json(StatusCode::OK, &Answer::of(change(&shared, &path, SessionVerb::StopAll).await?)))
}

/// Begin a new generation of a session: what waits ends, what runs goes on and is none of its business any more
#[utoipa::path(post, path = "/api/v1/sessions/{agent}/{schedule}/{key}/reset", operation_id = "reset_session", tag = "sessions",
    security(("token" = ["manage"])),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Of which chat"),
        ("key" = String, Path, description = "Which")),
    responses((status = 200, description = "As it stands", body = ResetAnswer)))]
async fn reset(State(shared): State<Arc<Shared>>, path: SessionPath) -> Result<Response, Problem> {
    let done = change(&shared, &path, SessionVerb::Reset).await?;
    let session = found(&shared, &path).await?;
    Ok(json(StatusCode::OK, &ResetAnswer { session, ended: done.ended }))
}

/// A session that has begun anew.
#[derive(Serialize, ToSchema)]
struct ResetAnswer {
    #[serde(flatten)]
    session: Session,
    /// Runs that waited and have ended.
    ended: Vec<RunId>,
}

/// How much of its context window a session has used.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct UsageBody {
    /// Tokens of its history.
    #[schema(maximum = 9007199254740991_u64)]
    tokens: u64,
    /// Tokens that fit.
    #[schema(maximum = 9007199254740991_u64)]
    context_window: u64,
}

/// The largest number that JSON carries exactly.
const WHOLE_MAX: u64 = 9_007_199_254_740_991;

/// Say how much of its context window a session has used; from 60 % on it runs one at a time
#[utoipa::path(post, path = "/api/v1/sessions/{agent}/{schedule}/{key}/usage", operation_id = "measure_session", tag = "sessions",
    security(("token" = ["trigger"])),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Of which chat"),
        ("key" = String, Path, description = "Which")),
    request_body(content = UsageBody),
    responses((status = 200, description = "As it stands", body = Session)))]
async fn measure(
    State(shared): State<Arc<Shared>>,
    path: SessionPath,
    Object(body): Object,
) -> Result<Response, Problem> {
    let UsageBody { tokens, context_window } = extract::read(body)?;
    let numbers = [("tokens", tokens), ("context_window", context_window)];
    if let Some((field, number)) = numbers.into_iter().find(|(_, number)| *number > WHOLE_MAX) {
        let detail = format!("{field} must be 0-{WHOLE_MAX}, got {number}");
        return Err(Problem::bad("bad_field", detail).field(field));
    }
    change(&shared, &path, SessionVerb::Use(Usage { tokens, context_window })).await?;
    Ok(json(StatusCode::OK, &found(&shared, &path).await?))
}
