//! Calendar arithmetic on whole days since 1970-01-01, as plain integers: the inner loop of every search.
//!
//! The proleptic Gregorian calendar repeats every 146,097 days (400 years), which are a whole number of weeks.

/// Seconds in a day.
pub const DAY: i64 = 86_400;
/// Seconds in 400 years.
pub const CYCLE: i64 = 146_097 * DAY;
/// The last year any search looks at; instants end with it.
pub const YEAR_MAX: i32 = 9999;

/// The days of the week, Sunday first.
pub const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A calendar date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    pub year: i32,
    /// 1 to 12.
    pub month: u8,
    /// 1 to 31.
    pub day: u8,
}

impl Date {
    /// The date of a day number (days since 1970-01-01), for years -9999 to 9999.
    pub fn from_days(days: i32) -> Date {
        // Years are counted from 1 March, so that the leap day comes last; shifted to be positive.
        const SHIFT_CYCLES: i32 = 82;
        let n = (days + 719_468 + 146_097 * SHIFT_CYCLES) as u32;
        let n4 = 4 * n + 3;
        let century = n4 / 146_097;
        let day_of_century = n4 % 146_097 / 4;
        let scaled = 2_939_745 * u64::from(4 * day_of_century + 3);
        let year_of_century = (scaled >> 32) as u32;
        let day_of_year = (scaled as u32) / 2_939_745 / 4;
        let month_day = 2_141 * day_of_year + 197_913;
        let (month, day) = (month_day >> 16, (month_day & 0xffff) / 2_141);
        let year = (100 * century + year_of_century) as i32 - 400 * SHIFT_CYCLES;
        if day_of_year >= 306 {
            Date { year: year + 1, month: (month - 12) as u8, day: day as u8 + 1 }
        } else {
            Date { year, month: month as u8, day: day as u8 + 1 }
        }
    }

    /// The day number of this date.
    pub fn to_days(self) -> i32 {
        let year = self.year - i32::from(self.month <= 2);
        let month_from_march = (i32::from(self.month) + 9) % 12;
        let era = year.div_euclid(400);
        let year_of_era = year.rem_euclid(400);
        let day_of_year = (153 * month_from_march + 2) / 5 + i32::from(self.day) - 1;
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
    }
}

/// The weekday of a day number: 0 is Sunday.
pub fn weekday(days: i32) -> u8 {
    (days + 4).rem_euclid(7) as u8
}

/// How many days a month has.
pub fn days_in_month(year: i32, month: u8) -> u8 {
    if month == 2 { 28 + u8::from(is_leap(year)) } else { 30 | (month ^ (month >> 3)) }
}

fn is_leap(year: i32) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Splits local seconds into a day number and the second of that day.
pub fn split(local: i64) -> (i32, i32) {
    (local.div_euclid(DAY) as i32, local.rem_euclid(DAY) as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn day_numbers_and_dates_agree_with_jiff_over_the_whole_range() {
        let epoch = jiff::civil::date(1970, 1, 1);
        let first = Date { year: -9998, month: 1, day: 1 }.to_days();
        let last = Date { year: YEAR_MAX, month: 12, day: 31 }.to_days();
        for days in (first..=last).step_by(13).chain(-800_000..800_000) {
            let date = Date::from_days(days);
            assert_eq!(date.to_days(), days);
            let expected = epoch.checked_add(jiff::Span::new().days(days)).unwrap();
            assert_eq!(
                (date.year, date.month, date.day, weekday(days), days_in_month(date.year, date.month)),
                (
                    i32::from(expected.year()),
                    expected.month() as u8,
                    expected.day() as u8,
                    expected.weekday().to_sunday_zero_offset() as u8,
                    expected.days_in_month() as u8,
                ),
                "day {days}"
            );
        }
    }
}
