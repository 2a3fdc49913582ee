//! Runs for ticks of the past.
//!
//! A run that is made so carries its tick like any other: the attempt is told of it, `why` and `missing` find it, and a tick
//! lives at most once. That is why only ticks behind the planner are made: what it has still to plan it will, and two runs
//! for one tick would meet.

use belfry_core::check::Status;
use belfry_core::{RunId, TokenKind, Trigger};
use belfry_store::{AnyStore, Enqueue, Enqueued, Key, ScheduleRecord, Store, TickFate};
use belfry_time::{Anchor, Every, Kind, SignedDuration, Tick, Timestamp, Timing};

use crate::driver::Options;
use crate::engine::Engine;
use crate::error::Error;
use crate::ids::new_run_id;
use crate::requests::prepare;
use crate::session::Made;

/// Ticks that are looked at, made or not.
const WALKED_MAX: usize = 100_000;
const MICROSECOND: SignedDuration = SignedDuration::from_micros(1);

/// Which ticks are made up for.
#[derive(Debug, Clone)]
pub struct Backfill {
    /// The first instant.
    pub from: Timestamp,
    /// The end, itself not included.
    pub to: Timestamp,
    /// Only ticks that made no run: skipped, missed, or never planned.
    pub missing: bool,
    /// Makes nothing, and says what it would make.
    pub dry_run: bool,
    /// At most so many, the earliest.
    pub limit: usize,
    /// Makes a repeat answer with the first runs.
    pub key: Option<String>,
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Backfilled {
    /// Ticks with their runs; without, where nothing was to be made.
    pub runs: Vec<(Timestamp, Option<RunId>)>,
    /// Those of these runs that are new; the others were made before, with the same key.
    pub made: Vec<RunId>,
    /// Ticks whose run lives, or where only missing ones were asked for has ended.
    pub left_out: u64,
    /// Ticks beyond the limit.
    pub more: u64,
    /// The first of them: where to go on.
    pub next_from: Option<Timestamp>,
    /// Only up to here: what comes after, the schedule plans by itself, or a resume if it is paused.
    pub cut_at: Option<Timestamp>,
}

impl Engine {
    /// Makes runs for ticks of the past. They wait in the order of their ticks, and are those of today's definition.
    pub async fn backfill(&self, name: &str, request: &Backfill) -> Result<Backfilled, Error> {
        if !request.dry_run {
            self.refuse_while_draining()?;
        }
        let record = self.schedule_state(name).await?;
        let done = backfill(self.store(), self.options(), self.store_now().await?, &record, request).await?;
        for (tick_at, run) in done.runs.iter().filter_map(|(tick, run)| Some((*tick, (*run)?))) {
            if done.made.contains(&run) {
                let made = Made::by(Trigger::Backfill, run, None);
                self.tell_created(name, Made { tick_at: Some(tick_at), ..made });
            }
        }
        self.hint().await;
        Ok(done)
    }
}

async fn backfill(
    store: &AnyStore,
    options: &Options,
    now: Timestamp,
    record: &ScheduleRecord,
    request: &Backfill,
) -> Result<Backfilled, Error> {
    let timing = timing(record, request)?;
    let planned = planned_until(record, now);
    let zone = timing.zone();
    if request.from >= request.to {
        return Err(refused(format!(
            "the start must be before the end, got {} and {}",
            zone.rfc3339(request.from),
            zone.rfc3339(request.to)
        )));
    }
    if let (Status::Paused { .. }, true) = (&record.status, request.from >= planned) {
        return Err(refused(format!(
            "{name} is paused, and its ticks from {} on belong to the pause: `belfry resume {name} --catch-up` plans them \
             by `catch_up`; after `belfry resume {name}` a backfill makes runs for them",
            zone.rfc3339(planned),
            name = record.name,
        )));
    }
    if request.from >= planned {
        return Err(refused(format!(
            "nothing of {} is in the past from {} on: what comes after {} it plans by itself",
            record.name,
            zone.rfc3339(request.from),
            zone.rfc3339(planned)
        )));
    }
    let (from, end) = (request.from, request.to.min(planned));
    let mut done = Backfilled { cut_at: (request.to > planned).then_some(planned), ..Backfilled::default() };
    let mut walked = from;
    for (seen, tick) in ticks(&timing, from, end).enumerate() {
        if done.runs.len() == request.limit || seen == WALKED_MAX {
            done.next_from = Some(tick.tick_at);
            done.more = timing.count_between(walked, earlier(end));
            break;
        }
        walked = tick.tick_at;
        let wanted = match store.tick(record.id, tick.tick_at).await? {
            // A repeat finds the runs of the first time, while they live and after.
            TickFate::Run(run) => (!run.state.is_live() || request.key.is_some()) && !request.missing,
            TickFate::Skipped(_) | TickFate::Open(_) | TickFate::Unknown => true,
        };
        match wanted {
            true => done.runs.push((tick.tick_at, None)),
            false => done.left_out += 1,
        }
    }
    if !request.dry_run {
        make(store, options, now, record, request, &mut done).await?;
    }
    Ok(done)
}

fn refused(detail: String) -> Error {
    Error::Backfill { detail }
}

fn timing(record: &ScheduleRecord, request: &Backfill) -> Result<Timing, Error> {
    let name = &record.name;
    crate::refuse_unreadable(record)?;
    let compiled = record.definition.compile(name);
    let compiled = compiled.map_err(|why| refused(format!("{name} is invalid and has no ticks: {why}")))?;
    let timing = compiled
        .timing
        .ok_or_else(|| refused(format!("{name} runs on request and has no ticks to make up for")))?;
    if request.missing && follows_runs(&timing) {
        return Err(refused(format!(
            "{name} counts from its runs, so no past tick of it is missing. Without `missing` it is counted from the start; \
             `anchor: slot` gives it a grid"
        )));
    }
    // A calendar series that has no first tick yet begins with the first that is asked for.
    let begins = matches!(timing.kind(), Kind::Every { .. }).then_some(request.from);
    Ok(match record.origin.or(begins) {
        Some(origin) => timing.with_origin(origin),
        None => timing,
    })
}

async fn make(
    store: &AnyStore,
    options: &Options,
    now: Timestamp,
    record: &ScheduleRecord,
    request: &Backfill,
    done: &mut Backfilled,
) -> Result<(), Error> {
    let (template, _) = prepare(store, options, now, &record.name).await?;
    let requests: Vec<Enqueue> = done
        .runs
        .iter()
        .enumerate()
        .map(|(place, (tick_at, _))| {
            let run = template.for_past_tick(new_run_id(now), now, *tick_at, place);
            let key = request.key.as_ref().map(|key| Key::new(format!("{key} {tick_at}"), Vec::new(), now));
            Enqueue { run, key }
        })
        .collect();
    let answers = store.enqueue_many(now, &requests).await?;
    let mut kept = Vec::new();
    for ((tick_at, _), (request, answer)) in done.runs.drain(..).zip(requests.iter().zip(answers)) {
        let id = request.run.id;
        match answer {
            Enqueued::Made => {
                done.made.push(id);
                kept.push((tick_at, Some(id)));
            }
            Enqueued::Repeat(first) if request.key.is_some() => kept.push((tick_at, Some(first))),
            // Somebody else makes up for the same ticks.
            Enqueued::Repeat(_) | Enqueued::KeyReused(_) => done.left_out += 1,
            Enqueued::NotFound => return Err(Error::NotFound { name: record.name.clone() }),
        }
    }
    done.runs = kept;
    Ok(())
}

/// The first instant whose ticks are still the planner's. It only moves forward. In a pause it lies before the first tick
/// that the pause has left out, because a resume may catch up from there.
fn planned_until(record: &ScheduleRecord, now: Timestamp) -> Timestamp {
    let after = |at: Timestamp| at.checked_add(MICROSECOND).unwrap_or(at);
    let planned = match (&record.status, record.token) {
        (Status::Paused { .. }, _) => after(record.cursor_at.unwrap_or(record.status_since)),
        // The first tick of an interval is the instant at which it was first seen.
        (_, Some(token))
            if matches!(token.kind, TokenKind::Tick | TokenKind::First | TokenKind::Deferred) =>
        {
            token.tick_at
        }
        (_, Some(token)) => after(token.tick_at),
        (_, None) => record.deferred.as_ref().map_or(now, |deferred| deferred.tick_at),
    };
    planned.min(now)
}

/// Whether ticks count from runs rather than on a grid of their own.
fn follows_runs(timing: &Timing) -> bool {
    matches!(
        timing.kind(),
        Kind::Every { every: Every::Interval(_), anchor: Anchor::Completion | Anchor::Start }
    )
}

/// The ticks from an instant on, up to another that is not included.
fn ticks(timing: &Timing, from: Timestamp, end: Timestamp) -> impl Iterator<Item = Tick> {
    let first = if follows_runs(timing) { timing.first(from) } else { timing.next(earlier(from)) };
    let rest = first.map(|first| timing.ticks(first.tick_at)).into_iter().flatten();
    first.into_iter().chain(rest).take_while(move |tick| tick.tick_at < end)
}

fn earlier(at: Timestamp) -> Timestamp {
    at.checked_sub(MICROSECOND).unwrap_or(at)
}
