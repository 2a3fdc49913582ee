//! What an agent and a schedule are, as they are stored, and as they are ready to decide with.

use std::sync::Arc;

use belfry_time::{
    Anchor, Cron, Dst, Every, Fold, Gap, Jitter, SignedDuration, Timestamp, Timing, Window, Zone,
    parse_duration, parse_instant,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::session::{Policy, message_key_in, message_key_words};
use crate::template::Template;
use crate::work::{Action, Work};

/// The lanes that are always there, with their slots on each node.
pub const DEFAULT_LANES: [(&str, u32); 4] = [("main", 30), ("subagent", 50), ("team", 100), ("cron", 30)];

/// The newest format of stored definitions that this version reads. A definition is stored with the lowest format that can
/// read it: a new key raises the format of the definitions that use it, and of no other.
pub const FORMAT: i32 = 1;

/// The format that every version reads.
const FIRST_FORMAT: i32 = 1;

/// Why this version cannot use a stored definition. Others may be able to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unreadable {
    /// A newer version wrote it.
    Newer {
        /// Its format.
        format: i32,
    },
    /// It is not what a definition of its format looks like.
    Broken {
        /// What is wrong.
        detail: String,
    },
}

impl std::fmt::Display for Unreadable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unreadable::Newer { format } => write!(
                formatter,
                "written by a newer version of Belfry (format {format}, this version reads up to {FORMAT}); this version leaves it \
                 alone"
            ),
            Unreadable::Broken { detail } => {
                write!(
                    formatter,
                    "its stored definition cannot be read by this version of Belfry, which leaves it alone: {detail}"
                )
            }
        }
    }
}

/// Reads a stored definition.
pub fn read_stored<T: serde::de::DeserializeOwned>(format: i32, text: &str) -> Result<T, Unreadable> {
    if format > FORMAT {
        return Err(Unreadable::Newer { format });
    }
    serde_json::from_str(text).map_err(|error| Unreadable::Broken { detail: error.to_string() })
}

/// What runs, with its limits. Durations are milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentDefinition {
    /// How many of its runs may be running at once, over all nodes; none is no limit.
    pub max_concurrent: Option<u32>,
    /// Whether that bounds runs of sessions, too: only where it was written.
    pub limits_sessions: bool,
    /// What follows a failed attempt.
    pub retry: Retry,
    /// How many attempts may fail per period.
    pub budget: Option<Budget>,
    /// When failures stop the schedule.
    pub breaker: Option<Breaker>,
    /// The pool of slots its runs take one from.
    pub lane: String,
    /// Labels that a node must have.
    pub needs: Vec<String>,
    /// What its attempts do.
    pub work: Work,
}

impl AgentDefinition {
    /// The lowest format that can read it.
    pub fn format(&self) -> i32 {
        FIRST_FORMAT
    }
}

impl Default for AgentDefinition {
    fn default() -> AgentDefinition {
        AgentDefinition {
            max_concurrent: Some(1),
            limits_sessions: false,
            retry: Retry::default(),
            budget: None,
            breaker: None,
            lane: "cron".into(),
            needs: Vec::new(),
            work: Work::default(),
        }
    }
}

/// `retry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Retry {
    /// How many attempts may follow the first.
    pub max: u32,
    /// The delay before the first retry; each one doubles it.
    pub base_ms: u64,
    /// The longest delay.
    pub max_delay_ms: u64,
}

impl Default for Retry {
    fn default() -> Retry {
        Retry { max: 3, base_ms: 2_000, max_delay_ms: 30_000 }
    }
}

/// `retry.budget`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Failed attempts per period.
    pub max: u32,
    /// The period, which starts with the first failure.
    pub period_ms: u64,
}

/// `breaker`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Breaker {
    /// Consecutive failed runs that open it.
    pub threshold: u32,
    /// How long it stays open before one probe.
    pub reset_after_ms: u64,
}

/// An agent with its schedules, as a source has them.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentSpec {
    /// Its name.
    pub name: String,
    /// What it is.
    pub definition: AgentDefinition,
    /// Its schedules by name. One that does not compile becomes `invalid` and says why.
    pub schedules: Vec<(String, ScheduleDefinition)>,
}

/// Begins the label of nodes that have the handler of an agent. No file can have it among `needs` or `labels`: it is no name.
const HANDLER: &str = "handler:";

/// The label of nodes that have the handler of an agent.
pub fn handler_label(agent: &str) -> String {
    format!("{HANDLER}{agent}")
}

/// The agent for whose handler a label stands, if it stands for one.
pub fn handler_of(label: &str) -> Option<&str> {
    label.strip_prefix(HANDLER)
}

