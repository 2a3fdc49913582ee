//! Which days of a month match: the three day fields as bit sets, and the masks of one month.

use crate::civil::{Date, YEAR_MAX, days_in_month, weekday};

/// The day-of-month, month and day-of-week fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Days {
    /// Bits 1 to 12.
    pub months: u16,
    /// Days of the month, bits 1 to 31.
    pub dom: u32,
    /// `L`: the last day of the month.
    pub last: bool,
    /// `LW`: the last weekday (Monday to Friday) of the month.
    pub last_weekday: bool,
    /// `nW`: the weekday nearest to day n, in the same month; bits 1 to 31.
    pub nearest: u32,
    /// Days of the week, bits 0 to 6.
    pub dow: u8,
    /// `d#k`: the k-th such day of the month; index k - 1, bits 0 to 6.
    pub nth: [u8; 5],
    /// `dL`: the last such day of the month; bits 0 to 6.
    pub last_dow: u8,
    pub rule: Rule,
}

/// Which of the two day fields decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Rule {
    /// Both are `*` or `?`.
    #[default]
    Any,
    DayOfMonth,
    /// Only plain days of the week, in every month: no need to look at the calendar.
    PlainWeekdays,
    DayOfWeek,
    /// Both are restricted: either may match.
    Either,
}

pub(super) const ALL_MONTHS: u16 = 0x1ffe;

impl Days {
    /// The first matching day that is not before `from`, within the range of instants.
    pub fn next(&self, from: i32) -> Option<i32> {
        match self.rule {
            Rule::Any if self.months == ALL_MONTHS => Some(from),
            Rule::PlainWeekdays => {
                let week = u32::from(self.dow) | u32::from(self.dow) << 7;
                Some(from + (week >> weekday(from)).trailing_zeros() as i32)
            }
            _ => self.search(from),
        }
    }

    fn search(&self, from: i32) -> Option<i32> {
        let Date { mut year, mut month, day } = Date::from_days(from);
        let mut first = from - i32::from(day) + 1;
        let mut already_gone = (1u32 << day) - 1;
        loop {
            if self.months & (1 << month) != 0 {
                let matching = self.mask(year, month, first) & !already_gone;
                if matching != 0 {
                    return Some(first + matching.trailing_zeros() as i32 - 1);
                }
            }
            already_gone = 0;
            // The next month that the month field allows.
            let later = self.months >> (month + 1);
            if later != 0 {
                month += 1 + later.trailing_zeros() as u8;
            } else {
                year += 1;
                month = self.months.trailing_zeros() as u8;
                if year > YEAR_MAX {
                    return None;
                }
            }
            first = Date { year, month, day: 1 }.to_days();
        }
    }

    /// The matching days of a month as bits 1 to 31; `first` is the day number of its first day. The month
    /// field itself is not looked at.
    pub fn mask(&self, year: i32, month: u8, first: i32) -> u32 {
        let length = days_in_month(year, month);
        let all = (u32::MAX >> (31 - length)) & !1;
        let matching = match self.rule {
            Rule::Any => all,
            Rule::DayOfMonth => self.month_days(length, first),
            Rule::DayOfWeek | Rule::PlainWeekdays => self.week_days(length, first),
            Rule::Either => self.month_days(length, first) | self.week_days(length, first),
        };
        matching & all
    }

    fn month_days(&self, length: u8, first: i32) -> u32 {
        let mut mask = self.dom;
        if self.last {
            mask |= 1 << length;
        }
        if self.last_weekday {
            mask |= 1
                << match weekday(first + i32::from(length) - 1) {
                    0 => length - 2,
                    6 => length - 1,
                    _ => length,
                };
        }
        let mut nearest = self.nearest;
        while nearest != 0 {
            let day = nearest.trailing_zeros() as u8;
            nearest &= nearest - 1;
            if day <= length {
                mask |= 1 << nearest_weekday(day, length, weekday(first + i32::from(day) - 1));
            }
        }
        mask
    }

    fn week_days(&self, length: u8, first: i32) -> u32 {
        let mut mask = spread(self.dow, first);
        for (k, days) in self.nth.iter().enumerate() {
            if *days != 0 {
                mask |= spread(*days, first) & (0xfe << (7 * k));
            }
        }
        if self.last_dow != 0 {
            mask |= spread(self.last_dow, first) & (0xfe << (length - 7));
        }
        mask
    }
}

/// Weekday bits laid over a month that begins on day number `first`: bits 1 to 31.
fn spread(days: u8, first: i32) -> u32 {
    let twice = u64::from(days) << 7 | u64::from(days);
    let from_first = (twice >> weekday(first)) & 0x7f;
    ((from_first * 0x1020_4081) << 1) as u32
}

/// The day from Monday to Friday that is nearest to `day` without leaving the month.
fn nearest_weekday(day: u8, length: u8, weekday: u8) -> u8 {
    match weekday {
        6 if day == 1 => 3,
        6 => day - 1,
        0 if day == length => day - 2,
        0 => day + 1,
        _ => day,
    }
}
