//! The next tick in real time, and the daylight-saving rules.
//!
//! Within a span of one offset local time runs evenly, so a tick is a search by local time. At the border of two
//! spans there is either a gap (local times that do not happen) or a fold (local times that happen twice):
//!
//! | job | in a gap | in a fold |
//! |---|---|---|
//! | fixed (neither minute nor hour field starts with `*`) | one tick at the end of the gap | the first pass |
//! | wildcard | none | both passes |
//!
//! In a gap of three hours or more, a missing day, there is no tick.

use jiff::Timestamp;

use super::Cron;
use crate::civil::{CYCLE, DAY, Date, split};
use crate::window::Window;
use crate::zone::{LONG_GAP, Span, Zone, floor_second};

impl Cron {
    /// The first tick after `after`; `None` where there is none in the next 400 years, and so never, or beyond the year
    /// 9999.
    pub fn next(&self, after: Timestamp, zone: &Zone) -> Option<Timestamp> {
        Timestamp::from_second(self.next_second(floor_second(after), zone)?).ok()
    }

    pub(crate) fn next_second(&self, after: i64, zone: &Zone) -> Option<i64> {
        let mut span = zone.span_at(after);
        let mut local = after + span.offset;
        if !self.fold_twice {
            local = local.max(span.repeated_until().saturating_sub(1));
        }
        let mut found = self.next_local(local)?;
        loop {
            let at = found - span.offset;
            if at < span.end {
                return Some(at);
            }
            // Calendar and rules have begun to repeat.
            if at - after > CYCLE {
                return None;
            }
            let next = zone.span_at(span.end);
            let border = next.start + next.offset;
            if found < border {
                // The clocks jump over it.
                if self.moves_over(span, next) {
                    return Some(next.start);
                }
                found = self.next_local(border - 1)?;
                span = next;
            } else if self.fold_twice && border <= local && next.offset < span.offset {
                // We stand in the first pass of a fold: the second comes before anything later.
                found = self.next_local(border - 1)?;
                local = found - 1;
                span = next;
            } else {
                span = zone.skip_towards(span, found);
            }
        }
    }

    /// Whether times in the gap between two spans move to its end.
    fn moves_over(&self, span: Span, next: Span) -> bool {
        self.gap_moves && next.offset - span.offset < LONG_GAP
    }

    /// The first matching minute after a local second, as a local second.
    fn next_local(&self, local: i64) -> Option<i64> {
        let (day, second) = split(local);
        let matching = self.days.next(day)?;
        if matching == day
            && let Some(minute) = self.next_minute(second / 60)
        {
            return Some(i64::from(day) * DAY + i64::from(minute) * 60);
        }
        let day = if matching == day { self.days.next(day + 1)? } else { matching };
        Some(i64::from(day) * DAY + i64::from(self.first_minute()) * 60)
    }

    /// The first matching minute of a day after this one.
    fn next_minute(&self, minute: i32) -> Option<i32> {
        let (hour, minute) = (minute / 60, minute % 60);
        if self.hours & (1 << hour) != 0 {
            let later = self.minutes >> (minute + 1);
            if later != 0 {
                return Some(hour * 60 + minute + 1 + later.trailing_zeros() as i32);
            }
        }
        let later = self.hours >> (hour + 1);
        (later != 0)
            .then(|| (hour + 1 + later.trailing_zeros() as i32) * 60 + self.minutes.trailing_zeros() as i32)
    }

    pub(super) fn first_minute(&self) -> i32 {
        self.hours.trailing_zeros() as i32 * 60 + self.minutes.trailing_zeros() as i32
    }

    pub(super) fn last_minute(&self) -> i32 {
        self.hours.ilog2() as i32 * 60 + self.minutes.ilog2() as i32
    }

    /// Whether a local second is a matching minute.
    pub(crate) fn matches_local(&self, local: i64) -> bool {
        self.next_local(local - 1) == Some(local)
    }

