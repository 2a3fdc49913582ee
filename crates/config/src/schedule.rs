//! A schedule, from a tree that was checked; whether it compiles; and whether its policies can ever act.

use belfry_core::ScheduleDefinition;
use belfry_core::definition::{AnchorName, CatchUp, IfRunning, Options, Scope, When};
use belfry_core::hook::{self, Proof};
use belfry_core::session::{message_key_in, message_key_words};
use belfry_core::template::Template;
use belfry_time::{
    Cron, ErrorKind, Every, Jitter, Kind, Timestamp, Window, Zone, parse_duration, parse_instant,
};
use serde_json::{Map, Value};

use crate::agent::{object, prompt};
use crate::context::Context;
use crate::keys::KINDS;
use crate::problem::{Quoted, Severity, Span};
use crate::reference;
use crate::settings::{duration, number, set};
use crate::tree::{Data, Node};
use crate::value;

/// What a schedule takes over where it is silent.
#[derive(Debug, Clone)]
pub struct Inherited<'a> {
    /// The zone that the file names.
    pub timezone: Option<&'a str>,
    /// The host's zone, an IANA name.
    pub host_timezone: &'a str,
    /// `engine.late_after`.
    pub late_after_ms: Option<u64>,
}

/// Reads a schedule; none where it does not say what makes it tick. `name` is `agent/schedule`, `place` its name in
/// the file. A schedule that does not compile is given back all the same.
pub(crate) fn read(
    context: &mut Context<'_>,
    node: &Node,
    name: &str,
    place: Span,
    inherited: &Inherited<'_>,
) -> Option<ScheduleDefinition> {
    let when = kind(context, node, name, place)?;
    let named = node.get("timezone").filter(|node| !node.is_word("inherited")).and_then(Node::text);
    let named = named.or(inherited.timezone);
    // A local time of the host is not a time: on another host it is another one. So it stays without a zone, and wrong.
    let homeless = matches!(&when, When::At(at) if named.is_none() && parse_instant(at, None).is_err());
    let timezone = named.unwrap_or(inherited.host_timezone);
    let mut options = Options { timezone: (!homeless).then(|| timezone.to_owned()), ..options(node) };
    if node.get("late_after").is_none() {
        options.late_after_ms = inherited.late_after_ms;
    }
    let definition = ScheduleDefinition { when, options };
    prompt_parses(context, node, &definition, name);
    compiles(context, node, &definition, name, place);
    Some(definition)
}

/// Exactly one of `every`, `cron`, `at`, `after`, `webhook`, `chat`.
fn kind(context: &mut Context<'_>, node: &Node, name: &str, place: Span) -> Option<When> {
    // `chat:` with nothing behind it is a chat with its defaults; `cron:` with nothing is a mistake of its own.
    let kinds = node.entries().iter().filter(|(key, _)| KINDS.contains(&key.text.as_str()));
    let written: Vec<_> = kinds.collect();
    if let [(first, _), (second, _), ..] = written.as_slice() {
        let message =
            format!("the schedule {} has both `{}` and `{}`", Quoted(name), first.text, second.text);
        let (first, second) = (first.span, second.span);
        context.error(second, message).help(format!("keep exactly one of {}", list(KINDS)));
        context.also(first, "the first");
        return None;
    }
    let Some((key, value)) = written.first() else {
        if matches!(node.data, Data::Map(_)) || node.is_null() {
            let message = format!("the schedule {} does not say when it runs", Quoted(name));
            context.error(place, message).help(format!("add exactly one of {}", list(KINDS)));
        }
        return None;
    };
    let text = || value.text().map(str::to_owned);
    match key.text.as_str() {
        "every" => text().map(When::Every),
        "cron" => text().map(When::Cron),
        "at" => text().map(When::At),
        "after" => text().map(When::After),
        "webhook" => webhook(context, value, name, key.span),
        _ => Some(When::Chat(Value::Object(object(Some(value))))),
    }
}