impl AgentSpec {
    /// Makes an agent that is a handler need a node that has it, so that no other node claims its runs; and an agent that is no
    /// longer one need none.
    pub fn need_handler(&mut self) {
        let AgentDefinition { needs, work, .. } = &mut self.definition;
        needs.retain(|label| handler_of(label).is_none());
        if [&work.action].into_iter().chain(work.commands.values()).any(|action| *action == Action::Handler) {
            needs.push(handler_label(&self.name));
        }
    }
}

/// When an agent runs, and with what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleDefinition {
    /// What makes it tick.
    #[serde(flatten)]
    pub when: When,
    /// The rest of its timing and its policies.
    pub options: Options,
}

/// What makes a schedule tick. Exactly one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// A distance.
    Every(String),
    /// Wall-clock times.
    Cron(String),
    /// An instant.
    At(String),
    /// A delay.
    After(String),
    /// Requests from outside; never ticked.
    Webhook(Value),
    /// Messages; never ticked.
    Chat(Value),
}

/// The keys of a schedule beside the one that makes it tick, with their defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// An IANA name; where it is missing, UTC.
    pub timezone: Option<String>,
    /// From where `every` counts: `completion`, `start`, `slot`.
    pub anchor: AnchorName,
    /// Moves the grid of `slot`.
    pub phase: Option<String>,
    /// Delays ticks.
    pub jitter: Option<String>,
    /// Allowed local times.
    pub only_between: Option<String>,
    /// Days on which it does not run.
    pub not_on: Vec<String>,
    /// `skip` instead of moving a fixed time out of a gap.
    pub dst_gap_skip: bool,
    /// Fires a fixed time in both passes of a fold.
    pub dst_fold_both: bool,
    /// Whether it runs at all.
    pub enabled: bool,
    /// What becomes of missed ticks; the default depends on the kind.
    pub catch_up: Option<CatchUp>,
    /// How many `run_all` makes at most.
    pub catch_up_limit: u32,
    /// When a tick counts as missed, at least [`LATE_AFTER_MIN`]; by default the smaller of ten minutes and half the
    /// distance to the next.
    pub late_after_ms: Option<u64>,
    /// What a tick does while a run lives.
    pub if_running: IfRunning,
    /// Which runs it looks at.
    pub overlap: Scope,
    /// How many runs `queue` lets wait.
    pub max_pending: u32,
    /// Which of the agent's commands.
    pub command: String,
    /// The prompt, where it is not the agent's. A template.
    pub prompt: Option<String>,
    /// Merged over the agent's payload, key by key.
    pub payload: Map<String, Value>,
    /// The lane, where it is not the agent's.
    pub lane: Option<String>,
    /// Higher goes first.
    pub priority: i16,
    /// A one-shot removes itself when its run has ended.
    pub delete_after_run: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timezone: None,
            anchor: AnchorName::Completion,
            phase: None,
            jitter: None,
            only_between: None,
            not_on: Vec::new(),
            dst_gap_skip: false,
            dst_fold_both: false,
            enabled: true,
            catch_up: None,
            catch_up_limit: 100,
            late_after_ms: None,
            if_running: IfRunning::Skip,
            overlap: Scope::Schedule,
            max_pending: 10,
            command: "poll".into(),
            prompt: None,
            payload: Map::new(),
            lane: None,
            priority: 0,
            delete_after_run: false,
        }
    }
}

/// `anchor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnchorName {
    /// The end of the last run.
    Completion,
    /// The last tick.
    Start,
    /// A grid.
    Slot,
}

/// `catch_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CatchUp {
    /// Missed ticks make no run.
    Skip,
    /// They make one, however many there are.
    RunOnce,
    /// They make one each, up to `catch_up_limit`; the newest are kept.
    RunAll,
}

/// `if_running`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfRunning {
    /// The tick makes no run.
    Skip,
    /// Its run waits its turn.
    Queue,
    /// What lives is cancelled; its run starts when that is gone.
    Cancel,
    /// It does not matter.
    Allow,
}

/// `overlap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Runs of the same schedule.
    Schedule,
    /// Runs of the same agent and command.
    Command,
    /// Any run of the agent.
    Agent,
}

impl ScheduleDefinition {
    /// The lowest format that can read it.
    pub fn format(&self) -> i32 {
        FIRST_FORMAT
    }

    /// A schedule with nothing but its kind.
    pub fn new(when: When) -> ScheduleDefinition {
        ScheduleDefinition { when, options: Options::default() }
    }

    /// The lane of its runs, where they name none.
    pub fn lane<'a>(&'a self, agent: &'a AgentDefinition) -> &'a str {
        crate::gate::lane(agent, &self.options, matches!(self.when, When::Chat(_)))
    }

    /// All that decides about instants, as one text: an edit that keeps it moves nothing.
    pub fn timing_key(&self) -> String {
        let o = &self.options;
        let key = serde_json::json!([
            self.when,
            o.timezone,
            o.anchor,
            o.phase,
            o.jitter,
            o.only_between,
            o.not_on,
            o.dst_gap_skip,
            o.dst_fold_both
        ]);
        key.to_string()
    }

