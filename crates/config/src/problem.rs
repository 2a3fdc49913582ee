//! What is wrong with a file, where, and the way out; and how that is shown.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use crate::password::secrets;

/// How bad a problem is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Severity {
    /// The files are refused as a whole.
    Error,
    /// One schedule cannot run; everything else can.
    Invalid,
    /// It works, but hardly as meant.
    Warning,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Problem {
    pub(crate) severity: Severity,
    pub(crate) message: String,
    pub(crate) place: Option<Place>,
    pub(crate) other: Option<(Place, String)>,
    pub(crate) help: Option<String>,
    pub(crate) schedule: Option<String>,
    /// File and byte.
    pub(crate) order: (usize, usize),
}

/// Where in which file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// The file, as the user would name it.
    pub path: String,
    /// From 1 on.
    pub line: usize,
    /// From 1 on, in characters.
    pub column: usize,
    excerpt: String,
    range: Range<usize>,
}

impl Problem {
    pub(crate) fn new(severity: Severity, message: impl Into<String>) -> Problem {
        Problem {
            severity,
            message: message.into(),
            place: None,
            other: None,
            help: None,
            schedule: None,
            order: (0, 0),
        }
    }

    /// Says the way out.
    pub(crate) fn help(&mut self, help: impl Into<String>) -> &mut Problem {
        self.help = Some(help.into());
        self
    }

    /// Hides all of the source line but the key that is underlined: what follows is a secret, and so may be what stands
    /// before.
    pub(crate) fn hide(&mut self) {
        if let Some(place) = &mut self.place {
            let (before, key) = (&place.excerpt[..place.range.start], &place.excerpt[place.range.clone()]);
            // As wide as before: the column is counted in what is shown.
            let before = match before.trim().is_empty() {
                true => before.to_owned(),
                false => format!("{:>1$} ", "…", before.chars().count() - 1),
            };
            let range = before.len()..before.len() + key.len();
            place.excerpt = format!("{before}{key}: …");
            place.range = range;
        }
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        self.severity
    }

    /// What is wrong, in one sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The way out, where one is known.
    pub fn way_out(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// Where it is wrong; none where a file could not be read at all.
    pub fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }

    /// The schedule it is about, as `agent/schedule`.
    pub fn schedule(&self) -> Option<&str> {
        self.schedule.as_deref()
    }

    /// The message, the source line underlined, and the way out. In colour for a terminal.
    pub fn render(&self, colour: bool) -> String {
        let level = match self.severity {
            Severity::Error => Level::ERROR,
            Severity::Invalid => Level::ERROR.with_name("invalid"),
            Severity::Warning => Level::WARNING,
        };
        let title = level.primary_title(self.message.as_str());
        let mut group = Group::with_title(title);
        if let Some(place) = &self.place {
            let snippet = place.snippet().annotation(AnnotationKind::Primary.span(place.range.clone()));
            match &self.other {
                Some((other, label)) if other.is_in_line_of(place) => {
                    let annotation = AnnotationKind::Context.span(other.range.clone()).label(label);
                    group = group.element(snippet.annotation(annotation));
                }
                Some((other, label)) => {
                    let annotation = AnnotationKind::Context.span(other.range.clone()).label(label);
                    group = group.element(snippet).element(other.snippet().annotation(annotation));
                }
                None => group = group.element(snippet),
            }
        }
        if let Some(help) = &self.help {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[group])
    }
}

/// Plain, as [`Problem::render`] shows it.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl Place {
    fn snippet(&self) -> Snippet<'_, annotate_snippets::Annotation<'_>> {
        Snippet::source(self.excerpt.as_str()).line_start(self.line).path(self.path.as_str())
    }

    fn is_in_line_of(&self, other: &Place) -> bool {
        (&self.path, self.line, &self.excerpt) == (&other.path, other.line, &other.excerpt)
    }
}

/// Why files were refused: every problem that was found, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Errors {
    /// In the order of the files; schedules that would be invalid are among them.
    pub problems: Vec<Problem>,
}

impl Errors {
    /// All of them, one after the other.
    pub fn render(&self, colour: bool) -> String {
        let shown: Vec<_> = self.problems.iter().map(|problem| problem.render(colour)).collect();
        shown.join("\n\n")
    }
}

/// Plain, as [`Errors::render`] shows them.
impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Errors {}

/// A range of bytes in one of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span {
    pub file: usize,
    pub start: usize,
    pub end: usize,
}

