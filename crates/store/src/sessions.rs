//! What goes into the verbs of sessions and lanes, and what comes out.

use belfry_core::input::StoredPayload;
use belfry_core::session::{MESSAGE_KEYS, Message, Policy, Session, Usage};
use belfry_core::{RunId, ScheduleId, Trigger};
use belfry_time::Timestamp;
use serde_json::{Map, Value, json};

use crate::shapes::{Claimed, Key, NewRun, RunRecord};

/// A message for a session.
#[derive(Debug, Clone, PartialEq)]
pub struct NewMessage {
    /// The run that it opens, should it open one. Its payload is what the message brings beside its text;
    /// [`MESSAGE_KEYS`] in it are left out.
    pub run: NewRun,
    /// Which session of the run's schedule.
    pub session: String,
    /// What it says.
    pub text: String,
    /// What it asks of the session.
    pub message: Message,
    /// How the session behaves.
    pub policy: Policy,
    /// Makes a repeat answer with the first run.
    pub key: Option<Key>,
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sent {
    /// It is in a run.
    Taken {
        /// Which: its own, or one that was open.
        run: RunId,
        /// Its number in the session.
        seq: i64,
        /// The generation of the session.
        generation: i64,
        /// Whether the run was open already.
        joined: bool,
        /// Runs that waited and have ended for it.
        ended: Vec<RunId>,
        /// Runs that run and are to be cancelled for it.
        told: Vec<RunId>,
    },
    /// It was older than a stop or a reset of the session. Its run is there, and has ended so.
    Stale {
        /// The run.
        run: RunId,
        /// The generation of the session.
        generation: i64,
    },
    /// Too many runs wait, and it was not taken.
    Full,
    /// It was taken before, with the same key, in this run.
    Repeat(RunId),
    /// The key was used with another body.
    KeyReused(RunId),
    /// There is no such schedule.
    NotFound,
    /// The schedule is paused, disabled or invalid.
    Disabled,
}

/// What can be done to a session as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionVerb {
    /// Cancel the oldest run that has its turn.
    Stop,
    /// Cancel all that runs, end all that waits; what was sent before is stale.
    StopAll,
    /// Begin a new generation: what waits ends stale, what runs is none of the session's business any more.
    Reset,
    /// Take down how much of its context window is used.
    Use(Usage),
}

impl SessionVerb {
    /// What a message asks for, if its text is a command.
    pub fn of_text(text: &str) -> Option<SessionVerb> {
        match text.trim() {
            "/stop" => Some(SessionVerb::Stop),
            "/stopall" => Some(SessionVerb::StopAll),
            _ => None,
        }
    }
}

/// What a verb did to a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionDone {
    /// The generation of the session.
    pub generation: i64,
    /// Runs that waited and have ended.
    pub ended: Vec<RunId>,
    /// Runs that run and are to be cancelled.
    pub told: Vec<RunId>,
}

/// Which sessions to list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionFilter {
    /// Those of this agent.
    pub agent: Option<String>,
    /// Those of this schedule, `agent/schedule`.
    pub schedule: Option<String>,
    /// The one with this key.
    pub key: Option<String>,
}

impl SessionFilter {
    pub(crate) fn takes(&self, record: &SessionRecord) -> bool {
        let agent = record.name.split('/').next();
        self.agent.as_deref().is_none_or(|wanted| agent == Some(wanted))
            && self.schedule.as_ref().is_none_or(|schedule| *schedule == record.name)
            && self.key.as_ref().is_none_or(|key| *key == record.key)
    }
}

/// A session as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRecord {
    /// Which; grows with each new one.
    pub id: i64,
    /// Of which schedule.
    pub schedule: ScheduleId,
    /// `agent/schedule`.
    pub name: String,
    /// Its key.
    pub key: String,
    /// What is kept of it.
    pub session: Session,
    /// Its runs that are running.
    pub active: u32,
    /// Its runs that wait.
    pub queued: u32,
    /// When it was last spoken to.
    pub used_at: Timestamp,
}

impl NewMessage {
    /// What the session's line needs to know of it.
    pub(crate) fn in_line(&self) -> Message {
        let text = Value::from(self.text.as_str()).to_string().len();
        let bytes = text + self.run.payload.to_string().len() + MESSAGE_BYTES;
        Message { bytes: bytes as u64, ..self.message }
    }
}

