//! Jitter: a delay that spreads ticks, drawn from a hash so that everybody draws the same.

use std::fmt;

use jiff::{SignedDuration, Timestamp};

use crate::duration::{Compound, parse_ms};
use crate::error::{Error, ErrorKind, Quoted};
use crate::zone::floor_millisecond;

/// How far a tick may be delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Jitter {
    /// Up to this long, the longest delay included.
    Duration(SignedDuration),
    /// Up to this many hundredths of a percent of the distance to the next tick.
    Share(u16),
}

impl Jitter {
    /// Reads a duration (`30s`) or a percentage below 100 (`10%`, `2.5%`).
    pub fn parse(input: &str) -> Result<Jitter, Error> {
        let text = input.trim();
        let Some(number) = text.strip_suffix('%') else {
            return parse_ms(text, ErrorKind::Jitter)
                .map(|ms| Jitter::Duration(SignedDuration::from_millis(ms)));
        };
        parse_share(number.trim_end()).map(Jitter::Share).ok_or_else(|| {
            let message = format!(
                "Invalid jitter {}. Expected a percentage from 0% to below 100%, with at most two decimals",
                Quoted(text)
            );
            Error::whole(ErrorKind::Jitter, text, message)
        })
    }

    /// The longest delay for a tick whose next tick is `distance` milliseconds away.
    pub(crate) fn longest_ms(&self, distance: Option<i64>) -> i64 {
        let longest = match self {
            Jitter::Duration(duration) => duration.as_millis() as i64,
            Jitter::Share(share) => (i128::from(distance.unwrap_or(0)) * i128::from(*share) / 10_000) as i64,
        };
        // Due order is tick order, also where daylight saving brings two ticks closer together.
        longest.min(distance.unwrap_or(i64::MAX).saturating_sub(1)).max(0)
    }
}

fn parse_share(number: &str) -> Option<u16> {
    let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |s: &str, max: usize| (1..=max).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole, 2) || !digits(decimals, 2) {
        return None;
    }
    let hundredths: u16 = format!("{decimals:0<2}").parse().ok()?;
    Some(whole.parse::<u16>().ok()? * 100 + hundredths)
}

/// As [`Jitter::parse`] reads it.
impl fmt::Display for Jitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Jitter::Duration(duration) => Compound(duration.as_millis() as i64).fmt(f),
            Jitter::Share(share) if share % 100 == 0 => write!(f, "{}%", share / 100),
            Jitter::Share(share) => write!(f, "{}.{:02}%", share / 100, share % 100),
        }
    }
}

/// The seed of a schedule: FNV-1a, 64 bit, of its name `agent/schedule` in UTF-8.
///
/// This and [`delay_ms`] are a contract: nodes of different versions must agree on every `due_at`.
pub(crate) fn seed(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A delay from zero to `longest`, to the millisecond, drawn from the name of a schedule and an instant as jitter is.
pub fn hashed_delay(name: &str, at: Timestamp, longest: SignedDuration) -> SignedDuration {
    let longest = i64::try_from(longest.as_millis()).unwrap_or(i64::MAX).max(0);
    SignedDuration::from_millis(delay_ms(seed(name), floor_millisecond(at), longest))
}

/// A delay from 0 to `longest` milliseconds, both included, for the tick at `tick_ms` (milliseconds since 1970).
pub(crate) fn delay_ms(seed: u64, tick_ms: i64, longest: i64) -> i64 {
    // The finaliser of SplitMix64 over seed and tick, then scaled by the high half of a product.
    let mut x = seed ^ (tick_ms as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    ((u128::from(x) * (longest as u128 + 1)) >> 64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    // The figures were computed apart from this code.
    #[test]
    fn the_hash_is_a_contract() {
        assert_eq!(seed(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(seed("reporter/sweep"), 17_767_868_108_580_521_795);
        let ticks = [0, 1_772_956_800_000, 1_772_958_000_000, -1];
        let delays = ticks.map(|tick| delay_ms(seed("reporter/sweep"), tick, 30_000));
        assert_eq!(delays, [29099, 11260, 10241, 19938]);
    }

    #[test]
    fn delays_fill_their_range_evenly() {
        let mut buckets = [0u32; 11];
        for tick in 0..110_000 {
            buckets[delay_ms(seed("a/b"), tick * 60_000, 10) as usize] += 1;
        }
        assert!(buckets.iter().all(|n| (9_500..10_500).contains(n)), "{buckets:?}");
    }

    #[test]
    fn percentages_and_durations_are_read_and_written() {
        for (input, expected) in
            [("10%", Jitter::Share(1000)), ("2.5%", Jitter::Share(250)), (" 0.05 %", Jitter::Share(5))]
        {
            let jitter = Jitter::parse(input).unwrap();
            assert_eq!(jitter, expected);
            assert_eq!(Jitter::parse(&jitter.to_string()).unwrap(), jitter);
        }
        assert_eq!(Jitter::parse("1m30s").unwrap().to_string(), "1m30s");
        for input in ["", "%", "100%", "-5%", "1.234%", "5", "-5s", "x%", "1e1%", "٣%"] {
            assert_eq!(Jitter::parse(input).unwrap_err().kind(), ErrorKind::Jitter, "{input}");
        }
    }
}
