//! Commands on a schedule's standing, pause and resume, and what is said of it.

use belfry_core::check::Status;
pub use belfry_core::edit::Resume;
use belfry_core::edit::{self, NeverFired};
use belfry_core::{RunId, ScheduleDefinition, SkipRange};
use belfry_store::{ScheduleRecord, Store};
use belfry_time::{Kind, Timestamp};

use crate::engine::Engine;
use crate::error::Error;
use crate::event::{Event, Level, Name};

/// The longest reason of a pause, in bytes.
pub(crate) const REASON_MAX: usize = 1000;

/// What became of a pause that was to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resumed {
    /// It has ended, or the schedule no longer waits for the clock.
    Now {
        /// Ticks that it left out, on record as skipped.
        skipped: u64,
    },
    /// It had ended by itself, then.
    Before(Timestamp),
    /// There was none.
    NotPaused,
    /// The schedule cannot tick from now on, because a run of a later tick lives.
    Lives(RunId),
}

/// Refuses to change or use a schedule that this version cannot read.
pub fn refuse_unreadable(record: &ScheduleRecord) -> Result<(), Error> {
    match &record.unreadable {
        Some(why) => Err(Error::Unreadable { name: record.name.clone(), why: why.clone() }),
        None => Ok(()),
    }
}

impl Engine {
    /// Pauses a schedule, until an instant if one is given: its ticks make no runs, what runs goes on. Another pause takes the
    /// place of the first. Gives whether it was not paused like that before.
    pub async fn pause(
        &self,
        name: &str,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Result<bool, Error> {
        if reason.is_some_and(|reason| reason.len() > REASON_MAX) {
            let detail = format!("a reason is at most {REASON_MAX} bytes");
            return Err(Error::Argument { field: "reason", detail });
        }
        let now = self.store_now().await?;
        let until = until.map(|until| Timestamp::from_microsecond(until.as_microsecond()).unwrap_or(until));
        if until.is_some_and(|until| until <= now) {
            let detail = format!("a pause must end in the future, and it is {now}");
            return Err(Error::Past { field: "until", detail });
        }
        let record = self.schedule_state(name).await?;
        refuse_unreadable(&record)?;
        let is_news = self.store().pause(now, record.id, reason, until).await?;
        if is_news {
            self.tell(Event::new(now, Level::Info, Name::SchedulePaused).of(name));
            self.hint().await;
        } else if let Some(why) = why_not_paused(&self.schedule_state(name).await?) {
            return Err(Error::NotPaused { name: name.to_owned(), why });
        }
        Ok(is_news)
    }

    /// Ends a pause by hand. What it left out is recorded as skipped, or planned by `catch_up`. With [`Resume::FromNow`] also
    /// a schedule goes on that waits for the clock, which was set back.
    pub async fn resume(&self, name: &str, how: Resume) -> Result<Resumed, Error> {
        let record = self.schedule_state(name).await?;
        let now = self.store_now().await?;
        let resumed = resume(&**self.store(), now, &record, how).await?;
        if let Resumed::Now { .. } = resumed {
            self.tell(Event::new(now, Level::Info, Name::ScheduleResumed).of(name));
            self.hint().await;
        }
        Ok(resumed)
    }
}

fn why_not_paused(record: &ScheduleRecord) -> Option<&'static str> {
    match record.status {
        Status::Paused { .. } => None,
        Status::Active => Some("it has changed meanwhile"),
        Status::Disabled => Some("it is disabled, `enabled: false`"),
        Status::Invalid { .. } => Some("it is invalid and does not tick"),
        Status::Exhausted => Some("it has no tick to come"),
    }
}

/// Ends a pause by hand. What it left out is recorded as skipped, or planned by `catch_up`. With [`Resume::FromNow`] also
/// a schedule goes on that waits for the clock, which was set back.
pub async fn resume(
    store: &impl Store,
    now: Timestamp,
    record: &ScheduleRecord,
    how: Resume,
) -> Result<Resumed, Error> {
    refuse_unreadable(record)?;
    // A pause whose end has come is over, also where nobody has planned since: what was due after it is not left out.
    if let Status::Paused { until: Some(until), .. } = record.status
        && until <= now
        && how != Resume::FromNow
    {
        return Ok(Resumed::Before(until));
    }
    if how == Resume::FromNow {
        // The same tick again would be a second run of it beside the first.
        let live = store.live_runs().await?;
        let later = live.iter().find(|run| run.schedule == record.id && run.tick_at > Some(now));
        if let Some(run) = later {
            return Ok(Resumed::Lives(run.id));
        }
    }
    let resumed = store.resume(now, record.id, how).await?;
    Ok(resumed.map_or(Resumed::NotPaused, |skipped| Resumed::Now { skipped }))
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

/// Whether a schedule is a one-shot that never had a tick: its time had passed when it was first seen.
pub fn is_expired(record: &ScheduleRecord) -> bool {
    never_fired(record) == Some(NeverFired::TimePassed)
}

/// Why a one-shot is exhausted that never had a tick. None of any other schedule.
fn never_fired(record: &ScheduleRecord) -> Option<NeverFired> {
    if record.status != Status::Exhausted {
        return None;
    }
    edit::never_fired(&record.definition.compile(&record.name).ok()?, &record.found())
}

/// Why a one-shot never runs, in words. None of any other schedule.
pub(crate) fn never_fired_words(record: &ScheduleRecord) -> Option<String> {
    Some(match never_fired(record)? {
        NeverFired::TimePassed => crate::api::EXPIRED.to_owned(),
        NeverFired::ClockBack { planned_at } => format!(
            "the clock was set back, and its time is not after the last planned tick, {planned_at}; \
             `belfry resume --from-now` lets it run if its time is still to come"
        ),
    })
}

/// What is said of a schedule that has no tick to come.
pub fn exhausted_words(record: &ScheduleRecord) -> String {
    if let Some(words) = never_fired_words(record) {
        return words;
    }
    let is_used = record.last.is_some() || record.running + record.pending > 0;
    let words = match &record.last {
        Some(last) if last.tick_at.is_some() => "it has fired for the last time",
        _ if is_used => "its last tick has passed",
        _ => "its last tick has passed, and made no run",
    };
    words.to_owned()
}

/// Ticks that a schedule leaves out and still counts: those that fare alike in a row, and those of a pause, of `enabled:
/// false` or of a wrong definition that lasts.
pub fn open_ranges(record: &ScheduleRecord, now: Timestamp) -> Vec<SkipRange> {
    let compiled = record.definition.compile(&record.name);
    let compiled = compiled.as_ref().map_err(|_| "");
    record.open_skip.into_iter().chain(edit::unarmed(&record.found(), compiled, now)).collect()
}

/// When a schedule goes on whose ticks lie ahead of the clock, because that was set back. None if it does not wait for
/// that.
pub fn clock_back(record: &ScheduleRecord, now: Timestamp) -> Option<Timestamp> {
    edit::clock_back(&record.found(), &record.definition.compile(&record.name).ok()?, now)
}
