//! Schedules that no file owns: made, replaced, changed, removed. The keys, the checks and the words are those of files.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use belfry_config::{About, Errors, Inherited, Input, Parsed, is_written_out, parse_schedule};
use belfry_core::ScheduleDefinition;
use belfry_core::definition::When;
use belfry_core::hook::{self, Proof};
use belfry_store::{API, Expect, NEWER_VERSION, Put, Removed, ScheduleFilter, ScheduleRecord};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::schedules::{self, READ_AT_ONCE, ScheduleDetail, answer, tag};
use super::{Routes, json};
use crate::audit;
use crate::extract::{self, Key, Named, Object};
use crate::problem::Problem;
use crate::state::Shared;

/// So often a change is made anew where another node changes the schedule meanwhile; each time that one got further.
pub const TRIES: u32 = 16;

pub fn router() -> Routes {
    Routes::new().routes(routes!(create)).routes(routes!(schedules::show, replace, change, remove))
}

/// What is said of a definition that a newer version wrote, if its format is not at hand.
pub const LEFT_ALONE: &str = "written by a newer version of Belfry; this version leaves it alone";

/// The keys of a schedule, as in a file. Exactly one of `every`, `cron`, `at`, `after`, `webhook` and `chat` makes it run.
#[derive(ToSchema)]
#[schema(as = ScheduleKeys)]
#[allow(dead_code, reason = "the parser of files reads it; this describes it")]
#[serde(deny_unknown_fields)]
pub struct ScheduleKeys {
    /// A distance: `20m`, `1h30m`, `hourly`, `daily`.
    every: Option<String>,
    /// Five fields: `0 9 * * 1-5`.
    cron: Option<String>,
    /// RFC 3339.
    at: Option<String>,
    /// A delay.
    after: Option<String>,
    /// Requests to `/hooks/AGENT/SCHEDULE`.
    webhook: Option<Webhook>,
    /// Messages.
    chat: Option<Map<String, Value>>,
    enabled: Option<bool>,
    /// An IANA name.
    timezone: Option<String>,
    anchor: Option<Anchor>,
    phase: Option<String>,
    jitter: Option<String>,
    only_between: Option<String>,
    /// A day, or a list of days.
    not_on: Option<Vec<String>>,
    dst_gap: Option<DstGap>,
    dst_fold: Option<DstFold>,
    catch_up: Option<CatchUp>,
    #[schema(minimum = 0, maximum = 1_000_000)]
    catch_up_limit: Option<u32>,
    late_after: Option<String>,
    if_running: Option<IfRunning>,
    overlap: Option<Overlap>,
    #[schema(minimum = 0, maximum = 1_000_000)]
    max_pending: Option<u32>,
    command: Option<String>,
    /// A template.
    prompt: Option<String>,
    payload: Option<Map<String, Value>>,
    lane: Option<String>,
    priority: Option<i16>,
    delete_after_run: Option<bool>,
}

/// How requests are signed.
#[derive(ToSchema)]
#[allow(dead_code, reason = "the parser of files reads it; this describes it")]
#[serde(deny_unknown_fields)]
struct Webhook {
    /// A reference, `${NAME}`; or `none`: then a request needs a token with scope trigger.
    secret: Option<String>,
    /// More secrets, while one changes.
    secrets: Option<Vec<String>>,
    /// Also accepts GitHub's signature.
    github: Option<bool>,
}

macro_rules! words {
    ($($name:ident: $($word:ident)*;)*) => {
        $(
            #[derive(ToSchema)]
            #[serde(rename_all = "snake_case")]
            #[allow(dead_code, reason = "the parser of files reads it; this describes it")]
            enum $name { $($word,)* }
        )*
    };
}

words! {
    Anchor: Completion Start Slot;
    DstGap: Run Skip;
    DstFold: First Both;
    CatchUp: Skip RunOnce RunAll;
    IfRunning: Skip Queue Cancel Allow;
    Overlap: Schedule Command Agent;
}

/// A schedule to be made.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewSchedule {
    /// Whose.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", min_length = 1, max_length = 63)]
    agent: String,
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", min_length = 1, max_length = 63)]
    schedule: String,
    /// Its keys.
    #[schema(value_type = ScheduleKeys)]
    definition: Map<String, Value>,
}

