//! Instants as people write them: RFC 3339, or a local date and time where a zone is named.

use jiff::Timestamp;
use jiff::civil::DateTime;

use crate::error::{Error, ErrorKind, Quoted};
use crate::zone::{LONG_GAP, Local, Zone};

/// Reads an RFC 3339 instant. Where a `zone` is given, a date and time without an offset is local there:
/// one that the clocks skip moves to the end of the gap, one that happens twice means the first.
///
/// ```
/// # use belfry_time::{parse_instant, Zone};
/// let zone = Zone::get("Europe/London")?;
/// assert_eq!(parse_instant("2027-06-03T09:00:00", Some(&zone))?, parse_instant("2027-06-03T08:00:00Z", None)?);
/// assert!(parse_instant("2027-06-03T09:00:00", None).unwrap_err().to_string().contains("has no offset"));
/// # Ok::<(), belfry_time::Error>(())
/// ```
pub fn parse_instant(input: &str, zone: Option<&Zone>) -> Result<Timestamp, Error> {
    let text = input.trim();
    let fail = |message: String| Err(Error::whole(ErrorKind::Instant, text, message));
    let Some(shape) = Shape::of(text) else {
        return fail(format!(
            "Invalid time {}. Expected RFC 3339, for example \"2027-02-03T09:00:00+01:00\"",
            Quoted(text)
        ));
    };
    // Either the fields are no date, or the instant is beyond the range.
    let reason = || match text[..19].parse::<DateTime>() {
        Ok(_) => "instants go from year -9999 to 9999-12-30".to_owned(),
        Err(error) => error.to_string().rsplit(": ").next().unwrap_or_default().to_owned(),
    };
    match (shape, zone) {
        (Shape::Offset, _) => text
            .parse::<Timestamp>()
            .or_else(|_| fail(format!("Invalid time {} - {}", Quoted(text), reason()))),
        (Shape::Local, None) => fail(format!(
            "Time {} has no offset and no timezone is set. Add one, for example \"{text}Z\" or \"{text}+01:00\"",
            Quoted(text)
        )),
        (Shape::Local, Some(zone)) => match text.parse::<DateTime>() {
            Ok(local) => instant_of(local, zone).map_or_else(
                || fail(format!("Time {} does not exist in {zone}: the clocks skip it", Quoted(text))),
                Ok,
            ),
            Err(_) => fail(format!("Invalid time {} - {}", Quoted(text), reason())),
        },
    }
}

/// What kind of date-time a text looks like, by its letters alone.
enum Shape {
    Offset,
    Local,
}

impl Shape {
    /// `YYYY-MM-DD` `T` `HH:MM:SS` with an optional fraction, and `Z` or `±HH:MM`.
    fn of(text: &str) -> Option<Shape> {
        fn pattern<'a>(text: &'a str, pattern: &str) -> Option<&'a str> {
            let (head, rest) = text.split_at_checked(pattern.len())?;
            let fits = |(c, p): (u8, u8)| {
                if p == b'0' { c.is_ascii_digit() } else { c.eq_ignore_ascii_case(&p) }
            };
            head.bytes().zip(pattern.bytes()).all(fits).then_some(rest)
        }
        let date = pattern(text, "0000-00-00")?;
        let time = pattern(date, "T").or_else(|| pattern(date, " "))?;
        let mut rest = pattern(time, "00:00:00")?;
        // A minute has sixty seconds here: leap seconds are not known.
        if time[6..8] > *"59" {
            return None;
        }
        if let Some(fraction) = rest.strip_prefix('.') {
            let digits = fraction.bytes().take_while(u8::is_ascii_digit).count();
            if !(1..=9).contains(&digits) {
                return None;
            }
            rest = &fraction[digits..];
        }
        let offset =
            pattern(rest, "Z").or_else(|| pattern(rest, "+00:00")).or_else(|| pattern(rest, "-00:00"));
        match (rest, offset) {
            ("", _) => Some(Shape::Local),
            (_, Some("")) => Some(Shape::Offset),
            _ => None,
        }
    }
}

fn instant_of(local: DateTime, zone: &Zone) -> Option<Timestamp> {
    let utc = local.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp();
    let second = crate::zone::floor_second(utc);
    let fraction = utc.duration_since(Timestamp::from_second(second).ok()?);
    match zone.resolve(second) {
        Local::Once(at) | Local::Twice(at) => Timestamp::from_second(at).ok()?.checked_add(fraction).ok(),
        Local::Never { at, jump } if jump < LONG_GAP => Timestamp::from_second(at).ok(),
        Local::Never { .. } => None,
    }
}
