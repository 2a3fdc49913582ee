//! Schedules as they stand.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use belfry::api::{About, List, Schedule, ScheduleStatus};
use belfry::{AgentDefinition, Timestamp};
use belfry_store::{ScheduleFilter, ScheduleRecord, Scope, StatusKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::routes;

use super::ticks::TickResult;
use super::{Routes, json};
use crate::extract::{Named, Params};
use crate::guard::Actor;
use crate::page::{self, Cursor, hex};
use crate::problem::Problem;
use crate::state::Shared;

/// Schedules of a list that are read at once.
pub const READ_AT_ONCE: u32 = 50;
/// Ranges of skipped ticks that are looked at, and how many of them are shown.
const SKIPS_READ: u32 = 10_000;
const SKIPS_SHOWN: usize = 5;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list))
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
    /// How many; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// List schedules, in the order of their names
#[utoipa::path(get, path = "/api/v1/schedules", operation_id = "list_schedules", tag = "schedules", params(ListParams),
    security(("token" = ["read"])), responses((status = 200, description = "A page", body = List<Schedule>)))]
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
    let (mut items, mut next) = (Vec::new(), after);
    // Definitions may be large, and only a small part of each is shown.
    while items.len() < limit as usize {
        let most = READ_AT_ONCE.min(limit - items.len() as u32);
        let _place = shared.many.acquire().await;
        let found = shared.store().schedules(&filter, next.as_deref(), most).await?;
        items.extend(shown(&shared, &found.items).await?);
        next = found.next;
        if next.is_none() {
            break;
        }
    }
    let next = next.map(|name| Cursor::Schedule(name).write());
    Ok(json(StatusCode::OK, &List { items, next }))
}

/// Schedules as they are shown, with their agents read at once.
async fn shown(shared: &Shared, records: &[ScheduleRecord]) -> Result<Vec<Schedule>, Problem> {
    let one_of_each: BTreeMap<_, _> = records.iter().map(|record| (record.agent, record.id)).collect();
    let ids: Vec<_> = one_of_each.values().copied().collect();
    let found = shared.store().definitions(&ids).await?;
    let agents: BTreeMap<_, _> = one_of_each.into_keys().zip(found).collect();
    let (now, fallback) = (shared.now(), AgentDefinition::default());
    let shown = records.iter().map(|record| {
        let found = agents.get(&record.agent).and_then(Option::as_ref);
        Schedule::of(record, found.map_or(&fallback, |found| &*found.agent_definition), now)
    });
    Ok(shown.collect())
}

/// A schedule as it stands, with what it is.
#[derive(Serialize, ToSchema)]
pub struct ScheduleDetail {
    #[serde(flatten)]
    schedule: Schedule,
    /// The keys that differ from the defaults, as they could be written.
    definition: Map<String, Value>,
}

impl ScheduleDetail {
    pub fn of(record: &ScheduleRecord, agent: &AgentDefinition, now: Timestamp) -> ScheduleDetail {
        ScheduleDetail {
            schedule: Schedule::of(record, agent, now),
            definition: match record.unreadable {
                Some(_) => Map::new(),
                None => belfry_config::schedule_keys(&record.definition),
            },
        }
    }
}

/// The version of a definition, for `ETag` and `If-Match`.
pub fn tag(revision: i64, definition: &impl Serialize) -> String {
    let text = serde_json::to_string(definition).unwrap_or_default();
    format!("\"{revision}-{}\"", hex(&Sha256::digest(text.as_bytes())[..8]))
}

/// Answers with a schedule, and the version of its definition.
pub async fn answer(
    shared: &Shared,
    status: StatusCode,
    record: &ScheduleRecord,
) -> Result<Response, Problem> {
    let agent = shared.agent_of(record).await?;
    Ok(tagged(status, record, &ScheduleDetail::of(record, &agent, shared.now())))
}

/// An answer with the version of a schedule's definition.
pub fn tagged(status: StatusCode, record: &ScheduleRecord, body: &impl Serialize) -> Response {
    let mut response = json(status, body);
    if let Ok(tag) = HeaderValue::from_str(&tag(record.revision, &record.definition)) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// A schedule for whoever wants to know everything.
#[derive(Serialize, ToSchema)]
struct ScheduleShown {
    #[serde(flatten)]
    detail: ScheduleDetail,
    #[serde(flatten)]
    about: About,
    /// The last ticks that made no run, the newest first; those that fared alike in a row are one.
    skips: Vec<TickResult>,
}

/// Show a schedule
#[utoipa::path(get, path = "/api/v1/schedules/{agent}/{name}", operation_id = "show_schedule", tag = "schedules",
    security(("token" = ["read"])), params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which")),
    responses((status = 200, description = "As it stands", body = ScheduleShown, headers(("ETag" = String, description = "For If-Match")))))]
pub async fn show(
    State(shared): State<Arc<Shared>>,
    actor: Option<Extension<Actor>>,
    named: Named,
) -> Result<Response, Problem> {
    let is_admin = actor.is_none_or(|Extension(actor)| actor.scope >= Scope::Admin);
    let record = shared.schedule(&named.full()).await?;
    let agent = shared.agent_of(&record).await?;
    let skips = shared.store().skips(record.id, None, SKIPS_READ).await?.into_iter();
    let skips: Vec<_> =
        skips.chain(belfry::open_ranges(&record, shared.now())).map(TickResult::skipped).collect();
    let shown = ScheduleShown {
        about: About::of(&record, &agent, is_admin),
        detail: ScheduleDetail::of(&record, &agent, shared.now()),
        skips: skips.into_iter().rev().take(SKIPS_SHOWN).collect(),
    };
    Ok(tagged(StatusCode::OK, &record, &shown))
}
