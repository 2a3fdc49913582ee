//! What a schedule does and by which rules, in words: for people who look at it, wherever they do.

use belfry_core::definition::{AnchorName, CatchUp, IfRunning, Scope, When, handler_of};
use belfry_core::text::count;
use belfry_core::work::Action;
use belfry_core::{AgentDefinition, RunId};
use belfry_store::ScheduleRecord;
use belfry_time::{SignedDuration, format_duration};
use serde::{Deserialize, Serialize};

/// What a schedule does and by which rules, in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct About {
    /// What its runs do. Below scope admin the program alone, without its arguments: they may hold secrets.
    pub does: String,
    /// What they are told, where they are told something.
    pub prompt: Option<String>,
    /// What becomes of ticks.
    pub policy: String,
    /// How much may run, and for how long.
    pub limits: String,
    /// The run whose end its next tick counts from.
    pub waits_for: Option<RunId>,
}

impl About {
    /// A schedule of an agent. Arguments and shell lines are for an admin alone.
    pub fn of(record: &ScheduleRecord, agent: &AgentDefinition, is_admin: bool) -> About {
        About {
            does: does(&record.definition.options.command, agent, is_admin),
            prompt: record.definition.options.prompt.as_ref().or(agent.work.prompt.as_ref()).cloned(),
            policy: policy(record),
            limits: limits(record, agent),
            waits_for: record.waits_for,
        }
    }
}

fn does(command: &str, agent: &AgentDefinition, is_admin: bool) -> String {
    let named = if command == "poll" { String::new() } else { format!(" (command {command})") };
    let what = match agent.work.action_of(command) {
        Action::Run(words) if is_admin => format!("run {}", words.join(" ")),
        Action::Run(words) => format!("run {}", words.first().map_or("", String::as_str)),
        Action::Shell(line) if is_admin => format!("shell {line}"),
        Action::Shell(_) => "a shell line".into(),
        Action::Handler => "a Rust handler".into(),
    };
    what + &named
}

fn policy(record: &ScheduleRecord) -> String {
    let options = &record.definition.options;
    let if_running = match options.if_running {
        IfRunning::Skip => "skip".to_owned(),
        IfRunning::Queue => format!("queue (at most {})", options.max_pending),
        IfRunning::Cancel => "cancel".into(),
        IfRunning::Allow => "allow".into(),
    };
    let scope = match options.overlap {
        Scope::Schedule => "",
        Scope::Command => " of any run of the command",
        Scope::Agent => " of any run of the agent",
    };
    let mut parts = vec![format!("if_running {if_running}{scope}")];
    if let Ok(compiled) = record.definition.compile(&record.name) {
        parts.push(match compiled.catch_up() {
            CatchUp::Skip => "catch_up skip".into(),
            CatchUp::RunOnce => "catch_up run_once".into(),
            CatchUp::RunAll => format!("catch_up run_all (at most {})", options.catch_up_limit),
        });
    }
    if matches!(record.definition.when, When::Every(_)) {
        parts.push(match options.anchor {
            AnchorName::Completion => "counted from the end of each run".into(),
            AnchorName::Start => "counted from each tick".into(),
            AnchorName::Slot => "on a grid".into(),
        });
    }
    parts.extend(options.jitter.as_ref().map(|jitter| format!("jitter {jitter}")));
    if options.delete_after_run {
        parts.push("deleted after its run".into());
    }
    parts.join(" · ")
}

fn limits(record: &ScheduleRecord, agent: &AgentDefinition) -> String {
    let ms = |ms: u64| format_duration(SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX)));
    let lane = record.definition.lane(agent);
    let mut parts = vec![format!("lane {lane}")];
    parts.push(agent.max_concurrent.map_or("any number at once".into(), |max| format!("{max} at once")));
    parts.push(
        agent.work.timeout_ms.map_or("no timeout".into(), |timeout| format!("timeout {}", ms(timeout))),
    );
    parts.push(match agent.retry.max {
        0 => "no retry".into(),
        1 => "1 retry".into(),
        max => format!("{max} retries"),
    });
    if let Some(breaker) = &agent.breaker {
        parts.push(format!(
            "breaker after {} for {}",
            count(breaker.threshold as usize, "failure"),
            ms(breaker.reset_after_ms)
        ));
    }
    // What it does says that it is a handler.
    let needs = agent.needs.iter().filter(|label| handler_of(label).is_none()).map(String::as_str);
    let needs: Vec<&str> = needs.collect();
    if !needs.is_empty() {
        parts.push(format!("needs {}", needs.join(", ")));
    }
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_for_an_admin_alone() {
        let mut agent = AgentDefinition::default();
        for (action, whole, part) in [
            (Action::Run(vec!["curl".into(), "-u".into(), "me:zz".into()]), "run curl -u me:zz", "run curl"),
            (Action::Shell("TOKEN=zz x".into()), "shell TOKEN=zz x", "a shell line"),
            (Action::Handler, "a Rust handler", "a Rust handler"),
        ] {
            agent.work.action = action;
            assert_eq!(does("poll", &agent, true), whole);
            assert_eq!(does("poll", &agent, false), part);
        }
    }
}
