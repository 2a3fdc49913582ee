//! References to the environment in files, as `belfry_core::reference` reads them: checked, found and filled in.

use std::ops::Range;

pub(crate) use belfry_core::reference::is_name;
use belfry_core::reference::{self as core, Piece};

pub(crate) const RULE: &str = "references are `${NAME}` and `${NAME:-default}`; for a literal `$` write `$$`";

/// What is wrong with a reference, and where in the text.
#[derive(Debug)]
pub(crate) struct Flaw {
    pub range: Range<usize>,
    pub message: String,
}

/// Whether all references are well formed.
pub(crate) fn check(text: &str) -> Result<(), Flaw> {
    pieces(text).map(|_| ())
}

/// Whether the text is more than references and literals: whether it holds a reference at all.
pub(crate) fn has_reference(text: &str) -> bool {
    pieces(text).is_ok_and(|pieces| pieces.iter().any(|piece| matches!(piece, Piece::Reference { .. })))
}

/// The first reference to a name of this kind, and where it is.
pub(crate) fn find(text: &str, is_wanted: impl Fn(&str) -> bool) -> Option<(&str, Range<usize>)> {
    pieces(text).ok()?.into_iter().find_map(|piece| match piece {
        Piece::Reference { name, range, .. } if is_wanted(name) => Some((name, range)),
        Piece::Reference { .. } | Piece::Text(_) => None,
    })
}

/// Fills in every reference. An empty variable counts as unset where there is a default.
pub(crate) fn resolve(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, Flaw> {
    let mut out = String::new();
    for piece in pieces(text)? {
        match piece {
            Piece::Text(text) => out.push_str(text),
            Piece::Reference { name, default, range } => match (env(name), default) {
                (Some(value), None) => out.push_str(&value),
                (Some(value), Some(_)) if !value.is_empty() => out.push_str(&value),
                (_, Some(default)) => out.push_str(default),
                (None, None) => {
                    let message = format!("the environment variable `{name}` is not set");
                    return Err(Flaw { range, message });
                }
            },
        }
    }
    Ok(out)
}

/// Fills in every reference of a text, as of a webhook's secret: in the moment it is needed, and never before. The error names
/// the variable, and nothing else.
pub fn resolve_secret(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    resolve(text, env).map_err(|flaw| flaw.message)
}

/// Whether a text is a reference rather than a secret written out.
pub fn is_reference(text: &str) -> bool {
    has_reference(text)
}

fn pieces(text: &str) -> Result<Vec<Piece<'_>>, Flaw> {
    core::pieces(text).map_err(|flaw| match flaw {
        core::Flaw::Unclosed(range) => Flaw { range, message: "a reference is not closed".into() },
        core::Flaw::NoName(range) => {
            let message = format!("{} is not a reference", crate::problem::Quoted(&text[range.clone()]));
            Flaw { range, message }
        }
    })
}

/// Where a text that takes no references looks as if it had one: a `${` that is not written `$${`.
pub(crate) fn find_literal(text: &str) -> Option<Range<usize>> {
    let at = text.match_indices("${").map(|(at, _)| at).find(|at| !text[..*at].ends_with('$'))?;
    let end = text[at..].find('}').map_or(text.len(), |i| at + i + 1);
    Some(at..end)
}

/// Turns `$${` into `${`, in a text that takes no references.
pub(crate) fn unescape_literal(text: &str) -> String {
    text.replace("$${", "${")
}

/// The reverse.
pub(crate) fn escape_literal(text: &str) -> String {
    text.replace("${", "$${")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_filled_in() {
        let env = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        for (text, expected) in [
            ("", ""),
            ("x${A}y", "x1y"),
            ("${B:-b}${A:-b}${EMPTY:-e}[${EMPTY}]", "b1e[]"),
            ("$$ $${A} $A $", "$ ${A} $A $"),
            ("${B:-}", ""),
        ] {
            assert_eq!(resolve(text, &env).unwrap(), expected, "{text}");
        }
        for (text, message) in [
            ("a${", "a reference is not closed"),
            ("${}", "`${}` is not a reference"),
            ("${1A}", "`${1A}` is not a reference"),
            ("${B}", "the environment variable `B` is not set"),
        ] {
            assert_eq!(resolve(text, &env).unwrap_err().message, message, "{text}");
        }
    }

    #[test]
    fn a_literal_reference_can_be_written() {
        for text in ["${A}", "$${A}", "$$${A}", "a $ b", "$$", "${", "$"] {
            let escaped = escape_literal(text);
            assert_eq!(find_literal(&escaped), None, "{text}");
            assert_eq!(unescape_literal(&escaped), text);
        }
        assert_eq!(find_literal("a ${B} c"), Some(2..6));
    }
}
