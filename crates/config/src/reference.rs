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

/// The first reference to a name of this kind, and where it is.
pub(crate) fn find(text: &str, is_wanted: impl Fn(&str) -> bool) -> Option<(&str, Range<usize>)> {
    pieces(text).ok()?.into_iter().find_map(|piece| match piece {
        Piece::Reference { name, range, .. } if is_wanted(name) => Some((name, range)),
        Piece::Reference { .. } | Piece::Text(_) => None,
    })
}

/// Fills in every reference. An empty variable counts as unset where there is a default.
pub(crate) fn resolve(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, Flaw> {
    fill(text, env, "is not set")
}

fn fill(text: &str, env: &dyn Fn(&str) -> Option<String>, missing: &str) -> Result<String, Flaw> {
    let mut out = String::new();
    for piece in pieces(text)? {
        match piece {
            Piece::Text(text) => out.push_str(text),
            Piece::Reference { name, default, range } => match (env(name), default) {
                (Some(value), None) => out.push_str(&value),
                (Some(value), Some(_)) if !value.is_empty() => out.push_str(&value),
                (_, Some(default)) => out.push_str(&default),
                (None, None) => {
                    let message = format!("the environment variable `{name}` {missing}");
                    return Err(Flaw { range, message });
                }
            },
        }
    }
    Ok(out)
}

/// Fills in every reference of a webhook's secret, when a request comes. A variable that is blank counts as not set.
/// The error names the variable, and holds nothing of the secret.
pub fn resolve_secret(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let env = |name: &str| env(name).filter(|value| !value.trim().is_empty());
    fill(text, &env, "is not set, or blank").map_err(|flaw| flaw.message)
}

/// Whether a part of a webhook's secret is written in the file: a default, or text outside of references.
pub fn is_written_out(secret: &str) -> bool {
    pieces(secret).map_or(true, |pieces| pieces.iter().any(|piece| piece.written().is_some()))
}

/// Whether a value of `env` holds a secret as it is written: in a default, or without any reference. Text beside a
/// reference is no secret: `Bearer ${TOKEN}`.
pub fn env_is_written_out(value: &str) -> bool {
    let Ok(pieces) = pieces(value) else { return !value.is_empty() };
    let mut references = pieces.iter().filter(|piece| matches!(piece, Piece::Reference { .. })).peekable();
    match references.peek() {
        Some(_) => references.any(|reference| reference.written().is_some()),
        None => !value.is_empty(),
    }
}

/// A webhook's secret as it is shown: `***` for every part that is written out.
pub(crate) fn hide_written(secret: &str) -> String {
    const HIDDEN: &str = "***";
    let Ok(pieces) = pieces(secret) else { return HIDDEN.to_owned() };
    let mut out = String::new();
    for piece in pieces {
        match (&piece, piece.written()) {
            // A dollar is a piece of its own.
            (Piece::Text(_), Some(_)) if !out.ends_with(HIDDEN) => out.push_str(HIDDEN),
            (Piece::Text(_), _) => {}
            (Piece::Reference { name, .. }, Some(_)) => out.push_str(&format!("${{{name}:-{HIDDEN}}}")),
            (Piece::Reference { range, .. }, None) => out.push_str(&secret[range.clone()]),
        }
    }
    out
}

fn pieces(text: &str) -> Result<Vec<Piece<'_>>, Flaw> {
    core::pieces(text).map_err(|flaw| match flaw {
        core::Flaw::Unclosed(range) => Flaw { range, message: "a reference is not closed".into() },
        // Not quoted: it may be a part of a secret.
        core::Flaw::NoName(range) => Flaw { range, message: "a reference names no variable".into() },
        core::Flaw::Nested(range) => {
            Flaw { range, message: "a default cannot hold a reference: it is plain text".into() }
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
            ("${B:-a$$b$c}${B:-$${A}", "a$b$c${A"),
        ] {
            assert_eq!(resolve(text, &env).unwrap(), expected, "{text}");
        }
        for (text, message) in [
            ("a${", "a reference is not closed"),
            ("${}", "a reference names no variable"),
            ("${1A}", "a reference names no variable"),
            ("${B:-${A}}", "a default cannot hold a reference: it is plain text"),
            ("${B}", "the environment variable `B` is not set"),
        ] {
            assert_eq!(resolve(text, &env).unwrap_err().message, message, "{text}");
        }
    }

    #[test]
    fn a_blank_variable_is_no_secret() {
        let env = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "BLANK" => Some(" \t\n".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        assert_eq!(resolve_secret("${A}${BLANK:-d}", &env), Ok("1d".to_owned()));
        for name in ["BLANK", "EMPTY", "UNSET"] {
            let error = resolve_secret(&format!("x${{{name}}}"), &env).unwrap_err();
            assert_eq!(error, format!("the environment variable `{name}` is not set, or blank"));
        }
    }

    #[test]
    fn what_is_written_out_of_a_secret_is_not_shown() {
        for (secret, shown) in [
            ("${A}", "${A}"),
            ("${A}${B:-}", "${A}${B:-}"),
            ("hunter2", "***"),
            ("***", "***"),
            ("${A:-hunter2}", "${A:-***}"),
            ("x${A}", "***${A}"),
            ("a$b$$c${A}d", "***${A}***"),
            ("${A", "***"),
        ] {
            assert_eq!(hide_written(secret), shown, "{secret}");
            assert_eq!(is_written_out(secret), shown.contains('*'), "{secret}");
        }
    }

    #[test]
    fn text_beside_a_reference_in_env_is_no_secret() {
        for value in ["", "${A}", "${A:-}", "Bearer ${A}"] {
            assert!(!env_is_written_out(value), "{value}");
        }
        for value in ["hunter2", "${A:-hunter2}", "Bearer ${A}${B:-hunter2}", "${A", "$${A}"] {
            assert!(env_is_written_out(value), "{value}");
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
