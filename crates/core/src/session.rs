//! Sessions: what becomes of a message, whose turn it is, and what a stop ends.
//!
//! A session's live runs stand in a line, by the number of their first message. The first few of the line have their
//! turn: as many as may run at once. A run keeps its place until it has ended, also while it waits for its next attempt.
//! Lanes and agents have their limits beside; they never change the line.

use belfry_time::{SignedDuration, Timestamp, parse_duration};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::model::{Reason, RunId};
use crate::size::parse_size;

/// The longest that messages keep a run from starting, in debounce windows.
const WINDOWS_MAX: i32 = 5;
/// From which part of its context window on a session runs one at a time, in percent.
const THROTTLE_PERCENT: u128 = 60;

/// Keys of a chat run's payload that Belfry writes. Values from senders and definitions for them are refused or left out.
pub const MESSAGE_KEYS: [&str; 3] = ["messages", "session", "text"];

/// The first of [`MESSAGE_KEYS`] in a payload for a chat, which makes it wrong.
pub fn message_key_in(payload: &Map<String, Value>) -> Option<&'static str> {
    MESSAGE_KEYS.into_iter().find(|key| payload.contains_key(*key))
}

/// Says what is wrong with a payload for a chat that has one of [`MESSAGE_KEYS`].
pub fn message_key_words(key: &str) -> String {
    let [first, second, third] = MESSAGE_KEYS;
    format!(
        "the payload for a chat must not have the key `{key}`: Belfry writes `{first}`, `{second}` and `{third}` there \
         itself. Use another name for the key"
    )
}

/// What a message does while a run lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Mode {
    /// It waits its turn.
    Queue,
    /// The same, said of a follow-up.
    Followup,
    /// It takes the place of all that runs and waits.
    Interrupt,
}

/// Which run goes when too many wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum DropPolicy {
    /// The one that has waited longest.
    Old,
    /// The new one is refused.
    New,
}

/// `chat`: how the sessions of a schedule behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// What a message does while a run lives.
    pub mode: Mode,
    /// Which run goes when too many wait.
    pub drop: DropPolicy,
    /// How many runs may wait.
    pub cap: u32,
    /// Messages closer together than this are one run.
    pub debounce: SignedDuration,
    /// How many runs of a session may be running at once.
    pub max_concurrent: u32,
    /// A message that would make a run larger than this opens another. A larger message has a run of its own.
    pub max_bytes: u64,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            mode: Mode::Queue,
            drop: DropPolicy::Old,
            cap: 10,
            debounce: SignedDuration::from_millis(800),
            max_concurrent: 1,
            max_bytes: 1 << 20,
        }
    }
}

impl Policy {
    /// Reads what a schedule has under `chat`. The error is for people.
    pub fn parse(value: &Value) -> Result<Policy, String> {
        let normal = Policy::default();
        let word = |key: &str| value.get(key).and_then(Value::as_str);
        let wrong = |key: &str, way_out: &str| Err(format!("chat.{key}: {}: {way_out}", value[key]));
        let count = |key: &str, default: u32| match value.get(key) {
            None => Ok(default),
            Some(number) => match number.as_u64().and_then(|number| u32::try_from(number).ok()) {
                Some(number) if number > 0 => Ok(number),
                _ => wrong(key, "write a whole number from 1 on").map(|()| default),
            },
        };
        Ok(Policy {
            mode: match (word("mode"), value.get("mode")) {
                (_, None) => normal.mode,
                (Some("queue"), _) => Mode::Queue,
                (Some("followup"), _) => Mode::Followup,
                (Some("interrupt"), _) => Mode::Interrupt,
                _ => return wrong("mode", "write queue, followup or interrupt").map(|()| normal),
            },
            drop: match (word("drop"), value.get("drop")) {
                (_, None) => normal.drop,
                (Some("old"), _) => DropPolicy::Old,
                (Some("new"), _) => DropPolicy::New,
                _ => return wrong("drop", "write old or new").map(|()| normal),
            },
            cap: count("cap", normal.cap)?,
            debounce: match (word("debounce"), value.get("debounce")) {
                (_, None) => normal.debounce,
                (Some(text), _) => parse_duration(text).map_err(|error| format!("chat.debounce: {error}"))?,
                _ => return wrong("debounce", "write a duration such as 800ms").map(|()| normal),
            },
            max_concurrent: count("max_concurrent", normal.max_concurrent)?,
            max_bytes: match value.get("max_bytes") {
                None => normal.max_bytes,
                Some(size) => {
                    match parse_size(&size.as_str().map_or_else(|| size.to_string(), str::to_owned)) {
                        Some(bytes) => bytes,
                        None => {
                            return wrong("max_bytes", "write a size such as 1MiB, from 1KiB to 1GiB")
                                .map(|()| normal);
                        }
                    }
                }
            },
        })
    }
}

