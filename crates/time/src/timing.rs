//! One type that joins kind, anchor, zone, window and jitter. There is no second way to compute a next run.

use jiff::{SignedDuration, Timestamp};

use crate::calendar::{Series, Step};
use crate::cron::Cron;
use crate::duration::Compound;
use crate::error::{Error, ErrorKind, Quoted};
use crate::every::{Anchor, Every};
use crate::jitter::{self, Jitter};
use crate::window::Window;
use crate::zone::{Zone, add_ms, floor_millisecond, floor_second};

/// When a schedule ticks.
///
/// Built by [`Timing::cron`], [`Timing::every`], [`Timing::at`] or [`Timing::after`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    kind: Kind,
    zone: Zone,
    window: Window,
    jitter: Option<Jitter>,
    seed: u64,
    origin: Option<Timestamp>,
}

/// What makes a schedule tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// `every`: at a distance.
    Every {
        /// How far apart.
        every: Every,
        /// Counted from where.
        anchor: Anchor,
    },
    /// `cron`: at wall-clock times.
    Cron(Cron),
    /// `at`: once.
    At(Timestamp),
    /// `after`: once, so long after the schedule was first seen.
    After(SignedDuration),
}

/// One nominal instant of a schedule, and when it is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tick {
    /// The instant that the schedule names.
    pub tick_at: Timestamp,
    /// `tick_at` plus jitter.
    pub due_at: Timestamp,
}

/// What a change of clocks did to a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shift {
    /// The clocks skip the time it was meant for; it moved to the end of the gap.
    Moved,
    /// Its local time happens twice, and this is the first.
    FirstPass,
    /// Its local time happens twice, and this is the second.
    SecondPass,
}

/// Joins the parts of a [`Timing`] and checks that they go together.
#[derive(Debug, Clone)]
pub struct TimingBuilder(Timing);

impl TimingBuilder {
    /// Allows ticks in a window only.
    pub fn window(mut self, window: Window) -> TimingBuilder {
        self.0.window = window;
        self
    }

    /// Spreads ticks. `name` is the schedule's, `agent/schedule`: it seeds the hash.
    pub fn jitter(mut self, jitter: Jitter, name: &str) -> TimingBuilder {
        self.0.jitter = Some(jitter);
        self.0.seed = jitter::seed(name);
        self
    }

    /// Refuses parts that do not go together: a phase or a jitter as long as the distance of two ticks, a window
    /// that lets no tick through.
    pub fn build(self) -> Result<Timing, Error> {
        let timing = self.0;
        timing.check_phase()?;
        timing.check_window()?;
        timing.check_jitter()?;
        Ok(timing)
    }
}

impl Timing {
    /// Ticks at a distance.
    pub fn every(every: Every, anchor: Anchor, zone: Zone) -> TimingBuilder {
        Timing::of(Kind::Every { every, anchor }, zone)
    }

    /// Ticks at wall-clock times.
    pub fn cron(cron: Cron, zone: Zone) -> TimingBuilder {
        Timing::of(Kind::Cron(cron), zone)
    }

    /// Ticks once, at an instant.
    pub fn at(at: Timestamp, zone: Zone) -> TimingBuilder {
        Timing::of(Kind::At(at), zone)
    }

    /// Ticks once, after a delay from when it is first seen.
    pub fn after(delay: SignedDuration, zone: Zone) -> TimingBuilder {
        Timing::of(Kind::After(delay), zone)
    }

    fn of(kind: Kind, zone: Zone) -> TimingBuilder {
        TimingBuilder(Timing {
            kind,
            zone,
            window: Window::ALWAYS,
            jitter: None,
            seed: jitter::seed(""),
            origin: None,
        })
    }

    /// Tells the timing its first tick, once that is known. Calendar steps keep the local time and day number of
    /// that tick, and `after` is that tick; both mean nothing without it.
    pub fn with_origin(mut self, first_tick_at: Timestamp) -> Timing {
        self.origin = Some(first_tick_at);
        self
    }