/// A webhook whose secrets are text. What is wrong with a secret is said without showing it.
fn webhook(context: &mut Context<'_>, node: &Node, name: &str, place: Span) -> Option<When> {
    let settings = match node.json() {
        Ok(Value::Object(map)) => Value::Object(map),
        Ok(_) => Value::Object(Map::new()),
        Err(_) => {
            let message = format!("{name}: the webhook holds a number that is out of range");
            context.error(place, message).help(QUOTE_SECRET);
            return None;
        }
    };
    if let Err(flaw) = hook::proof(&settings) {
        let written = flaw.key.and_then(|key| node.entry(key)).map(|(key, _)| key.span);
        let help = if written.is_some() { QUOTE_SECRET } else { ADD_SECRET };
        context.error(written.unwrap_or(place), format!("{name}: {}", flaw.message)).help(help);
        return None;
    }
    Some(When::Webhook(settings))
}

const QUOTE_SECRET: &str = "write a reference, `secret: \"${NAME}\"`, or put the text into quotes; `secret: none` asks for a token instead";
const ADD_SECRET: &str =
    "add `secret: \"${NAME}\"`; or `secret: none`, then a request needs a token with scope trigger";

fn list(keys: &[&str]) -> String {
    let keys: Vec<_> = keys.iter().map(|key| format!("`{key}`")).collect();
    keys.join(", ")
}

fn options(node: &Node) -> Options {
    let mut o = Options::default();
    let word = |key: &str| node.get(key).and_then(Node::text);
    let optional = |key: &str| node.get(key).filter(|node| !node.is_word("none")).and_then(Node::text);
    o.anchor = match word("anchor") {
        Some("start") => AnchorName::Start,
        Some("slot") => AnchorName::Slot,
        _ => AnchorName::Completion,
    };
    // No phase and a phase of nothing are the same timing.
    let zero = |phase: &&str| parse_duration(phase).is_ok_and(|phase| phase.is_zero());
    o.phase = word("phase").filter(|phase| !zero(phase)).map(str::to_owned);
    o.jitter = optional("jitter").map(str::to_owned);
    o.only_between = optional("only_between").map(str::to_owned);
    o.not_on = days(node).iter().filter_map(|day| day.text().map(str::to_owned)).collect();
    o.dst_gap_skip = word("dst_gap") == Some("skip");
    o.dst_fold_both = word("dst_fold") == Some("both");
    set(&mut o.enabled, word("enabled").and_then(value::flag));
    o.catch_up = word("catch_up").and_then(|word| match word {
        "skip" => Some(CatchUp::Skip),
        "run_once" => Some(CatchUp::RunOnce),
        "run_all" => Some(CatchUp::RunAll),
        _ => None,
    });
    set(&mut o.catch_up_limit, node.get("catch_up_limit").and_then(number));
    o.late_after_ms = node.get("late_after").and_then(duration);
    o.if_running = match word("if_running") {
        Some("queue") => IfRunning::Queue,
        Some("cancel") => IfRunning::Cancel,
        Some("allow") => IfRunning::Allow,
        _ => IfRunning::Skip,
    };
    o.overlap = match word("overlap") {
        Some("command") => Scope::Command,
        Some("agent") => Scope::Agent,
        _ => Scope::Schedule,
    };
    set(&mut o.max_pending, node.get("max_pending").and_then(number));
    set(&mut o.command, word("command").map(str::to_owned));
    o.prompt = prompt(node, "inherited");
    o.payload = object(node.get("payload"));
    o.lane =
        node.get("lane").filter(|lane| !lane.is_word("inherited")).and_then(Node::text).map(str::to_owned);
    set(&mut o.priority, node.get("priority").and_then(number));
    set(&mut o.delete_after_run, word("delete_after_run").and_then(value::flag));
    o
}

/// `not_on`, as a list also where it is one day.
fn days(node: &Node) -> &[Node] {
    match node.get("not_on") {
        Some(Node { data: Data::List(items), .. }) => items,
        Some(day) => std::slice::from_ref(day),
        None => &[],
    }
}

