//! What the store holds as a file, and how the files differ from it: `export` and `diff`.

use std::collections::{BTreeMap, BTreeSet};

use belfry::{AgentSpec, ScheduleDefinition};
use belfry_store::API;
use clap::Args;
use comfy_table::Color;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Place, SOURCE};
use crate::reading::{self, Reading};
use crate::words;

/// Print what the store holds as a configuration file
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry export > agents.yaml
  belfry export reporter

Schedules that were added on the command line or over the API are in it, too. Secrets are references, as they were written.")]
pub struct Export {
    /// Only this agent
    agent: Option<String>,
}

impl Export {
    pub fn run(&self, place: &Place) -> Result<(), Failure> {
        reading::block_on(async {
            let reading = Reading::open(place).await?;
            if let Some(agent) = &self.agent {
                reading.check_agent(agent).await?;
            }
            let mut held = held(&reading).await?;
            held.retain(|agent| self.agent.as_ref().is_none_or(|name| agent.spec.name == *name));
            if held.is_empty() {
                reading::remark("the store holds no agents");
                return Ok(());
            }
            let specs: Vec<AgentSpec> = held.into_iter().map(|agent| agent.spec).collect();
            reading::print_text(&belfry_config::export(&specs))
        })
    }
}

/// An agent with its schedules as the store holds them.
struct Held {
    source: String,
    spec: AgentSpec,
    /// Schedules that came over the API.
    api: BTreeSet<String>,
}

async fn held(reading: &Reading) -> Result<Vec<Held>, Failure> {
    let mut schedules: BTreeMap<i64, Vec<(String, ScheduleDefinition, bool)>> = BTreeMap::new();
    for record in reading.schedules(None).await? {
        if let Some(why) = &record.unreadable {
            reading::remark(&format!("{} is left out: {why}", record.name));
            continue;
        }
        let name = record.name.split_once('/').map_or(record.name.as_str(), |(_, name)| name).to_owned();
        let is_api = record.source == API;
        schedules.entry(record.agent).or_default().push((name, record.definition, is_api));
    }
    let agents = reading.store.agents().await?;
    for agent in &agents {
        if let Some(why) = &agent.unreadable {
            reading::remark(&format!("agent {} is left out: {why}", agent.name));
        }
    }
    Ok(agents
        .into_iter()
        .filter(|agent| agent.unreadable.is_none())
        .map(|agent| {
            let schedules = schedules.remove(&agent.id).unwrap_or_default();
            let api = schedules.iter().filter(|(.., api)| *api).map(|(name, ..)| name.clone()).collect();
            let schedules = schedules.into_iter().map(|(name, definition, _)| (name, definition)).collect();
            let spec = AgentSpec { name: agent.name, definition: agent.definition, schedules };
            Held { source: agent.source, spec, api }
        })
        .collect())
}

/// Show how the files differ from what the store holds
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry diff
  belfry diff -o json

Nothing is changed; `belfry apply` makes the store what the files are. Schedules that were added on the command line or over
the API are not compared.")]
pub struct Diff {}

/// One difference.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Change {
    /// `agent` or `agent/schedule`.
    name: String,
    change: Kind,
    /// Lines of the exported file that go (`-`) and come (`+`).
    lines: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Added,
    Changed,
    Retired,
    /// In the files, but the store has one of that name from the API, which stays.
    LeftAlone,
}

impl Diff {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let loaded = place.load()?;
        reading::block_on(async {
            let reading = Reading::open(place).await?;
            let held = held(&reading).await?;
            // They have run, and applying the files leaves them out.
            let spent = reading.store.spent(SOURCE).await?;
            let mut files = loaded.agents;
            for agent in &mut files {
                let name = |schedule: &str| format!("{}/{schedule}", agent.name);
                agent
                    .schedules
                    .retain(|(schedule, definition)| spent.get(&name(schedule)) != Some(definition));
            }
            let changes = changes(&held, &files);
            match output.format {
                Format::Table => print(&changes),
                format => reading::print_items(format, changes),
            }
        })
    }
}

