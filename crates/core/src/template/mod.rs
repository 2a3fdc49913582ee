//! The template language of definitions: `{{ path | filter }}` and `{% if path %}`. Pure.
//!
//! A template comes from a definition and is parsed when the definition is accepted; what arrives with a run is a value and
//! is never parsed. There are no loops and no arithmetic, so a template costs what its text and its values are long; the
//! limits below hold whatever both are. Start reading at `parse.rs`; a line of `shell:` is no template: see `shell.rs`.

use std::fmt;
use std::ops::Range;

mod filter;
mod parse;
mod render;
mod shell;

use filter::Filter;
pub use render::{Budget, Error, Part, Values};
pub use shell::{LINE_MAX, check_line};

/// Maximum length of a template, in bytes.
pub const SOURCE_MAX: usize = 16 << 10;
/// Maximum number of `if` inside of each other.
pub const DEPTH_MAX: usize = 8;
/// Maximum length of what a template gives, in bytes. With what filters make of one value it stays below 16 MiB of memory.
pub const RESULT_MAX: usize = 8 << 20;
/// Maximum work of one [`Budget`], in bytes written; a byte that a filter reads or makes counts twice.
pub const WORK_MAX: u64 = 32 << 20;

/// What a path may begin with.
pub const NAMES: [&str; 11] = [
    "prompt",
    "payload",
    "item",
    "command",
    "agent",
    "schedule",
    "session",
    "run",
    "attempt",
    "tick_at",
    "last_success_at",
];

/// A parsed template.
#[derive(Debug, Clone)]
pub struct Template {
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
enum Piece {
    /// Text that is given as it is, and where it stands in the source.
    Text(String, Range<usize>),
    Value(Expression),
    If(Vec<Branch>),
}

/// One of `if`, `elif` and `else`; the last has no condition.
#[derive(Debug, Clone)]
struct Branch {
    condition: Option<Condition>,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
enum Condition {
    /// `if path`, and with `true` `if not path`.
    Is(Path, bool),
    /// `if path == "text"`, and with `true` `if path != "text"`.
    Equals(Path, String, bool),
}

#[derive(Debug, Clone)]
struct Expression {
    operand: Operand,
    filters: Vec<Filter>,
}

#[derive(Debug, Clone)]
enum Operand {
    Path(Path),
    Literal(String),
}

/// `payload.items[0].name`.
#[derive(Debug, Clone)]
struct Path {
    /// As written, for messages.
    text: String,
    /// One of [`NAMES`].
    name: &'static str,
    /// Keys of maps and indexes of lists.
    steps: Vec<String>,
}

/// Why a template is refused, and where in its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// The bytes of the source that are wrong.
    pub range: Range<usize>,
    /// What is wrong, without what the source says.
    pub message: String,
    /// The part of the source that is wrong, in words that go behind the message; may be empty.
    pub found: Box<str>,
    /// The way out.
    pub help: Option<String>,
}

impl ParseError {
    /// The same without words of the source, which may be a secret.
    pub fn without_source(self) -> ParseError {
        ParseError { found: Box::default(), ..self }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.message, self.found)?;
        match &self.help {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ParseError {}

/// A template of a definition that is refused, and its place there: `prompt`, `run[2]`, `env.DIR`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the template `{place}`: {error}")]
pub struct Refused {
    /// Where it stands.
    pub place: Box<str>,
    /// What is wrong with it.
    #[source]
    pub error: ParseError,
}

impl Template {
    /// Parses a template.
    pub fn parse(source: &str) -> Result<Template, ParseError> {
        parse::parse(source, false)
    }

    /// Parses the template of a prompt, which cannot refer to `prompt`.
    pub fn parse_prompt(source: &str) -> Result<Template, ParseError> {
        parse::parse(source, true)
    }

    /// The literal texts, each with its place in the source. Values are not among them.
    pub fn texts(&self) -> Vec<(&str, Range<usize>)> {
        let mut texts = Vec::new();
        collect_texts(&self.pieces, &mut texts);
        texts
    }
}

fn collect_texts<'a>(pieces: &'a [Piece], texts: &mut Vec<(&'a str, Range<usize>)>) {
    for piece in pieces {
        match piece {
            Piece::Text(text, range) => texts.push((text, range.clone())),
            Piece::Value(_) => {}
            Piece::If(branches) => branches.iter().for_each(|branch| collect_texts(&branch.pieces, texts)),
        }
    }
}
