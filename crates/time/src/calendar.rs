//! Calendar steps: a series of local dates that keeps the time of day and the day number of its first tick.

use jiff::{SignedDuration, Timestamp};

use crate::civil::{DAY, Date, days_in_month, split};
use crate::zone::{LONG_GAP, Local, Zone, floor_second};

/// The length of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Days(i32),
    Month,
}

/// All ticks of a calendar schedule: the first, and one more for each step.
pub(crate) struct Series<'a> {
    pub step: Step,
    pub zone: &'a Zone,
    /// Local second of the first tick.
    first: i64,
    /// What the first tick has beyond a whole second; every tick has it.
    fraction: SignedDuration,
    /// A grid has no beginning.
    is_grid: bool,
}

impl<'a> Series<'a> {
    /// The series whose first tick is this instant.
    pub fn from_instant(step: Step, zone: &'a Zone, first: Timestamp) -> Series<'a> {
        let second = floor_second(first);
        let nanos = (first.as_nanosecond() - i128::from(second) * 1_000_000_000) as i64;
        let fraction = SignedDuration::from_nanos(nanos);
        Series { step, zone, first: zone.local_second(second), fraction, is_grid: false }
    }

    /// The series that starts at a local time, which need not be a tick anybody saw.
    pub fn from_local(step: Step, zone: &'a Zone, first_ms: i64) -> Series<'a> {
        let fraction = SignedDuration::from_millis(first_ms.rem_euclid(1000));
        Series { step, zone, first: first_ms.div_euclid(1000), fraction, is_grid: true }
    }

    /// The first tick after `after`.
    pub fn next(&self, after: Timestamp) -> Option<Timestamp> {
        let mut k = self.steps_before(after);
        loop {
            let tick = self.tick(k)?;
            if let Some(tick) = tick.filter(|tick| *tick > after) {
                return Some(tick);
            }
            k += 1;
        }
    }

    /// The last tick that is not after `at`.
    pub fn last(&self, at: Timestamp) -> Option<Timestamp> {
        let k = self.steps_before(at);
        let ticks = (k..k + 4).filter_map(|k| self.tick(k).flatten());
        ticks.take_while(|tick| *tick <= at).last()
    }

    /// A number of steps whose tick is well before `at`, or the first step.
    fn steps_before(&self, at: Timestamp) -> i32 {
        let (today, _) = split(self.zone.local_second(floor_second(at)));
        let (first_day, _) = split(self.first);
        let steps = match self.step {
            Step::Days(days) => (today - first_day).div_euclid(days),
            Step::Month => {
                let (now, first) = (Date::from_days(today), Date::from_days(first_day));
                (now.year - first.year) * 12 + i32::from(now.month) - i32::from(first.month)
            }
        };
        if self.is_grid { steps - 2 } else { (steps - 2).max(0) }
    }

    /// The tick after so many steps: `None` beyond the range of instants, `Some(None)` where a missing day
    /// swallows it.
    fn tick(&self, k: i32) -> Option<Option<Timestamp>> {
        let (first_day, second) = split(self.first);
        let day = match self.step {
            Step::Days(days) => first_day.checked_add(k.checked_mul(days)?)?,
            Step::Month => {
                let first = Date::from_days(first_day);
                let months = first.year * 12 + i32::from(first.month) - 1 + k;
                let (year, month) = (months.div_euclid(12), months.rem_euclid(12) as u8 + 1);
                Date { year, month, day: first.day.min(days_in_month(year, month)) }.to_days()
            }
        };
        let instant = |second: i64| Timestamp::from_second(second).ok();
        Some(match self.zone.resolve(i64::from(day) * DAY + i64::from(second)) {
            Local::Once(at) | Local::Twice(at) => Some(instant(at)?.checked_add(self.fraction).ok()?),
            Local::Never { at, jump } if jump < LONG_GAP => Some(instant(at)?),
            Local::Never { .. } => None,
        })
    }
}
