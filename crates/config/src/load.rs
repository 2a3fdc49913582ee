//! From a path to definitions: read the files, check them, read what they say.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use belfry_core::AgentSpec;
use belfry_time::Timestamp;

use crate::context::Context;
use crate::file;
use crate::keys::{INCLUDED, Shape, TOP};
use crate::problem::{Errors, Problem, Quoted, Severity, Span, Whole};
use crate::schedule::{self, Inherited};
use crate::settings::{self, Settings};
use crate::tree::{Data, Key, Node};
use crate::{agent, digest};

/// What the host lends to a load.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// Looks up an environment variable.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// The host's time zone, an IANA name.
    pub timezone: &'a str,
    /// Agents that are functions of the embedding program: they need no `run` and no `shell`.
    pub handlers: &'a [&'a str],
    /// The instant that one-shots are compared with, to warn of those whose time has passed; none: do not warn.
    pub now: Option<Timestamp>,
}

impl<'a> Host<'a> {
    /// A host without functions of its own.
    pub fn new(env: &'a dyn Fn(&str) -> Option<String>, timezone: &'a str) -> Host<'a> {
        Host { env, timezone, handlers: &[], now: None }
    }
}

/// What files say.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// How Belfry itself works.
    pub settings: Settings,
    /// What runs, in the order of the files: defaults merged, zones filled in.
    pub agents: Vec<AgentSpec>,
    /// Every file that was read, the main file first; absolute.
    pub files: Vec<PathBuf>,
    /// The folders in which an `include` pattern was looked up: a new file there may belong to the set.
    pub folders: Vec<PathBuf>,
    /// A hash of the agents and lanes; comments, order and formatting do not change it.
    pub digest: String,
    /// Schedules that cannot run. They are in `agents` all the same, and become `invalid` in the store.
    pub invalid: Vec<Problem>,
    /// What works, but hardly as meant.
    pub warnings: Vec<Problem>,
}

/// Reads a main file and all that it includes. An error changes nothing; it lists every problem that was found.
pub fn load(path: &Path, host: &Host<'_>) -> Result<Loaded, Errors> {
    let mut context = Context::new(host.env);
    let mut files = Files::default();
    files.main(&mut context, path);
    finish(context, files, host)
}

/// Reads a text as a main file of this name, which need not exist. What it includes is read from the same folder.
pub fn load_text(text: &str, path: &Path, host: &Host<'_>) -> Result<Loaded, Errors> {
    let mut context = Context::new(host.env);
    let mut files = Files::default();
    let absolute = files.top(path);
    files.text(&mut context, path, &absolute, text.to_owned());
    finish(context, files, host)
}

fn finish<'a>(mut context: Context<'a>, mut files: Files, host: &Host<'a>) -> Result<Loaded, Errors> {
    context.handlers = host.handlers;
    context.now = host.now;
    let mut roots = std::mem::take(&mut files.roots);
    let Some(main) = roots.first_mut() else { return Err(refused(context)) };
    context.expand(main, &|key| matches!(key, "agents" | "defaults" | "include"));
    for root in &mut roots {
        expand_agents(&mut context, root);
    }
    for (i, root) in roots.iter().enumerate() {
        check_root(&mut context, root, i == 0);
    }
    let main = &roots[0];
    let mut settings = settings::read(main, &context.folders[main.span.file]);
    settings::overrides(&mut context, &mut settings);
    settings::check_open(&mut context, main, &settings);
    let named = main.get("timezone").and_then(Node::text).map(str::to_owned);
    settings.timezone = zone(&mut context, named.as_deref(), host);
    settings.timezone_is_named = named.is_some();
    let inherited = Inherited {
        timezone: named.as_deref(),
        host_timezone: &settings.timezone,
        late_after_ms: settings.engine.late_after_ms,
    };
    let agents = read_agents(&mut context, &roots, main.get("defaults"), &inherited, &settings);
    let (invalid, warnings) = context.finish()?;
    let digest = digest::of(&agents, &settings.lanes);
    Ok(Loaded { settings, agents, files: files.read, folders: files.folders, digest, invalid, warnings })
}

fn refused(context: Context<'_>) -> Errors {
    context.finish().err().unwrap_or(Errors { problems: Vec::new() })
}

/// The zone of schedules that name none.
fn zone(context: &mut Context<'_>, named: Option<&str>, host: &Host<'_>) -> String {
    if let Some(named) = named {
        return named.to_owned();
    }
    if belfry_time::Zone::get(host.timezone).is_ok() {
        return host.timezone.to_owned();
    }
    let message = format!("the host's time zone {} is not known: UTC is used", Quoted(host.timezone));
    context.report(Severity::Warning, None, message).help("name one: `timezone: Europe/London`");
    "UTC".into()
}

/// References outside of `env`, secrets and programs are filled in now.
fn expand_agents(context: &mut Context<'_>, root: &mut Node) {
    const KEPT: &[&str] =
        &["run", "shell", "commands", "prompt", "payload", "env", "webhook", "chat", "http", "fetch"];
    let Data::Map(entries) = &mut root.data else { return };
    for (key, value) in entries {
        match (key.text.as_str(), &mut value.data) {
            // Names are not keys of ours: an agent may be called `run`.
            ("agents", Data::Map(agents)) => {
                for (_, agent) in agents {
                    expand_agent(context, agent, KEPT);
                }
            }
            ("defaults", _) => expand_agent(context, value, KEPT),
            _ => {}
        }
    }
}

