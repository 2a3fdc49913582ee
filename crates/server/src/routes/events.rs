//! What happens, as it happens.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::Response;
use belfry::event::Name;
use belfry_core::suggest::nearest;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::routes;

use super::Routes;
use crate::extract::Params;
use crate::guard::Actor;
use crate::problem::Problem;
use crate::readers::Seat;
use crate::ring::About;
use crate::state::{Shared, ended};
use crate::stream::{self, BREATH, Left, ServerEvent, Sink};

/// Events within this time go out together.
const TOGETHER: Duration = Duration::from_millis(50);
/// Pieces that may wait for a reader, and about how long each is.
const WAITING_MAX: usize = 4;
const PIECE_BYTES: usize = 64 << 10;
/// Events that are taken from the ring at once.
const BATCH: usize = 256;

pub fn router() -> Routes {
    Routes::new().routes(routes!(events))
}

/// Which events.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventParams {
    /// About this agent.
    #[param(nullable = false)]
    agent: Option<String>,
    /// About this schedule.
    #[param(nullable = false)]
    schedule: Option<String>,
    /// With one of these names, with commas between them: `run_started,run_finished`.
    #[param(nullable = false)]
    event: Option<String>,
    /// About this run.
    #[param(nullable = false)]
    run: Option<belfry_core::RunId>,
}

impl EventParams {
    /// Refuses a name that no event has: nothing would ever come.
    fn check(&self) -> Result<(), Problem> {
        for name in self.event.iter().flat_map(|names| names.split(',')).map(str::trim) {
            let known = || Name::ALL.iter().map(|known| known.as_str());
            if !known().any(|known| known == name) {
                let meant = nearest(name, known())
                    .map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"));
                return Err(
                    Problem::bad("bad_query", format!("there is no event `{name}`{meant}")).field("event")
                );
            }
        }
        Ok(())
    }

    fn takes(&self, about: &About) -> bool {
        self.agent.as_ref().is_none_or(|agent| about.agent.as_ref() == Some(agent))
            && self.schedule.as_ref().is_none_or(|schedule| about.schedule.as_ref() == Some(schedule))
            && self.run.is_none_or(|run| about.run_id == Some(run))
            && self.event.as_ref().is_none_or(|names| names.split(',').any(|one| one.trim() == about.event))
    }
}

/// Listen to what happens, on whichever node
///
/// Server-sent events with the names and keys of the log, and with the `node` that tells it. `Last-Event-ID` goes on behind an event; where some of what
/// follows it is no longer known, the first event is `gap`. A reader that is too slow is left, and may come back.
#[utoipa::path(get, path = "/api/v1/events", operation_id = "events", tag = "events", security(("token" = ["read"])),
    params(EventParams, ("Last-Event-ID" = Option<String>, Header, description = "Go on behind this one", nullable = false)),
    responses((status = 200, description = "Events, until somebody leaves", body = ServerEvent, content_type = "text/event-stream")))]
async fn events(
    State(shared): State<Arc<Shared>>,
    Extension(actor): Extension<Actor>,
    headers: HeaderMap,
    Params(params): Params<EventParams>,
) -> Result<Response, Problem> {
    params.check()?;
    let (seat, place) = shared.readers.listen(&actor)?;
    shared.came.notify_one();
    let last = headers.get("last-event-id").map(|id| id.to_str().unwrap_or_default());
    let from = match last {
        None => From::Now,
        Some(id) => shared.ring.number(id).map_or(From::Unknown, From::Behind),
    };
    let (sink, response) = stream::events(WAITING_MAX, shared.limits.take_within, place);
    tokio::spawn(async move {
        // Whoever leaves has left.
        let _ = pass_on(shared, from, params, sink, seat).await;
    });
    Ok(response)
}

/// Where a reader begins.
enum From {
    Now,
    Behind(u64),
    /// It has seen what we know nothing of.
    Unknown,
}

async fn pass_on(
    shared: Arc<Shared>,
    from: From,
    params: EventParams,
    sink: Sink,
    seat: Seat,
) -> Result<(), Left> {
    let (mut news, mut ending) = (shared.ring.watch(), shared.ending.subscribe());
    let (mut at, unknown) = match from {
        From::Now => (shared.ring.last(), false),
        From::Behind(number) => (number, false),
        From::Unknown => (shared.ring.last(), true),
    };
    // Its first bytes tell a reader that it listens.
    sink.breathe().await?;
    if unknown {
        gap(&shared, &sink, at).await?;
    }
    loop {
        news.borrow_and_update();
        let behind = shared.ring.behind(at, BATCH);
        if let Some(number) = behind.gap {
            gap(&shared, &sink, number).await?;
        }
        // Not what is the last by now: more may have come while the reader took the gap.
        at = behind.end(at);
        let mut frames = String::new();
        for told in behind.events.iter().filter(|told| params.takes(&told.about)) {
            frames.push_str(&told.frame);
            if frames.len() >= PIECE_BYTES {
                sink.put(std::mem::take(&mut frames)).await?;
            }
        }
        if !frames.is_empty() {
            sink.put(frames).await?;
        }
        if !behind.events.is_empty() {
            // What comes meanwhile goes out together: a write for each event and reader would cost more than the events.
            if behind.events.len() < BATCH {
                tokio::time::sleep(TOGETHER).await;
            }
            continue;
        }
        tokio::select! {
            _ = news.changed() => {}
            () = tokio::time::sleep(BREATH) => sink.breathe().await?,
            () = sink.left() => break,
            () = ended(&mut ending) => break,
        }
    }
    drop(seat);
    Ok(())
}

/// Something between is no longer known: whoever needs it looks at the lists.
async fn gap(shared: &Shared, sink: &Sink, number: u64) -> Result<(), Left> {
    sink.send(Some(&shared.ring.id(number)), "gap", "{}").await
}
