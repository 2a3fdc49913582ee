//! What people and programs do to schedules and runs, and what goes wrong around them.

use belfry::testing::{Input, Options};
use belfry::{
    LaneSettings, Resume, RunId, RunState, ScheduleDefinition, ScheduleOptions, SessionVerb, Timestamp, When,
};
use belfry_core::Reason;
use belfry_core::breaker::State;
use belfry_core::check::Status;
use belfry_core::session::{Message, Policy};
use belfry_store::{
    BreakerEntry, Cancelled, Defined, Drained, Enqueue, Hooks, Knock, NewMessage, NewRun, RunRecord,
    ScheduleRecord, Store,
};

use serde_json::json;

use crate::draw::{self, Habit};
use crate::node::Life;
use crate::sim::{Sim, What, signed};
use crate::world::{DAY, HOUR, MINUTE, Micros, SECOND};

/// What somebody may do, with how often.
const VERBS: [(&str, u64); 27] = [
    ("edit of timing", 4),
    ("edit of policies", 2),
    ("edit of limits", 2),
    ("edit to nonsense", 1),
    ("pause", 3),
    ("pause for a time", 3),
    ("resume", 3),
    ("resume with catch-up", 3),
    ("disable", 2),
    ("enable", 3),
    ("remove", 1),
    ("rename", 1),
    ("add", 1),
    ("add again", 2),
    ("reload", 2),
    ("trigger", 3),
    ("cancel", 3),
    ("retry", 2),
    ("backfill", 2),
    ("webhook", 2),
    ("message", 3),
    ("session", 1),
    ("breaker reset", 1),
    ("budget reset", 1),
    ("lane change", 2),
    ("lane clear", 1),
    ("drain", 2),
];

/// Schedules of which one is taken.
const DRAWN: usize = 8;

/// States in which a verb may meet a schedule.
pub(crate) const STATES: [&str; 13] = [
    "idle",
    "overdue",
    "deferred",
    "parked",
    "waits for its retry",
    "running",
    "being cancelled",
    "half open",
    "exhausted",
    "invalid",
    "retired",
    "paused",
    "disabled",
];

/// Names of all verbs.
pub fn verbs() -> impl Iterator<Item = &'static str> {
    VERBS.iter().map(|(verb, _)| *verb)
}

/// Names of all states of a schedule.
pub fn states() -> impl Iterator<Item = &'static str> {
    STATES.into_iter()
}

/// Why a verb cannot meet a state, where it cannot.
pub fn impossible(verb: &str, state: &str) -> Option<&'static str> {
    match (verb, state) {
        ("webhook" | "message" | "session", "overdue" | "deferred" | "exhausted") => {
            Some("schedules that wait for requests or messages have no ticks")
        }
        _ => None,
    }
}

impl Sim {
    /// One thing that somebody does to a schedule in whatever state it is.
    pub(crate) fn do_something(&mut self) {
        if self.random.permille(50) {
            for habit in self.habits.values_mut() {
                *habit = Habit::draw(&mut self.random);
            }
        }
        let verb = self.draw_verb();
        if let Some((name, state)) = self.draw_target(verb) {
            self.do_verb(verb, &name, state);
        }
    }

    /// One thing that somebody does to this schedule: of all that suit it, one that its state has met least.
    pub(crate) fn do_something_to(&mut self, name: String) {
        // Some schedules people leave alone.
        let Some(record) = self.record(&name).filter(|record| self.ledger.names().contains(&record.name))
        else {
            return;
        };
        let state = self.state_of(&record);
        let met = |verb| self.met.get(&(verb, state)).copied().unwrap_or(0);
        let suitable: Vec<&'static str> = verbs().filter(|verb| self.suits(verb, &name)).collect();
        let least = suitable.iter().map(|verb| met(verb)).min().unwrap_or(0);
        let least: Vec<&'static str> = suitable.into_iter().filter(|verb| met(verb) == least).collect();
        let own: &[&'static str] = match self.ledger.when(&name) {
            Some(When::Chat(_)) => &["message", "session"],
            Some(When::Webhook(_)) => &["webhook"],
            _ => &[],
        };
        let is_own = !own.is_empty() && self.random.permille(500);
        let verb = *self.random.one_of(if is_own { own } else { &least });
        self.do_verb(verb, &name, state);
    }