    /// Reads the parts. `name` is `agent/schedule` and seeds the jitter. The error is for people: one bad schedule
    /// becomes `invalid` with it and disturbs no other.
    pub fn compile(&self, name: &str) -> Result<Schedule, String> {
        let timing = self.timing(name).map_err(|error| error.to_string())?;
        if let Some(prompt) = &self.options.prompt {
            Template::parse_prompt(prompt).map_err(|error| format!("the template `prompt`: {error}"))?;
        }
        let chat = match &self.when {
            When::Chat(value) => {
                if let Some(key) = message_key_in(&self.options.payload) {
                    return Err(message_key_words(key));
                }
                Some(Policy::parse(value)?)
            }
            _ => None,
        };
        let when_every = matches!(self.when, When::Every(_));
        Ok(Schedule { timing, chat, when_every, definition: Arc::new(self.clone()) })
    }

    /// When it ticks; none for webhook and chat. As [`compile`](ScheduleDefinition::compile), with the error that knows
    /// which part of which text is wrong.
    pub fn timing(&self, name: &str) -> Result<Option<Timing>, belfry_time::Error> {
        let o = &self.options;
        let zone = match &o.timezone {
            Some(name) => Zone::get(name)?,
            None => Zone::utc(),
        };
        let builder = match &self.when {
            When::Webhook(_) | When::Chat(_) => return Ok(None),
            When::Every(every) => Timing::every(Every::parse(every)?, self.anchor()?, zone),
            When::Cron(cron) => {
                let dst = Dst {
                    gap: if o.dst_gap_skip { Gap::Skip } else { Gap::Run },
                    fold: if o.dst_fold_both { Fold::Both } else { Fold::First },
                };
                Timing::cron(Cron::parse(cron)?.with_dst(dst), zone)
            }
            When::At(at) => {
                let at = parse_instant(at, o.timezone.is_some().then_some(&zone))?;
                Timing::at(at, zone)
            }
            When::After(delay) => Timing::after(parse_duration(delay)?, zone),
        };
        let mut window = Window::ALWAYS.not_on(&o.not_on)?;
        if let Some(between) = &o.only_between {
            window = window.only_between(between)?;
        }
        let builder = match &o.jitter {
            Some(jitter) => builder.jitter(Jitter::parse(jitter)?, name),
            None => builder,
        };
        builder.window(window).build().map(Some)
    }

    fn anchor(&self) -> Result<Anchor, belfry_time::Error> {
        Ok(match (self.options.anchor, &self.options.phase) {
            (AnchorName::Completion, _) => Anchor::Completion,
            (AnchorName::Start, _) => Anchor::Start,
            (AnchorName::Slot, None) => Anchor::Slot { phase: SignedDuration::ZERO },
            (AnchorName::Slot, Some(phase)) => Anchor::Slot { phase: parse_duration(phase)? },
        })
    }
}

/// The shortest time after which a tick counts as missed: planning it takes a moment, also on a busy machine.
pub const LATE_AFTER_MIN: SignedDuration = SignedDuration::from_secs(1);

/// A schedule that is ready to decide with.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// What it was made from.
    pub definition: Arc<ScheduleDefinition>,
    /// When it ticks; none for webhook and chat.
    pub timing: Option<Timing>,
    /// How its sessions behave; for chat alone.
    pub chat: Option<Policy>,
    when_every: bool,
}

impl Schedule {
    /// Its options.
    pub fn options(&self) -> &Options {
        &self.definition.options
    }

    /// What becomes of missed ticks: an overdue interval or one-shot is simply due, a missed wall-clock time is gone.
    pub fn catch_up(&self) -> CatchUp {
        self.options().catch_up.unwrap_or(match self.definition.when {
            When::Cron(_) => CatchUp::Skip,
            _ => CatchUp::RunOnce,
        })
    }

    /// Whether the end of the run that a tick made starts the clock for the next.
    pub fn waits_for_runs(&self) -> bool {
        self.when_every && self.options().anchor == AnchorName::Completion
    }

    /// Whether it fires once and is done.
    pub fn is_one_shot(&self) -> bool {
        matches!(self.definition.when, When::At(_) | When::After(_))
    }

    /// How long after it was due a tick with this distance to the next counts as missed.
    pub(crate) fn late_after(&self, due_at: Timestamp, next: Option<Timestamp>) -> SignedDuration {
        const LONGEST: SignedDuration = SignedDuration::from_mins(10);
        let late_after = match (self.options().late_after_ms, next) {
            (Some(ms), _) => SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX)),
            (None, Some(next)) => LONGEST.min(next.duration_since(due_at) / 2),
            (None, None) => LONGEST,
        };
        late_after.max(LATE_AFTER_MIN)
    }
}
