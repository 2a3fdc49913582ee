//! Lanes: what they hold, and changing that at run time.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use belfry::api::{Lane, List};
use belfry::{LaneRecord, LaneSettings, RunId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::audit;
use crate::extract::{self, Object, Segment};
use crate::problem::Problem;
use crate::state::Shared;

/// More slots than this are a mistake.
const SLOTS_MAX: u32 = 1_000_000;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list)).routes(routes!(change)).routes(routes!(clear))
}

/// List the lanes, with what they do
#[utoipa::path(get, path = "/api/v1/lanes", operation_id = "list_lanes", tag = "lanes", security(("token" = ["read"])),
    responses((status = 200, description = "All of them", body = List<Lane>)))]
async fn list(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let now = shared.now();
    let lanes = shared.engine.lanes().await?;
    Ok(json(StatusCode::OK, &List::whole(lanes.iter().map(|lane| Lane::of(lane, now)).collect())))
}

async fn find(shared: &Shared, name: &str) -> Result<Option<LaneRecord>, Problem> {
    Ok(shared.engine.lanes().await?.into_iter().find(|lane| lane.name == name))
}

/// What a lane may hold; what is not named stays as it is.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct LaneBody {
    /// Runs at once, on each node.
    #[serde(default, deserialize_with = "said")]
    #[schema(minimum = 1, maximum = 1000000, nullable = false)]
    slots: Option<u32>,
    /// Runs at once, over all nodes; null is no limit.
    #[serde(default, deserialize_with = "said")]
    #[schema(minimum = 1, maximum = 1000000)]
    limit: Option<Option<u32>>,
    /// Ticks wait while so many of its runs wait; null is no limit.
    #[serde(default, deserialize_with = "said")]
    #[schema(minimum = 1, maximum = 1000000)]
    queue_limit: Option<Option<u32>>,
    /// Again what the files say.
    #[serde(default)]
    reset: bool,
}

/// Tells null from nothing.
fn said<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Make a lane, or make it hold something else than the files say, on all nodes within a second
#[utoipa::path(patch, path = "/api/v1/lanes/{name}", operation_id = "change_lane", tag = "lanes", security(("token" = ["manage"])),
    params(("name" = String, Path, description = "Which")), request_body(content = LaneBody),
    responses(
        (status = 200, description = "As it stands", body = Lane),
        (status = 204, description = "The files know it not: it is gone"),
    ))]
async fn change(
    State(shared): State<Arc<Shared>>,
    Segment(name): Segment,
    Object(body): Object,
) -> Result<Response, Problem> {
    let body: LaneBody = extract::read(body)?;
    let fits = |number: u32| (1..=SLOTS_MAX).contains(&number);
    let numbers =
        [("slots", body.slots), ("limit", body.limit.flatten()), ("queue_limit", body.queue_limit.flatten())];
    if let Some((field, _)) = numbers.iter().find(|(_, number)| number.is_some_and(|number| !fits(number))) {
        let detail = format!("{field} must be 1-{SLOTS_MAX}");
        return Err(Problem::bad("bad_field", detail).field(*field));
    }
    if !body.reset && body.slots.is_none() && body.limit.is_none() && body.queue_limit.is_none() {
        return Err(Problem::meaningless("nothing_to_change", "the body names nothing to change")
            .way_out("name slots, limit or queue_limit, or reset"));
    }
    let before = find(&shared, &name).await?.and_then(|lane| lane.settings());
    let settings = match (body.reset, before) {
        (true, Some(_)) => None,
        (true, None) => return Err(Problem::not_found(format!("there is no lane {name}"))),
        (false, None) if body.slots.is_none() => {
            return Err(
                Problem::not_found(format!("there is no lane {name}")).way_out("name its slots to make it")
            );
        }
        (false, before) => {
            if !belfry::is_lane_name(&name) {
                let detail =
                    "the name of a lane has letters, digits, `-`, `_` and `.`, and at most 64 of them";
                return Err(Problem::meaningless("bad_name", detail).field("name"));
            }
            let before = before.unwrap_or(LaneSettings { slots: 1, limit: None, queue_limit: None });
            Some(LaneSettings {
                slots: body.slots.unwrap_or(before.slots),
                limit: body.limit.unwrap_or(before.limit),
                queue_limit: body.queue_limit.unwrap_or(before.queue_limit),
            })
        }
    };
    shared.engine.set_lane(&name, settings).await?;
    Ok(match find(&shared, &name).await? {
        Some(lane) => json(StatusCode::OK, &Lane::of(&lane, shared.now())),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

/// What was cleared.
#[derive(Serialize, ToSchema)]
struct Cleared {
    /// Which lane.
    lane: String,
    /// Runs that waited in it and have ended, cancelled.
    ended: Vec<RunId>,
}

/// End all runs that wait in a lane
#[utoipa::path(post, path = "/api/v1/lanes/{name}/clear", operation_id = "clear_lane", tag = "lanes", security(("token" = ["manage"])),
    params(("name" = String, Path, description = "Which")),
    responses((status = 200, description = "What has ended", body = Cleared)))]
async fn clear(State(shared): State<Arc<Shared>>, Segment(name): Segment) -> Result<Response, Problem> {
    find(&shared, &name).await?.ok_or_else(|| {
        Problem::not_found(format!("there is no lane {name}")).way_out("GET /api/v1/lanes lists them")
    })?;
    let ended = shared.engine.clear_lane(&name).await?;
    audit::made(!ended.is_empty());
    Ok(json(StatusCode::OK, &Cleared { lane: name, ended }))
}
