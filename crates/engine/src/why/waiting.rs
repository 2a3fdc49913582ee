//! What a run waits for, or would have to wait for: its instant, a node, its turn, its agent's limit.

use belfry_core::breaker::{self, Admits};
use belfry_core::definition::{Options, When, handler_of};
use belfry_core::edit::is_of_later_clock;
use belfry_core::gate::{self, Gate, Pass, Place, Scopes};
use belfry_core::text::count;
use belfry_core::{RunState, SkipReason, Trigger, ending};
use belfry_store::RunRecord;
use belfry_time::{SignedDuration, Timestamp};

use super::{CLOCK_BACK, Known, NO_NODE, length, line};

/// The reason for a run if its agent, or each node that could run it, runs as many as it may.
const AT_CAPACITY: &str = "at_capacity";

/// A run that is ready for longer while nothing runs in its lane should have started.
const READY_MAX: SignedDuration = SignedDuration::from_mins(1);

impl Known {
    /// Whether its agent's limit, or the limit of every node that could run it, is reached.
    pub(super) fn at_capacity(&self) -> Result<String, String> {
        let name = &self.record.agent_name;
        let is_chat = matches!(self.record.definition.when, When::Chat(_));
        let is_limited = Place::of(&self.agent, &self.record.definition.options, is_chat).gates.agent;
        let words = match self.agent.max_concurrent {
            None => format!("{name} has no limit"),
            Some(_) if !is_limited => {
                format!("max_concurrent of {name} is not written: it does not bind sessions")
            }
            Some(max) => {
                let running =
                    self.at_gates().0.iter().filter(|run| run.is_running && run.gates.agent).count();
                let words = running_words(running, i64::from(max), &format!(" of {name}"));
                if running >= max as usize {
                    return Err(words);
                }
                words
            }
        };
        self.nodes_full().map_or(Ok(words), Err)
    }

    /// In words, if every node that could run it runs as many as its own `max_concurrent` allows.
    fn nodes_full(&self) -> Option<String> {
        let is_running_on = |run: &&RunRecord, node| run.state == RunState::Running && run.node == Some(node);
        let full = self.able_nodes().map(|node| {
            let running = self.live.iter().filter(|run| is_running_on(run, node.id)).count();
            node.max_concurrent.filter(|max| running >= *max as usize).map(|max| (running, max))
        });
        let full: Vec<(usize, u32)> = full.collect::<Option<_>>()?;
        match full[..] {
            [] => None,
            [(running, max)] => {
                Some(format!("{} on it, its max_concurrent", running_words(running, i64::from(max), "")))
            }
            _ => Some(format!("all {} that can run it run as many as their max_concurrent", full.len())),
        }
    }

    pub(super) fn no_node(&self) -> Result<String, String> {
        match (self.nodes.len(), self.able_nodes().count()) {
            (0, _) => Err("no node takes work; `belfry up` starts one, `belfry nodes` lists them".into()),
            (_, 0) => Err(format!("no node that is running has {}", needs_words(&self.agent.needs))),
            (_, 1) => Ok("one node can run it".into()),
            (_, able) => Ok(format!("{able} nodes can run it")),
        }
    }

    fn able_nodes(&self) -> impl Iterator<Item = &belfry_store::Node> {
        let needs = &self.agent.needs;
        self.nodes.iter().filter(|node| gate::serves(&node.labels, needs))
    }

    /// A failure budget that is used up, and the way out.
    pub(super) fn budget_words(&self, until: Timestamp) -> String {
        let agent = &self.record.agent_name;
        format!(
            "the failure budget of {agent} is used up until {}; `belfry budget reset {agent}` clears it",
            self.time(until)
        )
    }

    /// What a run that waits waits for, as far as the store can tell: the reason, and in words.
    pub(super) fn waits_for(&self, run: &RunRecord) -> (Option<&'static str>, String) {
        if run.not_before > self.now {
            return self.waits_until(run);
        }
        if let Err(detail) = self.no_node() {
            return (Some(NO_NODE), format!("waits for a node: {detail}"));
        }
        if let Some(held) = self.held(run) {
            return held;
        }
        if let Some(detail) = self.nodes_full() {
            return (Some(AT_CAPACITY), format!("waits for its node: {detail}"));
        }
        let lane = &run.lane;
        let is_busy = self.live.iter().any(|live| live.state == RunState::Running && live.lane == *lane);
        let since = run.not_before.max(run.created_at);
        if !is_busy && self.now.duration_since(since) > READY_MAX {
            let words = format!(
                "has been ready for {}, and nothing runs in the lane {lane}; `belfry doctor` looks for what is wrong",
                length(since, self.now)
            );
            return (None, words);
        }
        if !is_busy && run.attempt > 0 {
            let words = "is ready; if its node died it starts after other such runs, and on a node that has been up for \
                         a while if it may have killed that node";
            return (None, words.into());
        }
        (None, format!("is ready and waits for a free slot in the lane {lane}"))
    }