/// How much of its context window a session has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of its history.
    pub tokens: u64,
    /// Tokens that fit.
    pub context_window: u64,
}

/// What an attempt says that it used.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RunUsage {
    /// LLM tokens in its context.
    pub tokens: Option<u64>,
    /// How many fit.
    pub context_window: Option<u64>,
    /// What it cost.
    pub cost_usd: Option<f64>,
}

impl RunUsage {
    /// How much of the context window of its session is used.
    pub fn of_session(self) -> Option<Usage> {
        Some(Usage { tokens: self.tokens?, context_window: self.context_window? })
    }
}

impl Usage {
    fn throttles(self) -> bool {
        self.context_window > 0
            && u128::from(self.tokens) * 100 >= u128::from(self.context_window) * THROTTLE_PERCENT
    }
}

/// A session, as it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// Grows with each reset.
    pub generation: i64,
    /// The number of its last message.
    pub last_seq: i64,
    /// The number of the last message before it was stopped as a whole.
    pub cutoff_seq: i64,
    /// When that was: what was sent before is stale.
    pub cutoff_at: Option<Timestamp>,
    /// How many runs may be running at once, where a message said so.
    pub max_concurrent: Option<u32>,
    /// How much of its context window is used.
    pub usage: Option<Usage>,
}

impl Default for Session {
    fn default() -> Session {
        Session {
            generation: 1,
            last_seq: 0,
            cutoff_seq: 0,
            cutoff_at: None,
            max_concurrent: None,
            usage: None,
        }
    }
}

impl Session {
    /// How many of its runs may be running at once, now.
    pub fn concurrency(&self, policy: &Policy) -> u32 {
        if self.usage.is_some_and(Usage::throttles) {
            return 1;
        }
        self.max_concurrent.unwrap_or(policy.max_concurrent).max(1)
    }
}

/// Where a run of a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It was never started.
    Waiting,
    /// It was started, and waits for its next attempt.
    Retrying,
    /// It runs.
    Running,
    /// It runs, and is to be cancelled.
    Ending,
}

/// A live run of a session's present generation: a place in its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which.
    pub run: RunId,
    /// The number of its first message.
    pub seq: i64,
    /// Where it is.
    pub stage: Stage,
    /// When its first message came.
    pub opened_at: Timestamp,
    /// When it may start.
    pub not_before: Timestamp,
    /// It starts only when all before it are gone.
    pub alone: bool,
    /// The size of its payload as it is stored.
    pub bytes: u64,
    /// Whether it has its turn, as it stands.
    pub turn: bool,
}

impl Place {
    fn waits(&self) -> bool {
        matches!(self.stage, Stage::Waiting | Stage::Retrying)
    }
}

/// A message, as far as the line is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Message {
    /// When it was sent, where its sender says so.
    pub sent_at: Option<Timestamp>,
    /// The generation of the session that its sender knows.
    pub generation: Option<i64>,
    /// What it does while a run lives, where it is not the schedule's way.
    pub mode: Option<Mode>,
    /// How many runs may be running at once from now on.
    pub max_concurrent: Option<u32>,
    /// How much larger it makes the payload of its run.
    pub bytes: u64,
}

/// What becomes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Took {
    /// It opens a run.
    Opened {
        /// Its number, and its run's.
        seq: i64,
        /// When the run may start, if no message follows.
        not_before: Timestamp,
        /// It starts only when all before it are gone.
        alone: bool,
    },
    /// It is one more message of this run.
    Joined {
        /// The run.
        run: RunId,
        /// Its number.
        seq: i64,
        /// When the run may start, if no message follows.
        not_before: Timestamp,
        /// The run starts only when all before it are gone, from now on.
        alone: bool,
    },
    /// It comes too late: it is older than a stop or a reset of its session.
    Stale {
        /// Its number.
        seq: i64,
    },
    /// Too many wait, and it is not let in.
    Full,
}

/// What is to be changed in a session and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The session, as it is from now on.
    pub session: Session,
    /// Runs that wait and end cancelled.
    pub end: Vec<(RunId, Reason)>,
    /// Runs that run and are to be cancelled.
    pub cancel: Vec<(RunId, Reason)>,
}

impl Change {
    fn of(session: &Session) -> Change {
        Change { session: *session, end: Vec::new(), cancel: Vec::new() }
    }
}