/// Make a schedule
///
/// With an `Idempotency-Key`, a repeat of the same request answers with the schedule that the first one made.
#[utoipa::path(post, path = "/api/v1/schedules", operation_id = "create_schedule", tag = "schedules",
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first result", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body = NewSchedule, security(("token" = ["manage"])),
    responses(
        (status = 201, description = "It is made", body = ScheduleDetail, headers(("ETag" = String), ("Location" = String))),
        (status = 200, description = "It was made before, with the same key", body = ScheduleDetail, headers(("ETag" = String))),
        (status = 404, description = "There is no such agent", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "There is one of this name", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
    ))]
async fn create(
    State(shared): State<Arc<Shared>>,
    key: Key,
    Object(body): Object,
) -> Result<Response, Problem> {
    let new: NewSchedule = extract::read(body.clone())?;
    let named = Named { agent: new.agent, schedule: new.schedule };
    if !extract::is_name(&named.agent) || !extract::is_name(&named.schedule) {
        return Err(Problem::bad("bad_name", "agent and schedule must be names").field("schedule"));
    }
    let _turn = shared.edits.lock().await;
    let name = named.full();
    let definition = read(&shared, &named, &new.definition, None).await?;
    key.refuse_reused(&shared, "create_schedule", &body).await?;
    let mut found = shared.store().schedule(&name).await?;
    if found.is_none() {
        refuse_lookalike(&shared, &named).await?;
        if let Some(response) = put(&shared, &named, &definition, &Expect::Absent).await? {
            return Ok(response);
        }
        // Another node was faster.
        found = shared.store().schedule(&name).await?;
    }
    match found {
        Some(record) if key.0.is_some() && record.source == API && record.definition == definition => {
            audit::made(false);
            answer(&shared, StatusCode::OK, &record).await
        }
        _ => Err(exists(&name)),
    }
}

/// There is one of this name.
pub fn exists(name: &str) -> Problem {
    Problem::conflict("exists", format!("there is a schedule {name} already"))
        .field("schedule")
        .way_out("PUT replaces it, PATCH changes it, DELETE removes it")
}

/// Make a schedule, or replace one
#[utoipa::path(put, path = "/api/v1/schedules/{agent}/{name}", operation_id = "replace_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"),
        ("If-Match" = Option<String>, Header, description = "Only where its ETag is this", nullable = false),
        ("If-None-Match" = Option<String>, Header, description = "`*`: only where there is none", nullable = false)),
    request_body = ScheduleKeys, security(("token" = ["manage"])),
    responses(
        (status = 200, description = "It is so now", body = ScheduleDetail, headers(("ETag" = String))),
        (status = 201, description = "It is made", body = ScheduleDetail, headers(("ETag" = String), ("Location" = String))),
        (status = 409, description = "A file owns it", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
        (status = 412, description = "It has changed meanwhile", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
    ))]
async fn replace(
    State(shared): State<Arc<Shared>>,
    named: Named,
    headers: HeaderMap,
    Object(keys): Object,
) -> Result<Response, Problem> {
    let _turn = shared.edits.lock().await;
    let record = shared.store().schedule(&named.full()).await?;
    let definition = read(&shared, &named, &keys, None).await?;
    preconditions(&headers, record.as_ref().map(tag_of), "schedule")?;
    if let Some(record) = &record {
        refuse_owned(&shared, record)?;
        belfry::refuse_unreadable(record)?;
    }
    if record.is_none() {
        refuse_lookalike(&shared, &named).await?;
    }
    let expect = match &record {
        Some(record) if is_conditional(&headers) => Expect::same(record),
        None if is_conditional(&headers) => Expect::Absent,
        _ => Expect::Any,
    };
    put(&shared, &named, &definition, &expect).await?.ok_or_else(|| changed(&headers, "schedule"))
}

/// Change keys of a schedule
///
/// Keys that are not written stay as they are, the zone too; a key that is `null` goes back to its default.
#[utoipa::path(patch, path = "/api/v1/schedules/{agent}/{name}", operation_id = "change_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"),
        ("If-Match" = Option<String>, Header, description = "Only where its ETag is this", nullable = false)),
    request_body = ScheduleKeys, security(("token" = ["manage"])),
    responses(
        (status = 200, description = "It is so now", body = ScheduleDetail, headers(("ETag" = String))),
        (status = 409, description = "A file owns it", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
        (status = 412, description = "It has changed meanwhile", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
    ))]
