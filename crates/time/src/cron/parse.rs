//! Text to bit sets. Every token knows its bytes, so that an error can underline them.

use std::ops::Range;

use super::days::{ALL_MONTHS, Days, Rule};
use super::{Cron, Dst, Field};
use crate::civil::days_in_month;
use crate::error::{Error, ErrorKind, Quoted};

const SHORTHANDS: [(&str, &str); 7] = [
    ("@hourly", "0 * * * *"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"),
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
];
/// Every list written out in full is shorter than this.
const LENGTH_MAX: usize = 1024;

impl Cron {
    /// Reads an expression.
    ///
    /// Five fields with `*`, lists, ranges, steps (`*/5`, `1-9/2`, `5/15` from 5 on), names (`JAN`, `MON`); in the
    /// day fields also `?`, `L`, `LW`, `15W`, `5#2`, `5L`; or `@hourly @daily @midnight @weekly @monthly @yearly
    /// @annually`. With both day fields restricted either may match; only a bare `*` or `?` is no restriction.
    /// An expression that can never match is refused.
    ///
    /// ```
    /// # use belfry_time::Cron;
    /// assert_eq!(Cron::parse("0 9 * * 1-5")?.describe(), "at 09:00, Monday to Friday");
    /// assert_eq!(
    ///     Cron::parse("0 25 * * *").unwrap_err().to_string(),
    ///     r#"Invalid cron expression "0 25 * * *" - hour must be 0-23"#
    /// );
    /// # Ok::<(), belfry_time::Error>(())
    /// ```
    pub fn parse(input: &str) -> Result<Cron, Error> {
        let text = input.trim_matches(is_blank);
        if text.starts_with('@') {
            let shorthand = SHORTHANDS.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
            let Some((_, fields)) = shorthand else {
                let known = SHORTHANDS.map(|(name, _)| name).join(", ");
                let message =
                    format!("Unknown cron shorthand {}. Valid shorthands are: {known}", Quoted(text));
                return Err(Error::whole(ErrorKind::Cron { field: None }, text, message));
            };
            return Parser { text: fields }.cron(text);
        }
        Parser { text }.cron(text)
    }
}

fn is_blank(c: char) -> bool {
    c == ' ' || c == '\t'
}

struct Parser<'a> {
    text: &'a str,
}

/// What one field of numbers holds.
#[derive(Default)]
struct Bits {
    bits: u64,
    /// A bare `*` or `?`.
    any: bool,
}

impl<'a> Parser<'a> {
    fn cron(&self, shown: &str) -> Result<Cron, Error> {
        let spans = self.fields()?;
        let [minute, hour, dom, month, dow] = spans;
        let minutes = self.numbers(Field::Minute, &minute)?.bits;
        let hours = self.numbers(Field::Hour, &hour)?.bits as u32;
        let mut days = Days::default();
        let any_dom = self.days_of_month(&dom, &mut days)?;
        days.months = self.numbers(Field::Month, &month)?.bits as u16;
        let any_dow = self.days_of_week(&dow, &mut days)?;
        let plain = days.nth == [0; 5] && days.last_dow == 0 && days.months == ALL_MONTHS;
        days.rule = match (any_dom, any_dow) {
            (true, true) => Rule::Any,
            (false, true) => Rule::DayOfMonth,
            (true, false) if plain => Rule::PlainWeekdays,
            (true, false) => Rule::DayOfWeek,
            (false, false) => Rule::Either,
        };
        if days.rule == Rule::DayOfMonth && !can_match(&days) {
            let reason = "no month that it names has such a day, so it would never run";
            return Err(self.error(Some(Field::DayOfMonth), dom, reason));
        }
        let fixed = [&minute, &hour].iter().all(|span| !self.text[span.start..].starts_with('*'));
        let cron =
            Cron { minutes, hours, days, fixed, gap_moves: false, fold_twice: false, text: shown.into() };
        Ok(cron.with_dst(Dst::default()))
    }

