//! What is wrong with a file, where, and the way out; and how that is shown.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use crate::mask::{Above, Keys, is_word, masked, masked_text};

/// How many mistakes are shown, and how many warnings. Nobody reads more, and each is kept with its line, which may be long.
pub(crate) const MISTAKES_MAX: usize = 500;

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
    /// So much of the message is for those who may not read the file; the rest quotes it. Zero if it is about a value that
    /// came from the environment.
    pub(crate) told: usize,
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
        let message = message.into();
        Problem {
            severity,
            told: message.len(),
            message,
            place: None,
            other: None,
            help: None,
            schedule: None,
            order: (0, 0),
        }
    }

    /// Stands for all those that are not kept, and comes behind those that are.
    pub(crate) fn more(severity: Severity) -> Problem {
        let what = match severity {
            Severity::Error | Severity::Invalid => "mistakes",
            Severity::Warning => "warnings",
        };
        let message = format!("there are more {what} than the {MISTAKES_MAX} that are shown");
        Problem::new(severity, message)
    }

    /// Says the way out.
    pub(crate) fn help(&mut self, help: impl Into<String>) -> &mut Problem {
        self.help = Some(help.into());
        self
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

    /// Where it is and what is wrong, in one line and without what the file says: for those who may not read it.
    pub fn brief(&self) -> String {
        let place = self.place.as_ref().map(|place| format!("{}:{}: ", place.path, place.line));
        let told = match self.told {
            0 => "a value that came from the environment is wrong",
            told => &self.message[..told],
        };
        format!("{}{told}", place.unwrap_or_default())
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
    /// How many there are beside the first, in words; none if it is alone.
    pub fn others(&self) -> Option<String> {
        match self.problems.len() {
            0 | 1 => None,
            n if n > MISTAKES_MAX => Some(format!("at least {MISTAKES_MAX} more")),
            n => Some(format!("{} more", n - 1)),
        }
    }

    /// All of them, each as [`Problem::brief`] says it.
    pub fn brief(&self) -> String {
        let said: Vec<_> = self.problems.iter().map(Problem::brief).collect();
        said.join("; ")
    }

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Span {
    pub file: usize,
    pub start: usize,
    pub end: usize,
}

/// A text that was read, and where its lines begin.
#[derive(Debug)]
pub(crate) struct Source {
    path: String,
    text: String,
    lines: Vec<usize>,
    /// How many characters stand before each block of [`BLOCK`] bytes, so that a column is found without a walk along its
    /// line.
    blocks: Vec<usize>,
    /// What was seen of lines: many mistakes have the same lines above them.
    seen: HashMap<usize, Line>,
}

/// What a line says about those below it.
#[derive(Debug, Clone, Copy)]
struct Line {
    blanks: usize,
    is_item: bool,
    /// Neither empty nor a comment.
    has_text: bool,
    keys: Keys,
}

/// A line is shown whole up to here; of a longer one, what is around the span.
const LINE_MAX: usize = 1000;
const COLUMN_MAX: usize = 4000;
const BLOCK: usize = 4096;
const BEFORE: usize = 60;
const AFTER: usize = 240;
/// How many lines above are looked at for the keys that a line belongs to. A line further below is hidden.
const LINES_ABOVE: usize = 10_000;

impl Source {
    pub fn new(path: String, text: String) -> Source {
        let lines = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let mut blocks = vec![0];
        for block in text.as_bytes().chunks(BLOCK) {
            blocks.push(blocks[blocks.len() - 1] + characters(block));
        }
        Source { path, text, lines, blocks, seen: HashMap::new() }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// The line that a byte is in, from 1 on.
    fn line_number(&self, at: usize) -> usize {
        self.lines.partition_point(|start| *start <= at).max(1)
    }

    pub fn line_of(&self, at: usize) -> &str {
        let line = self.line_number(at);
        let end = self.lines.get(line).map_or(self.text.len(), |next| next - 1);
        self.text.get(self.lines[line - 1]..end).unwrap_or_default().trim_end_matches('\r')
    }

    /// What the lines above a line say about it: those that it is a part of by its indentation, and the last with a key. A
    /// list may be indented as its key is.
    fn above(&mut self, line: usize) -> Above {
        let mut below = self.look_at(line);
        let mut lines = (1..line).rev().take(LINES_ABOVE).map(|line| self.look_at(line).keys);
        let before = lines.find(|keys| keys.last.is_some());
        let mut above = Above::new(before);
        for (looked_at, line) in (1..line).rev().enumerate() {
            if below.blanks == 0 && !below.is_item {
                return above;
            }
            if looked_at == LINES_ABOVE {
                return Above::UNKNOWN;
            }
            let line = self.look_at(line);
            let is_above =
                line.blanks < below.blanks || line.blanks == below.blanks && below.is_item && !line.is_item;
            if is_above && line.has_text {
                above.add(line.keys);
                below = line;
            }
        }
        above
    }

    fn look_at(&mut self, line: usize) -> Line {
        if let Some(seen) = self.seen.get(&line) {
            return *seen;
        }
        let whole = self.line_of(self.lines[line - 1]);
        let shown = &whole[..whole.floor_char_boundary(COLUMN_MAX)];
        let text = shown.trim_start();
        let seen = Line {
            blanks: shown.len() - text.len(),
            is_item: text
                .strip_prefix('-')
                .is_some_and(|item| item.is_empty() || item.starts_with([' ', '\t'])),
            has_text: !text.is_empty() && !text.starts_with('#'),
            keys: Keys::of(shown),
        };
        self.seen.insert(line, seen);
        seen
    }

    /// How many characters stand before a byte.
    fn characters_before(&self, at: usize) -> usize {
        let block = at / BLOCK;
        self.blocks[block] + characters(&self.text.as_bytes()[block * BLOCK..at])
    }

    /// The first line of a span, ready to be shown.
    pub fn place(&mut self, span: Span) -> Place {
        let above = self.above(self.line_number(span.start));
        let start = self.text.floor_char_boundary(span.start);
        let line = self.line_number(start);
        let begin = self.lines[line - 1];
        let shown = self.line_of(start);
        let from = (start - begin).min(shown.len());
        let end = self.text.ceil_char_boundary(span.end.max(start));
        let to = (end - begin).clamp(from, shown.len());
        let column = self.characters_before(begin + from) - self.characters_before(begin) + 1;
        let (cut, until) = if shown.len() <= LINE_MAX {
            (0, shown.len())
        } else {
            // The column that is shown is counted from the cut, so that comes late.
            let cut = if from <= COLUMN_MAX { 0 } else { shown.floor_char_boundary(from - BEFORE) };
            (cut, shown.floor_char_boundary((from + AFTER).min(shown.len())))
        };
        // The key of a secret may stand before the cut.
        let known = shown.floor_char_boundary(cut.saturating_sub(COLUMN_MAX));
        let above = if known > 0 { Above::UNKNOWN } else { above };
        let mut places = [cut - known, from - known, to.clamp(from, until) - known];
        let excerpt = masked(&shown[known..until], above, &mut places).split_off(places[0]);
        let range = places[1] - places[0]..places[2] - places[0];
        Place { path: self.path.clone(), line, column, excerpt, range }
    }
}

/// How many characters begin in these bytes of UTF-8.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| (**byte & 0b1100_0000) != 0b1000_0000).count()
}

/// A value inside a message: in backquotes, control characters escaped, passwords hidden, cut when long.
pub(crate) struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 60;
        let text = masked_text(self.0);
        let cut = text.floor_char_boundary(SHOWN);
        let more = if cut < text.len() { "…" } else { "" };
        write!(f, "`{}{more}`", Escaped(&text[..cut]))
    }
}

