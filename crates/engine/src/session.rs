//! Conversations: messages for sessions, and what ends them.

use belfry_core::definition::When;
use belfry_core::session::{Message, Mode, Policy, Usage, message_key_in};
use belfry_core::{Reason, RunId, RunState, Schedule, Trigger};
use belfry_store::{
    AnyStore, Defined, Given, Key, NewMessage, NewRun, RunRecord, ScheduleFilter, ScheduleRecord,
    SessionDone, SessionFilter, SessionVerb, Store,
};
use belfry_time::Timestamp;
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::driver::Options;
use crate::engine::{Engine, Status};
use crate::error::Error;
use crate::event::{Event, Level, Name};
use crate::ids::{hash, new_run_id};
use crate::requests::to_known_lanes;

/// Runs that are read at once to tell of them.
const TOLD_AT_ONCE: usize = 500;
/// The longest key of a session.
const KEY_MAX: usize = 256;
/// The longest message.
const TEXT_MAX: usize = 1 << 20;

/// What a message asks of its session.
#[derive(Debug, Clone, Default)]
pub struct SendOptions {
    /// The pool its run takes a slot from, where it is not the schedule's.
    pub lane: Option<String>,
    /// What it does while a run lives, where it is not the schedule's way.
    pub mode: Option<Mode>,
    /// How many runs of the session may be running at once from now on.
    pub max_concurrent: Option<u32>,
    /// When it was sent: older than a stop of the session, it is stale.
    pub sent_at: Option<Timestamp>,
    /// The generation of the session that its sender knows: older than a reset, it is stale.
    pub generation: Option<i64>,
    /// What it brings beside its text. `messages`, `session` and `text` are refused: Belfry writes these.
    pub payload: Map<String, Value>,
    /// Makes a repeat answer with the first run.
    pub key: Option<String>,
    /// Its trace, where the sender has one.
    pub trace_id: Option<Uuid>,
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// It is in a run.
    Taken(Taken),
    /// It was `/stop` or `/stopall`, and acted as such.
    Stopped(SessionDone),
}

/// A message that is in a run.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Taken {
    /// The run: its own, or one that was open.
    #[serde(rename = "run_id")]
    pub run: RunId,
    /// `agent/schedule`.
    pub schedule: String,
    /// The key of the session.
    pub session: String,
    /// Its number in the session; none where it was sent before, with the same key.
    pub seq: Option<i64>,
    /// The generation of the session, likewise.
    pub generation: Option<i64>,
    /// Whether the run was open already.
    pub joined: bool,
    /// The lane of a run that it opened.
    pub lane: String,
    /// The lane that was asked for, where nobody has made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_lane: Option<String>,
    /// Runs that waited and have ended for it.
    pub ended: Vec<RunId>,
    /// Runs that run and are to be cancelled for it.
    pub told: Vec<RunId>,
}

/// A chat schedule.
pub(crate) struct Chat {
    /// As it stands.
    pub(crate) record: ScheduleRecord,
    compiled: Schedule,
    policy: Policy,
}

/// The chat schedule `agent/schedule`, or the only one of `agent`.
pub(crate) async fn find_chat(store: &AnyStore, target: &str) -> Result<Chat, Error> {
    let no_chat = |detail: String| Error::NoChat { name: target.to_owned(), detail };
    let record = match target.contains('/') {
        true => store.schedule(target).await?.ok_or_else(|| Error::NotFound { name: target.to_owned() })?,
        false => {
            let filter = ScheduleFilter { agent: Some(target.to_owned()), ..ScheduleFilter::default() };
            let all = store.schedules(&filter, None, 1000).await?.items;
            // One that cannot be read may be the chat that is meant.
            let unreadable = all.iter().find(|record| record.unreadable.is_some()).cloned();
            let is_chat = |record: &ScheduleRecord| matches!(record.definition.when, When::Chat(_));
            let mut chats: Vec<ScheduleRecord> = all.into_iter().filter(is_chat).collect();
            match (chats.len(), unreadable) {
                (1, _) => chats.remove(0),
                (0, Some(unreadable)) => unreadable,
                (0, None) => return Err(no_chat(format!("agent {target} has no chat schedule"))),
                _ => {
                    let names: Vec<_> = chats.iter().map(|chat| chat.name.as_str()).collect();
                    let detail =
                        format!("agent {target} has several chats: say which, {}", names.join(" or "));
                    return Err(no_chat(detail));
                }
            }
        }
    };
    crate::refuse_unreadable(&record)?;
    let compiled = record.definition.compile(&record.name).map_err(|detail| refused(&record.name, detail))?;
    let Some(policy) = compiled.chat else {
        return Err(no_chat(format!("{} is no chat: it takes no messages", record.name)));
    };
    Ok(Chat { record, compiled, policy })
}

