//! The one error of this crate: what was wrong, with which input, and where in it.

use std::fmt;
use std::ops::Range;

use crate::cron::Field;

/// Why a piece of text is not a timing, or why its parts do not go together.
///
/// The message carries the input and the way out. [`Error::span`] says which bytes of [`Error::input`] are
/// meant, so that a caller can underline them in a file; [`Error::underline`] does so on two lines of text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    input: String,
    span: Range<usize>,
    message: String,
}

/// Which part of a timing an [`Error`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// `every`, or any other duration.
    Interval,
    /// `cron`; the field is known unless the number of fields is what is wrong.
    Cron {
        /// The field that is wrong.
        field: Option<Field>,
    },
    /// `at`, or another instant.
    Instant,
    /// `timezone`.
    Zone,
    /// `only_between`.
    OnlyBetween,
    /// `not_on`.
    NotOn,
    /// `jitter`.
    Jitter,
    /// `phase`.
    Phase,
    /// Each part is right, but together they never let a tick through.
    NeverAllowed,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, input: &str, span: Range<usize>, message: String) -> Error {
        Error {
            kind,
            input: excerpt(input).to_owned(),
            span: span.start.min(INPUT_MAX)..span.end.min(INPUT_MAX),
            message,
        }
    }

    /// An error about the whole of `input`.
    pub(crate) fn whole(kind: ErrorKind, input: &str, message: String) -> Error {
        Error::new(kind, input, 0..input.len(), message)
    }

    /// Which part of a timing is wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The text that was refused; of a very long one, its beginning.
    pub fn input(&self) -> &str {
        &self.input
    }

    /// The bytes of the input that are wrong.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// The input with the wrong part underlined, on two lines; `None` where that would say nothing new.
    ///
    /// ```
    /// let error = belfry_time::Cron::parse("0 25 * * *").unwrap_err();
    /// assert_eq!(error.underline().unwrap(), "0 25 * * *\n  ^^");
    /// ```
    pub fn underline(&self) -> Option<String> {
        let whole = self.span.start == 0 && self.span.end >= self.input.len();
        if whole || self.input.len() > 100 || !self.input.bytes().all(|b| (b' '..=b'~').contains(&b)) {
            return None;
        }
        let width = self.span.len().max(1);
        Some(format!("{}\n{}{}", self.input, " ".repeat(self.span.start), "^".repeat(width)))
    }
}

/// As much of a refused input as an error keeps.
const INPUT_MAX: usize = 1024;

fn excerpt(input: &str) -> &str {
    &input[..input.floor_char_boundary(INPUT_MAX)]
}

/// An input inside a message: in quotes, control characters escaped, cut when long.
pub(crate) struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 60;
        let cut = self.0.floor_char_boundary(SHOWN);
        let more = if cut < self.0.len() { "…" } else { "" };
        write!(f, "\"{}{more}\"", self.0[..cut].escape_debug())
    }
}
