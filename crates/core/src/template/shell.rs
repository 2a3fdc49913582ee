//! Lines of `shell:`. They are no templates: the shell gets them as written, and values come as environment variables. A
//! line that looks as if it waited for a value is refused, with the line that works.

use std::ops::Range;

use super::{NAMES, ParseError};

/// Names that the shell or the system gives a meaning to.
const TAKEN: [&str; 12] =
    ["PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "TERM", "SHELL", "IFS", "PWD", "ENV", "PS4"];

/// Maximum length of a `shell` line, in bytes.
pub const LINE_MAX: usize = 64 << 10;
/// A longer line is not rewritten in an error, in characters.
const SHOWN_MAX: usize = 1_000;
/// A line with more values is not rewritten in an error.
const VALUES_MAX: usize = 8;

/// Refuses a line that is too long, and a line with `{{` before one of [`NAMES`]. Any other `{{` is text.
pub fn check_line(line: &str) -> Result<(), ParseError> {
    if line.len() > LINE_MAX {
        let message = format!("a `shell` line has at most {LINE_MAX} bytes, this one has {}", line.len());
        let help = "put the text into a file, and run that".to_owned();
        return Err(ParseError { range: 0..0, message, found: Box::default(), help: Some(help) });
    }
    let Some(range) = find(line, 0) else { return Ok(()) };
    let message = "a `shell` line is not a template: values come as environment variables".to_owned();
    Err(ParseError { range, message, found: Box::default(), help: Some(way_out(line)) })
}

/// How a line that is refused can be written: the line itself, where it is short.
fn way_out(line: &str) -> String {
    let Some(variables) = (line.chars().count() <= SHOWN_MAX).then(|| variables(line)).flatten() else {
        return "write `env: {NAME: \"{{ payload.name }}\"}`, and `\"$NAME\"`, in double quotes, where a value belongs"
            .to_owned();
    };
    let mut env: Vec<String> = Vec::new();
    for (_, name, value) in &variables {
        let entry = format!("{name}: \"{}\"", value.replace('"', "'"));
        if !env.contains(&entry) {
            env.push(entry);
        }
    }
    let env = format!("env: {{{}}}", env.join(", "));
    match rewritten(line, &variables) {
        Some(line) => format!("write `{env}` and `shell: {line}`"),
        None => {
            let name = variables.first().map_or("NAME", |(_, name, _)| name.as_str());
            format!("write `{env}`, and `\"${name}\"`, in double quotes, where the value belongs")
        }
    }
}

/// The first `{{ name … }}` from a place on, or as much of it as there is.
fn find(line: &str, from: usize) -> Option<Range<usize>> {
    let bytes = line.as_bytes();
    (from..line.len()).find_map(|start| {
        let inner = bytes[start..].strip_prefix(b"{{")?;
        let blanks = inner.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let is_word = |byte: &&u8| byte.is_ascii_alphanumeric() || **byte == b'_';
        let length = inner[blanks..].iter().take_while(is_word).count();
        let name = start + 2 + blanks;
        NAMES.contains(&&line[name..name + length]).then(|| {
            let path = line[name..].find(|c: char| c.is_whitespace()).map_or(line.len(), |at| name + at);
            start..line[start..].find("}}").map_or(path, |at| start + at + 2)
        })
    })
}

/// Each place of a value, with the variable for it and the template that fills the variable. None where there are more
/// than [`VALUES_MAX`] places.
fn variables(line: &str) -> Option<Vec<(Range<usize>, String, String)>> {
    let mut found: Vec<(Range<usize>, String, String)> = Vec::new();
    let mut at = 0;
    while let Some(range) = find(line, at) {
        if found.len() == VALUES_MAX {
            return None;
        }
        at = range.end;
        let inner = line[range.clone()].trim_start_matches('{').trim_end_matches('}').trim();
        let value = format!("{{{{ {inner} }}}}");
        let known = found.iter().find(|(_, _, other)| *other == value).map(|(_, name, _)| name.clone());
        let name = known.unwrap_or_else(|| {
            let name = variable(inner);
            let same = found.iter().filter(|(_, other, _)| other.starts_with(&name)).count();
            if same == 0 { name } else { format!("{name}_{}", same + 1) }
        });
        found.push((range, name, value));
    }
    Some(found)
}

/// A name for the variable of a path: its last key.
fn variable(expression: &str) -> String {
    let path = expression.split('|').next().unwrap_or_default().trim();
    let upper = |text: &str| -> String {
        text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect()
    };
    let last = upper(path.rsplit('.').next().unwrap_or_default());
    let is_free = !last.starts_with(|c: char| c.is_ascii_digit() || c == '_')
        && !TAKEN.contains(&last.as_str())
        && !["LC_", "LD_", "BELFRY_"].iter().any(|prefix| last.starts_with(prefix));
    if is_free { last } else { upper(path) }
}

/// The line with variables in the places of values. None where quoting is not plain to see: then a wrong guess would split
/// the value.
fn rewritten(line: &str, variables: &[(Range<usize>, String, String)]) -> Option<String> {
    if line.contains(['\'', '\\', '`', '#', '<', '\n']) || line.contains("$(") {
        return None;
    }
    let mut out = String::new();
    let mut at = 0;
    let mut quoted = false;
    for (range, name, _) in variables {
        let before = &line[at..range.start];
        quoted ^= before.matches('"').count() % 2 == 1;
        out.push_str(before);
        out.push_str(&if quoted { format!("${{{name}}}") } else { format!("\"${name}\"") });
        at = range.end;
    }
    out.push_str(&line[at..]);
    Some(out)
}
