//! Agents put together in Rust.

use belfry_core::definition::{Options, When};
use belfry_core::{AgentDefinition, AgentSpec, ScheduleDefinition};
use belfry_time::{Cron, Every};

use crate::error::Error;

/// An interval, checked: `20m`, `1h30m`, `daily`.
///
/// ```
/// assert!(belfry::every("20m").is_ok());
/// let error = belfry::every("20 minutes").unwrap_err();
/// assert!(matches!(&error, belfry::Error::Interval { input, .. } if input == "20 minutes"));
/// ```
pub fn every(interval: &str) -> Result<When, Error> {
    Every::parse(interval).map_err(|source| Error::Interval { input: interval.to_owned(), source })?;
    Ok(When::Every(interval.to_owned()))
}

/// A cron expression, checked.
///
/// ```
/// assert!(belfry::cron("0 9 * * 1-5").is_ok());
/// let error = belfry::cron("0 75 * * *").unwrap_err();
/// assert!(matches!(&error, belfry::Error::Cron { field, .. } if field == "75"));
/// ```
pub fn cron(expr: &str) -> Result<When, Error> {
    Cron::parse(expr).map_err(|source| {
        let field = expr.get(source.span()).unwrap_or_default().to_owned();
        Error::Cron { expr: expr.to_owned(), field, source }
    })?;
    Ok(When::Cron(expr.to_owned()))
}

/// Messages, in a queue per session. The keys are those of `chat` in a file; one that is wrong makes the schedule invalid.
///
/// ```
/// let when = belfry::chat(serde_json::json!({"mode": "interrupt", "debounce": "300ms"}));
/// assert!(matches!(when, belfry::When::Chat(_)));
/// ```
pub fn chat(policy: serde_json::Value) -> When {
    When::Chat(policy)
}

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