    fn do_verb(&mut self, verb: &'static str, name: &str, state: &'static str) {
        let name = name.to_owned();
        self.say(|| format!("{verb}: {name}, {state}"));
        *self.met.entry((verb, state)).or_default() += 1;
        self.check_breakers();
        self.check_deferred();
        if self.random.permille(100) {
            self.store.compare_all(self.world.wall());
        }
        let record = self.known_record(&name);
        let now = self.world.wall();
        match (verb, record) {
            ("edit of timing", _) => self.edit_timing(&name),
            ("edit of policies", _) => self.edit_policies(&name),
            ("edit of limits", _) => self.edit_agent(&name),
            ("edit to nonsense", _) => self.edit_to_nonsense(&name),
            ("disable", _) => self.switch(&name, false),
            ("enable", _) => self.switch(&name, true),
            ("remove", _) => self.remove(&name),
            ("rename", _) => self.rename(&name),
            ("add", _) => self.add(&name),
            ("add again", _) => self.add_again(&name),
            ("reload", _) => self.apply_files(),
            ("pause", Some(record)) => {
                self.now(self.store.pause(now, record.id, Some("simulated"), None));
            }
            ("pause for a time", Some(record)) => {
                let until = now + signed(self.random.between(MINUTE, 3 * DAY));
                self.now(self.store.pause(now, record.id, None, Some(until)));
            }
            ("resume", Some(record)) => self.resume(&record, now, Resume::Skip),
            ("resume with catch-up", Some(record)) => self.resume(&record, now, Resume::CatchUp),
            ("trigger", _) => self.trigger(&name),
            ("cancel", _) => self.cancel_one(&name),
            ("retry", Some(record)) => self.retry(&record),
            ("backfill", Some(record)) => self.backfill(&record),
            ("webhook", Some(record)) => self.webhook(&record),
            ("message", Some(record)) => self.message(&record),
            ("session", Some(record)) => self.session(&record),
            ("breaker reset", Some(record)) => {
                self.now(self.store.reset_breaker(now, record.agent, &record.definition.options.command));
            }
            ("budget reset", Some(record)) => {
                self.now(self.store.reset_budget(now, record.agent));
            }
            ("lane change", _) => self.change_lane(),
            ("lane clear", _) => {
                let lane = *self.random.one_of(&["cron", "main", "nightly"]);
                self.now(self.store.clear_lane(now, lane));
            }
            ("drain", _) => self.drain_one(),
            _ => {}
        }
    }

