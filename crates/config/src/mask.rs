//! What of a line of a file is shown in an error. A value is shown only if its key is one of ours that holds no secret:
//! the file may be broken, its keys misspelt, and the message may be read by others than its author. Keys are shown.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::LazyLock;

use belfry_core::suggest::nearest;
use belfry_core::work::is_secret_name;

use crate::keys::{Key, Shape, TOP};
use crate::password::secrets;
use crate::reference::is_written_out;

/// Keys that hold secrets wherever they stand, also if they are misspelt.
const SECRET_KEYS: [&str; 3] = ["secret", "secrets", "auth"];

/// What becomes of the text behind a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A key of ours that holds no secret.
    Open,
    /// Any other word: of a misspelt key, of a variable, of a payload.
    Other,
    /// `env`: whatever stands below it is hidden.
    Env,
    /// A secret, in whatever form.
    Secret,
}

impl Kind {
    fn of(name: &str) -> Kind {
        if is_env(name) {
            Kind::Env
        } else if is_secret_key(name) {
            Kind::Secret
        } else if OPEN.contains(name) {
            Kind::Open
        } else {
            Kind::Other
        }
    }
}

/// What a line says about those below it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Keys {
    pub last: Option<Kind>,
    is_secret: bool,
    is_env: bool,
    /// The value may go on below.
    is_text: bool,
}

impl Keys {
    pub fn of(line: &str) -> Keys {
        let mut found = Keys::default();
        read(line, Kind::Other, &mut |part| match part {
            Part::Key(kind) => {
                found.last = Some(kind);
                found.is_secret |= kind == Kind::Secret;
                found.is_env |= kind == Kind::Env;
                found.is_text = false;
            }
            Part::Value { goes_on, .. } => found.is_text = goes_on,
        });
        found
    }
}

/// What the lines above a line say about it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Above {
    /// Of the nearest line that it is a part of by its indentation.
    nearest: Option<Kind>,
    /// Of the outermost of these whose value is a text that goes on below.
    text: Option<Kind>,
    /// Of the last line above with a key.
    before: Option<Kind>,
    is_secret: bool,
    in_env: bool,
}

impl Above {
    /// What stands above was not looked at: it may be the key of a secret.
    pub const UNKNOWN: Above =
        Above { nearest: None, text: None, before: None, is_secret: true, in_env: false };

    pub fn new(before: Option<Kind>) -> Above {
        Above { before, is_secret: false, ..Above::UNKNOWN }
    }

    /// Adds the next line that it is a part of, further up.
    pub fn add(&mut self, keys: Keys) {
        self.nearest = self.nearest.or(keys.last);
        if keys.is_text && keys.last.is_some() {
            self.text = keys.last;
        }
        self.is_secret |= keys.is_secret;
        self.in_env |= keys.is_env;
    }
}

/// The line with stars for what is hidden. The length stays, and so do the spans.
pub(crate) fn masked(line: &str, above: Above) -> String {
    let mut hidden = Vec::new();
    let all = line.len() - line.trim_start().len()..line.len();
    match above.text {
        _ if above.is_secret => hidden.push(all),
        Some(Kind::Open) => hidden.extend(named_secret(line, all)),
        Some(_) => hidden.push(all),
        None => {
            let is_open = above.nearest == Some(Kind::Open) && above.before == Some(Kind::Open);
            let mut kind = if is_open { Kind::Open } else { Kind::Other };
            let mut in_env = above.in_env;
            read(line, kind, &mut |part| match part {
                Part::Key(key) => {
                    in_env |= key == Kind::Env;
                    kind = key;
                }
                Part::Value { range, .. } if kind == Kind::Open && !in_env => {
                    hidden.extend(named_secret(line, range));
                }
                Part::Value { range, .. } => {
                    let text = &line[range.clone()];
                    if is_written_out(text) && text.contains(char::is_alphanumeric) {
                        hidden.push(range);
                    }
                }
            });
        }
    }
    let mut shown = line.to_owned();
    for secret in hidden {
        let stars = "*".repeat(secret.len());
        shown.replace_range(secret, &stars);
    }
    mask_addresses(&mut shown);
    shown
}

/// A text inside of a message without the secrets that can be told by their look.
pub(crate) fn masked_text(text: &str) -> String {
    let mut shown = text.to_owned();
    if let Some(secret) = named_secret(text, 0..text.len()) {
        let stars = "*".repeat(secret.len());
        shown.replace_range(secret, &stars);
    }
    mask_addresses(&mut shown);
    shown
}

/// Whether the text of a key may be a secret.
pub(crate) fn may_hold_secret(key: &str) -> bool {
    key == "webhook" || is_secret_name(key) || matches!(Kind::of(key), Kind::Env | Kind::Secret)
}

/// `env`, also if it is misspelt.
fn is_env(name: &str) -> bool {
    ["env", "envs", "evn", "environment"].iter().any(|known| name.eq_ignore_ascii_case(known))
}

