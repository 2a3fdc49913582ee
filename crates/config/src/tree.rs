//! YAML as a tree in which every key and value knows where it was written, and how.
//!
//! Values stay text until a key says what they mean: `5` is no duration, `no` is no boolean, and both can be shown as
//! they were written. Anchors, aliases and merge keys are resolved here, within bounds; tags are refused.

use std::collections::HashMap;

use granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError};
use serde_json::{Map, Number, Value};

use crate::problem::{KeyName, MISTAKES_MAX, Span};

/// A value and where it is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub span: Span,
    pub data: Data,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Data {
    /// `plain`: written without quotes, so that in JSON `true` and `5` are no text.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Key {
    pub text: String,
    pub span: Span,
}

impl Node {
    pub fn scalar(span: Span, text: impl Into<String>, plain: bool) -> Node {
        Node { span, data: Data::Scalar { text: text.into(), plain } }
    }

    /// Nothing was written: an empty value, `null` or `~`.
    pub fn is_null(&self) -> bool {
        matches!(&self.data, Data::Scalar { text, plain: true } if is_null(text))
    }

    /// It is this word; in quotes too, as JSON has it.
    pub fn is_word(&self, word: &str) -> bool {
        matches!(&self.data, Data::Scalar { text, .. } if text == word)
    }

    /// It is this word, without quotes: where any text is allowed, the word in quotes is text.
    pub fn is_plain_word(&self, word: &str) -> bool {
        matches!(&self.data, Data::Scalar { text, plain: true } if text == word)
    }

    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.data {
            Data::Scalar { text, .. } if !self.is_null() => Some(text),
            _ => None,
        }
    }

    pub fn entries(&self) -> &[(Key, Node)] {
        match &self.data {
            Data::Map(entries) => entries,
            _ => &[],
        }
    }

    pub fn items(&self) -> &[Node] {
        match &self.data {
            Data::List(items) => items,
            _ => &[],
        }
    }

    pub fn entry(&self, key: &str) -> Option<&(Key, Node)> {
        self.entries().iter().find(|(k, _)| k.text == key)
    }

    /// The value of a key that was written and not left empty.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entry(key).map(|(_, node)| node).filter(|node| !node.is_null())
    }

    fn depth(&self) -> usize {
        match &self.data {
            Data::Scalar { .. } => 0,
            Data::List(items) => 1 + items.iter().map(Node::depth).max().unwrap_or(0),
            Data::Map(entries) => 1 + entries.iter().map(|(_, node)| node.depth()).max().unwrap_or(0),
        }
    }

    /// What it takes in memory, about.
    pub fn bytes(&self) -> usize {
        let inside: usize = match &self.data {
            Data::Scalar { text, .. } => text.len(),
            Data::List(items) => items.iter().map(Node::bytes).sum(),
            Data::Map(entries) => {
                entries.iter().map(|(key, node)| NODE_BYTES + key.text.len() + node.bytes()).sum()
            }
        };
        NODE_BYTES + inside
    }

    /// What it is, in words, for a message; not what it says, which may be a secret.
    pub fn describe(&self) -> &'static str {
        match &self.data {
            Data::Scalar { .. } if self.is_null() => "nothing",
            Data::Scalar { .. } => match self.json() {
                Ok(Value::Bool(_)) => "a flag",
                Ok(Value::Number(_)) | Err(_) => "a number",
                Ok(_) => "a text",
            },
            Data::List(_) => "a list",
            Data::Map(_) => "a map",
        }
    }

    /// As JSON: plain words and numbers are what YAML 1.2 says they are. A number that JSON cannot hold is given back.
    pub fn json(&self) -> Result<Value, &Node> {
        Ok(match &self.data {
            Data::Scalar { text, plain: true } => plain_json(text).ok_or(self)?,
            Data::Scalar { text, plain: false } => Value::String(text.clone()),
            Data::List(items) => Value::Array(items.iter().map(Node::json).collect::<Result<_, _>>()?),
            Data::Map(entries) => {
                let pairs = entries.iter().map(|(key, node)| Ok((key.text.clone(), node.json()?)));
                Value::Object(pairs.collect::<Result<Map<_, _>, &Node>>()?)
            }
        })
    }
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

