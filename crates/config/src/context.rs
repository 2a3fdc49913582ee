//! What has been read and what was found wrong with it, on the way through one load.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

use belfry_core::suggest::nearest;

use crate::problem::{Errors, MISTAKES_MAX, Problem, Severity, Source, Span};
use crate::reference;
use crate::tree::{self, Bounds, Data, Flaw, Node};

/// One load.
pub(crate) struct Context<'a> {
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Agents that are functions of the embedding program.
    pub handlers: &'a [&'a str],
    /// See [`crate::Host::now`].
    pub now: Option<belfry_time::Timestamp>,
    /// How large each text may be.
    pub bounds: Bounds,
    pub sources: Vec<Source>,
    /// The folder of each source, for relative paths.
    pub folders: Vec<PathBuf>,
    /// The first webhook with each secret, by the secret as it is written.
    pub secrets: HashMap<String, String>,
    /// At most [`MISTAKES_MAX`] of each severity.
    problems: Vec<Problem>,
    /// What is in `problems`, so that nothing is said twice: an alias is read wherever it stands.
    said: HashSet<(Severity, Option<Span>, String)>,
    counts: [usize; 3],
    /// Values that could not be filled in, by file and start, with their ends: what else is wrong with them is not worth
    /// saying. They are scalars, so none is inside of another.
    quiet: BTreeMap<(usize, usize), usize>,
    /// Values that were filled in, in the same way: what they are is told only to those who may read the environment.
    filled: BTreeMap<(usize, usize), usize>,
    /// What these values are, each once, if they are long enough to be told from other words. A schedule's mistake may be about
    /// the file's zone.
    filled_in: BTreeSet<String>,
    unsaid: Problem,
    /// The problem that was added last, unless it was left unsaid.
    last: Option<usize>,
    /// How many more names may be compared with others.
    comparisons_left: usize,
}

/// How many names are compared with wrong ones to find those that were meant: a hostile text has thousands of both, and
/// to compare long ones takes ten microseconds.
const COMPARISONS_MAX: usize = 20_000;

/// Shorter values are found in other words too.
const FILLED_MIN_BYTES: usize = 4;

impl<'a> Context<'a> {
    pub fn new(env: &'a dyn Fn(&str) -> Option<String>) -> Context<'a> {
        Context {
            env,
            handlers: &[],
            now: None,
            bounds: Bounds::FILE,
            sources: Vec::new(),
            folders: Vec::new(),
            secrets: HashMap::new(),
            problems: Vec::new(),
            said: HashSet::new(),
            counts: [0; 3],
            quiet: BTreeMap::new(),
            filled: BTreeMap::new(),
            filled_in: BTreeSet::new(),
            unsaid: Problem::new(Severity::Warning, ""),
            last: None,
            comparisons_left: COMPARISONS_MAX,
        }
    }

    /// Reads a text as YAML; none where there is no telling what it says.
    pub fn parse(&mut self, path: String, folder: PathBuf, text: String) -> Option<Node> {
        let file = self.sources.len();
        let (node, flaws) = tree::parse(file, &text, self.bounds);
        self.sources.push(Source::new(path, text));
        self.folders.push(folder);
        for flaw in flaws {
            self.flaw(flaw);
        }
        node
    }

    /// A text that is read piece by piece.
    pub fn add_source(&mut self, path: String, text: String) {
        self.sources.push(Source::new(path, text));
        self.folders.push(PathBuf::from("/"));
    }

    pub fn flaw(&mut self, flaw: Flaw) {
        let is_broken = flaw.message.starts_with("not YAML");
        let hint = if is_broken && flaw.help.is_none() { self.hint(&flaw) } else { None };
        let help = flaw.help.or(hint.map(str::to_owned));
        self.error(flaw.span, flaw.message).help = help;
        if let Some(first) = flaw.first {
            self.also(first, "the first");
        }
    }

    /// What people mostly mean by text that is not YAML.
    fn hint(&self, flaw: &Flaw) -> Option<&'static str> {
        let source = &self.sources[flaw.span.file];
        let line = source.line_of(flaw.span.start);
        let before = source.line_of(flaw.span.start.saturating_sub(1));
        let blanks = |line: &str| line.len() - line.trim_start().len();
        if [line, before].iter().any(|line| line[..blanks(line)].contains('\t')) {
            return Some("YAML is indented with spaces: replace the tab");
        }
        let value = line.split_once(": ").map_or(line, |(_, value)| value).trim_start();
        let value = value.trim_start_matches("- ");
        if value.starts_with(['*', '@', '%', '`', '&', '!', '|', '>']) {
            return Some(
                "put a value that starts with a sign such as `*` or `@` into quotes: \"*/5 * * * *\"",
            );
        }
        let flow = flaw.message.contains("bracket") || flaw.message.contains("flow");
        if flow && value.starts_with(['{', '[']) {
            return Some(
                "put text that starts with `{` or `[` into quotes, or look for a bracket that is not closed",
            );
        }
        if flaw.message.contains("mapping values") && line.matches(": ").count() > 1 {
            return Some("put text that holds `: ` into quotes");
        }
        None
    }

