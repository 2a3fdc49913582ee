//! Commands that change what is defined: agents and schedules, of files, of a program, or over the API.

use std::collections::HashSet;

use belfry_core::{AgentDefinition, AgentSpec, ScheduleDefinition};
use belfry_store::{Applied, Expect, Put, PutAgent, Removed, Store};
use belfry_time::Timestamp;

use crate::engine::Engine;
use crate::error::Error;
use crate::event::{Event, Level, Name};

impl Engine {
    /// Makes the agents what they are here; also while it runs. Schedules whose timing stays go on as if nothing had happened.
    pub async fn set_agents(&self, agents: Vec<AgentSpec>) -> Result<Applied, Error> {
        let agents: Vec<AgentSpec> = agents.iter().map(checked).collect::<Result<_, _>>()?;
        let now = self.store_now().await?;
        let applied = self.store().apply(now, self.source(), "", &agents).await?;
        self.tell_applied(now, &agents, &applied).await;
        self.keep_agents(agents);
        self.hint().await;
        Ok(applied)
    }

    /// Makes a source's agents what they are here; also while it runs. A source that has not changed is left as it is.
    pub async fn apply(&self, source: &str, digest: &str, agents: &[AgentSpec]) -> Result<Applied, Error> {
        let agents: &[AgentSpec] = &agents.iter().map(checked).collect::<Result<Vec<_>, _>>()?;
        if self.store().source_digest(source).await?.as_deref() == Some(digest) {
            return Ok(Applied::default());
        }
        let now = self.store_now().await?;
        let applied = self.store().apply(now, source, digest, agents).await?;
        let event = Event::new(now, Level::Info, Name::ConfigLoaded);
        self.tell(Event { detail: Some(applied.words()), ..event });
        self.tell_applied(now, agents, &applied).await;
        if applied.expired > 0 {
            self.tell_expired(now, agents).await?;
        }
        self.hint().await;
        Ok(applied)
    }

    /// Tells what an edit of many agents at this instant has ended.
    async fn tell_applied(&self, at: Timestamp, agents: &[AgentSpec], applied: &Applied) {
        if applied.agents > 0 {
            self.tell_cleared_breakers(at, agents).await;
        }
        self.tell_ends(&applied.ended).await;
    }

    /// Tells of breakers that an edit at this instant has closed, because their agents have no policy for them any more. What
    /// cannot be read is not told: the edit is made.
    async fn tell_cleared_breakers(&self, at: Timestamp, agents: &[AgentSpec]) {
        let without: HashSet<&str> = agents
            .iter()
            .filter(|spec| spec.definition.breaker.is_none())
            .map(|spec| spec.name.as_str())
            .collect();
        let Ok(entries) = self.store().breakers().await else { return };
        for entry in entries.iter().filter(|entry| without.contains(entry.agent_name.as_str())) {
            let Ok(record) = self.store().breaker(entry.agent, &entry.command).await else { continue };
            if let Some(change) = record.history.last().filter(|change| change.at == at) {
                self.tell(Event::breaker(&entry.agent_name, &entry.command, change));
            }
        }
    }

    /// Warns of one-shots whose time had passed when they were first seen.
    async fn tell_expired(&self, now: Timestamp, agents: &[AgentSpec]) -> Result<(), Error> {
        let named = agents.iter().flat_map(|agent| agent.schedules.iter().map(move |one| (agent, one)));
        for (agent, (name, definition)) in named {
            let name = format!("{}/{name}", agent.name);
            let Some(detail) = crate::past_words(&name, definition, now) else { continue };
            let record = self.store().schedule(&name).await?;
            if record.is_some_and(|record| crate::is_expired(&record)) {
                let event = Event::new(now, Level::Warn, Name::TickSkipped).of(&name);
                let reason = Some(belfry_core::SkipReason::Exhausted.as_str().to_owned());
                self.tell(Event { reason, detail: Some(detail), ..event });
            }
        }
        Ok(())
    }

    /// Makes an agent that no file owns what it is here, or makes it new, with its schedules; with `whole` those of it that are
    /// not here go, apart from what another source owns. Nothing is done where it is not what is expected.
    pub async fn put_agent(
        &self,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Result<PutAgent, Error> {
        let agent = &checked(agent)?;
        let now = self.store_now().await?;
        let put = self.store().put_agent(now, agent, whole, expect).await?;
        match &put {
            PutAgent::Added => self.tell_agent(now, Name::AgentCreated, &agent.name),
            PutAgent::Changed { ended } => {
                self.tell_cleared_breakers(now, std::slice::from_ref(agent)).await;
                self.tell_ends(ended).await;
                self.tell_agent(now, Name::AgentUpdated, &agent.name);
            }
            PutAgent::Unchanged | PutAgent::Differs | PutAgent::OwnedBy(_) => {}
        }
        self.hint().await;
        Ok(put)
    }

    /// Removes an agent that no file owns, with its schedules. Their runs that wait end cancelled, those that run go on. Nothing
    /// is done where it is not what is expected.
    pub async fn remove_agent(
        &self,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Result<Removed, Error> {
        let now = self.store_now().await?;
        let removed = self.store().remove_agent(now, agent, expect).await?;
        if let Removed::Gone { ended } = &removed {
            self.tell_ends(ended).await;
            self.tell_agent(now, Name::AgentDeleted, agent);
        }
        self.hint().await;
        Ok(removed)
    }

    /// Makes a schedule of an agent that no file owns what it is here, or makes it new. Nothing is done where it is not what is
    /// expected.
    pub async fn put_schedule(
        &self,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Result<Put, Error> {
        let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
        let now = self.store_now().await?;
        let put = self.store().put_schedule(now, agent, schedule, definition, expect).await?;
        match &put {
            Put::Added(_) => self.tell(Event::new(now, Level::Info, Name::ScheduleCreated).of(name)),
            Put::Changed(_) => self.tell(Event::new(now, Level::Info, Name::ScheduleUpdated).of(name)),
            Put::Unchanged(_) | Put::Spent | Put::Differs | Put::NoAgent | Put::OwnedBy(_) => {}
        }
        self.hint().await;
        Ok(put)
    }

    /// Removes a schedule that no file owns. Its runs that wait end cancelled, those that run go on. Nothing is done where it
    /// is not what is expected.
    pub async fn remove_schedule(&self, name: &str, expect: &Expect) -> Result<Removed, Error> {
        let schedule = self.schedule_state(name).await?.id;
        let now = self.store_now().await?;
        let removed = self.store().remove_schedule(now, schedule, expect).await?;
        if let Removed::Gone { ended } = &removed {
            self.tell_ends(ended).await;
            self.tell(Event::new(now, Level::Info, Name::ScheduleDeleted).of(name));
        }
        self.hint().await;
        Ok(removed)
    }

    fn tell_agent(&self, at: Timestamp, name: Name, agent: &str) {
        self.tell(Event { agent: Some(agent.to_owned()), ..Event::new(at, Level::Info, name) });
    }
}

/// An agent as it is stored: if it is a handler, it needs a node that has it. Refuses one with a template that cannot be parsed;
/// a schedule with such a prompt becomes invalid, and says why.
fn checked(agent: &AgentSpec) -> Result<AgentSpec, Error> {
    let checked = agent.definition.work.check_templates();
    checked.map_err(|source| Error::Template { agent: agent.name.clone(), source })?;
    let mut agent = agent.clone();
    agent.need_handler();
    Ok(agent)
}
