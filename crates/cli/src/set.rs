//! `belfry set`: changes a schedule that no file owns.

use belfry_store::{API, Expect, Put, Store};
use clap::Args;

use crate::add::Answer;
use crate::failure::Failure;
use crate::keys::{Keys, Target, owned, refuse_past};
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};

/// So often it is begun anew where others change the schedule meanwhile.
const TRIES: u32 = 16;

/// Change keys of a schedule that was made with `belfry add`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry set prices/fast every=10m
  belfry set reporter/friday --prompt \"Sum up the week, in three lines.\" not_on=fri
  belfry set reporter/friday prompt=null

Keys that are not written stay as they are; KEY=null goes back to the default. An edit that keeps the timing moves nothing; one
that changes it fires nothing before now, and nothing twice.")]
pub struct Set {
    /// Which
    #[arg(value_name = "AGENT/NAME")]
    name: String,

    #[command(flatten)]
    keys: Keys,
}

impl Set {
    /// Changes it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::split(&self.name)?;
        reach::block_on(async {
            let reach = Reach::open_with_files(place).await?;
            for _ in 0..TRIES {
                if let Some(result) = self.once(&reach, place, output).await? {
                    let words = match result {
                        "unchanged" => format!("{} is like that already", self.name),
                        result => format!("{} {result}", self.name),
                    };
                    return reach::answer(output, &Answer { schedule: &self.name, result }, &words);
                }
            }
            Err(Failure::Usage(format!("{} is being changed by others all the time; try again", self.name)))
        })
    }

    /// Changes it as it is now; nothing where somebody else has changed it meanwhile.
    async fn once(
        &self,
        reach: &Reach,
        place: &Place,
        output: &Output,
    ) -> Result<Option<&'static str>, Failure> {
        let (agent, schedule) = reach::split(&self.name)?;
        let record = reach.schedule(&self.name).await?;
        if record.source != API {
            return Err(owned(&self.name, &record.source, place));
        }
        let definitions = reach.store.definitions(&[record.id]).await?.into_iter().next().flatten();
        let agent_definition = definitions.map(|found| found.agent_definition).unwrap_or_default();
        let target = Target { name: &self.name, agent: &agent_definition, base: Some(&record.definition) };
        let definition = self.keys.read(&target, reach, output)?;
        let now = reach.now().await?;
        // One that has fired may still be described anew.
        if definition.timing_key() != record.definition.timing_key() {
            refuse_past(&self.name, &definition, now)?;
        }
        let expect = Expect::same(&record);
        let put = reach.store.put_schedule(now, agent, schedule, &definition, &expect);
        match noted(
            &reach.store,
            Deed::to("change_schedule", format_args!("schedules/{}", self.name)),
            put,
            Put::is_news,
        )
        .await?
        {
            Put::NoAgent => Err(Failure::NotFound(format!("agent {agent} is gone"))),
            Put::OwnedBy(source) => Err(owned(&self.name, &source, place)),
            Put::Differs => Ok(None),
            Put::Added(_) => Ok(Some("added")),
            Put::Changed(_) => Ok(Some("changed")),
            Put::Unchanged(_) => Ok(Some("unchanged")),
        }
    }
}
