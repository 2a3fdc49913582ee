//! Agents: what runs. They come from files; where `api.allow_agents` says so, whoever may do everything makes others here.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use belfry::api::{Agent, List};
use belfry_config::{About, env_is_written_out, parse_agent};
use belfry_core::AgentDefinition;
use belfry_core::AgentSpec;
use belfry_core::work::is_secret_name;
use belfry_store::{API, AgentRecord, Expect, NEWER_VERSION, PutAgent, Removed, Scope};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::edit::{
    LEFT_ALONE, ScheduleKeys, changed, definition_text, field_of, is_conditional, preconditions, refusal,
    refuse_past, refuse_written_secrets,
};
use super::schedules::tag;
use super::{Routes, json};
use crate::audit;
use crate::extract::{self, Key, Object, Segment};
use crate::guard::Actor;
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list, create)).routes(routes!(show, replace, remove))
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
    responses((status = 200, description = "As it is", body = AgentDetail, headers(("ETag" = String, description = "For If-Match")))))]
async fn show(
    State(shared): State<Arc<Shared>>,
    actor: Option<Extension<Actor>>,
    Segment(name): Segment,
) -> Result<Response, Problem> {
    let record = shared.readable_agent(&name).await?;
    let is_admin = actor.is_none_or(|Extension(actor)| actor.scope >= Scope::Admin);
    Ok(detailed(&shared, StatusCode::OK, &record, is_admin))
}

/// An agent as it stands, with what it is.
#[derive(Serialize, ToSchema)]
struct AgentDetail {
    #[serde(flatten)]
    agent: Agent,
    /// The keys that differ from the defaults, as they could be written, without its schedules. For scope admin alone: a file
    /// may have secrets written out.
    definition: Option<Map<String, Value>>,
}

/// The keys of an agent, as in a file. Exactly one of `run` and `shell` says what is started; `cwd` is absolute, and secrets are
/// references, `${NAME}`.
#[derive(ToSchema)]
#[allow(dead_code, reason = "the parser of files reads it; this describes it")]
#[serde(deny_unknown_fields)]
struct AgentKeys {
    /// A program and its arguments, each a template.
    run: Option<Vec<String>>,
    /// A line for `sh -c`, which gets it as written; values come by `env`.
    shell: Option<String>,
    /// What is started instead, for schedules that name one of these.
    commands: Option<Map<String, Value>>,
    /// An absolute path.
    cwd: Option<String>,
    /// Environment variables; each value is a template.
    env: Option<BTreeMap<String, String>>,
    env_pass: Option<Vec<String>>,
    /// A template.
    prompt: Option<String>,
    payload: Option<Map<String, Value>>,
    stdin: Option<StdinKind>,
    timeout: Option<String>,
    grace: Option<String>,
    output: Option<String>,
    #[schema(minimum = 1)]
    max_concurrent: Option<u32>,
    retry: Option<Map<String, Value>>,
    breaker: Option<Map<String, Value>>,
    lane: Option<String>,
    needs: Option<Vec<String>>,
    /// By name.
    schedules: Option<BTreeMap<String, ScheduleKeys>>,
}

/// What it reads from standard input.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "the parser of files reads it; this describes it")]
enum StdinKind {
    None,
    Prompt,
    Payload,
}

/// An agent to be made.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewAgent {
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", min_length = 1, max_length = 63)]
    agent: String,
    /// Its keys.
    #[schema(value_type = AgentKeys)]
    definition: Map<String, Value>,
}