    /// What makes it tick.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// Its zone.
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// Its window.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// The first tick of a schedule that is seen for the first time: at once for `every` (the next grid point for
    /// slots), the next match for `cron`, the instant of `at` unless it has passed, the end of the delay of `after`.
    pub fn first(&self, now: Timestamp) -> Option<Tick> {
        let tick_at = match &self.kind {
            Kind::Every {
                anchor: Anchor::Completion | Anchor::Start,
                ..
            } => self.moved_into_window(now)?,
            Kind::Every {
                anchor: Anchor::Slot { .. },
                ..
            }
            | Kind::Cron(_) => return self.next(now),
            Kind::At(at) => self.moved_into_window((*at >= now).then_some(*at)?)?,
            Kind::After(delay) => self.moved_into_window(now.checked_add(*delay).ok()?)?,
        };
        Some(self.tick(tick_at))
    }

    /// The first tick after `after`; always later than it. For `every` with the anchors completion and start,
    /// `after` is what the interval counts from: the end of the last run, or the last tick.
    ///
    /// ```
    /// # use belfry_time::{Anchor, Every, Timing, Zone};
    /// let timing = Timing::every(Every::parse("20m")?, Anchor::Start, Zone::utc()).build()?;
    /// let tick = timing.next("2026-03-08T12:00:00Z".parse()?).unwrap();
    /// assert_eq!(tick.tick_at.to_string(), "2026-03-08T12:20:00Z");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn next(&self, after: Timestamp) -> Option<Tick> {
        self.next_at(after).map(|tick_at| self.tick(tick_at))
    }

    /// All ticks after `after`, each counted from the one before.
    pub fn ticks(&self, after: Timestamp) -> Ticks<'_> {
        // A calendar series that does not know its first tick yet begins here.
        let timing = match (&self.kind, self.origin) {
            (
                Kind::Every {
                    every: Every::Daily | Every::Weekly | Every::Monthly,
                    ..
                },
                None,
            ) => std::borrow::Cow::Owned(self.clone().with_origin(after)),
            _ => std::borrow::Cow::Borrowed(self),
        };
        Ticks { timing, after }
    }

    /// The ticks after `from`, up to and with `to`; at most `limit`, the earliest.
    pub fn ticks_between(&self, from: Timestamp, to: Timestamp, limit: usize) -> impl Iterator<Item = Tick> {
        self.ticks(from)
            .take_while(move |tick| tick.tick_at <= to)
            .take(limit)
    }

    /// How many ticks there are after `from`, up to and with `to`: what counting [`Timing::ticks_between`] without
    /// a limit would give, in steps of days and windows rather than of ticks.
    pub fn count_between(&self, from: Timestamp, to: Timestamp) -> u64 {
        if to <= from {
            return 0;
        }
        match &self.kind {
            Kind::Cron(cron) => cron.count(floor_second(from), floor_second(to), &self.zone, &self.window),
            Kind::Every {
                every: Every::Interval(every),
                anchor: Anchor::Slot { phase },
            } => self.count_slots(Slots::new(*every, *phase), from, to),
            Kind::Every {
                every: Every::Interval(every),
                ..
            } => self.count_chain(*every, from, to),
            Kind::Every { .. } | Kind::At(_) | Kind::After(_) => {
                self.ticks_between(from, to, usize::MAX).count() as u64
            }
        }
    }

    /// What a change of clocks did to a tick of this timing, if anything.
    pub fn shift(&self, tick_at: Timestamp) -> Option<Shift> {
        let by_clock = match &self.kind {
            Kind::Cron(_) => true,
            Kind::Every { every, .. } => !matches!(every, Every::Interval(_)),
            Kind::At(_) | Kind::After(_) => false,
        };
        if !by_clock {
            return None;
        }
        let second = floor_second(tick_at);
        let span = self.zone.span_at(second);
        let local = second + span.offset;
        if span.start == second && span.before < span.offset && !self.was_meant_for(local) {
            return Some(Shift::Moved);
        }
        if local < span.repeated_until() {
            return Some(Shift::SecondPass);
        }
        let following = self
            .zone
            .span_at(span.end.min(second.saturating_add(crate::civil::DAY * 2)));
        let repeats = following.start == span.end && local >= following.start + following.offset;
        (repeats && local < following.repeated_until()).then_some(Shift::FirstPass)
    }

    /// Plain English: "at 09:00, Monday to Friday".
    pub fn describe(&self) -> String {
        let mut words = match &self.kind {
            Kind::Every { every, .. } => every.describe(),
            Kind::Cron(cron) => cron.describe(),
            Kind::At(at) => format!("once, at {}", self.zone.rfc3339(*at)),
            Kind::After(delay) => format!(
                "once, {} after it is first seen",
                Compound(delay.as_millis() as i64)
            ),
        };
        if !self.window.is_always() {
            words.push_str(", ");
            words.push_str(&self.window.describe());
        }
        words
    }

    fn next_at(&self, after: Timestamp) -> Option<Timestamp> {
        match &self.kind {
            Kind::Cron(cron) => self.next_cron(cron, after),
            Kind::Every {
                every: Every::Interval(every),
                anchor: Anchor::Slot { phase },
            } => self.next_slot(Slots::new(*every, *phase), after),
            Kind::Every {
                every: Every::Interval(every),
                ..
            } => self.moved_into_window(after.checked_add(*every).ok()?),
            Kind::Every { every, anchor } => self.next_calendar(*every, *anchor, after),
            Kind::At(at) => self.moved_into_window(*at).filter(|at| *at > after),
            Kind::After(_) => self.origin.filter(|at| *at > after),
        }
    }

    fn next_cron(&self, cron: &Cron, after: Timestamp) -> Option<Timestamp> {
        let mut second = cron.next_second(floor_second(after), &self.zone)?;
        if !self.window.is_always() {
            while !self.window.allows(self.zone.local_second(second)) {
                let allowed = self.window.next_allowed(second, &self.zone)?;
                second = cron.next_second(allowed - 1, &self.zone)?;
            }
        }
        Timestamp::from_second(second).ok()
    }

    fn next_slot(&self, slots: Slots, after: Timestamp) -> Option<Timestamp> {
        let mut ms = slots.next(floor_millisecond(after));
        // A grid that misses the window this often (for years, at least) is taken to miss it always.
        const MISSES_MAX: u32 = 10_000;
        for _ in 0..MISSES_MAX {
            let second = ms.div_euclid(1000);
            if self.window.allows(self.zone.local_second(second)) {
                return Timestamp::from_millisecond(ms).ok();
            }
            Timestamp::from_second(second).ok()?;
            ms = slots.next(self.window.next_allowed(second, &self.zone)? * 1000 - 1);
        }
        None
    }

    fn next_calendar(&self, every: Every, anchor: Anchor, after: Timestamp) -> Option<Timestamp> {
        let series = self.series(every, anchor, after);
        if let Anchor::Slot { .. } = anchor {
            let mut tick = series.next(after)?;
            while !self.window.allows(self.zone.local_second(floor_second(tick))) {
                tick = series.next(tick)?;
            }
            return Some(tick);
        }
        // The window may have moved a tick that was not after `after` to an instant that is.
        let waiting = series
            .last(after)
            .and_then(|tick| self.moved_into_window(tick))
            .filter(|tick| *tick > after);
        waiting.or_else(|| self.moved_into_window(series.next(after)?))
    }

    fn series(&self, every: Every, anchor: Anchor, after: Timestamp) -> Series<'_> {
        let step = match every {
            Every::Monthly => Step::Month,
            Every::Weekly => Step::Days(7),
            Every::Daily | Every::Interval(_) => Step::Days(1),
        };
        match anchor {
            Anchor::Slot { phase } => Series::from_local(step, &self.zone, phase.as_millis() as i64),
            Anchor::Completion | Anchor::Start => {
                Series::from_instant(step, &self.zone, self.origin.unwrap_or(after))
            }
        }
    }

    fn moved_into_window(&self, at: Timestamp) -> Option<Timestamp> {
        let second = floor_second(at);
        match self.window.next_allowed(second, &self.zone)? {
            allowed if allowed == second => Some(at),
            allowed => Timestamp::from_second(allowed).ok(),
        }
    }

    fn tick(&self, tick_at: Timestamp) -> Tick {
        let due_at = self
            .jitter
            .and_then(|jitter| self.delayed(jitter, tick_at))
            .unwrap_or(tick_at);
        Tick { tick_at, due_at }
    }

    fn delayed(&self, jitter: Jitter, tick_at: Timestamp) -> Option<Timestamp> {
        let tick_ms = floor_millisecond(tick_at);
        let distance = match &self.kind {
            Kind::At(_) | Kind::After(_) => None,
            Kind::Every {
                every: Every::Interval(every),
                ..
            } => Some(every.as_millis() as i64),
            Kind::Every { .. } | Kind::Cron(_) => self
                .next_at(tick_at)
                .map(|next| floor_millisecond(next) - tick_ms),
        };
        let mut longest = jitter.longest_ms(distance);
        if let Some(end) = self.window.end_of_stretch(floor_second(tick_at), &self.zone) {
            longest = longest.min(end * 1000 - 1 - tick_ms);
        }
        add_ms(tick_at, jitter::delay_ms(self.seed, tick_ms, longest.max(0)))
    }

    /// Whether a local second is one that the schedule names, rather than the end of a gap.
    fn was_meant_for(&self, local: i64) -> bool {
        match &self.kind {
            Kind::Cron(cron) => cron.matches_local(local),
            Kind::Every {
                anchor: Anchor::Slot { phase },
                ..
            } => local.rem_euclid(crate::civil::DAY) == phase.as_secs().rem_euclid(crate::civil::DAY),
            Kind::Every { .. } => self.origin.is_none_or(|origin| {
                let first = self.zone.local_second(floor_second(origin));
                local.rem_euclid(crate::civil::DAY) == first.rem_euclid(crate::civil::DAY)
            }),
            Kind::At(_) | Kind::After(_) => true,
        }
    }

    fn count_slots(&self, slots: Slots, from: Timestamp, to: Timestamp) -> u64 {
        let (mut from, to) = (floor_millisecond(from), floor_millisecond(to));
        if self.window.is_always() {
            return slots.count(from, to);
        }
        let mut count = 0;
        // From one allowed stretch to the next.
        while let Some(start) = self.window.next_allowed((from + 1).div_euclid(1000), &self.zone) {
            let Some(end) = self.window.end_of_stretch(start, &self.zone) else {
                break;
            };
            from = from.max(start * 1000 - 1);
            if from >= to {
                break;
            }
            count += slots.count(from, to.min(end * 1000 - 1));
            from = end * 1000 - 1;
        }
        count
    }

    fn count_chain(&self, every: SignedDuration, from: Timestamp, to: Timestamp) -> u64 {
        let every = every.as_nanos();
        let to = to.as_nanosecond();
        if self.window.is_always() {
            return ((to - from.as_nanosecond()) / every) as u64;
        }
        let mut count = 0;
        let mut tick = self.next_at(from);
        while let Some(first) = tick.filter(|tick| tick.as_nanosecond() <= to) {
            // All that follow without leaving the allowed stretch.
            let end = self.window.end_of_stretch(floor_second(first), &self.zone);
            let last = end.map_or(to, |end| to.min(i128::from(end) * 1_000_000_000 - 1));
            let more = (last - first.as_nanosecond()) / every;
            count += more as u64 + 1;
            let Ok(last) = Timestamp::from_nanosecond(first.as_nanosecond() + more * every) else {
                break;
            };
            tick = self.next_at(last);
        }
        count
    }

    fn check_phase(&self) -> Result<(), Error> {
        let Kind::Every {
            every,
            anchor: Anchor::Slot { phase },
        } = &self.kind
        else {
            return Ok(());
        };
        if *phase >= self.shortest_distance() || phase.is_negative() {
            let (phase, every) = (Compound(phase.as_millis() as i64).to_string(), every.to_string());
            let message = format!("Phase {phase} must be smaller than the interval {every}");
            return Err(Error::whole(ErrorKind::Phase, &phase, message));
        }
        Ok(())
    }

    fn check_window(&self) -> Result<(), Error> {
        let window = self.window.describe();
        let never = |message: String| Err(Error::whole(ErrorKind::NeverAllowed, &window, message));
        if self.window.is_never() {
            return never(
                "not_on names all seven days, so it would never run. Leave at least one out".into(),
            );
        }
        let possible = match &self.kind {
            Kind::Cron(cron) => self.window.is_always() || cron.can_pass(&self.window),
            Kind::Every {
                anchor: Anchor::Slot { .. },
                ..
            } => self.window.is_always() || self.next_at(Timestamp::UNIX_EPOCH).is_some(),
            Kind::Every { .. } | Kind::At(_) | Kind::After(_) => true,
        };
        if possible {
            return Ok(());
        }
        let what = match &self.kind {
            Kind::Cron(cron) => format!("Cron expression {}", Quoted(cron.text())),
            _ => format!("A grid {}", self.describe()),
        };
        never(format!(
            "{what} has no tick that is allowed ({window}), so it would never run"
        ))
    }

    fn check_jitter(&self) -> Result<(), Error> {
        let Some(jitter) = self.jitter else { return Ok(()) };
        let text = jitter.to_string();
        let fail = |message| Err(Error::whole(ErrorKind::Jitter, &text, message));
        match jitter {
            Jitter::Share(_) if matches!(self.kind, Kind::At(_) | Kind::After(_)) => fail(format!(
                "Jitter {text} is a share of the interval, and a one-shot has none. Use a duration, for example \"30s\""
            )),
            Jitter::Duration(longest) if !matches!(self.kind, Kind::At(_) | Kind::After(_)) => {
                let distance = self.shortest_distance();
                if longest < distance {
                    return Ok(());
                }
                let distance = Compound(distance.as_millis() as i64);
                fail(format!(
                    "Jitter {text} must be smaller than the distance between two ticks, {distance}"
                ))
            }
            _ => Ok(()),
        }
    }

    /// The shortest distance between two ticks on an even clock.
    fn shortest_distance(&self) -> SignedDuration {
        match &self.kind {
            Kind::Every {
                every: Every::Interval(every),
                ..
            } => *every,
            Kind::Every {
                every: Every::Daily, ..
            } => SignedDuration::from_hours(24),
            Kind::Every {
                every: Every::Weekly, ..
            } => SignedDuration::from_hours(7 * 24),
            Kind::Every {
                every: Every::Monthly,
                ..
            } => SignedDuration::from_hours(28 * 24),
            Kind::Cron(cron) => SignedDuration::from_secs(cron.shortest_distance()),
            Kind::At(_) | Kind::After(_) => SignedDuration::MAX,
        }
    }
}

/// The ticks of a [`Timing`], in order.
#[derive(Debug, Clone)]
pub struct Ticks<'a> {
    timing: std::borrow::Cow<'a, Timing>,
    after: Timestamp,
}

impl Iterator for Ticks<'_> {
    type Item = Tick;

    fn next(&mut self) -> Option<Tick> {
        let tick = self.timing.next(self.after)?;
        self.after = tick.tick_at;
        Some(tick)
    }
}

impl std::iter::FusedIterator for Ticks<'_> {}

/// A grid of milliseconds.
#[derive(Clone, Copy)]
struct Slots {
    every: i64,
    phase: i64,
}

impl Slots {
    fn new(every: SignedDuration, phase: SignedDuration) -> Slots {
        Slots {
            every: every.as_millis() as i64,
            phase: phase.as_millis() as i64,
        }
    }

    /// The first grid point after a millisecond.
    fn next(self, ms: i64) -> i64 {
        (self.index(ms) + 1) * self.every + self.phase
    }

    fn count(self, from: i64, to: i64) -> u64 {
        (self.index(to) - self.index(from)) as u64
    }

    fn index(self, ms: i64) -> i64 {
        (ms - self.phase).div_euclid(self.every)
    }
}