fn plain_json(text: &str) -> Option<Value> {
    if is_null(text) {
        return Some(Value::Null);
    }
    match text {
        "true" | "True" | "TRUE" => return Some(Value::Bool(true)),
        "false" | "False" | "FALSE" => return Some(Value::Bool(false)),
        _ => {}
    }
    if !looks_like_number(text) {
        return Some(Value::String(text.to_owned()));
    }
    if let Ok(number) = text.parse::<i64>() {
        return Some(number.into());
    }
    if let Ok(number) = text.parse::<u64>() {
        return Some(number.into());
    }
    text.parse::<f64>().ok().and_then(Number::from_f64).map(Value::Number)
}

/// `[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?`
fn looks_like_number(text: &str) -> bool {
    let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    let whole = digits(rest);
    rest = &rest[whole..];
    let mut decimals = 0;
    if let Some(fraction) = rest.strip_prefix('.') {
        decimals = digits(fraction);
        rest = &fraction[decimals..];
    }
    if whole + decimals == 0 {
        return false;
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let exponent = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        return !exponent.is_empty() && digits(exponent) == exponent.len();
    }
    rest.is_empty()
}

/// What is wrong with a text as YAML.
#[derive(Debug)]
pub(crate) struct Flaw {
    pub span: Span,
    pub message: String,
    pub help: Option<String>,
    /// Where the same was written before.
    pub first: Option<Span>,
}

/// How deep values may be nested.
const DEPTH_MAX: usize = 64;
/// Maximum length of a key in quotes. YAML takes no longer ones in what is written as a whole, as definitions are shown.
const KEY_MAX: usize = 1_000;
/// What a value takes in memory beside its text, about.
const NODE_BYTES: usize = 64;

/// How large a document may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Maximum number of values, aliases counted as what they stand for.
    pub nodes: usize,
    /// Maximum size of all values with anchors and of what all aliases stand for together, in bytes: they are copies.
    pub aliased: usize,
}

impl Bounds {
    /// Of a file.
    pub const FILE: Bounds = Bounds { nodes: 1_000_000, aliased: 64 << 20 };
    /// Of one agent, which may come from somebody else: the number of values is that of a JSON body.
    pub const FRAGMENT: Bounds = Bounds { nodes: 131_072, aliased: 64 << 10 };
    /// Of one schedule. Lists of schedules read many of them at once.
    pub const SCHEDULE: Bounds = Bounds { nodes: 4_096, aliased: 64 << 10 };
}

/// Reads one document. Flaws that leave a tree standing come with it.
pub(crate) fn parse(file: usize, text: &str, bounds: Bounds) -> (Option<Node>, Vec<Flaw>) {
    let mut builder = Builder {
        file,
        bounds,
        stack: Vec::new(),
        anchors: HashMap::new(),
        nodes: 0,
        aliased: 0,
        documents: 0,
        root: None,
        flaws: Vec::new(),
    };
    let mut options = granit_parser::Options::default();
    options.emit_comments = false;
    for next in Parser::new_from_str_with_options(text, options) {
        let step = match next {
            Ok((event, span)) => {
                let range = span.byte_range().unwrap_or_default();
                let tag = span.tag_span().and_then(|tag| tag.byte_range());
                builder.event(event, Span { file, start: range.start, end: range.end }, tag)
            }
            Err(error) => {
                let marked = error.marker().byte_offset().unwrap_or_default();
                let (start, message, help) = match hidden(text.get(marked..).unwrap_or_default(), &error) {
                    Some((at, c)) => {
                        let code = u32::from(c);
                        let help =
                            format!("write \"\\u{code:04x}\" in double quotes, or remove the character");
                        let message = format!("the character U+{code:04X} cannot stand in YAML as it is");
                        (marked + at, message, Some(help))
                    }
                    None => (marked, format!("not YAML: {}", error.info()), None),
                };
                Err(Flaw { span: Span { file, start, end: start }, message, help, first: None })
            }
        };
        if let Err(flaw) = step {
            builder.flaws.push(flaw);
            return (None, builder.flaws);
        }
        // One more than is shown, so that it is told that there are more.
        if builder.flaws.len() > MISTAKES_MAX {
            return (None, builder.flaws);
        }
    }
    let empty = Node::scalar(Span { file, start: 0, end: 0 }, "", true);
    (Some(builder.root.unwrap_or(empty)), builder.flaws)
}

/// The character for which a text is refused, if it is one that cannot stand in YAML, and its place. `rest` begins with
/// it, or with the value that holds it.
fn hidden(rest: &str, error: &ScanError) -> Option<(usize, char)> {
    let named = match error.kind() {
        ErrorKind::UnexpectedCharacter { character } => Some(*character),
        _ => rest.chars().next(),
    };
    let c = named.filter(|c| !is_writable(*c))?;
    Some((rest.find(c)?, c))
}

