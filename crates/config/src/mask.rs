//! What of a line of a file is shown in an error. A value is shown only if its key is one of ours that holds no secret:
//! the file may be broken, its keys misspelt, and the message may be read by others than its author. Keys are shown.

use std::collections::HashMap;
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
        } else if OURS.get(name) == Some(&true) {
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
    /// The quote of the value is not closed, so the next lines belong to it at any indentation.
    pub is_open_quote: bool,
}

impl Keys {
    pub fn of(line: &str) -> Keys {
        let mut found = Keys::default();
        read(line, Kind::Other, &mut |part| match part {
            Part::Key { kind, .. } => {
                found.last = Some(kind);
                found.is_secret |= kind == Kind::Secret;
                found.is_env |= kind == Kind::Env;
                found.is_text = false;
            }
            Part::Value { range, goes_on, .. } => {
                found.is_text = goes_on;
                found.is_open_quote = goes_on && line[..range.start].ends_with(['"', '\'']);
            }
            Part::Comment(_) => {}
        });
        found
    }
}

/// What the lines above a line say about it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Above {
    /// The kind of the nearest parent line, by indentation.
    nearest: Option<Kind>,
    /// Of the outermost parent line whose value is a text that goes on below.
    text: Option<Kind>,
    /// Of the last line above with a key.
    before: Option<Kind>,
    /// Hides everything.
    is_secret: bool,
    in_env: bool,
}

impl Above {
    /// What stands above was not looked at: it may be the key of a secret.
    pub const UNKNOWN: Above =
        Above { nearest: None, text: None, before: None, is_secret: true, in_env: false };