    fn draw_verb(&mut self) -> &'static str {
        let total = VERBS.iter().map(|(_, weight)| weight).sum();
        let mut left = self.random.below(total);
        for (verb, weight) in VERBS {
            if left < weight {
                return verb;
            }
            left -= weight;
        }
        VERBS[0].0
    }

    /// A schedule: of some that are drawn, the one in the state that this verb has met least.
    fn draw_target(&mut self, verb: &'static str) -> Option<(String, &'static str)> {
        let mut names = self.ledger.names();
        names.extend(self.ledger.removed().map(str::to_owned));
        names.retain(|name| self.suits(verb, name));
        let mut best: Option<(u64, String, &'static str)> = None;
        for _ in 0..names.len().min(DRAWN) {
            let place = self.random.below(names.len() as u64) as usize;
            let name = names.swap_remove(place);
            let record = self.record(&name);
            let state = record.as_ref().map_or("retired", |record| self.state_of(record));
            if let Some(record) = record.filter(|record| record.definition.options.delete_after_run) {
                self.ledger.see(&record);
            }
            let met = self.met.get(&(verb, state)).copied().unwrap_or(0);
            if best.as_ref().is_none_or(|(least, ..)| met < *least) {
                best = Some((met, name, state));
            }
        }
        best.map(|(_, name, state)| (name, state))
    }

    /// Whether a verb means anything to the kind of a schedule.
    fn suits(&self, verb: &str, name: &str) -> bool {
        let when = self.ledger.when(name);
        match verb {
            "message" | "session" => matches!(when, Some(When::Chat(_))),
            "webhook" => matches!(when, Some(When::Webhook(_))),
            "edit of timing" | "backfill" => {
                matches!(when, Some(When::Cron(_) | When::Every(_) | When::At(_) | When::After(_)))
            }
            _ => true,
        }
    }

    /// The state of a schedule, as far as a verb may meet it.
    fn state_of(&self, record: &ScheduleRecord) -> &'static str {
        match &record.status {
            Status::Paused { .. } => return "paused",
            Status::Disabled => return "disabled",
            Status::Invalid { .. } => return "invalid",
            Status::Exhausted => return "exhausted",
            Status::Active => {}
        }
        let own: Vec<_> = self.processes.values().filter(|process| process.name == record.name).collect();
        let breaker =
            self.now(self.store.memory.breaker(record.agent, &record.definition.options.command)).breaker;
        let overdue = |due_at| due_at + signed(MINUTE) < self.world.wall();
        if own.iter().any(|process| process.is_stopping) {
            "being cancelled"
        } else if record.deferred.is_some() {
            "deferred"
        } else if breaker.state == State::HalfOpen {
            "half open"
        } else if !own.is_empty() {
            "running"
        } else if record.next_retry_at.is_some() {
            "waits for its retry"
        } else if record.pending > 0 {
            "parked"
        } else if record.token.is_some_and(|token| overdue(token.due_at)) {
            "overdue"
        } else {
            "idle"
        }
    }

    /// Whether a schedule waits for requests from outside.
    pub(crate) fn is_hooked(&self, name: &str) -> bool {
        matches!(self.ledger.when(name), Some(When::Webhook(_)))
    }

    /// A schedule with this command that waits for requests or messages; else the one that is given.
    pub(crate) fn neighbour(&mut self, agent: &str, command: &str, name: &str) -> String {
        let spec = self.ledger.agents.iter().find(|spec| spec.name == agent);
        let is_it = |definition: &ScheduleDefinition| {
            definition.options.command == command
                && matches!(definition.when, When::Chat(_) | When::Webhook(_))
        };
        let schedules = spec.into_iter().flat_map(|spec| &spec.schedules);
        let found: Vec<String> = schedules
            .filter(|(_, definition)| is_it(definition))
            .map(|(name, _)| format!("{agent}/{name}"))
            .collect();
        if found.is_empty() { name.to_owned() } else { self.random.one_of(&found).clone() }
    }

    /// Whether the breaker of a command is half open.
    pub(crate) fn is_half_open(&self, agent: &str, command: &str) -> bool {
        let spec = self.ledger.agents.iter().find(|spec| spec.name == agent);
        let has_breaker = spec.is_some_and(|spec| spec.definition.breaker.is_some());
        let is_it = |entry: &BreakerEntry| entry.agent_name == agent && entry.command == command;
        has_breaker
            && self
                .now(self.store.memory.breakers())
                .iter()
                .any(|entry| is_it(entry) && entry.breaker.state == State::HalfOpen)
    }

    fn done<T>(&self, call: impl Future<Output = Result<T, belfry::Error>>) {
        // What is refused here is refused to people, too.
        let _ = self.now(async { Ok(call.await.ok()) });
    }

    fn resume(&mut self, record: &ScheduleRecord, now: Timestamp, how: Resume) {
        let store = self.store.clone();
        self.done(belfry::testing::resume(&*store, now, record, how));
    }

    /// Somebody pauses schedules and resumes them at once.
    fn pause_and_resume(&mut self) {
        let now = self.world.wall();
        let names = self.ledger.names();
        for _ in 0..names.len().min(4) {
            let name = self.random.one_of(&names).clone();
            let Some(record) = self.record(&name) else { continue };
            self.now(self.store.pause(now, record.id, None, None));
            if let Some(record) = self.record(&name) {
                self.resume(&record, now, Resume::Skip);
            }
        }
    }

    /// Somebody takes schedules out of the files and puts them back at once.
    fn remove_and_add_again(&mut self) {
        let names = self.ledger.names();
        for _ in 0..names.len().min(2) {
            let name = self.random.one_of(&names).clone();
            // A one-shot that comes back is new.
            if matches!(self.ledger.when(&name), Some(When::Cron(_) | When::Every(_))) {
                self.remove(&name);
                self.add_again(&name);
            }
        }
    }

    fn edit_timing(&mut self, name: &str) {
        let drawn = draw::schedule(&mut self.random);
        if !matches!(drawn.when, When::Cron(_) | When::Every(_)) {
            return;
        }
        if let Some(definition) = self.ledger.definition(name) {
            let old = definition.options.clone();
            *definition = drawn;
            let new = definition.options.clone();
            definition.options = ScheduleOptions {
                enabled: old.enabled,
                catch_up: old.catch_up,
                if_running: old.if_running,
                overlap: old.overlap,
                command: old.command,
                priority: old.priority,
                ..new
            };
        }
        self.apply_files();
    }

    fn edit_to_nonsense(&mut self, name: &str) {
        if let Some(definition) = self.ledger.definition(name) {
            definition.when = match &definition.when {
                When::Chat(_) => When::Chat(json!({"cap": "nonsense"})),
                When::Webhook(hook) => {
                    definition.options.timezone = Some("Nowhere/Nonsense".into());
                    When::Webhook(hook.clone())
                }
                _ => When::Cron("0 0 30 2 *".into()),
            };
            if matches!(definition.when, When::Chat(_) | When::Webhook(_)) {
                self.verb_maybe(1000, name, HOUR);
            }
        }
        self.apply_files();
    }

    fn edit_policies(&mut self, name: &str) {
        let drawn = draw::policies(&mut self.random);
        let at = self.world.now();
        let live = self.now(self.store.memory.live_runs());
        if self.ledger.definition(name).is_some_and(|old| old.options.priority != drawn.priority) {
            self.ledger.edited_priority(name, &live);
        }
        if let Some(definition) = self.ledger.definition(name) {
            let old = definition.options.clone();
            definition.options = ScheduleOptions {
                catch_up: drawn.catch_up,
                catch_up_limit: drawn.catch_up_limit,
                if_running: drawn.if_running,
                overlap: drawn.overlap,
                max_pending: drawn.max_pending,
                command: drawn.command,
                priority: drawn.priority,
                ..old
            };
        }
        self.ledger.edited(name, at);
        self.apply_files();
    }

    fn edit_agent(&mut self, name: &str) {
        let drawn = draw::agent(&mut self.random);
        let at = self.world.now();
        let agent = name.split('/').next().unwrap_or_default();
        if let Some(spec) = self.ledger.agents.iter_mut().find(|spec| spec.name == agent) {
            spec.definition = drawn;
        }
        self.ledger.edited(name, at);
        self.apply_files();
    }

    fn switch(&mut self, name: &str, enabled: bool) {
        if let Some(definition) = self.ledger.definition(name) {
            definition.options.enabled = enabled;
        }
        self.apply_files();
    }

    fn remove(&mut self, name: &str) {
        if let Some(record) = self.record(name) {
            self.ledger.retire(&record);
        }
        self.ledger.remove(name);
        self.apply_files();
    }

    fn add(&mut self, name: &str) {
        let added = draw::schedule(&mut self.random);
        let agent = name.split('/').next().unwrap_or_default();
        let name = format!("n{}", self.ledger.applied);
        if let Some(spec) = self.ledger.agents.iter_mut().find(|spec| spec.name == agent) {
            spec.schedules.push((name, added));
        }
        self.apply_files();
    }

    fn add_again(&mut self, name: &str) {
        if self.ledger.add_again(name) {
            self.apply_files();
        }
    }

    /// The schedule goes on under another name.
    fn rename(&mut self, name: &str) {
        let Some(definition) = self.ledger.definition(name).cloned() else { return };
        let Some((agent, _)) = name.split_once('/') else { return };
        if let Some(record) = self.record(name) {
            self.ledger.retire(&record);
        }
        self.ledger.remove(name);
        let new_name = format!("r{}", self.ledger.applied);
        if let Some(spec) = self.ledger.agents.iter_mut().find(|spec| spec.name == agent) {
            spec.schedules.push((new_name, definition));
        }
        self.apply_files();
    }

    /// Makes a run like one that has ended.
    fn retry(&mut self, record: &ScheduleRecord) {
        let now = self.world.wall();
        let ended = self.now(self.store.memory.ended_runs(record.id, 3));
        let Some(old) = ended.into_iter().next_back() else { return };
        let id = RunId(self.new_id());
        let store = self.store.clone();
        self.done(async {
            let (new, _) = belfry::testing::prepare(&*store, &Options::default(), now, &old.name).await?;
            let run = NewRun { id, ..new.again(old.command, old.prompt, old.payload) };
            Ok(store.enqueue(now, &Enqueue { run, key: None }).await?)
        });
    }

    fn trigger(&mut self, name: &str) {
        let now = self.world.wall();
        let id = RunId(self.new_id());
        let store = self.store.clone();
        self.done(async {
            let run =
                NewRun { id, ..belfry::testing::prepare(&*store, &Options::default(), now, name).await?.0 };
            Ok(store.enqueue(now, &Enqueue { run, key: None }).await?)
        });
    }

    /// Makes up for some past ticks.
    fn backfill(&mut self, record: &ScheduleRecord) {
        let now = self.world.wall();
        let Ok(schedule) = record.definition.compile(&record.name) else { return };
        let Some(timing) = schedule.timing.as_ref() else { return };
        let timing = record.origin.map_or(timing.clone(), |origin| timing.clone().with_origin(origin));
        let from = now - signed(self.random.below(5 * DAY));
        let count = self.random.between(1, 6) as usize;
        let ticks: Vec<Timestamp> = timing.ticks_between(from, now, count).map(|tick| tick.tick_at).collect();
        let store = self.store.clone();
        for (place, tick) in ticks.into_iter().enumerate() {
            let id = RunId(self.new_id());
            self.done(async {
                let (run, _) =
                    belfry::testing::prepare(&*store, &Options::default(), now, &record.name).await?;
                let run = run.for_past_tick(id, now, tick, place);
                Ok(store.enqueue(now, &Enqueue { run, key: None }).await?)
            });
        }
    }

    fn webhook(&mut self, record: &ScheduleRecord) {
        let now = self.world.wall();
        let id = RunId(self.new_id());
        let store = self.store.clone();
        self.done(async {
            let (run, _) = belfry::testing::prepare(&*store, &Options::default(), now, &record.name).await?;
            let run = NewRun { id, ..run.as_webhook() };
            let options = record.definition.options.clone();
            Ok(store.knock(now, &Knock { run, signed: None, keys: Vec::new(), options }).await?)
        });
    }

    fn message(&mut self, record: &ScheduleRecord) {
        let now = self.world.wall();
        let Ok(schedule) = record.definition.compile(&record.name) else { return };
        let Some(definitions) = self.now(self.store.definitions(&[record.id])).into_iter().flatten().next()
        else {
            return;
        };
        let id = RunId(self.new_id());
        let defined = Defined::new(record.agent, record.id, &schedule, &definitions.agent_definition);
        let run = NewRun::of_message(defined, id, now, None);
        let message = NewMessage {
            run,
            session: (*self.random.one_of(&["ada", "bob"])).into(),
            text: "hello".into(),
            message: Message::default(),
            policy: Policy::default(),
            key: None,
        };
        self.now(self.store.send(now, &message));
    }

    fn session(&mut self, record: &ScheduleRecord) {
        let key = *self.random.one_of(&["ada", "bob"]);
        let verb = *self.random.one_of(&[SessionVerb::Stop, SessionVerb::StopAll, SessionVerb::Reset]);
        if verb == SessionVerb::Reset {
            let at = self.world.now();
            self.ledger.resets.insert((record.id, key.to_owned()), at);
        }
        self.now(self.store.session(self.world.wall(), record.id, key, verb));
    }

    fn cancel_one(&mut self, name: &str) {
        let live: Vec<RunRecord> = self.now(self.store.memory.live_runs());
        let own = live.iter().find(|run| run.name == name).map(|run| run.id);
        let Some(run) = own.or_else(|| (!live.is_empty()).then(|| self.random.one_of(&live).id)) else {
            return;
        };
        let cancelled = self.now(self.store.cancel(self.world.wall(), run, Reason::Requested));
        let state = self.now(self.store.memory.run(run)).map(|run| run.state);
        if cancelled == Cancelled::Ended && state != Some(RunState::Cancelled) {
            self.breaks(format!("{run} was cancelled while it waited, and is {state:?}"));
        }
    }

    fn change_lane(&mut self) {
        let lane = *self.random.one_of(&["cron", "main", "nightly"]);
        let settings = self.random.permille(700).then(|| LaneSettings {
            slots: self.random.between(1, 10) as u32,
            limit: self.random.permille(500).then(|| self.random.between(1, 5) as u32),
            queue_limit: self.random.permille(500).then(|| self.random.between(1, 10) as u32),
        });
        self.ledger.lanes.insert(lane, (self.world.now(), settings.and_then(|settings| settings.limit)));
        self.now(self.store.set_lane(self.world.wall(), lane, settings));
    }

    fn drain_one(&mut self) {
        let place = self.random.below(self.nodes.len() as u64) as usize;
        let draining = self.random.permille(500);
        if let Some(node) = self.nodes[place].driver.as_ref().map(|driver| driver.node()) {
            self.now(self.store.drain(self.world.wall(), node, draining));
        }
    }

    /// Something goes wrong.
    pub(crate) fn go_wrong(&mut self) {
        let place = self.random.below(self.nodes.len() as u64) as usize;
        let now = self.world.now();
        match self.random.below(100) {
            0..25 if self.nodes[place].life != Life::Down => {
                let with_keeper = self.random.permille(300);
                self.crash(place, with_keeper);
                let down = self.outage();
                self.soon(down, What::Start(place));
            }
            25..40 => {
                let lives = self.nodes[place].lives;
                let timeout = std::time::Duration::from_micros(self.random.below(HOUR));
                self.say(|| format!("node {place} is told to stop"));
                let input = Box::new(Input::Stop { timeout });
                self.soon(SECOND, What::Give { place, lives, input });
            }
            40..55 => {
                let time = match self.random.below(3) {
                    0 => self.random.between(SECOND, self.params.lease()),
                    1 => self.random.between(self.params.lease() / 2, 3 * self.params.lease()),
                    _ => self.random.between(self.params.lease(), DAY),
                };
                if self.random.permille(500) {
                    self.nodes[place].freezes = Some(time);
                } else {
                    let calls_land = self.random.permille(500);
                    self.freeze(place, time, calls_land);
                }
            }
            55..70 => {
                let until = now + self.outage();
                self.say(|| "the store does not answer".to_owned());
                self.world.faults(|faults| faults.down_until = until);
            }
            70..78 => {
                let until = now + self.outage();
                self.say(|| "the disk is full".to_owned());
                self.world.faults(|faults| faults.full_until = until);
            }
            78..88 => {
                let until = now + self.outage();
                self.say(|| format!("node {place} does not reach the store"));
                self.world.faults(|faults| faults.cut_until[place] = until);
            }
            88..94 => {
                let until = now + self.outage();
                self.say(|| "the store is slow".to_owned());
                self.world.faults(|faults| faults.slow_until = until);
            }
            _ if self.params.steps_clock => {
                let longest = *self.random.one_of(&[SECOND, MINUTE, HOUR, 4 * HOUR]);
                let by = self.random.between(1_000, longest) as i64;
                let by = if self.random.permille(600) { -by } else { by };
                // At once, or between the answer of a node's next read of what is due and what it makes of it.
                if self.random.permille(500) {
                    self.say(|| format!("the store's clock will be stepped by {} s", by / SECOND as i64));
                    self.world.step_later(by);
                } else {
                    self.step_clock(by);
                }
            }
            _ => {}
        }
    }

    /// Steps the store's clock; then somebody changes some schedules.
    pub(crate) fn step_clock(&mut self, by: i64) {
        self.say(|| format!("the store's clock is stepped by {} s", by / SECOND as i64));
        self.world.step(by);
        self.pause_and_resume();
        self.remove_and_add_again();
    }

    fn outage(&mut self) -> Micros {
        match self.random.below(4) {
            0 => self.random.between(SECOND, MINUTE),
            1 => self.random.between(MINUTE, self.params.lease()),
            2 => self.random.between(self.params.lease(), 6 * HOUR),
            _ => self.random.between(HOUR, 3 * DAY),
        }
    }

    /// Everything works again, and nothing is paused, drained or limited, or needs a label that no node has.
    pub(crate) fn heal(&mut self) {
        if self.broken.is_some() {
            return;
        }
        self.say(|| "everything heals".to_owned());
        self.is_healed = true;
        let nodes = self.nodes.len();
        self.world.faults(|faults| {
            *faults = Default::default();
            faults.cut_until = vec![0; nodes];
        });
        for place in 0..nodes {
            let lives = self.nodes[place].lives;
            match self.nodes[place].life {
                Life::Down => self.soon(SECOND, What::Start(place)),
                Life::Frozen { .. } => self.soon(SECOND, What::Thaw { place, lives }),
                Life::Up => {}
            }
        }
        self.undrain();
        let now = self.world.wall();
        let pids: Vec<u64> = self.processes.keys().copied().collect();
        for pid in pids {
            let outcome = self.processes[&pid].outcome;
            self.end_process(pid, outcome, MINUTE);
        }
        self.ledger.lanes.clear();
        for lane in ["cron", "main", "nightly"] {
            self.now(self.store.set_lane(now, lane, None));
        }
        for agent in &mut self.ledger.agents {
            agent.definition.needs.retain(|label| label != draw::NO_LABEL);
            for (_, definition) in &mut agent.schedules {
                definition.options.enabled = true;
            }
        }
        self.apply_files();
        for name in self.ledger.names() {
            let Some(record) = self.record(&name) else { continue };
            self.now(self.store.reset_breaker(now, record.agent, &record.definition.options.command));
            self.now(self.store.reset_budget(now, record.agent));
            let store = self.store.clone();
            self.done(belfry::testing::resume(&*store, now, &record, Resume::Skip));
        }
    }

    /// Lets all nodes take work again. One that did not renew its lease in time takes no mark: it is asked again later.
    pub(crate) fn undrain(&mut self) {
        let now = self.world.wall();
        let mut is_left = false;
        for node in self.now(self.store.nodes()) {
            is_left |= self.now(self.store.drain(now, node.id, false)) == Drained::Dead;
        }
        if is_left {
            let at = self.world.now() + self.params.lease();
            self.at(at, What::Undrain);
        }
    }

    /// Every tick has its result by now. From now on nothing ticks, so that everything can end.
    pub(crate) fn settle(&mut self) {
        if self.broken.is_some() {
            return;
        }
        self.check_ticks();
        for agent in self.ledger.foreign.iter_mut().chain(&mut self.ledger.agents) {
            for (_, definition) in &mut agent.schedules {
                definition.options.enabled = false;
            }
        }
        self.apply_files();
        self.apply_foreign();
    }
}