async fn change(
    State(shared): State<Arc<Shared>>,
    named: Named,
    headers: HeaderMap,
    Object(keys): Object,
) -> Result<Response, Problem> {
    let _turn = shared.edits.lock().await;
    for _ in 0..TRIES {
        let record = shared.schedule(&named.full()).await?;
        belfry::refuse_unreadable(&record)?;
        let definition = match keys.is_empty() {
            true => record.definition.clone(),
            false => read(&shared, &named, &keys, Some(&record.definition)).await?,
        };
        preconditions(&headers, Some(tag_of(&record)), "schedule")?;
        refuse_owned(&shared, &record)?;
        if let Some(response) = put(&shared, &named, &definition, &Expect::same(&record)).await? {
            return Ok(response);
        }
        // Another node was faster: the change is made to what it is now, unless it was to be what it was.
        if is_conditional(&headers) {
            return Err(changed(&headers, "schedule"));
        }
    }
    Err(restless())
}

/// It was never what it had just been.
pub fn restless() -> Problem {
    Problem::conflict("changed", "others change it all the time").way_out("send it again")
}

/// What was removed.
#[derive(Serialize, ToSchema)]
struct RemovedSchedule {
    /// So many of its runs were waiting, and have ended.
    cancelled: u32,
}

/// Remove a schedule
///
/// Its runs that wait end cancelled, those that run go on, and its history stays.
#[utoipa::path(delete, path = "/api/v1/schedules/{agent}/{name}", operation_id = "remove_schedule", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"),
        ("If-Match" = Option<String>, Header, description = "Only where its ETag is this", nullable = false)),
    security(("token" = ["manage"])),
    responses(
        (status = 200, description = "It is gone", body = RemovedSchedule),
        (status = 409, description = "A file owns it", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
        (status = 412, description = "It has changed meanwhile", body = crate::problem::ProblemBody, content_type = "application/problem+json"),
    ))]
async fn remove(
    State(shared): State<Arc<Shared>>,
    named: Named,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let _turn = shared.edits.lock().await;
    let record = shared.schedule(&named.full()).await?;
    preconditions(&headers, Some(tag_of(&record)), "schedule")?;
    let expect = if is_conditional(&headers) { Expect::same(&record) } else { Expect::Any };
    match shared.engine.remove_schedule(&record.name, &expect).await? {
        Removed::Gone { ended } => {
            Ok(json(StatusCode::OK, &RemovedSchedule { cancelled: ended.len() as u32 }))
        }
        Removed::OwnedBy(source) => Err(shared.owned(&record.name, &source)),
        Removed::Differs => Err(changed(&headers, "schedule")),
        Removed::NotFound => Err(Problem::not_found(format!("{} is gone already", record.name))),
    }
}

/// Reads keys to a definition that works.
async fn read(
    shared: &Shared,
    named: &Named,
    keys: &Map<String, Value>,
    base: Option<&ScheduleDefinition>,
) -> Result<ScheduleDefinition, Problem> {
    let text = definition_text(keys)?;
    let written = Written { input: Input::Text(&text), origin: "request", timezone: None };
    Ok(read_written(shared, named, written, base, |errors| field_of(errors, &text)).await?.definition)
}

/// Keys as the text of a definition: one a line, so that an error's line tells the key. JSON may hold characters that
/// definitions take as escapes only.
pub fn definition_text(keys: &Map<String, Value>) -> Result<String, Problem> {
    let keys = extract::whole(keys.clone());
    let json = serde_json::to_string_pretty(&keys).map_err(|error| Problem::internal(error.to_string()))?;
    let mut text = String::with_capacity(json.len());
    for char in json.chars() {
        match char {
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(char)));
            }
            char => text.push(char),
        }
    }
    Ok(text)
}

/// What somebody wrote, and where.
pub struct Written<'a> {
    pub input: Input<'a>,
    /// What mistakes call it.
    pub origin: &'a str,
    /// The zone where it names none.
    pub timezone: Option<&'a str>,
}

