//! `belfry next`: the next ticks of a timing or of a schedule, for people and for machines. A timing needs no server and no file.

use std::io::{self, BufRead, Write};

use belfry::api::Schedule;
use belfry_time::{Shift, Tick, Timestamp, Timing, Zone, format_duration, parse_instant};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::client::schedule_path;
use crate::failure::{Failure, InOption};
use crate::output::{Format, Output, table};
use crate::place::{Need, Place};
use crate::reading;
use crate::terminal::{self, Layout};
use crate::timing::TimingArgs;
use crate::words;

/// More ticks than this are a mistake, and would fill memory.
const COUNT_MAX: u64 = 10_000;
/// A line of --jsonl longer than this is refused unread.
const LINE_MAX: usize = 64 * 1024;

/// Show the next ticks of a timing or of a schedule, exactly as the planner will compute them
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry next reporter/morning
  belfry next --cron \"0 9 * * 1-5\" --tz Europe/London
  belfry next --cron \"30 2 * * *\" --tz America/New_York --from 2026-03-07T12:00:00Z -n 3
  belfry next --every 20m --only-between 08:00-18:00 --not-on sat,sun
  belfry next --cron @daily -o json
  echo '{\"expr\":\"*/5 * * * *\",\"tz\":\"UTC\",\"from\":\"2026-01-01T00:00:00Z\",\"n\":2}' | belfry next --jsonl")]
pub struct Next {
    /// A schedule of the store, instead of a timing
    #[arg(value_name = "AGENT/SCHEDULE", conflicts_with_all = ["kind", "anchor", "phase", "only_between", "not_on", "jitter", "name", "dst_gap", "dst_fold"])]
    schedule: Option<String>,

    #[command(flatten)]
    timing: TimingArgs,

    /// Start after this instant: RFC 3339, or a local date and time [default: now]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    from: Option<String>,

    /// How many ticks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=COUNT_MAX))]
    count: u64,

    /// Read requests as JSON lines from standard input and answer each with one line
    #[arg(long, conflicts_with_all = ["schedule", "cron", "every", "at", "after", "from", "count", "anchor", "phase", "only_between", "not_on", "jitter", "name", "dst_gap", "dst_fold"])]
    jsonl: bool,
}

impl Next {
    /// Prints the ticks.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        if self.jsonl {
            return answer_lines(output);
        }
        if let Some(name) = &self.schedule {
            return self.of_schedule(name, place, output);
        }
        let zone = output.zone()?;
        let from = match &self.from {
            Some(from) => reading::local(from, "--from", &zone)?,
            None => now(),
        };
        // A calendar step keeps the time of day and the day number of where it starts.
        let timing = match self.timing.timing(zone.clone())? {
            timing if self.timing.every.is_some() => timing.with_origin(from),
            timing => timing,
        };
        let ticks: Vec<Row> =
            upcoming(&timing, from, self.count).iter().map(|tick| Row::of(tick, &timing)).collect();
        print(&format!("{}, {}", timing.describe(), timing.zone()), from, &ticks, &zone, output)
    }

    /// As the planner will find them; from another instant, as if the schedule had ticked then.
    fn of_schedule(&self, name: &str, place: &Place, output: &Output) -> Result<(), Failure> {
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let mut query = format!("/next?n={}", self.count);
            let mut from = None;
            if let Some(text) = &self.from {
                let zone = match &output.tz {
                    Some(_) => output.zone()?,
                    None => {
                        let schedule: Schedule = client.get(&schedule_path(name, "")?).await?;
                        Zone::get(&schedule.timezone).in_option("timing")?
                    }
                };
                let at = reading::local(text, "--from", &zone)?;
                query.push_str(&format!("&from={at}"));
                from = Some(at);
            }
            let found: Found = client.get(&schedule_path(name, &query)?).await?;
            let own = Zone::get(&found.tz).in_option("timing")?;
            let zone = if output.tz.is_some() { output.zone()? } else { own };
            if let Some(reason) = &found.reason {
                reading::remark(&words::one_line(reason, usize::MAX));
                if output.format == Format::Table {
                    return Ok(());
                }
            }
            let head = format!("{}, {}", found.words, found.tz);
            print(&head, from.unwrap_or_else(|| client.now()), &found.ticks, &zone, output)
        })
    }
}

