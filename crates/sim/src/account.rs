//! Accounts of what must hold. The expected ticks of a schedule are computed from its definitions and the instants at which
//! they were made, by `belfry_time` alone: neither planner nor store is asked for them.

use std::collections::{BTreeMap, BTreeSet};

use belfry::{AgentSpec, RunState, ScheduleDefinition, Timestamp, When};
use belfry_core::check::Status;
use belfry_core::definition::{AnchorName, IfRunning, Scope};
use belfry_core::{Reason, SkipRange, Trigger};
use belfry_store::{RunRecord, ScheduleRecord, Store};

use crate::node::Process;
use crate::sim::{Sim, signed};
use crate::world::Micros;

/// A definition of a schedule, for the ticks after `from` up to `until`.
#[derive(Debug, Clone)]
struct Span {
    from: Timestamp,
    until: Option<Timestamp>,
    definition: ScheduleDefinition,
}

/// What the files say, and what they said when.
pub(crate) struct Ledger {
    /// The files.
    pub agents: Vec<AgentSpec>,
    /// How often they were applied.
    pub applied: u64,
    /// Definitions of each schedule, in order.
    spans: BTreeMap<String, Vec<Span>>,
    /// What was taken out of the files.
    removed: Vec<(String, ScheduleDefinition)>,
    /// When the limits or policies of an agent were edited last, in true time.
    edits: BTreeMap<String, Micros>,
    /// Ticks whose result was checked.
    pub ticks: u64,
}

/// The results of a schedule's ticks.
struct Results {
    runs: Vec<RunRecord>,
    ranges: Vec<SkipRange>,
}

impl Results {
    fn last(&self) -> Option<Timestamp> {
        let runs = self.runs.iter().filter_map(|run| run.tick_at);
        runs.chain(self.ranges.iter().map(|range| range.to)).max()
    }
}

impl Ledger {
    pub(crate) fn new(agents: Vec<AgentSpec>) -> Ledger {
        Ledger {
            agents,
            applied: 0,
            spans: BTreeMap::new(),
            removed: Vec::new(),
            edits: BTreeMap::new(),
            ticks: 0,
        }
    }

    /// Names of all schedules in the files.
    pub(crate) fn names(&self) -> Vec<String> {
        let of = |agent: &AgentSpec| {
            let agent_name = agent.name.clone();
            agent.schedules.iter().map(move |(name, _)| format!("{agent_name}/{name}")).collect::<Vec<_>>()
        };
        self.agents.iter().flat_map(of).collect()
    }

    /// The definition of a schedule in the files.
    pub(crate) fn definition(&mut self, name: &str) -> Option<&mut ScheduleDefinition> {
        let (agent, schedule) = name.split_once('/')?;
        let agent = self.agents.iter_mut().find(|each| each.name == agent)?;
        agent.schedules.iter_mut().find(|(name, _)| name == schedule).map(|(_, definition)| definition)
    }

    /// Names of schedules that were taken out of the files.
    pub(crate) fn removed(&self) -> impl Iterator<Item = &str> {
        self.removed.iter().map(|(name, _)| name.as_str())
    }

    /// What makes a schedule tick, also of one that was taken out.
    pub(crate) fn when(&self, name: &str) -> Option<&When> {
        let removed = self.removed.iter().find(|(each, _)| each == name).map(|(_, definition)| definition);
        let (agent, schedule) = name.split_once('/')?;
        let agent = self.agents.iter().find(|each| each.name == agent)?;
        let known =
            agent.schedules.iter().find(|(each, _)| each == schedule).map(|(_, definition)| definition);
        known.or(removed).map(|definition| &definition.when)
    }

    /// Takes a schedule out of the files.
    pub(crate) fn remove(&mut self, name: &str) {
        let Some((agent, schedule)) = name.split_once('/') else { return };
        let Some(spec) = self.agents.iter_mut().find(|spec| spec.name == agent) else { return };
        if let Some(place) = spec.schedules.iter().position(|(each, _)| each == schedule) {
            let (_, definition) = spec.schedules.remove(place);
            self.removed.push((name.to_owned(), definition));
        }
    }