    /// Where the five fields are.
    fn fields(&self) -> Result<[Range<usize>; 5], Error> {
        let bytes = self.text.as_bytes();
        if bytes.len() > LENGTH_MAX {
            let reason = format!("longer than {LENGTH_MAX} characters");
            return Err(self.error(None, 0..bytes.len(), &reason));
        }
        if let Some(at) = bytes.iter().position(|b| !matches!(b, b' '..=b'~' | b'\t')) {
            let c = self.text[at..].chars().next().unwrap_or_default();
            let reason = format!(
                "unexpected character {}, only ASCII letters, digits and * , - / # ? are allowed",
                c.escape_debug()
            );
            return Err(self.error(None, at..at + c.len_utf8(), &reason));
        }
        let mut spans: [Range<usize>; 5] = Default::default();
        let mut count = 0;
        let mut at = 0;
        while at < bytes.len() {
            let length = bytes[at..].iter().take_while(|b| !is_blank(char::from(**b))).count();
            if length > 0 {
                if let Some(span) = spans.get_mut(count) {
                    *span = at..at + length;
                }
                count += 1;
            }
            at += length + 1;
        }
        if count != 5 {
            return Err(self.error(None, 0..bytes.len(), &format!("expected 5 fields, got {count}")));
        }
        Ok(spans)
    }

    /// A field of numbers, names, ranges and steps alone.
    fn numbers(&self, field: Field, span: &Range<usize>) -> Result<Bits, Error> {
        self.items(span, |token, item, bits: &mut Bits| {
            if item == "*" {
                bits.any = token == *span;
            }
            bits.bits |= self.range(field, token)?;
            Ok(())
        })
    }

    /// Whether the field is unrestricted.
    fn days_of_month(&self, span: &Range<usize>, days: &mut Days) -> Result<bool, Error> {
        let field = Field::DayOfMonth;
        let found = self.items(span, |token, item, bits: &mut Bits| {
            if item == "*" || (item == "?" && token == *span) {
                bits.any = token == *span;
                bits.bits |= 0xffff_fffe;
            } else if item.eq_ignore_ascii_case("L") {
                days.last = true;
            } else if item.eq_ignore_ascii_case("LW") {
                days.last_weekday = true;
            } else if let Some(number) = item.strip_suffix(['W', 'w']) {
                days.nearest |= 1 << self.number(field, token.start..token.start + number.len())?;
            } else {
                bits.bits |= self.range(field, token)?;
            }
            Ok(())
        })?;
        days.dom = found.bits as u32;
        Ok(found.any)
    }

    /// Whether the field is unrestricted.
    fn days_of_week(&self, span: &Range<usize>, days: &mut Days) -> Result<bool, Error> {
        let field = Field::DayOfWeek;
        let found = self.items(span, |token, item, bits: &mut Bits| {
            if item == "*" || (item == "?" && token == *span) {
                bits.any = token == *span;
                bits.bits |= 0x7f;
            } else if let Some((day, _)) = item.split_once('#') {
                let day_end = token.start + day.len();
                let day = self.number(field, token.start..day_end)? % 7;
                match &self.text[day_end + 1..token.end] {
                    k @ ("1" | "2" | "3" | "4" | "5") => {
                        days.nth[usize::from(k.as_bytes()[0] - b'1')] |= 1 << day
                    }
                    _ => {
                        return Err(self.error(
                            Some(field),
                            day_end + 1..token.end,
                            "the number after # must be 1-5",
                        ));
                    }
                }
            } else if item.eq_ignore_ascii_case("L") {
                return Err(self.error(
                    Some(field),
                    token,
                    "L needs a day of the week before it, such as 5L or FRIL",
                ));
            } else if let Some(day) = item.strip_suffix(['L', 'l']) {
                days.last_dow |= 1 << (self.number(field, token.start..token.start + day.len())? % 7);
            } else {
                bits.bits |= self.range(field, token)?;
            }
            Ok(())
        })?;
        // 7 is Sunday too.
        days.dow = (found.bits | found.bits >> 7) as u8 & 0x7f;
        Ok(found.any)
    }