/// The ticks of a schedule.
#[derive(Deserialize)]
struct Found {
    tz: String,
    words: String,
    ticks: Vec<Row>,
    reason: Option<String>,
}

/// A tick to come.
#[derive(Deserialize)]
struct Row {
    tick_at: Timestamp,
    due_at: Timestamp,
    /// What a change of clocks did to it.
    shift: Option<String>,
}

impl Row {
    fn of(tick: &Tick, timing: &Timing) -> Row {
        let shift = timing.shift(tick.tick_at).map(|shift| match shift {
            Shift::Moved => "moved",
            Shift::FirstPass => "first_pass",
            Shift::SecondPass => "second_pass",
        });
        Row { tick_at: tick.tick_at, due_at: tick.due_at, shift: shift.map(str::to_owned) }
    }
}

fn print(head: &str, from: Timestamp, ticks: &[Row], zone: &Zone, output: &Output) -> Result<(), Failure> {
    let shown = ticks.iter().map(|tick| TickOut::new(tick, zone));
    match output.format {
        Format::Table => {
            let mut out = io::BufWriter::new(terminal::stdout());
            print_table(&mut out, head, from, ticks, zone)?;
            Ok(out.flush()?)
        }
        Format::Json => {
            Ok(terminal::json(Layout::Line, [TicksOut { tz: zone.name(), ticks: shown.collect() }])?)
        }
        Format::Jsonl => Ok(terminal::json(Layout::Line, shown)?),
    }
}

/// The next ticks of something that has run before: one-shots are still to come.
fn upcoming(timing: &Timing, from: Timestamp, count: u64) -> Vec<Tick> {
    match timing.kind() {
        belfry_time::Kind::At(_) | belfry_time::Kind::After(_) => timing.first(from).into_iter().collect(),
        belfry_time::Kind::Every { .. } | belfry_time::Kind::Cron(_) => {
            timing.ticks(from).take(count as usize).collect()
        }
    }
}

#[derive(Serialize)]
struct TicksOut<'a> {
    tz: &'a str,
    ticks: Vec<TickOut>,
}

#[derive(Serialize)]
struct TickOut {
    tick_at: String,
    due_at: String,
}

impl TickOut {
    fn new(tick: &Row, zone: &Zone) -> TickOut {
        TickOut { tick_at: zone.rfc3339(tick.tick_at), due_at: zone.rfc3339(tick.due_at) }
    }
}

fn print_table(
    out: &mut impl Write,
    head: &str,
    from: Timestamp,
    ticks: &[Row],
    zone: &Zone,
) -> Result<(), Failure> {
    writeln!(out, "{}\n", words::one_line(head, usize::MAX))?;
    if ticks.is_empty() {
        return Ok(writeln!(out, "never after {}", zone.rfc3339(from))?);
    }
    let jittered = ticks.iter().any(|tick| tick.due_at != tick.tick_at);
    let mut header = vec!["TICK", "ZONE", "OFFSET", "IN", "NOTE"];
    if jittered {
        header.insert(1, "DUE");
    }
    let mut table = table(&header);
    for tick in ticks {
        let local = zone.local(tick.tick_at);
        let mut row = vec![
            clock(tick.tick_at, zone, "%a %Y-%m-%d %H:%M:%S"),
            zone.name().to_owned(),
            local.strftime("%:z").to_string(),
            distance(from, tick.tick_at),
            note(tick).to_owned(),
        ];
        if jittered {
            let same_day = zone.local(tick.due_at).date() == local.date();
            row.insert(
                1,
                clock(tick.due_at, zone, if same_day { "%H:%M:%S" } else { "%a %Y-%m-%d %H:%M:%S" }),
            );
        }
        table.add_row(row);
    }
    Ok(writeln!(out, "{}", table.trim_fmt())?)
}