fn expand_agent(context: &mut Context<'_>, agent: &mut Node, kept: &[&str]) {
    let skip = |key: &str| kept.contains(&key);
    context.expand(agent, &|key| skip(key) || key == "schedules");
    let Data::Map(entries) = &mut agent.data else { return };
    for (key, value) in entries {
        if let ("schedules", Data::Map(schedules)) = (key.text.as_str(), &mut value.data) {
            for (_, schedule) in schedules {
                context.expand(schedule, &skip);
            }
        }
    }
}

fn check_root(context: &mut Context<'_>, root: &Node, main: bool) {
    // An editor that empties a file before it writes it must not remove all agents.
    if root.is_null() {
        let help = "write `agents: {}` if it is to have no agents";
        context.error(root.span, "the file is empty, or has only comments").help(help);
        return;
    }
    if !main && let Data::Map(entries) = &root.data {
        for (key, _) in entries {
            let known = TOP.iter().any(|known| known.name == key.text);
            if known && !INCLUDED.contains(&key.text.as_str()) {
                context
                    .error(key.span, format!("`{}` belongs into the main file", key.text))
                    .help("an included file has `agents` and `include`");
            }
        }
    }
    let path = context.sources[root.span.file].path().to_owned();
    context.check(&path, root, &Shape::Map(TOP));
    if let Some((key, _)) = root.get("defaults").and_then(|defaults| defaults.entry("schedules")) {
        context.error(key.span, "`defaults` cannot have `schedules`").help("move them to an agent");
    }
}

fn read_agents(
    context: &mut Context<'_>,
    roots: &[Node],
    defaults: Option<&Node>,
    inherited: &Inherited<'_>,
    settings: &Settings,
) -> Vec<AgentSpec> {
    let mut agents = Vec::new();
    let mut seen: HashMap<String, (Key, usize)> = HashMap::new();
    let written = roots.iter().enumerate();
    let written = written.flat_map(|(i, root)| {
        root.get("agents").map(Node::entries).unwrap_or_default().iter().map(move |entry| (i, entry))
    });
    for (root, (key, node)) in written {
        // Inside of one file the same was reported by the check.
        if let Some((first, _)) = seen.get(&key.text.to_lowercase()).filter(|(_, other)| *other != root) {
            let message = if first.text == key.text {
                format!("the agent {} is defined twice", Quoted(&key.text))
            } else {
                format!("the agents {} and {} differ only by case", Quoted(&first.text), Quoted(&key.text))
            };
            let place = first.span;
            context.error(key.span, message).help("rename or remove one of the two");
            context.also(place, "the first");
        } else {
            seen.insert(key.text.to_lowercase(), (key.clone(), root));
        }
        agents.push(read_agent(context, key, node, defaults, inherited, Some(settings)));
    }
    agents
}

/// One agent with its schedules.
pub(crate) fn read_agent(
    context: &mut Context<'_>,
    key: &Key,
    node: &Node,
    defaults: Option<&Node>,
    inherited: &Inherited<'_>,
    settings: Option<&Settings>,
) -> AgentSpec {
    let merged = agent::merged(defaults, node);
    let definition = agent::read(context, &merged, &key.text, key.span);
    agent::warn(context, &merged, &key.text, &definition);
    if let Some(lane) = merged.get("lane") {
        check_lane(context, lane, settings);
    }
    let mut schedules = Vec::new();
    for (place, node) in node.get("schedules").map(Node::entries).unwrap_or_default() {
        let name = format!("{}/{}", key.text, place.text);
        if let Some(lane) = node.get("lane").filter(|lane| !lane.is_word("inherited")) {
            check_lane(context, lane, settings);
        }
        if let Some(schedule) = schedule::read(context, node, &name, place.span, inherited) {
            schedule::warn(context, node, &name, &schedule, &definition);
            schedules.push((place.text.clone(), schedule));
        }
    }
    AgentSpec { name: key.text.clone(), definition, schedules }
}

fn check_lane(context: &mut Context<'_>, lane: &Node, settings: Option<&Settings>) {
    let Some((name, settings)) = lane.text().zip(settings) else { return };
    if settings.lanes.contains_key(name) || context.is_full(Severity::Warning) {
        return;
    }
    let message = format!("there is no lane {}: its runs go to `main`", Quoted(name));
    let help = match context.nearest(name, settings.lanes.keys().map(String::as_str)) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("add it under `lanes`: `{name}: 10`"),
    };
    context.report(Severity::Warning, Some(lane.span), message).help(help);
}

/// The main file and what it includes, each read once.
#[derive(Default)]
struct Files {
    roots: Vec<Node>,
    read: Vec<PathBuf>,
    folders: Vec<PathBuf>,
    seen: HashSet<PathBuf>,
    /// From the main file down to the one that is being read.
    chain: Vec<PathBuf>,
    top: PathBuf,
    bytes: usize,
}

