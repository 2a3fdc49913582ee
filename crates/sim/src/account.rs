//! Accounts of what must hold. The expected ticks of a schedule are computed from its definitions and the instants at which
//! they were made, by `belfry_time` alone: neither planner nor store is asked for them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use belfry::{AgentSpec, RunId, RunState, ScheduleDefinition, Timestamp, When};
use belfry_core::check::Status;
use belfry_core::definition::AnchorName;
use belfry_core::{Epoch, Reason, ScheduleId, SkipRange, Trigger};
use belfry_store::{RunRecord, ScheduleRecord, Store};
use belfry_time::Allowed;

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
    /// Runs of schedules that have another priority since: those made later may start before them.
    old_priority: HashSet<RunId>,
    /// When a session was reset last, in true time: what it left alone may run beside what came after.
    pub resets: BTreeMap<(ScheduleId, String), Micros>,
    /// When a lane was changed last, in true time, and its limit over all nodes.
    pub lanes: BTreeMap<&'static str, (Micros, Option<u32>)>,
    /// Attempts of each run that count.
    spent: HashMap<RunId, BTreeSet<Epoch>>,
    /// Schedules as they were seen last, by name.
    seen: BTreeMap<String, ScheduleRecord>,
    /// Schedules that were retired, by name: their ticks have results, too.
    retired: BTreeMap<String, BTreeSet<ScheduleId>>,
    /// Agents of other files than those that people edit.
    pub foreign: Vec<AgentSpec>,
    /// Ticks whose result was checked.
    pub ticks: u64,
}

/// The results of a schedule's ticks.
struct Results {
    runs: Vec<RunRecord>,
    ranges: Vec<SkipRange>,
    /// Ticks that somebody asked for: if the run of one lives when the planner comes to it, the planner makes no other.
    asked_for: BTreeSet<Timestamp>,
}

impl Results {
    fn last(&self) -> Option<Timestamp> {
        let runs = self.runs.iter().filter_map(|run| run.tick_at);
        runs.chain(self.ranges.iter().map(|range| range.to)).max()
    }
}

fn names_of(agents: &[AgentSpec]) -> Vec<String> {
    let of = |agent: &AgentSpec| {
        let agent_name = agent.name.clone();
        agent.schedules.iter().map(move |(name, _)| format!("{agent_name}/{name}")).collect::<Vec<_>>()
    };
    agents.iter().flat_map(of).collect()
}

impl Ledger {
    pub(crate) fn new(agents: Vec<AgentSpec>, foreign: Vec<AgentSpec>) -> Ledger {
        Ledger {
            agents,
            applied: 0,
            spans: BTreeMap::new(),
            removed: Vec::new(),
            edits: BTreeMap::new(),
            old_priority: HashSet::new(),
            resets: BTreeMap::new(),
            lanes: BTreeMap::new(),
            spent: HashMap::new(),
            seen: BTreeMap::new(),
            retired: BTreeMap::new(),
            foreign,
            ticks: 0,
        }
    }

    /// Names of all schedules in the files.
    pub(crate) fn names(&self) -> Vec<String> {
        names_of(&self.agents)
    }

