//! What happens, one line each: for people, or as JSON.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use belfry::Event;
use belfry::event::{Level, Name};
use belfry_config::{Errors, Problem};
use belfry_time::Zone;

use crate::terminal::{self, Layout};
use crate::words::{self, harmless, one_line};

/// Characters of a text from outside in one line.
const DETAIL_MAX: usize = 200;

/// Lines that wait to be written, at most.
const WAITING_MAX: usize = 1_000;
/// How long the last lines may take when the node ends.
const LAST_MAX: Duration = Duration::from_secs(2);

/// Writes what happens to standard output, in a thread of its own: a terminal that is stopped, or a reader that does not read,
/// holds up nothing but that. A line that cannot be written, because a disk is full, nobody reads any longer, or too many wait,
/// is left out and counted: the work goes on without it.
pub struct Lines {
    json: bool,
    level: Level,
    /// None once this ends.
    waiting: Option<SyncSender<Line>>,
    lost: Arc<AtomicU64>,
    /// Ends with the thread.
    done: Receiver<()>,
}

enum Line {
    Event(Arc<Event>),
    Sentence(String),
    Wrong(String),
}

impl Lines {
    pub fn new(json: bool, zone: Zone, level: &str) -> io::Result<Lines> {
        let level = match level {
            "error" => Level::Error,
            "warn" => Level::Warn,
            "debug" | "trace" => Level::Debug,
            _ => Level::Info,
        };
        let (waiting, lines) = mpsc::sync_channel(WAITING_MAX);
        let (ends, done) = mpsc::channel();
        let lost = Arc::new(AtomicU64::new(0));
        let writer = Writer { json, zone, lost: lost.clone() };
        std::thread::Builder::new().name("belfry-lines".into()).spawn(move || {
            let _ends: mpsc::Sender<()> = ends;
            for line in lines {
                writer.write(&line);
            }
        })?;
        Ok(Lines { json, level, waiting: Some(waiting), lost, done })
    }

    pub fn is_json(&self) -> bool {
        self.json
    }

    /// One event.
    pub fn event(&self, event: &Arc<Event>) {
        if event.level <= self.level {
            self.add(Line::Event(event.clone()));
        }
    }

    /// A sentence that is no event.
    pub fn say(&self, text: &str) {
        self.add(Line::Sentence(text.to_owned()));
    }

    /// Something that is wrong with one schedule.
    pub fn problem(&self, problem: &Problem) {
        self.add(Line::Wrong(problem.render(!self.json)));
    }

    /// What is wrong with the files.
    pub fn errors(&self, errors: &Errors) {
        self.add(Line::Wrong(errors.render(!self.json)));
    }

    fn add(&self, line: Line) {
        if self.waiting.as_ref().is_none_or(|waiting| waiting.try_send(line).is_err()) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        drop(self.waiting.take());
        // Nothing is ever sent: it ends, or takes too long.
        let _ = self.done.recv_timeout(LAST_MAX);
    }
}

struct Writer {
    json: bool,
    zone: Zone,
    /// Lines left out since one was written.
    lost: Arc<AtomicU64>,
}

impl Writer {
    fn write(&self, line: &Line) {
        let written = match line {
            Line::Event(event) => self.write_event(event),
            Line::Sentence(text) => self.write_sentence(text),
            Line::Wrong(text) => writeln!(terminal::stderr(), "{text}"),
        };
        self.count(written);
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

    fn write_sentence(&self, text: &str) -> io::Result<()> {
        if self.json {
            writeln!(terminal::stderr(), "{}", harmless(text))
        } else {
            writeln!(terminal::stdout(), "{}", harmless(text))
        }
    }

    /// Counts a line that could not be written, and tells of those before one that could.
    fn count(&self, written: io::Result<()>) {
        let lost = self.lost.load(Ordering::Relaxed);
        match written {
            Ok(()) if lost > 0 => {
                let lines = words::count(lost as usize, "line");
                if self.write_sentence(&format!("{lines} could not be written")).is_ok() {
                    self.lost.fetch_sub(lost, Ordering::Relaxed);
                }
            }
            Ok(()) => {}
            Err(error) => {
                if lost == 0 {
                    // Standard error may lead elsewhere.
                    let _ = writeln!(
                        terminal::stderr(),
                        "a line cannot be written, and the work goes on: {error}"
                    );
                }
                self.lost.fetch_add(1, Ordering::Relaxed);
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