/// Local time, with milliseconds where there are any.
fn clock(at: Timestamp, zone: &Zone, format: &str) -> String {
    let local = zone.local(at);
    let text = local.strftime(format).to_string();
    match local.millisecond() {
        0 => text,
        ms => format!("{text}.{ms:03}"),
    }
}

/// What a change of clocks did to a tick, marked so that it stands out.
fn note(tick: &Row) -> &'static str {
    match tick.shift.as_deref() {
        Some("moved") => "* moved out of a gap",
        Some("first_pass") => "* first of two",
        Some("second_pass") => "* second of two",
        _ => "",
    }
}

/// How long it is from one instant to another, to the second from a minute on.
fn distance(from: Timestamp, to: Timestamp) -> String {
    let exact = to.duration_since(from);
    let rounded =
        if exact.as_secs() >= 60 { belfry_time::SignedDuration::from_secs(exact.as_secs()) } else { exact };
    format_duration(rounded).to_string()
}

/// One request of `--jsonl`. Keys of the caller's own, such as an id, are left alone.
#[derive(Deserialize)]
struct Request {
    #[serde(alias = "cron")]
    expr: Option<String>,
    every: Option<String>,
    #[serde(alias = "timezone")]
    tz: Option<String>,
    from: Option<String>,
    n: Option<i64>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Next(Vec<String>),
    Error(String),
}

fn answer_lines(output: &Output) -> Result<(), Failure> {
    let default_zone = output.zone()?;
    let mut input = io::BufReader::new(io::stdin().lock());
    let mut answers = Vec::new();
    let mut line = Vec::new();
    while read_line(&mut input, &mut line)? {
        let answer = answer(&line, &default_zone).map_or_else(Answer::Error, Answer::Next);
        answers.push(answer);
        // A caller that waits for this answer before it asks again gets it.
        if input.buffer().is_empty() {
            terminal::json(Layout::Line, answers.drain(..))?;
        }
    }
    Ok(terminal::json(Layout::Line, answers)?)
}

/// Reads one line without its end, at most a little more than `LINE_MAX` of it. `false` at the end of input.
fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut any = false;
    loop {
        let buffer = input.fill_buf()?;
        if buffer.is_empty() {
            return Ok(any);
        }
        any = true;
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let part = &buffer[..end.unwrap_or(buffer.len())];
        let room = (LINE_MAX + 1).saturating_sub(line.len());
        line.extend_from_slice(&part[..part.len().min(room)]);
        let used = end.map_or(buffer.len(), |end| end + 1);
        input.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

fn answer(line: &[u8], default_zone: &Zone) -> Result<Vec<String>, String> {
    if line.len() > LINE_MAX {
        return Err(format!("line is longer than {LINE_MAX} bytes"));
    }
    let request: Request = serde_json::from_slice(line).map_err(|error| format!("not a request: {error}"))?;
    let count = request.n.unwrap_or(5);
    let Some(count) = u64::try_from(count).ok().filter(|count| (1..=COUNT_MAX).contains(count)) else {
        return Err(format!("n must be 1-{COUNT_MAX}, got {count}"));
    };
    let zone = match &request.tz {
        Some(name) => Zone::get(name).map_err(|error| format!("tz: {error}"))?,
        None => default_zone.clone(),
    };
    let from = match &request.from {
        Some(from) => parse_instant(from, Some(&zone)).map_err(|error| format!("from: {error}"))?,
        None => now(),
    };
    let arguments = TimingArgs { cron: request.expr, every: request.every, ..TimingArgs::default() };
    let timing = arguments.timing(zone.clone()).map_err(|failure| match failure {
        Failure::Time(_, error) => error.to_string(),
        _ => "exactly one of expr and every is needed".to_owned(),
    })?;
    Ok(upcoming(&timing, from, count).iter().map(|tick| zone.rfc3339(tick.tick_at)).collect())
}

/// Now, to the millisecond: what is printed is exact.
fn now() -> Timestamp {
    Timestamp::from_millisecond(Timestamp::now().as_millisecond()).unwrap_or(Timestamp::UNIX_EPOCH)
}
