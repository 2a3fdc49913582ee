//! An agent, from a tree that was checked: defaults merged under it, and every value where the store wants it.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use belfry_core::AgentDefinition;
use belfry_core::definition::{Breaker, Budget};
use belfry_core::template::Template;
use belfry_core::work::{Action, Stdin, is_secret_name};
use serde_json::{Map, Value};

use crate::context::Context;
use crate::file;
use crate::keys::ACTIONS;
use crate::problem::{Quoted, Severity, Span};
use crate::reference;
use crate::settings::{duration, number, set, texts};
use crate::tree::{Data, Key, Node};

/// An agent's keys but its schedules, over the defaults. What says which program starts is one choice, and is not mixed.
pub(crate) fn merged(defaults: Option<&Node>, agent: &Node) -> Node {
    let over = without(agent, |key| key == "schedules");
    let Some(defaults) = defaults else { return over };
    let chosen = ACTIONS.iter().any(|action| agent.get(action).is_some());
    let under = without(defaults, |key| key == "schedules" || chosen && ACTIONS.contains(&key));
    merge(&under, &over)
}

/// A copy without some of the keys.
fn without(node: &Node, is_out: impl Fn(&str) -> bool) -> Node {
    match &node.data {
        Data::Map(entries) => {
            let kept = entries.iter().filter(|(key, _)| !is_out(&key.text));
            Node { span: node.span, data: Data::Map(kept.cloned().collect()) }
        }
        _ => node.clone(),
    }
}

fn merge(under: &Node, over: &Node) -> Node {
    match (&under.data, &over.data) {
        (Data::Map(low), Data::Map(high)) => {
            let mut entries: Vec<(Key, Node)> = Vec::with_capacity(low.len() + high.len());
            let below: HashMap<&str, &Node> =
                low.iter().map(|(key, node)| (key.text.as_str(), node)).collect();
            for (key, value) in high {
                // A map that is left empty takes everything from below.
                let below = below.get(key.text.as_str());
                let value = below.map_or_else(|| value.clone(), |below| merge(below, value));
                entries.push((key.clone(), value));
            }
            let above: HashSet<&str> = high.iter().map(|(key, _)| key.text.as_str()).collect();
            let missing = low.iter().filter(|(key, _)| !above.contains(key.text.as_str()));
            entries.extend(missing.cloned());
            Node { span: over.span, data: Data::Map(entries) }
        }
        (Data::Map(_), _) if over.is_null() => under.clone(),
        _ => over.clone(),
    }
}

/// Reads an agent. `place` is its name in the file.
pub(crate) fn read(context: &mut Context<'_>, node: &Node, name: &str, place: Span) -> AgentDefinition {
    let mut agent = AgentDefinition::default();
    let work = &mut agent.work;
    let handler = context.handlers.contains(&name) && !ACTIONS.iter().any(|key| node.get(key).is_some());
    if !handler {
        work.action = action(context, node, &format!("the agent {}", Quoted(name)), ACTIONS, place);
    }
    for (command, node) in node.get("commands").map(Node::entries).unwrap_or_default() {
        let what = format!("the command {}", Quoted(&command.text));
        let action = match &node.data {
            Data::List(_) => Action::Run(argv(node)),
            _ => action(context, node, &what, &["run", "shell"], command.span),
        };
        work.commands.insert(command.text.clone(), action);
    }
    work.prompt = prompt(node, "none");
    if let (Some(prompt), Some(node)) = (&work.prompt, node.get("prompt"))
        && let Err(error) = Template::parse_prompt(prompt)
    {
        context.template_error("prompt", node, &error);
    }
    work.payload = object(node.get("payload"));
    work.stdin = match node.get("stdin").and_then(Node::text) {
        Some("prompt") => Stdin::Prompt,
        Some("payload") => Stdin::Payload,
        _ => Stdin::None,
    };
    work.cwd = node.get("cwd").and_then(|node| {
        let folder = context.folders.get(node.span.file)?;
        Some(file::absolute(folder, Path::new(node.text()?)).display().to_string())
    });
    let env = node.get("env").map(Node::entries).unwrap_or_default();
    work.env = env.iter().filter_map(|(key, value)| Some((key.text.clone(), scalar(value)?))).collect();
    work.env_pass = texts(node.get("env_pass"));
    set(&mut work.timeout_ms, node.entry("timeout").map(|(_, node)| duration(node)));
    set(&mut work.grace_ms, node.get("grace").and_then(duration));
    set(
        &mut work.output_bytes,
        node.get("output").and_then(Node::text).and_then(belfry_core::size::parse_size),
    );
    let limit = node.entry("max_concurrent").map(|(_, node)| number(node));
    agent.limits_sessions = limit.is_some();
    set(&mut agent.max_concurrent, limit);
    if let Some(retry) = node.get("retry") {
        set(&mut agent.retry.max, retry.get("max").and_then(number));
        set(&mut agent.retry.base_ms, retry.get("base").and_then(duration));
        set(&mut agent.retry.max_delay_ms, retry.get("max_delay").and_then(duration));
        set(&mut agent.work.no_retry_codes, retry.get("no_retry_codes").map(codes));
        set(&mut agent.work.ok_codes, retry.get("ok_codes").map(codes));
        agent.budget = retry.get("budget").and_then(|budget| {
            Some(Budget { max: number(budget.get("max")?)?, period_ms: duration(budget.get("period")?)? })
        });
    }
    agent.breaker = node.get("breaker").and_then(|breaker| {
        let threshold = number(breaker.get("threshold")?)?;
        Some(Breaker { threshold, reset_after_ms: duration(breaker.get("reset_after")?)? })
    });
    set(&mut agent.lane, node.get("lane").and_then(Node::text).map(str::to_owned));
    agent.needs = texts(node.get("needs"));
    agent
}