    /// Of a line, by the last line above with a key.
    pub fn new(before: Option<Keys>) -> Above {
        let is_open = |keys: &Keys| keys.last == Some(Kind::Open);
        let is_secret = before.is_some_and(|keys| keys.is_open_quote && !is_open(&keys));
        Above { before: before.and_then(|keys| keys.last), is_secret, ..Above::UNKNOWN }
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

/// The line with a star for each character that is hidden. The places, in bytes of the line, become places of what is shown.
pub(crate) fn masked(line: &str, above: Above, places: &mut [usize]) -> String {
    let mut hidden = hidden(line, above);
    hidden.extend(passwords(line));
    starred(line, &hidden, places)
}

/// A text inside of a message without the secrets that can be told by their look.
pub(crate) fn masked_text(text: &str) -> String {
    let mut hidden = passwords(text);
    hidden.extend(named_secret(text, 0..text.len()));
    starred(text, &hidden, &mut [])
}

fn starred(text: &str, hidden: &[Range<usize>], places: &mut [usize]) -> String {
    let mut is_hidden = vec![false; text.len()];
    for range in hidden {
        is_hidden[range.clone()].fill(true);
    }
    let wanted = places.to_vec();
    places.fill(text.len());
    let mut shown = String::with_capacity(text.len());
    for (at, sign) in text.char_indices() {
        for (place, _) in places.iter_mut().zip(&wanted).filter(|(_, wanted)| **wanted == at) {
            *place = shown.len();
        }
        shown.push(if is_hidden[at] { '*' } else { sign });
    }
    places.iter_mut().for_each(|place| *place = (*place).min(shown.len()));
    shown
}

/// The parts of a line that are hidden.
fn hidden(line: &str, above: Above) -> Vec<Range<usize>> {
    let mut hidden = Vec::new();
    let all = line.len() - line.trim_start().len()..line.len();
    match above.text {
        _ if above.is_secret => hidden.push(all),
        // A part of a variable's value.
        _ if above.in_env && above.nearest != Some(Kind::Env) => hidden.push(all),
        Some(Kind::Open) => hidden.extend(named_secret(line, all)),
        Some(_) => hidden.push(all),
        None => {
            let is_open = above.nearest == Some(Kind::Open) && above.before == Some(Kind::Open);
            let before = if is_open { Kind::Open } else { Kind::Other };
            let mut in_env = above.in_env;
            read(line, before, &mut |part| match part {
                Part::Key { kind, range } => {
                    in_env |= kind == Kind::Env;
                    if !is_word(&line[range.clone()]) {
                        hidden.push(range);
                    }
                }
                Part::Comment(range) => hidden.push(range),
                Part::Value { kind: Kind::Open, range, .. } if !in_env => {
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
    hidden
}

/// Whether a key is one of ours that holds no secret.
pub(crate) fn is_open(key: &str) -> bool {
    Kind::of(key) == Kind::Open
}

/// Whether a key may be shown: others are often values that slipped into its place.
pub(crate) fn is_word(key: &str) -> bool {
    !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-./".contains(c))
}

/// `env`, also if it is misspelt.
fn is_env(name: &str) -> bool {
    ["env", "envs", "evn", "environment"].iter().any(|known| name.eq_ignore_ascii_case(known))
}

fn is_secret_key(name: &str) -> bool {
    // No slip is longer than three letters. A line may have thousands of keys, and to compare words takes long.
    (3..=10).contains(&name.len()) && nearest(name, SECRET_KEYS.into_iter()).is_some()
}

/// Belfry's own keys, and whether their values are shown. Values of keys that hold secrets or maps are not: a text in the place
/// of a map is misplaced.
static OURS: LazyLock<HashMap<&str, bool>> = LazyLock::new(|| {
    let mut ours = HashMap::new();
    let mut maps = Vec::from([TOP]);
    while let Some(keys) = maps.pop() {
        for Key { name, shape, .. } in keys {
            let map = map_of(shape);
            maps.extend(map);
            let is_open = match shape {
                Shape::Env | Shape::Secrets | Shape::NotYet | Shape::Store | Shape::Object => false,
                Shape::Named(..) => false,
                Shape::List(of) => !matches!(of, Shape::EnvName),
                _ => map.is_none(),
            };
            *ours.entry(*name).or_insert(true) &= is_open;
        }
    }
    ours
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
    Key {
        kind: Kind,
        range: Range<usize>,
    },
    Comment(Range<usize>),
    /// A text, the kind of its key, and whether it may go on in the lines below.
    Value {
        kind: Kind,
        range: Range<usize>,
        goes_on: bool,
    },
}

/// Tells the keys and values of a line of YAML or JSON, from left to right. Of what is hidden and not in quotes, all that is left of
/// the line is one value: what looks like a key may be a part of it.
fn read(line: &str, before: Kind, tell: &mut dyn FnMut(Part)) {
    let (mut at, mut kind) = (0, before);
    // A value comes next, whatever it looks like.
    let mut is_behind_key = false;
    let mut brackets = Vec::new();
    // A pair of a command line.
    if let Some((name, _)) = line.split_once('=')
        && (Kind::of(name) != Kind::Other || OURS.contains_key(name))
    {
        (at, kind) = (name.len() + 1, Kind::of(name));
        tell(Part::Key { kind, range: 0..name.len() });
    }
    while let Some(first) = line[at..].chars().next() {
        let is_item = "-?".contains(first) && line[at + 1..].chars().next().is_none_or(char::is_whitespace);
        if first.is_whitespace() || "{}[],:".contains(first) || is_item {
            match first {
                '{' | '[' => brackets.push(first),
                '}' | ']' => drop(brackets.pop()),
                _ => {}
            }
            // What follows in a map is not the value of the key before.
            if first == '}' || first == ',' && brackets.last() == Some(&'{') {
                kind = Kind::Other;
            }
            is_behind_key &= !"{[,".contains(first);
            at += first.len_utf8();
            continue;
        }
        if first == '#' && (at == 0 || line[..at].ends_with(char::is_whitespace)) {
            tell(Part::Comment(at + 1..line.len()));
            return;
        }
        let word = Word::of(&line[at..]);
        let text = at + word.text.start..at + word.text.end;
        at += word.end;
        let behind = line[at..].trim_start_matches([' ', '\t', ':']);
        if word.is_key && !(is_behind_key && kind != Kind::Open) {
            is_behind_key = true;
            kind = Kind::of(&line[text.clone()]);
            tell(Part::Key { kind, range: text });
            if kind == Kind::Secret && behind.starts_with(['{', '[']) {
                tell(Part::Value { kind, range: line.len() - behind.len()..line.len(), goes_on: false });
                return;
            }
        } else if word.is_whole && !word.is_key {
            tell(Part::Value { kind, range: text, goes_on: false });
        } else if kind == Kind::Open && !word.is_open_quote {
            let goes_on = is_block(&line[text.clone()]);
            tell(Part::Value { kind, range: text, goes_on });
        } else {
            tell(Part::Value { kind, range: text.start..line.len(), goes_on: true });
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
        let end = rest[..end].find(" #").map_or(end, |comment| comment + 1);
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

/// In a text that is shown, the part behind the first name of a secret: `password=…`.
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

/// The passwords of addresses.
fn passwords(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    for (at, sign) in text.match_indices("://") {
        let user = at + sign.len();
        let rest = &text[user..];
        let end = rest.find(|c: char| c.is_whitespace() || "\"',}".contains(c)).unwrap_or(rest.len());
        found.extend(secrets(&rest[..end]).into_iter().map(|range| user + range.start..user + range.end));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As below a key of ours that holds no secret.
    fn shown(line: &str) -> String {
        masked(
            line,
            Above { nearest: Some(Kind::Open), before: Some(Kind::Open), ..Above::new(None) },
            &mut [],
        )
    }

    #[test]
    fn a_password_in_a_url_is_not_shown() {
        for (line, expected) in [
            ("run: postgres://me:hün/t@r@host/db", "run: postgres://me:*******@host/db"),
            ("run: x://u:p@h, cwd: y://v:qq@i", "run: x://u:*@h, cwd: y://v:**@i"),
            ("http://host/x", "http://host/x"),
            ("run: postgres://h/d?password=pw&a=b", "run: postgres://h/d?password=******"),
            ("run: host=h password=pw", "run: host=h password=**"),
            ("store: me:pw@host/db", "store: *************"),
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
            ("webhook=zz", "webhook=**"),
            ("webhook: [zz]", "webhook: [***"),
            ("webhook: {secret\": \"zz\"", "webhook: {*************"),
            ("DB_PASS: zz: foo", "DB_PASS: *******"),
            ("DB_PASS: \"zz\": foo\"", "DB_PASS: \"*********"),
            ("env: {DB_PASS=zz-b, MODE: quiet}", "env: {**************************"),
            ("env: {\"DB_PASS=zz\": x}", "env: {\"**********\": **"),
            ("timeout: 5mm # zz", "timeout: 5mm #***"),
            ("s: {webhook: {github: true, secret zz}}", "s: {webhook: {github: true, ***********"),
            ("a: {shell: x, env {timeout zz}}", "a: {shell: x, *****************"),
            ("webhook={github: true} zz", "webhook={github: true} **"),
            ("run: [a, b], shell: x", "run: [a, b], shell: x"),
            ("auth: {type: bearer, value: zz}", "auth: *************************"),
            (r#"secret: "${NAME}", cron: 1"#, r#"secret: "${NAME}", cron: 1"#),
            ("{secret: ${NAME}, cron: 1}", "{secret: ${NAME}, cron: 1}"),
            (r#"env: {MY_TOKEN: "zz", X: "${oops"}"#, r#"env: {MY_TOKEN: "**", X: "******"}"#),
            (r#"env: {cron: zz}, cron: zz"#, r#"env: {cron: **}, cron: **"#),
            (r#"env: ["MY_TOKEN=zz"]"#, r#"env: ["***********"]"#),
            ("token-refresh: {shell: x}", "token-refresh: {shell: x}"),
            (r#"{"\x73ecret": "zz", ? secret : zz}"#, r#"{"*********": "**", ? secret : ***"#),
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
