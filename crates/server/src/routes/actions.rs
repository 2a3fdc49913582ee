//! What is done with a schedule, whoever owns it: run, pause, resume, backfill.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use belfry::api::Run;
use belfry::{Backfill, Resume, Resumed, RunRequest};
use belfry_core::RunId;
use belfry_time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::schedules::{ScheduleDetail, tagged};
use super::{Routes, json};
use crate::audit;
use crate::bodies::Share;
use crate::extract::{self, Key, MaybeObject, Named, Object};
use crate::guard::Actor;
use crate::problem::{Problem, ProblemBody};
use crate::readers::Place;
use crate::state::Shared;
use crate::trace::Trace;

/// Nobody waits longer for a run in one request.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// How often the token of a request that waits is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Runs of one backfill, so that its answer comes soon; `more` says what is left.
const BACKFILL_MAX: u32 = 1000;

pub fn router() -> Routes {
    Routes::new()
        .routes(routes!(run))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(backfill))
}

/// A run by hand.
#[derive(Deserialize, Default, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct RunBody {
    /// Instead of the schedule's. Used as it is: it is no template.
    prompt: Option<String>,
    /// Over the schedule's, key by key.
    payload: Map<String, Value>,
    /// Answer when it has ended, or when this many milliseconds have passed.
    #[schema(minimum = 0, maximum = 60000)]
    wait_ms: Option<u64>,
}

