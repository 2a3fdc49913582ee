//! Windows: the local times at which a schedule is allowed to tick.

use crate::civil::{DAY, WEEKDAYS, split, weekday};
use crate::error::{Error, ErrorKind, Quoted};
use crate::zone::Zone;

/// `only_between` and `not_on`: a set of local times. The start is in, the end is out, and the weekday is that
/// of the instant itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Window {
    /// Minutes of the day; the second is smaller for a window over midnight.
    between: Option<(u16, u16)>,
    /// One bit per weekday, Sunday first.
    not_on: u8,
}

/// Whether a window allows an instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// It does.
    Yes,
    /// `not_on` names the day.
    NotOnThatDay,
    /// `only_between` leaves out the time.
    NotAtThatTime,
}

const ALL_DAYS: u8 = 0x7f;
const DAY_MINUTES: u16 = 1440;

impl Window {
    /// Every instant is allowed.
    pub const ALWAYS: Window = Window { between: None, not_on: 0 };

    /// Reads `only_between`: `"HH:MM-HH:MM"`, over midnight where the end is before the start.
    ///
    /// ```
    /// # use belfry_time::Window;
    /// let night = Window::ALWAYS.only_between("22:00-06:00")?.not_on(["sat", "Sunday"])?;
    /// assert_eq!(night.describe(), "only between 22:00 and 06:00, not on Saturday and Sunday");
    /// assert!(Window::ALWAYS.only_between("08:00-08:00").is_err());
    /// # Ok::<(), belfry_time::Error>(())
    /// ```
    pub fn only_between(self, input: &str) -> Result<Window, Error> {
        let text = input.trim();
        let fail = |message| Err(Error::whole(ErrorKind::OnlyBetween, text, message));
        let Some((start, end)) =
            text.split_once('-').and_then(|(start, end)| Some((clock(start)?, clock(end)?)))
        else {
            return fail(format!(
                "Invalid time window {}. Expected \"HH:MM-HH:MM\" from 00:00 to 23:59, for example \"08:00-18:00\"; \
                 for an end at midnight write 00:00",
                Quoted(text)
            ));
        };
        if start == end {
            return fail(format!(
                "Time window {} is empty: it ends when it starts. Leave only_between out to allow the whole day",
                Quoted(text)
            ));
        }
        Ok(Window { between: Some((start, end)), ..self })
    }

    /// Reads `not_on`: English day names, short or full, in any case, or 0 to 7, where both 0 and 7 are Sunday.
    pub fn not_on<S: AsRef<str>>(self, days: impl IntoIterator<Item = S>) -> Result<Window, Error> {
        let mut not_on = self.not_on;
        for day in days {
            let text = day.as_ref().trim();
            not_on |= 1
                << parse_day(text).ok_or_else(|| {
                    let message = format!(
                        "Invalid day {}. Expected a day such as \"sat\" or \"Saturday\", or 0-7",
                        Quoted(text)
                    );
                    Error::whole(ErrorKind::NotOn, text, message)
                })?;
        }
        Ok(Window { not_on, ..self })
    }

    /// Whether every instant is allowed.
    pub fn is_always(&self) -> bool {
        *self == Window::ALWAYS
    }

    /// Whether no instant is allowed.
    pub fn is_never(&self) -> bool {
        self.not_on == ALL_DAYS
    }

