//! What of a line of a file nobody is shown, not even in an error: the passwords of URLs, and the values of keys that
//! hold secrets. Rather too much than too little: the line may be broken.

use std::ops::Range;

use belfry_core::suggest::nearest;
use belfry_core::work::is_secret_name;

use crate::password::secrets;
use crate::reference::is_written_out;

/// Keys that hold secrets wherever they stand, also if they are misspelt.
const SECRET_KEYS: [&str; 3] = ["secret", "secrets", "auth"];

/// What the keys of a line say about the lines below it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys {
    secret: bool,
    env: bool,
    /// A name as variables with secrets have it.
    secret_name: bool,
}

impl Keys {
    pub fn of(line: &str) -> Keys {
        let mut found = Keys { secret: false, env: false, secret_name: false };
        for key in keys(line) {
            let name = &line[key];
            found.secret = found.secret || is_secret_key(name);
            found.env |= is_env(name);
            found.secret_name = found.secret_name || is_secret_name(name);
        }
        found
    }
}

impl Keys {
    pub fn may_hold_secrets(self) -> bool {
        self.secret || self.secret_name
    }
}

/// What the lines that a line is a part of say about it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Above {
    is_secret: bool,
    in_env: bool,
    has_secret_name: bool,
}

impl Above {
    /// What stands further up was not looked at: it may be the key of a secret.
    pub const UNKNOWN: Above = Above { is_secret: true, in_env: false, has_secret_name: false };

    /// Adds the next line, further up.
    pub fn add(&mut self, keys: Keys) {
        self.is_secret |= keys.secret;
        // The names of agents and schedules stand above `env`, and say nothing of what is in it.
        if !self.in_env {
            self.has_secret_name |= keys.secret_name;
            self.in_env = keys.env;
        }
    }

    fn hides_all(self) -> bool {
        self.is_secret || self.in_env && self.has_secret_name
    }
}

/// The line with stars for what is hidden. The length stays, and so do the spans.
pub(crate) fn masked(line: &str, above: Above) -> String {
    let mut shown = line.to_owned();
    for secret in secret_values(line, above) {
        let stars = "*".repeat(secret.len());
        shown.replace_range(secret, &stars);
    }
    mask_addresses(&mut shown);
    shown
}

fn secret_values(line: &str, above: Above) -> Vec<Range<usize>> {
    if above.hides_all() {
        let all = line.len() - line.trim_start().len()..line.len();
        return Vec::from([all]);
    }
    let (mut found, mut in_env, mut end) = (Vec::new(), above.in_env, 0);
    for key in keys(line) {
        let name = &line[key.clone()];
        if key.start >= end && (is_secret_key(name) || in_env && is_secret_name(name)) {
            let value = value_behind(line, key.end);
            end = value.end;
            if is_written_out(&line[value.clone()]) {
                found.push(value);
            }
        }
        in_env |= is_env(name);
    }
    found
}

/// Whether secrets stand under a key.
pub(crate) fn holds_secrets(key: &str) -> bool {
    is_env(key) || key == "webhook" || is_secret_key(key)
}

/// `env`, also if it is misspelt.
fn is_env(name: &str) -> bool {
    ["env", "envs", "evn", "environment"].iter().any(|known| name.eq_ignore_ascii_case(known))
}

fn is_secret_key(name: &str) -> bool {
    // No slip is longer than three letters. A line may have thousands of keys, and to compare words takes long.
    (3..=10).contains(&name.len()) && nearest(name, SECRET_KEYS.into_iter()).is_some()
}

/// Every word of a line before a `:` or a `=`, without its quotes.
fn keys(line: &str) -> impl Iterator<Item = Range<usize>> {
    line.match_indices([':', '=']).filter_map(|(at, _)| {
        let before = line[..at].trim_end().trim_end_matches(['"', '\'']);
        let name = before.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || "_-.".contains(c));
        (name.len() < before.len()).then_some(name.len()..before.len())
    })
}

