//! From text to a template, in one pass from left to right. Open `if`s stand on a stack of bounded height, so no text makes
//! the parser recurse.

use std::ops::Range;

use super::filter::{self, Argument, Filter};
use super::{
    Branch, Condition, DEPTH_MAX, Expression, NAMES, Operand, ParseError, Path, Piece, SOURCE_MAX, Template,
};
use crate::suggest::nearest;

/// An `if` whose `endif` has not come yet.
struct Open {
    /// Where it began.
    range: Range<usize>,
    done: Vec<Branch>,
    /// The condition of the branch that is being read; none after `else`.
    condition: Option<Condition>,
    /// The pieces before the `if`.
    before: Vec<Piece>,
}

pub(super) fn parse(source: &str, is_prompt: bool) -> Result<Template, ParseError> {
    if source.len() > SOURCE_MAX {
        let message = format!("a template has at most {SOURCE_MAX} bytes, this one has {}", source.len());
        return Err(error(0..source.len(), message).help("pass long text in the payload or in a file"));
    }
    let mut open: Vec<Open> = Vec::new();
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = 0;
    while let Some(tag) = next_tag(source, at) {
        if tag > at {
            pieces.push(Piece::Text(source[at..tag].to_owned(), at..tag));
        }
        let mut cursor = Cursor { source, at: tag + 2, is_prompt };
        if source[tag..].starts_with("{{") {
            let expression = cursor.expression()?;
            cursor.close("}}", tag)?;
            pieces.push(Piece::Value(expression));
        } else {
            block(&mut cursor, tag, &mut open, &mut pieces)?;
        }
        at = cursor.at;
    }
    if at < source.len() {
        pieces.push(Piece::Text(source[at..].to_owned(), at..source.len()));
    }
    match open.pop() {
        Some(open) => Err(error(open.range, "this `if` has no `{% endif %}`")),
        None => Ok(Template { pieces }),
    }
}

fn next_tag(source: &str, from: usize) -> Option<usize> {
    let rest = source.as_bytes().get(from..)?;
    rest.windows(2).position(|pair| pair == b"{{" || pair == b"{%").map(|at| from + at)
}

/// Reads one of `if`, `elif`, `else` and `endif`, after its `{%`.
fn block(
    cursor: &mut Cursor<'_>,
    tag: usize,
    open: &mut Vec<Open>,
    pieces: &mut Vec<Piece>,
) -> Result<(), ParseError> {
    cursor.blanks();
    let start = cursor.at;
    let word = cursor.word();
    let range = start..start + word.len();
    match word {
        "if" => {
            if open.len() == DEPTH_MAX {
                return Err(error(range, format!("more than {DEPTH_MAX} `if` inside of each other")));
            }
            let condition = Some(cursor.condition()?);
            let before = std::mem::take(pieces);
            open.push(Open { range: tag..tag, done: Vec::new(), condition, before });
        }
        "elif" | "else" => {
            let Some(last) = open.last_mut() else {
                return Err(error(range, format!("`{word}` without an `if` before it")));
            };
            let Some(condition) = last.condition.take() else {
                return Err(error(range, format!("`{word}` after `else`")));
            };
            last.done.push(Branch { condition: Some(condition), pieces: std::mem::take(pieces) });
            if word == "elif" {
                last.condition = Some(cursor.condition()?);
            }
        }
        "endif" => {
            let Some(last) = open.pop() else {
                return Err(error(range, "`endif` without an `if` before it"));
            };
            let Open { mut done, condition, mut before, .. } = last;
            done.push(Branch { condition, pieces: std::mem::take(pieces) });
            before.push(Piece::If(done));
            *pieces = before;
        }
        _ => {
            let message = "expected `if`, `elif`, `else` or `endif` after `{%`";
            let found = format!(", got {}", cursor.got(start));
            return Err(error(start..start + 1, message)
                .found(found)
                .help("for the text `{%` write `{{ \"{%\" }}`")
                .within(cursor.source));
        }
    }
    cursor.close("%}", tag)?;
    if word == "if"
        && let Some(last) = open.last_mut()
    {
        last.range = tag..cursor.at;
    }
    Ok(())
}

