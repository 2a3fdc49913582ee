//! An expression in plain English, from its bit sets.

use super::Cron;
use super::days::{ALL_MONTHS, Rule};
use crate::civil::WEEKDAYS;

const ALL_MINUTES: u64 = (1 << 60) - 1;
const ALL_HOURS: u32 = (1 << 24) - 1;
/// More times of day than this are not listed one by one.
const TIMES_MAX: u32 = 4;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl Cron {
    /// Plain English, for people who read a schedule rather than write it.
    ///
    /// ```
    /// # use belfry_time::Cron;
    /// assert_eq!(Cron::parse("*/15 9-17 * * *")?.describe(), "every 15 minutes from 09:00 to 17:45, every day");
    /// assert_eq!(Cron::parse("0 0 L * 5#2")?.describe(),
    ///     "at 00:00, on the last day of the month or on the second Friday of the month");
    /// # Ok::<(), belfry_time::Error>(())
    /// ```
    pub fn describe(&self) -> String {
        let mut words = self.describe_times();
        let days = self.describe_days();
        if !days.is_empty() {
            words.push_str(", ");
            words.push_str(&days);
        } else if self.hours != ALL_HOURS && self.days.months == ALL_MONTHS {
            words.push_str(", every day");
        }
        if self.days.months != ALL_MONTHS {
            words.push_str(", in ");
            words.push_str(&runs(bits(u64::from(self.days.months)), |month| {
                MONTHS[month as usize - 1].into()
            }));
        }
        words
    }

    fn describe_times(&self) -> String {
        let clock = |hour: u32, minute: u32| format!("{hour:02}:{minute:02}");
        let minutes: Vec<u32> = bits(self.minutes).collect();
        let hours: Vec<u32> = bits(u64::from(self.hours)).collect();
        if (minutes.len() * hours.len()) as u32 <= TIMES_MAX {
            let times = hours.iter().flat_map(|hour| minutes.iter().map(|minute| clock(*hour, *minute)));
            return format!("at {}", join(times.collect()));
        }
        let pace = match (even_step(&minutes, 60), minutes.as_slice()) {
            _ if self.minutes == ALL_MINUTES => "every minute".into(),
            (Some(step), _) => format!("every {step} minutes"),
            (None, [0]) if self.hours == ALL_HOURS => return "every hour".into(),
            (None, [minute]) => match even_step(&hours, 24) {
                Some(step) => return format!("every {step} hours, at minute {minute}"),
                None => format!("at minute {minute}"),
            },
            (None, _) => format!("at minutes {}", join(minutes.iter().map(u32::to_string).collect())),
        };
        if self.hours == ALL_HOURS {
            return if pace.starts_with("every") { pace } else { format!("{pace} of every hour") };
        }
        let (first, last) = (hours[0], hours[hours.len() - 1]);
        if hours.len() > 1 && hours.len() as u32 == last - first + 1 {
            return format!(
                "{pace} from {} to {}",
                clock(first, minutes[0]),
                clock(last, minutes[minutes.len() - 1])
            );
        }
        let plural = if hours.len() == 1 { "hour" } else { "hours" };
        format!("{pace} in {plural} {}", runs(hours.into_iter(), |hour| hour.to_string()))
    }

    fn describe_days(&self) -> String {
        match self.days.rule {
            Rule::Any => String::new(),
            Rule::DayOfMonth => self.describe_month_days(),
            Rule::PlainWeekdays => self.describe_plain_weekdays(),
            Rule::DayOfWeek => self.describe_weekdays(),
            Rule::Either => {
                let weekdays = self.describe_weekdays();
                let on = if weekdays.starts_with("on ") { "" } else { "on " };
                format!("{} or {on}{weekdays}", self.describe_month_days())
            }
        }
    }

    fn describe_month_days(&self) -> String {
        let days = &self.days;
        let mut parts = Vec::new();
        if days.dom != 0 {
            let plural = if days.dom.count_ones() == 1 { "day" } else { "days" };
            parts.push(format!("{plural} {}", runs(bits(u64::from(days.dom)), |day| day.to_string())));
        }
        parts.extend(bits(u64::from(days.nearest)).map(|day| format!("the weekday nearest day {day}")));
        if days.last_weekday {
            parts.push("the last weekday".into());
        }
        if days.last {
            parts.push("the last day".into());
        }
        format!("on {} of the month", join(parts))
    }

    fn describe_plain_weekdays(&self) -> String {
        if self.days.dow == 0x7f {
            return "every day".into();
        }
        // From Monday on, so that a weekend is one run.
        let days = bits(u64::from(self.days.dow >> 1 | (self.days.dow & 1) << 6));
        runs(days, |day| WEEKDAYS[(day as usize + 1) % 7].into())
    }

    fn describe_weekdays(&self) -> String {
        let mut parts = Vec::new();
        if self.days.dow != 0 {
            parts.push(self.describe_plain_weekdays());
        }
        let name = |day: u32| WEEKDAYS[day as usize];
        for (k, days) in self.days.nth.iter().enumerate() {
            let nth = ["first", "second", "third", "fourth", "fifth"][k];
            parts
                .extend(bits(u64::from(*days)).map(|day| format!("on the {nth} {} of the month", name(day))));
        }
        parts.extend(
            bits(u64::from(self.days.last_dow)).map(|day| format!("on the last {} of the month", name(day))),
        );
        join(parts)
    }
}

fn bits(set: u64) -> impl Iterator<Item = u32> + Clone {
    (0..64).filter(move |bit| set & (1 << bit) != 0)
}

/// The step, above 1, of numbers that start at 0 and divide `cycle` evenly.
fn even_step(numbers: &[u32], cycle: u32) -> Option<u32> {
    let [0, step, ..] = numbers else { return None };
    let even = numbers.iter().enumerate().all(|(i, number)| *number == i as u32 * step);
    (even && *step > 1 && numbers.len() as u32 * step == cycle).then_some(*step)
}

/// "1, 3 and 5 to 9": three or more in a row become a range.
fn runs(numbers: impl Iterator<Item = u32>, name: impl Fn(u32) -> String) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let words = parts.into_iter().flat_map(|(first, last)| match last - first {
        0 => vec![name(first)],
        1 => vec![name(first), name(last)],
        _ => vec![format!("{} to {}", name(first), name(last))],
    });
    join(words.collect())
}

fn join(mut words: Vec<String>) -> String {
    match words.pop() {
        Some(last) if !words.is_empty() => format!("{} and {last}", words.join(", ")),
        last => last.unwrap_or_default(),
    }
}