/// The value of the key that ends here: what is in the quotes if they are closed and nothing but the end of a value
/// follows, a reference, or else all that is left of the line.
fn value_behind(line: &str, key: usize) -> Range<usize> {
    let separator = line[key..].find([':', '=']).map_or(key, |at| key + at + 1);
    let rest = line[separator..].trim_start();
    let start = line.len() - rest.len();
    let closed = match rest.chars().next() {
        Some(quote @ ('"' | '\'')) => rest[1..].find(quote).map(|at| (1, at + 1, at + 2)),
        Some('$') if rest.starts_with("${") => rest.find('}').map(|at| (0, at + 1, at + 1)),
        _ => None,
    };
    let ends = |at: usize| {
        let after = rest[at..].trim_start();
        !rest[..at].contains('\\') && (after.is_empty() || after.starts_with([',', '}', ']']))
    };
    match closed.filter(|(_, _, after)| ends(*after)) {
        Some((from, to, _)) => start + from..start + to,
        None => start..line.len(),
    }
}

fn mask_addresses(shown: &mut String) {
    let mut from = 0;
    while let Some(at) = shown[from..].find("://") {
        let user = from + at + 3;
        from = user;
        let rest = &shown[user..];
        let end = rest.find(|c: char| c.is_whitespace() || "\"',}".contains(c)).unwrap_or(rest.len());
        for secret in secrets(&rest[..end]) {
            let stars = "*".repeat(secret.len());
            shown.replace_range(user + secret.start..user + secret.end, &stars);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_a_url_is_not_shown() {
        for (line, shown) in [
            ("store: postgres://me:hün/t@r@host/db", "store: postgres://me:********@host/db"),
            ("store: postgres://me:pw@host/db", "store: postgres://me:**@host/db"),
            ("a: x://u:p@h, b: y://v:qq@i", "a: x://u:*@h, b: y://v:**@i"),
            ("http://host/x", "http://host/x"),
            ("store: postgres://h/d?password=pw&a=b", "store: postgres://h/d?password=**&a=b"),
        ] {
            assert_eq!(masked(line, Above::default()), shown);
        }
    }

    #[test]
    fn the_value_of_a_secret_is_not_shown() {
        for (line, shown) in [
            (r#"s: {webhook: {secret: "zz${"}, x: 1}"#, r#"s: {webhook: {secret: "****"}, x: 1}"#),
            ("secret: zz, zz", "secret: ******"),
            (r#"secret: "zz" zz"#, "secret: *******"),
            (r#"secret: "z\"z", x"#, "secret: *********"),
            (r#"{"secret":"zz","x":1}"#, r#"{"secret":"**","x":1}"#),
            ("secrets: [zz, zz]", "secrets: ********"),
            ("secert: zz", "secert: **"),
            ("webhook={secret: zz}", "webhook={secret: ***"),
            ("auth: {type: bearer, value: zz}", "auth: *************************"),
            (r#"secret: "${NAME}", x: 1"#, r#"secret: "${NAME}", x: 1"#),
            ("{secret: ${NAME}, x: 1}", "{secret: ${NAME}, x: 1}"),
            (r#"env: {MY_TOKEN: "zz", X: "${oops"}"#, r#"env: {MY_TOKEN: "**", X: "${oops"}"#),
            (r#"env: ["MY_TOKEN=zz"]"#, r#"env: ["MY_TOKEN=****"#),
            ("token-refresh: {shell: x}", "token-refresh: {shell: x}"),
        ] {
            assert_eq!(masked(line, Above::default()), shown);
        }
    }

    #[test]
    fn the_lines_above_say_what_is_a_secret() {
        for (line, above, shown) in [
            ("  - zz", &["secrets:"][..], "  ****"),
            ("  zz", &["secret: |", "webhook:"], "  **"),
            ("value: zz", &["auth:"], "*********"),
            ("MY_TOKEN: zz", &["env:", "a:"], "MY_TOKEN: **"),
            ("  zz", &["MY_TOKEN: >", "env:"], "  **"),
            ("X: y", &["env:", "token-refresh:"], "X: y"),
            ("shell: x", &["token-refresh:"], "shell: x"),
        ] {
            let mut keys = Above::default();
            above.iter().for_each(|line| keys.add(Keys::of(line)));
            assert_eq!(masked(line, keys), shown, "{above:?}");
        }
    }
}