fn is_secret_key(name: &str) -> bool {
    // No slip is longer than three letters. A line may have thousands of keys, and to compare words takes long.
    (3..=10).contains(&name.len()) && nearest(name, SECRET_KEYS.into_iter()).is_some()
}

/// The keys of ours whose values are shown.
static OPEN: LazyLock<HashSet<&str>> = LazyLock::new(|| {
    let mut open = HashSet::new();
    let mut maps = Vec::from([TOP]);
    while let Some(keys) = maps.pop() {
        for Key { name, shape, .. } in keys {
            maps.extend(map_of(shape));
            if !matches!(shape, Shape::Env | Shape::Secrets | Shape::NotYet) {
                open.insert(*name);
            }
        }
    }
    open
});

/// The keys of the maps that a value may be.
fn map_of(shape: &Shape) -> Option<&'static [Key]> {
    match shape {
        Shape::Map(keys) => Some(*keys),
        Shape::Or(_, of)
        | Shape::MapOr(of, _)
        | Shape::List(of)
        | Shape::OneOrMore(of)
        | Shape::Named(_, of) => map_of(of),
        _ => None,
    }
}

enum Part {
    Key(Kind),
    /// A text, and whether it may go on in the lines below.
    Value {
        range: Range<usize>,
        goes_on: bool,
    },
}

/// Tells the keys and values of a line of YAML or JSON, from left to right. Of what is hidden and not in quotes, all that is left of
/// the line is one value: what looks like a key may be a part of it.
fn read(line: &str, before: Kind, tell: &mut dyn FnMut(Part)) {
    let (mut at, mut kind) = (0, before);
    // A pair of a command line.
    if let Some((name, _)) = line.split_once('=')
        && Kind::of(name) != Kind::Other
    {
        (at, kind) = (name.len() + 1, Kind::of(name));
        tell(Part::Key(kind));
    }
    while let Some(first) = line[at..].chars().next() {
        let is_item = "-?".contains(first) && line[at + 1..].chars().next().is_none_or(char::is_whitespace);
        if first.is_whitespace() || "{}[],:".contains(first) || is_item {
            at += first.len_utf8();
            continue;
        }
        let word = Word::of(&line[at..]);
        let text = at + word.text.start..at + word.text.end;
        at += word.end;
        let behind = line[at..].trim_start_matches([' ', '\t', ':']);
        if word.is_key {
            kind = Kind::of(&line[text]);
            tell(Part::Key(kind));
            if kind == Kind::Secret && behind.starts_with(['{', '[']) {
                tell(Part::Value { range: line.len() - behind.len()..line.len(), goes_on: false });
                return;
            }
        } else if word.is_whole {
            tell(Part::Value { range: text, goes_on: false });
        } else if kind == Kind::Open && !word.is_open_quote {
            let goes_on = is_block(&line[text.clone()]);
            tell(Part::Value { range: text, goes_on });
        } else {
            tell(Part::Value { range: text.start..line.len(), goes_on: true });
            return;
        }
    }
}

/// A part of a line, from its first sign on.
struct Word {
    /// Without quotes.
    text: Range<usize>,
    end: usize,
    is_key: bool,
    /// In quotes, or a reference, and nothing but the end of a value follows.
    is_whole: bool,
    is_open_quote: bool,
}

impl Word {
    fn of(rest: &str) -> Word {
        let plain =
            |end: usize| Word { text: 0..end, end, is_key: false, is_whole: false, is_open_quote: false };
        let ends_value = |at: usize| {
            let after = rest[at..].trim_start();
            after.is_empty() || after.starts_with([',', '}', ']', '#'])
        };
        if let Some(quote) = rest.chars().next().filter(|c| ['"', '\''].contains(c)) {
            return match closing(rest, quote) {
                Some(close) => {
                    let (end, is_key) = (close + 1, rest[close + 1..].trim_start().starts_with(':'));
                    let is_whole = ends_value(end);
                    let text = if is_key || is_whole { 1..close } else { 0..end };
                    Word { text, end, is_key, is_whole, is_open_quote: false }
                }
                None => Word { is_open_quote: true, text: 1..rest.len(), ..plain(rest.len()) },
            };
        }
        if let Some(end) =
            rest.find('}').map(|at| at + 1).filter(|end| rest.starts_with("${") && ends_value(*end))
        {
            return Word { is_whole: true, ..plain(end) };
        }
        let end = rest.find([',', '}', ']']).unwrap_or(rest.len());
        let Some(colon) = separator(&rest[..end]) else { return plain(end) };
        let name = rest[..colon].trim_end();
        match name.rfind(|c: char| !c.is_ascii_alphanumeric() && !"_-./".contains(c)) {
            None => Word { text: 0..name.len(), is_key: true, ..plain(colon) },
            // What looks like a key comes next.
            Some(before) => plain(name.ceil_char_boundary(before + 1)),
        }
    }
}

