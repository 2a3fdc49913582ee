//! What a run has written, page by page or as it comes.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use belfry::api::{List, Run};
use belfry_core::RunId;
use belfry_store::{OutputChunk, Scope, Stream};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::{Params, RunPath};
use crate::guard::Actor;
use crate::page::hex;
use crate::problem::Problem;
use crate::readers::{Place, Seat};
use crate::reduced::{may_read, reduced};
use crate::state::{Shared, ended};
use crate::stream::{self, BREATH, Left, ServerEvent, Sink};

/// So much is read at once.
const PIECE: u32 = 256 << 10;
/// Pieces that may wait for a reader. Each is up to 64 KiB, and half a megabyte in JSON at worst.
const WAITING_MAX: usize = 2;
/// How often a run that lives is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub fn router() -> Routes {
    Routes::new().routes(routes!(log))
}

/// From where, and whether to go on.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LogParams {
    /// Only what comes behind this place: `next` of the page before, or the id of the last event.
    #[param(nullable = false, pattern = "^[0-9]{1,19}$")]
    after: Option<String>,
    /// Go on until the run ends, as server-sent events: `output` for each piece, then `end` with the run.
    #[param(nullable = false)]
    follow: Option<bool>,
}

/// A piece of what a run has written.
#[derive(Serialize, ToSchema)]
struct LogPiece {
    /// Its place.
    seq: u64,
    /// Which attempt wrote it, from 1.
    attempt: u32,
    /// Where: `stdout`, `stderr`; `note` for Belfry's own words.
    stream: LogStream,
    /// What; bytes that are no text are replaced.
    text: String,
    /// The bytes as they are, two digits each, where they are no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    hex: Option<String>,
}

/// Where a piece was written.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum LogStream {
    Stdout,
    Stderr,
    Note,
}

impl LogPiece {
    fn of(chunk: &OutputChunk) -> LogPiece {
        LogPiece {
            seq: chunk.seq,
            attempt: chunk.attempt,
            stream: match chunk.stream {
                Stream::Out => LogStream::Stdout,
                Stream::Err => LogStream::Stderr,
                Stream::Note => LogStream::Note,
            },
            text: String::from_utf8_lossy(&chunk.bytes).into_owned(),
            hex: std::str::from_utf8(&chunk.bytes).is_err().then(|| hex(&chunk.bytes)),
        }
    }
}

/// Read what a run has written
#[utoipa::path(get, path = "/api/v1/runs/{id}/log", operation_id = "read_log", tag = "runs", security(("token" = ["read"])),
    params(("id" = RunId, Path, description = "Which"), LogParams),
    responses((status = 200, description = "A page; with `follow`, events", content(
        (List<LogPiece> = "application/json"), (ServerEvent = "text/event-stream")))))]
async fn log(
    State(shared): State<Arc<Shared>>,
    Extension(actor): Extension<Actor>,
    RunPath(id): RunPath,
    headers: HeaderMap,
    Params(params): Params<LogParams>,
) -> Result<Response, Problem> {
    shared.run(id).await?;
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let after = place(params.after.or(last).as_deref())?;
    if params.follow != Some(true) {
        let chunks = shared.store().output(id, after, PIECE).await?;
        let next = chunks.last().map(|chunk| chunk.seq.to_string());
        return Ok(json(StatusCode::OK, &List { items: chunks.iter().map(LogPiece::of).collect(), next }));
    }
    let (seat, place) = shared.readers.follow(&actor)?;
    let (sink, response) = stream::events(WAITING_MAX, shared.limits.take_within, place);
    tokio::spawn(follow(shared, id, after, actor.scope, sink, seat));
    Ok(response)
}

/// Sends a first word, then what a run writes from its beginning to its end.
pub fn stream_run(
    shared: Arc<Shared>,
    id: RunId,
    first: &impl Serialize,
    scope: Scope,
    (seat, place): (Seat, Place),
) -> Response {
    let text = serde_json::to_string(first).unwrap_or_default();
    let (sink, response) = stream::events(WAITING_MAX, shared.limits.take_within, place);
    tokio::spawn(async move {
        if sink.send(None, "taken", &text).await.is_ok() {
            follow(shared, id, None, scope, sink, seat).await;
        }
    });
    response
}

fn place(text: Option<&str>) -> Result<Option<u64>, Problem> {
    let wrong =
        || Problem::meaningless("bad_cursor", "after must be a place as `next` gives it").field("after");
    let place = text
        .map(|text| text.parse::<i64>().ok().and_then(|place| u64::try_from(place).ok()).ok_or_else(wrong));
    place.transpose()
}

/// Sends what a run writes until it ends or the reader leaves.
async fn follow(
    shared: Arc<Shared>,
    id: RunId,
    mut after: Option<u64>,
    scope: Scope,
    sink: Sink,
    seat: Seat,
) {
    let mut ending = shared.ending.subscribe();
    let mut quiet = tokio::time::Instant::now();
    loop {
        // What is written before the end is there when the end is.
        let Ok(run) = shared.run(id).await else { break };
        match pass_on(&shared, id, &mut after, &sink).await {
            Ok(true) => quiet = tokio::time::Instant::now(),
            Ok(false) => {}
            Err(Left) => break,
        }
        if !run.state.is_live() {
            let text = serde_json::to_string(&Run::of(&run)).unwrap_or_default();
            let text = reduced(&text).filter(|_| !may_read(scope)).unwrap_or(text);
            let _ = sink.send(None, "end", &text).await;
            break;
        }
        if quiet.elapsed() >= BREATH {
            quiet = tokio::time::Instant::now();
            if sink.breathe().await.is_err() {
                break;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = sink.left() => break,
            () = ended(&mut ending) => break,
        }
    }
    drop(seat);
}

/// Sends all that is there behind a place; says whether there was something.
async fn pass_on(shared: &Shared, id: RunId, after: &mut Option<u64>, sink: &Sink) -> Result<bool, Left> {
    let mut any = false;
    loop {
        let chunks = shared.store().output(id, *after, PIECE).await.map_err(|_| Left)?;
        if chunks.is_empty() {
            return Ok(any);
        }
        any = true;
        for chunk in &chunks {
            let text = serde_json::to_string(&LogPiece::of(chunk)).unwrap_or_default();
            sink.send(Some(&chunk.seq.to_string()), "output", &text).await?;
            *after = Some(chunk.seq);
        }
    }
}
