//! The filters of templates. Each reads its input at most once, and pays for what it reads and makes.

use std::borrow::Cow;
use std::fmt::Write;

use belfry_time::{Timestamp, Zone};
use serde_json::Value;

use super::render::{Budget, Error, Found};

pub(super) const NAMES: [&str; 11] =
    ["default", "json", "join", "lower", "upper", "trim", "truncate", "first", "last", "length", "date"];

/// What `date` understands of strftime. A sign with a width or a flag is refused, so a format cannot make much of little.
const DATE_SIGNS: &str = "YmdHMSyjaAbBeIpzFTsf%";
const DATE: &str = "%Y-%m-%d";
/// What a `date` costs, in bytes of work.
const DATE_COST: usize = 1024;
/// What `lower` and `upper` cost for each character that is not ASCII, in bytes: it is looked up in a table and gives
/// up to three.
const CASE_COST: usize = 8;
/// What `join` costs for each item, in bytes, whatever is in it.
const ITEM_COST: usize = 8;

/// An argument as written.
pub(super) enum Argument {
    Text(String),
    Number(u32),
}

#[derive(Debug, Clone)]
pub(super) enum Filter {
    Default(String),
    Json,
    Join(String),
    Lower,
    Upper,
    Trim,
    Truncate(usize),
    First,
    Last,
    Length,
    Date { format: String, zone: Option<Zone> },
}

impl Filter {
    /// A filter with its arguments; the error is for people.
    pub(super) fn new(name: &str, arguments: &[Argument]) -> Result<Filter, String> {
        use Argument::{Number, Text};
        Ok(match (name, arguments) {
            ("default", [Text(text)]) => Filter::Default(text.clone()),
            ("default", [Number(number)]) => Filter::Default(number.to_string()),
            ("join", []) => Filter::Join(", ".into()),
            ("join", [Text(between)]) => Filter::Join(between.clone()),
            ("truncate", [Number(length)]) => Filter::Truncate(*length as usize),
            ("date", []) => Filter::Date { format: DATE.into(), zone: None },
            ("date", [Text(format)]) => Filter::Date { format: checked(format)?, zone: None },
            ("date", [Text(format), Text(zone)]) => {
                let zone = Zone::get(zone).map_err(|error| error.to_string())?;
                Filter::Date { format: checked(format)?, zone: Some(zone) }
            }
            ("json", []) => Filter::Json,
            ("lower", []) => Filter::Lower,
            ("upper", []) => Filter::Upper,
            ("trim", []) => Filter::Trim,
            ("first", []) => Filter::First,
            ("last", []) => Filter::Last,
            ("length", []) => Filter::Length,
            _ => return Err(format!("`{name}` is written {}", usage(name))),
        })
    }

