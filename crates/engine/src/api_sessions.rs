//! Lanes and sessions as the API and `-o json` show them.

use belfry_core::definition::When;
use belfry_core::session::{DropPolicy, Mode, Policy};
use belfry_store::{LaneRecord, ScheduleRecord, SessionRecord};
use belfry_time::Timestamp;
use serde::{Deserialize, Serialize};

/// A pool of slots.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// Runs at once, on each node; none where nobody has made it.
    pub slots: Option<u32>,
    /// Runs at once, over all nodes.
    pub limit: Option<u32>,
    /// Ticks wait while so many of its runs wait.
    pub queue_limit: Option<u32>,
    /// Whether that was said at run time, and not in a file.
    pub set: bool,
    /// Its runs that are running.
    pub active: u32,
    /// Its runs that are due and wait.
    pub pending: u32,
    /// How long the oldest of them has waited.
    pub oldest_pending_ms: Option<u64>,
}

impl Lane {
    /// A lane as it stands.
    pub fn of(record: &LaneRecord, now: Timestamp) -> Lane {
        let settings = record.settings();
        let waited = |since: Timestamp| now.duration_since(since).as_millis().max(0) as u64;
        Lane {
            name: record.name.clone(),
            slots: settings.map(|settings| settings.slots),
            limit: settings.and_then(|settings| settings.limit),
            queue_limit: settings.and_then(|settings| settings.queue_limit),
            set: record.set.is_some(),
            active: record.active,
            pending: record.pending,
            oldest_pending_ms: record.oldest_pending.map(waited),
        }
    }
}

/// A session of a chat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Session {
    /// Whose.
    pub agent: String,
    /// Of which chat.
    pub schedule: String,
    /// Its key.
    pub key: String,
    /// What a message does while a run lives.
    pub mode: Mode,
    /// How many runs may wait.
    pub cap: u32,
    /// Which one goes when more do.
    pub drop: DropPolicy,
    /// Messages closer together than this are one run.
    pub debounce_ms: u64,
    /// How many runs may be running at once, now.
    pub max_concurrent: u32,
    /// Its runs that are running.
    pub active: u32,
    /// Its runs that wait.
    pub queued: u32,
    /// Grows with each reset.
    pub generation: i64,
    /// Tokens of its history.
    pub tokens: Option<u64>,
    /// Tokens that fit.
    pub context_window: Option<u64>,
    /// When it was last spoken to.
    pub used_at: Timestamp,
}

impl Session {
    /// A session as it stands, of a chat as it is now.
    pub fn of(record: &SessionRecord, schedule: Option<&ScheduleRecord>) -> Session {
        let policy = match schedule.map(|schedule| &schedule.definition.when) {
            Some(When::Chat(value)) => Policy::parse(value).unwrap_or_default(),
            _ => Policy::default(),
        };
        let (agent, schedule) = record.name.split_once('/').unwrap_or((&record.name, ""));
        Session {
            agent: agent.to_owned(),
            schedule: schedule.to_owned(),
            key: record.key.clone(),
            mode: policy.mode,
            cap: policy.cap,
            drop: policy.drop,
            debounce_ms: policy.debounce.as_millis().max(0) as u64,
            max_concurrent: record.session.concurrency(&policy),
            active: record.active,
            queued: record.queued,
            generation: record.session.generation,
            tokens: record.session.usage.map(|usage| usage.tokens),
            context_window: record.session.usage.map(|usage| usage.context_window),
            used_at: record.used_at,
        }
    }
}
