//! What people ask of a schedule's standing: the end of a pause by hand, and whether a one-shot still has its time before
//! it.

use belfry_core::check::Status;
use belfry_core::plan::left_out;
use belfry_core::{ScheduleDefinition, SkipRange, SkipReason};
use belfry_store::{AnyStore, ScheduleRecord, Store};
use belfry_time::{Kind, Timestamp};

use crate::error::Error;

/// What became of a pause that was to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumed {
    /// It has ended.
    Now {
        /// Ticks that it left out, on record as skipped.
        skipped: u64,
    },
    /// It had ended by itself, then.
    Before(Timestamp),
    /// There was none.
    NotPaused,
}

/// Ends a pause by hand. What it left out is recorded as skipped, or counts as missed with `catch_up`.
pub async fn resume(
    store: &AnyStore,
    now: Timestamp,
    record: &ScheduleRecord,
    catch_up: bool,
) -> Result<Resumed, Error> {
    // A pause whose end has come is over, also where nobody has planned since: what was due after it is not left out.
    if let Status::Paused { until: Some(until), .. } = record.status
        && until <= now
    {
        return Ok(Resumed::Before(until));
    }
    let skipped = skipped(record, now).filter(|_| !catch_up);
    Ok(match store.resume(now, record.id, catch_up, skipped).await? {
        true => Resumed::Now { skipped: skipped.map_or(0, |range| range.count) },
        false => Resumed::NotPaused,
    })
}

/// What the pause has left out; the same that the end of a pause by the clock records.
fn skipped(record: &ScheduleRecord, now: Timestamp) -> Option<SkipRange> {
    if !matches!(record.status, Status::Paused { .. }) {
        return None;
    }
    let timing = crate::api::timing_of(record)?;
    left_out(&timing, SkipReason::Disabled, record.status_since, now)
}

/// Why a one-shot would never run, where its time has passed.
pub fn past_words(name: &str, definition: &ScheduleDefinition, now: Timestamp) -> Option<String> {
    let schedule = definition.compile(name).ok()?;
    let timing = schedule.timing.as_ref().filter(|_| schedule.is_one_shot())?;
    let at = match timing.kind() {
        Kind::At(at) if *at < now => *at,
        _ => return None,
    };
    let zone = timing.zone();
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    Some(format!(
        "{name} would never run: its time {} has passed, it is {}",
        zone.rfc3339(at),
        zone.rfc3339(now)
    ))
}
