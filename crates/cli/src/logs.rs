//! `belfry logs`: what a run has written, to the streams it wrote it to.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use belfry::api::{List, Run};
use belfry::{RunId, RunState};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::client::{Client, encoded, of_name, schedule_path};
use crate::events::{Event, Events};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::pages::Pages;
use crate::place::{Need, Place};
use crate::reading;
use crate::tame::Tame;
use crate::terminal::{self, Layout};
use crate::words;

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
            let client = place.client(Need::Store).await?;
            let mut run = self.find(&client).await?;
            let mut writer = Writer::new(output);
            if self.follow {
                let mut events = Events::of(&client, run.id);
                run = loop {
                    match events.next().await? {
                        Event::Output(piece) => writer.write(&piece)?,
                        Event::End(run) => break *run,
                    }
                    writer.flush()?;
                };
            } else {
                read(&client, run.id, &mut writer).await?;
            }
            let silent = writer.is_silent;
            writer.finish()?;
            if output.format == Format::Table {
                remark_end(&run, silent);
            }
            Ok(())
        })
    }

    async fn find(&self, client: &Client) -> Result<Run, Failure> {
        if !self.what.contains('/') {
            let id = self.what.parse().map(RunId).map_err(|_| {
                let what = &self.what;
                Failure::Usage(format!(
                    "a run is an id as in `belfry runs`, a schedule is agent/schedule, got {what:?}"
                ))
            })?;
            return client.run(id).await;
        }
        let newest: Vec<Run> = client.list(&format!("/api/v1/runs?{}", of_name(&self.what)), 1).await?;
        if let Some(run) = newest.into_iter().next() {
            return Ok(run);
        }
        client.get::<serde_json::Value>(&schedule_path(&self.what, "")?).await?;
        Err(Failure::NotFound(format!("{} has not run yet", self.what)))
    }
}

/// Writes all that is there now.
async fn read(client: &Client, run: RunId, writer: &mut Writer) -> Result<(), Failure> {
    let (mut pages, mut after) = (Pages::default(), String::new());
    loop {
        let page: List<Piece> = client.get(&format!("/api/v1/runs/{run}/log{after}")).await?;
        page.items.iter().try_for_each(|piece| writer.write(piece))?;
        // Nothing is kept of what was written.
        match pages.next(page.items.len(), 0, page.next)? {
            Some(next) => after = format!("?after={}", encoded(&next)),
            None => return Ok(()),
        }
    }
}

/// How the run stands, beside its output.
fn remark_end(run: &Run, silent: bool) {
    let nothing = if silent { "no output; " } else { "" };
    let took = run.took_ms.map_or(String::new(), |ms| format!(" after {}", words::span_ms(ms)));
    let why = run.reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
    let name = run.name();
    match run.state {
        RunState::Completed if !silent => {}
        RunState::Running => reading::remark(&format!("{nothing}{name} is still running")),
        RunState::Pending => reading::remark(&format!("{nothing}{name} waits to be started")),
        state => reading::remark(&format!("{nothing}{name} {state}{why}{took}")),
    }
}

/// Brings pieces of output to where they belong.
pub struct Writer {
    format: Format,
    out: Sink<io::Stdout>,
    err: Sink<io::Stderr>,
    attempt: u32,
    /// Nothing was written.
    is_silent: bool,
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

/// A piece of what a run has written.
#[derive(Serialize, Deserialize)]
pub struct Piece {
    pub seq: u64,
    attempt: u32,
    stream: String,
    text: String,
    /// The bytes themselves, where they are no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hex: Option<String>,
}

impl Piece {
    fn bytes(&self) -> Cow<'_, [u8]> {
        let pair = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok();
        match &self.hex {
            Some(hex) => hex.as_bytes().chunks(2).filter_map(pair).collect(),
            None => Cow::Borrowed(self.text.as_bytes()),
        }
    }
}

impl Writer {
    #[allow(
        clippy::disallowed_methods,
        reason = "output of runs is bytes in a pipe, and filtered on a terminal"
    )]
    pub fn new(output: &Output) -> Writer {
        let colours = !output.no_color && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let tame = |terminal: bool| terminal.then(|| Tame::new(colours));
        Writer {
            format: output.format,
            out: Sink::new(io::stdout(), tame(io::stdout().is_terminal())),
            err: Sink::new(io::stderr(), tame(io::stderr().is_terminal())),
            attempt: 0,
            is_silent: true,
        }
    }

    pub fn write(&mut self, piece: &Piece) -> Result<(), Failure> {
        self.is_silent = false;
        if self.format != Format::Table {
            return Ok(terminal::json(Layout::Line, [piece])?);
        }
        if piece.attempt > 1 && piece.attempt != self.attempt {
            self.out.to.flush()?;
            reading::remark(&format!("-- attempt {}", piece.attempt));
        }
        self.attempt = piece.attempt;
        match piece.stream.as_str() {
            "stdout" => self.out.write(&piece.bytes())?,
            "stderr" => self.err.write(&piece.bytes())?,
            _ => {
                self.out.to.flush()?;
                reading::remark(&format!("-- {}", words::one_line(&piece.text, 400)));
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