    /// Names of all schedules that people leave alone.
    fn foreign_names(&self) -> Vec<String> {
        names_of(&self.foreign)
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

    /// The priority of a schedule was edited, while these runs were live.
    pub(crate) fn edited_priority(&mut self, name: &str, live: &[RunRecord]) {
        self.old_priority.extend(live.iter().filter(|run| run.name == name).map(|run| run.id));
    }

    /// Whether a run has the priority that its schedule has.
    pub(crate) fn has_priority(&self, run: RunId) -> bool {
        !self.old_priority.contains(&run)
    }

    /// When the limits or policies of an agent were edited last.
    pub(crate) fn edited_at(&self, agent: &str) -> Option<Micros> {
        self.edits.get(agent).copied()
    }

    /// A run has used one of its attempts.
    pub(crate) fn spend(&mut self, run: RunId, epoch: Epoch) {
        self.spent.entry(run).or_default().insert(epoch);
    }

    /// How many attempts a run has used.
    pub(crate) fn spent(&self, run: RunId) -> u32 {
        self.spent.get(&run).map_or(0, |epochs| epochs.len() as u32)
    }

    /// Remembers a schedule, which may be retired later.
    pub(crate) fn see(&mut self, record: &ScheduleRecord) {
        self.seen.insert(record.name.clone(), record.clone());
    }

    /// Remembers a schedule that is about to be retired.
    pub(crate) fn retire(&mut self, record: &ScheduleRecord) {
        self.see(record);
        self.retired.entry(record.name.clone()).or_default().insert(record.id);
    }

    /// Whether the window of a schedule has ever allowed an instant.
    pub(crate) fn allows(&self, name: &str, at: Timestamp) -> bool {
        // One that is invalid does not tick, and its window holds nobody.
        let mut schedules =
            self.spans.get(name).into_iter().flatten().map(|span| span.definition.compile(name));
        schedules.any(|schedule| {
            let timing = schedule.ok().and_then(|schedule| schedule.timing);
            timing.is_none_or(|timing| timing.allows(at) == Allowed::Yes)
        })
    }

    /// Whether a schedule has ever had a window.
    pub(crate) fn has_window(&self, name: &str) -> bool {
        let mut spans = self.spans.get(name).into_iter().flatten();
        spans.any(|span| {
            let options = &span.definition.options;
            options.only_between.is_some() || !options.not_on.is_empty()
        })
    }

    fn opened(&self) -> Vec<String> {
        let open = |spans: &[Span]| spans.last().is_some_and(|span| span.until.is_none());
        let foreign = self.foreign_names();
        let opened = self.spans.iter().filter(|(_, spans)| open(spans)).map(|(name, _)| name.clone());
        opened.filter(|name| !foreign.contains(name)).collect()
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
                let planned = self.known_record(&name).and_then(|record| self.results(&record).last());
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
    }

    /// Applies the files that people leave alone.
    pub(crate) fn apply_foreign(&mut self) {
        let now = self.world.wall();
        let foreign = self.ledger.foreign.clone();
        self.now(self.store.clone().apply(now, "more", "1", &foreign));
        for agent in &foreign {
            for (name, definition) in &agent.schedules {
                let spans = self.ledger.spans.entry(format!("{}/{name}", agent.name)).or_default();
                if spans.is_empty() {
                    spans.push(Span { from: now, until: None, definition: definition.clone() });
                }
            }
        }
    }

    /// A schedule as it stands, or as it stood before it was retired.
    pub(crate) fn known_record(&self, name: &str) -> Option<ScheduleRecord> {
        self.record(name).or_else(|| self.ledger.seen.get(name).cloned())
    }

    /// A schedule as it stands.
    pub(crate) fn record(&self, name: &str) -> Option<ScheduleRecord> {
        self.now(self.store.memory.schedule(name))
    }

    fn results(&self, record: &ScheduleRecord) -> Results {
        let mut runs = self.now(self.store.memory.live_runs());
        let mut ids = self.ledger.retired.get(&record.name).cloned().unwrap_or_default();
        ids.insert(record.id);
        runs.retain(|run| ids.contains(&run.schedule));
        let mut ranges: Vec<SkipRange> = record.open_skip.into_iter().collect();
        ranges.extend(self.now(self.store.memory.skips(record.id, None, u32::MAX)));
        for id in ids {
            runs.extend(self.now(self.store.memory.ended_runs(id, u32::MAX)));
        }
        let is_asked_for = |run: &&RunRecord| run.trigger == Trigger::Backfill;
        let asked_for = runs.iter().filter(is_asked_for).filter_map(|run| run.tick_at).collect();
        runs.retain(|run| matches!(run.trigger, Trigger::Schedule | Trigger::CatchUp));
        Results { runs, ranges, asked_for }
    }

    /// Every tick up to now, but for the last moments, has exactly one result.
    pub(crate) fn check_ticks(&mut self) {
        let until = self.world.wall() - signed(self.params.lease());
        let mut names = self.ledger.names();
        names.extend(self.ledger.foreign_names());
        for name in names {
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
            } else {
                let skipped: u64 = results.ranges.iter().map(|range| range.count).sum();
                self.ledger.ticks += results.runs.len() as u64 + skipped;
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
            && self.now(self.store.memory.run(run)).is_none_or(|run| !run.state.is_live())
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
        let is_one = |tick: &Timestamp, found: &[String]| {
            found.len() == 1 || found.is_empty() && results.asked_for.contains(tick)
        };
        let wrong: Vec<_> = expected.iter().filter(|(tick, found)| !is_one(tick, found)).take(4).collect();
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
        self.store.compare_all(self.world.wall());
        if let Some(difference) = self.store.differs() {
            return self.breaks(difference);
        }
        let live = self.now(self.store.memory.live_runs());
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
            let runs = self.now(self.store.memory.ended_runs(record.id, u32::MAX));
            self.check_runs(&runs);
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
