//! What there is instead of what somebody named: a name that is near, or a few that are there.

use belfry_core::suggest::nearest;
use belfry_store::{AgentRecord, ScheduleFilter};

use crate::extract::Named;
use crate::problem::Problem;
use crate::state::Shared;

/// Names that a message lists before it says that there are others.
const NAMES_MAX: usize = 8;

impl Shared {
    /// An agent, or what there is instead.
    pub async fn agent(&self, name: &str) -> Result<AgentRecord, Problem> {
        let mut agents = self.store().agents().await?;
        match agents.iter().position(|agent| agent.name == name) {
            Some(place) => Ok(agents.swap_remove(place)),
            None => {
                let names: Vec<String> = agents.into_iter().map(|agent| agent.name).collect();
                let detail = format!("there is no agent {name}{}", instead(name, names));
                Err(Problem::not_found(detail).field("agent").way_out("GET /api/v1/agents lists them"))
            }
        }
    }

    /// An agent that this version can read, or why there is none.
    pub async fn readable_agent(&self, name: &str) -> Result<AgentRecord, Problem> {
        let record = self.agent(name).await?;
        match &record.unreadable {
            Some(why) => Err(Problem::unreadable(name, why)),
            None => Ok(record),
        }
    }

    /// What a command on a schedule gives. If there is no such schedule, the refusal says what there is instead.
    pub async fn done<T>(
        &self,
        named: &Named,
        command: impl Future<Output = Result<T, belfry::Error>>,
    ) -> Result<T, Problem> {
        match command.await {
            Ok(done) => Ok(done),
            Err(belfry::Error::NotFound { name }) if name == named.full() => {
                Err(self.no_schedule(&name).await?)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Why a schedule is not found.
    pub async fn no_schedule(&self, name: &str) -> Result<Problem, Problem> {
        let agent = name.split_once('/').map_or(name, |(agent, _)| agent);
        let filter = ScheduleFilter { agent: Some(agent.to_owned()), ..ScheduleFilter::default() };
        let there: Vec<String> = {
            let _place = self.many.acquire().await;
            let page = self.store().schedules(&filter, None, NAMES_MAX as u32 + 1).await?;
            page.items.into_iter().map(|record| record.name).collect()
        };
        let agents: Vec<String> = self.store().agents().await?.into_iter().map(|agent| agent.name).collect();
        let instead = match nearest(name, there.iter().map(String::as_str)) {
            Some(near) => format!("; did you mean {near}?"),
            None if !there.is_empty() => format!("; agent {agent} has {}", few(there)),
            None if agents.iter().any(|known| known == agent) => format!(": agent {agent} has no schedules"),
            None => instead(agent, agents),
        };
        Ok(Problem::not_found(format!("there is no schedule {name}{instead}"))
            .way_out("GET /api/v1/schedules lists them"))
    }
}

/// What agents there are instead.
fn instead(name: &str, names: Vec<String>) -> String {
    match nearest(name, names.iter().map(String::as_str)) {
        Some(near) => format!("; did you mean {near}?"),
        None if names.is_empty() => ": the store knows no agents yet, they come from files".into(),
        None => format!("; there are the agents {}", few(names)),
    }
}

fn few(mut names: Vec<String>) -> String {
    let more = if names.len() > NAMES_MAX { " and others" } else { "" };
    names.truncate(NAMES_MAX);
    format!("{}{more}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_told_from_another_name() {
        let names: Vec<String> = ["reporter", "a", "b"].map(str::to_owned).into();
        assert_eq!(instead("reportr", names.clone()), "; did you mean reporter?");
        assert_eq!(instead("zz", names), "; there are the agents reporter, a, b");
        let many: Vec<String> = (0..9).map(|n| format!("n{n}")).collect();
        assert!(instead("unknown", many).ends_with("n7 and others"));
    }
}