/// Whether a character may stand in YAML as it is. Control characters may not, most of which nobody sees in an editor.
fn is_writable(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{85}' | '\u{feff}')
        || !(c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'))
}

struct Builder {
    file: usize,
    bounds: Bounds,
    stack: Vec<Frame>,
    /// What aliases stand for.
    anchors: HashMap<usize, Anchored>,
    nodes: usize,
    /// The size of copies so far, of values with anchors and for aliases.
    aliased: usize,
    documents: usize,
    root: Option<Node>,
    flaws: Vec<Flaw>,
}

/// What an alias stands for.
struct Anchored {
    node: Node,
    /// How many values that is.
    nodes: usize,
    depth: usize,
    bytes: usize,
}

struct Frame {
    start: usize,
    anchor: usize,
    nodes_before: usize,
    inside: Inside,
}

enum Inside {
    List(Vec<Node>),
    Map {
        entries: Vec<(Key, Node)>,
        places: HashMap<String, Span>,
        merges: Vec<Node>,
        /// The key whose value comes next, and whether it is the merge key: `<<` without quotes.
        key: Option<(Key, bool)>,
    },
}

impl Builder {
    fn event(
        &mut self,
        event: Event<'_>,
        span: Span,
        tag: Option<std::ops::Range<usize>>,
    ) -> Result<(), Flaw> {
        if let Some(tag) = tag {
            return Err(Flaw {
                span: Span { file: self.file, start: tag.start, end: tag.end },
                message: "tags are not supported".into(),
                help: Some("remove the tag; put a value into quotes to make it text".into()),
                first: None,
            });
        }
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(Flaw {
                        span,
                        message: "a second document begins here, but a file holds one".into(),
                        help: Some("move it to a file of its own and name that under `include`".into()),
                        first: None,
                    });
                }
            }
            Event::Scalar(text, style, anchor, _) => {
                self.count(span, 1)?;
                let plain = style == ScalarStyle::Plain;
                let node = Node::scalar(span, text, plain);
                if node.text().is_some_and(|text| text.contains('\0')) {
                    return Err(Flaw {
                        span,
                        message: "a value holds a NUL character".into(),
                        help: None,
                        first: None,
                    });
                }
                self.remember(anchor, &node, 1)?;
                self.place(node)?;
            }
            Event::Alias(id) => {
                let Some(anchored) = self.anchors.get(&id) else {
                    return Err(Flaw {
                        span,
                        message: "an alias inside of what it stands for".into(),
                        help: None,
                        first: None,
                    });
                };
                // Counted before it is copied: a bomb costs nothing.
                let nodes = anchored.nodes;
                if self.stack.len() + anchored.depth > DEPTH_MAX {
                    return Err(too_deep(span));
                }
                let bytes = anchored.bytes;
                self.count_copy(span, bytes)?;
                let Some(anchored) = self.anchors.get(&id) else { return Ok(()) };
                if self.nodes + nodes <= self.bounds.nodes {
                    let node = anchored.node.clone();
                    self.count(span, nodes)?;
                    self.place(node)?;
                } else {
                    self.count(span, nodes)?;
                }
            }
            Event::SequenceStart(_, anchor, _) => self.open(span, anchor, Inside::List(Vec::new()))?,
            Event::MappingStart(_, anchor, _) => {
                let inside = Inside::Map {
                    entries: Vec::new(),
                    places: HashMap::new(),
                    merges: Vec::new(),
                    key: None,
                };
                self.open(span, anchor, inside)?;
            }
            Event::SequenceEnd | Event::MappingEnd => self.close(span)?,
            _ => {}
        }
        Ok(())
    }

    fn count(&mut self, span: Span, nodes: usize) -> Result<(), Flaw> {
        self.nodes = self.nodes.saturating_add(nodes);
        let most = self.bounds.nodes;
        if self.nodes <= most {
            return Ok(());
        }
        Err(too_large(span, &format!("more than {most} values, aliases counted as what they stand for")))
    }

    fn open(&mut self, span: Span, anchor: usize, inside: Inside) -> Result<(), Flaw> {
        let nodes_before = self.nodes;
        self.count(span, 1)?;
        if self.stack.len() >= DEPTH_MAX {
            return Err(too_deep(span));
        }
        self.stack.push(Frame { start: span.start, anchor, nodes_before, inside });
        Ok(())
    }

    fn close(&mut self, span: Span) -> Result<(), Flaw> {
        let Some(frame) = self.stack.pop() else { return Ok(()) };
        let data = match frame.inside {
            Inside::List(items) => Data::List(items),
            Inside::Map { mut entries, mut places, merges, .. } => {
                for (key, node) in merges.into_iter().flat_map(into_entries) {
                    if places.insert(key.text.clone(), key.span).is_none() {
                        entries.push((key, node));
                    }
                }
                Data::Map(entries)
            }
        };
        let span = Span { file: self.file, start: frame.start, end: span.end.max(frame.start) };
        let node = Node { span, data };
        let nodes = self.nodes - frame.nodes_before;
        self.remember(frame.anchor, &node, nodes)?;
        self.place(node)
    }

    fn remember(&mut self, anchor: usize, node: &Node, nodes: usize) -> Result<(), Flaw> {
        if anchor > 0 {
            let (depth, bytes) = (node.depth(), node.bytes());
            self.count_copy(node.span, bytes)?;
            self.anchors.insert(anchor, Anchored { node: node.clone(), nodes, depth, bytes });
        }
        Ok(())
    }

    /// Counts a copy before it is made.
    fn count_copy(&mut self, span: Span, bytes: usize) -> Result<(), Flaw> {
        self.aliased = self.aliased.saturating_add(bytes);
        if self.aliased <= self.bounds.aliased {
            return Ok(());
        }
        let most = match self.bounds.aliased >> 10 {
            kib if kib < 1024 => format!("{kib} KiB"),
            kib => format!("{} MiB", kib >> 10),
        };
        Err(too_large(span, &format!("its aliases stand for more than {most}")))
    }

    /// Puts a value where it belongs.
    fn place(&mut self, node: Node) -> Result<(), Flaw> {
        let Some(frame) = self.stack.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match &mut frame.inside {
            Inside::List(items) => items.push(node),
            Inside::Map { entries, places, merges, key } => match key.take() {
                None => {
                    let Data::Scalar { text, plain } = node.data else {
                        return Err(Flaw {
                            span: node.span,
                            message: "a key must be text, not a list or a map".into(),
                            help: Some("put a value that starts with `{` or `[` into quotes".into()),
                            first: None,
                        });
                    };
                    if serde_json::to_string(&text).map_or(0, |written| written.chars().count()) > KEY_MAX {
                        return Err(too_large(
                            node.span,
                            &format!("a key of more than {KEY_MAX} characters"),
                        ));
                    }
                    let merge = plain && text == "<<";
                    let before = places.insert(text.clone(), node.span);
                    if let Some(before) = before.filter(|_| !merge) {
                        self.flaws.push(Flaw {
                            span: node.span,
                            message: format!("the key {} is written twice", KeyName(&text)),
                            help: Some("remove one of the two".into()),
                            first: Some(before),
                        });
                    }
                    *key = Some((Key { text, span: node.span }, merge));
                }
                Some((_, true)) => match node.data {
                    Data::Map(_) => merges.push(node),
                    Data::List(items) if items.iter().all(|item| matches!(item.data, Data::Map(_))) => {
                        merges.extend(items);
                    }
                    _ => {
                        return Err(Flaw {
                            span: node.span,
                            message: "`<<` takes over the keys of a map, or of each map in a list".into(),
                            help: None,
                            first: None,
                        });
                    }
                },
                Some((key, false)) => entries.push((key, node)),
            },
        }
        Ok(())
    }
}

fn too_large(span: Span, why: &str) -> Flaw {
    Flaw { span, message: format!("too large: {why}"), help: None, first: None }
}

fn too_deep(span: Span) -> Flaw {
    Flaw {
        span,
        message: format!("nested too deeply: more than {DEPTH_MAX} levels"),
        help: None,
        first: None,
    }
}

fn into_entries(node: Node) -> Vec<(Key, Node)> {
    match node.data {
        Data::Map(entries) => entries,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_yaml() {
        for text in ["0", "-1", "+1", "1.5", ".5", "1.", "1e3", "1E-3"] {
            assert!(looks_like_number(text), "{text}");
        }
        for text in ["", ".", "-", "1_000", "0x1", "1e", "e1", "1.2.3", "NaN", "inf", "٣"] {
            assert!(!looks_like_number(text), "{text}");
        }
        assert_eq!(plain_json("1e400"), None);
        assert_eq!(plain_json("18446744073709551615"), Some(u64::MAX.into()));
    }
}