fn error(range: Range<usize>, message: impl Into<String>) -> ParseError {
    ParseError { range, message: message.into(), found: Box::default(), help: None }
}

impl ParseError {
    /// The same error with a range that begins and ends between characters of the source.
    fn within(mut self, source: &str) -> ParseError {
        let whole =
            |at: usize| (at..source.len()).find(|at| source.is_char_boundary(*at)).unwrap_or(source.len());
        self.range = self.range.start.min(source.len())..whole(self.range.end);
        self
    }

    fn found(mut self, found: String) -> ParseError {
        self.found = found.into();
        self
    }

    fn help(mut self, help: impl Into<String>) -> ParseError {
        self.help = Some(help.into());
        self
    }
}

/// A place in the source, inside of a tag.
struct Cursor<'a> {
    source: &'a str,
    at: usize,
    is_prompt: bool,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Takes a sign, after blanks.
    fn take(&mut self, sign: &str) -> bool {
        self.blanks();
        let found = self.rest().starts_with(sign);
        self.at += if found { sign.len() } else { 0 };
        found
    }

    /// Takes a word of letters, digits and `_`; it may be empty.
    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let word = &rest[..rest.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count()];
        self.at += word.len();
        word
    }

    /// What stands at a place, for messages.
    fn got(&self, at: usize) -> String {
        let rest = self.source[at..].trim_start();
        let show = |c: char| match c {
            '"' | '\'' | '\\' => c.to_string(),
            c => c.escape_debug().to_string(),
        };
        let shown: String = rest.chars().take(20).map(show).collect();
        match rest.chars().nth(20) {
            _ if rest.is_empty() => "the end of the text".into(),
            Some(_) => format!("`{shown}…`"),
            None => format!("`{shown}`"),
        }
    }

    /// An error at the next sign.
    fn expected(&mut self, what: &str) -> ParseError {
        self.blanks();
        let found = format!(", got {}", self.got(self.at));
        error(self.at..self.at + 1, format!("expected {what}")).found(found).within(self.source)
    }

    /// Takes the end of a tag that began at `tag`.
    fn close(&mut self, sign: &str, tag: usize) -> Result<(), ParseError> {
        if self.take(sign) {
            return Ok(());
        }
        let (opened, what) = if sign == "}}" { ("{{", "`|` or `}}`") } else { ("{%", "`%}`") };
        if self.rest().is_empty() {
            let help = format!("for the text `{opened}` write `{{{{ \"{opened}\" }}}}`");
            return Err(error(tag..self.source.len(), format!("`{opened}` without a `{sign}`")).help(help));
        }
        Err(self.expected(what))
    }

    fn expression(&mut self) -> Result<Expression, ParseError> {
        self.blanks();
        let operand = match self.string()? {
            Some(text) => Operand::Literal(text),
            None => Operand::Path(self.path()?),
        };
        let mut filters = Vec::new();
        while self.take("|") {
            filters.push(self.filter()?);
        }
        Ok(Expression { operand, filters })
    }

    fn condition(&mut self) -> Result<Condition, ParseError> {
        self.blanks();
        let before = self.at;
        let is_not = self.word() == "not" && self.rest().starts_with(char::is_whitespace);
        if !is_not {
            self.at = before;
        }
        self.blanks();
        let path = self.path()?;
        let differs = self.take("!=");
        if !differs && !self.take("==") {
            return Ok(Condition::Is(path, is_not));
        }
        if is_not {
            return Err(error(before..before + 3, "`not` stands before a path alone").help("write `!=`"));
        }
        self.blanks();
        match self.string()? {
            Some(text) => Ok(Condition::Equals(path, text, differs)),
            None => Err(self.expected("a text in quotes")),
        }
    }

    /// A text in quotes, with `\"`, `\'`, `\\`, `\n` and `\t`; none where no quote stands.
    fn string(&mut self) -> Result<Option<String>, ParseError> {
        let Some(quote) = self.rest().chars().next().filter(|c| matches!(c, '"' | '\'')) else {
            return Ok(None);
        };
        let start = self.at;
        let mut text = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                _ if c == quote => {
                    self.at = start + at + 1;
                    return Ok(Some(text));
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, c @ ('"' | '\'' | '\\'))) => text.push(c),
                    other => {
                        let end = start + at + 1 + other.map_or(0, |(_, c)| c.len_utf8());
                        let help = "known are `\\\"`, `\\'`, `\\\\`, `\\n` and `\\t`";
                        return Err(error(start + at..end, "unknown escape in a text").help(help));
                    }
                },
                c => text.push(c),
            }
        }
        Err(error(start..self.source.len(), format!("a text that begins with `{quote}` does not end")))
    }

    fn path(&mut self) -> Result<Path, ParseError> {
        let start = self.at;
        let word = self.word();
        if word.is_empty() || word.starts_with(|c: char| c.is_ascii_digit()) {
            self.at = start;
            return Err(self
                .expected("a path such as `payload.x`, or a text in quotes")
                .help("for the text `{{` write `{{ \"{{\" }}`"));
        }
        let Some(name) = NAMES.into_iter().find(|name| *name == word) else {
            // `prompt` is the first of them.
            let known = if self.is_prompt { &NAMES[1..] } else { &NAMES };
            return Err(unknown("name", word, start, known));
        };
        if self.is_prompt && name == "prompt" {
            return Err(error(start..self.at, "a prompt cannot refer to `prompt`"));
        }
        let mut steps = Vec::new();
        loop {
            let rest = self.rest();
            if rest.starts_with('.') {
                let fits = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-') || !b.is_ascii();
                let length = rest.bytes().skip(1).take_while(fits).count();
                self.at += 1;
                if length == 0 {
                    return Err(self.expected("a key after `.`").help("any key can be written `[\"key\"]`"));
                }
                steps.push(rest[1..=length].to_owned());
                self.at += length;
            } else if rest.starts_with('[') {
                self.at += 1;
                self.blanks();
                steps.push(match self.string()? {
                    Some(key) => key,
                    None => self.number()?.to_string(),
                });
                if !self.take("]") {
                    return Err(self.expected("`]`"));
                }
            } else {
                return Ok(Path { text: self.source[start..self.at].to_owned(), name, steps });
            }
        }
    }

    fn number(&mut self) -> Result<u32, ParseError> {
        let rest = self.rest();
        let digits = &rest[..rest.bytes().take_while(u8::is_ascii_digit).count()];
        let Ok(number) = digits.parse() else {
            return Err(self.expected("a whole number up to 4294967295, or a text in quotes"));
        };
        self.at += digits.len();
        Ok(number)
    }

    fn filter(&mut self) -> Result<Filter, ParseError> {
        self.blanks();
        let start = self.at;
        let word = self.word();
        if word.is_empty() {
            return Err(self.expected("a filter"));
        }
        if !filter::NAMES.contains(&word) {
            return Err(unknown("filter", word, start, &filter::NAMES));
        }
        let mut arguments = Vec::new();
        if self.take("(") && !self.take(")") {
            loop {
                self.blanks();
                arguments.push(match self.string()? {
                    Some(text) => Argument::Text(text),
                    None => Argument::Number(self.number()?),
                });
                if self.take(")") {
                    break;
                }
                if !self.take(",") {
                    return Err(self.expected("`,` or `)`"));
                }
            }
        }
        Filter::new(word, &arguments).map_err(|message| error(start..self.at, message))
    }
}

fn unknown(what: &str, word: &str, start: usize, known: &[&str]) -> ParseError {
    let help = match nearest(word, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known {what}s are {}", known.join(", ")),
    };
    let shown: String = word.chars().take(40).collect();
    error(start..start + word.len(), format!("unknown {what}")).found(format!(" `{shown}`")).help(help)
}