impl Span {
    pub fn holds(&self, other: Span) -> bool {
        self.file == other.file && self.start <= other.start && other.end <= self.end
    }
}

/// A text that was read, and where its lines begin.
#[derive(Debug)]
pub(crate) struct Source {
    path: String,
    text: String,
    lines: Vec<usize>,
}

/// A line is shown whole up to here; of a longer one, what is around the span.
const LINE_MAX: usize = 1000;
const COLUMN_MAX: usize = 4000;
const BEFORE: usize = 60;
const AFTER: usize = 240;

impl Source {
    pub fn new(path: String, text: String) -> Source {
        let lines = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Source { path, text, lines }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn line_of(&self, at: usize) -> &str {
        let line = self.lines.partition_point(|start| *start <= at).max(1);
        let end = self.lines.get(line).map_or(self.text.len(), |next| next - 1);
        self.text.get(self.lines[line - 1]..end).unwrap_or_default().trim_end_matches('\r')
    }

    /// The first line of a span, ready to be shown.
    pub fn place(&self, span: Span) -> Place {
        let start = self.text.floor_char_boundary(span.start);
        let line = self.lines.partition_point(|begin| *begin <= start).max(1);
        let begin = self.lines[line - 1];
        let shown = self.line_of(start);
        let from = (start - begin).min(shown.len());
        let end = self.text.ceil_char_boundary(span.end.max(start));
        let to = (end - begin).clamp(from, shown.len());
        let column = shown[..from].chars().count() + 1;
        let (cut, until) = if shown.len() <= LINE_MAX {
            (0, shown.len())
        } else {
            // The column that is shown is counted from the cut, so that comes late.
            let cut = if from <= COLUMN_MAX { 0 } else { shown.floor_char_boundary(from - BEFORE) };
            (cut, shown.floor_char_boundary((from + AFTER).min(shown.len())))
        };
        Place {
            path: self.path.clone(),
            line,
            column,
            excerpt: masked(&shown[cut..until]),
            range: from - cut..to.clamp(from, until) - cut,
        }
    }
}

/// The password of a URL never leaves the file, not even in an error. The length stays, and so do the spans.
fn masked(line: &str) -> String {
    let mut shown = line.to_owned();
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
    shown
}

/// A value inside a message: in backquotes, control characters escaped, cut when long.
pub(crate) struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 60;
        let cut = self.0.floor_char_boundary(SHOWN);
        let more = if cut < self.0.len() { "…" } else { "" };
        write!(f, "`{}{more}`", Escaped(&self.0[..cut]))
    }
}

/// The same, not cut: for paths, which the system cuts.
pub(crate) struct Whole<'a>(pub &'a str);

impl fmt::Display for Whole<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", Escaped(self.0))
    }
}

/// Quotes are fine inside backquotes; what a terminal would obey is not.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '"' | '\'' | '\\' => write!(f, "{c}")?,
                c => write!(f, "{}", c.escape_debug())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_a_url_is_not_shown() {
        assert_eq!(masked("store: postgres://me:hün/t@r@host/db"), "store: postgres://me:********@host/db");
        assert_eq!(masked("store: postgres://me:pw@host/db"), "store: postgres://me:**@host/db");
        assert_eq!(masked("a: x://u:p@h, b: y://v:qq@i"), "a: x://u:*@h, b: y://v:**@i");
        assert_eq!(masked("http://host/x"), "http://host/x");
        assert_eq!(masked("store: postgres://h/d?password=pw&a=b"), "store: postgres://h/d?password=**&a=b");
    }

    #[test]
    fn a_place_is_found_in_any_line() {
        let source = Source::new("f".into(), "ä: 1\r\nbb: 22\n".into());
        let place = source.place(Span { file: 0, start: 11, end: 13 });
        assert_eq!((place.line, place.column, &place.excerpt[place.range.clone()]), (2, 5, "22"));
        let last = source.place(Span { file: 0, start: 99, end: 120 });
        assert_eq!((last.line, last.excerpt.as_str(), last.range), (3, "", 0..0));
        let whole = source.place(Span { file: 0, start: 0, end: 13 });
        assert_eq!((whole.line, whole.range), (1, 0..5));
    }

    #[test]
    fn a_long_line_is_cut_around_the_span() {
        let source = Source::new("f".into(), format!("{}X{}", "ä".repeat(5000), "b".repeat(5000)));
        let place = source.place(Span { file: 0, start: 10000, end: 10001 });
        assert_eq!(&place.excerpt[place.range.clone()], "X");
        assert!(place.excerpt.len() < 400);
    }
}