    /// Adds an error that refuses the files.
    pub fn error(&mut self, span: Span, message: impl Into<String>) -> &mut Problem {
        self.report(Severity::Error, Some(span), message)
    }

    /// Adds a problem. One that is not kept is counted, and costs nothing more: a hostile text has a million.
    pub fn report(
        &mut self,
        severity: Severity,
        span: Option<Span>,
        message: impl Into<String>,
    ) -> &mut Problem {
        let mut problem = Problem::new(severity, message);
        let said = (severity, span, problem.message.clone());
        let is_quiet = span.is_some_and(|span| is_inside(&self.quiet, span));
        let is_new = !is_quiet && !self.said.contains(&said);
        if is_new {
            self.counts[severity as usize] += 1;
        }
        if !is_new || self.is_full(severity) {
            self.last = None;
            self.unsaid = problem;
            return &mut self.unsaid;
        }
        self.said.insert(said);
        let is_filled = span.is_some_and(|span| is_inside(&self.filled, span));
        if is_filled || self.filled_in.iter().any(|value| problem.message.contains(value)) {
            problem.told = 0;
        }
        problem.order = span.map_or((0, 0), |span| (span.file, span.start));
        problem.place = span.and_then(|span| Some(self.sources.get_mut(span.file)?.place(span)));
        let at = self.problems.len();
        self.problems.push(problem);
        self.last = Some(at);
        &mut self.problems[at]
    }

    /// Shows a second place beside the problem that was added last.
    pub fn also(&mut self, span: Span, label: &str) {
        let Some(last) = self.last else { return };
        if let Some(source) = self.sources.get_mut(span.file) {
            self.problems[last].other = Some((source.place(span), label.to_owned()));
        }
    }

    /// Adds the way out to the problem that was added last.
    pub fn way_out(&mut self, help: impl Into<String>) {
        if let Some(last) = self.last {
            self.problems[last].help(help);
        }
    }

    /// The known name that was most likely meant, as long as there are not too many to look through.
    pub fn nearest<'n>(
        &mut self,
        written: &str,
        known: impl ExactSizeIterator<Item = &'n str>,
    ) -> Option<&'n str> {
        self.comparisons_left = self.comparisons_left.checked_sub(known.len())?;
        nearest(written, known)
    }

    /// Whether there are more of a severity than are kept: one more tells nobody anything.
    pub fn is_full(&self, severity: Severity) -> bool {
        self.counts[severity as usize] > MISTAKES_MAX
    }

    pub fn has_errors(&self) -> bool {
        self.counts[Severity::Error as usize] > 0
    }

    /// The problems of each severity, each once; as an error where there is one. If not all are given, the last one says so.
    pub fn finish(self) -> Result<(Vec<Problem>, Vec<Problem>), Errors> {
        let failed = self.has_errors();
        let [_, more_invalid, more_warnings] = self.counts.map(|count| count > MISTAKES_MAX);
        let mistakes = self.counts[Severity::Error as usize] + self.counts[Severity::Invalid as usize];
        let (mut errors, mut invalid, mut warnings) = (Vec::new(), Vec::new(), Vec::new());
        for problem in self.problems {
            match problem.severity {
                Severity::Error => errors.push(problem),
                Severity::Invalid => invalid.push(problem),
                Severity::Warning => warnings.push(problem),
            }
        }
        if !failed {
            invalid.extend(more_invalid.then(|| Problem::more(Severity::Invalid)));
            warnings.extend(more_warnings.then(|| Problem::more(Severity::Warning)));
            return Ok((invalid, warnings));
        }
        // Whoever mends the file wants to know about these, too.
        errors.append(&mut invalid);
        errors.truncate(MISTAKES_MAX);
        errors.sort_by_key(|problem| problem.order);
        errors.extend((mistakes > MISTAKES_MAX).then(|| Problem::more(Severity::Error)));
        Err(Errors { problems: errors })
    }

    /// The bytes of the file behind a range of a scalar's text, where the text stands there as it is; else the whole.
    pub fn within(&self, node: &Node, range: Range<usize>) -> Span {
        let Some(text) = node.text() else { return node.span };
        let Some(source) = self.sources.get(node.span.file) else { return node.span };
        let written = source.text().get(node.span.start..node.span.end).unwrap_or_default();
        let Some(at) = written.find(text).filter(|at| *at <= 1 && written.len() <= text.len() + 2) else {
            return node.span;
        };
        let start = node.span.start + at;
        Span { file: node.span.file, start: start + range.start, end: start + range.end.min(text.len()) }
    }

    /// The part of a scalar that a time error means.
    pub fn inside(&self, node: &Node, error: &belfry_time::Error) -> Span {
        let Some(text) = node.text() else { return node.span };
        let trimmed = text.trim();
        let whole = error.span().is_empty() || error.span().len() >= trimmed.len();
        if whole || !trimmed.starts_with(error.input()) {
            return node.span;
        }
        let blank = text.len() - text.trim_start().len();
        let range = error.span();
        self.within(node, blank + range.start..blank + range.end)
    }

    /// Fills in the references of every scalar but those under the keys that `skip` names.
    pub fn expand(&mut self, node: &mut Node, skip: &dyn Fn(&str) -> bool) {
        match &mut node.data {
            Data::Scalar { text, .. } => {
                if !text.contains('$') {
                    return;
                }
                match reference::resolve(text, self.env) {
                    Ok(resolved) => {
                        *text = resolved;
                        let value = text.trim();
                        if value.len() >= FILLED_MIN_BYTES {
                            self.filled_in.insert(value.to_owned());
                        }
                        self.filled.insert((node.span.file, node.span.start), node.span.end);
                    }
                    Err(flaw) => {
                        let span = self.within(node, flaw.range);
                        self.error(span, flaw.message).help(reference::RULE);
                        self.quiet.insert((node.span.file, node.span.start), node.span.end);
                    }
                }
            }
            Data::List(items) => items.iter_mut().for_each(|item| self.expand(item, skip)),
            Data::Map(entries) => {
                for (key, value) in entries {
                    if !skip(&key.text) {
                        self.expand(value, skip);
                    }
                }
            }
        }
    }
}