    /// A run that waits for the instant of its next attempt, and what put that off.
    fn waits_until(&self, run: &RunRecord) -> (Option<&'static str>, String) {
        let until = format!("{}, in {}", self.time(run.not_before), length(self.now, run.not_before));
        if is_of_later_clock(run.created_at, self.now) {
            let words = format!("waits until {until}: the clock was set back after it was made");
            return (Some(CLOCK_BACK), words);
        }
        if breaker::is_gated(run.trigger, run.attempt + 1) && self.facts.breaker == Admits::No {
            let words = format!("waits until {until}, to be looked at again: its breaker is open");
            return (Some(SkipReason::CircuitOpen.as_str()), words);
        }
        if run.trigger == Trigger::CatchUp && run.attempt == 0 {
            let timing = self.schedule.as_ref().ok().and_then(|schedule| schedule.timing.as_ref());
            let opens_at = timing.and_then(|timing| timing.next_allowed(self.now));
            if let Some(opens_at) = opens_at.filter(|at| *at > self.now) {
                let (at, within) = (self.time(opens_at), length(self.now, opens_at));
                let words = format!("waits until its window opens, {at}, in {within}");
                return (Some(SkipReason::OutsideWindow.as_str()), words);
            }
        }
        let held = self
            .budget_until
            .filter(|until| ending::holds(run.trigger, run.attempt) && run.not_before >= *until);
        let (reason, why) = match held {
            Some(until) => (SkipReason::BudgetExhausted.as_str(), format!(": {}", self.budget_words(until))),
            None => ("not_due", String::new()),
        };
        let words = match run.attempt {
            0 => format!("waits until {until}{why}"),
            tried => {
                let error = run.error.as_deref().map_or(String::new(), |error| format!(" ({})", line(error)));
                let (next, max) = (tried + 1, run.max_attempts);
                format!("failed{error} and waits until {until}, for attempt {next} of {max}{why}")
            }
        };
        (Some(reason), words)
    }

    /// The gate that holds a run, in words.
    fn held(&self, run: &RunRecord) -> Option<(Option<&'static str>, String)> {
        let (live, scopes) = self.at_gates();
        let own = live.iter().find(|other| self.live.get(other.order).is_some_and(|it| it.id == run.id))?;
        let max = self.agent.max_concurrent.map_or(i64::MAX, i64::from);
        let cap = |gate: Gate<'_>| if matches!(gate, Gate::Agent(_)) { max } else { 1 };
        let (gate, pass, ahead) = gate::holds(own, &live, &scopes, cap)?;
        let ahead = ahead.and_then(|order| self.live.get(order));
        let is_running = ahead.is_some_and(|ahead| ahead.state == RunState::Running);
        let ahead = ahead.map_or("another".to_owned(), |ahead| format!("run {}", ahead.id));
        let name = &self.record.agent_name;
        let scope = match gate {
            Gate::Command(_, command) => format!("the command {command} of {name}"),
            Gate::Agent(_) | Gate::Schedule(_) | Gate::WholeAgent(_) => format!("the agent {name}"),
        };
        let turn = Some(SkipReason::AlreadyRunning.as_str());
        Some(match pass {
            Pass::Limit => {
                let running = live.iter().filter(|run| run.is_running && run.gates.agent).count();
                (
                    Some(AT_CAPACITY),
                    format!("waits for its agent: {}", running_words(running, max, &format!(" of {name}"))),
                )
            }
            Pass::Turn => (turn, format!("waits its turn behind {ahead}")),
            Pass::Alone => {
                let then = if is_running { "is running there" } else { "goes first" };
                (turn, format!("waits to run alone in {scope}: {ahead} {then}"))
            }
            Pass::Beside => (turn, format!("waits behind {ahead}, which waits to run alone in {scope}")),
        })
    }

    /// The live runs of its agent as gates see them, by their places among all that live, and the scopes that these
    /// want for themselves.
    fn at_gates(&self) -> (Vec<gate::Live<'_, usize>>, Scopes) {
        let (mut scopes, removed) = (Scopes::default(), Options::default());
        let own = self.live.iter().enumerate().filter(|(_, run)| run.agent == self.record.agent);
        let live = own.map(|(order, run)| {
            let options = self.options.get(&run.schedule).unwrap_or(&removed);
            let is_message = run.trigger == Trigger::Message;
            if !is_message {
                scopes.add(options, &run.command);
            }
            gate::Live {
                order,
                agent: run.agent,
                schedule: run.schedule,
                command: &run.command,
                is_message,
                gates: Place::of(&self.agent, options, is_message).gates,
                is_running: run.state == RunState::Running,
                is_due: run.due_at <= self.now,
                is_ready: run.not_before <= self.now,
            }
        });
        let live = live.collect();
        (live, scopes)
    }
}

/// What a node must have, in words.
fn needs_words(needs: &[String]) -> String {
    let (handlers, labels): (Vec<&String>, Vec<&String>) =
        needs.iter().partition(|label| handler_of(label).is_some());
    let labels: Vec<&str> = labels.into_iter().map(String::as_str).collect();
    let labels = (!labels.is_empty()).then(|| format!("the labels {}", labels.join(", ")));
    let handlers = handlers.into_iter().filter_map(|label| handler_of(label));
    let handlers = handlers.map(|agent| format!("the Rust handler of {agent}"));
    handlers.chain(labels).collect::<Vec<_>>().join(" and ")
}

/// How many runs are running of those that may.
fn running_words(running: usize, max: i64, of: &str) -> String {
    let are = if max == 1 { "is" } else { "are" };
    format!("{running} of {}{of} {are} running", count(usize::try_from(max).unwrap_or(usize::MAX), "run"))
}
