//! Templates of `run`, `shell` and `prompt`. The text of a template comes from the agent's definition; payloads and
//! prompts only ever go in as values, and what a value holds is never read as a template.
//!
//! In `shell` a value is not even text of the line: each `{{ … }}` becomes a variable of the shell, which no quoting
//! context can turn into structure. `{{ … | raw }}` opts out.

use std::io;
use std::sync::{Arc, LazyLock};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior};
use parking_lot::Mutex;

use crate::error::Error;

/// Steps a template may take: far more than any line needs, some milliseconds at most.
const FUEL: u64 = 200_000;
/// What a template may grow to; the kernel takes less than this as arguments.
const LONGEST: usize = 16 << 20;
/// The variables that hold the values of a `shell` template.
const VARIABLE: &str = "BELFRY_ARG_";

static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(environment);

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    if let Ok(syntax) = SyntaxConfig::builder().keep_trailing_newline(true).build() {
        environment.set_syntax(syntax);
    }
    environment
}

/// Renders `source`; an error names the template.
pub(crate) fn render(name: &str, source: &str, values: &Value) -> Result<String, Error> {
    if !is_template(source) {
        return Ok(source.to_owned());
    }
    render_with(&PLAIN, name, source, values)
}

/// A line for `sh -c` and the variables it refers to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ShellLine {
    pub line: String,
    pub variables: Vec<(String, String)>,
}

/// Renders a line for the shell, in which values are variables.
pub(crate) fn render_shell(source: &str, values: &Value) -> Result<ShellLine, Error> {
    if !is_template(source) {
        return Ok(ShellLine { line: source.to_owned(), variables: Vec::new() });
    }
    if source.contains('\0') {
        return Err(Error::Template { name: "shell".into(), message: "a NUL byte in the line".into() });
    }
    // While it is rendered a value is a number between NUL bytes, which no line can hold otherwise.
    let collected = Arc::new(Mutex::new(Vec::<String>::new()));
    let mut environment = environment();
    environment.add_filter("raw", |value: Value| Value::from_object(Raw(value.to_string())));
    let values_of = collected.clone();
    environment.set_formatter(move |out, _, value| {
        if value.is_undefined() {
            return Err(minijinja::Error::from(ErrorKind::UndefinedError));
        }
        let text = match value.downcast_object_ref::<Raw>() {
            Some(Raw(text)) if text.contains('\0') => {
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "a NUL byte in a raw value"));
            }
            Some(Raw(text)) => text.clone(),
            None => {
                let mut collected = values_of.lock();
                let text =
                    replace_marks(&value.to_string(), |n| collected.get(n).cloned().unwrap_or_default());
                collected.push(text);
                format!("\0{}\0", collected.len() - 1)
            }
        };
        out.write_str(&text).map_err(minijinja::Error::from)
    });
    let rendered = render_with(&environment, "shell", source, values)?;
    let mut quotes = Quotes::default();
    let mut line = String::with_capacity(rendered.len() + 64);
    for (i, part) in rendered.split('\0').enumerate() {
        if i % 2 == 0 {
            quotes.pass(part);
            line.push_str(part);
        } else {
            let number = part.parse::<usize>().unwrap_or(usize::MAX).saturating_add(1);
            line.push_str(&quotes.reference(&format!("${{{VARIABLE}{number}}}")));
        }
    }
    let values = std::mem::take(&mut *collected.lock());
    let variables = values.into_iter().enumerate();
    Ok(ShellLine {
        line,
        variables: variables.map(|(i, text)| (format!("{VARIABLE}{}", i + 1), text)).collect(),
    })
}

fn is_template(source: &str) -> bool {
    ["{{", "{%", "{#"].iter().any(|mark| source.contains(mark))
}

fn render_with(
    environment: &Environment<'_>,
    name: &str,
    source: &str,
    values: &Value,
) -> Result<String, Error> {
    let wrong = |message: String| Error::Template { name: name.to_owned(), message };
    let template =
        environment.template_from_named_str(name, source).map_err(|error| wrong(describe(&error)))?;
    let mut out = Limited(Vec::new());
    match template.render_captured_to(values.clone(), &mut out) {
        Ok(_) => String::from_utf8(out.0).map_err(|error| wrong(error.to_string())),
        Err(_) if out.0.len() >= LONGEST => Err(wrong(format!("longer than {} MiB", LONGEST >> 20))),
        Err(error) => Err(wrong(describe(&error))),
    }
}

fn describe(error: &minijinja::Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => format!("more than {FUEL} steps"),
        kind => kind.to_string(),
    };
    if let Some(detail) = error.detail() {
        text.push_str(": ");
        text.push_str(detail);
    }
    if let Some(range) = error.range()
        && let Some(part) = error.template_source().and_then(|source| source.get(range))
    {
        text.push_str(&format!(" (`{part}`)"));
    }
    if let Some(line) = error.line() {
        text.push_str(&format!(" in line {line}"));
    }
    text
}

struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = LONGEST - self.0.len();
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if bytes.len() > room { Err(io::Error::other("too long")) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What `| raw` gives: text of the line.
#[derive(Debug)]
struct Raw(String);

impl Object for Raw {
    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

fn replace_marks(text: &str, value: impl Fn(usize) -> String) -> String {
    if !text.contains('\0') {
        return text.to_owned();
    }
    let parts = text.split('\0').enumerate();
    parts
        .map(|(i, part)| match part.parse::<usize>() {
            Ok(n) if i % 2 == 1 => value(n),
            _ => part.to_owned(),
        })
        .collect()
}

/// Where in a shell line we are, as far as quoting goes. It only decides how a variable is written: where it errs, a
/// value may be split into words, but never becomes structure.
#[derive(Default)]
struct Quotes {
    stack: Vec<Context>,
    escaped: bool,
    dollar: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Context {
    Single,
    Double,
    Substitution,
}

impl Quotes {
    fn pass(&mut self, text: &str) {
        for c in text.chars() {
            let top = self.stack.last().copied();
            let dollar = std::mem::replace(&mut self.dollar, c == '$' && !self.escaped);
            if std::mem::take(&mut self.escaped) {
                continue;
            }
            match (top, c) {
                (Some(Context::Single), '\'') | (Some(Context::Double), '"') => {
                    self.stack.pop();
                }
                (Some(Context::Single), _) => {}
                (_, '\\') => self.escaped = true,
                (_, '(') if dollar => self.stack.push(Context::Substitution),
                (Some(Context::Substitution), ')') => {
                    self.stack.pop();
                }
                (Some(Context::Double), _) => {}
                (_, '\'') => self.stack.push(Context::Single),
                (_, '"') => self.stack.push(Context::Double),
                _ => {}
            }
        }
    }

    fn reference(&self, variable: &str) -> String {
        match self.stack.last() {
            Some(Context::Double) => variable.to_owned(),
            Some(Context::Single) => format!("'\"{variable}\"'"),
            Some(Context::Substitution) | None => format!("\"{variable}\""),
        }
    }
}

#[cfg(test)]
mod tests {
    use minijinja::context;
    use serde_json::json;

    use super::*;

    fn values(payload: serde_json::Value) -> Value {
        context! { payload => minijinja::value::Serde(payload) }
    }

    fn plain(source: &str) -> Result<String, String> {
        render("run[1]", source, &values(json!({"ref": "main", "n": 3}))).map_err(|error| error.to_string())
    }

    #[test]
    fn values_go_in_and_line_ends_stay() {
        assert_eq!(plain("Handle {{ payload.ref }}, {{ payload.n }}.\n").unwrap(), "Handle main, 3.\n");
        assert_eq!(plain("no template { }").unwrap(), "no template { }");
    }

    #[test]
    fn what_is_missing_is_an_error_that_names_template_and_place() {
        let error = plain("a {{ payload.nope.deep }}").unwrap_err();
        assert!(error.starts_with("template of run[1]: undefined value"), "{error}");
        let error = plain("{{ payload.ref").unwrap_err();
        assert!(error.contains("run[1]") && error.contains("line 1"), "{error}");
    }

    #[test]
    fn a_value_is_never_read_as_a_template() {
        let values = values(json!({"x": "{{ 7*7 }} ${jndi:x} {% for %}"}));
        assert_eq!(render("run[0]", "{{ payload.x }}", &values).unwrap(), "{{ 7*7 }} ${jndi:x} {% for %}");
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let error = plain("{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}")
            .unwrap_err();
        assert_eq!(error, "template of run[1]: more than 200000 steps in line 1");
    }

    fn shell(source: &str, x: &str) -> ShellLine {
        render_shell(source, &values(json!({"x": x, "y": "second"}))).unwrap()
    }

    #[test]
    fn in_a_shell_line_a_value_is_a_variable_in_any_quotes() {
        let x = "$(rm -rf /) `id` '\"; exit";
        for (source, line) in [
            ("echo {{ payload.x }} | wc", "echo \"${BELFRY_ARG_1}\" | wc"),
            ("echo \"a {{ payload.x }} b\"", "echo \"a ${BELFRY_ARG_1} b\""),
            ("echo 'a {{ payload.x }} b'", "echo 'a '\"${BELFRY_ARG_1}\"' b'"),
            ("echo \"$(cat {{ payload.x }})\"", "echo \"$(cat \"${BELFRY_ARG_1}\")\""),
            ("echo \\\" {{ payload.x }}", "echo \\\" \"${BELFRY_ARG_1}\""),
        ] {
            let shell = shell(source, x);
            assert_eq!(shell.line, line);
            assert_eq!(shell.variables, [("BELFRY_ARG_1".to_owned(), x.to_owned())]);
        }
    }

    #[test]
    fn a_value_that_was_captured_first_is_still_one_value() {
        let shell = shell("{% set z %}<{{ payload.x }}>{% endset %}echo {{ z | upper }}", "it's");
        assert_eq!(shell.line, "echo \"${BELFRY_ARG_2}\"");
        assert_eq!(shell.variables[1].1, "<it's>");
    }

    #[test]
    fn raw_is_text_of_the_line_and_escape_is_not() {
        assert_eq!(shell("ls {{ payload.x | raw }}", "-l | wc").line, "ls -l | wc");
        assert_eq!(shell("ls {{ payload.x | e }} {{ payload.x | safe }}", "$(id)").variables.len(), 2);
    }
}
