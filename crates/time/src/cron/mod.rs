//! `cron`: five fields as bit sets. `parse.rs` fills them, `days.rs` knows months, `next.rs` walks real time,
//! `describe.rs` says it in English.

mod days;
mod describe;
mod next;
mod parse;

use std::fmt;

use days::Days;

/// A cron expression of five fields: minute, hour, day of month, month, day of week.
///
/// Two expressions are equal when their text is, up to outer blanks.
#[derive(Debug, Clone)]
pub struct Cron {
    /// Bits 0 to 59.
    minutes: u64,
    /// Bits 0 to 23.
    hours: u32,
    days: Days,
    /// Neither the minute nor the hour field starts with `*`: the job has fixed times of day.
    fixed: bool,
    /// A time that the clocks skip moves to the end of the gap.
    gap_moves: bool,
    /// A time that happens twice fires twice.
    fold_twice: bool,
    text: Box<str>,
}

/// One of the five fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Field {
    /// 0 to 59.
    Minute,
    /// 0 to 23.
    Hour,
    /// 1 to 31.
    DayOfMonth,
    /// 1 to 12.
    Month,
    /// 0 to 7; both 0 and 7 are Sunday.
    DayOfWeek,
}

/// What a job at fixed times does when the clocks change. Jobs with a `*` in the minute or hour field follow
/// real time instead: they fire at every minute that matches and at none that is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Dst {
    /// For times that the clocks skip.
    pub gap: Gap,
    /// For times that happen twice.
    pub fold: Fold,
}

/// `dst_gap`: what becomes of a time that the clocks skip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Gap {
    /// It moves to the end of the gap.
    #[default]
    Run,
    /// There is no tick on that day.
    Skip,
}

/// `dst_fold`: what becomes of a time that happens twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fold {
    /// It fires the first time.
    #[default]
    First,
    /// It fires both times.
    Both,
}

impl Cron {
    /// Sets what a job at fixed times does when the clocks change.
    pub fn with_dst(mut self, dst: Dst) -> Cron {
        self.gap_moves = self.fixed && dst.gap == Gap::Run;
        self.fold_twice = !self.fixed || dst.fold == Fold::Both;
        self
    }

    /// The expression as it was written, without outer blanks.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl PartialEq for Cron {
    fn eq(&self, other: &Cron) -> bool {
        self.text == other.text && self.gap_moves == other.gap_moves && self.fold_twice == other.fold_twice
    }
}

impl Eq for Cron {}

/// As [`Cron::parse`] reads it.
impl fmt::Display for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for Cron {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Cron, crate::Error> {
        Cron::parse(text)
    }
}

impl Field {
    fn min(self) -> u8 {
        match self {
            Field::DayOfMonth | Field::Month => 1,
            Field::Minute | Field::Hour | Field::DayOfWeek => 0,
        }
    }

    fn max(self) -> u8 {
        match self {
            Field::Minute => 59,
            Field::Hour => 23,
            Field::DayOfMonth => 31,
            Field::Month => 12,
            Field::DayOfWeek => 7,
        }
    }

    /// Where `*` and open steps end: 7 is a second name for Sunday, not an eighth day.
    fn last(self) -> u8 {
        if self == Field::DayOfWeek { 6 } else { self.max() }
    }

    fn names(self) -> &'static [&'static str] {
        match self {
            Field::Month => {
                &["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
            }
            Field::DayOfWeek => &["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"],
            Field::Minute | Field::Hour | Field::DayOfMonth => &[],
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Field::Minute => "minute",
            Field::Hour => "hour",
            Field::DayOfMonth => "day-of-month",
            Field::Month => "month",
            Field::DayOfWeek => "day-of-week",
        })
    }
}