/// Reports a prompt that is no template.
fn prompt_parses(context: &mut Context<'_>, node: &Node, definition: &ScheduleDefinition, name: &str) {
    let (Some(prompt), Some(node)) = (&definition.options.prompt, node.get("prompt")) else { return };
    if let Err(error) = Template::parse_prompt(prompt) {
        let span = context.within(node, error.range);
        let message = format!("{name}: `prompt`: {}{}", error.message, error.found);
        let problem = context.report(Severity::Invalid, Some(span), message);
        problem.schedule = Some(name.to_owned());
        problem.help = error.help;
    }
}

/// Reports what keeps a schedule from compiling: each part by itself, then the parts together. The words are those
/// with which the store will call it invalid.
fn compiles(
    context: &mut Context<'_>,
    node: &Node,
    definition: &ScheduleDefinition,
    name: &str,
    place: Span,
) {
    let mut is_wrong = false;
    let mut part = |node: Option<&Node>, result: Result<(), belfry_time::Error>| {
        if let Err(error) = result {
            is_wrong = true;
            let span = node.map_or(place, |node| context.inside(node, &error));
            invalid(context, span, name, &error);
        }
    };
    let o = &definition.options;
    let zone = o.timezone.as_deref().map(Zone::get);
    if let Some(Err(error)) = &zone {
        part(node.get("timezone"), Err(error.clone()));
    }
    let written = |key: &str| node.get(key);
    match &definition.when {
        When::Chat(_) => {
            if let Some(key) = message_key_in(&o.payload) {
                let span = node.get("payload").and_then(|node| node.get(key)).map_or(place, |node| node.span);
                let message = format!("{name}: {}", message_key_words(key));
                context.report(Severity::Invalid, Some(span), message).schedule = Some(name.to_owned());
            }
            return;
        }
        When::Webhook(_) => return,
        When::Every(text) => {
            part(written("every"), Every::parse(text).map(|_| ()));
            if let (AnchorName::Slot, Some(phase)) = (o.anchor, &o.phase) {
                part(written("phase"), parse_duration(phase).map(|_| ()));
            }
        }
        When::Cron(text) => part(written("cron"), Cron::parse(text).map(|_| ())),
        When::At(text) => {
            let zone = zone.and_then(Result::ok);
            part(written("at"), parse_instant(text, zone.as_ref()).map(|_| ()));
        }
        When::After(text) => part(written("after"), parse_duration(text).map(|_| ())),
    }
    for day in days(node) {
        part(Some(day), Window::ALWAYS.not_on(day.text()).map(|_| ()));
    }
    if let Some(between) = &o.only_between {
        part(written("only_between"), Window::ALWAYS.only_between(between).map(|_| ()));
    }
    if let Some(jitter) = &o.jitter {
        part(written("jitter"), Jitter::parse(jitter).map(|_| ()));
    }
    if is_wrong {
        return;
    }
    if let Err(error) = definition.timing(name) {
        let key = match error.kind() {
            ErrorKind::Jitter => "jitter",
            ErrorKind::Phase => "phase",
            ErrorKind::NeverAllowed if node.get("only_between").is_some() => "only_between",
            ErrorKind::NeverAllowed => "not_on",
            _ => "",
        };
        let span = node.get(key).map_or(place, |node| node.span);
        invalid(context, span, name, &error);
    }
}

fn invalid(context: &mut Context<'_>, span: Span, name: &str, error: &belfry_time::Error) {
    let problem = context.report(Severity::Invalid, Some(span), format!("{name}: {error}"));
    problem.schedule = Some(name.to_owned());
}

/// The time of a one-shot that has passed, and what time it is, in the schedule's zone.
fn past(definition: &ScheduleDefinition, name: &str, now: Timestamp) -> Option<(String, String)> {
    let timing = definition.timing(name).ok()??;
    match timing.kind() {
        Kind::At(at) if *at < now => Some((timing.zone().rfc3339(*at), timing.zone().rfc3339(now))),
        _ => None,
    }
}