/// Refuses a payload for a chat with a key that Belfry writes: a run must be able to trust its `messages`.
pub(crate) fn refuse_message_keys(payload: &Map<String, Value>) -> Result<(), Error> {
    message_key_in(payload).map_or(Ok(()), |key| Err(Error::ReservedKey { key }))
}

/// Takes a message into a session of a chat; `/stop` and `/stopall` act as such.
async fn send(
    store: &AnyStore,
    options: &Options,
    now: Timestamp,
    (target, session): (&str, &str),
    text: &str,
    with: SendOptions,
) -> Result<Reply, Error> {
    if let Some(verb) = SessionVerb::of_text(text) {
        return Ok(Reply::Stopped(change_session(store, now, (target, session), verb).await?));
    }
    let chat = find_chat(store, target).await?;
    let name = &chat.record.name;
    check_key(name, session)?;
    refuse_message_keys(&with.payload)?;
    if text.len() > TEXT_MAX {
        return Err(refused(name, format!("the message has {} bytes; {TEXT_MAX} is the most", text.len())));
    }
    let not_found = || Error::NotFound { name: name.clone() };
    let definitions = store.definitions(&[chat.record.id]).await?;
    let definitions = definitions.into_iter().next().flatten().ok_or_else(not_found)?;
    let definition = &definitions.agent_definition;
    let defined = Defined::new(chat.record.agent, chat.record.id, &chat.compiled, definition);
    let mut run = NewRun::of_message(defined, new_run_id(now), now, with.lane);
    let unknown_lane = to_known_lanes(store, options, [&mut run]).await?.pop();
    let key = with.key.map(|key| {
        let body = serde_json::to_vec(&(session, text, &with.payload)).unwrap_or_default();
        Key::new(key, hash(&body), now)
    });
    let run = run.given(Given { prompt: None, payload: with.payload, trace_id: with.trace_id });
    let lane = run.lane.clone();
    let message = NewMessage {
        run,
        session: session.to_owned(),
        text: text.to_owned(),
        message: Message {
            sent_at: with.sent_at,
            generation: with.generation,
            mode: with.mode,
            max_concurrent: with.max_concurrent,
            ..Message::default()
        },
        policy: chat.policy,
        key,
    };
    let taken = |run, seq, generation, joined, ended, told| {
        let (schedule, session) = (name.clone(), session.to_owned());
        Reply::Taken(Taken {
            run,
            schedule,
            session,
            seq,
            generation,
            joined,
            lane,
            unknown_lane,
            ended,
            told,
        })
    };
    use belfry_store::Sent;
    match store.send(now, &message).await? {
        Sent::Taken { run, seq, generation, joined, ended, told } => {
            Ok(taken(run, Some(seq), Some(generation), joined, ended, told))
        }
        Sent::Repeat(run) => Ok(taken(run, None, None, false, Vec::new(), Vec::new())),
        Sent::Stale { run, generation } => {
            Err(Error::Stale { session: address(name, session), generation, run })
        }
        Sent::Full => Err(Error::QueueFull { session: address(name, session), cap: chat.policy.cap }),
        Sent::KeyReused(run) => Err(Error::KeyReused { name: name.clone(), run }),
        Sent::Disabled => {
            let words = "it is paused, disabled or invalid; `belfry show` says which";
            Err(refused(name, words.into()))
        }
        Sent::NotFound => Err(not_found()),
    }
}

/// Stops, resets or measures a session.
async fn change_session(
    store: &AnyStore,
    now: Timestamp,
    (target, session): (&str, &str),
    verb: SessionVerb,
) -> Result<SessionDone, Error> {
    let chat = find_chat(store, target).await?;
    check_key(&chat.record.name, session)?;
    let done = store.session(now, chat.record.id, session, verb).await?;
    done.ok_or(Error::NotFound { name: chat.record.name })
}

fn check_key(name: &str, session: &str) -> Result<(), Error> {
    let wrong = match session {
        "" => "the key of a session is empty",
        _ if session.len() > KEY_MAX => "the key of a session is longer than 256 bytes",
        _ if session.chars().any(char::is_control) => "the key of a session has a control character",
        _ => return Ok(()),
    };
    Err(refused(name, wrong.into()))
}

fn address(name: &str, session: &str) -> String {
    format!("{name}:{session}")
}

fn refused(name: &str, detail: String) -> Error {
    let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
    Error::Trigger { agent: agent.into(), schedule: schedule.into(), detail }
}

