//! What an attempt does: how its process is started and judged. Plain data, kept in the agent's definition; secrets are
//! references (`${NAME}`) that are resolved on the node when an attempt starts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::template::{self, ParseError, Refused, Template};

/// What an agent's attempts do. Durations are milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Work {
    /// What is started.
    pub action: Action,
    /// What is started instead, for schedules that name one of these commands.
    pub commands: BTreeMap<String, Action>,
    /// The prompt, where the schedule has none. A template.
    pub prompt: Option<String>,
    /// The payload, under the schedule's.
    pub payload: Map<String, Value>,
    /// What the child reads.
    pub stdin: Stdin,
    /// Where it starts; relative to the file that defines it, which makes it absolute.
    pub cwd: Option<String>,
    /// Its environment beside what every child gets. Values are templates, whose text may hold `${NAME}` and
    /// `${NAME:-default}`.
    pub env: BTreeMap<String, String>,
    /// Names that are passed on from the node's environment.
    pub env_pass: Vec<String>,
    /// How long an attempt may take; none is no limit.
    pub timeout_ms: Option<u64>,
    /// How long it has between being asked and being made to end.
    pub grace_ms: u64,
    /// How much of its output is kept: half from the start, half from the end.
    pub output_bytes: u64,
    /// Exit codes that mean success.
    pub ok_codes: Vec<i32>,
    /// Exit codes after which another attempt is of no use.
    pub no_retry_codes: Vec<i32>,
}

/// Last parts of names that say "secret". `TOKENS` is not among them: those are counted.
const SECRET_WORDS: [&str; 11] = [
    "TOKEN",
    "SECRET",
    "SECRETS",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
    "KEY",
    "KEYS",
    "AUTHORIZATION",
];

/// Whether an environment variable holds a secret, by its name: one of its parts between `_` ends in such a word, as in
/// `API_TOKEN`, `APIKEY_2` and `DB_PASSWORD_OLD`, or is `PASS`; or it ends in `AUTH`.
pub fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let mut parts =
        name.split(['_', '-', '.']).map(|part| part.trim_end_matches(|c: char| c.is_ascii_digit()));
    let is_secret = |part: &str| part == "PASS" || SECRET_WORDS.iter().any(|word| part.ends_with(word));
    name.ends_with("AUTH") || parts.any(is_secret)
}

impl Default for Work {
    fn default() -> Work {
        Work {
            action: Action::Handler,
            commands: BTreeMap::new(),
            prompt: None,
            payload: Map::new(),
            stdin: Stdin::None,
            cwd: None,
            env: BTreeMap::new(),
            env_pass: Vec::new(),
            timeout_ms: Some(3_600_000),
            grace_ms: 5_000,
            output_bytes: 1 << 20,
            ok_codes: vec![0],
            no_retry_codes: vec![78],
        }
    }
}

/// Names of variables that are Belfry's own begin so.
pub const OWN_VARIABLES: &str = "BELFRY_";
/// The two of them that `env` may set: which server a job's `belfry` asks, and with which token.
pub const OWN_VARIABLES_TO_SET: [&str; 2] = ["BELFRY_SERVER", "BELFRY_TOKEN"];

/// Whether `env` must not set a variable, because Belfry sets it or keeps it from children.
pub fn is_own_variable(name: &str) -> bool {
    name.starts_with(OWN_VARIABLES) && !OWN_VARIABLES_TO_SET.contains(&name)
}

impl Work {
    /// What a schedule with this command starts.
    pub fn action_of(&self, command: &str) -> &Action {
        self.commands.get(command).unwrap_or(&self.action)
    }

    /// Parses every template, and refuses the first that is wrong.
    pub fn check_templates(&self) -> Result<(), Refused> {
        let named = |place: String| move |error: ParseError| Refused { place: place.into(), error };
        if let Some(prompt) = &self.prompt {
            Template::parse_prompt(prompt).map_err(named("prompt".into()))?;
        }
        let commands = self.commands.iter().map(|(name, action)| (format!("commands.{name}."), action));
        for (place, action) in commands.chain([(String::new(), &self.action)]) {
            match action {
                Action::Run(argv) => {
                    for (i, argument) in argv.iter().enumerate() {
                        Template::parse(argument).map_err(named(format!("{place}run[{i}]")))?;
                    }
                }
                Action::Shell(line) => {
                    template::check_line(line).map_err(named(format!("{place}shell")))?;
                }
                Action::Handler => {}
            }
        }
        for (name, value) in &self.env {
            let parsed = Template::parse(value).map_err(ParseError::without_source);
            parsed.map_err(named(format!("env.{name}")))?;
        }
        Ok(())
    }
}

/// What an attempt starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A program with its arguments, without a shell. Each is a template.
    Run(Vec<String>),
    /// A line for `sh -c`, which gets it as written.
    Shell(String),
    /// A Rust function that the embedding program has registered under the agent's name.
    Handler,
}

/// `stdin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stdin {
    /// Nothing.
    None,
    /// The prompt.
    Prompt,
    /// The payload, as JSON.
    Payload,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_known_by_their_names() {
        for name in [
            "TOKEN",
            "GITHUB_TOKEN",
            "api_key",
            "APIKEY",
            "AWS_SECRET_ACCESS_KEY",
            "DB_PASSWORD_OLD",
            "KEY2",
            "NPM_AUTH",
            "DB_PASS",
        ] {
            assert!(is_secret_name(name), "{name}");
        }
        for name in
            ["MODE", "MAX_TOKENS", "KEYBOARD", "AUTHOR", "SSH_AUTH_SOCK", "PATH", "TOKENIZER", "BYPASS", ""]
        {
            assert!(!is_secret_name(name), "{name}");
        }
    }
}
