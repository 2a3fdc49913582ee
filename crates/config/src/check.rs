//! Whether a file has the right shape: known keys, right types, names that are allowed. Every problem is reported,
//! and nothing is decided here: what comes later may take a wrong value for its default.

use std::collections::HashMap;

use belfry_core::suggest::nearest;
use belfry_core::template::{self, ParseError, Template};
use belfry_core::work::{OWN_VARIABLES, is_own_variable};

use crate::context::Context;
use crate::keys::{AGENT, Key, SCHEDULE, Shape, TOP};
use crate::mask::{is_open, is_word, masked_text};
use crate::network::Network;
use crate::problem::{KeyName, Quoted, Severity, Span};
use crate::reference;
use crate::tree::{Data, Node};
use crate::value;

impl Context<'_> {
    /// Checks a value against its shape. `key` is what it is called in messages.
    pub fn check(&mut self, key: &str, node: &Node, shape: &Shape) {
        if self.is_full(Severity::Error) {
            return;
        }
        match shape {
            Shape::Or(word, Shape::Prompt) if node.is_plain_word(word) => {}
            Shape::Or(_, Shape::Prompt) if node.is_null() => {}
            Shape::Or(word, _) if node.is_word(word) => {}
            // Nothing written where `none` is allowed means none.
            Shape::Or("none", _) if node.is_null() => {}
            Shape::Or(_, shape) => self.check(key, node, shape),
            Shape::MapOr(map, other) => {
                self.check(key, node, if matches!(node.data, Data::Map(_)) { map } else { other });
            }
            Shape::Map(keys) => self.check_map(key, node, keys),
            Shape::Named(what, shape) => self.check_named(what, node, shape),
            Shape::Env => self.check_env(key, node),
            Shape::Object => self.check_object(key, node),
            Shape::List(shape) => match &node.data {
                Data::List(items) => items.iter().for_each(|item| self.check(key, item, shape)),
                _ if node.is_null() => {}
                _ => self.wrong(key, node, &format!("a list; each item is {}", words(shape))),
            },
            Shape::OneOrMore(shape) => match &node.data {
                Data::List(items) => items.iter().for_each(|item| self.check(key, item, shape)),
                _ if node.is_null() => {}
                _ => self.check(key, node, shape),
            },
            Shape::Argv => self.check_argv(key, node),
            Shape::Secrets => {
                let secrets =
                    if let Data::List(items) = &node.data { items } else { std::slice::from_ref(node) };
                for (secret, text) in secrets.iter().filter_map(|secret| Some((secret, secret.text()?))) {
                    self.check_reference(key, secret, text);
                    self.check_own_reference(key, secret, text, 0);
                }
            }
            // Its default decides, which `check_map` knows.
            Shape::NotYet => {}
            _ => self.check_scalar(key, node, shape),
        }
    }

    fn check_scalar(&mut self, key: &str, node: &Node, shape: &Shape) {
        let expected = words(shape);
        let Some(text) = node.text() else {
            let template = matches!(&node.data, Data::Map(entries) if entries.iter().any(|(key, _)| key.text.is_empty() || key.text.contains(' ')));
            self.wrong(key, node, &expected);
            if template {
                self.way_out("put a value that starts with `{{` into quotes");
            }
            return;
        };
        match shape {
            Shape::Words(allowed) if !allowed.contains(&text) => {
                self.wrong(key, node, &expected);
                if let Some(near) = nearest(text, allowed.iter().copied()) {
                    self.way_out(format!("did you mean `{near}`?"));
                }
            }
            Shape::Flag if value::flag(text).is_none() => {
                self.wrong(key, node, &expected);
                match text.to_ascii_lowercase().as_str() {
                    "yes" | "on" | "y" => self.way_out("write `true`"),
                    "no" | "off" | "n" => self.way_out("write `false`"),
                    _ => {}
                }
            }
            Shape::Count { min, max }
                if !value::whole(text).is_some_and(|number| (*min..=*max).contains(&number)) =>
            {
                self.wrong(key, node, &expected);
            }
            Shape::Duration { min_ms } => self.check_duration(key, node, text, *min_ms),
            Shape::Age if value::years(text).is_some() => {}
            Shape::Age => self.check_duration(key, node, text, 1),
            Shape::Size if belfry_core::size::parse_size(text).is_none() => self.wrong(key, node, &expected),
            Shape::Rate if value::rate(text).is_none() => self.wrong(key, node, &expected),
            Shape::Address if value::address(text).is_none() => self.wrong(key, node, &expected),
            Shape::Network if text.parse::<Network>().is_err() => self.wrong(key, node, &expected),
            Shape::Zone => {
                if let Err(error) = belfry_time::Zone::get(text) {
                    let span = self.inside(node, &error);
                    self.error(span, format!("`{key}`: {error}"));
                }
            }
            // The value may hold a password: it is underlined, with that masked, and not repeated.
            Shape::Store if !value::is_store(text) => {
                self.error(node.span, format!("`{key}` must be {expected}"));
            }
            Shape::Path => self.check_path(key, node, text),
            Shape::Name => {
                if let Some(flaw) = name_flaw(text) {
                    self.error(node.span, format!("`{key}`: {} {flaw}", Quoted(text))).help(NAME_RULE);
                }
            }
            Shape::EnvName => self.check_env_pass(node.span, text),
            Shape::Prompt => self.check_no_reference(key, node, text),
            Shape::Shell => {
                if let Err(error) = template::check_line(text) {
                    self.template_error(key, node, &error);
                }
            }
            _ => {}
        }
    }

    fn check_duration(&mut self, key: &str, node: &Node, text: &str, min_ms: u64) {
        match value::duration_ms(text) {
            Ok(ms) if ms >= min_ms => {}
            Ok(_) => {
                let least = value::format_ms(min_ms);
                self.error(node.span, format!("`{key}` must be at least {least}, got {}", Quoted(text)))
                    .help(format!("write `{least}` or more"));
            }
            Err(error) => {
                let span = self.inside(node, &error);
                self.error(span, format!("`{key}`: {error}"));
            }
        }
    }

    /// Known keys, each once and of its shape; required keys are there.
    pub fn check_map(&mut self, what: &str, node: &Node, keys: &[Key]) {
        let Data::Map(entries) = &node.data else {
            if !node.is_null() {
                let some: Vec<_> = keys.iter().take(3).map(|key| format!("`{}`", key.name)).collect();
                let (some, got) = (some.join(", "), node.describe());
                self.error(node.span, format!("`{what}` must be a map with keys such as {some}, got {got}"));
            }
            return;
        };
        for (written, value) in entries {
            match keys.iter().find(|key| key.name == written.text) {
                Some(key @ Key { shape: Shape::NotYet, .. }) => self.check_not_yet(key, value),
                Some(key) => self.check(key.name, value, &key.shape),
                // Without a value it may be the rest of one: `{secret: abc,def}`.
                None => self.unknown_key(what, &written.text, !value.is_null(), written.span, keys),
            }
        }
        for key in keys.iter().filter(|key| key.required && node.entry(key.name).is_none()) {
            self.error(node.span, format!("`{what}` needs `{}`", key.name))
                .help(format!("{}: {}", key.name, key.doc));
        }
    }

    fn unknown_key(&mut self, what: &str, written: &str, is_named: bool, span: Span, keys: &[Key]) {
        if self.is_full(Severity::Error) {
            return;
        }
        let known = |name: &str| keys.iter().any(|key| key.name == name);
        let names = || keys.iter().map(|key| key.name);
        let other_word = OTHER_WORDS.iter().find(|(theirs, ours)| *theirs == written && known(ours));
        let help = if let Some((_, ours)) = other_word {
            format!("did you mean `{ours}`?")
        } else if let Some(near) = nearest(written, names()) {
            format!("did you mean `{near}`?")
        } else if let Some((whose, _)) =
            [("a schedule", SCHEDULE), ("an agent", AGENT), ("the top of the main file", TOP)]
                .into_iter()
                .find(|(_, keys)| keys.iter().any(|key| key.name == written))
        {
            format!("`{written}` is a key of {whose}")
        } else {
            let names: Vec<_> = names().collect();
            format!("known keys are {}", names.join(", "))
        };
        let name = KeyName(if is_named { written } else { "" });
        self.error(span, format!("unknown key {name} in `{what}`")).help(help);
    }

    fn check_named(&mut self, what: &'static str, node: &Node, shape: &Shape) {
        let mut seen: HashMap<String, (String, Span)> = HashMap::new();
        let Data::Map(entries) = &node.data else {
            if !node.is_null() {
                let message = format!("`{what}s` must be a map from names, got {}", node.describe());
                self.error(node.span, message);
            }
            return;
        };
        for (key, value) in entries {
            self.check_name(what, &key.text, key.span);
            let folded = key.text.to_lowercase();
            match seen.get(&folded) {
                // Written twice alike was reported with the syntax.
                Some((first, _)) if *first == key.text => {}
                Some((first, place)) => {
                    let message = format!(
                        "the {what}s {} and {} differ only by case",
                        KeyName(first),
                        KeyName(&key.text)
                    );
                    let place = *place;
                    self.error(key.span, message).help("give one of them another name");
                    self.also(place, "the first");
                }
                None => {
                    seen.insert(folded, (key.text.clone(), key.span));
                }
            }
            self.check(shown(&key.text), value, shape);
        }
    }

    /// Names go into addresses, files and messages, so they are plain.
    pub fn check_name(&mut self, what: &str, name: &str, span: Span) {
        if let Some(flaw) = name_flaw(name) {
            let message = format!("the name of {} {flaw}", article(what));
            let problem = self.error(span, format!("{message}: {}", Quoted(name)));
            problem.told = message.len();
            problem.help(NAME_RULE);
        }
    }

    fn each_entry(&mut self, key: &str, node: &Node, mut check: impl FnMut(&mut Self, &str, &Node)) {
        match &node.data {
            Data::Map(entries) => {
                entries.iter().for_each(|(key, value)| check(self, shown(&key.text), value))
            }
            _ if node.is_null() => {}
            _ => self.wrong(key, node, "a map"),
        }
    }

    fn check_env(&mut self, key: &str, node: &Node) {
        for (name, _) in node.entries() {
            let span = name.span;
            self.check_env_name(span, &name.text);
            if is_own_variable(&name.text) {
                let name = KeyName(&name.text);
                let message = format!("{name} cannot be set: names that start with BELFRY_ are Belfry's own");
                self.error(span, message)
                    .help("give it another name; only BELFRY_SERVER and BELFRY_TOKEN can be set, for a `belfry` that the job calls");
            }
        }
        self.each_entry(key, node, |context, name, value| match &value.data {
            Data::Scalar { text, .. } if !value.is_null() => context.check_env_value(name, value, text),
            _ => {
                // Without a value, the name may be the rest of one: `{TOKEN: abc,def}`.
                match value.is_null() {
                    true => _ = context.error(value.span, "a variable must be text, got nothing"),
                    false => context.wrong(name, value, "text"),
                }
                context.way_out("put it into quotes; an empty value is \"\"");
            }
        });
    }

    fn check_env_name(&mut self, span: Span, name: &str) {
        if name.is_empty() || name.contains(['=', '\0']) || name.chars().any(char::is_whitespace) {
            let message =
                "this cannot be the name of an environment variable: it is empty, or has a blank or a `=`";
            self.error(span, message).help("a name has no blanks and no `=`");
        }
    }

    /// The node's own variables hold its store's address and its token.
    fn check_env_pass(&mut self, span: Span, name: &str) {
        self.check_env_name(span, name);
        if name.starts_with(OWN_VARIABLES) {
            let message =
                format!("{} is not passed on: names that start with BELFRY_ are Belfry's own", KeyName(name));
            self.error(span, message)
                .help("a job's `belfry` finds its server by itself; `env: {BELFRY_TOKEN: \"${JOB_TOKEN}\"}` gives it another token");
        }
    }

    /// A template whose own text may hold references.
    fn check_env_value(&mut self, name: &str, node: &Node, text: &str) {
        let template = match Template::parse(text) {
            Ok(template) => template,
            Err(error) => return self.template_error(name, node, &error.without_source()),
        };
        for (part, range) in template.texts() {
            if let Err(flaw) = reference::check(part) {
                let span = self.within(node, range.start + flaw.range.start..range.start + flaw.range.end);
                self.error(span, format!("`{name}`: {}", flaw.message)).help(reference::RULE);
            }
            self.check_own_reference(name, node, part, range.start);
        }
    }

    /// Refuses a reference to the node's own variables, in a part of a text that begins at `start`.
    fn check_own_reference(&mut self, key: &str, node: &Node, part: &str, start: usize) {
        if let Some((own, at)) = reference::find(part, |name| name.starts_with(OWN_VARIABLES)) {
            let message =
                format!("`{key}` cannot refer to `{own}`: names that start with BELFRY_ are Belfry's own");
            let span = self.within(node, start + at.start..start + at.end);
            self.error(span, message).help("give the node a variable with another name, and refer to that");
        }
    }

    /// Reports a template that is refused, at its place in the text.
    pub fn template_error(&mut self, key: &str, node: &Node, error: &ParseError) {
        let span = self.within(node, error.range.clone());
        let problem = self.error(span, format!("`{key}`: {}{}", error.message, error.found));
        problem.told = problem.message.len() - error.found.len();
        problem.help = error.help.as_deref().map(masked_text);
    }

    fn check_reference(&mut self, key: &str, node: &Node, text: &str) {
        if let Err(flaw) = reference::check(text) {
            let span = self.within(node, flaw.range.clone());
            self.error(span, format!("`{key}`: {}", flaw.message)).help(reference::RULE);
        }
    }

    /// A child never gets the node's own variables, also not under another name.
    fn check_no_reference(&mut self, key: &str, node: &Node, text: &str) {
        if let Some(range) = reference::find_literal(text) {
            let name = text[range.clone()].trim_start_matches("${").trim_end_matches('}');
            let name = name.split(":-").next().unwrap_or_default();
            let name = if reference::is_name(name) { name } else { "NAME" };
            let span = self.within(node, range);
            self.error(span, format!("`{key}` cannot hold references, only `env` and secrets can"))
                .help(format!(
                    "put it into `env: {{{name}: \"${{{name}}}\"}}` and let the program read it there; for a literal `${{` write `$${{`"
                ));
        }
    }

    fn check_object(&mut self, key: &str, node: &Node) {
        if !matches!(node.data, Data::Map(_)) {
            if !node.is_null() {
                self.wrong(key, node, "a map");
            }
            return;
        }
        if let Err(number) = node.json() {
            let message = format!("`{key}`: a number is out of range");
            let span = number.span;
            self.error(span, message).help("put it into quotes to make it text");
        }
    }

    fn check_argv(&mut self, key: &str, node: &Node) {
        let items = match &node.data {
            Data::List(items) => items,
            Data::Scalar { text, .. } if !node.is_null() => {
                self.error(node.span, format!("`{key}` must be a list: a program and its arguments"))
                    .help(list_of_words(text));
                return;
            }
            // Whether something runs at all is asked later.
            _ if node.is_null() => return,
            _ => return self.wrong(key, node, "a list: a program and its arguments"),
        };
        if items.first().is_none_or(|program| program.text().is_none_or(|text| text.trim().is_empty())) {
            let span = items.first().map_or(node.span, |first| first.span);
            self.error(span, format!("`{key}` must begin with a program"));
        }
        for item in items {
            if self.is_full(Severity::Error) {
                return;
            }
            match &item.data {
                Data::Scalar { text, .. } if !item.is_null() => {
                    self.check_no_reference(key, item, text);
                    if let Err(error) = Template::parse(text) {
                        self.template_error(key, item, &error);
                    }
                }
                _ => {
                    self.wrong(key, item, "made of texts");
                    self.way_out("put the argument into quotes; an empty one is \"\"");
                }
            }
        }
    }

    fn check_not_yet(&mut self, key: &Key, node: &Node) {
        let is_default = match key.default {
            "" => node.is_word("none"),
            "{}" => matches!(&node.data, Data::Map(entries) if entries.is_empty()),
            default => node.is_word(default),
        };
        if !is_default && !node.is_null() {
            let name = key.name;
            let help = match key.default {
                "" => format!("remove `{name}`"),
                default => format!("remove `{name}`; its default is `{default}`"),
            };
            self.error(node.span, format!("`{name}` is not available in this version")).help(help);
        }
    }

    fn check_path(&mut self, key: &str, node: &Node, text: &str) {
        if text.starts_with('~') {
            let rest = text.trim_start_matches('~');
            self.error(node.span, format!("`{key}`: `~` is not expanded"))
                .help(format!("write `${{HOME}}{rest}`"));
        }
    }

    /// `key` must be …, got …
    pub fn wrong(&mut self, key: &str, node: &Node, expected: &str) {
        // What stands there may be a secret, and messages go where the file is not read.
        let text = node.text().filter(|_| is_open(key) && !node.is_null());
        let got = text.map_or_else(|| node.describe().to_owned(), |text| Quoted(text).to_string());
        self.error(node.span, format!("`{key}` must be {expected}, got {got}"));
    }
}