/// A message that is on its way: [`Sent::outcome`] waits for the end of its run.
pub struct Sent {
    engine: Engine,
    /// What became of it so far.
    pub reply: Reply,
}

impl Sent {
    /// The run, unless it was a stop.
    pub fn run(&self) -> Option<RunId> {
        match &self.reply {
            Reply::Taken(taken) => Some(taken.run),
            Reply::Stopped(_) => None,
        }
    }

    /// Waits until the run has ended, and gives it. One that was dropped or went with its lane is an error of its own; one
    /// that was stopped is a run that ended cancelled. A stop has nothing to wait for.
    pub async fn outcome(&self) -> Result<Option<RunRecord>, Error> {
        let Some(run) = self.run() else { return Ok(None) };
        let record = self.engine.wait(run).await?;
        match (record.state, record.reason) {
            (RunState::Cancelled, Some(Reason::QueueDropped)) => Err(Error::QueueDropped { run }),
            (RunState::Cancelled, Some(Reason::LaneCleared)) => Err(Error::LaneCleared { run }),
            (RunState::Cancelled, Some(Reason::Stale)) => {
                let session = address(&record.name, record.session().unwrap_or_default());
                Err(Error::Stale { session, generation: 0, run })
            }
            _ => Ok(Some(record)),
        }
    }
}