    /// Puts a schedule back that was taken out.
    pub(crate) fn add_again(&mut self, name: &str) -> bool {
        let Some(place) = self.removed.iter().position(|(each, _)| each == name) else { return false };
        let (name, definition) = self.removed.remove(place);
        let Some((agent, schedule)) = name.split_once('/') else { return false };
        let Some(spec) = self.agents.iter_mut().find(|spec| spec.name == agent) else { return false };
        spec.schedules.push((schedule.to_owned(), definition));
        true
    }

    /// The limits or policies of the agent of a schedule were edited.
    pub(crate) fn edited(&mut self, name: &str, at: Micros) {
        let agent = name.split('/').next().unwrap_or_default();
        self.edits.insert(agent.to_owned(), at);
    }

    fn opened(&self) -> Vec<String> {
        let open = |spans: &[Span]| spans.last().is_some_and(|span| span.until.is_none());
        self.spans.iter().filter(|(_, spans)| open(spans)).map(|(name, _)| name.clone()).collect()
    }
}

impl Sim {
    /// Applies the files, and remembers from when on which definition holds.
    pub(crate) fn apply_files(&mut self) {
        let now = self.world.wall();
        let names = self.ledger.names();
        let mut changes = Vec::new();
        for name in self.ledger.opened() {
            if !names.contains(&name) {
                changes.push((name, None));
            }
        }
        for name in names {
            let Some(definition) = self.ledger.definition(&name).cloned() else { continue };
            let open = self.ledger.spans.get(&name).and_then(|spans| spans.last());
            let is_same = open.is_some_and(|span| {
                span.until.is_none() && span.definition.timing_key() == definition.timing_key()
            });
            if !is_same {
                changes.push((name, Some(definition)));
            }
        }
        let changes: Vec<_> = changes
            .into_iter()
            .map(|(name, definition)| {
                // Nothing is armed at or before the last planned tick, also after the clock was stepped back.
                let planned = self.record(&name).and_then(|record| self.results(&record).last());
                (name, definition, planned.map_or(now, |planned| planned.max(now)))
            })
            .collect();
        self.ledger.applied += 1;
        let (digest, agents) = (self.ledger.applied.to_string(), self.ledger.agents.clone());
        self.now(self.store.clone().apply(now, "files", &digest, &agents));
        for (name, definition, at) in changes {
            let spans = self.ledger.spans.entry(name).or_default();
            if let Some(open) = spans.last_mut().filter(|span| span.until.is_none()) {
                open.until = Some(at);
            }
            spans.extend(definition.map(|definition| Span { from: at, until: None, definition }));
        }
        self.hint();
    }

    /// A schedule as it stands.
    pub(crate) fn record(&self, name: &str) -> Option<ScheduleRecord> {
        self.now(self.store.schedule(name))
    }

    fn results(&self, record: &ScheduleRecord) -> Results {
        let mut runs = self.now(self.store.ended_runs(record.id, u32::MAX));
        runs.extend(self.now(self.store.live_runs()).into_iter().filter(|run| run.schedule == record.id));
        runs.retain(|run| matches!(run.trigger, Trigger::Schedule | Trigger::CatchUp));
        let mut ranges: Vec<SkipRange> = self.now(self.store.skips(record.id, None, u32::MAX));
        ranges.extend(record.open_skip);
        Results { runs, ranges }
    }

    /// What must hold when a process starts.
    pub(crate) fn check_start(&mut self, process: &Process) {
        if let Some(other) = self.processes.values().find(|other| other.run == process.run) {
            let words = format!(
                "two attempts of {} at once: #{} on node {} beside #{} on node {}",
                process.run, process.epoch, process.place, other.epoch, other.place
            );
            return self.breaks(words);
        }
        self.check_turn(process);
        self.check_order(process);
        self.check_limit(process);
    }

