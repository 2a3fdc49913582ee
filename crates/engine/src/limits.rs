//! Commands on breakers and failure budgets.

use belfry_store::{BreakerEntry, Store};

use crate::engine::Engine;
use crate::error::Error;
use crate::event::{Event, Level, Name};

impl Engine {
    /// Closes the breaker of a command. Gives the breaker, and whether it was open or had counted.
    pub async fn reset_breaker(&self, agent: &str, command: &str) -> Result<(BreakerEntry, bool), Error> {
        let entries = self.store().breakers().await?;
        let is_it = |entry: &BreakerEntry| entry.agent_name == agent && entry.command == command;
        let no_breaker = || Error::NoBreaker { agent: agent.to_owned(), command: command.to_owned() };
        let entry = entries.into_iter().find(is_it).ok_or_else(no_breaker)?;
        let is_news = self.store().reset_breaker(self.store_now().await?, entry.agent, command).await?;
        if is_news {
            // It is done, also where the store does not answer now.
            let record = self.store().breaker(entry.agent, command).await.ok();
            if let Some(change) = record.and_then(|record| record.history.last().cloned()) {
                self.tell(Event::breaker(agent, command, &change));
            }
            self.hint().await;
        }
        Ok((entry, is_news))
    }

    /// Clears what is used of an agent's failure budget, and the back-off of its runs. Gives whether anything was used.
    pub async fn reset_budget(&self, agent: &str) -> Result<bool, Error> {
        let agents = self.store().agents().await?;
        let found = agents.iter().find(|each| each.name == agent);
        let found = found.ok_or_else(|| Error::NoAgent { name: agent.to_owned() })?;
        let now = self.store_now().await?;
        let is_news = self.store().reset_budget(now, found.id).await?;
        if is_news {
            let event = Event::new(now, Level::Info, Name::BudgetChanged);
            let (agent, reason) = (Some(agent.to_owned()), Some("manual_reset".to_owned()));
            self.tell(Event { agent, state: Some("cleared"), reason, ..event });
            self.hint().await;
        }
        Ok(is_news)
    }
}
