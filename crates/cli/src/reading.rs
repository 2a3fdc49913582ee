//! What the commands about a store itself have in common, and how results are printed.

use std::future::Future;
use std::io::Write;

use belfry::{AnyStore, Reader};
use belfry_core::suggest::nearest;
use belfry_store::{ScheduleFilter, ScheduleRecord};
use belfry_time::{Timestamp, Zone};
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::output::{Format, Output};
use crate::place::Place;
use crate::terminal::{self, Layout};
use crate::words;

/// A store that is read, and what time it is there.
pub struct Reading {
    pub store: Reader,
    pub now: Timestamp,
}

/// Runs what a command does to its end.
pub fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

impl Reading {
    /// Opens the store beside a server, if there is one.
    pub async fn open(place: &Place) -> Result<Reading, Failure> {
        Reading::of(place.open().await?).await
    }

    /// With the store's own clock, where it has one.
    pub async fn of(store: AnyStore) -> Result<Reading, Failure> {
        let store = Reader::from(store);
        let now = store.clock().await?.unwrap_or_else(Timestamp::now);
        Ok(Reading { store, now })
    }

    /// All schedules, or those of one agent, in the order of their names.
    pub async fn schedules(&self, agent: Option<&str>) -> Result<Vec<ScheduleRecord>, Failure> {
        let filter = ScheduleFilter { agent: agent.map(str::to_owned), ..ScheduleFilter::default() };
        let (mut all, mut after) = (Vec::new(), None::<String>);
        loop {
            let page = self.store.schedules(&filter, after.as_deref(), 1000).await?;
            all.extend(page.items);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Refuses an agent that the store does not know.
    pub async fn check_agent(&self, name: &str) -> Result<(), Failure> {
        let names: Vec<String> = self.store.agents().await?.into_iter().map(|agent| agent.name).collect();
        if names.iter().any(|known| known == name) {
            return Ok(());
        }
        Err(Failure::NotFound(format!("there is no agent {name}{}", meant(name, &names))))
    }
}

/// `; did you mean …?`, where something is near.
fn meant(name: &str, known: &[String]) -> String {
    match nearest(name, known.iter().map(String::as_str)) {
        Some(known) => format!("; did you mean {known}?"),
        None => "; `belfry ls` lists what there is".into(),
    }
}

/// Prints a list as JSON: one document, or one a line.
pub fn print_items<T: Serialize>(format: Format, items: Vec<T>) -> Result<(), Failure> {
    match format {
        Format::Jsonl => terminal::json(Layout::Line, items)?,
        Format::Json | Format::Table => terminal::json(Layout::Pretty, [belfry::api::List::whole(items)])?,
    }
    Ok(())
}

/// Prints one thing as JSON, on one line for `jsonl`.
pub fn print_item<T: Serialize>(format: Format, item: &T) -> Result<(), Failure> {
    let layout = if format == Format::Jsonl { Layout::Line } else { Layout::Pretty };
    Ok(terminal::json(layout, [item])?)
}

/// Prints text for people, which may hold our own colours.
pub fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = terminal::stdout();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Shows what is wrong with a file, in colour.
pub fn show_problem(problem: &belfry_config::Problem) {
    let _ = writeln!(terminal::stderr(), "{}", problem.render(true));
}

/// Says something that is no data. Where standard error is closed there is nobody to tell.
pub fn remark(text: &str) {
    let _ = writeln!(terminal::stderr(), "{}", words::harmless(text));
}

/// Reads an instant of an option: RFC 3339, or a local date and time in the zone that is meant.
pub fn instant(text: &str, option: &'static str, output: &Output) -> Result<Timestamp, Failure> {
    local(text, option, &output.zone()?)
}

/// The same in a zone. The time may lack its seconds, or be missing: then the day begins.
pub fn local(text: &str, option: &'static str, zone: &Zone) -> Result<Timestamp, Failure> {
    let is_digit = |at: &u8| at.is_ascii_digit();
    let form: String =
        text.trim().bytes().map(|at| if is_digit(&at) { '0' } else { char::from(at) }).collect();
    let whole = match form.as_str() {
        "0000-00-00" => format!("{}T00:00:00", text.trim()),
        "0000-00-00T00:00" | "0000-00-00 00:00" => format!("{}:00", text.trim().replace(' ', "T")),
        "0000-00-00 00:00:00" => text.trim().replace(' ', "T"),
        _ => text.to_owned(),
    };
    belfry_time::parse_instant(&whole, Some(zone)).in_option(option)
}

/// The beginning of a time up to now: an instant, or how long ago.
pub fn since(text: &str, option: &'static str, output: &Output) -> Result<Timestamp, Failure> {
    match belfry_time::parse_duration(text) {
        Ok(ago) => Ok(Timestamp::now().checked_sub(ago).unwrap_or(Timestamp::MIN)),
        Err(_) => instant(text, option, output),
    }
}
