//! One schedule or one agent that did not come from a file: from `belfry add`, `belfry set` and the API. The same keys
//! and the same words as in a file; but nothing is filled in from the environment, and what would be `invalid` in a
//! file is refused.

use std::collections::HashSet;
use std::path::PathBuf;

use belfry_core::hook::{self, Proof};
use belfry_core::{AgentDefinition, AgentSpec, ScheduleDefinition};
use serde_json::{Map, Value};

use crate::context::Context;
use crate::export;
use crate::keys::{AGENT, KINDS, SCHEDULE, Shape};
use crate::load::read_agent;
use crate::problem::{Errors, Problem, Span};
use crate::reference;
use crate::schedule::{self, Inherited};
use crate::tree::{self, Bounds, Data, Key, Node};

/// Keys that are written as they are stored.
const VERBATIM: [&str; 4] = ["prompt", "payload", "webhook", "chat"];

/// What was written.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// A map in YAML, or a JSON object.
    Text(&'a str),
    /// `key=value`, one by one. Only `payload`, `webhook` and `chat` are read as YAML or JSON, and `not_on` may be a list
    /// with commas: everything else needs no quotes.
    Pairs(&'a [(String, String)]),
}

/// Where a fragment comes from, and what it goes into.
#[derive(Debug, Clone)]
pub struct About<'a> {
    /// `agent/schedule`; of an agent, its name.
    pub name: &'a str,
    /// What errors call the input: `command line`, `request`.
    pub origin: &'a str,
    /// What it takes over where it is silent.
    pub inherited: Inherited<'a>,
    /// The schedule's agent, so that warnings can look at it.
    pub agent: Option<&'a AgentDefinition>,
}

/// What a fragment says.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed<T> {
    /// The definition; it compiles.
    pub definition: T,
    /// What works, but hardly as meant.
    pub warnings: Vec<Problem>,
}

/// Maximum size of a schedule in memory, as [`Node::bytes`] counts it.
const SCHEDULE_BYTES_MAX: usize = 256 << 10;
/// Maximum number of pairs of a key and its value. There are fewer keys.
const PAIRS_MAX: usize = 100;
const TOO_LARGE: &str = "a schedule takes at most 256 KiB, with 64 bytes more for each of its values";
const SMALLER: &str = "keep large data in a file that the program reads, and name the file here";

/// Reads a schedule. With a `base`, keys that are not written stay as they are there, and a key that is written as
/// `null` goes back to its default.
pub fn parse_schedule(
    input: Input<'_>,
    base: Option<&ScheduleDefinition>,
    about: &About<'_>,
) -> Result<Parsed<ScheduleDefinition>, Errors> {
    let nothing = |_: &str| None;
    let mut context = Context::new(&nothing);
    context.bounds = Bounds::SCHEDULE;
    let node = match input {
        Input::Text(text) => context.parse(about.origin.to_owned(), PathBuf::from("/"), text.to_owned()),
        Input::Pairs(pairs) => Some(read_pairs(&mut context, about.origin, pairs)),
    };
    let Some(node) = node else { return Err(refuse(context)) };
    let place = Span { file: node.span.file, start: node.span.start, end: node.span.start };
    check_names(&mut context, about.name, place);
    let written = without_nulls(&node);
    context.check_map(about.name, &written, SCHEDULE);
    if context.has_errors() {
        return Err(refuse(context));
    }
    let (node, stored_bytes) = match base {
        Some(base) => patched(&mut context, base, &node),
        None => (written, 0),
    };
    // One that was stored as it was written may be larger as it is exported.
    let grows = base.is_none() || node.bytes() > stored_bytes;
    if grows && is_too_large(&mut context, &node, place) {
        return Err(refuse(context));
    }
    let definition = schedule::read(&mut context, &node, about.name, place, &about.inherited);
    if let (Some(definition), Some(agent)) = (&definition, about.agent) {
        schedule::warn(&mut context, &node, about.name, definition, agent);
    }
    finish(context, definition)
}

