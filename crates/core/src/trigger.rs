//! How a run comes to be: what the definitions of its schedule give it, and what came with it. Ticks, requests by hand,
//! webhooks, messages, backfills and repeats each have one constructor here. Whether something makes a run at all,
//! `check.rs` decides.

use belfry_time::{SignedDuration, Timestamp};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::definition::{AgentDefinition, Schedule, Scope};
use crate::gate::{Gates, MAIN_LANE, Place};
use crate::model::{AgentId, RunId, ScheduleId, Trigger};
use crate::plan::PlannedRun;

/// How long an idempotency key is kept.
const KEY_KEPT: SignedDuration = SignedDuration::from_hours(24);

/// A schedule with the definitions that its runs are made from.
#[derive(Debug, Clone, Copy)]
pub struct Defined<'a> {
    /// Its agent.
    pub agent: AgentId,
    /// The schedule.
    pub schedule: ScheduleId,
    /// What it says.
    pub compiled: &'a Schedule,
    /// What its agent says.
    pub agent_definition: &'a AgentDefinition,
}

/// A run to be made.
#[derive(Debug, Clone, PartialEq)]
pub struct NewRun {
    /// Chosen by the caller.
    pub id: RunId,
    /// Its agent.
    pub agent: AgentId,
    /// Its schedule.
    pub schedule: ScheduleId,
    /// Its command.
    pub command: String,
    /// What made it.
    pub trigger: Trigger,
    /// The tick that made it.
    pub tick_at: Option<Timestamp>,
    /// When it may start.
    pub not_before: Timestamp,
    /// The pool it takes a slot from.
    pub lane: String,
    /// The lane came with it, and stays whatever the definitions say later.
    pub own_lane: bool,
    /// Labels that a node must have.
    pub needs: Vec<String>,
    /// Higher goes first.
    pub priority: i16,
    /// The limits it has to pass.
    pub gates: Gates,
    /// How often it may be started.
    pub max_attempts: u32,
    /// It is the one probe of a half-open breaker.
    pub probe: bool,
    /// The prompt that came with it, never a template. None: that of the definitions when an attempt starts.
    pub prompt: Option<String>,
    /// The payload that came with it, an object; it goes over those of the definitions when an attempt starts.
    pub payload: Value,
    /// Its trace.
    pub trace_id: Option<Uuid>,
}

/// What comes with a request for a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Given {
    /// A prompt, instead of that of the definitions.
    pub prompt: Option<String>,
    /// A payload, over those of the definitions.
    pub payload: Map<String, Value>,
    /// The trace that the request belongs to.
    pub trace_id: Option<Uuid>,
}

impl<'a> Defined<'a> {
    /// A schedule of an agent.
    pub fn new(
        agent: AgentId,
        schedule: ScheduleId,
        compiled: &'a Schedule,
        agent_definition: &'a AgentDefinition,
    ) -> Defined<'a> {
        Defined { agent, schedule, compiled, agent_definition }
    }
}

impl NewRun {
    fn of(defined: Defined<'_>, id: RunId, trigger: Trigger, not_before: Timestamp) -> NewRun {
        let options = defined.compiled.options();
        let is_message = trigger == Trigger::Message;
        let Place { lane, needs, gates, max_attempts } =
            Place::of(defined.agent_definition, options, is_message);
        NewRun {
            id,
            agent: defined.agent,
            schedule: defined.schedule,
            command: options.command.clone(),
            trigger,
            tick_at: None,
            not_before,
            lane,
            own_lane: false,
            needs,
            priority: options.priority,
            gates,
            max_attempts,
            probe: false,
            prompt: None,
            payload: Value::Object(Map::new()),
            trace_id: None,
        }
    }

    /// The run of a tick, on time or caught up.
    pub fn of_tick(defined: Defined<'_>, id: RunId, planned: &PlannedRun) -> NewRun {
        NewRun {
            tick_at: Some(planned.tick_at),
            probe: planned.probe,
            ..NewRun::of(defined, id, planned.trigger, planned.not_before)
        }
    }

    /// A run that somebody asks for.
    pub fn by_hand(defined: Defined<'_>, id: RunId, now: Timestamp) -> NewRun {
        NewRun::of(defined, id, Trigger::Manual, now)
    }

    /// The run that a message opens, should it open one; in the lane that the message names, if it names one.
    pub fn of_message(defined: Defined<'_>, id: RunId, now: Timestamp, lane: Option<String>) -> NewRun {
        let run = NewRun::of(defined, id, Trigger::Message, now);
        NewRun { own_lane: lane.is_some(), lane: lane.unwrap_or(run.lane), ..run }
    }

    /// The same run, asked for by a webhook. The store decides whether it is a probe.
    pub fn as_webhook(self) -> NewRun {
        NewRun { trigger: Trigger::Webhook, ..self }
    }

    /// A run like this one that makes up for a past tick. Runs of one request start in the order of their ticks: `place` is
    /// that order.
    pub fn for_past_tick(&self, id: RunId, now: Timestamp, tick_at: Timestamp, place: usize) -> NewRun {
        let behind = SignedDuration::from_micros(i64::try_from(place).unwrap_or(i64::MAX));
        let not_before = now.checked_add(behind).unwrap_or(now);
        NewRun { id, trigger: Trigger::Backfill, tick_at: Some(tick_at), not_before, ..self.clone() }
    }

    /// The same run, to do again what another was asked to do: its command, and what came with it.
    pub fn again(self, command: String, prompt: Option<String>, payload: Value) -> NewRun {
        NewRun { command, prompt, payload, ..self }
    }

