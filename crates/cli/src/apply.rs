//! `belfry apply`: from files to the store, whoever runs.

use belfry::Engine;
use belfry_config::Errors;
use belfry_store::Applied;
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::noted::noted;
use crate::output::Output;
use crate::place::{Place, SOURCE};
use crate::reach::{self, Reach};

/// Bring the files into the store, all or nothing, also while servers run
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry apply
  belfry -c /etc/belfry/belfry.yaml apply -o json

It refuses what `belfry check` would find wrong. Schedules whose timing stays go on as if nothing had happened; what left the
files is retired, and its waiting runs end. Every node runs from the store, and follows within a second.")]
pub struct Apply {}

#[derive(Serialize)]
struct Answer {
    changed_anything: bool,
    added: u32,
    changed: u32,
    retired: u32,
    /// Agents with different keys of their own.
    agents: u32,
    cancelled: u32,
    foreign: u32,
    /// Never run: their time had passed.
    expired: u32,
}

impl Apply {
    /// Applies them.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::block_on(async { apply(&place.open_with_files().await?, output).await })
    }
}

/// Applies the files that were read, and tells what changed.
pub async fn apply(reach: &Reach, output: &Output) -> Result<(), Failure> {
    let Some(loaded) = &reach.loaded else { return Ok(()) };
    if !loaded.invalid.is_empty() {
        return Err(Failure::Config(Errors { problems: loaded.invalid.clone() }));
    }
    for warning in &loaded.warnings {
        crate::reading::show_problem(warning);
    }
    let engine = Engine::builder().store(reach.store.clone()).build();
    let same = reach.reads.source_digest(SOURCE).await?.as_deref() == Some(&loaded.digest);
    let applied =
        if same { Applied::default() } else { noted(&engine, crate::up::take_over(&engine, loaded)).await? };
    let applied_words = applied.words();
    let Applied { added, changed, retired, agents, ended, foreign, expired } = applied;
    let cancelled = ended.len() as u32;
    let mut words = match same {
        true => "nothing has changed since the files were applied last".to_owned(),
        false => applied_words,
    };
    if cancelled > 0 {
        words.push_str(&format!("; {} ended", crate::words::count(ended.len(), "waiting run")));
    }
    if foreign > 0 {
        words.push_str(&format!(
            "; {foreign} left alone: a schedule of that name was made with `belfry add`, and `belfry rm` makes room for the file's"
        ));
    }
    if expired > 0 {
        words.push_str(&format!(
            "; {}: `belfry check` names {}",
            if expired == 1 {
                "1 never runs, because its time has passed".to_owned()
            } else {
                format!("{expired} never run, because their time has passed")
            },
            if expired == 1 { "it" } else { "them" }
        ));
    }
    reach::answer(
        output,
        &Answer { changed_anything: !same, added, changed, retired, agents, cancelled, foreign, expired },
        &words,
    )
}