/// Reads what somebody wrote to a definition that works. Where it cannot be read, `field` says which part of the request it
/// is.
pub async fn read_written(
    shared: &Shared,
    named: &Named,
    written: Written<'_>,
    base: Option<&ScheduleDefinition>,
    field: impl Fn(&Errors) -> Option<String>,
) -> Result<Parsed<ScheduleDefinition>, Problem> {
    let agent = shared.readable_agent(&named.agent).await?.definition;
    let (settings, name) = (shared.settings(), named.full());
    let mut inherited = Shared::inherited(&settings);
    inherited = Inherited { timezone: written.timezone.or(inherited.timezone), ..inherited };
    let about = About { name: &name, origin: written.origin, inherited, agent: Some(&agent) };
    let parsed = parse_schedule(written.input, base, &about)
        .map_err(|errors| refusal(&errors, field(&errors)).report(errors.render(false)))?;
    let definition = &parsed.definition;
    if base.is_none_or(|base| base.timing_key() != definition.timing_key()) {
        refuse_past(shared, &name, definition)?;
    }
    refuse_written_secrets(definition)?;
    Ok(parsed)
}

/// A one-shot whose time has passed would never run.
pub fn refuse_past(shared: &Shared, name: &str, definition: &ScheduleDefinition) -> Result<(), Problem> {
    match belfry::past_words(name, definition, shared.now()) {
        Some(words) => {
            Err(Problem::meaningless("past", words).field("at").way_out("use a later time, or run it now"))
        }
        None => Ok(()),
    }
}

/// A store holds references to secrets, never secrets.
pub fn refuse_written_secrets(definition: &ScheduleDefinition) -> Result<(), Problem> {
    let When::Webhook(webhook) = &definition.when else { return Ok(()) };
    let Ok(Proof::Secrets(secrets)) = hook::proof(webhook) else { return Ok(()) };
    match secrets.into_iter().any(is_written_out) {
        false => Ok(()),
        true => Err(Problem::meaningless(
            "secret_written_out",
            "a secret is written in the request, and would be stored as it is",
        )
        .field("webhook.secret")
        .way_out(
            "use a reference such as ${HOOK_SECRET}, without a default or other text; \
             it is filled in from the server's environment",
        )),
    }
}

/// What is wrong with the keys of a schedule or an agent.
pub fn refusal(errors: &Errors, field: Option<String>) -> Problem {
    let Some(first) = errors.problems.first() else {
        return Problem::meaningless("invalid", "the definition cannot be read");
    };
    let more = errors.others().map(|others| format!("; and {others}")).unwrap_or_default();
    let mut problem = Problem::meaningless("invalid", format!("{}{more}", first.message()));
    if let Some(field) = field {
        problem = problem.field(field);
    }
    match first.way_out() {
        Some(way_out) => problem.way_out(way_out),
        None => problem,
    }
}

/// The key of pretty JSON in which the first mistake is.
pub fn field_of(errors: &Errors, text: &str) -> Option<String> {
    field_at(text, errors.problems.first()?.place()?.line)
}

/// The key that a line of pretty JSON belongs to.
fn field_at(text: &str, line: usize) -> Option<String> {
    let above = text.lines().take(line).filter(|line| line.starts_with("  \""));
    let key = above.last()?.trim_start().split("\":").next()?;
    Some(key.trim_matches('"').to_owned())
}