    /// Calls `item` with each element of a comma-separated list.
    fn items<T: Default>(
        &self,
        span: &Range<usize>,
        mut item: impl FnMut(Range<usize>, &'a str, &mut T) -> Result<(), Error>,
    ) -> Result<T, Error> {
        let mut found = T::default();
        let mut start = span.start;
        loop {
            let comma = self.text.as_bytes()[start..span.end].iter().position(|b| *b == b',');
            let end = comma.map_or(span.end, |comma| start + comma);
            item(start..end, &self.text[start..end], &mut found)?;
            if end == span.end {
                return Ok(found);
            }
            start = end + 1;
        }
    }

    /// The bits of `*`, `n`, `n-m`, each with an optional `/step`.
    fn range(&self, field: Field, token: Range<usize>) -> Result<u64, Error> {
        let item = self.text[token.clone()].as_bytes();
        let (base, step) = match item.iter().position(|b| *b == b'/') {
            None => (token.clone(), None),
            Some(slash) => {
                let base = token.start..token.start + slash;
                (base.clone(), Some(self.step(field, base.end + 1..token.end)?))
            }
        };
        let (first, last) = match item[..base.len()].iter().position(|b| *b == b'-') {
            _ if item[..base.len()] == *b"*" => (field.min(), field.last()),
            Some(dash) if dash > 0 => {
                let first = self.number(field, base.start..base.start + dash)?;
                let mut last = self.number(field, base.start + dash + 1..base.end)?;
                // Sunday at the end of a range is the end of the week: FRI-SUN.
                if field == Field::DayOfWeek
                    && last == 0
                    && self.text[..base.end].ends_with(['N', 'n'])
                    && first > 0
                {
                    last = 7;
                }
                if first > last {
                    return Err(self.error(Some(field), base, "a range must not descend"));
                }
                (first, last)
            }
            _ => {
                let first = self.number(field, base)?;
                (first, if step.is_some() { field.last().max(first) } else { first })
            }
        };
        Ok(match step {
            None | Some(1) => (u64::MAX >> (63 - (last - first))) << first,
            Some(step) => (first..=last).step_by(step).fold(0, |bits, n| bits | 1 << n),
        })
    }

    fn step(&self, field: Field, token: Range<usize>) -> Result<usize, Error> {
        // A step over the whole field is harmless (every 60th minute); a longer one does not do what it says.
        let longest = usize::from(field.last() - field.min()) + 1;
        match self.digits(&token) {
            Some(0) => Err(self.error(Some(field), token, "a step cannot be 0")),
            Some(step) if step <= longest => Ok(step),
            _ => Err(self.error(Some(field), token, &format!("{field} step must be 1-{longest}"))),
        }
    }

    fn number(&self, field: Field, token: Range<usize>) -> Result<u8, Error> {
        if let Some(number) = self.digits(&token) {
            if (usize::from(field.min())..=usize::from(field.max())).contains(&number) {
                return Ok(number as u8);
            }
        } else {
            let item = &self.text[token.clone()];
            let named = field.names().iter().position(|name| name.eq_ignore_ascii_case(item));
            if let Some(place) = named {
                return Ok(place as u8 + field.min());
            }
        }
        let names = match field.names() {
            [first, .., last] => format!(" or {first}-{last}"),
            _ => String::new(),
        };
        let reason = format!("{field} must be {}-{}{names}", field.min(), field.max());
        Err(self.error(Some(field), token, &reason))
    }

    /// A number of ASCII digits alone; a very large one comes out as the largest.
    fn digits(&self, token: &Range<usize>) -> Option<usize> {
        let bytes = &self.text.as_bytes()[token.clone()];
        if bytes.is_empty() {
            return None;
        }
        bytes.iter().try_fold(0usize, |number, byte| {
            byte.is_ascii_digit().then(|| number.saturating_mul(10).saturating_add(usize::from(byte - b'0')))
        })
    }

    #[cold]
    fn error(&self, field: Option<Field>, span: Range<usize>, reason: &str) -> Error {
        let message = format!("Invalid cron expression {} - {reason}", Quoted(self.text));
        Error::new(ErrorKind::Cron { field }, self.text, span, message)
    }
}

/// Whether any month named has one of the days named, looking at a leap year.
fn can_match(days: &Days) -> bool {
    const LEAP: i32 = 2024;
    days.last
        || days.last_weekday
        || (1..=12)
            .filter(|month| days.months & (1 << month) != 0)
            .any(|month| (days.dom | days.nearest) & (u32::MAX >> (31 - days_in_month(LEAP, month))) != 0)
}