/// Make an agent, with its schedules
///
/// Only where `api: {allow_agents: true}`. With an `Idempotency-Key`, a repeat of the same request answers with the agent that the
/// first one made.
#[utoipa::path(post, path = "/api/v1/agents", operation_id = "create_agent", tag = "agents",
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first result", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body = NewAgent, security(("token" = ["admin"])),
    responses(
        (status = 201, description = "It is made", body = AgentDetail, headers(("ETag" = String), ("Location" = String))),
        (status = 200, description = "It was made before, with the same key", body = AgentDetail, headers(("ETag" = String))),
        (status = 403, description = "Not with this token, or not while `api.allow_agents` is false", body = ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "There is one of this name", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn create(
    State(shared): State<Arc<Shared>>,
    key: Key,
    Object(body): Object,
) -> Result<Response, Problem> {
    refuse_closed(&shared)?;
    let new: NewAgent = extract::read(body.clone())?;
    let _turn = shared.edits.lock().await;
    let spec = read(&shared, &new.agent, &new.definition)?;
    key.refuse_reused(&shared, "create_agent", &body).await?;
    let mut found = find(&shared, &spec.name).await?;
    if found.is_none() {
        refuse_lookalike(&shared, &spec.name).await?;
        if let Some(response) = put(&shared, &spec, true, &Expect::Absent).await? {
            return Ok(response);
        }
        // Another node was faster.
        found = find(&shared, &spec.name).await?;
    }
    match found {
        Some(record) if key.0.is_some() && record.source == API && is_so(&shared, &record, &spec).await? => {
            audit::made(false);
            Ok(answer(&shared, StatusCode::OK, &record))
        }
        _ => Err(Problem::conflict("exists", format!("there is an agent {} already", spec.name))
            .field("agent")
            .way_out("PUT replaces one that was made here, DELETE removes it")),
    }
}

/// Make an agent, or replace one that was made here
///
/// With `schedules` its schedules are these and no others; without, they stay as they are.
#[utoipa::path(put, path = "/api/v1/agents/{agent}", operation_id = "replace_agent", tag = "agents",
    params(("agent" = String, Path, description = "Which"),
        ("If-Match" = Option<String>, Header, description = "Only where its ETag is this", nullable = false),
        ("If-None-Match" = Option<String>, Header, description = "`*`: only where there is none", nullable = false)),
    request_body = AgentKeys, security(("token" = ["admin"])),
    responses(
        (status = 200, description = "It is so now", body = AgentDetail, headers(("ETag" = String))),
        (status = 201, description = "It is made", body = AgentDetail, headers(("ETag" = String), ("Location" = String))),
        (status = 403, description = "Not with this token, or not while `api.allow_agents` is false", body = ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "A file owns it", body = ProblemBody, content_type = "application/problem+json"),
        (status = 412, description = "It has changed meanwhile", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn replace(
    State(shared): State<Arc<Shared>>,
    Segment(name): Segment,
    headers: HeaderMap,
    Object(keys): Object,
) -> Result<Response, Problem> {
    refuse_closed(&shared)?;
    let _turn = shared.edits.lock().await;
    let record = find(&shared, &name).await?;
    let spec = read(&shared, &name, &keys)?;
    preconditions(&headers, record.as_ref().map(tag_of), "agent")?;
    if record.is_none() {
        refuse_lookalike(&shared, &name).await?;
    }
    let whole = keys.get("schedules").is_some_and(|schedules| !schedules.is_null());
    let expect = expected(&headers, record.as_ref());
    put(&shared, &spec, whole, &expect).await?.ok_or_else(|| changed(&headers, "agent"))
}

/// What was removed.
#[derive(Serialize, ToSchema)]
struct RemovedAgent {
    /// So many of its runs were waiting, and have ended.
    cancelled: u32,
}

/// Remove an agent that was made here, with its schedules
///
/// Its runs that wait end cancelled(agent_removed), those that run go on, and its history stays.
#[utoipa::path(delete, path = "/api/v1/agents/{agent}", operation_id = "remove_agent", tag = "agents",
    params(("agent" = String, Path, description = "Which"),
        ("If-Match" = Option<String>, Header, description = "Only where its ETag is this", nullable = false)),
    security(("token" = ["admin"])),
    responses(
        (status = 200, description = "It is gone", body = RemovedAgent),
        (status = 403, description = "Not with this token, or not while `api.allow_agents` is false", body = ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "A file owns it", body = ProblemBody, content_type = "application/problem+json"),
        (status = 412, description = "It has changed meanwhile", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn remove(
    State(shared): State<Arc<Shared>>,
    Segment(name): Segment,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    refuse_closed(&shared)?;
    let _turn = shared.edits.lock().await;
    let record = shared.agent(&name).await?;
    preconditions(&headers, Some(tag_of(&record)), "agent")?;
    match shared.engine.remove_agent(&name, &expected(&headers, Some(&record))).await? {
        Removed::Gone { ended } => Ok(json(StatusCode::OK, &RemovedAgent { cancelled: ended.len() as u32 })),
        Removed::OwnedBy(source) => Err(owned(&shared, &name, &source)),
        Removed::Differs => Err(changed(&headers, "agent")),
        Removed::NotFound => Err(Problem::not_found(format!("agent {name} is gone already"))),
    }
}

fn refuse_closed(shared: &Shared) -> Result<(), Problem> {
    match shared.api().allow_agents {
        true => Ok(()),
        false => {
            Err(Problem::forbidden("agents_closed", "agents come from files here, and not over the API")
                .way_out(format!(
                    "set `api: {{allow_agents: true}}` in {}, or write the agent there",
                    shared.file
                )))
        }
    }
}

async fn find(shared: &Shared, name: &str) -> Result<Option<AgentRecord>, Problem> {
    Ok(shared.store().agents().await?.into_iter().find(|agent| agent.name == name))
}

fn tag_of(record: &AgentRecord) -> String {
    tag(record.revision, &record.definition)
}

fn answer(shared: &Shared, status: StatusCode, record: &AgentRecord) -> Response {
    detailed(shared, status, record, true)
}

fn detailed(shared: &Shared, status: StatusCode, record: &AgentRecord, is_admin: bool) -> Response {
    let definition = is_admin.then(|| belfry_config::agent_keys(&record.definition));
    let detail = AgentDetail { agent: Agent::of(record, shared.now()), definition };
    let mut response = json(status, &detail);
    if let Ok(tag) = HeaderValue::from_str(&tag_of(record)) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// Reads keys to an agent that works.
fn read(shared: &Shared, name: &str, keys: &Map<String, Value>) -> Result<AgentSpec, Problem> {
    let text = definition_text(keys)?;
    let settings = shared.settings();
    let inherited = Shared::inherited(&settings);
    let about = About { name, origin: "request", inherited, agent: None };
    let spec =
        parse_agent(&text, &about).map_err(|errors| refusal(&errors, field_of(&errors, &text)))?.definition;
    if name.contains('/') {
        return Err(Problem::meaningless("invalid", "the name of an agent has no `/`").field("agent"));
    }
    for (key, value) in &spec.definition.work.env {
        if is_secret_name(key) && env_is_written_out(value) {
            return Err(Problem::meaningless(
                "secret_written_out",
                format!("{key} is written out, and would be stored as it is"),
            )
            .field("env")
            .way_out(format!(
                "use a reference such as ${{{key}}}; it is filled in on the node that runs it"
            )));
        }
    }
    for (schedule, definition) in &spec.schedules {
        refuse_written_secrets(definition)?;
        refuse_past(shared, &format!("{name}/{schedule}"), definition)?;
    }
    Ok(spec)
}

/// Two names that differ only by case are one to many who read them.
async fn refuse_lookalike(shared: &Shared, name: &str) -> Result<(), Problem> {
    let agents = shared.store().agents().await?;
    match agents.iter().find(|agent| agent.name != name && agent.name.eq_ignore_ascii_case(name)) {
        Some(agent) => {
            let detail = format!("{name} and {} differ only by case", agent.name);
            Err(Problem::conflict("exists", detail).field("agent"))
        }
        None => Ok(()),
    }
}

/// Whether an agent is what it would be made.
async fn is_so(shared: &Shared, record: &AgentRecord, spec: &AgentSpec) -> Result<bool, Problem> {
    for (name, definition) in &spec.schedules {
        let found = shared.store().schedule(&format!("{}/{name}", spec.name)).await?;
        if found.is_none_or(|found| found.definition != *definition) {
            return Ok(false);
        }
    }
    Ok(record.definition == spec.definition)
}

/// What an agent must be, where the request says that it must be what its sender knows.
fn expected(headers: &HeaderMap, record: Option<&AgentRecord>) -> Expect<AgentDefinition> {
    match record {
        _ if !is_conditional(headers) => Expect::Any,
        Some(record) => Expect::same_agent(record),
        None => Expect::Absent,
    }
}

/// Makes an agent what it is to be; nothing where it is not what was expected.
async fn put(
    shared: &Shared,
    spec: &AgentSpec,
    whole: bool,
    expect: &Expect<AgentDefinition>,
) -> Result<Option<Response>, Problem> {
    let name = &spec.name;
    let put = shared.engine.put_agent(spec, whole, expect).await?;
    audit::made(matches!(put, PutAgent::Added | PutAgent::Changed { .. }));
    let status = match put {
        PutAgent::Differs => return Ok(None),
        PutAgent::Added => StatusCode::CREATED,
        PutAgent::Changed { .. } | PutAgent::Unchanged => StatusCode::OK,
        PutAgent::OwnedBy(source) => return Err(owned(shared, name, &source)),
    };
    let mut response = answer(shared, status, &shared.agent(name).await?);
    if status == StatusCode::CREATED
        && let Ok(place) = HeaderValue::from_str(&format!("/api/v1/agents/{name}"))
    {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(Some(response))
}

/// Why an agent of somebody else is not touched.
fn owned(shared: &Shared, name: &str, source: &str) -> Problem {
    match source {
        NEWER_VERSION => Problem::unreadable(name, LEFT_ALONE),
        "files" => Problem::conflict("owned_by_file", format!("agent {name} belongs to {}", shared.file))
            .way_out(format!("edit it in {}", shared.file)),
        other => {
            Problem::conflict("owned", format!("agent {name} belongs to {other:?}, which alone changes it"))
        }
    }
}
