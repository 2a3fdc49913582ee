//! Definitions back to YAML that loads to the same definitions. Only what differs from the defaults is written.

use std::fmt::Write;

use belfry_core::definition::{AnchorName, CatchUp, IfRunning, Options, Scope, When, handler_of};
use belfry_core::display::is_unsafe;
use belfry_core::size::format_size;
use belfry_core::work::{Action, Stdin, Work};
use belfry_core::{AgentDefinition, AgentSpec, ScheduleDefinition};
use serde_json::{Map, Value, json};

use crate::reference::escape_literal;
use crate::value::format_ms;

/// Writes agents with their schedules as a file.
///
/// An agent that is a Rust handler is written without a program: a file cannot name one.
pub fn export(agents: &[AgentSpec]) -> String {
    let agents = agents.iter().map(|agent| (agent.name.clone(), agent_map(agent)));
    let file = Out::Map(vec![("agents".into(), Out::Map(agents.collect()))]);
    let mut text = String::new();
    file.write(0, &mut text);
    text
}

/// Writes one schedule, as it stands under its name.
pub(crate) fn schedule(definition: &ScheduleDefinition) -> String {
    let mut text = String::new();
    schedule_map(definition).write(0, &mut text);
    text
}

/// Writes one agent without its schedules, as it stands under its name.
pub(crate) fn agent(definition: &AgentDefinition) -> String {
    let spec = AgentSpec { name: String::new(), definition: definition.clone(), schedules: Vec::new() };
    let mut text = String::new();
    agent_map(&spec).write(0, &mut text);
    text
}

/// A value on its way out.
enum Out {
    /// Written as it is.
    Word(String),
    /// Written so that it is read as text.
    Text(String),
    Json(Value),
    List(Vec<Out>),
    Map(Vec<(String, Out)>),
}

fn words<T: ToString>(items: &[T]) -> Out {
    Out::List(items.iter().map(|item| Out::Word(item.to_string())).collect())
}

fn texts(items: &[String]) -> Out {
    Out::List(items.iter().map(|item| Out::Text(item.clone())).collect())
}

fn object(map: &Map<String, Value>) -> Out {
    Out::Json(Value::Object(map.clone()))
}

fn ms(ms: u64) -> Out {
    Out::Word(format_ms(ms))
}

/// The entries of a map, each written only where it differs.
#[derive(Default)]
struct Entries(Vec<(String, Out)>);

impl Entries {
    fn add(&mut self, differs: bool, key: &str, value: impl FnOnce() -> Out) {
        if differs {
            self.0.push((key.to_owned(), value()));
        }
    }
}

fn agent_map(agent: &AgentSpec) -> Out {
    let (d, normal) = (&agent.definition, AgentDefinition::default());
    let mut out = Entries::default();
    work(&mut out, &d.work);
    let limited = d.limits_sessions || d.max_concurrent != normal.max_concurrent;
    out.add(limited, "max_concurrent", || count(d.max_concurrent));
    let mut retry = Entries::default();
    retry.add(d.retry.max != normal.retry.max, "max", || Out::Word(d.retry.max.to_string()));
    retry.add(d.retry.base_ms != normal.retry.base_ms, "base", || ms(d.retry.base_ms));
    retry.add(d.retry.max_delay_ms != normal.retry.max_delay_ms, "max_delay", || ms(d.retry.max_delay_ms));
    let codes = &d.work.no_retry_codes;
    retry.add(*codes != normal.work.no_retry_codes, "no_retry_codes", || words(codes));
    let codes = &d.work.ok_codes;
    retry.add(*codes != normal.work.ok_codes, "ok_codes", || words(codes));
    if let Some(budget) = d.budget {
        let max = ("max".into(), Out::Word(budget.max.to_string()));
        let period = ("period".into(), ms(budget.period_ms));
        retry.0.push(("budget".into(), Out::Map(vec![max, period])));
    }
    out.add(!retry.0.is_empty(), "retry", || Out::Map(retry.0));
    if let Some(breaker) = d.breaker {
        let threshold = ("threshold".into(), Out::Word(breaker.threshold.to_string()));
        let reset_after = ("reset_after".into(), ms(breaker.reset_after_ms));
        out.0.push(("breaker".into(), Out::Map(vec![threshold, reset_after])));
    }
    out.add(d.lane != normal.lane, "lane", || Out::Text(d.lane.clone()));
    let needs = d.needs.iter().filter(|label| handler_of(label).is_none()).cloned();
    let needs: Vec<String> = needs.collect();
    out.add(!needs.is_empty(), "needs", || texts(&needs));
    let schedules = agent.schedules.iter().map(|(name, schedule)| (name.clone(), schedule_map(schedule)));
    out.add(!agent.schedules.is_empty(), "schedules", || Out::Map(schedules.collect()));
    Out::Map(out.0)
}

