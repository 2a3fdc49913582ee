//! Agents put together in Rust.

use belfry_core::definition::{Options, When};
use belfry_core::{AgentDefinition, AgentSpec, ScheduleDefinition};

/// Puts an agent together whose work is a Rust function: no limit on how many of its runs run at once unless one is set.
///
/// ```
/// use belfry::{AgentBuilder, When};
///
/// let agent = AgentBuilder::new("prices").schedule("poll", When::Every("15m".into())).build();
/// assert_eq!(agent.schedules[0].0, "poll");
/// ```
#[derive(Debug, Clone)]
pub struct AgentBuilder {
    spec: AgentSpec,
}

impl AgentBuilder {
    /// An agent with a name.
    pub fn new(name: impl Into<String>) -> AgentBuilder {
        let definition = AgentDefinition { max_concurrent: None, ..AgentDefinition::default() };
        AgentBuilder { spec: AgentSpec { name: name.into(), definition, schedules: Vec::new() } }
    }

    /// When it runs, with the defaults for the rest.
    pub fn schedule(self, name: impl Into<String>, when: When) -> AgentBuilder {
        self.schedule_with(name, when, Options::default())
    }

    /// When it runs, with options.
    pub fn schedule_with(mut self, name: impl Into<String>, when: When, options: Options) -> AgentBuilder {
        self.spec.schedules.push((name.into(), ScheduleDefinition { when, options }));
        self
    }

    /// Its limits, retry, breaker and the rest.
    pub fn define(mut self, define: impl FnOnce(&mut AgentDefinition)) -> AgentBuilder {
        define(&mut self.spec.definition);
        self
    }

    /// The agent.
    pub fn build(self) -> AgentSpec {
        self.spec
    }
}
