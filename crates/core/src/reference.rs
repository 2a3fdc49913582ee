//! References to environment variables in a text: `${NAME}` and `${NAME:-default}`. `$$` is a dollar, also in a
//! default; a dollar before anything else is itself. A default is plain text.

use std::borrow::Cow;
use std::ops::Range;

/// A piece of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Text as it is.
    Text(&'a str),
    /// A variable.
    Reference {
        /// Its name.
        name: &'a str,
        /// What stands in if the variable is not set or empty.
        default: Option<Cow<'a, str>>,
        /// Where the reference is in the text.
        range: Range<usize>,
    },
}

impl Piece<'_> {
    /// What of the piece is written in the text and does not come from the environment; none if that is empty.
    pub fn written(&self) -> Option<&str> {
        match self {
            Piece::Text(text) => Some(*text),
            Piece::Reference { default, .. } => default.as_deref(),
        }
        .filter(|text| !text.is_empty())
    }
}

/// What is wrong with a reference, and where it is in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    /// A `${` without a `}`.
    Unclosed(Range<usize>),
    /// There is no name between the braces.
    NoName(Range<usize>),
    /// A default holds another `${`.
    Nested(Range<usize>),
}

/// The pieces of a text, in order. Some may be empty.
pub fn pieces(text: &str) -> Result<Vec<Piece<'_>>, Flaw> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some(dollar) = text[at..].find('$').map(|i| at + i) {
        pieces.push(Piece::Text(&text[at..dollar]));
        let rest = &text[dollar + 1..];
        if rest.starts_with('$') {
            pieces.push(Piece::Text("$"));
            at = dollar + 2;
        } else if let Some(inner) = rest.strip_prefix('{') {
            let length = inner.find('}').ok_or(Flaw::Unclosed(dollar..text.len()))?;
            let range = dollar..dollar + length + 3;
            let (name, default) = match inner[..length].split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (&inner[..length], None),
            };
            if !is_name(name) {
                return Err(Flaw::NoName(range));
            }
            if default.is_some_and(|default| default.replace("$$", "").contains("${")) {
                return Err(Flaw::Nested(range));
            }
            let default = default.map(|default| match default.contains("$$") {
                true => Cow::Owned(default.replace("$$", "$")),
                false => Cow::Borrowed(default),
            });
            at = range.end;
            pieces.push(Piece::Reference { name, default, range });
        } else {
            pieces.push(Piece::Text("$"));
            at = dollar + 1;
        }
    }
    pieces.push(Piece::Text(&text[at..]));
    Ok(pieces)
}

/// Whether a reference can have this name: `[A-Za-z_][A-Za-z0-9_]*`.
pub fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_dollars_are_one() {
        let plain = |text: &str| -> String {
            let one = |piece: &Piece<'_>| match piece {
                Piece::Text(text) => (*text).to_owned(),
                Piece::Reference { name, default, .. } => {
                    format!("<{name}{}>", default.as_deref().unwrap_or_default())
                }
            };
            pieces(text).unwrap().iter().map(one).collect()
        };
        for (text, expected) in [
            ("$$ $$$$ $A $", "$ $$ $A $"),
            ("$${A} $$${A} $$$${A}", "${A} $<A> $${A}"),
            ("x${A}y${B:-a:-b}${C:-}", "x<A>y<Ba:-b><C>"),
            ("${A:-a$$b$$$$c$}${B:-$${C}", "<Aa$b$$c$><B${C>"),
        ] {
            assert_eq!(plain(text), expected, "{text}");
        }
        assert_eq!(pieces("a${"), Err(Flaw::Unclosed(1..3)));
        assert_eq!(pieces("a${1}"), Err(Flaw::NoName(1..5)));
        assert_eq!(pieces("a${A:-${B}}"), Err(Flaw::Nested(1..10)));
        assert_eq!(pieces("a${A:-$$${B}}"), Err(Flaw::Nested(1..12)));
    }
}