impl Engine {
    /// Sends a message to a session, `agent/schedule:key`; of an agent with one chat, `agent:key` is enough.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let engine = belfry::Engine::builder()
    ///     .agents([belfry::AgentBuilder::new("bot").schedule("talk", belfry::chat(serde_json::json!({"debounce": "0s"}))).build()])
    ///     .handler("bot", |run| async move {
    ///         run.log(format!("you said {}", run.payload()["text"])).await;
    ///         Ok(())
    ///     })
    ///     .build();
    /// engine.start().await?;
    /// let sent = engine.send("bot:ada", "hello", belfry::SendOptions::default()).await?;
    /// let run = sent.outcome().await?.unwrap();
    /// assert_eq!(run.state, belfry::RunState::Completed);
    /// engine.stop(belfry::StopOptions::default()).await?;
    /// # Ok::<_, belfry::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn send(&self, session: &str, message: &str, with: SendOptions) -> Result<Sent, Error> {
        let (target, key) = parts(session)?;
        self.refuse_while_draining()?;
        let now = self.store_now().await?;
        self.measure(target, key).await?;
        let (verb, trace_id) = (SessionVerb::of_text(message), with.trace_id);
        let reply = send(self.store(), self.options(), now, (target, key), message, with).await;
        match &reply {
            Ok(Reply::Taken(taken)) => {
                if taken.seq.is_some() && !taken.joined {
                    let made = Made::by(Trigger::Message, taken.run, trace_id);
                    self.tell_created(&taken.schedule, Made { session: Some(key), ..made });
                }
                self.tell_ends(&taken.ended).await;
            }
            Ok(Reply::Stopped(done)) => self.tell_session(target, key, verb, done).await,
            // It has a run, which ended at once.
            Err(Error::Stale { run, session, .. }) => {
                let name = session.split_once(':').map_or(target, |(name, _)| name);
                let made = Made::by(Trigger::Message, *run, trace_id);
                self.tell_created(name, Made { session: Some(key), ..made });
                self.tell_ends(&[*run]).await;
            }
            Err(_) => {}
        }
        let reply = reply?;
        self.hint().await;
        Ok(Sent { engine: self.clone(), reply })
    }

    /// Stops, resets or measures a session, `agent/schedule:key`. To stop or to reset one that nobody has spoken to is
    /// an error; a mark that makes later messages stale, and a measure, hold also for a session that is yet to come.
    pub async fn change_session(&self, session: &str, verb: SessionVerb) -> Result<SessionDone, Error> {
        let (target, key) = parts(session)?;
        if matches!(verb, SessionVerb::Stop | SessionVerb::Reset) {
            let schedule = find_chat(self.store(), target).await?.record.name;
            check_key(&schedule, key)?;
            let session = address(&schedule, key);
            let filter = SessionFilter { agent: None, schedule: Some(schedule), key: Some(key.to_owned()) };
            if self.store().sessions(&filter, None, 1).await?.items.is_empty() {
                return Err(Error::NoSession { session });
            }
        }
        let done = change_session(self.store(), self.store_now().await?, (target, key), verb).await?;
        self.tell_session(target, key, Some(verb), &done).await;
        self.hint().await;
        Ok(done)
    }

    /// Resets all sessions; gives their number.
    pub async fn reset_sessions(&self) -> Result<u32, Error> {
        let (mut count, mut after) = (0, None);
        loop {
            let page = self.store().sessions(&SessionFilter::default(), after, 500).await?;
            for session in page.items {
                let now = self.store_now().await?;
                let verb = SessionVerb::Reset;
                let done = self.store().session(now, session.schedule, &session.key, verb).await?;
                if let Some(done) = done {
                    self.tell_session(&session.name, &session.key, Some(verb), &done).await;
                }
                count += 1;
            }
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        self.hint().await;
        Ok(count)
    }

    /// New work is for others while this node drains or stops.
    pub(crate) fn refuse_while_draining(&self) -> Result<(), Error> {
        match self.status() {
            Status::Draining | Status::Stopping => Err(Error::Draining),
            Status::Running | Status::Stopped => Ok(()),
        }
    }

    /// Takes down what the program itself knows of a session, where it was asked to.
    async fn measure(&self, target: &str, key: &str) -> Result<(), Error> {
        if let Some(usage) = self.usage_of(&address(target, key)) {
            let now = self.store_now().await?;
            change_session(self.store(), now, (target, key), SessionVerb::Use(usage)).await?;
        }
        Ok(())
    }

    /// Tells what a person did to a session, and of the runs that have ended by it.
    async fn tell_session(&self, target: &str, key: &str, verb: Option<SessionVerb>, done: &SessionDone) {
        let name = match verb {
            Some(SessionVerb::Stop | SessionVerb::StopAll) => Name::SessionStopped,
            Some(SessionVerb::Reset) => Name::SessionReset,
            Some(SessionVerb::Use(_)) | None => return,
        };
        // It is done, also where the chat is gone by now, or the store does not answer.
        let chat = find_chat(self.store(), target).await;
        let chat = chat.map_or_else(|_| target.to_owned(), |chat| chat.record.name);
        self.tell_ends(&done.ended).await;
        let event = Event::new(self.now(), Level::Info, name).of(&chat);
        let count = (done.ended.len() + done.told.len()) as u64;
        self.tell(Event { session: Some(key.to_owned()), count: Some(count), ..event });
    }

    /// Tells of runs that have ended without an attempt that ended them: each with all its names. Runs that live are left
    /// out: the node that runs them tells of their end.
    pub(crate) async fn tell_ends(&self, runs: &[RunId]) {
        for runs in runs.chunks(TOLD_AT_ONCE) {
            // Where the store does not answer they are told without their names.
            let Ok(records) = self.store().runs_by_id(runs).await else {
                for run in runs {
                    let event = Event::new(self.now(), Level::Info, Name::RunCancelled);
                    self.tell(Event { run_id: Some(*run), ..event });
                }
                continue;
            };
            for record in records.iter().filter(|record| !record.state.is_live()) {
                self.tell(Event::ended(self.now(), record));
            }
        }
    }

    /// Tells of a run that was made, but not by a tick.
    pub(crate) fn tell_created(&self, name: &str, made: Made<'_>) {
        let event = Event::new(self.now(), Level::Info, Name::RunCreated).of(name);
        self.tell(Event {
            session: made.session.map(str::to_owned),
            tick_at: made.tick_at,
            run_id: Some(made.run),
            trace_id: Some(made.run.trace(made.trace_id).simple().to_string()),
            reason: Some(made.trigger.as_str().to_owned()),
            ..event
        });
    }
}

/// A run that was made, but not by a tick.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made<'a> {
    /// Which.
    pub run: RunId,
    /// What made it.
    pub trigger: Trigger,
    /// Its trace, where it came with one.
    pub trace_id: Option<Uuid>,
    /// The tick that it makes up for.
    pub tick_at: Option<Timestamp>,
    /// The key of its session.
    pub session: Option<&'a str>,
}

impl Made<'_> {
    /// Of no session, and for no tick.
    pub fn by(trigger: Trigger, run: RunId, trace_id: Option<Uuid>) -> Made<'static> {
        Made { run, trigger, trace_id, tick_at: None, session: None }
    }
}

/// `agent/schedule:key` in its parts.
fn parts(session: &str) -> Result<(&str, &str), Error> {
    session.split_once(':').ok_or_else(|| Error::NoChat {
        name: session.to_owned(),
        detail: format!("{session} names no session: write agent/schedule:key"),
    })
}

/// What a program knows of a session's context window, by `agent/schedule:key`.
pub(crate) type UsageOf = std::sync::Arc<dyn Fn(&str) -> Option<Usage> + Send + Sync>;
