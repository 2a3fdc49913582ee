//! `belfry add`: a schedule that no file owns.

use belfry_store::{API, AgentRecord, Expect, Put, Store};
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::keys::{Keys, Target, owned, refuse_past};
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};

/// Add a schedule to an agent, beside those of the files
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry add reporter/friday --cron \"0 16 * * 5\" --tz Europe/London --prompt \"Sum up the week.\"
  belfry add prices/fast every=5m jitter=10% if_running=queue
  belfry add reporter/launch --at 2027-02-03T09:00:00+01:00 delete_after_run=true
  belfry add reporter/friday --file friday.yaml

The keys are those of a file, and so are the messages. A reload does not touch it; `belfry set` changes it, `belfry rm` removes
it.")]
pub struct Add {
    /// Its name
    #[arg(value_name = "AGENT/NAME")]
    name: String,

    #[command(flatten)]
    keys: Keys,
}

#[derive(Serialize)]
pub struct Answer<'a> {
    pub schedule: &'a str,
    pub result: &'static str,
}

impl Add {
    /// Adds it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let (agent_name, schedule) = reach::split(&self.name)?;
        reach::block_on(async {
            let reach = Reach::open_with_files(place).await?;
            let agent = agent(&reach, agent_name).await?;
            if let Some(record) = reach.store.schedule(&self.name).await? {
                return Err(match record.source.as_str() {
                    API => self.exists(),
                    source => owned(&self.name, source, place),
                });
            }
            let target = Target { name: &self.name, agent: &agent.definition, base: None };
            let definition = self.keys.read(&target, &reach, output)?;
            let now = reach.now().await?;
            refuse_past(&self.name, &definition, now)?;
            let put = reach.store.put_schedule(now, agent_name, schedule, &definition, &Expect::Absent);
            let deed = Deed::to("create_schedule", format_args!("schedules/{}", self.name));
            match noted(&reach.store, deed, put, Put::is_news).await? {
                Put::Differs => Err(self.exists()),
                Put::NoAgent => Err(no_agent(&reach, agent_name).await?),
                Put::OwnedBy(source) => Err(owned(&self.name, &source, place)),
                Put::Added(_) | Put::Changed(_) | Put::Unchanged(_) => {
                    let answer = Answer { schedule: &self.name, result: "added" };
                    reach::answer(output, &answer, &format!("{} added", self.name))
                }
            }
        })
    }

    fn exists(&self) -> Failure {
        Failure::Usage(format!(
            "there is a schedule {} already: `belfry set` changes it, `belfry rm` removes it",
            self.name
        ))
    }
}

async fn agent(reach: &Reach, name: &str) -> Result<AgentRecord, Failure> {
    match reach.store.agents().await?.into_iter().find(|agent| agent.name == name) {
        Some(agent) => Ok(agent),
        None => Err(no_agent(reach, name).await?),
    }
}

async fn no_agent(reach: &Reach, name: &str) -> Result<Failure, Failure> {
    let known: Vec<_> = reach.store.agents().await?.into_iter().map(|agent| agent.name).collect();
    let in_files =
        reach.loaded.as_ref().is_some_and(|loaded| loaded.agents.iter().any(|agent| agent.name == name));
    Ok(Failure::NotFound(match (in_files, known.is_empty()) {
        (true, _) => {
            format!("agent {name} is in the file but not in the store yet: `belfry apply` brings it in")
        }
        (false, true) => {
            format!("there is no agent {name}: agents come from files, and none was applied yet")
        }
        (false, false) => format!("there is no agent {name}; there are {}", reach::list(known)),
    }))
}