fn work(out: &mut Entries, work: &Work) {
    let normal = Work::default();
    out.0.extend(action(&work.action));
    let commands = work.commands.iter();
    let commands =
        commands.map(|(name, command)| (name.clone(), Out::Map(action(command).into_iter().collect())));
    out.add(!work.commands.is_empty(), "commands", || Out::Map(commands.collect()));
    out.add(work.cwd.is_some(), "cwd", || Out::Text(dollars(work.cwd.as_deref().unwrap_or_default())));
    let env = work.env.iter().map(|(name, value)| (name.clone(), Out::Text(value.clone())));
    out.add(!work.env.is_empty(), "env", || Out::Map(env.collect()));
    out.add(!work.env_pass.is_empty(), "env_pass", || {
        texts(&work.env_pass.iter().map(|name| dollars(name)).collect::<Vec<_>>())
    });
    out.add(work.prompt.is_some(), "prompt", || prompt(work.prompt.as_deref()));
    out.add(!work.payload.is_empty(), "payload", || object(&work.payload));
    out.add(work.stdin != normal.stdin, "stdin", || {
        Out::Word(if work.stdin == Stdin::Prompt { "prompt" } else { "payload" }.into())
    });
    out.add(work.timeout_ms != normal.timeout_ms, "timeout", || match work.timeout_ms {
        Some(timeout) => ms(timeout),
        None => Out::Word("none".into()),
    });
    out.add(work.grace_ms != normal.grace_ms, "grace", || ms(work.grace_ms));
    out.add(work.output_bytes != normal.output_bytes, "output", || Out::Word(format_size(work.output_bytes)));
}

fn action(action: &Action) -> Option<(String, Out)> {
    match action {
        Action::Run(argv) => {
            let argv = argv.iter().map(|part| Out::Text(escape_literal(part)));
            Some(("run".into(), Out::List(argv.collect())))
        }
        Action::Shell(line) => Some(("shell".into(), Out::Text(line.clone()))),
        Action::Handler => None,
    }
}

/// For keys whose references are filled in when they are read.
fn dollars(text: &str) -> String {
    text.replace('$', "$$")
}

fn prompt(prompt: Option<&str>) -> Out {
    Out::Text(escape_literal(prompt.unwrap_or_default()))
}

fn count(count: Option<u32>) -> Out {
    Out::Word(count.map_or_else(|| "none".into(), |count| count.to_string()))
}

fn schedule_map(schedule: &ScheduleDefinition) -> Out {
    let (o, normal) = (&schedule.options, Options::default());
    let mut out = Entries::default();
    let text = |text: &Option<String>| Out::Text(dollars(text.as_deref().unwrap_or_default()));
    let word = |value: Value| Out::Word(value.as_str().unwrap_or_default().to_owned());
    let (kind, value) = match &schedule.when {
        When::Every(text) => ("every", Out::Text(dollars(text))),
        When::Cron(text) => ("cron", Out::Text(dollars(text))),
        When::At(text) => ("at", Out::Text(dollars(text))),
        When::After(text) => ("after", Out::Text(dollars(text))),
        When::Webhook(value) => ("webhook", Out::Json(value.clone())),
        When::Chat(value) => ("chat", Out::Json(value.clone())),
    };
    out.add(true, kind, || value);
    out.add(!o.enabled, "enabled", || Out::Word("false".into()));
    out.add(o.timezone.is_some(), "timezone", || text(&o.timezone));
    out.add(o.anchor != AnchorName::Completion, "anchor", || word(json!(o.anchor)));
    out.add(o.phase.is_some(), "phase", || text(&o.phase));
    out.add(o.jitter.is_some(), "jitter", || text(&o.jitter));
    out.add(o.only_between.is_some(), "only_between", || text(&o.only_between));
    out.add(!o.not_on.is_empty(), "not_on", || {
        texts(&o.not_on.iter().map(|day| dollars(day)).collect::<Vec<_>>())
    });
    out.add(o.dst_gap_skip, "dst_gap", || Out::Word("skip".into()));
    out.add(o.dst_fold_both, "dst_fold", || Out::Word("both".into()));
    out.add(o.catch_up.is_some(), "catch_up", || word(json!(o.catch_up.unwrap_or(CatchUp::Skip))));
    out.add(o.catch_up_limit != normal.catch_up_limit, "catch_up_limit", || {
        Out::Word(o.catch_up_limit.to_string())
    });
    out.add(o.late_after_ms.is_some(), "late_after", || ms(o.late_after_ms.unwrap_or_default()));
    out.add(o.if_running != IfRunning::Skip, "if_running", || word(json!(o.if_running)));
    out.add(o.overlap != Scope::Schedule, "overlap", || word(json!(o.overlap)));
    out.add(o.max_pending != normal.max_pending, "max_pending", || Out::Word(o.max_pending.to_string()));
    out.add(o.command != normal.command, "command", || Out::Text(o.command.clone()));
    out.add(o.prompt.is_some(), "prompt", || prompt(o.prompt.as_deref()));
    out.add(!o.payload.is_empty(), "payload", || object(&o.payload));
    out.add(o.lane.is_some(), "lane", || text(&o.lane));
    out.add(o.priority != 0, "priority", || Out::Word(o.priority.to_string()));
    out.add(o.delete_after_run, "delete_after_run", || Out::Word("true".into()));
    Out::Map(out.0)
}

