//! From a template and values to text, within a budget.

use std::borrow::Cow;
use std::io;

use belfry_time::{Timestamp, Zone};
use serde_json::Value;

use super::{Branch, Condition, Expression, Operand, Path, Piece, RESULT_MAX, Template, WORK_MAX};

/// What a piece of a template costs, whatever it gives.
const PIECE_COST: usize = 16;
/// What a token of JSON costs at least.
const WRITE_COST: usize = 8;

/// What the paths of a template stand for.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    /// The prompt, filled in; none while the prompt itself is filled in.
    pub prompt: Option<&'a str>,
    /// The merged payload.
    pub payload: &'a Value,
    /// The schedule's command.
    pub command: &'a str,
    /// The agent's name.
    pub agent: &'a str,
    /// The schedule's name.
    pub schedule: &'a str,
    /// The key of the session, where a message made the run.
    pub session: Option<&'a str>,
    /// The run's id.
    pub run: &'a str,
    /// Which attempt, from 1.
    pub attempt: u32,
    /// The nominal instant, where a tick made the run.
    pub tick_at: Option<Timestamp>,
    /// The end of the schedule's last run that completed.
    pub last_success_at: Option<Timestamp>,
    /// The zone in which `date` shows instants.
    pub zone: &'a Zone,
}

/// Why a template gives no text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such value.
    #[error("`{0}` is missing; `{{{{ {0} | default(\"…\") }}}}` would stand in for it")]
    Missing(String),
    /// A filter cannot be applied to a value.
    #[error("{0}")]
    Filter(String),
    /// The result is too long.
    #[error("the result is longer than {} MiB", RESULT_MAX >> 20)]
    TooLong,
    /// The values are too large for what is done with them.
    #[error(
        "the values are too large for what the templates do with them: more than {} MiB of work; use fewer filters",
        WORK_MAX >> 20
    )]
    TooMuchWork,
}

/// The work that the templates of one attempt may take together.
#[derive(Debug, Default)]
pub struct Budget {
    used: u64,
}

impl Budget {
    /// The work that was done so far; see [`WORK_MAX`].
    pub fn used(&self) -> u64 {
        self.used
    }

    fn spend(&mut self, bytes: usize) -> Result<(), Error> {
        self.used = self.used.saturating_add(bytes as u64);
        if self.used > WORK_MAX { Err(Error::TooMuchWork) } else { Ok(()) }
    }

    /// Pays for bytes that a filter reads or makes.
    pub(super) fn walk(&mut self, bytes: usize) -> Result<(), Error> {
        self.spend(bytes.saturating_mul(2))
    }
}

/// A part of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Text of the template itself.
    Text(&'a str),
    /// What stands for a `{{ … }}`.
    Value(&'a str),
}

impl Template {
    /// The text that the template gives.
    pub fn render(&self, values: &Values<'_>, budget: &mut Budget) -> Result<String, Error> {
        let mut out = String::new();
        self.render_parts(values, budget, &mut |part| {
            let (Part::Text(text) | Part::Value(text)) = part;
            out.push_str(text);
        })?;
        Ok(out)
    }

    /// Gives the parts of the result in order, so that the caller can tell values from the text of the template.
    pub fn render_parts(
        &self,
        values: &Values<'_>,
        budget: &mut Budget,
        sink: &mut dyn FnMut(Part<'_>),
    ) -> Result<(), Error> {
        let mut renderer = Renderer { values, budget, sink, length: 0 };
        renderer.pieces(&self.pieces)
    }
}

struct Renderer<'a, 'v> {
    values: &'a Values<'v>,
    budget: &'a mut Budget,
    sink: &'a mut dyn FnMut(Part<'_>),
    length: usize,
}

impl<'v> Renderer<'_, 'v> {
    /// Calls itself for the pieces of an `if`, which parsing has limited to [`super::DEPTH_MAX`] levels.
    fn pieces(&mut self, pieces: &[Piece]) -> Result<(), Error> {
        for piece in pieces {
            self.budget.spend(PIECE_COST)?;
            match piece {
                Piece::Text(text, _) => self.give(Part::Text(text))?,
                Piece::Value(expression) => {
                    let text = self.value(expression)?;
                    self.give(Part::Value(&text))?;
                }
                Piece::If(branches) => {
                    if let Some(branch) = self.chosen(branches)? {
                        self.pieces(&branch.pieces)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn give(&mut self, part: Part<'_>) -> Result<(), Error> {
        let (Part::Text(text) | Part::Value(text)) = part;
        self.length += text.len();
        if self.length > RESULT_MAX {
            return Err(Error::TooLong);
        }
        self.budget.spend(text.len())?;
        (self.sink)(part);
        Ok(())
    }

    fn chosen<'t>(&mut self, branches: &'t [Branch]) -> Result<Option<&'t Branch>, Error> {
        for branch in branches {
            self.budget.spend(PIECE_COST)?;
            let holds = match &branch.condition {
                None => true,
                Some(Condition::Is(path, negated)) => find(self.values, path).is_true() != *negated,
                Some(Condition::Equals(path, text, negated)) => {
                    find(self.values, path).equals(text) != *negated
                }
            };
            if holds {
                return Ok(Some(branch));
            }
        }
        Ok(None)
    }

    fn value<'t>(&mut self, expression: &'t Expression) -> Result<Cow<'t, str>, Error>
    where
        'v: 't,
    {
        let mut value = match &expression.operand {
            Operand::Path(path) => find(self.values, path),
            Operand::Literal(text) => Found::Text(Cow::Borrowed(text.as_str())),
        };
        for filter in &expression.filters {
            self.budget.spend(PIECE_COST)?;
            value = filter.apply(value, self.values.zone, self.budget)?;
        }
        match (value.into_text(self.budget)?, &expression.operand) {
            (Some(text), _) => Ok(text),
            (None, Operand::Path(path)) => Err(Error::Missing(path.text.clone())),
            (None, Operand::Literal(text)) => Err(Error::Missing(format!("{text:?}"))),
        }
    }
}

/// A value on its way through the filters.
#[derive(Debug)]
pub(super) enum Found<'v> {
    Missing,
    /// Anything but text.
    Json(&'v Value),
    Text(Cow<'v, str>),
    Count(u64),
}

/// Looks a path up. A key that is not there, or a step into something that is neither a map nor a list, is missing.
fn find<'v>(values: &Values<'v>, path: &Path) -> Found<'v> {
    let instant = |at: Option<Timestamp>| at.map(|at| Found::text(at.to_string()));
    let text = |text: &'v str| Some(Found::Text(Cow::Borrowed(text)));
    let found = match path.name {
        "payload" => {
            let step = |value: &'v Value, step: &String| match value {
                Value::Object(map) => map.get(step),
                Value::Array(items) => items.get(step.parse::<usize>().ok()?),
                _ => None,
            };
            return path.steps.iter().try_fold(values.payload, step).map_or(Found::Missing, Found::json_of);
        }
        _ if !path.steps.is_empty() => None,
        "prompt" => values.prompt.and_then(text),
        "command" => text(values.command),
        "agent" => text(values.agent),
        "schedule" => text(values.schedule),
        "session" => values.session.and_then(text),
        "run" => text(values.run),
        "attempt" => Some(Found::Count(u64::from(values.attempt))),
        "tick_at" => instant(values.tick_at),
        "last_success_at" => instant(values.last_success_at),
        // `item`: no run has one yet.
        _ => None,
    };
    found.unwrap_or(Found::Missing)
}