    /// Plain English; empty where every instant is allowed.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if let Some((start, end)) = self.between {
            parts.push(format!(
                "only between {:02}:{:02} and {:02}:{:02}",
                start / 60,
                start % 60,
                end / 60,
                end % 60
            ));
        }
        // From Monday on, as people list them.
        let days: Vec<_> =
            (1..=7).map(|d| d % 7).filter(|d| self.not_on & (1 << d) != 0).map(|d| WEEKDAYS[d]).collect();
        match days.split_last() {
            None => {}
            Some((last, [])) => parts.push(format!("not on {last}")),
            Some((last, rest)) => parts.push(format!("not on {} and {last}", rest.join(", "))),
        }
        parts.join(", ")
    }

    /// Whether a local second is allowed.
    pub(crate) fn allows(&self, local: i64) -> bool {
        let (day, second) = split(local);
        self.allows_day(day)
            && self.minutes().any(|(from, to)| (i32::from(from) * 60..i32::from(to) * 60).contains(&second))
    }

    /// Whether an instant is allowed, and if not, by which of the two keys.
    pub(crate) fn verdict(&self, local: i64) -> Allowed {
        match (self.allows_day(split(local).0), self.allows(local)) {
            (false, _) => Allowed::NotOnThatDay,
            (true, false) => Allowed::NotAtThatTime,
            (true, true) => Allowed::Yes,
        }
    }

    /// Whether any time of a day is allowed.
    pub(crate) fn allows_day(&self, day: i32) -> bool {
        self.not_on & (1 << weekday(day)) == 0
    }

    /// The allowed minutes of an allowed day: one or two ranges, ascending, without the end.
    pub(crate) fn minutes(&self) -> impl Iterator<Item = (u16, u16)> + use<> {
        let (first, second) = match self.between {
            None => ((0, DAY_MINUTES), None),
            Some((start, end)) if start < end => ((start, end), None),
            Some((start, end)) => ((0, end), Some((start, DAY_MINUTES))),
        };
        std::iter::once(first).filter(|(from, to)| from < to).chain(second)
    }

    /// The first allowed second that is not before `second`.
    pub(crate) fn next_allowed(&self, second: i64, zone: &Zone) -> Option<i64> {
        self.next_where(second, zone, true)
    }

    /// The first second after the allowed stretch that `second` lies in; `None` where it never ends.
    pub(crate) fn end_of_stretch(&self, second: i64, zone: &Zone) -> Option<i64> {
        if self.is_always() { None } else { self.next_where(second, zone, false) }
    }

    /// The first second from `second` on which is allowed, or is not. Within a span of one offset local time
    /// runs evenly, so each span is searched by local time.
    fn next_where(&self, second: i64, zone: &Zone, allowed: bool) -> Option<i64> {
        if self.is_always() || self.is_never() {
            return (allowed == self.is_always()).then_some(second);
        }
        let mut span = zone.span_at(second);
        let mut at = second;
        loop {
            let found = self.next_local_where(at + span.offset, allowed) - span.offset;
            if found < span.end {
                return Some(found);
            }
            at = span.end;
            span = zone.span_at(at);
        }
    }

    /// The same on local time alone. Ends, because some day is allowed and some time is not.
    fn next_local_where(&self, local: i64, allowed: bool) -> i64 {
        let (mut day, second) = split(local);
        let mut second = second;
        loop {
            let mut at = second;
            // Walk the borders of the day's allowed ranges.
            let open = self.allows_day(day);
            for (from, to) in self.minutes().filter(|_| open) {
                let (from, to) = (i32::from(from) * 60, i32::from(to) * 60);
                if allowed && at < to {
                    return i64::from(day) * DAY + i64::from(at.max(from));
                }
                if !allowed && at >= from && at < to {
                    at = to;
                }
            }
            if !allowed && at < DAY as i32 {
                return i64::from(day) * DAY + i64::from(at);
            }
            day += 1;
            second = 0;
        }
    }
}

/// Minutes of the day of `HH:MM`.
fn clock(text: &str) -> Option<u16> {
    let [h1, h0, b':', m1, m0] = text.as_bytes() else {
        return None;
    };
    let number = |tens: &u8, ones: &u8| {
        (tens.is_ascii_digit() && ones.is_ascii_digit())
            .then(|| u16::from(tens - b'0') * 10 + u16::from(ones - b'0'))
    };
    let (hour, minute) = (number(h1, h0)?, number(m1, m0)?);
    (hour < 24 && minute < 60).then_some(hour * 60 + minute)
}

fn parse_day(text: &str) -> Option<u8> {
    if let [digit @ b'0'..=b'7'] = text.as_bytes() {
        return Some((digit - b'0') % 7);
    }
    let fits = |name: &str| name.eq_ignore_ascii_case(text) || name[..3].eq_ignore_ascii_case(text);
    WEEKDAYS.iter().position(|name| fits(name)).map(|day| day as u8)
}