/// How many files may include one another, and how many there may be.
const CHAIN_MAX: usize = 16;
const FILES_MAX: usize = 10_000;
/// How large all of them together may be.
const BYTES_MAX: usize = 64 << 20;

impl Files {
    fn main(&mut self, context: &mut Context<'_>, path: &Path) {
        let absolute = self.top(path);
        self.one(context, path, &absolute, None);
    }

    fn top(&mut self, path: &Path) -> PathBuf {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let folder = absolute.parent().unwrap_or(Path::new("/"));
        self.top = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        absolute
    }

    /// Reads one file and what it includes. `shown` is how the user would name it, `from` where it was included.
    fn one(&mut self, context: &mut Context<'_>, shown: &Path, path: &Path, from: Option<Span>) {
        let text = match file::read(path) {
            Ok(text) => text,
            Err(cause) => {
                let message = format!("cannot read {}: {cause}", Whole(&shown.display().to_string()));
                let problem = context.report(Severity::Error, from, message);
                if from.is_none() && cause == file::NO_SUCH_FILE {
                    problem.help("`belfry init` writes one; `-c FILE` names another");
                }
                return;
            }
        };
        self.read.push(path.to_owned());
        self.bytes += text.text.len();
        if self.bytes > BYTES_MAX {
            let message = format!("the files are larger than {} MiB together", BYTES_MAX >> 20);
            context.report(Severity::Error, from, message);
            return;
        }
        if let Some(danger) = text.danger {
            let severity = if danger.refused { Severity::Error } else { Severity::Warning };
            let (before, after) = danger.message;
            let message = format!("{before} {}{after}", Whole(&shown.display().to_string()));
            context.report(severity, from, message).help(danger.help);
            if danger.refused {
                return;
            }
        }
        self.text(context, shown, path, text.text);
    }

    /// Reads a text and what it includes.
    fn text(&mut self, context: &mut Context<'_>, shown: &Path, path: &Path, text: String) {
        let folder = path.parent().unwrap_or(Path::new("/")).to_owned();
        let Some(root) = context.parse(shown.display().to_string(), folder, text) else { return };
        let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        self.seen.insert(canonical.clone());
        self.chain.push(canonical);
        let includes = root.get("include").cloned();
        self.roots.push(root);
        if let Some(includes) = includes {
            let items = match &includes.data {
                Data::List(items) => items.as_slice(),
                _ => std::slice::from_ref(&includes),
            };
            for item in items {
                self.include(context, shown, path, item);
            }
        }
        self.chain.pop();
    }

    fn include(&mut self, context: &mut Context<'_>, shown: &Path, path: &Path, item: &Node) {
        let Some(pattern) = item.text() else { return };
        let folder = path.parent().unwrap_or(Path::new("/"));
        let shown_folder = shown.parent().unwrap_or(Path::new(""));
        if Path::new(pattern).is_absolute() || pattern.split('/').any(|part| part == "..") {
            context
                .error(
                    item.span,
                    format!("cannot include {}: it leaves the folder of the main file", Quoted(pattern)),
                )
                .help("name files in or under the folder of this file");
            return;
        }
        if !file::is_pattern(pattern) {
            let target = file::absolute(folder, Path::new(pattern));
            let named = shown_folder.join(pattern.trim_start_matches("./"));
            self.maybe_one(context, &named, &target, item.span, true);
            return;
        }
        match file::matches(folder, pattern) {
            Ok((found, folders)) => {
                self.folders.extend(folders);
                if found.is_empty() {
                    let message = format!("no file fits {}", Quoted(pattern));
                    context.report(Severity::Warning, Some(item.span), message);
                }
                for found in found {
                    self.maybe_one(
                        context,
                        &shown_folder.join(&found),
                        &folder.join(&found),
                        item.span,
                        false,
                    );
                }
            }
            Err(error) => {
                let cause = file::cause(&error);
                context.error(item.span, format!("cannot look for {}: {cause}", Quoted(pattern)));
            }
        }
    }

    /// Reads an included file unless it was read, is outside, or includes itself.
    fn maybe_one(&mut self, context: &mut Context<'_>, shown: &Path, path: &Path, from: Span, named: bool) {
        let name = shown.display().to_string();
        if let Ok(canonical) = path.canonicalize() {
            if !canonical.starts_with(&self.top) {
                context.error(
                    from,
                    format!("cannot include {}: it leads out of the folder of the main file", Whole(&name)),
                );
                return;
            }
            if self.chain.contains(&canonical) {
                // A pattern may well fit the file it stands in.
                if named || self.chain.last() != Some(&canonical) {
                    context.error(from, format!("{} includes itself, over this line", Whole(&name)));
                }
                return;
            }
            if self.seen.contains(&canonical) {
                return;
            }
        }
        if self.chain.len() >= CHAIN_MAX || self.read.len() >= FILES_MAX {
            context.error(from, format!("too many files: at most {FILES_MAX}, {CHAIN_MAX} levels deep"));
            return;
        }
        self.one(context, shown, path, Some(from));
    }
}
