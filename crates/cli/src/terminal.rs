//! Standard output and standard error for everything that this program prints, but for the output of runs (`logs.rs`).
//!
//! Text from outside may hold sequences that a terminal obeys: they fill a clipboard, hide or turn text around, or move
//! the cursor. So all text passes through a filter here, whoever has put it together, on terminals and in pipes alike.
//! What is left are colours, which only our own code writes: text from outside loses its escape characters where it is
//! put into a table or beside a colour (`words::harmless`). JSON loses nothing: such characters are written as
//! `\\uXXXX`. Nothing else opens the two streams (`clippy.toml`).

#![allow(clippy::disallowed_methods, reason = "this is the place that the others are sent to")]

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use belfry_core::display::is_unsafe;
use serde::Serialize;

use crate::tame::Tame;

/// Text on its way out, filtered.
pub struct Filtered<W> {
    to: W,
    tame: Tame,
}

/// Standard output, for text. Colours go where they are wanted.
pub fn stdout() -> Filtered<anstream::AutoStream<io::StdoutLock<'static>>> {
    Filtered { to: anstream::stdout().lock(), tame: Tame::new(true) }
}

/// Whether standard output is a terminal.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Standard error, for text.
pub fn stderr() -> Filtered<anstream::AutoStream<io::StderrLock<'static>>> {
    Filtered { to: anstream::stderr().lock(), tame: Tame::new(true) }
}

impl<W: Write> Write for Filtered<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write_all(self.tame.pass(bytes).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// How JSON is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// On one line.
    Line,
    /// Indented, for people.
    Pretty,
}

/// Writes values as JSON to standard output, each followed by a line end.
pub fn json<T: Serialize>(layout: Layout, values: impl IntoIterator<Item = T>) -> io::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    for value in values {
        let text = match layout {
            Layout::Line => serde_json::to_string(&value)?,
            Layout::Pretty => serde_json::to_string_pretty(&value)?,
        };
        out.write_all(escaped(&text).as_bytes())?;
        writeln!(out)?;
    }
    out.flush()
}

/// JSON that says the same without characters that a terminal obeys or does not show. They stand in strings only.
fn escaped(json: &str) -> String {
    if !json.chars().any(|c| is_unsafe(c) && c != '\n') {
        return json.to_owned();
    }
    let mut text = String::with_capacity(json.len() + 64);
    for c in json.chars() {
        if !is_unsafe(c) || c == '\n' {
            text.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a text does not fail.
            let _ = write!(text, "\\u{unit:04x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_keeps_colours_and_nothing_else_that_a_terminal_obeys() {
        let mut out = Filtered { to: Vec::new(), tame: Tame::new(true) };
        write!(out, "\x1b[1mhead\x1b[0m \x1b]52;c;aGk=\x07a\r\u{9b}2Jb\u{202e}c\x1b[8mhidden\n").unwrap();
        write!(out, "\x1b]0;never ended\nnext").unwrap();
        assert_eq!(String::from_utf8(out.to).unwrap(), "\x1b[1mhead\x1b[0m abchidden\n\nnext");
    }

    #[test]
    fn json_says_the_same_in_plain_characters() {
        let value =
            serde_json::json!({"a\u{202e}": "\x1b]52;\x07 \u{9b}2J \u{2028} \u{e0041} \u{200b}ä😀\n\u{7f}"});
        for text in [serde_json::to_string(&value), serde_json::to_string_pretty(&value)] {
            let escaped = escaped(&text.unwrap());
            assert!(!escaped.chars().any(|c| is_unsafe(c) && c != '\n'), "{escaped}");
            assert!(
                escaped.contains("ä😀") && escaped.contains("\\u202e") && escaped.contains("\\udb40\\udc41"),
                "{escaped}"
            );
            assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
        }
    }
}
