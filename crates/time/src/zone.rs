//! Time zones as a flat table of spans with one offset each.
//!
//! jiff knows the rules; we ask it once per zone for every change of offset and keep the answer, because a
//! search needs "the offset here, and until when" in a few nanoseconds. Tables are shared and never dropped:
//! there are at most as many as zone names.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp};

use crate::civil::CYCLE;
use crate::error::{Error, ErrorKind, Quoted};

/// A time zone. Cheap to clone.
#[derive(Clone)]
pub struct Zone(Arc<Table>);

/// A stretch of time in which a zone keeps one offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// First second of the span.
    pub start: i64,
    /// First second after it; `i64::MAX` for the last.
    pub end: i64,
    /// Local time minus UTC, in seconds.
    pub offset: i64,
    /// The offset of the span before.
    pub before: i64,
}

impl Span {
    /// Local times before this one are a second pass: the span before had them already.
    pub fn repeated_until(&self) -> i64 {
        if self.before > self.offset { self.start + self.before } else { i64::MIN }
    }
}

/// Where a local time lies in a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Local {
    /// It happens once.
    Once(i64),
    /// It happens twice; this is the first.
    Twice(i64),
    /// It is skipped: the clock jumps over it at this instant, by so many seconds.
    Never { at: i64, jump: i64 },
}

/// A gap this long or longer is a missing day, not a change of clocks: nothing moves to its end.
pub(crate) const LONG_GAP: i64 = 3 * 3600;
/// No local time is further from UTC than this.
const OFFSET_MAX: i64 = 26 * 3600;

impl Zone {
    /// Looks a zone up by its IANA name, spelled as in the time zone database.
    ///
    /// ```
    /// # use belfry_time::Zone;
    /// assert_eq!(Zone::get("Europe/Vienna")?.name(), "Europe/Vienna");
    /// assert_eq!(
    ///     Zone::get("europe/vienna").unwrap_err().to_string(),
    ///     r#"Unknown time zone "europe/vienna". Did you mean "Europe/Vienna"?"#
    /// );
    /// # Ok::<(), belfry_time::Error>(())
    /// ```
    pub fn get(name: &str) -> Result<Zone, Error> {
        if let Some(zone) = known_zones().get(name) {
            return Ok(zone.clone());
        }
        let unknown = |hint: String| {
            let message = format!("Unknown time zone {}. {hint}", Quoted(name));
            Error::whole(ErrorKind::Zone, name, message)
        };
        let plain = || "Use an IANA name, for example \"Europe/London\" or \"UTC\"".to_owned();
        if name.len() > 64 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"/_+-".contains(&b)) {
            return Err(unknown(plain()));
        }
        // In the database, but not zones: they mean another thing on another host, or nothing.
        if ["localtime", "posixrules", "Factory"].contains(&name)
            || name.starts_with("right/")
            || name.starts_with("posix/")
        {
            return Err(unknown(plain()));
        }
        let found = TimeZone::get(name).map_err(|_| unknown(plain()))?;
        match found.iana_name() {
            Some(canonical) if canonical != name => Err(unknown(format!("Did you mean \"{canonical}\"?"))),
            Some(_) => Ok(Zone::keep(name, found)),
            None => Err(unknown(plain())),
        }
    }

    /// Coordinated universal time.
    pub fn utc() -> Zone {
        static UTC: LazyLock<Zone> = LazyLock::new(|| Zone(Arc::new(Table::new("UTC", TimeZone::UTC))));
        UTC.clone()
    }

    /// The zone of a jiff time zone, such as the host's.
    pub fn from_jiff(zone: TimeZone) -> Zone {
        let Some(name) = zone.iana_name().map(str::to_owned) else {
            return Zone(Arc::new(Table::new("local", zone)));
        };
        let known = known_zones().get(&name).cloned();
        known.unwrap_or_else(|| Zone::keep(&name, zone))
    }

    fn keep(name: &str, zone: TimeZone) -> Zone {
        let zone = Zone(Arc::new(Table::new(name, zone)));
        known_zones().entry(name.to_owned()).or_insert(zone).clone()
    }

    /// The IANA name; `local` for a host zone that has none.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What this zone's clocks show at an instant.
    pub fn local(&self, at: Timestamp) -> jiff::Zoned {
        at.to_zoned(self.0.zone.clone())
    }

    /// An instant as RFC 3339 with this zone's offset, as precise as it needs to be.
    ///
    /// RFC 3339 has no offsets with seconds, as some zones had them before 1972: these are rounded to the
    /// minute, and the instant stays exact.
    pub fn rfc3339(&self, at: Timestamp) -> String {
        let offset = self.span_at(floor_second(at)).offset;
        let minutes = (offset + 30).div_euclid(60);
        let offset = Offset::from_seconds((minutes * 60) as i32).unwrap_or(Offset::UTC);
        at.display_with_offset(offset).to_string()
    }

    /// The span that holds a second.
    pub(crate) fn span_at(&self, second: i64) -> Span {
        self.0.span_at(second)
    }

    /// The local second that clocks show at a second of UTC.
    pub(crate) fn local_second(&self, second: i64) -> i64 {
        second + self.span_at(second).offset
    }

    /// When a local second happens.
    pub(crate) fn resolve(&self, local: i64) -> Local {
        let mut span = self.span_at(local - OFFSET_MAX);
        loop {
            let at = local - span.offset;
            if at < span.end {
                let next = if span.end == i64::MAX { span } else { self.span_at(span.end) };
                return if local < next.repeated_until() && local - next.offset >= next.start {
                    Local::Twice(at)
                } else {
                    Local::Once(at)
                };
            }
            let next = self.span_at(span.end);
            if local < next.start + next.offset {
                return Local::Never { at: next.start, jump: next.offset - span.offset };
            }
            span = next;
        }
    }

    /// The first span that can hold a local second, or the one after `span` if that is later.
    pub(crate) fn skip_towards(&self, span: Span, local: i64) -> Span {
        self.span_at(span.end.max(local - OFFSET_MAX))
    }
}