    fn name(&self) -> &'static str {
        match self {
            Filter::Default(_) => "default",
            Filter::Json => "json",
            Filter::Join(_) => "join",
            Filter::Lower => "lower",
            Filter::Upper => "upper",
            Filter::Trim => "trim",
            Filter::Truncate(_) => "truncate",
            Filter::First => "first",
            Filter::Last => "last",
            Filter::Length => "length",
            Filter::Date { .. } => "date",
        }
    }

    /// Applies it. What is missing stays missing, but for `default`; so does `null`, but for `json`.
    pub(super) fn apply<'v>(
        &self,
        value: Found<'v>,
        zone: &Zone,
        budget: &mut Budget,
    ) -> Result<Found<'v>, Error> {
        match (self, &value) {
            (Filter::Default(text), _) if value.is_missing() => return Ok(Found::text(text.clone())),
            (Filter::Default(_), _) => return Ok(value),
            (_, Found::Missing) => return Ok(value),
            (Filter::Json, _) => return Ok(Found::text(value.json(budget)?)),
            _ if value.is_missing() => return Ok(Found::Missing),
            _ => {}
        }
        match self {
            Filter::First | Filter::Last | Filter::Join(_) | Filter::Length => {
                if let Some(done) = self.of_list(&value, budget)? {
                    return Ok(done);
                }
                self.of_text(value, zone, budget)
            }
            _ => self.of_text(value, zone, budget),
        }
    }

    /// Applies it to a list or a map; none where the value is a scalar.
    fn of_list<'v>(&self, value: &Found<'v>, budget: &mut Budget) -> Result<Option<Found<'v>>, Error> {
        let element = |element: Option<&'v Value>| element.map_or(Found::Missing, Found::json_of);
        Ok(Some(match (self, value) {
            (Filter::First, Found::Json(Value::Array(items))) => element(items.first()),
            (Filter::Last, Found::Json(Value::Array(items))) => element(items.last()),
            (Filter::Length, Found::Json(Value::Array(items))) => Found::Count(items.len() as u64),
            (Filter::Length, Found::Json(Value::Object(map))) => Found::Count(map.len() as u64),
            (Filter::Join(between), Found::Json(Value::Array(items))) => {
                let mut joined = String::new();
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        joined.push_str(between);
                    }
                    let text = match item {
                        Value::Null => Cow::Borrowed("null"),
                        item => Found::json_of(item).into_text(budget)?.unwrap_or_default(),
                    };
                    budget.walk(between.len() + text.len() + ITEM_COST)?;
                    joined.push_str(&text);
                }
                Found::text(joined)
            }
            (Filter::Join(_), _) => return Err(self.wrong("a list", value)),
            _ => return Ok(None),
        }))
    }

    fn of_text<'v>(&self, value: Found<'v>, zone: &Zone, budget: &mut Budget) -> Result<Found<'v>, Error> {
        if matches!(value, Found::Json(Value::Array(_) | Value::Object(_))) {
            return Err(self.wrong("text", &value));
        }
        let Some(text) = value.into_text(budget)? else { return Ok(Found::Missing) };
        budget.walk(text.len())?;
        let one = |c: Option<char>| c.map_or(Found::Missing, |c| Found::text(c.to_string()));
        Ok(match self {
            Filter::Lower => {
                let mut made = in_case(&text, char::to_lowercase, budget)?;
                made.make_ascii_lowercase();
                Found::text(made)
            }
            Filter::Upper => {
                let mut made = in_case(&text, char::to_uppercase, budget)?;
                made.make_ascii_uppercase();
                Found::text(made)
            }
            Filter::Trim => Found::Text(cut(text, str::trim)),
            Filter::Truncate(length) => Found::Text(cut(text, |text| {
                let end = text.char_indices().nth(*length).map_or(text.len(), |(at, _)| at);
                &text[..end]
            })),
            Filter::First => one(text.chars().next()),
            Filter::Last => one(text.chars().next_back()),
            Filter::Length => Found::Count(text.chars().count() as u64),
            Filter::Date { format, zone: named } => {
                budget.walk(DATE_COST + format.len())?;
                let at: Timestamp =
                    text.trim().parse().map_err(|_| self.wrong("an instant", &Found::Text(text)))?;
                let mut shown = String::new();
                let local = named.as_ref().unwrap_or(zone).local(at);
                write!(shown, "{}", local.strftime(format))
                    .map_err(|_| Error::Filter(format!("`date` cannot be written as {format:?}")))?;
                Found::text(shown)
            }
            Filter::Default(_) | Filter::Json | Filter::Join(_) => Found::Text(text),
        })
    }

    fn wrong(&self, wanted: &str, value: &Found<'_>) -> Error {
        Error::Filter(format!("`{}` needs {wanted}, got {}", self.name(), value.describe()))
    }
}

fn usage(name: &str) -> &'static str {
    match name {
        "default" => "`default(\"text\")`",
        "join" => "`join` or `join(\"text between\")`",
        "truncate" => "`truncate(80)`",
        "date" => "`date`, `date(\"%d.%m.%Y\")` or `date(\"%H:%M\", \"Europe/London\")`",
        _ => "without arguments",
    }
}

/// Text with each character that is not ASCII in another case, whatever stands around it. `str::to_lowercase` looks
/// around each capital sigma for the end of a word, which takes ten times as long.
fn in_case<C: Iterator<Item = char>>(
    text: &str,
    case: fn(char) -> C,
    budget: &mut Budget,
) -> Result<String, Error> {
    // The first bytes of characters that are not ASCII.
    let wide = text.bytes().filter(|byte| *byte >= 0xC0).count();
    budget.walk(wide * CASE_COST)?;
    let mut made = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.bytes().position(|byte| !byte.is_ascii()) {
        let (plain, from) = rest.split_at(at);
        made.push_str(plain);
        let mut chars = from.chars();
        made.extend(chars.next().into_iter().flat_map(case));
        rest = chars.as_str();
    }
    made.push_str(rest);
    Ok(made)
}

/// A part of a text, without a copy where the text is borrowed.
fn cut<'v>(text: Cow<'v, str>, part: impl Fn(&str) -> &str) -> Cow<'v, str> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(part(text)),
        Cow::Owned(text) => Cow::Owned(part(&text).to_owned()),
    }
}

/// A format of `date`.
fn checked(format: &str) -> Result<String, String> {
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c == '%' && !chars.next().is_some_and(|sign| DATE_SIGNS.contains(sign)) {
            let known: Vec<_> = DATE_SIGNS.chars().map(|sign| format!("%{sign}")).collect();
            return Err(format!("unknown sign in the format of `date`; known are {}", known.join(" ")));
        }
    }
    Ok(format.to_owned())
}