impl Out {
    /// Writes a value after its key, or a whole file.
    fn write(&self, indent: usize, out: &mut String) {
        match self {
            Out::Map(entries) if entries.is_empty() => out.push_str(" {}\n"),
            Out::Map(entries) => {
                if indent > 0 {
                    out.push('\n');
                }
                for (key, value) in entries {
                    let _ = write!(out, "{:indent$}", "");
                    quote(key, out);
                    out.push(':');
                    value.write(indent + 2, out);
                }
            }
            Out::Text(text) if is_block(text) => {
                out.push_str(" |-\n");
                for line in text.split('\n') {
                    let _ = match line {
                        "" => writeln!(out),
                        line => writeln!(out, "{:indent$}{line}", ""),
                    };
                }
            }
            value => {
                out.push(' ');
                value.flow(out);
                out.push('\n');
            }
        }
    }

    fn flow(&self, out: &mut String) {
        match self {
            Out::Word(word) => out.push_str(word),
            Out::Text(text) => quote(text, out),
            Out::Json(value) => flow_json(value, out),
            Out::List(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i > 0 { ", " } else { "" });
                    item.flow(out);
                }
                out.push(']');
            }
            Out::Map(_) => out.push_str("{}"),
        }
    }
}

fn flow_json(value: &Value, out: &mut String) {
    match value {
        Value::String(text) => quote(text, out),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                flow_json(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            for (i, (key, value)) in map.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                quote(key, out);
                out.push_str(": ");
                flow_json(value, out);
            }
            out.push('}');
        }
        scalar => {
            let _ = write!(out, "{scalar}");
        }
    }
}

/// Several lines that can stand in a `|-` block as they are.
fn is_block(text: &str) -> bool {
    text.contains('\n')
        && !text.ends_with('\n')
        && !text.starts_with(char::is_whitespace)
        && text.chars().all(|c| c == '\n' || is_printable(c))
}

fn is_printable(c: char) -> bool {
    !(is_unsafe(c) || matches!(c, '\u{fffe}' | '\u{ffff}'))
}

/// Writes a text so that it is read as that text: plain where nobody could mistake it, else in double quotes.
fn quote(text: &str, out: &mut String) {
    const WORDS: &[&str] = &[
        "true",
        "false",
        "null",
        "yes",
        "no",
        "on",
        "off",
        "y",
        "n",
        "none",
        "auto",
        "inherited",
        "nan",
        "inf",
    ];
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_/.-".contains(&b))
        && !WORDS.iter().any(|word| word.eq_ignore_ascii_case(text));
    if plain && text.len() <= 200 {
        out.push_str(text);
        return;
    }
    out.push('"');
    for c in text.chars() {
        let _ = match c {
            '"' => write!(out, "\\\""),
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\t' => write!(out, "\\t"),
            '\r' => write!(out, "\\r"),
            c if !is_printable(c) && c > '\u{ffff}' => write!(out, "\\U{:08X}", u32::from(c)),
            c if !is_printable(c) => write!(out, "\\u{:04X}", u32::from(c)),
            c => write!(out, "{c}"),
        };
    }
    out.push('"');
}
