//! What has been read and what was found wrong with it, on the way through one load.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use crate::problem::{Errors, Problem, Severity, Source, Span};
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
    problems: Vec<Problem>,
    counts: [usize; 3],
    /// Values that could not be filled in: what else is wrong with them is not worth saying.
    quiet: Vec<Span>,
    unsaid: Problem,
    /// The problem that was added last, unless it was left unsaid.
    last: Option<usize>,
}

/// More of one severity are counted, not kept: nobody reads them, and a hostile file has a million.
const KEPT: usize = 500;

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
            counts: [0; 3],
            quiet: Vec::new(),
            unsaid: Problem::new(Severity::Warning, ""),
            last: None,
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
        let syntax = flaw.help.is_none() && flaw.message.starts_with("not YAML");
        let hint = if syntax { self.hint(&flaw) } else { None };
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

    pub fn report(
        &mut self,
        severity: Severity,
        span: Option<Span>,
        message: impl Into<String>,
    ) -> &mut Problem {
        let mut problem = Problem::new(severity, message);
        if span.is_some_and(|span| self.quiet.iter().any(|quiet| quiet.holds(span))) {
            self.last = None;
            self.unsaid = problem;
            return &mut self.unsaid;
        }
        problem.order = span.map_or((0, 0), |span| (span.file, span.start));
        problem.place = span.and_then(|span| Some(self.sources.get(span.file)?.place(span)));
        let count = &mut self.counts[severity as usize];
        *count += 1;
        let full = *count > KEPT;
        let last = self.problems.iter().rposition(|problem| full && problem.severity == severity);
        let at = last.unwrap_or(self.problems.len());
        match last {
            Some(at) => self.problems[at] = problem,
            None => self.problems.push(problem),
        }
        self.last = Some(at);
        &mut self.problems[at]
    }

    /// Shows a second place beside the problem that was added last.
    pub fn also(&mut self, span: Span, label: &str) {
        let place = self.sources.get(span.file).map(|source| source.place(span));
        if let (Some(last), Some(place)) = (self.last, place) {
            self.problems[last].other = Some((place, label.to_owned()));
        }
    }

    /// Adds the way out to the problem that was added last.
    pub fn way_out(&mut self, help: impl Into<String>) {
        if let Some(last) = self.last {
            self.problems[last].help(help);
        }
    }

    pub fn invalid_count(&self) -> usize {
        self.counts[Severity::Invalid as usize]
    }

    /// So many errors that one more tells nobody anything.
    pub fn is_full(&self) -> bool {
        self.counts[Severity::Error as usize] >= KEPT
    }

    pub fn has_errors(&self) -> bool {
        self.counts[Severity::Error as usize] > 0
    }

    /// The problems of each severity, each once; as an error where there is one.
    pub fn finish(self) -> Result<(Vec<Problem>, Vec<Problem>), Errors> {
        let failed = self.has_errors();
        let (mut errors, mut invalid, mut warnings) = (Vec::new(), Vec::new(), Vec::new());
        let mut seen = std::collections::HashSet::new();
        for problem in self.problems {
            if !seen.insert(problem.clone()) {
                continue;
            }
            match problem.severity {
                Severity::Error => errors.push(problem),
                Severity::Invalid => invalid.push(problem),
                Severity::Warning => warnings.push(problem),
            }
        }
        if !failed {
            return Ok((invalid, warnings));
        }
        // Whoever mends the file wants to know about these, too.
        errors.append(&mut invalid);
        errors.sort_by_key(|problem| problem.order);
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
                    }
                    Err(flaw) => {
                        let span = self.within(node, flaw.range);
                        self.error(span, flaw.message).help(reference::RULE);
                        if !self.is_full() {
                            self.quiet.push(node.span);
                        }
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
