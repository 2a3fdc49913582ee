//! What people and programs do to schedules and runs, and what goes wrong around them.

use belfry::driver::{Input, Options};
use belfry::{LaneSettings, RunId, ScheduleOptions, SessionVerb, When};
use belfry_core::Reason;
use belfry_core::check::Status;
use belfry_store::{Enqueue, RunRecord, ScheduleRecord, Store};

use crate::draw::{self, Habit};
use crate::node::Life;
use crate::sim::{Sim, What, signed};
use crate::world::{DAY, HOUR, MINUTE, Micros, SECOND};

impl Sim {
    /// One thing that somebody does to a schedule in whatever state it is.
    pub(crate) fn do_something(&mut self) {
        let names = self.ledger.names();
        if names.is_empty() {
            return;
        }
        let name = self.random.one_of(&names).clone();
        let record = self.record(&name);
        let state = record.as_ref().map_or("retired", |record| self.state_of(record));
        let verb = self.random.below(24);
        let now = self.world.wall();
        let verb = match (verb, record) {
            (0 | 1, Some(record)) => {
                let hours = self.random.between(1, 72);
                let until = self.random.permille(500).then(|| now + signed(hours * HOUR));
                self.now(self.store.pause(now, record.id, Some("simulated"), until));
                "pause"
            }
            (2..=4, Some(record)) => {
                let catch_up = self.random.permille(500);
                let store = self.store.clone();
                let resumed = belfry::resume(&store, now, &record, catch_up);
                self.done(resumed);
                if catch_up { "resume with catch-up" } else { "resume" }
            }
            (5 | 6, Some(_)) => self.edit_timing(&name),
            (7, Some(_)) => self.edit_policies(&name),
            (8, Some(_)) => self.edit_agent(&name),
            (9, Some(_)) => self.switch(&name, false),
            (10 | 11, _) => self.switch(&name, true),
            (12 | 13, Some(_)) => self.trigger(&name),
            (14 | 15, _) => self.cancel_one(),
            (16, Some(record)) => {
                self.now(self.store.reset_breaker(now, record.agent, &record.definition.options.command));
                "breaker reset"
            }
            (17, Some(record)) => {
                self.now(self.store.reset_budget(record.agent));
                "budget reset"
            }
            (18, _) => self.change_lane(),
            (19, _) => {
                let lane = *self.random.one_of(&["cron", "main", "nightly"]);
                self.now(self.store.clear_lane(now, lane));
                "lane clear"
            }
            (20, _) => self.drain_one(),
            (21, _) => self.remove_or_add(&name),
            (22, Some(record)) if matches!(record.definition.when, When::Chat(_)) => self.session(&record),
            (23, _) => {
                for habit in self.habits.values_mut() {
                    *habit = Habit::draw(&mut self.random);
                }
                return;
            }
            _ => return,
        };
        self.say(|| format!("{verb}: {name}, {state}"));
        *self.met.entry((verb, state)).or_default() += 1;
        self.hint();
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
        if own.iter().any(|process| process.is_stopping) {
            return "being cancelled";
        }
        if record.deferred.is_some() {
            return "deferred";
        }
        if !own.is_empty() {
            return "running";
        }
        if record.next_retry_at.is_some() {
            return "waits for its retry";
        }
        if record.pending > 0 {
            return "parked";
        }
        let overdue = |due_at| due_at + signed(MINUTE) < self.world.wall();
        match record.token {
            Some(token) if overdue(token.due_at) => "overdue",
            _ => "idle",
        }
    }

    fn done<T>(&self, call: impl Future<Output = Result<T, belfry::Error>>) {
        // What is refused here is refused to people, too.
        let _ = self.now(async { Ok(call.await.ok()) });
    }