/// The second an instant lies in.
pub(crate) fn floor_second(at: Timestamp) -> i64 {
    at.as_second() - i64::from(at.subsec_nanosecond() < 0)
}

/// The millisecond an instant lies in.
pub(crate) fn floor_millisecond(at: Timestamp) -> i64 {
    at.as_nanosecond().div_euclid(1_000_000) as i64
}

/// `at` moved by a number of milliseconds, unless that leaves the range of instants.
pub(crate) fn add_ms(at: Timestamp, ms: i64) -> Option<Timestamp> {
    at.checked_add(SignedDuration::from_millis(ms)).ok()
}

fn known_zones() -> std::sync::MutexGuard<'static, HashMap<String, Zone>> {
    static KNOWN: LazyLock<Mutex<HashMap<String, Zone>>> = LazyLock::new(Mutex::default);
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Rules repeat from here on (no zone lists single changes beyond 2087) …
const RULES: Range<i64> = 4_102_444_800..4_102_444_800 + CYCLE; // 2100 to 2500
/// The look-up table begins in 1900; earlier instants are found by bisection.
const INDEX_START: i64 = -2_208_988_800;
/// Seconds per entry of the look-up table, as a power of two: about half a year.
const INDEX_SHIFT: u32 = 24;

struct Table {
    name: Box<str>,
    zone: TimeZone,
    /// When each span starts, ascending; the first is the beginning of time.
    starts: Vec<i64>,
    offsets: Vec<i32>,
    /// The span at the start of each slice of 2^24 seconds.
    index: Vec<u16>,
    /// The zone changes its clocks for ever: what is beyond `RULES` repeats what is inside.
    repeats: bool,
}

impl Table {
    fn new(name: &str, zone: TimeZone) -> Table {
        let (mut starts, mut offsets) = (vec![i64::MIN], vec![zone.to_offset(Timestamp::MIN).seconds()]);
        for change in zone.following(Timestamp::MIN) {
            let (start, offset) = (change.timestamp().as_second(), change.offset().seconds());
            if offset != offsets[offsets.len() - 1] {
                starts.push(start);
                offsets.push(offset);
            }
            // One change beyond the end, so that the last span in the cycle has its true end.
            if start >= RULES.end {
                break;
            }
        }
        let repeats = starts[starts.len() - 1] >= RULES.end;
        let slices = (RULES.end - INDEX_START) >> INDEX_SHIFT;
        let index = (0..=slices)
            .map(|slice| starts.partition_point(|start| *start <= INDEX_START + (slice << INDEX_SHIFT)) - 1)
            .map(|span| u16::try_from(span).expect("a zone has a few thousand changes at most"))
            .collect();
        Table { name: name.into(), zone, starts, offsets, index, repeats }
    }

