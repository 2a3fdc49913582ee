//! The ticks of a schedule: those to come, what became of those of the past, and why.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::Decision;
use belfry::api::{List, Why, upcoming};
use belfry_core::check::Status;
use belfry_core::{RunId, SkipRange};
use belfry_store::{RunFilter, ScheduleRecord, TickFate};
use belfry_time::{Shift, SignedDuration, Tick, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::{Named, Params};
use crate::page::{self, Cursor};
use crate::problem::Problem;
use crate::state::Shared;

/// How far back is looked where nothing is said.
const DAY: SignedDuration = SignedDuration::from_hours(24);
/// More ticks to come than this are a mistake.
const NEXT_MAX: u32 = 10_000;
/// Runs of one schedule that are looked at; by default far fewer are kept.
const RUNS_MAX: usize = 10_000;

pub fn router() -> Routes {
    Routes::new().routes(routes!(next)).routes(routes!(why)).routes(routes!(ticks))
}

/// How many.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct NextParams {
    /// How many; 5 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 10000)]
    n: Option<u32>,
    /// After this instant, as if the schedule had ticked then; else those that the planner will find.
    #[param(nullable = false)]
    from: Option<Timestamp>,
}

/// Ticks to come.
#[derive(Serialize, ToSchema)]
struct NextTicks {
    /// The schedule's zone.
    tz: String,
    /// Its timing in plain English.
    words: String,
    /// In order.
    ticks: Vec<LocalTick>,
    /// Why there are none.
    reason: Option<String>,
}

/// A tick in the schedule's zone.
#[derive(Serialize, ToSchema)]
struct LocalTick {
    /// The nominal instant.
    #[schema(format = DateTime)]
    tick_at: String,
    /// With jitter.
    #[schema(format = DateTime)]
    due_at: String,
    /// What a change of clocks did to it.
    shift: Option<ShiftName>,
}

/// What a change of clocks does to a tick.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ShiftName {
    /// It was moved out of a gap.
    Moved,
    /// The first of two.
    FirstPass,
    /// The second of two.
    SecondPass,
}

impl From<Shift> for ShiftName {
    fn from(shift: Shift) -> ShiftName {
        match shift {
            Shift::Moved => ShiftName::Moved,
            Shift::FirstPass => ShiftName::FirstPass,
            Shift::SecondPass => ShiftName::SecondPass,
        }
    }
}

/// The next ticks of a schedule, as the planner will find them
#[utoipa::path(get, path = "/api/v1/schedules/{agent}/{name}/next", operation_id = "next_ticks", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"), NextParams),
    security(("token" = ["read"])), responses((status = 200, description = "In order; none where nothing arms it", body = NextTicks)))]
async fn next(
    State(shared): State<Arc<Shared>>,
    named: Named,
    Params(params): Params<NextParams>,
) -> Result<Response, Problem> {
    let n = params.n.unwrap_or(5);
    if !(1..=NEXT_MAX).contains(&n) {
        return Err(Problem::bad("bad_limit", format!("n must be 1-{NEXT_MAX}, got {n}")).field("n"));
    }
    let record = shared.schedule(&named.full()).await?;
    let timing = record.definition.timing(&record.name);
    let timing = timing.map_err(|error| {
        // Of a definition that cannot be read the status knows more.
        let is_known = matches!(record.status, Status::Invalid { .. });
        Problem::meaningless("invalid", if is_known { nothing(&record) } else { error.to_string() })
    })?;
    let Some(timing) = timing else {
        let detail = format!("{} runs on request only, and never ticks by itself", record.name);
        return Err(Problem::meaningless("never_ticks", detail));
    };
    let timing = record.origin.map_or(timing.clone(), |origin| timing.with_origin(origin));
    let zone = timing.zone().clone();
    let ticks = match params.from {
        Some(from) => timing.ticks(from).take(n as usize).collect(),
        None => upcoming(&record, n as usize),
    };
    let local = |tick: &Tick| LocalTick {
        tick_at: zone.rfc3339(tick.tick_at),
        due_at: zone.rfc3339(tick.due_at),
        shift: timing.shift(tick.tick_at).map(ShiftName::from),
    };
    let answer = NextTicks {
        tz: zone.name().to_owned(),
        words: timing.describe(),
        reason: ticks.is_empty().then(|| nothing(&record)),
        ticks: ticks.iter().map(local).collect(),
    };
    Ok(json(StatusCode::OK, &answer))
}

/// Why a schedule has no tick to come.
fn nothing(record: &ScheduleRecord) -> String {
    let why = match (&record.status, record.waits_for) {
        (Status::Active, Some(run)) => format!(" counts from the end of run {run}, which lives"),
        (Status::Active, None) => " has no tick to come".into(),
        (Status::Paused { .. }, _) => " is paused until it is resumed".into(),
        (Status::Disabled, _) => " is not enabled".into(),
        (Status::Invalid { reason }, _) => format!(" is invalid: {reason}"),
        (Status::Exhausted, _) => match belfry::is_expired(record) {
            true => " never runs: its time had passed when it was first seen".into(),
            false => format!(": {}", belfry::exhausted_words(record)),
        },
    };
    format!("{}{why}", record.name)
}