    /// How many ticks there are after `after`, up to and with `to`, that a window allows.
    pub(crate) fn count(&self, after: i64, to: i64, zone: &Zone, window: &Window) -> u64 {
        let mut count = 0;
        let mut span = zone.span_at(after);
        let mut from = after + 1;
        while from <= to {
            let mut first = from + span.offset;
            if !self.fold_twice {
                first = first.max(span.repeated_until());
            }
            let last = to.min(span.end - 1) + span.offset;
            count += self.count_local(first, last, window);
            if to < span.end {
                break;
            }
            let next = zone.span_at(span.end);
            let border = next.start + next.offset;
            if self.moves_over(span, next)
                && self.next_local(span.end + span.offset - 1).is_some_and(|found| found < border)
                && !self.matches_local(border)
                && window.allows(border)
            {
                count += 1;
            }
            from = span.end;
            span = next;
        }
        count
    }

    /// The same on local time alone, both ends included.
    fn count_local(&self, first: i64, last: i64, window: &Window) -> u64 {
        // In whole minutes, without the end.
        let (first, end) =
            (first.div_euclid(60) + i64::from(first.rem_euclid(60) != 0), last.div_euclid(60) + 1);
        if first >= end {
            return 0;
        }
        let day_of = |minute: i64| minute.div_euclid(1440) as i32;
        let minute_of = |minute: i64| minute.rem_euclid(1440) as u16;
        let whole_day = self.count_minutes(0, 1440, window);
        let last_day = day_of(end - 1);
        let mut count = 0;
        let mut day = self.days.next(day_of(first));
        while let Some(today) = day.filter(|day| *day <= last_day) {
            if window.allows_day(today) {
                let from = if today == day_of(first) { minute_of(first) } else { 0 };
                let to = if today == last_day { minute_of(end - 1) + 1 } else { 1440 };
                count +=
                    if (from, to) == (0, 1440) { whole_day } else { self.count_minutes(from, to, window) };
            }
            day = self.days.next(today + 1);
        }
        count
    }

    /// The matching minutes of a day from `from` to before `to` that a window allows.
    fn count_minutes(&self, from: u16, to: u16, window: &Window) -> u64 {
        let up_to = |minute: u16| {
            let (hour, minute) = (u32::from(minute / 60), u32::from(minute % 60));
            let before = self.hours & ((1 << hour) - 1);
            let partial = if self.hours & (1 << hour) != 0 { self.minutes & ((1 << minute) - 1) } else { 0 };
            before.count_ones() * self.minutes.count_ones() + partial.count_ones()
        };
        let parts = window
            .minutes()
            .map(|(start, end)| (start.max(from), end.min(to)))
            .filter(|(start, end)| start < end);
        parts.map(|(start, end)| u64::from(up_to(end) - up_to(start))).sum()
    }

    /// The shortest distance between two ticks on an even clock, in seconds.
    pub(crate) fn shortest_distance(&self) -> i64 {
        let start = Date { year: 2001, month: 1, day: 1 }.to_days();
        let end = Date { year: 2029, month: 1, day: 1 }.to_days();
        let mut minutes = Vec::new();
        let mut minute = Some(self.first_minute());
        while let Some(found) = minute {
            minutes.push(found);
            minute = self.next_minute(found);
        }
        let within = minutes.windows(2).map(|pair| pair[1] - pair[0]).min();
        let mut days = self.days_between(start, end).peekable();
        let mut between = i32::MAX / 1440;
        while let (Some(day), Some(next)) = (days.next(), days.peek()) {
            between = between.min(next - day);
            if between == 1 {
                break;
            }
        }
        let across = between * 1440 - (self.last_minute() - self.first_minute());
        i64::from(within.unwrap_or(across).min(across)) * 60
    }

    fn days_between(&self, start: i32, end: i32) -> impl Iterator<Item = i32> {
        std::iter::successors(self.days.next(start), |day| self.days.next(day + 1))
            .take_while(move |day| *day < end)
    }
}
