//! A schedule as people write it: pairs on a command line, or a piece of YAML. The parser is that of the files, and so are its
//! words.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use belfry_config::Input;
use belfry_store::Expect;
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ArrayBuilder, Schema};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::routes;

use super::Routes;
use super::edit::{self, PutResult, Written};
use super::schedules::{ScheduleDetail, tagged};
use crate::extract::{self, Named, Object};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;

/// Names of files are shorter.
const ORIGIN_MAX: usize = 4096;

pub fn router() -> Routes {
    Routes::new().routes(routes!(write))
}

/// What somebody wrote: either `pairs` or `text`.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct WrittenBody {
    /// Whether it is to be made; else it is there, and keys that are not written stay as they are.
    #[serde(default)]
    add: bool,
    /// A key and its value each, as in `every=5m`.
    #[schema(value_type = Option<Vec<Pair>>)]
    pairs: Option<Vec<(String, String)>>,
    /// A map in YAML, or a JSON object.
    text: Option<String>,
    /// What mistakes call it: the name of a file, say.
    #[schema(max_length = 4096, pattern = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$")]
    origin: Option<String>,
    /// The zone where it names none.
    timezone: Option<String>,
}

/// How a key and its value are described.
struct Pair;

impl PartialSchema for Pair {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().items(String::schema()).min_items(Some(2)).max_items(Some(2)).into()
    }
}

impl ToSchema for Pair {}

/// A schedule as it is now.
#[derive(Serialize, ToSchema)]
struct WrittenAnswer {
    #[serde(flatten)]
    detail: ScheduleDetail,
    /// What became of it.
    result: PutResult,
    /// What works, but hardly as meant.
    warnings: Vec<String>,
}

/// Make or change a schedule as it is written on a command line or in a file
///
/// What is wrong is told with its place, in `report`.
#[utoipa::path(post, path = "/api/v1/schedules/{agent}/{name}/write", operation_id = "write_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"),
        ("If-Match" = Option<String>, Header, description = "Only where its ETag is this", nullable = false)),
    request_body = WrittenBody, security(("token" = ["manage"])),
    responses(
        (status = 200, description = "It is so now", body = WrittenAnswer, headers(("ETag" = String))),
        (status = 409, description = "A file owns it, or there is one already", body = ProblemBody, content_type = "application/problem+json"),
        (status = 412, description = "It has changed meanwhile", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn write(
    State(shared): State<Arc<Shared>>,
    named: Named,
    headers: HeaderMap,
    Object(body): Object,
) -> Result<Response, Problem> {
    let body: WrittenBody = extract::read(body)?;
    let input = match (&body.pairs, &body.text) {
        (Some(pairs), None) => Input::Pairs(pairs),
        (None, Some(text)) => Input::Text(text),
        _ => return Err(Problem::meaningless("invalid", "either pairs or text is needed").field("pairs")),
    };
    let origin = body.origin.as_deref().unwrap_or("request");
    if origin.len() > ORIGIN_MAX || origin.chars().any(char::is_control) {
        return Err(Problem::bad("bad_field", "origin must be a short text").field("origin"));
    }
    let _turn = shared.edits.lock().await;
    let mut tries = 0..edit::TRIES;
    let (parsed, result) = loop {
        let before = match (body.add, shared.store().schedule(&named.full()).await?) {
            (true, None) => None,
            (true, Some(record)) => {
                edit::refuse_owned(&shared, &record)?;
                return Err(edit::exists(&record.name));
            }
            (false, Some(record)) => Some(record),
            (false, None) => return Err(shared.no_schedule(&named.full()).await?),
        };
        if let Some(record) = &before {
            edit::refuse_owned(&shared, record)?;
        }
        let written = Written { input, origin, timezone: body.timezone.as_deref() };
        let base = before.as_ref().map(|record| &record.definition);
        let parsed = edit::read_written(&shared, &named, written, base, |_| None).await?;
        edit::preconditions(&headers, before.as_ref().map(edit::tag_of), "schedule")?;
        if before.is_none() {
            edit::refuse_lookalike(&shared, &named).await?;
        }
        let expect = before.as_ref().map_or(Expect::Absent, Expect::same);
        if let Some(result) = edit::store(&shared, &named, &parsed.definition, &expect).await? {
            break (parsed, result);
        }
        // Another was faster: it is made to what the schedule is now, unless it was to be what it was.
        if edit::is_conditional(&headers) {
            return Err(edit::changed(&headers, "schedule"));
        }
        tries.next().ok_or_else(edit::restless)?;
    };
    let record = shared.schedule(&named.full()).await?;
    let agent = shared.agent_of(&record).await?;
    let answer = WrittenAnswer {
        detail: ScheduleDetail::of(&record, &agent, shared.now()),
        result,
        warnings: parsed.warnings.iter().map(|warning| warning.render(false)).collect(),
    };
    Ok(tagged(StatusCode::OK, &record, &answer))
}
