//! `belfry logs`: what a run has written, to the streams it wrote it to.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use belfry::{RunId, RunState};
use belfry_store::{OutputChunk, RunFilter, RunRecord, Store, Stream};
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reading::{self, Reading};
use crate::tame::Tame;
use crate::words;

/// So much is read at once.
const PIECE: u32 = 256 * 1024;
/// So often a run that lives is looked at, whatever hints the store gives.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Show the output of a run
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry logs reporter/morning
  belfry logs reporter/morning -f
  belfry logs 01a1df11-4771-7f74-85b9-43588e53d694 >out.txt 2>err.txt

What the run wrote to standard output goes to standard output, the rest to standard error. On a terminal only colours, line
ends and tabs are let through; elsewhere everything is passed on as it is.")]
pub struct Logs {
    /// A run, or a schedule: then its last run
    #[arg(value_name = "RUN|AGENT/SCHEDULE")]
    what: String,

    /// Go on until the run ends
    #[arg(short = 'f', long)]
    follow: bool,
}

impl Logs {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reading::block_on(async {
            let reading = Reading::open(place).await?;
            let run = self.find(&reading).await?;
            let mut writer = Writer::new(output);
            let mut after = None;
            let mut run = run;
            loop {
                // What is written before the end is there when the end is.
                let chunks = reading.store.output(run.id, after, PIECE).await?;
                if let Some(last) = chunks.last() {
                    after = Some(last.seq);
                    chunks.iter().try_for_each(|chunk| writer.write(chunk))?;
                    continue;
                }
                writer.flush()?;
                if !self.follow || !run.state.is_live() {
                    break;
                }
                let hint = tokio::time::timeout(LOOK_EVERY, reading.store.changed());
                let _ = hint.await;
                run = reading.store.run(run.id).await?.ok_or_else(|| gone(&run.id.to_string()))?;
            }
            writer.finish()?;
            if output.format == Format::Table {
                remark_end(&run, after.is_none());
            }
            Ok(())
        })
    }

    async fn find(&self, reading: &Reading) -> Result<RunRecord, Failure> {
        if !self.what.contains('/') {
            let id = self.what.parse().map(RunId).map_err(|_| {
                let what = &self.what;
                Failure::Usage(format!(
                    "a run is an id as in `belfry runs`, a schedule is agent/schedule, got {what:?}"
                ))
            })?;
            return reading.store.run(id).await?.ok_or_else(|| gone(&self.what));
        }
        let filter = RunFilter { schedule: Some(self.what.clone()), ..RunFilter::default() };
        if let Some(run) = reading.runs(&filter, 1).await?.pop() {
            return Ok(run);
        }
        reading.schedule(&self.what).await?;
        Err(Failure::NotFound(format!("{} has not run yet", self.what)))
    }
}

fn gone(run: &str) -> Failure {
    Failure::NotFound(format!("there is no run {run}; `belfry runs` lists them"))
}

/// How the run stands, beside its output.
fn remark_end(run: &RunRecord, silent: bool) {
    let nothing = if silent { "no output; " } else { "" };
    let took = run.started_at.zip(run.finished_at).map(|(from, to)| words::span(to.duration_since(from)));
    let took = took.map_or(String::new(), |took| format!(" after {took}"));
    let why = run.reason.map_or(String::new(), |reason| format!(" ({reason})"));
    match run.state {
        RunState::Completed if !silent => {}
        RunState::Running => reading::remark(&format!("{nothing}{} is still running", run.name)),
        RunState::Pending => reading::remark(&format!("{nothing}{} waits to be started", run.name)),
        state => reading::remark(&format!("{nothing}{} {state}{why}{took}", run.name)),
    }
}

/// Brings pieces of output to where they belong.
pub struct Writer {
    format: Format,
    out: Sink<io::Stdout>,
    err: Sink<io::Stderr>,
    attempt: u32,
}

struct Sink<W> {
    to: W,
    /// On a terminal.
    tame: Option<Tame>,
}

impl<W: Write> Sink<W> {
    fn new(to: W, tame: Option<Tame>) -> Sink<W> {
        Sink { to, tame }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.tame {
            Some(tame) => self.to.write_all(tame.pass(bytes).as_bytes()),
            None => self.to.write_all(bytes),
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        if let Some(tame) = &mut self.tame {
            self.to.write_all(tame.end().as_bytes())?;
        }
        self.to.flush()
    }
}

#[derive(Serialize)]
struct Piece<'a> {
    seq: u64,
    attempt: u32,
    stream: &'static str,
    text: std::borrow::Cow<'a, str>,
}

impl Writer {
    pub fn new(output: &Output) -> Writer {
        let colours = !output.no_color && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let tame = |terminal: bool| terminal.then(|| Tame::new(colours));
        Writer {
            format: output.format,
            out: Sink::new(io::stdout(), tame(io::stdout().is_terminal())),
            err: Sink::new(io::stderr(), tame(io::stderr().is_terminal())),
            attempt: 0,
        }
    }

    pub fn write(&mut self, chunk: &OutputChunk) -> Result<(), Failure> {
        if self.format != Format::Table {
            let stream = match chunk.stream {
                Stream::Out => "stdout",
                Stream::Err => "stderr",
                Stream::Note => "note",
            };
            let text = String::from_utf8_lossy(&chunk.bytes);
            let piece = Piece { seq: chunk.seq, attempt: chunk.attempt, stream, text };
            serde_json::to_writer(&mut self.out.to, &piece)?;
            return Ok(writeln!(self.out.to)?);
        }
        if chunk.attempt > 1 && chunk.attempt != self.attempt {
            self.out.to.flush()?;
            reading::remark(&format!("-- attempt {}", chunk.attempt));
        }
        self.attempt = chunk.attempt;
        match chunk.stream {
            Stream::Out => self.out.write(&chunk.bytes)?,
            Stream::Err => self.err.write(&chunk.bytes)?,
            Stream::Note => {
                self.out.to.flush()?;
                let note = words::one_line(&String::from_utf8_lossy(&chunk.bytes), 400);
                reading::remark(&format!("-- {note}"));
            }
        }
        Ok(())
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.to.flush()?;
        self.err.to.flush()
    }

    pub fn finish(&mut self) -> io::Result<()> {
        if self.format != Format::Table {
            return self.out.to.flush();
        }
        self.out.finish()?;
        self.err.finish()
    }
}