/// Reads an agent, with its schedules if it has any. There is no file, so `cwd` must be absolute.
pub fn parse_agent(text: &str, about: &About<'_>) -> Result<Parsed<AgentSpec>, Errors> {
    let nothing = |_: &str| None;
    let mut context = Context::new(&nothing);
    context.bounds = Bounds::FRAGMENT;
    let node = context.parse(about.origin.to_owned(), PathBuf::from("/"), text.to_owned());
    let Some(node) = node else { return Err(refuse(context)) };
    let place = Span { file: node.span.file, start: node.span.start, end: node.span.start };
    check_names(&mut context, about.name, place);
    for (key, schedule) in node.get("schedules").iter().flat_map(|schedules| schedules.entries()) {
        is_too_large(&mut context, schedule, key.span);
    }
    context.check(about.name, &node, &Shape::Map(AGENT));
    if let Some(cwd) = node.get("cwd").filter(|cwd| cwd.text().is_some_and(|text| !text.starts_with('/'))) {
        context.wrong("cwd", cwd, "an absolute path");
    }
    let key = Key { text: about.name.to_owned(), span: place };
    let agent = read_agent(&mut context, &key, &node, None, &about.inherited, None);
    finish(context, Some(agent))
}

/// Whether a schedule is larger than one over HTTP or of the command line may be, and if so, says it.
fn is_too_large(context: &mut Context<'_>, schedule: &Node, place: Span) -> bool {
    let is_too_large = schedule.bytes() > SCHEDULE_BYTES_MAX;
    if is_too_large {
        context.error(place, TOO_LARGE);
        context.way_out(SMALLER);
    }
    is_too_large
}

fn finish<T>(context: Context<'_>, definition: Option<T>) -> Result<Parsed<T>, Errors> {
    let (invalid, warnings) = context.finish()?;
    match definition {
        Some(definition) if invalid.is_empty() => Ok(Parsed { definition, warnings }),
        _ => Err(Errors { problems: invalid }),
    }
}

fn refuse(context: Context<'_>) -> Errors {
    context.finish().err().unwrap_or(Errors { problems: Vec::new() })
}

fn check_names(context: &mut Context<'_>, name: &str, place: Span) {
    match name.split_once('/') {
        Some((agent, schedule)) => {
            context.check_name("agent", agent, place);
            context.check_name("schedule", schedule, place);
        }
        None => context.check_name("agent", name, place),
    }
}

/// A key without a value is a key that is not written; but for what makes it tick, where that is a mistake.
fn without_nulls(node: &Node) -> Node {
    let mut node = node.clone();
    if let Data::Map(entries) = &mut node.data {
        entries.retain(|(key, value)| KINDS.contains(&key.text.as_str()) || !value.is_null());
    }
    node
}

/// The schedule as it is, with the written keys over it.
/// The keys that are written over those that are stored, and the size of the stored ones.
fn patched(context: &mut Context<'_>, base: &ScheduleDefinition, over: &Node) -> (Node, usize) {
    let text = export::schedule(base);
    // A stored one may be larger than a new one may be, and this may make it smaller.
    let bounds = std::mem::replace(&mut context.bounds, Bounds::FILE);
    let below = context.parse("the schedule as it is".into(), PathBuf::from("/"), text);
    context.bounds = bounds;
    let Some(below) = below else { return (over.clone(), 0) };
    let another_kind = over.entries().iter().any(|(key, _)| KINDS.contains(&key.text.as_str()));
    let kept = below.entries().iter().filter(|(key, _)| {
        over.entry(&key.text).is_none() && !(another_kind && KINDS.contains(&key.text.as_str()))
    });
    // What was stored is stored escaped, for files; here nothing is filled in.
    let kept = kept.cloned().map(|(key, mut node)| {
        if !VERBATIM.contains(&key.text.as_str()) {
            context.expand(&mut node, &|_| false);
        }
        (key, node)
    });
    let mut entries: Vec<_> = kept.collect();
    entries.extend(without_nulls(over).entries().iter().cloned());
    (Node { span: over.span, data: Data::Map(entries) }, below.bytes())
}

/// The keys of an agent that differ from the defaults, as they could be written; its schedules are not among them. References
/// stay what they are.
pub fn agent_keys(definition: &AgentDefinition) -> Map<String, Value> {
    let nothing = |_: &str| None;
    let mut context = Context::new(&nothing);
    let text = export::agent(definition);
    let node = context.parse(String::new(), PathBuf::from("/"), text);
    let entries = node.iter().flat_map(|node| node.entries());
    entries.filter_map(|(key, node)| Some((key.text.clone(), node.json().ok()?))).collect()
}