    fn edit_timing(&mut self, name: &str) -> &'static str {
        let drawn = draw::schedule(&mut self.random).0;
        let Some(definition) = self.ledger.definition(name) else { return "edit of timing" };
        if matches!(definition.when, When::Cron(_) | When::Every(_))
            && matches!(drawn.when, When::Cron(_) | When::Every(_))
        {
            let (enabled, old) = (definition.options.enabled, definition.options.clone());
            *definition = drawn;
            definition.options = ScheduleOptions {
                enabled,
                catch_up: old.catch_up,
                if_running: old.if_running,
                overlap: old.overlap,
                command: old.command,
                ..definition.options.clone()
            };
        }
        self.apply_files();
        "edit of timing"
    }

    fn edit_policies(&mut self, name: &str) -> &'static str {
        let drawn = draw::policies(&mut self.random);
        let at = self.world.now();
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
        "edit of policies"
    }

    fn edit_agent(&mut self, name: &str) -> &'static str {
        let drawn = draw::agent(&mut self.random);
        let at = self.world.now();
        let agent = name.split('/').next().unwrap_or_default();
        if let Some(spec) = self.ledger.agents.iter_mut().find(|spec| spec.name == agent) {
            spec.definition = drawn;
        }
        self.ledger.edited(name, at);
        self.apply_files();
        "edit of limits"
    }

    fn switch(&mut self, name: &str, enabled: bool) -> &'static str {
        if let Some(definition) = self.ledger.definition(name) {
            definition.options.enabled = enabled;
        }
        self.apply_files();
        if enabled { "enable" } else { "disable" }
    }

    fn trigger(&mut self, name: &str) -> &'static str {
        let now = self.world.wall();
        let id = RunId(self.new_id());
        let store = self.store.clone();
        let options = Options::default();
        self.done(async {
            let run = belfry::prepare(&store, &options, now, name).await?;
            let run = belfry_store::NewRun { id, ..run };
            Ok(store.enqueue(now, &Enqueue { run, key: None }).await?)
        });
        "trigger"
    }

    fn cancel_one(&mut self) -> &'static str {
        let live: Vec<RunRecord> = self.now(self.store.live_runs());
        if !live.is_empty() {
            let run = self.random.one_of(&live).id;
            self.now(self.store.cancel(self.world.wall(), run, Reason::Requested));
        }
        "cancel"
    }

    fn change_lane(&mut self) -> &'static str {
        let lane = *self.random.one_of(&["cron", "main", "nightly"]);
        let settings = self.random.permille(700).then(|| LaneSettings {
            slots: self.random.between(1, 10) as u32,
            limit: self.random.permille(500).then(|| self.random.between(1, 5) as u32),
            queue_limit: self.random.permille(500).then(|| self.random.between(1, 10) as u32),
        });
        self.now(self.store.set_lane(self.world.wall(), lane, settings));
        "lane change"
    }

    fn drain_one(&mut self) -> &'static str {
        let place = self.random.below(self.nodes.len() as u64) as usize;
        let draining = self.random.permille(500);
        if let Some(node) = self.nodes[place].driver.as_ref().map(|driver| driver.node()) {
            self.now(self.store.drain(self.world.wall(), node, draining));
        }
        "drain"
    }

    /// Takes a schedule out of the files for good, or puts a new one in.
    fn remove_or_add(&mut self, name: &str) -> &'static str {
        let (agent, schedule) = name.split_once('/').unwrap_or_default();
        let number = self.ledger.applied;
        let added = draw::schedule(&mut self.random).0;
        let adds = self.random.permille(500);
        if let Some(spec) = self.ledger.agents.iter_mut().find(|spec| spec.name == agent) {
            if adds {
                spec.schedules.push((format!("n{number}"), added));
            } else if spec.schedules.len() > 1 {
                spec.schedules.retain(|(name, _)| name != schedule);
            }
        }
        self.apply_files();
        if adds { "add" } else { "remove" }
    }

    fn session(&mut self, record: &ScheduleRecord) -> &'static str {
        let now = self.world.wall();
        let key = *self.random.one_of(&["ada", "bob"]);
        let verb = match self.random.below(5) {
            0 => SessionVerb::Stop,
            1 => SessionVerb::Reset,
            _ => return "message",
        };
        self.now(self.store.session(now, record.id, key, verb));
        "session"
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
                self.freeze(place, time);
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
                self.say(|| format!("the store's clock is stepped by {} s", by / SECOND as i64));
                self.world.step(by);
            }
            _ => {}
        }
    }

    fn outage(&mut self) -> Micros {
        match self.random.below(4) {
            0 => self.random.between(SECOND, MINUTE),
            1 => self.random.between(MINUTE, self.params.lease()),
            2 => self.random.between(self.params.lease(), 6 * HOUR),
            _ => self.random.between(HOUR, 3 * DAY),
        }
    }

    /// Everything works again, and nothing is paused, drained or limited.
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
        let now = self.world.wall();
        for node in self.now(self.store.nodes()) {
            self.now(self.store.drain(now, node.id, false));
        }
        let pids: Vec<u64> = self.processes.keys().copied().collect();
        for pid in pids {
            let outcome = self.processes[&pid].outcome;
            self.end_process(pid, outcome, MINUTE);
        }
        for lane in ["cron", "main", "nightly"] {
            self.now(self.store.set_lane(now, lane, None));
        }
        for agent in &mut self.ledger.agents {
            for (_, definition) in &mut agent.schedules {
                definition.options.enabled = true;
            }
        }
        self.apply_files();
        for name in self.ledger.names() {
            let Some(record) = self.record(&name) else { continue };
            self.now(self.store.reset_breaker(now, record.agent, &record.definition.options.command));
            self.now(self.store.reset_budget(record.agent));
            let store = self.store.clone();
            self.done(belfry::resume(&store, now, &record, false));
        }
        self.hint();
    }

    /// Every tick has its result by now. From now on nothing ticks, so that everything can end.
    pub(crate) fn settle(&mut self) {
        if self.broken.is_some() {
            return;
        }
        self.check_ticks();
        for agent in &mut self.ledger.agents {
            for (_, definition) in &mut agent.schedules {
                definition.options.enabled = false;
            }
        }
        self.apply_files();
    }
}