/// Exactly one thing to start.
fn action(context: &mut Context<'_>, node: &Node, what: &str, choices: &[&str], place: Span) -> Action {
    let written: Vec<_> = node
        .entries()
        .iter()
        .filter(|(key, value)| choices.contains(&key.text.as_str()) && !is_blank(value))
        .collect();
    if let [(first, _), (second, _), ..] = written.as_slice() {
        let message = format!("{what} has both `{}` and `{}`", first.text, second.text);
        let (first, second) = (first.span, second.span);
        context.error(second, message).help("keep exactly one of `run` and `shell`");
        context.also(first, "the first");
    }
    match written.first() {
        Some((key, value)) if key.text == "run" => Action::Run(argv(value)),
        Some((key, value)) if key.text == "shell" => Action::Shell(scalar(value).unwrap_or_default()),
        Some(_) => Action::Handler,
        None => {
            // Wrong in another way, and said so.
            if matches!(node.data, Data::Map(_)) || node.is_null() {
                context
                    .error(place, format!("{what} does not say what to run"))
                    .help("add `run: [\"program\", \"argument\"]`, or `shell: \"a line for the shell\"`");
            }
            Action::Handler
        }
    }
}

fn is_blank(node: &Node) -> bool {
    node.is_null() || node.text().is_some_and(|text| text.trim().is_empty())
}

fn argv(node: &Node) -> Vec<String> {
    let texts = node.items().iter().filter_map(scalar);
    texts.map(|text| reference::unescape_literal(&text)).collect()
}

/// The text of a scalar as it was written: also of an empty one, and of `null`.
pub(crate) fn scalar(node: &Node) -> Option<String> {
    match &node.data {
        Data::Scalar { text, .. } => Some(text.clone()),
        _ => None,
    }
}

/// A prompt, unless it is `absent` in plain letters.
pub(crate) fn prompt(node: &Node, absent: &str) -> Option<String> {
    let prompt = node.get("prompt").filter(|prompt| !prompt.is_plain_word(absent))?;
    prompt.text().map(reference::unescape_literal)
}

pub(crate) fn object(node: Option<&Node>) -> Map<String, Value> {
    match node.and_then(|node| node.json().ok()) {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn codes(node: &Node) -> Vec<i32> {
    node.items().iter().filter_map(number).collect()
}

/// Points at policies that can never act, and at secrets that are written out.
pub(crate) fn warn(context: &mut Context<'_>, node: &Node, name: &str, agent: &AgentDefinition) {
    for (key, value) in node.get("env").map(Node::entries).unwrap_or_default() {
        let is_written = value.text().is_some_and(reference::env_is_written_out);
        if is_written && is_secret_name(&key.text) {
            let message = format!("`{}` looks like a secret, and is stored as it is written here", key.text);
            let problem = context.report(Severity::Warning, Some(key.span), message);
            problem.help(format!(
                "use a reference: `{0}: \"${{{0}}}\"`; it is filled in when an attempt starts",
                key.text
            ));
        }
    }
    let Some(retry) = node.get("retry") else { return };
    let mut idle = |node: &Node, why: &str| {
        context.report(Severity::Warning, Some(node.span), format!("{name}: {why}"));
    };
    if let Some(base) = retry.get("base")
        && agent.retry.base_ms > agent.retry.max_delay_ms
    {
        idle(base, "`retry.base` is longer than `retry.max_delay`, which is used instead");
    }
    if let Some(codes) = retry.get("no_retry_codes") {
        let ok: HashSet<i32> = agent.work.ok_codes.iter().copied().collect();
        let both = codes.items().iter().find(|code| number(code).is_some_and(|code| ok.contains(&code)));
        if let Some(both) = both {
            idle(both, "this code is also in `retry.ok_codes`: it means success and is never retried");
        }
    }
}