/// A name of the user's choice as messages show it; see [`KeyName`].
fn shown(name: &str) -> &str {
    if is_word(name) { name } else { "…" }
}

/// The way out for a command that is written as text.
fn list_of_words(text: &str) -> String {
    const LONGEST: usize = 200;
    if text.len() > LONGEST {
        return "write `run: [\"program\", \"argument\"]`, or `shell: \"…\"` for a line with shell syntax"
            .into();
    }
    let text = masked_text(text);
    let words: Vec<_> = text.split_whitespace().map(|word| format!("{word:?}")).collect();
    format!("write `run: [{}]`, or `shell: {text:?}` for a line with shell syntax", words.join(", "))
}

/// Words of other schedulers.
const OTHER_WORDS: &[(&str, &str)] = &[
    ("interval", "every"),
    ("schedule", "schedules"),
    ("jobs", "agents"),
    ("tz", "timezone"),
    ("zone", "timezone"),
    ("cmd", "run"),
    ("command", "run"),
    ("args", "run"),
    ("script", "shell"),
    ("dir", "cwd"),
    ("workdir", "cwd"),
    ("working_dir", "cwd"),
    ("working_directory", "cwd"),
    ("environment", "env"),
    ("concurrency", "max_concurrent"),
    ("retries", "max"),
    ("database", "store"),
    ("db", "store"),
    ("queue", "lane"),
    ("disabled", "enabled"),
    ("message", "prompt"),
];