/// When.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WhyParams {
    /// At this instant instead of now.
    #[param(nullable = false)]
    at: Option<Timestamp>,
}

/// Why a schedule runs or does not, now or at an instant
#[utoipa::path(get, path = "/api/v1/schedules/{agent}/{name}/why", operation_id = "why", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"), WhyParams),
    security(("token" = ["read"])), responses((status = 200, description = "Every check with its words", body = Why)))]
async fn why(
    State(shared): State<Arc<Shared>>,
    named: Named,
    Params(params): Params<WhyParams>,
) -> Result<Response, Problem> {
    let mut answer = shared.done(&named, shared.engine.why(&named.full(), params.at)).await?;
    // The store does not know that: it may be what is short of room.
    if let Some(delay) = answer.run_id.and_then(|run| shared.engine.delayed(run)) {
        answer.words.push_str(&format!(" Its program has not started yet, and is tried again: {delay}."));
    }
    Ok(json(StatusCode::OK, &answer))
}

/// Since when, and how many.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TicksParams {
    /// From this instant on; the last day where nothing is said.
    #[param(nullable = false)]
    from: Option<Timestamp>,
    /// How many; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// What became of a tick, or of several in a row that fared alike.
#[derive(Serialize, ToSchema)]
pub struct TickResult {
    /// The first.
    from: Timestamp,
    /// The last.
    to: Timestamp,
    /// How many.
    count: u64,
    /// `fired`, `skipped` or `missed`.
    decision: Decision,
    /// Why it made no run.
    reason: Option<String>,
    /// The run it made.
    run_id: Option<RunId>,
}

impl TickResult {
    pub fn skipped(range: SkipRange) -> TickResult {
        TickResult {
            from: range.from,
            to: range.to,
            count: range.count,
            decision: Decision::of(range.reason),
            reason: Some(range.reason.as_str().to_owned()),
            run_id: None,
        }
    }
}

/// What became of the ticks of a schedule, the oldest first
///
/// Ticks in a row that fared alike are one item; it may begin before `from`, and end at the present if it still lasts, such
/// as a pause.
#[utoipa::path(get, path = "/api/v1/schedules/{agent}/{name}/ticks", operation_id = "list_ticks", tag = "schedules",
    params(("agent" = String, Path, description = "Whose"), ("name" = String, Path, description = "Which"), TicksParams),
    security(("token" = ["read"])), responses((status = 200, description = "A page", body = List<TickResult>)))]
async fn ticks(
    State(shared): State<Arc<Shared>>,
    named: Named,
    Params(params): Params<TicksParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)? as usize;
    let after = Cursor::tick(params.cursor.as_deref())?;
    let record = shared.schedule(&named.full()).await?;
    let default = || shared.now().checked_sub(DAY).unwrap_or(Timestamp::MIN);
    let from = params.from.unwrap_or_else(default);
    let is_wanted = |item: &TickResult| item.to >= from && after.is_none_or(|after| item.from > after);
    let skips_after =
        after.unwrap_or_else(|| from.checked_sub(SignedDuration::from_micros(1)).unwrap_or(from));
    let skips = shared.store().skips(record.id, Some(skips_after), limit as u32 + 1).await?;
    // One that begins before, and reaches into what is asked for.
    let begun = match shared.store().tick(record.id, from).await? {
        TickFate::Skipped(range) if range.from < from => Some(range),
        _ => None,
    };
    let open = belfry::open_ranges(&record, shared.now());
    let mut items: Vec<TickResult> =
        begun.into_iter().chain(skips).chain(open).map(TickResult::skipped).collect();
    items.extend(fired(&shared, &record, from).await?);
    items.retain(is_wanted);
    items.sort_by_key(|item| item.from);
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(|item| Cursor::Tick(item.from).write());
    Ok(json(StatusCode::OK, &List { items, next }))
}

/// Ticks since an instant that made runs.
async fn fired(
    shared: &Shared,
    record: &ScheduleRecord,
    from: Timestamp,
) -> Result<Vec<TickResult>, Problem> {
    let filter = RunFilter { schedule: Some(record.name.clone()), since: Some(from), ..RunFilter::default() };
    let (mut fired, mut after) = (Vec::new(), None);
    loop {
        let page = shared.store().runs(&filter, after, page::LIMIT_MAX).await?;
        fired.extend(page.items.into_iter().filter_map(|run| {
            run.tick_at.map(|tick| TickResult {
                from: tick,
                to: tick,
                count: 1,
                decision: Decision::Fired,
                reason: None,
                run_id: Some(run.id),
            })
        }));
        after = page.next;
        if after.is_none() || fired.len() >= RUNS_MAX {
            return Ok(fired);
        }
    }
}