/// Whether a place lies inside of one of these values.
fn is_inside(values: &BTreeMap<(usize, usize), usize>, span: Span) -> bool {
    let before = values.range(..=(span.file, span.start)).next_back();
    before.is_some_and(|((file, _), end)| *file == span.file && span.end <= *end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(file: usize, start: usize, end: usize) -> Span {
        Span { file, start, end }
    }

    #[test]
    fn of_a_million_mistakes_those_that_are_shown_are_kept() {
        let mut context = Context::new(&|_| None);
        context.add_source("f".into(), "x".repeat(1_000_000));
        for start in 0..1_000_000 {
            context.error(at(0, start, start + 1), "wrong");
            context.also(at(0, 0, 1), "the first");
        }
        assert_eq!((context.problems.len(), context.said.len()), (MISTAKES_MAX, MISTAKES_MAX));
        assert_eq!(context.counts[Severity::Error as usize], 1_000_000);
        assert!(context.unsaid.place.is_none() && context.unsaid.other.is_none());
        let problems = context.finish().unwrap_err().problems;
        assert_eq!(problems.len(), MISTAKES_MAX + 1);
        assert_eq!(problems[MISTAKES_MAX].message, "there are more mistakes than the 500 that are shown");
    }

    #[test]
    fn as_many_mistakes_as_are_shown_are_all() {
        let mut context = Context::new(&|_| None);
        context.add_source("f".into(), "x".repeat(1_000));
        for start in 0..MISTAKES_MAX {
            context.error(at(0, start, start + 1), "wrong");
            context.error(at(0, start, start + 1), "wrong");
        }
        let problems = context.finish().unwrap_err().problems;
        assert!(problems.len() == MISTAKES_MAX && problems.iter().all(|problem| problem.message == "wrong"));
    }

    #[test]
    fn errors_and_invalid_schedules_are_shown_together() {
        let mut context = Context::new(&|_| None);
        context.add_source("f".into(), "x".repeat(1_000));
        for start in 0..400 {
            context.report(Severity::Invalid, Some(at(0, start, start)), "invalid");
            context.error(at(0, 500 + start, 500 + start), "wrong");
        }
        let problems = context.finish().unwrap_err().problems;
        let count = |message| problems.iter().filter(|problem| problem.message == message).count();
        assert_eq!((count("wrong"), count("invalid"), problems.len()), (400, 100, MISTAKES_MAX + 1));
        assert_eq!(problems[0].message, "invalid");
    }

    #[test]
    fn of_a_value_that_is_not_filled_in_nothing_else_is_said() {
        let mut context = Context::new(&|_| None);
        let text = "a: [\"${A}\", x, \"${B}\", y]";
        let mut node = context.parse("f".into(), PathBuf::from("/"), text.into()).unwrap();
        context.expand(&mut node, &|_| false);
        assert_eq!(context.quiet.len(), 2);
        for item in node.entries()[0].1.items() {
            context.error(item.span, "no day");
            context.error(at(0, item.span.start, item.span.start), "nor a number");
            context.error(at(1, item.span.start, item.span.end), "in another file");
        }
        let said: Vec<_> = context.problems.iter().map(|problem| problem.message.as_str()).collect();
        let count = |message| said.iter().filter(|said| **said == message).count();
        assert_eq!((count("no day"), count("nor a number"), count("in another file")), (2, 2, 4));
    }

    #[test]
    fn only_so_many_names_are_compared() {
        let mut context = Context::new(&|_| None);
        let names = vec!["reporter"; COMPARISONS_MAX / 2];
        for expected in [Some("reporter"), Some("reporter"), None] {
            assert_eq!(context.nearest("reportr", names.iter().copied()), expected);
        }
    }
}