/// Points at policies that can never act.
pub(crate) fn warn(
    context: &mut Context<'_>,
    node: &Node,
    name: &str,
    definition: &ScheduleDefinition,
    agent: &belfry_core::AgentDefinition,
) {
    let o = &definition.options;
    let when = &definition.when;
    let ticks = !matches!(when, When::Webhook(_) | When::Chat(_));
    let one_shot = matches!(when, When::At(_) | When::After(_));
    if let Some((at, now)) = context.now.and_then(|now| past(definition, name, now)) {
        let message =
            format!("{name}: its time {at} has passed, it is {now}: it does not run, unless it has before");
        let place = node.get("at").map(|at| at.span);
        let problem = context.report(Severity::Warning, place, message);
        problem.schedule = Some(name.to_owned());
        problem.help("use a later time, or remove it");
    }
    let mut idle = |key: &str, why: &str| {
        if let Some((key, _)) = node.entry(key) {
            let message = format!("{name}: `{}` has no effect: {why}", key.text);
            context.report(Severity::Warning, Some(key.span), message).schedule = Some(name.to_owned());
        }
    };
    if !ticks {
        let keys = [
            "anchor",
            "phase",
            "jitter",
            "only_between",
            "not_on",
            "dst_gap",
            "dst_fold",
            "catch_up",
            "catch_up_limit",
            "late_after",
        ];
        for key in keys {
            idle(key, "webhooks and chats have no ticks");
        }
    } else {
        if !matches!(when, When::Every(_)) {
            idle("anchor", "it says from where `every` counts");
        }
        if !matches!(when, When::Every(_)) || o.anchor != AnchorName::Slot {
            idle("phase", "it moves the grid of `anchor: slot`");
        }
        if !matches!(when, When::Cron(_)) {
            idle("dst_gap", "it is about the fixed times of `cron`");
            idle("dst_fold", "it is about the fixed times of `cron`");
        }
        if o.catch_up != Some(CatchUp::RunAll) {
            idle("catch_up_limit", "only `catch_up: run_all` makes more than one run");
        }
    }
    if !one_shot && o.delete_after_run {
        idle("delete_after_run", "only `at` and `after` end with a run");
    }
    if o.if_running != IfRunning::Queue {
        idle("max_pending", "only `if_running: queue` lets runs wait");
    }
    if o.if_running == IfRunning::Allow {
        idle("overlap", "`if_running: allow` looks at no other run");
        if agent.max_concurrent == Some(1) && !matches!(when, When::Chat(_)) {
            idle("if_running", "the agent's `max_concurrent` is 1, so a second run waits for the first");
        }
    }
    let commands = &agent.work.commands;
    if !commands.is_empty()
        && !commands.contains_key(&o.command)
        && !context.is_full(Severity::Warning)
        && let Some(command) = node.get("command").filter(|_| o.command != "poll")
    {
        const SHOWN: usize = 20;
        let known: Vec<_> = commands.keys().map(String::as_str).take(SHOWN).collect();
        let message = format!("{name}: the agent has no command {}", Quoted(&o.command));
        let more = if known.len() < commands.len() { ", …" } else { "" };
        let help = match context.nearest(&o.command, commands.keys().map(String::as_str)) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("its commands are {}{more}; the agent's own program runs", list(&known)),
        };
        let problem = context.report(Severity::Warning, Some(command.span), message);
        problem.help(help).schedule = Some(name.to_owned());
    }
    if let When::Webhook(settings) = when {
        warn_secrets(context, node, name, settings);
    }
}

/// Points at secrets that are stored as they are, and at secrets that two webhooks share.
fn warn_secrets(context: &mut Context<'_>, node: &Node, name: &str, settings: &Value) {
    let (Some((key, _)), Ok(Proof::Secrets(secrets))) = (node.entry("webhook"), hook::proof(settings)) else {
        return;
    };
    let place = key.span;
    for secret in secrets {
        if reference::is_written_out(secret) {
            let message = format!("{name}: a secret is written in the file, and will be stored as it is");
            let problem = context.report(Severity::Warning, Some(place), message);
            problem
                .help("use a reference, without a default or other text: `secret: \"${NAME}\"`")
                .schedule = Some(name.to_owned());
        }
        let first = context.secrets.entry(secret.to_owned()).or_insert_with(|| name.to_owned());
        if first != name {
            let message =
                format!("{name} and {first} have the same secret: a request to one is good for the other");
            let problem = context.report(Severity::Warning, Some(place), message);
            problem.help("give each webhook a secret of its own").schedule = Some(name.to_owned());
        }
    }
}