/// Maximum of what a message takes in a payload beside its text: its number, its instants, and the names of the keys.
const MESSAGE_BYTES: usize = 128;

/// The payload that is stored for a run that a message opens.
pub(crate) fn first_payload(now: Timestamp, seq: i64, new: &NewMessage) -> Value {
    let mut payload = Value::Object(Map::new());
    add_message(&mut payload, now, seq, new);
    payload
}

/// Adds a message to the payload that is stored for its run, in `messages`.
pub(crate) fn add_message(payload: &mut Value, now: Timestamp, seq: i64, new: &NewMessage) {
    if !payload.is_object() {
        *payload = Value::Object(Map::new());
    }
    let Value::Object(map) = payload else { return };
    if let Value::Object(own) = &new.run.payload {
        let own = own.iter().filter(|(key, _)| !MESSAGE_KEYS.contains(&key.as_str()));
        map.extend(own.map(|(key, value)| (key.clone(), value.clone())));
    }
    map.insert("session".into(), new.session.clone().into());
    let mut message = json!({"seq": seq, "text": new.text, "received_at": now.to_string()});
    if let Some(at) = new.message.sent_at {
        message["sent_at"] = at.to_string().into();
    }
    match map.entry("messages").or_insert_with(|| json!([])) {
        Value::Array(messages) => messages.push(message),
        other => *other = json!([message]),
    }
}

/// What is stored of a run's payload and trigger, and what of it cannot be read. A payload that cannot is null.
pub(crate) fn read_given(trigger_code: i16, payload: &[u8]) -> (Trigger, Value, Option<String>) {
    let (trigger, unknown) = read_trigger(trigger_code);
    match StoredPayload::new(trigger, payload).read() {
        Ok(Value::Null) => (trigger, Value::Object(Map::new()), unknown),
        Ok(payload) => (trigger, payload, unknown),
        Err(wrong) => (trigger, Value::Null, Some(wrong)),
    }
}

/// What is stored of a run's trigger, and what of it cannot be read.
pub(crate) fn read_trigger(code: i16) -> (Trigger, Option<String>) {
    match Trigger::from_code(code) {
        Some(trigger) => (trigger, None),
        None => (Trigger::Manual, Some(format!("its stored trigger {code} is not known"))),
    }
}

/// The session of a run, by what made it and what it is given.
pub(crate) fn session_of(trigger: Trigger, payload: &Value) -> Option<&str> {
    (trigger == Trigger::Message).then(|| payload.get("session")?.as_str()).flatten()
}

impl RunRecord {
    /// The key of its session, if it is of one.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// The record as lists show it.
    pub(crate) fn listed(self) -> RunRecord {
        RunRecord { prompt: None, payload: Value::Object(Map::new()), ..self }
    }
}

impl Claimed {
    /// The key of its session, if it is of one.
    pub fn session(&self) -> Option<String> {
        self.payload.session()
    }
}

/// What a lane may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneSettings {
    /// Runs at once, on each node.
    pub slots: u32,
    /// Runs at once, over all nodes; none is no limit.
    pub limit: Option<u32>,
    /// Ticks wait while so many of its runs wait; none is no limit.
    pub queue_limit: Option<u32>,
}

/// A lane as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneRecord {
    /// Its name.
    pub name: String,
    /// What the files say.
    pub file: Option<LaneSettings>,
    /// What was said since; it holds.
    pub set: Option<LaneSettings>,
    /// Its runs that are running, over all nodes.
    pub active: u32,
    /// Its runs that wait and are due.
    pub pending: u32,
    /// Since when the oldest of them is due.
    pub oldest_pending: Option<Timestamp>,
    /// Where it has a `queue_limit`: its runs that take a place of that.
    pub queued: Option<u32>,
}

impl LaneRecord {
    /// A lane of which nothing is known but its name.
    pub(crate) fn blank(name: &str) -> LaneRecord {
        LaneRecord {
            name: name.to_owned(),
            file: None,
            set: None,
            active: 0,
            pending: 0,
            oldest_pending: None,
            queued: None,
        }
    }

    /// Whether it has a `queue_limit`.
    pub(crate) fn is_queue_limited(&self) -> bool {
        self.settings().is_some_and(|settings| settings.queue_limit.is_some())
    }

    /// What holds: none where the lane was never made, and only runs know of it.
    pub fn settings(&self) -> Option<LaneSettings> {
        self.set.or(self.file)
    }
}