    fn span_at(&self, second: i64) -> Span {
        if second >= RULES.end && self.repeats {
            let shift = (second - RULES.start).div_euclid(CYCLE) * CYCLE;
            let span = self.span_at(second - shift);
            return Span { start: span.start + shift, end: span.end + shift, ..span };
        }
        let slice = second.wrapping_sub(INDEX_START) >> INDEX_SHIFT;
        let i = match self.index.get(slice as usize) {
            Some(first) if second >= INDEX_START => {
                let mut i = usize::from(*first);
                while self.starts.get(i + 1).is_some_and(|start| *start <= second) {
                    i += 1;
                }
                i
            }
            _ => self.starts.partition_point(|start| *start <= second) - 1,
        };
        Span {
            start: self.starts[i],
            end: self.starts.get(i + 1).copied().unwrap_or(i64::MAX),
            offset: i64::from(self.offsets[i]),
            before: i64::from(self.offsets[i.saturating_sub(1)]),
        }
    }
}

impl PartialEq for Zone {
    fn eq(&self, other: &Zone) -> bool {
        self.0.zone == other.0.zone
    }
}

impl Eq for Zone {}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Zone({})", self.name())
    }
}

impl fmt::Display for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_names() -> Vec<String> {
        jiff::tz::db().available().map(|name| name.to_string()).collect()
    }

    #[test]
    fn the_table_of_every_zone_agrees_with_jiff_from_1800_to_9999() {
        let names = all_names();
        assert!(names.len() > 400, "the time zone database has only {} names", names.len());
        let mut state = 1u64;
        for name in names {
            let Ok(zone) = Zone::get(&name) else { continue };
            for i in 0..400i64 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let range = if i % 4 == 0 { 253_000_000_000 } else { 8_000_000_000 };
                let second = (state >> 11) as i64 % range - 5_000_000_000 * i64::from(i % 4 != 0);
                let at = Timestamp::from_second(second).unwrap();
                let span = zone.span_at(second);
                assert!((span.start..span.end).contains(&second), "{name} {at}");
                assert_eq!(span.offset, i64::from(zone.0.zone.to_offset(at).seconds()), "{name} {at}");
                if span.end < 253_000_000_000 {
                    assert_ne!(zone.span_at(span.end).offset, span.offset, "{name} {at}");
                }
            }
        }
    }

    #[test]
    fn local_times_resolve_as_in_jiff() {
        use jiff::tz::AmbiguousOffset;
        for name in ["America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Pacific/Apia", "UTC"] {
            let zone = Zone::get(name).unwrap();
            for minute in (0..40_000_000i64).step_by(7) {
                let local = minute * 60;
                let civil = Timestamp::from_second(local).unwrap().to_zoned(TimeZone::UTC).datetime();
                let expected = zone.0.zone.to_ambiguous_timestamp(civil);
                let found = zone.resolve(local);
                match expected.offset() {
                    AmbiguousOffset::Unambiguous { offset } => {
                        assert_eq!(found, Local::Once(local - i64::from(offset.seconds())), "{name} {civil}")
                    }
                    AmbiguousOffset::Fold { before, .. } => {
                        assert_eq!(found, Local::Twice(local - i64::from(before.seconds())), "{name} {civil}")
                    }
                    AmbiguousOffset::Gap { before, after } => {
                        let jump = i64::from(after.seconds() - before.seconds());
                        let Local::Never { at, jump: found_jump } = found else {
                            panic!("{name} {civil}: {found:?}")
                        };
                        assert_eq!(found_jump, jump, "{name} {civil}");
                        assert_eq!(zone.span_at(at).start, at, "{name} {civil}");
                    }
                }
            }
        }
    }

    #[test]
    fn hostile_names_are_refused() {
        for name in [
            "",
            "Mars/Phobos",
            "../../etc/passwd",
            "EST5EDT4",
            "UTC+25",
            "a\0b",
            &"x".repeat(1 << 20),
            "Étc/UTC",
        ] {
            let error = Zone::get(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Zone);
            assert!(error.to_string().starts_with("Unknown time zone \""), "{error}");
            assert!(error.to_string().len() < 400);
        }
    }

    #[test]
    fn offsets_with_seconds_print_as_exact_instants() {
        let zone = Zone::get("Africa/Monrovia").unwrap();
        let at: Timestamp = "1971-12-31T23:00:00Z".parse().unwrap();
        let text = zone.rfc3339(at);
        assert_eq!(text.parse::<Timestamp>().unwrap(), at);
        assert_eq!(text, "1971-12-31T22:16:00-00:44");
    }
}
