//! Text as every store can keep it: without the NUL character, and not longer than somebody reads.

use std::borrow::Cow;

use serde_json::Value;

/// Maximum length of an attempt's error, in characters.
pub const ERROR_CHARS: usize = 4_000;
/// Maximum length of an attempt's summary, in characters.
pub const SUMMARY_CHARS: usize = 4_000;

/// A number of things: `1 schedule`, `2 schedules`.
pub fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// How the part of an error begins that is only for those who may change what runs.
const ON_NODE: &str = " (on this node: ";

/// Names something of a node's host at the end of an error: a directory, a variable.
pub fn on_node(name: &str) -> String {
    format!("{ON_NODE}{name})")
}

/// Whether a text has a part that [`without_node`] leaves out.
pub fn names_node(text: &str) -> bool {
    text.contains(ON_NODE)
}

/// The text without what [`on_node`] added. A name may hold any sign, so everything up to the last `)` goes.
pub fn without_node(text: &str) -> String {
    let Some((before, rest)) = text.split_once(ON_NODE) else { return text.to_owned() };
    let after = rest.rsplit_once(')').map_or("", |(_, after)| after);
    format!("{before}{after}")
}

/// The text with each NUL replaced by U+FFFD. PostgreSQL refuses NUL in text.
pub fn clean(text: &str) -> Cow<'_, str> {
    match text.contains('\0') {
        true => Cow::Owned(text.replace('\0', "\u{FFFD}")),
        false => Cow::Borrowed(text),
    }
}

/// The text without NUL and with at most `chars` characters; `…` stands for what was cut off.
pub fn bounded(text: &str, chars: usize) -> Cow<'_, str> {
    // As many bytes are never more characters.
    if text.len() <= chars || text.chars().nth(chars).is_none() {
        return clean(text);
    }
    let mut kept: String = text.chars().take(chars.saturating_sub(1)).collect();
    kept.push('…');
    Cow::Owned(clean(&kept).into_owned())
}

/// Whether no text of a value, nor any key in it, holds NUL.
pub fn is_clean(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.contains('\0'),
        Value::Array(items) => items.iter().all(is_clean),
        Value::Object(map) => map.iter().all(|(key, value)| !key.contains('\0') && is_clean(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
    }
}

/// Cleans every text of a value, and every key in it.
pub fn clean_value(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(clean) = clean(text) {
                *text = clean;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(clean_value),
        Value::Object(map) => {
            *map = std::mem::take(map)
                .into_iter()
                .map(|(key, mut value)| {
                    clean_value(&mut value);
                    (clean(&key).into_owned(), value)
                })
                .collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_names_the_host_can_be_left_out() {
        for name in ["/srv/a", "/srv/a (b)/c", "NAME", "", "/a (on this node: /b)"] {
            let whole = format!("its directory does not exist{}", on_node(name));
            assert!(names_node(&whole) && whole.contains(name), "{whole}");
            assert_eq!(without_node(&whole), "its directory does not exist");
            assert_eq!(
                without_node(&format!("failed: {whole}. Next at 5.")),
                "failed: its directory does not exist. Next at 5."
            );
            let cut: String = whole.chars().take(whole.len() - 1).collect();
            assert!(without_node(&cut).starts_with("its directory does not exist"), "{cut}");
            assert!(name.is_empty() || !without_node(&cut).contains("srv"), "{cut}");
        }
        assert!(!names_node("plain (text)"));
        assert_eq!(without_node("plain (text)"), "plain (text)");
    }

    #[test]
    fn a_text_that_can_be_kept_stays_as_it_is() {
        for text in ["", "plain", "\u{FFFF}\u{1}\n\t", "…"] {
            assert!(matches!(clean(text), Cow::Borrowed(same) if same == text));
            assert_eq!(bounded(text, 20), text);
        }
    }

    #[test]
    fn a_nul_is_replaced_wherever_it_stands() {
        assert_eq!(clean("a\0b\0"), "a\u{FFFD}b\u{FFFD}");
        let mut value = json!({"k\0": ["\0", {"deep": "x\0"}], "n": 1});
        assert!(!is_clean(&value));
        clean_value(&mut value);
        assert_eq!(value, json!({"k\u{FFFD}": ["\u{FFFD}", {"deep": "x\u{FFFD}"}], "n": 1}));
        assert!(is_clean(&value));
    }

    #[test]
    fn a_long_text_is_cut_to_the_bound_and_stays_so() {
        for text in ["ä".repeat(50), "a\0".repeat(25), "x".repeat(1 << 20)] {
            let short = bounded(&text, 10).into_owned();
            assert_eq!(short.chars().count(), 10, "{short:?}");
            assert!(short.ends_with('…') && !short.contains('\0'), "{short:?}");
            assert_eq!(bounded(&short, 10), short);
        }
    }
}