/// Run a schedule now, beside its ticks
///
/// It counts for limits and moves no schedule. A repeat with the same `Idempotency-Key` within 24 hours answers with the
/// first run.
#[utoipa::path(post, path = "/api/v1/schedules/{agent}/{name}/run", operation_id = "run_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first run", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body(content = Option<RunBody>), security(("token" = ["trigger"])),
    responses(
        (status = 201, description = "The run, made now", body = Run, headers(("Location" = String))),
        (status = 200, description = "The run that the first request with this key made", body = Run, headers(("Location" = String))),
        (status = 409, description = "The key was used for something else", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn run(
    State(shared): State<Arc<Shared>>,
    Extension(actor): Extension<Actor>,
    Extension(share): Extension<Share>,
    Extension(trace): Extension<Trace>,
    named: Named,
    Key(key): Key,
    body: MaybeObject,
) -> Result<Response, Problem> {
    let body: RunBody = body.read()?;
    let wait = wait_of(&shared, &actor, share, body.wait_ms)?;
    shared.refuse_draining()?;
    let request = RunRequest { prompt: body.prompt, payload: body.payload, key, trace_id: Some(trace.id) };
    let made = shared.done(&named, shared.engine.trigger(&named.full(), request)).await?;
    audit::made(made.is_new);
    let status = if made.is_new { StatusCode::CREATED } else { StatusCode::OK };
    answer_run(&shared, status, made.run, wait).await
}

/// How long to wait for a run, with a place among the readers where that is long.
#[derive(Default)]
pub struct Wait {
    time: Duration,
    /// The id of the token that asked.
    actor: String,
    _place: Option<Place>,
    /// The room of the request's body, which is not needed while it waits.
    share: Share,
}

impl Wait {
    pub fn is_asked(&self) -> bool {
        !self.time.is_zero()
    }
}

/// How long a request wants to wait. It takes its place before anything is changed: who is told that there are too many
/// sends the request again.
pub fn wait_of(shared: &Shared, actor: &Actor, share: Share, wait_ms: Option<u64>) -> Result<Wait, Problem> {
    match Duration::from_millis(wait_ms.unwrap_or(0)) {
        time if time.is_zero() => Ok(Wait::default()),
        time if time <= WAIT_MAX => {
            Ok(Wait { time, actor: actor.id.clone(), _place: Some(shared.readers.wait(actor)?), share })
        }
        _ => Err(Problem::bad("bad_field", "wait_ms must be 0-60000").field("wait_ms")),
    }
}

/// Answers with a run, once it has ended or the time is up. A token that is revoked or expires ends the wait.
pub async fn answer_run(
    shared: &Shared,
    status: StatusCode,
    id: RunId,
    wait: Wait,
) -> Result<Response, Problem> {
    wait.share.close();
    let token_ends = async {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if let Err(problem) = shared.refuse_if_ended(&wait.actor).await {
                return problem;
            }
        }
    };
    let ended = async {
        match wait.is_asked() {
            true => tokio::time::timeout(wait.time, shared.engine.wait(id)).await.ok(),
            false => None,
        }
    };
    let run = tokio::select! {
        ended = ended => match ended {
            Some(run) => run?,
            None => shared.run(id).await?,
        },
        problem = token_ends => return Err(problem),
    };
    let mut response = json(status, &shared.runs_of(&[run]).await?.first());
    if let Ok(place) = HeaderValue::from_str(&format!("/api/v1/runs/{id}")) {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(response)
}

/// A pause.
#[derive(Deserialize, Default, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct PauseBody {
    /// Why, for whoever asks.
    #[schema(max_length = 1000)]
    reason: Option<String>,
    /// Until then; else until it is resumed.
    until: Option<Timestamp>,
}

/// A schedule that is paused.
#[derive(Serialize, ToSchema)]
struct Paused {
    #[serde(flatten)]
    detail: ScheduleDetail,
    /// Whether it was not paused like that before.
    changed: bool,
}

/// Pause a schedule: no tick makes a run until it is resumed
///
/// What runs goes on. Another pause takes the place of the first.
#[utoipa::path(post, path = "/api/v1/schedules/{agent}/{name}/pause", operation_id = "pause_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which")),
    request_body(content = Option<PauseBody>), security(("token" = ["manage"])),
    responses(
        (status = 200, description = "It is paused", body = Paused),
        (status = 409, description = "It cannot be paused", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn pause(
    State(shared): State<Arc<Shared>>,
    named: Named,
    body: MaybeObject,
) -> Result<Response, Problem> {
    let body: PauseBody = body.read()?;
    let changed =
        shared.done(&named, shared.engine.pause(&named.full(), body.reason.as_deref(), body.until)).await?;
    audit::made(changed);
    let record = shared.schedule(&named.full()).await?;
    let agent = shared.agent_of(&record).await?;
    let paused = Paused { detail: ScheduleDetail::of(&record, &agent, shared.now()), changed };
    Ok(tagged(StatusCode::OK, &record, &paused))
}

/// The end of a pause.
#[derive(Deserialize, Default, ToSchema)]
#[serde(deny_unknown_fields, default)]
struct ResumeBody {
    /// Plan what the pause left out, as after downtime.
    catch_up: bool,
    /// Tick from now on, also where the clock was set back: ticks may come a second time.
    from_now: bool,
}

/// A schedule that is not paused.
#[derive(Serialize, ToSchema)]
struct ResumeAnswer {
    #[serde(flatten)]
    detail: ScheduleDetail,
    /// Whether it was paused until now.
    resumed: bool,
    /// Ticks that the pause left out.
    skipped: u64,
    /// When its pause had ended by itself.
    ended_at: Option<Timestamp>,
}

/// Resume a schedule that was paused: it ticks from now on
///
/// What the pause left out is recorded as skipped; with `catch_up` it is planned as after downtime. One that is not paused
/// is left as it is. With `from_now` also a schedule goes on that waits for a clock that was set back.
#[utoipa::path(post, path = "/api/v1/schedules/{agent}/{name}/resume", operation_id = "resume_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which")),
    request_body(content = Option<ResumeBody>), security(("token" = ["manage"])),
    responses(
        (status = 200, description = "It is not paused", body = ResumeAnswer),
        (status = 409, description = "A run of a later tick lives", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn resume(
    State(shared): State<Arc<Shared>>,
    named: Named,
    body: MaybeObject,
) -> Result<Response, Problem> {
    let body: ResumeBody = body.read()?;
    let how = match (body.catch_up, body.from_now) {
        (true, true) => {
            let detail = "catch_up and from_now exclude each other";
            return Err(Problem::bad("bad_field", detail).field("from_now"));
        }
        (true, false) => Resume::CatchUp,
        (false, true) => Resume::FromNow,
        (false, false) => Resume::Skip,
    };
    let came = shared.done(&named, shared.engine.resume(&named.full(), how)).await?;
    if let Resumed::Lives(run) = came {
        let detail = format!("{} has a live run of a later tick, {run}", named.full());
        let way_out = "wait for its end, or cancel it";
        return Err(Problem::conflict("run_lives", detail).way_out(way_out));
    }
    audit::made(matches!(came, Resumed::Now { .. }));
    let record = shared.schedule(&named.full()).await?;
    let agent = shared.agent_of(&record).await?;
    let (resumed, skipped, ended_at) = match came {
        Resumed::Now { skipped } => (true, skipped, None),
        Resumed::Before(until) => (false, 0, Some(until)),
        _ => (false, 0, None),
    };
    let detail = ScheduleDetail::of(&record, &agent, shared.now());
    Ok(tagged(StatusCode::OK, &record, &ResumeAnswer { detail, resumed, skipped, ended_at }))
}

/// Which ticks are made up for.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct BackfillBody {
    /// The first instant.
    from: Timestamp,
    /// The end, itself not included.
    to: Timestamp,
    /// Only ticks that made no run.
    #[serde(default)]
    missing: bool,
    /// Make nothing, and say what would be made.
    #[serde(default)]
    dry_run: bool,
    /// At most so many, the earliest; 1000 where nothing is said.
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// What was made.
#[derive(Serialize, ToSchema)]
struct BackfillAnswer {
    /// Whether nothing was made.
    dry_run: bool,
    /// Ticks with their runs.
    runs: Vec<BackfilledRun>,
    /// Ticks whose run lives, or with `missing` has ended.
    left_out: u64,
    /// Ticks beyond the limit.
    more: u64,
    /// The first of them, to go on from; null where none is left.
    next_from: Option<Timestamp>,
    /// Only up to here: what comes after, the schedule plans by itself, or a resume if it is paused.
    cut_at: Option<Timestamp>,
}

/// A tick with its run.
#[derive(Serialize, ToSchema)]
struct BackfilledRun {
    tick_at: Timestamp,
    run_id: Option<RunId>,
}

/// Make runs for ticks of the past
///
/// They wait in the order of their ticks, and count for limits and overlap.
#[utoipa::path(post, path = "/api/v1/schedules/{agent}/{name}/backfill", operation_id = "backfill_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first runs", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body = BackfillBody, security(("token" = ["trigger"])),
    responses((status = 200, description = "What was made, or would be", body = BackfillAnswer)))]
async fn backfill(
    State(shared): State<Arc<Shared>>,
    named: Named,
    Key(key): Key,
    Object(body): Object,
) -> Result<Response, Problem> {
    let body: BackfillBody = extract::read(body)?;
    let limit = body.limit.unwrap_or(1000);
    if !(1..=BACKFILL_MAX).contains(&limit) {
        return Err(Problem::bad("bad_limit", format!("limit must be 1-{BACKFILL_MAX}")).field("limit"));
    }
    if !body.dry_run {
        shared.refuse_draining()?;
    }
    let request = Backfill {
        from: body.from,
        to: body.to,
        missing: body.missing,
        dry_run: body.dry_run,
        limit: limit as usize,
        key,
    };
    let done = shared.done(&named, shared.engine.backfill(&named.full(), &request)).await?;
    audit::made(!done.made.is_empty());
    let runs = done.runs.into_iter().map(|(tick_at, run_id)| BackfilledRun { tick_at, run_id }).collect();
    let answer = BackfillAnswer {
        dry_run: body.dry_run,
        runs,
        left_out: done.left_out,
        more: done.more,
        next_from: done.next_from,
        cut_at: done.cut_at,
    };
    Ok(json(StatusCode::OK, &answer))
}