/// Takes a message in.
pub fn send(
    session: &Session,
    line: &[Place],
    policy: &Policy,
    message: &Message,
    now: Timestamp,
) -> (Took, Change) {
    let mut change = Change::of(session);
    let seq = session.last_seq + 1;
    let old = message.generation.is_some_and(|generation| generation < session.generation);
    let late = message.sent_at.zip(session.cutoff_at).is_some_and(|(sent, cutoff)| sent < cutoff);
    if old || late {
        change.session.last_seq = seq;
        return (Took::Stale { seq }, change);
    }
    let fits = |place: &Place| place.bytes.saturating_add(message.bytes) <= policy.max_bytes;
    let open =
        line.last().filter(|place| place.stage == Stage::Waiting && now < place.not_before && fits(place));
    let interrupts = message.mode.unwrap_or(policy.mode) == Mode::Interrupt;
    if interrupts {
        for place in line.iter().filter(|place| open.is_none_or(|open| open.run != place.run)) {
            leave(&mut change, place, Reason::Interrupted);
        }
    } else if open.is_none() {
        let waiting: Vec<&Place> = line.iter().filter(|place| place.stage == Stage::Waiting).collect();
        // Where a cap was lowered, more than one goes.
        let over = (waiting.len() + 1).saturating_sub(policy.cap.max(1) as usize);
        match policy.drop {
            DropPolicy::New if over > 0 => return (Took::Full, Change::of(session)),
            DropPolicy::New => {}
            DropPolicy::Old => {
                change.end =
                    waiting.iter().take(over).map(|place| (place.run, Reason::QueueDropped)).collect();
            }
        }
    }
    change.session.last_seq = seq;
    change.session.max_concurrent = message.max_concurrent.or(session.max_concurrent);
    let after = |at: Timestamp, windows: i32| {
        at.saturating_add(policy.debounce.saturating_mul(windows)).unwrap_or(Timestamp::MAX)
    };
    let not_before = after(now, 1);
    let took = match open {
        Some(open) => {
            let not_before = not_before.min(after(open.opened_at, WINDOWS_MAX));
            Took::Joined { run: open.run, seq, not_before, alone: open.alone || interrupts }
        }
        None => Took::Opened { seq, not_before, alone: interrupts },
    };
    (took, change)
}

/// Cancels the oldest run that has its turn, and says which: none where nothing has.
pub fn stop(session: &Session, line: &[Place], policy: &Policy) -> (Option<RunId>, Change) {
    let mut change = Change::of(session);
    let turns = turns(session, line, policy);
    let oldest = line
        .iter()
        .zip(turns)
        .find(|(place, turn)| *turn && place.stage != Stage::Ending)
        .map(|(place, _)| place);
    if let Some(place) = oldest {
        leave(&mut change, place, Reason::Stopped);
    }
    (oldest.map(|place| place.run), change)
}

/// Ends all that runs and waits; what was sent before now and comes later is stale.
pub fn stop_all(session: &Session, line: &[Place], now: Timestamp) -> Change {
    let mut change = Change::of(session);
    change.session.cutoff_seq = session.last_seq;
    change.session.cutoff_at = Some(session.cutoff_at.map_or(now, |before| before.max(now)));
    line.iter().for_each(|place| leave(&mut change, place, Reason::Stopped));
    change
}

/// Begins a new generation: what waits ends stale; what runs goes on, and is none of the session's business any more.
pub fn reset(session: &Session, line: &[Place]) -> Change {
    let waiting = line.iter().filter(|place| place.waits());
    Change {
        session: Session {
            generation: session.generation + 1,
            max_concurrent: None,
            usage: None,
            ..*session
        },
        end: waiting.map(|place| (place.run, Reason::Stale)).collect(),
        cancel: Vec::new(),
    }
}

/// Takes down how much of its context window a session has used.
pub fn used(session: &Session, usage: Usage) -> Change {
    Change::of(&Session { usage: Some(usage), ..*session })
}

/// Takes one out of the line, or tells it to leave.
fn leave(change: &mut Change, place: &Place, reason: Reason) {
    match place.stage {
        Stage::Waiting | Stage::Retrying => change.end.push((place.run, reason)),
        Stage::Running => change.cancel.push((place.run, reason)),
        Stage::Ending => {}
    }
}

/// Who of a line has its turn, in order. Nobody overtakes: behind one that waits for its turn all wait. Who returns for its
/// next attempt may find others running behind it, which count as well: fewer may be allowed by now.
pub fn turns(session: &Session, line: &[Place], policy: &Policy) -> Vec<bool> {
    let at_once = session.concurrency(policy) as usize;
    let mut running_behind = line.iter().filter(|place| !place.waits()).count();
    let mut blocked = false;
    let turn = |(before, place): (usize, &Place)| {
        running_behind -= usize::from(!place.waits());
        let room = before + running_behind < at_once && (before == 0 || !place.alone);
        let turn = !place.waits() || (!blocked && room);
        blocked |= !turn;
        turn
    };
    line.iter().enumerate().map(turn).collect()
}

/// Those of a line whose turn has come, or whose turn it no longer is.
pub fn moved(session: &Session, line: &[Place], policy: &Policy) -> Vec<(RunId, bool)> {
    let turns = turns(session, line, policy);
    let moved = line.iter().zip(turns).filter(|(place, turn)| place.waits() && place.turn != *turn);
    moved.map(|(place, turn)| (place.run, turn)).collect()
}
