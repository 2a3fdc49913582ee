//! `every`: a fixed interval, or a step of the calendar.

use std::fmt;

use jiff::SignedDuration;

use crate::duration::{Compound, parse_ms};
use crate::error::{Error, ErrorKind, Quoted};

/// How far apart the ticks of an `every` schedule are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Every {
    /// A fixed time; a day is 24 hours, daylight saving does not touch it.
    Interval(SignedDuration),
    /// The same local time each day.
    Daily,
    /// The same local time and weekday each week.
    Weekly,
    /// The same local time and day number each month, or the last day where a month is too short.
    Monthly,
}

/// From where an `every` schedule counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Anchor {
    /// From the end of the last run, so that runs never pile up.
    #[default]
    Completion,
    /// From the last tick.
    Start,
    /// On a grid: multiples of the interval since 1970-01-01T00:00Z, plus a phase. Calendar steps count from
    /// midnight of that day in the schedule's zone.
    Slot {
        /// Moves the grid forward; smaller than the interval.
        phase: SignedDuration,
    },
}

impl Every {
    /// The shortest interval.
    pub const SHORTEST: SignedDuration = SignedDuration::from_millis(100);

    /// Reads an interval as [`parse_duration`](crate::parse_duration) does, of at least 100 ms; or one of
    /// `hourly`, `daily`, `weekly`, `monthly`.
    ///
    /// ```
    /// # use belfry_time::{Every, SignedDuration};
    /// assert_eq!(Every::parse("90m")?, Every::Interval(SignedDuration::from_mins(90)));
    /// assert_eq!(Every::parse("Daily")?, Every::Daily);
    /// assert!(Every::parse("0m").unwrap_err().to_string().starts_with("Zero interval is not allowed"));
    /// # Ok::<(), belfry_time::Error>(())
    /// ```
    pub fn parse(input: &str) -> Result<Every, Error> {
        let text = input.trim();
        let words = [
            ("hourly", Every::HOURLY),
            ("daily", Every::Daily),
            ("weekly", Every::Weekly),
            ("monthly", Every::Monthly),
        ];
        if let Some((_, every)) = words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)) {
            return Ok(*every);
        }
        let ms = parse_ms(text, ErrorKind::Interval)?;
        let fail = |message| Err(Error::whole(ErrorKind::Interval, text, message));
        if ms == 0 {
            return fail(format!("Zero interval is not allowed: {}. The shortest is 100ms", Quoted(text)));
        }
        let duration = SignedDuration::from_millis(ms);
        if duration < Every::SHORTEST {
            return fail(format!("Interval {} is too short. The shortest is 100ms", Quoted(text)));
        }
        Ok(Every::Interval(duration))
    }

    /// An hour is an hour in every zone.
    const HOURLY: Every = Every::Interval(SignedDuration::from_hours(1));

    /// Plain English: "every 1h30m", "every day".
    pub fn describe(&self) -> String {
        match self {
            Every::Interval(duration) => format!("every {}", Compound(duration.as_millis() as i64)),
            Every::Daily => "every day".into(),
            Every::Weekly => "every week".into(),
            Every::Monthly => "every month".into(),
        }
    }
}

/// As [`Every::parse`] reads it.
impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Every::Interval(duration) => Compound(duration.as_millis() as i64).fmt(f),
            Every::Daily => f.write_str("daily"),
            Every::Weekly => f.write_str("weekly"),
            Every::Monthly => f.write_str("monthly"),
        }
    }
}