/// A key inside a message: in backquotes if it is a word. Other keys are often values that slipped into their place.
pub(crate) struct KeyName<'a>(pub &'a str);

impl fmt::Display for KeyName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match is_word(self.0) {
            true => Quoted(self.0).fmt(f),
            false => f.write_str("`…`"),
        }
    }
}

/// The same, not cut: for paths, which the system cuts.
pub(crate) struct Whole<'a>(pub &'a str);

impl fmt::Display for Whole<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", Escaped(&masked_text(self.0)))
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

    /// The lines of a text as they are shown in an error.
    fn excerpts(text: &str) -> Vec<String> {
        let mut source = Source::new("f".into(), text.into());
        let starts = source.lines.clone();
        starts.into_iter().map(|start| source.place(Span { file: 0, start, end: start }).excerpt).collect()
    }

    #[test]
    fn a_secret_is_not_shown_wherever_it_stands() {
        let key = "-----BEGIN KEY-----\nProc-Type: 4,zz\n\nzzMII=\nzz==\n-----END KEY-----";
        let pasted = |indent: &str| key.replace('\n', &format!("\n{indent}"));
        for text in [
            "env:\n  MY_TOKEN: |\n\n    zz\n    cron: zz\nsecrets:\n# why\n- zz\n",
            "a:\n  secrets:\n  -\n    zz\n  -\tzz\n  - \"zz: zz\"\n",
            "a:\n  shell: x\n  env:\n  MY_TOKEN: zz\n  signing_secret: zz\n  webhook_secret:\n    - \"a: zz\"\n",
            "api: {token: zz}\napi:\n  token:\n    zz\n",
            "a:\n\tenv:\n\tMY_TOKEN: zz\n\t\tzz\n",
            "env:\n- {name: A, value: zz}\n- name: A\n  value: zz\n- A=zz\n",
            "env: {\n  A: zz,\n  \"timeout\": \"zz\",\n  B:\n  zz }\n",
            "{\n\"secret\":\n\"zz\",\n\"secrets\": [\n\"zz\",\n\"zz\"\n]}",
            "shell: x\n? secret\n: zz\n? env\n: A: zz\n",
            "a:\n  my_token:\n    env: {A: zz}\n    b: \"zz\n      cron: zz\"\n",
            "MY_KEY: zz\n  cron: zz\n",
            "zz\n",
            "agents:\n  a:\n    shell: x\n    timeout: 5m\n  STRIPE=zz\n  b:\n    schedules:\n      DB_PASS=zz: x\n",
            "env:\n  DB_PASS:\n    zz:\n",
            "env:\n  DB_PASS: \"a\nzz: b\n",
            "webhook: >\n  zz\nwebhook:\n  - zz\n",
            "webhook: {\nsecret\": \"zz\",\n“secret\": \"zz\"",
            &format!("env:\n  MY_KEY: |\n    {}\n  zz\nzz\n", pasted("    ")),
            &format!("env:\n  MY_KEY: |\n{key}\n"),
            &format!("env:\n{}  MY_TOKEN: zz\n", "  A: b\n".repeat(300)),
        ] {
            for line in excerpts(text) {
                assert!(!line.contains("zz"), "{line} of:\n{}", text.get(..300).unwrap_or(text));
            }
        }
        let far = format!("env:\n{}  cron: zz\n", "  A: b\n".repeat(LINES_ABOVE + 10));
        let mut source = Source::new("f".into(), far.clone());
        let at = far.find("zz").unwrap();
        assert_eq!(source.place(Span { file: 0, start: at, end: at + 2 }).excerpt, "  ********");
        let long = format!("{}secret: zz {}", "ä ".repeat(5000), "b".repeat(5000));
        let mut source = Source::new("f".into(), long.clone());
        let at = long.find("zz").unwrap();
        let excerpt = source.place(Span { file: 0, start: at, end: at + 2 }).excerpt;
        assert!(excerpt.starts_with("**") && !excerpt.contains("zz"), "what is far before it may be a key");
    }

    #[test]
    fn a_value_that_is_no_secret_is_shown() {
        let text = "agents:\n  token-refresh:\n    run:\n    - echo\n    -\n      a, b\n    prompt: |\n      Note: a\n\n        b\n    schedules:\n      s: {cron: \"61 * * * *\", every: 5}\n      t:\n        at: 2027-01-01T10:00\n        not_on:\n          [sat,\n          sun]\n";
        let lines: Vec<_> = text.lines().map(str::to_owned).chain([String::new()]).collect();
        assert_eq!(excerpts(text), lines);
    }

    #[test]
    fn a_place_is_found_in_any_line() {
        let mut source = Source::new("f".into(), "ä: 1\r\nat: 22\n".into());
        let place = source.place(Span { file: 0, start: 11, end: 13 });
        assert_eq!((place.line, place.column, &place.excerpt[place.range.clone()]), (2, 5, "22"));
        let last = source.place(Span { file: 0, start: 99, end: 120 });
        assert_eq!((last.line, last.excerpt.as_str(), last.range), (3, "", 0..0));
        let whole = source.place(Span { file: 0, start: 0, end: 13 });
        assert_eq!((whole.line, whole.range), (1, 0..4));
    }

    #[test]
    fn a_column_counts_the_characters_of_its_line() {
        let line = "aä€𝄞".repeat(2 * BLOCK);
        let text = format!("é{line}\n{line}");
        let mut source = Source::new("f".into(), text.clone());
        for around in
            [0, BLOCK, 2 * BLOCK, 10 * BLOCK, 1 + line.len() + 2, 5 * BLOCK + line.len(), text.len()]
        {
            for start in (around.saturating_sub(8)..around + 8).filter(|at| text.is_char_boundary(*at)) {
                let begin = text[..start].rfind('\n').map_or(0, |at| at + 1);
                let place = source.place(Span { file: 0, start, end: start });
                assert_eq!(place.column, text[begin..start].chars().count() + 1, "{start}");
            }
        }
    }

    #[test]
    fn a_column_is_found_at_the_end_of_a_whole_block() {
        for length in [0, BLOCK, 2 * BLOCK] {
            let mut source = Source::new("f".into(), "x".repeat(length));
            assert_eq!(source.place(Span { file: 0, start: length, end: length }).column, length + 1);
        }
    }

    #[test]
    fn a_line_is_looked_at_once_for_all_that_is_below_it() {
        let text = format!("a:\n  b: [\n    {}]\n", vec!["x"; 500].join(", "));
        let mut source = Source::new("f".into(), text.clone());
        for (start, _) in text.match_indices('x') {
            source.place(Span { file: 0, start, end: start + 1 });
        }
        assert_eq!(source.seen.len(), 3);
    }

    #[test]
    fn a_long_line_is_cut_around_the_span() {
        let mut source = Source::new("f".into(), format!("at: {}X{}", "ä".repeat(2015), "b".repeat(5000)));
        let place = source.place(Span { file: 0, start: 4034, end: 4035 });
        assert_eq!(&place.excerpt[place.range.clone()], "X");
        assert!(place.excerpt.len() < 400);
    }
}