impl<'v> Found<'v> {
    pub(super) fn text(text: impl Into<String>) -> Found<'v> {
        Found::Text(Cow::Owned(text.into()))
    }

    pub(super) fn json_of(value: &'v Value) -> Found<'v> {
        match value {
            Value::String(text) => Found::Text(Cow::Borrowed(text)),
            value => Found::Json(value),
        }
    }

    /// Whether there is nothing to show: no value, or `null`.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Found::Missing | Found::Json(Value::Null))
    }

    /// What `if` makes of it: nothing, `false`, zero and what is empty are false.
    fn is_true(&self) -> bool {
        match self {
            Found::Missing | Found::Json(Value::Null) => false,
            Found::Json(Value::Bool(flag)) => *flag,
            Found::Json(Value::Number(number)) => number.as_f64() != Some(0.0),
            Found::Json(Value::Array(items)) => !items.is_empty(),
            Found::Json(Value::Object(map)) => !map.is_empty(),
            Found::Json(Value::String(text)) => !text.is_empty(),
            Found::Text(text) => !text.is_empty(),
            Found::Count(count) => *count != 0,
        }
    }

    /// Whether it is shown as this text. Lists and maps equal no text, and neither does what is missing.
    fn equals(&self, text: &str) -> bool {
        match self {
            Found::Text(own) => own == text,
            Found::Count(count) => count.to_string() == text,
            Found::Json(Value::Bool(flag)) => text == if *flag { "true" } else { "false" },
            Found::Json(Value::Number(number)) => number.to_string() == text,
            _ => false,
        }
    }

    /// It as text: lists and maps as JSON; none where there is nothing to show.
    pub(super) fn into_text(self, budget: &mut Budget) -> Result<Option<Cow<'v, str>>, Error> {
        Ok(match self {
            Found::Missing | Found::Json(Value::Null) => None,
            Found::Text(text) => Some(text),
            Found::Count(count) => Some(Cow::Owned(count.to_string())),
            Found::Json(value) => Some(Cow::Owned(to_json(value, budget)?)),
        })
    }

    /// It as JSON.
    pub(super) fn json(&self, budget: &mut Budget) -> Result<String, Error> {
        match self {
            Found::Missing => Ok("null".into()),
            Found::Json(value) => to_json(value, budget),
            Found::Text(text) => to_json(text, budget),
            Found::Count(count) => Ok(count.to_string()),
        }
    }

    pub(super) fn describe(&self) -> &'static str {
        match self {
            Found::Missing | Found::Json(Value::Null) => "nothing",
            Found::Json(Value::Bool(_)) => "true or false",
            Found::Json(Value::Array(_)) => "a list",
            Found::Json(Value::Object(_)) => "a map",
            Found::Json(Value::String(_)) | Found::Text(_) => "text",
            Found::Json(Value::Number(_)) | Found::Count(_) => "a number",
        }
    }
}

/// Writes JSON until the budget is used up.
fn to_json(value: &(impl serde::Serialize + ?Sized), budget: &mut Budget) -> Result<String, Error> {
    let mut out = Paid { bytes: Vec::new(), budget };
    serde_json::to_writer(&mut out, value).map_err(|_| Error::TooMuchWork)?;
    String::from_utf8(out.bytes).map_err(|error| Error::Filter(error.to_string()))
}

struct Paid<'a> {
    bytes: Vec<u8>,
    budget: &'a mut Budget,
}

impl io::Write for Paid<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.budget.walk(bytes.len().max(WRITE_COST)).map_err(io::Error::other)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