pub(crate) const NAME_RULE: &str =
    "a name has 1 to 63 characters: A-Z a-z 0-9 and, after the first, also `_` `.` `-`";

/// What is wrong with a name.
pub(crate) fn name_flaw(name: &str) -> Option<&'static str> {
    let allowed = |(i, c): (usize, char)| c.is_ascii_alphanumeric() || (i > 0 && "_.-".contains(c));
    if name.is_empty() {
        Some("is empty")
    } else if name.len() > 63 {
        Some("is too long")
    } else if !name.char_indices().all(allowed) {
        Some("has characters that are not allowed")
    } else {
        None
    }
}

fn article(what: &str) -> String {
    if what.starts_with(['a', 'e', 'i', 'o', 'u']) { format!("an {what}") } else { format!("a {what}") }
}

/// A shape in words, as in "must be …".
fn words(shape: &Shape) -> String {
    match shape {
        Shape::Text | Shape::Prompt | Shape::Shell => "text".into(),
        Shape::Timing(what) => (*what).into(),
        Shape::Words(allowed) => match allowed.split_last() {
            Some((last, rest)) => {
                let rest: Vec<_> = rest.iter().map(|word| format!("`{word}`")).collect();
                format!("{} or `{last}`", rest.join(", "))
            }
            None => String::new(),
        },
        Shape::Flag => "`true` or `false`".into(),
        Shape::Count { min, max } => format!("a whole number from {min} to {max}"),
        Shape::Duration { .. } => "a duration such as `30s` or `1h30m`".into(),
        Shape::Age => "a duration such as `24h`, `30d` or `1y`".into(),
        Shape::Size => "a size such as `64KiB` or `1MiB`, from 1KiB to 1GiB".into(),
        Shape::Rate => "a rate such as `100/s`, per `s`, `m` or `h`".into(),
        Shape::Address => "an address and a port such as `127.0.0.1:7400`".into(),
        Shape::Network => "an IP address or a range such as `10.0.0.0/8`".into(),
        Shape::Zone => "an IANA name such as Europe/London".into(),
        Shape::Store => "`sqlite:FILE` or `postgres://user@host/database`".into(),
        Shape::Path => "a path".into(),
        Shape::Name => "a name".into(),
        Shape::EnvName => "the name of an environment variable".into(),
        Shape::Or(word, shape) => format!("{} or `{word}`", words(shape)),
        Shape::List(shape) | Shape::OneOrMore(shape) => format!("a list of {}", words(shape)),
        Shape::MapOr(_, other) => format!("{} or a map", words(other)),
        Shape::Argv => "a list: a program and its arguments".into(),
        Shape::Secrets => "text, or a list of texts".into(),
        Shape::Map(_) | Shape::Named(..) | Shape::Env | Shape::Object | Shape::NotYet => "a map".into(),
    }
}