/// Where the quote ends that a text begins with.
fn closing(text: &str, quote: char) -> Option<usize> {
    let mut signs = text.char_indices().skip(1).peekable();
    while let Some((at, sign)) = signs.next() {
        if quote == '"' && sign == '\\' {
            signs.next();
        } else if sign == quote && !(quote == '\'' && signs.next_if(|(_, next)| *next == quote).is_some()) {
            return Some(at);
        }
    }
    None
}

/// The first colon that ends a key.
fn separator(text: &str) -> Option<usize> {
    let ends_key = |at: &usize| {
        let next = text[at + 1..].chars().next();
        next.is_none_or(|next| next.is_whitespace() || "\"'{[".contains(next))
    };
    text.match_indices(':').map(|(at, _)| at).find(ends_key)
}

/// `|`, `>-`: the text stands below.
fn is_block(value: &str) -> bool {
    let last =
        value.split(" #").next().unwrap_or_default().split_whitespace().next_back().unwrap_or_default();
    last.starts_with(['|', '>']) && last.chars().all(|c| "|>+-0123456789".contains(c))
}

/// From the value on of what looks like a secret by its name, in a text that is shown: `password=…`.
fn named_secret(line: &str, range: Range<usize>) -> Option<Range<usize>> {
    let text = &line[range.clone()];
    let value = text.match_indices([':', '=']).find_map(|(at, _)| {
        let before = text[..at].trim_end().trim_end_matches(['"', '\'']);
        let start = before.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || "_-.".contains(c)).len();
        let name = before[start..].trim_matches('-');
        (is_secret_name(name) || is_secret_key(name)).then_some(at + 1)
    })?;
    let blanks = text[value..].len() - text[value..].trim_start().len();
    Some(range.start + value + blanks..range.end)
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

    /// As below a key of ours that holds no secret.
    fn shown(line: &str) -> String {
        masked(line, Above { nearest: Some(Kind::Open), ..Above::new(Some(Kind::Open)) })
    }

    #[test]
    fn a_password_in_a_url_is_not_shown() {
        for (line, expected) in [
            ("store: postgres://me:hün/t@r@host/db", "store: postgres://me:********@host/db"),
            ("store: postgres://me:pw@host/db", "store: postgres://me:**@host/db"),
            ("run: x://u:p@h, cwd: y://v:qq@i", "run: x://u:*@h, cwd: y://v:**@i"),
            ("http://host/x", "http://host/x"),
            ("store: postgres://h/d?password=pw&a=b", "store: postgres://h/d?password=******"),
            ("store: host=h password=pw", "store: host=h password=**"),
        ] {
            assert_eq!(shown(line), expected);
        }
    }

    #[test]
    fn a_value_is_shown_only_behind_a_key_of_ours_without_secrets() {
        for (line, expected) in [
            (r#"s: {webhook: {secret: "zz${"}, github: 1}"#, r#"s: {webhook: {secret: "****"}, github: 1}"#),
            ("secret: zz, zz", "secret: ******"),
            (r#"secret: "zz" zz"#, "secret: *******"),
            (r#"secret: "z\"z", x"#, r#"secret: "****", *"#),
            (r#"{"secret":"zz","cron":1}"#, r#"{"secret":"**","cron":1}"#),
            ("secrets: [zz, zz]", "secrets: ********"),
            ("secert: zz", "secert: **"),
            ("signing_secret: zz", "signing_secret: **"),
            ("MY_TOKEN:zz", "MY_TOKEN:**"),
            ("cron=0 25 * * *", "cron=0 25 * * *"),
            ("webhook={secret: zz}", "webhook={secret: ***"),
            ("secret=zz", "secret=**"),
            ("auth: {type: bearer, value: zz}", "auth: *************************"),
            (r#"secret: "${NAME}", cron: 1"#, r#"secret: "${NAME}", cron: 1"#),
            ("{secret: ${NAME}, cron: 1}", "{secret: ${NAME}, cron: 1}"),
            (r#"env: {MY_TOKEN: "zz", X: "${oops"}"#, r#"env: {MY_TOKEN: "**", X: "******"}"#),
            (r#"env: {cron: zz}, cron: zz"#, r#"env: {cron: **}, cron: **"#),
            (r#"env: ["MY_TOKEN=zz"]"#, r#"env: ["***********"]"#),
            ("token-refresh: {shell: x}", "token-refresh: {shell: x}"),
            (r#"{"\x73ecret": "zz", ? secret : zz}"#, r#"{"\x73ecret": "**", ? secret : ***"#),
            ("FOO: \"a cron: zz\"", "FOO: \"**********\""),
            ("run: [curl, \"X-Key: zz\", --token=zz]", "run: [curl, \"X-Key: **\", --token=**]"),
            ("shell: echo b: zz", "shell: echo b: **"),
            ("prompt: \"Note: {{ x }}\"", "prompt: \"Note: {{ x }}\""),
            ("every: 10m, shell: it's, cron: 'it''s'", "every: 10m, shell: it's, cron: 'it''s'"),
            ("- \"a: b\"", "- \"a: b\""),
        ] {
            assert_eq!(shown(line), expected);
        }
    }
}