/// The keys of a schedule that differ from the defaults, as they could be written. A secret that is written out is not shown.
pub fn schedule_keys(definition: &ScheduleDefinition) -> Map<String, Value> {
    let nothing = |_: &str| None;
    let mut context = Context::new(&nothing);
    let text = export::schedule(definition);
    let Some(node) = context.parse(String::new(), PathBuf::from("/"), text) else { return Map::new() };
    let mut keys = Map::new();
    for (key, node) in node.entries() {
        let mut node = node.clone();
        if !VERBATIM.contains(&key.text.as_str()) {
            context.expand(&mut node, &|_| false);
        }
        if let Ok(mut value) = node.json() {
            if key.text == "webhook" {
                hide_secrets(&mut value);
            }
            keys.insert(key.text.clone(), value);
        }
    }
    keys
}

fn hide_secrets(webhook: &mut Value) {
    // The word `none` is no secret.
    if hook::proof(webhook) == Ok(Proof::Token) {
        return;
    }
    let hide = |secret: &mut Value| {
        if let Some(text) = secret.as_str() {
            *secret = Value::from(reference::hide_written(text));
        }
    };
    for key in ["secret", "secrets"] {
        match webhook.get_mut(key) {
            Some(Value::Array(secrets)) => secrets.iter_mut().for_each(hide),
            Some(secret) => hide(secret),
            None => {}
        }
    }
}

/// Reads pairs as one text with a line for each, so that errors can show them.
fn read_pairs(context: &mut Context<'_>, origin: &str, pairs: &[(String, String)]) -> Node {
    let file = context.sources.len();
    let lines: Vec<_> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let text = lines.join("\n");
    context.add_source(origin.to_owned(), text);
    let mut entries: Vec<(Key, Node)> = Vec::new();
    let mut seen = HashSet::new();
    let mut at = 0;
    if pairs.len() > PAIRS_MAX {
        context.error(Span { file, start: 0, end: 0 }, format!("at most {PAIRS_MAX} keys can be written"));
        return Node { span: Span { file, start: 0, end: 0 }, data: Data::Map(entries) };
    }
    for (key, value) in pairs {
        let span = Span { file, start: at, end: at + key.len() };
        let start = span.end + 1;
        at = start + value.len() + 1;
        if !seen.insert(key) {
            context.error(span, format!("the key `{key}` is written twice"));
            continue;
        }
        let node = match key.as_str() {
            "payload" | "webhook" | "chat" => structured(context, file, start, value),
            "not_on" if value.trim_start().starts_with('[') => structured(context, file, start, value),
            "not_on" => days(file, start, value),
            _ => {
                let span = Span { file, start, end: start + value.len() };
                if value.contains('\0') {
                    context.error(span, "a value holds a NUL character");
                }
                Node::scalar(span, value.clone(), true)
            }
        };
        entries.push((Key { text: key.clone(), span }, node));
    }
    Node { span: Span { file, start: 0, end: 0 }, data: Data::Map(entries) }
}

fn structured(context: &mut Context<'_>, file: usize, start: usize, value: &str) -> Node {
    let (node, flaws) = tree::parse(file, value, context.bounds);
    for mut flaw in flaws {
        flaw.span = moved(flaw.span, start);
        flaw.first = flaw.first.map(|span| moved(span, start));
        context.flaw(flaw);
    }
    let empty = Node::scalar(Span { file, start, end: start }, "", true);
    let mut node = node.unwrap_or(empty.clone());
    move_all(&mut node, start);
    node
}

fn moved(span: Span, by: usize) -> Span {
    Span { start: span.start + by, end: span.end + by, ..span }
}

fn move_all(node: &mut Node, by: usize) {
    node.span = moved(node.span, by);
    match &mut node.data {
        Data::Scalar { .. } => {}
        Data::List(items) => items.iter_mut().for_each(|item| move_all(item, by)),
        Data::Map(entries) => {
            for (key, value) in entries {
                key.span = moved(key.span, by);
                move_all(value, by);
            }
        }
    }
}

fn days(file: usize, start: usize, value: &str) -> Node {
    let mut at = start;
    let mut items = Vec::new();
    for day in value.split(',') {
        let blank = day.len() - day.trim_start().len();
        let day_at = at + blank;
        if !day.trim().is_empty() {
            let span = Span { file, start: day_at, end: day_at + day.trim().len() };
            items.push(Node::scalar(span, day.trim(), true));
        }
        at += day.len() + 1;
    }
    Node { span: Span { file, start, end: start + value.len() }, data: Data::List(items) }
}