    /// A run of a schedule that queues or cancels starts only if nothing else of its scope runs.
    fn check_turn(&mut self, process: &Process) {
        let Some(record) = self.record(&process.name) else { return };
        let options = &record.definition.options;
        if process.is_session || !matches!(options.if_running, IfRunning::Queue | IfRunning::Cancel) {
            return;
        }
        let in_scope = |other: &Process| match options.overlap {
            Scope::Schedule => other.name == process.name,
            Scope::Command => other.agent == process.agent && other.command == process.command,
            Scope::Agent => other.agent == process.agent,
        };
        let edited = self.ledger.edits.get(&process.agent).copied();
        let other = self
            .processes
            .values()
            .find(|other| !other.is_session && in_scope(other) && Some(other.started_at) > edited);
        if let Some(other) = other {
            let words = format!(
                "{} {} starts beside {} {}, which is of its scope ({:?}, {:?})",
                process.name, process.run, other.name, other.run, options.if_running, options.overlap
            );
            self.breaks(words);
        }
    }

    /// A run of a schedule that queues or cancels starts after every earlier run of its schedule.
    fn check_order(&mut self, process: &Process) {
        let Some(record) = self.record(&process.name) else { return };
        let queues = matches!(record.definition.options.if_running, IfRunning::Queue | IfRunning::Cancel);
        if process.is_session || !queues || self.ledger.edits.contains_key(&process.agent) {
            return;
        }
        let live = self.now(self.store.live_runs());
        let Some(own) = live.iter().find(|run| run.id == process.run) else { return };
        let is_earlier = |run: &&RunRecord| {
            run.schedule == own.schedule
                && run.state == RunState::Pending
                && (run.due_at, run.id) < (own.due_at, own.id)
        };
        if let Some(earlier) = live.iter().find(is_earlier) {
            let words = format!(
                "{} {} (due {}) starts before {} (due {}, attempt {})",
                process.name, own.id, own.due_at, earlier.id, earlier.due_at, earlier.attempt
            );
            self.breaks(words);
        }
    }

    /// No more runs of an agent than its limit. Lowering the limit ends nothing.
    fn check_limit(&mut self, process: &Process) {
        if process.is_session {
            return;
        }
        let agent = self.ledger.agents.iter().find(|agent| agent.name == process.agent);
        let Some(max) = agent.and_then(|agent| agent.definition.max_concurrent) else { return };
        let edited = self.ledger.edits.get(&process.agent).copied();
        let running = self
            .processes
            .values()
            .filter(|other| other.agent == process.agent && !other.is_session)
            .filter(|other| Some(other.started_at) > edited)
            .count();
        if running >= max as usize {
            self.breaks(format!("{} runs of {} beside the limit of {max}", running + 1, process.agent));
        }
    }

    /// Every tick up to now, but for the last moments, has exactly one result.
    pub(crate) fn check_ticks(&mut self) {
        let until = self.world.wall() - signed(self.params.lease());
        for name in self.ledger.names() {
            let Some(record) = self.record(&name) else {
                let is_one_shot = |spans: &Vec<Span>| {
                    spans.iter().any(|span| matches!(span.definition.when, When::At(_) | When::After(_)))
                };
                if !self.ledger.spans.get(&name).is_some_and(is_one_shot) {
                    self.breaks(format!("{name} is gone"));
                }
                continue;
            };
            let results = self.results(&record);
            self.check_unique(&name, &results);
            self.check_armed(&record);
            let spans = self.ledger.spans.get(&name).cloned().unwrap_or_default();
            let is_grid = |span: &Span| {
                let options = &span.definition.options;
                match &span.definition.when {
                    When::Cron(_) => true,
                    When::Every(text) => {
                        options.anchor == AnchorName::Slot && text.starts_with(|c: char| c.is_ascii_digit())
                    }
                    _ => false,
                }
            };
            if spans.iter().all(is_grid) {
                self.check_grid(&name, &spans, &results, until);
            }
        }
    }

    fn check_unique(&mut self, name: &str, results: &Results) {
        let mut seen = BTreeSet::new();
        for tick in results.runs.iter().filter_map(|run| run.tick_at) {
            if !seen.insert(tick) {
                return self.breaks(format!("{name}: the tick {tick} has two runs"));
            }
        }
    }