/// Two names that differ only by case are one to many who read them.
pub async fn refuse_lookalike(shared: &Shared, named: &Named) -> Result<(), Problem> {
    let filter = ScheduleFilter { agent: Some(named.agent.clone()), ..ScheduleFilter::default() };
    let (name, mut after) = (named.full(), None::<String>);
    loop {
        let _place = shared.many.acquire().await;
        let page = shared.store().schedules(&filter, after.as_deref(), READ_AT_ONCE).await?;
        let alike =
            page.items.iter().find(|record| record.name != name && record.name.eq_ignore_ascii_case(&name));
        if let Some(record) = alike {
            let detail = format!("{name} and {} differ only by case", record.name);
            return Err(Problem::conflict("exists", detail).field("schedule"));
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

pub fn tag_of(record: &ScheduleRecord) -> String {
    tag(record.revision, &record.definition)
}

pub fn refuse_owned(shared: &Shared, record: &ScheduleRecord) -> Result<(), Problem> {
    match record.source.as_str() {
        API => Ok(()),
        source => Err(shared.owned(&record.name, source)),
    }
}

/// What became of a definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PutResult {
    Added,
    Changed,
    Unchanged,
}

/// Stores a definition; nothing where the schedule is not what was expected.
pub async fn store(
    shared: &Shared,
    named: &Named,
    definition: &ScheduleDefinition,
    expect: &Expect,
) -> Result<Option<PutResult>, Problem> {
    let put = shared.engine.put_schedule(&named.full(), definition, expect).await?;
    audit::made(matches!(put, Put::Added(_) | Put::Changed(_)));
    match put {
        Put::Differs => Ok(None),
        Put::Added(_) => Ok(Some(PutResult::Added)),
        Put::Changed(_) => Ok(Some(PutResult::Changed)),
        Put::Unchanged(_) | Put::Spent => Ok(Some(PutResult::Unchanged)),
        Put::NoAgent => Err(Problem::not_found(format!("agent {} is gone", named.agent)).field("agent")),
        Put::OwnedBy(source) => Err(shared.owned(&named.full(), &source)),
    }
}

/// Makes a schedule what it is to be; nothing where it is not what was expected.
async fn put(
    shared: &Shared,
    named: &Named,
    definition: &ScheduleDefinition,
    expect: &Expect,
) -> Result<Option<Response>, Problem> {
    let name = named.full();
    let Some(result) = store(shared, named, definition, expect).await? else { return Ok(None) };
    let status = if result == PutResult::Added { StatusCode::CREATED } else { StatusCode::OK };
    let record = shared.schedule(&name).await?;
    let mut response = answer(shared, status, &record).await?;
    if status == StatusCode::CREATED
        && let Ok(place) = HeaderValue::from_str(&format!("/api/v1/schedules/{name}"))
    {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(Some(response.into_response()))
}

/// Whether it is to be what the caller knows.
pub fn is_conditional(headers: &HeaderMap) -> bool {
    headers.contains_key(header::IF_MATCH) || headers.contains_key(header::IF_NONE_MATCH)
}

fn failed(field: &str, detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::PRECONDITION_FAILED, "changed", detail)
        .field(field)
        .way_out("GET it, and decide anew")
}

/// It was what the caller knows, until it was to be changed.
pub fn changed(headers: &HeaderMap, what: &str) -> Problem {
    match headers.contains_key(header::IF_MATCH) {
        true => failed("If-Match", format!("the {what} is not what it was")),
        false => failed("If-None-Match", format!("there is such a {what} already")),
    }
}

/// `If-Match` and `If-None-Match`, by the tag of what there is.
pub fn preconditions(headers: &HeaderMap, tag: Option<String>, what: &str) -> Result<(), Problem> {
    let matches = |value: &HeaderValue| {
        let text = value.to_str().unwrap_or_default();
        text.split(',').map(str::trim).any(|one| tag.as_ref().is_some_and(|tag| one == "*" || one == tag))
    };
    let given: Vec<_> = headers.get_all(header::IF_MATCH).iter().collect();
    if !given.is_empty() && !given.into_iter().any(matches) {
        return Err(failed("If-Match", format!("the {what} is not what it was")));
    }
    if headers.get_all(header::IF_NONE_MATCH).iter().any(matches) {
        return Err(failed("If-None-Match", format!("there is such a {what} already")));
    }
    Ok(())
}

impl Shared {
    /// Why a schedule of somebody else is not touched.
    pub fn owned(&self, name: &str, source: &str) -> Problem {
        match source {
            NEWER_VERSION => Problem::unreadable(name, LEFT_ALONE),
            "files" => Problem::conflict(
                "owned_by_file",
                format!("{name} belongs to {}; it can only be paused and run here", self.file),
            )
            .way_out(format!("edit it in {}", self.file)),
            other => {
                Problem::conflict("owned", format!("{name} belongs to {other:?}, which alone changes it"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use belfry_config::{Inherited, parse_schedule};
    use serde_json::json;

    use super::*;

    #[test]
    fn every_character_that_json_holds_gets_into_a_definition() {
        let text: String =
            "a\u{7f}\u{80}\u{85}\u{9b}\u{2028}\u{2029}\u{feff}\u{fffe}\u{ffff}\u{1f600}z".into();
        let Value::Object(keys) = json!({"every": "1h", "payload": {"t": text, &*text: 1}}) else {
            unreachable!()
        };
        let lines = definition_text(&keys).unwrap();
        let inherited = Inherited { timezone: None, host_timezone: "UTC", late_after_ms: None };
        let about = About { name: "a/s", origin: "request", inherited, agent: None };
        let parsed = parse_schedule(Input::Text(&lines), None, &about).unwrap();
        assert_eq!(Value::Object(parsed.definition.options.payload), keys["payload"]);
    }
}