    /// Moves it to the lane `main`, where it stays whatever the definitions say later: nobody made its own lane, which this
    /// gives back.
    pub fn move_to_main(&mut self) -> String {
        self.own_lane = true;
        std::mem::replace(&mut self.lane, MAIN_LANE.to_owned())
    }

    /// The same run with what came with the request for it.
    pub fn given(mut self, given: Given) -> NewRun {
        if let Value::Object(payload) = &mut self.payload {
            payload.extend(given.payload);
        }
        NewRun { prompt: given.prompt.or(self.prompt), trace_id: given.trace_id, ..self }
    }

    /// Whether it starts only when nothing else of its command is running.
    pub fn wants_command(&self) -> bool {
        self.gates.turn == Some(Scope::Command) && self.trigger != Trigger::Message
    }
}

/// An idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// The key, unique among those of the same schedule.
    pub key: String,
    /// What it was used with; the same key with another body is refused.
    pub body_hash: Vec<u8>,
    /// Until when it is kept.
    pub expires_at: Timestamp,
}

impl Key {
    /// A key that makes a repeat answer with the first run, for a day.
    pub fn new(key: String, body_hash: Vec<u8>, now: Timestamp) -> Key {
        Key { key, body_hash, expires_at: now.saturating_add(KEY_KEPT).unwrap_or(Timestamp::MAX) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ScheduleDefinition;
    use crate::definition::{IfRunning, Options, Retry, When};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn with_defined<T>(look: impl Fn(Defined<'_>) -> T) -> T {
        let options = Options {
            if_running: IfRunning::Queue,
            overlap: Scope::Command,
            command: "sync".into(),
            priority: 7,
            ..Options::default()
        };
        let definition = ScheduleDefinition { when: When::Every("1h".into()), options };
        let agent_definition = AgentDefinition {
            lane: "nightly".into(),
            needs: vec!["gpu".into()],
            max_concurrent: Some(2),
            retry: Retry { max: 4, ..Retry::default() },
            ..AgentDefinition::default()
        };
        let compiled = definition.compile("a/s").unwrap();
        look(Defined { agent: 3, schedule: 8, compiled: &compiled, agent_definition: &agent_definition })
    }

    #[test]
    fn what_the_definitions_say_holds_for_every_run_but_for_those_of_sessions() {
        let id = RunId(Uuid::from_u128(1));
        let planned =
            PlannedRun { tick_at: at(3600), not_before: at(3605), trigger: Trigger::CatchUp, probe: true };
        let runs = with_defined(|defined| {
            [
                NewRun::of_tick(defined, id, &planned),
                NewRun::by_hand(defined, id, at(10)),
                NewRun::by_hand(defined, id, at(10)).as_webhook(),
                NewRun::by_hand(defined, id, at(1)).for_past_tick(id, at(10), at(5), 3),
            ]
        });
        for run in &runs {
            assert_eq!((run.agent, run.schedule, run.priority, run.max_attempts), (3, 8, 7, 5));
            assert_eq!(
                (run.lane.as_str(), run.own_lane, &run.needs[..]),
                ("nightly", false, &["gpu".into()][..])
            );
            assert!(run.gates.agent && run.wants_command(), "{:?}", run.trigger);
        }
        let [tick, by_hand, webhook, past] = &runs;
        assert_eq!((tick.tick_at, tick.not_before, tick.probe), (Some(at(3600)), at(3605), true));
        assert_eq!((by_hand.tick_at, by_hand.not_before, by_hand.trigger), (None, at(10), Trigger::Manual));
        assert_eq!(webhook.trigger, Trigger::Webhook);
        assert_eq!((past.tick_at, past.trigger), (Some(at(5)), Trigger::Backfill));
        assert_eq!(past.not_before, at(10) + SignedDuration::from_micros(3));
        let again = by_hand.clone().again("poll".into(), None, json!({"a": 1}));
        assert_eq!((again.command.as_str(), again.payload), ("poll", json!({"a": 1})));
        let message = with_defined(|defined| NewRun::of_message(defined, id, at(10), None));
        assert_eq!((message.lane.as_str(), message.own_lane), ("main", false));
        assert!(!message.gates.agent && !message.wants_command());
        let message = with_defined(|defined| NewRun::of_message(defined, id, at(10), Some("team".into())));
        assert_eq!((message.lane.as_str(), message.own_lane), ("team", true));
        let mut stray = by_hand.clone();
        assert_eq!(
            (stray.move_to_main(), stray.lane.as_str(), stray.own_lane),
            ("nightly".into(), "main", true)
        );
    }

    #[test]
    fn what_came_with_a_request_goes_over_what_is_there() {
        let id = RunId(Uuid::from_u128(1));
        let run = with_defined(|defined| NewRun::by_hand(defined, id, at(0)));
        let payload = |value: Value| value.as_object().cloned().unwrap_or_default();
        let trace_id = Some(Uuid::from_u128(9));
        let first =
            Given { prompt: Some("hello".into()), payload: payload(json!({"a": 1, "b": 2})), trace_id };
        let second = Given { prompt: None, payload: payload(json!({"b": 3})), trace_id };
        let run = run.given(first).given(second);
        assert_eq!(run.payload, json!({"a": 1, "b": 3}));
        assert_eq!((run.prompt.as_deref(), run.trace_id), (Some("hello"), trace_id));
    }

    #[test]
    fn a_key_is_kept_for_a_day() {
        let key = Key::new("k".into(), vec![1], at(100));
        assert_eq!(key.expires_at, at(100 + 86_400));
        assert_eq!(Key::new("k".into(), vec![1], Timestamp::MAX).expires_at, Timestamp::MAX);
    }
}
