//! Durations as people write them: `90s`, `1.5h`, `1h30m`. One grammar for every key that holds one.

use std::fmt;

use jiff::SignedDuration;

use crate::error::{Error, ErrorKind, Quoted};

/// Milliseconds per unit, largest first.
const UNITS: [(&str, i64); 6] =
    [("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
const UNIT_NAMES: &str = "ms, s, m, h, d, w";
/// The longest duration: a hundred years.
const MS_MAX: i64 = 36_525 * 86_400_000;

/// Reads a duration: `<number><unit>` with the units ms s m h d w in any case, decimals (`1.5h`) and
/// compounds (`1h30m`, units in falling order, each once). Zero is allowed; a day is 24 hours.
///
/// ```
/// # use belfry_time::{parse_duration, SignedDuration};
/// assert_eq!(parse_duration("1h30m")?, SignedDuration::from_mins(90));
/// assert_eq!(parse_duration(" 1.5H ")?, SignedDuration::from_mins(90));
/// assert_eq!(
///     parse_duration("5").unwrap_err().to_string(),
///     r#"Missing time unit in "5". Expected "{number}{unit}", for example "5m" or "1h30m""#
/// );
/// # Ok::<(), belfry_time::Error>(())
/// ```
pub fn parse_duration(input: &str) -> Result<SignedDuration, Error> {
    parse_ms(input, ErrorKind::Interval).map(SignedDuration::from_millis)
}

/// Writes a duration as [`parse_duration`] reads it, to the millisecond: `1h30m`.
pub fn format_duration(duration: SignedDuration) -> impl fmt::Display {
    Compound(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
}

/// The same as [`parse_duration`], in milliseconds, with the errors of another key.
pub(crate) fn parse_ms(input: &str, kind: ErrorKind) -> Result<i64, Error> {
    let text = input.trim();
    let fail = |span, message| Err(Error::new(kind, text, span, message));
    let whole = 0..text.len();
    if text.is_empty() {
        return fail(
            whole,
            "Interval cannot be empty. Expected \"{number}{unit}\", for example \"5m\" or \"1h30m\"".into(),
        );
    }
    if text.starts_with('-') {
        return fail(
            whole,
            format!("Negative intervals are not allowed: {}. Drop the minus sign", Quoted(text)),
        );
    }
    let mut total: i64 = 0;
    let mut units_left: &[(&str, i64)] = &UNITS;
    let mut rest = text;
    while !rest.is_empty() {
        let at = text.len() - rest.len();
        let (number, tail) = split_number(rest);
        if number.is_empty() {
            let shown = Quoted(text);
            return fail(
                at..text.len(),
                format!(
                    "Missing numeric value in {shown}. Expected \"{{number}}{{unit}}\", for example \"5m\" or \"1h30m\""
                ),
            );
        }
        let tail = tail.trim_start_matches(is_blank);
        let unit_at = text.len() - tail.len();
        let unit_len = tail.find(|c: char| !c.is_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_len);
        if unit.is_empty() {
            let found = tail.chars().next().filter(|c| !c.is_ascii_digit());
            return match found {
                None => fail(
                    at..text.len(),
                    format!(
                        "Missing time unit in {}. Expected \"{{number}}{{unit}}\", for example \"5m\" or \"1h30m\"",
                        Quoted(text)
                    ),
                ),
                Some(c) => fail(
                    unit_at..unit_at + c.len_utf8(),
                    format!(
                        "Unexpected {} in {}. Expected \"{{number}}{{unit}}\", for example \"5m\" or \"1h30m\"",
                        Quoted(c.encode_utf8(&mut [0; 4])),
                        Quoted(text)
                    ),
                ),
            };
        }
        let unit_span = unit_at..unit_at + unit_len;
        let Some((_, ms)) = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) else {
            return fail(
                unit_span,
                format!(
                    "Invalid time unit {}. Valid units are: {UNIT_NAMES} (in {})",
                    Quoted(unit),
                    Quoted(text)
                ),
            );
        };
        let Some(place) = units_left.iter().position(|(_, left)| left == ms) else {
            return fail(
                unit_span,
                format!(
                    "Units must come in falling order, each once, as in \"1h30m\": {} in {}",
                    Quoted(unit),
                    Quoted(text)
                ),
            );
        };
        units_left = &units_left[place + 1..];
        match scaled(number, *ms) {
            Scaled::Ms(part) if total + part <= MS_MAX => total += part,
            Scaled::Ms(_) | Scaled::TooLarge => {
                return fail(whole, format!("Interval {} is too long. The longest is 36525d", Quoted(text)));
            }
            Scaled::Uneven => {
                return fail(
                    at..unit_at + unit_len,
                    format!("Interval {} is not a whole number of milliseconds", Quoted(text)),
                );
            }
        }
        rest = tail.trim_start_matches(is_blank);
    }
    Ok(total)
}

fn is_blank(c: char) -> bool {
    c == ' ' || c == '\t'
}

/// Splits off `digits` or `digits.digits`.
fn split_number(text: &str) -> (&str, &str) {
    let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
    let whole = digits(text);
    let decimals = match text[whole..].strip_prefix('.') {
        Some(rest) if whole > 0 => digits(rest),
        _ => 0,
    };
    text.split_at(if decimals > 0 { whole + 1 + decimals } else { whole })
}

enum Scaled {
    Ms(i64),
    TooLarge,
    Uneven,
}

/// `number` × `unit_ms`, exactly.
fn scaled(number: &str, unit_ms: i64) -> Scaled {
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let decimals = decimals.trim_end_matches('0');
    let Ok(whole) = whole.trim_start_matches('0').parse::<i64>().or_else(|e| match e.kind() {
        std::num::IntErrorKind::Empty => Ok(0),
        _ => Err(e),
    }) else {
        return Scaled::TooLarge;
    };
    let Some(ms) = whole.checked_mul(unit_ms).filter(|ms| *ms <= MS_MAX) else {
        return Scaled::TooLarge;
    };
    // A week of milliseconds divides by ten or two ten times, so more decimals than that cannot come out even.
    if decimals.len() > 10 {
        return Scaled::Uneven;
    }
    let scale = 10i128.pow(decimals.len() as u32);
    let fraction = decimals.parse::<i128>().unwrap_or(0) * i128::from(unit_ms);
    if fraction % scale == 0 { Scaled::Ms(ms + (fraction / scale) as i64) } else { Scaled::Uneven }
}

/// Milliseconds, written as days, hours, minutes, seconds and milliseconds.
pub(crate) struct Compound(pub i64);

impl fmt::Display for Compound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0s");
        }
        if self.0 < 0 {
            f.write_str("-")?;
        }
        let mut left = self.0.unsigned_abs();
        for (unit, ms) in &UNITS[1..] {
            let ms = *ms as u64;
            if left >= ms {
                write!(f, "{}{unit}", left / ms)?;
                left %= ms;
            }
        }
        Ok(())
    }
}