    /// A schedule that ticks has something that makes it tick.
    fn check_armed(&mut self, record: &ScheduleRecord) {
        let is_ticked = matches!(record.definition.when, When::Cron(_) | When::Every(_));
        let is_armed = record.token.is_some() || record.waits_for.is_some() || record.deferred.is_some();
        if is_ticked && record.status == Status::Active && !is_armed {
            self.breaks(format!("{}: nothing will make it tick", record.name));
        }
        if let Some(run) = record.waits_for
            && self.now(self.store.run(run)).is_none_or(|run| !run.state.is_live())
        {
            self.breaks(format!("{}: it waits for {run}, which does not live", record.name));
        }
    }

    fn check_grid(&mut self, name: &str, spans: &[Span], results: &Results, until: Timestamp) {
        let mut expected: BTreeMap<Timestamp, Vec<String>> = BTreeMap::new();
        for span in spans {
            let Ok(schedule) = span.definition.compile(name) else { continue };
            let Some(timing) = schedule.timing.as_ref() else { continue };
            let end = span.until.unwrap_or(Timestamp::MAX).min(until);
            let ticks =
                timing.ticks(span.from).take_while(|tick| tick.tick_at <= end && tick.due_at <= until);
            expected.extend(ticks.map(|tick| (tick.tick_at, Vec::new())));
        }
        let last = expected.last_key_value().map(|(tick, _)| *tick);
        for run in &results.runs {
            let Some(tick) = run.tick_at else { continue };
            match expected.get_mut(&tick) {
                Some(found) => found.push(format!("run {}", run.id)),
                None if Some(tick) > last => {}
                None => return self.breaks(format!("{name}: a run for {tick}, which is no tick of it")),
            }
        }
        for range in &results.ranges {
            let mut count = 0;
            for (_, found) in expected.range_mut(range.from..=range.to) {
                count += 1;
                found.push(format!("{} {}..{}", range.reason, range.from, range.to));
            }
            if Some(range.to) <= last && count != range.count {
                return self.breaks(format!("{name}: {range:?} stands for {count} ticks"));
            }
        }
        self.ledger.ticks += expected.len() as u64;
        let wrong: Vec<_> = expected.iter().filter(|(_, found)| found.len() != 1).take(4).collect();
        if !wrong.is_empty() {
            let spans: Vec<_> = spans.iter().map(|span| (span.from, &span.definition.when)).collect();
            let words =
                format!("{name}: ticks without exactly one result: {wrong:?}; definitions since {spans:?}");
            self.breaks(words);
        }
    }

    /// Nothing is left that could run.
    pub(crate) fn check_end(&mut self) {
        if self.broken.is_some() {
            return;
        }
        let live = self.now(self.store.live_runs());
        if let Some(run) = live.first() {
            let words = format!(
                "{} runs never end, {} of them wait; the first: {} {} {:?} attempt {} of {}, not before {}",
                live.len(),
                live.iter().filter(|run| run.state == RunState::Pending).count(),
                run.name,
                run.id,
                run.state,
                run.attempt,
                run.max_attempts,
                run.not_before
            );
            return self.breaks(words);
        }
        if let Some(process) = self.processes.values().next() {
            return self.breaks(format!("a process is left: {process:?}"));
        }
        for record in self.ledger.names().iter().filter_map(|name| self.record(name)).collect::<Vec<_>>() {
            let runs = self.now(self.store.ended_runs(record.id, u32::MAX));
            // Every simulated program can be executed: only a keeper refuses.
            if let Some(run) = runs.iter().find(|run| run.reason == Some(Reason::SpawnFailed)) {
                return self.breaks(format!("{} {} failed although it was never started", run.name, run.id));
            }
        }
        let wrong = self.now(self.store.integrity());
        if !wrong.is_empty() {
            self.breaks(format!("the store is not whole: {wrong:?}"));
        }
    }
}
