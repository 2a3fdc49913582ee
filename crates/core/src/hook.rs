//! How a webhook knows its sender. Whether a request makes a run, `check::Asking` decides as for a tick.

use serde_json::Value;

/// How a webhook knows that a request comes from its sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof<'a> {
    /// `secret: none`: the request brings a token with scope trigger.
    Token,
    /// The request is signed with one of these: at least one, and none is empty. Each may hold references (`${NAME}`).
    Secrets(Vec<&'a str>),
}

/// What is wrong with the secrets of a webhook. It never holds the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecretFlaw {
    /// The key of the webhook's settings that is wrong; none where a key is missing.
    pub key: Option<&'static str>,
    /// What is wrong, as a sentence that follows the name of the schedule.
    pub message: &'static str,
}

/// The proof that the settings of a webhook ask for. Settings that do not say it clearly ask for nothing: an error, by
/// which a file is refused when it is read, and a request when it comes.
pub fn proof(settings: &Value) -> Result<Proof<'_>, SecretFlaw> {
    let mut secrets = Vec::new();
    for key in ["secret", "secrets"] {
        let flaw = |message| SecretFlaw { key: Some(key), message };
        let given = match settings.get(key) {
            None => continue,
            Some(Value::Array(several)) if several.is_empty() && key == "secret" => {
                return Err(flaw("the list of secrets is empty"));
            }
            Some(Value::Array(several)) => several.iter().collect(),
            Some(one) => vec![one],
        };
        for secret in given {
            match secret {
                Value::String(text) if text.trim().is_empty() => return Err(flaw("a secret is empty")),
                Value::String(text) if text != NO_SECRET && text.trim().eq_ignore_ascii_case(NO_SECRET) => {
                    return Err(flaw("`none` is written in small letters and without blanks"));
                }
                Value::String(text) if is_empty_by_default(text.trim()) => {
                    return Err(flaw(
                        "the default of a secret is empty; without `:-` a missing variable is told",
                    ));
                }
                Value::String(text) if text.trim() == "whsec_" => {
                    return Err(flaw("nothing follows `whsec_` in a secret"));
                }
                Value::String(text) => secrets.push((key, text.as_str())),
                Value::Null => return Err(flaw("a secret is missing")),
                _ => return Err(flaw("a secret is not text")),
            }
        }
    }
    match secrets.as_slice() {
        [] => {
            Err(SecretFlaw { key: None, message: "a webhook needs a secret, or must say that it has none" })
        }
        [("secret", NO_SECRET)] if settings["secret"].is_string() => Ok(Proof::Token),
        _ => match secrets.iter().find(|(_, text)| *text == NO_SECRET) {
            Some((key, _)) => Err(SecretFlaw {
                key: Some(key),
                message: "`none` cannot stand beside a secret or in a list of them",
            }),
            None => Ok(Proof::Secrets(secrets.into_iter().map(|(_, text)| text).collect())),
        },
    }
}

/// Whether a secret is one reference, `${NAME:-}`, which is empty where the variable is.
fn is_empty_by_default(text: &str) -> bool {
    let inside = text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
    let default = inside.and_then(|inside| inside.split_once(":-")).map(|(_, default)| default.trim());
    default.is_some_and(|default| default.is_empty() || default == "whsec_")
}

/// The word for a webhook without a secret.
const NO_SECRET: &str = "none";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_secret_is_text_or_the_word_none() {
        for (settings, secrets) in [
            (json!({"secret": "${A}"}), vec!["${A}"]),
            (json!({"secret": ["${A}", "b"]}), vec!["${A}", "b"]),
            (json!({"secret": ["${A:-b}", "${A:-}b"]}), vec!["${A:-b}", "${A:-}b"]),
            (json!({"secrets": ["${A}"], "github": true}), vec!["${A}"]),
            (json!({"secret": "a", "secrets": ["b", "c"]}), vec!["a", "b", "c"]),
            (json!({"secret": "a", "secrets": []}), vec!["a"]),
        ] {
            assert_eq!(proof(&settings), Ok(Proof::Secrets(secrets)), "{settings}");
        }
        assert_eq!(proof(&json!({"secret": "none"})), Ok(Proof::Token));
    }

    #[test]
    fn anything_else_is_never_taken_for_no_secret() {
        for settings in [
            json!({}),
            json!(null),
            json!("none"),
            json!({"github": true}),
            json!({"secret": "None"}),
            json!({"secret": "none "}),
            json!({"secret": ["NONE"]}),
            json!({"secret": null}),
            json!({"secret": 12345}),
            json!({"secret": 0}),
            json!({"secret": true}),
            json!({"secret": false}),
            json!({"secret": ""}),
            json!({"secret": "  "}),
            json!({"secret": "${A:-}"}),
            json!({"secret": " ${A:- } "}),
            json!({"secret": "${A:-whsec_}"}),
            json!({"secrets": ["a", "${A:-}"]}),
            json!({"secret": "whsec_"}),
            json!({"secret": []}),
            json!({"secret": [1, 2]}),
            json!({"secret": ["a", 1]}),
            json!({"secret": ["a", null]}),
            json!({"secret": [["a"]]}),
            json!({"secret": {"a": 1}}),
            json!({"secret": ["none"]}),
            json!({"secret": ["none", "a"]}),
            json!({"secret": "none", "secrets": ["a"]}),
            json!({"secret": "none", "secrets": ["none"]}),
            json!({"secrets": []}),
            json!({"secrets": "none"}),
            json!({"secrets": [true]}),
            json!({"secret": "a", "secrets": 5}),
        ] {
            assert!(proof(&settings).is_err(), "{settings}");
        }
    }
}
