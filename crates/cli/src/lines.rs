//! What happens, one line each: for people, or as JSON.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use belfry::Event;
use belfry::event::{Level, Name};
use belfry_config::{Errors, Problem};
use belfry_time::Zone;

use crate::terminal::{self, Layout};
use crate::words::{harmless, one_line};

/// Characters of a text from outside in one line.
const DETAIL_MAX: usize = 200;

/// Writes what happens to standard output. A line that cannot be written, because a disk is full or nobody reads any longer,
/// is left out and counted: the work goes on without it.
pub struct Lines {
    json: bool,
    zone: Zone,
    level: Level,
    /// Lines left out since one was written.
    lost: u64,
}

impl Lines {
    pub fn new(json: bool, zone: Zone, level: &str) -> Lines {
        let level = match level {
            "error" => Level::Error,
            "warn" => Level::Warn,
            "debug" | "trace" => Level::Debug,
            _ => Level::Info,
        };
        Lines { json, zone, level, lost: 0 }
    }

    pub fn is_json(&self) -> bool {
        self.json
    }

    /// One event.
    pub fn event(&mut self, event: &Event) {
        if event.level <= self.level {
            let written = self.write_event(event);
            self.count(written);
        }
    }

    fn write_event(&self, event: &Event) -> io::Result<()> {
        if self.json {
            return terminal::json(Layout::Line, [event]);
        }
        let time = self.zone.local(event.timestamp).strftime("%H:%M:%S%.3f");
        let style = style(event);
        let name = match (&event.agent, &event.schedule) {
            (Some(agent), Some(schedule)) => match &event.session {
                Some(session) => format!("{agent}/{schedule}:{}", one_line(session, DETAIL_MAX)),
                None => format!("{agent}/{schedule}"),
            },
            (Some(agent), None) => agent.clone(),
            _ => String::new(),
        };
        let one = |text: String| one_line(&text, usize::MAX);
        let (words, name, details) = (one(words(event)), one(name), one(details(event)));
        writeln!(terminal::stdout(), "{time}  {style}{words:<12}{style:#} {name:<24} {details}")
    }

    /// A sentence that is no event.
    pub fn say(&mut self, text: &str) {
        let written = self.write_sentence(text);
        self.count(written);
    }

    fn write_sentence(&self, text: &str) -> io::Result<()> {
        if self.json {
            writeln!(terminal::stderr(), "{}", harmless(text))
        } else {
            writeln!(terminal::stdout(), "{}", harmless(text))
        }
    }

    /// Something that is wrong with one schedule.
    pub fn problem(&mut self, problem: &Problem) {
        let written = writeln!(terminal::stderr(), "{}", problem.render(!self.json));
        self.count(written);
    }

    /// What is wrong with the files.
    pub fn errors(&mut self, errors: &Errors) {
        let written = writeln!(terminal::stderr(), "{}", errors.render(!self.json));
        self.count(written);
    }

    /// Counts a line that could not be written, and tells of those before one that could.
    fn count(&mut self, written: io::Result<()>) {
        match written {
            Ok(()) if self.lost > 0 => {
                let words = format!("{} lines could not be written", self.lost);
                if self.write_sentence(&words).is_ok() {
                    self.lost = 0;
                }
            }
            Ok(()) => {}
            Err(error) => {
                if self.lost == 0 {
                    // Standard error may lead elsewhere.
                    let _ = writeln!(
                        terminal::stderr(),
                        "a line cannot be written, and the work goes on: {error}"
                    );
                }
                self.lost += 1;
            }
        }
    }
}

fn style(event: &Event) -> Style {
    match (event.level, event.event, event.state) {
        (Level::Error, ..) => AnsiColor::Red.on_default().bold(),
        (_, Name::RunFinished, Some("failed")) => AnsiColor::Red.on_default(),
        (_, Name::RunFinished, _) => AnsiColor::Green.on_default(),
        (Level::Warn, ..) => AnsiColor::Yellow.on_default(),
        (_, Name::RunStarted, _) => AnsiColor::Cyan.on_default(),
        _ => Style::new().dimmed(),
    }
}

fn words(event: &Event) -> String {
    match event.event {
        Name::RunFinished => event.state.unwrap_or("finished").to_owned(),
        Name::RunStarted => "started".into(),
        Name::BreakerChanged => format!("breaker {}", event.state.unwrap_or("").replace('_', " ")),
        Name::BudgetChanged => format!("failure budget {}", event.state.unwrap_or("").replace('_', " ")),
        Name::RunRetried => "retries".into(),
        Name::RunCancelled => "cancelled".into(),
        Name::TickSkipped => "skipped".into(),
        Name::TickMissed => "missed".into(),
        other => other.as_str().replace('_', " "),
    }
}

fn details(event: &Event) -> String {
    let mut parts = Vec::new();
    if let Some(attempt) = event.attempt.filter(|attempt| *attempt > 1) {
        parts.push(format!("attempt {attempt}"));
    }
    match event.event {
        Name::RunStarted => {
            parts.extend(event.reason.as_ref().filter(|reason| *reason != "schedule").cloned());
            parts.extend(event.lag_ms.filter(|lag| *lag >= 1000).map(|lag| format!("{} late", millis(lag))));
        }
        _ => parts.extend(event.reason.clone()),
    }
    parts.extend(event.count.filter(|count| *count > 1).map(|count| format!("{count}×")));
    parts.extend(event.took_ms.map(millis));
    parts.extend(event.retry_at.map(|at| {
        let wait = at.duration_since(event.timestamp).as_millis().max(0) as u64;
        format!("again in {}", millis(wait))
    }));
    if let Some(run) =
        event.run_id.filter(|_| event.event == Name::RunFinished && event.state == Some("failed"))
    {
        parts.push(format!("belfry logs {run}"));
    }
    parts.extend(event.detail.as_deref().map(|detail| one_line(detail, DETAIL_MAX)));
    parts.join(" · ")
}

fn millis(ms: u64) -> String {
    if ms < 1000 { format!("{ms}ms") } else { format!("{:.1}s", ms as f64 / 1000.0) }
}