fn changes(held: &[Held], files: &[AgentSpec]) -> Vec<Change> {
    let mut changes = Vec::new();
    for new in files {
        let Some(old) = held.iter().find(|held| held.spec.name == new.name) else {
            changes.push(Change {
                name: new.name.clone(),
                change: Kind::Added,
                lines: lines(None, Some(&bare(new))),
            });
            for (name, schedule) in &new.schedules {
                let name = format!("{}/{name}", new.name);
                changes.push(Change {
                    name,
                    change: Kind::Added,
                    lines: schedule_lines(None, Some(schedule)),
                });
            }
            continue;
        };
        if old.spec.definition != new.definition {
            let lines = lines(Some(&bare(&old.spec)), Some(&bare(new)));
            changes.push(Change { name: new.name.clone(), change: Kind::Changed, lines });
        }
        let old_of =
            |name: &str| old.spec.schedules.iter().find(|(known, _)| known == name).map(|(_, old)| old);
        for (name, schedule) in &new.schedules {
            let (change, lines) = match old_of(name) {
                Some(_) if old.api.contains(name) => (Kind::LeftAlone, Vec::new()),
                Some(same) if same == schedule => continue,
                Some(old) => (Kind::Changed, schedule_lines(Some(old), Some(schedule))),
                None => (Kind::Added, schedule_lines(None, Some(schedule))),
            };
            changes.push(Change { name: format!("{}/{name}", new.name), change, lines });
        }
        let gone = old.spec.schedules.iter().filter(|(name, _)| {
            !old.api.contains(name) && !new.schedules.iter().any(|(kept, _)| kept == name)
        });
        changes.extend(gone.map(|(name, old)| retired(&new.name, name, old)));
    }
    for old in held.iter().filter(|held| held.source == SOURCE) {
        if files.iter().any(|new| new.name == old.spec.name) {
            continue;
        }
        changes.push(Change {
            name: old.spec.name.clone(),
            change: Kind::Retired,
            lines: lines(Some(&bare(&old.spec)), None),
        });
        // A schedule of the API goes with its agent.
        changes.extend(
            old.spec.schedules.iter().map(|(name, schedule)| retired(&old.spec.name, name, schedule)),
        );
    }
    changes
}

fn retired(agent: &str, name: &str, old: &ScheduleDefinition) -> Change {
    Change { name: format!("{agent}/{name}"), change: Kind::Retired, lines: schedule_lines(Some(old), None) }
}

/// An agent without its schedules, which are compared one by one.
fn bare(agent: &AgentSpec) -> AgentSpec {
    AgentSpec { schedules: Vec::new(), ..agent.clone() }
}

/// What goes and what comes, by the lines in which a file would say it.
fn lines(old: Option<&AgentSpec>, new: Option<&AgentSpec>) -> Vec<String> {
    let text = |spec: Option<&AgentSpec>| -> Vec<String> {
        let text = spec.map_or(String::new(), |spec| belfry_config::export(std::slice::from_ref(spec)));
        // The first two lines are `agents:` and the name.
        text.lines().skip(2).map(|line| line.trim_start_matches("    ").to_owned()).collect()
    };
    compare(&text(old), &text(new))
}

fn schedule_lines(old: Option<&ScheduleDefinition>, new: Option<&ScheduleDefinition>) -> Vec<String> {
    let text = |schedule: Option<&ScheduleDefinition>| -> Vec<String> {
        let Some(schedule) = schedule else { return Vec::new() };
        let schedules = vec![("s".to_owned(), schedule.clone())];
        let spec = AgentSpec { name: "a".into(), definition: belfry::AgentDefinition::default(), schedules };
        let text = belfry_config::export(&[spec]);
        let lines = text.lines().skip_while(|line| line.trim() != "s:").skip(1);
        lines.map(|line| line.trim_start().to_owned()).collect()
    };
    compare(&text(old), &text(new))
}

/// The lines that only one of two texts has, in the order of the texts.
fn compare(old: &[String], new: &[String]) -> Vec<String> {
    let gone = old.iter().filter(|line| !new.contains(line)).map(|line| format!("- {line}"));
    let come = new.iter().filter(|line| !old.contains(line)).map(|line| format!("+ {line}"));
    gone.chain(come).collect()
}

fn print(changes: &[Change]) -> Result<(), Failure> {
    if changes.is_empty() {
        reading::remark("no differences: the store holds what the files say");
        return Ok(());
    }
    let mut text = String::new();
    for change in changes {
        let (sign, words, colour) = match change.change {
            Kind::Added => ('+', "", Color::Green),
            Kind::Changed => ('~', "", Color::Yellow),
            Kind::Retired => ('-', "", Color::Red),
            Kind::LeftAlone => ('=', "  left alone: one of that name was added by hand", Color::Blue),
        };
        let style = style(colour);
        text.push_str(&format!("{style}{sign} {}{style:#}{words}\n", words::harmless(&change.name)));
        // What is new or gone is known by its name.
        if change.change == Kind::Changed {
            text.extend(change.lines.iter().map(|line| format!("    {}\n", words::one_line(line, 200))));
        }
    }
    reading::print_text(&text)?;
    let of = |kind: Kind| changes.iter().filter(|change| change.change == kind).count();
    let (added, changed, retired) = (of(Kind::Added), of(Kind::Changed), of(Kind::Retired));
    reading::remark(&format!("\n{added} added, {changed} changed, {retired} retired"));
    Ok(())
}

fn style(colour: Color) -> anstyle::Style {
    let colour = match colour {
        Color::Green => anstyle::AnsiColor::Green,
        Color::Yellow => anstyle::AnsiColor::Yellow,
        Color::Red => anstyle::AnsiColor::Red,
        _ => anstyle::AnsiColor::Blue,
    };
    colour.on_default()
}
