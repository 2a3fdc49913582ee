//! One type that joins kind, anchor, zone, window and jitter. There is no second way to compute a next run.

use jiff::{SignedDuration, Timestamp};

use crate::calendar::{Series, Step};
use crate::civil::{CYCLE, DAY};
use crate::cron::Cron;
use crate::duration::Compound;
use crate::error::{Error, ErrorKind, Quoted};
use crate::every::{Anchor, Every};
use crate::jitter::{self, Jitter};
use crate::window::{Allowed, Window};
use crate::zone::{Local, Zone, add_ms, floor_millisecond, floor_second};

/// Where a new timing is asked whether it ever ticks: zones have had other rules long ago.
const RECENT: Timestamp = Timestamp::constant(1_767_225_600, 0); // 2026-01-01

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
            Kind::Every { anchor: Anchor::Completion | Anchor::Start, .. } => self.moved_into_window(now)?,
            Kind::Every { anchor: Anchor::Slot { .. }, .. } | Kind::Cron(_) => return self.next(now),
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
            (Kind::Every { every: Every::Daily | Every::Weekly | Every::Monthly, .. }, None) => {
                std::borrow::Cow::Owned(self.clone().with_origin(after))
            }
            _ => std::borrow::Cow::Borrowed(self),
        };
        Ticks { timing, after }
    }

    /// The ticks after `from`, up to and with `to`; at most `limit`, the earliest.
    pub fn ticks_between(&self, from: Timestamp, to: Timestamp, limit: usize) -> impl Iterator<Item = Tick> {
        self.ticks(from).take_while(move |tick| tick.tick_at <= to).take(limit)
    }

    /// How many ticks there are after `from`, up to and with `to`: what counting [`Timing::ticks_between`] without
    /// a limit would give, in steps of days and windows rather than of ticks.
    pub fn count_between(&self, from: Timestamp, to: Timestamp) -> u64 {
        if to <= from {
            return 0;
        }
        match &self.kind {
            Kind::Cron(cron) => cron.count(floor_second(from), floor_second(to), &self.zone, &self.window),
            Kind::Every { every: Every::Interval(every), anchor: Anchor::Slot { phase } } => {
                self.count_slots(Slots::new(*every, *phase), from, to)
            }
            Kind::Every { every: Every::Interval(every), .. } => self.count_chain(*every, from, to),
            Kind::Every { .. } | Kind::At(_) | Kind::After(_) => {
                self.ticks_between(from, to, usize::MAX).count() as u64
            }
        }
    }

    /// The newest `limit` ticks after `from`, up to and with `to`, in order, without walking over the others.
    pub fn newest_between(&self, from: Timestamp, to: Timestamp, limit: usize) -> Vec<Tick> {
        let skip = self.count_between(from, to).saturating_sub(limit as u64);
        let start = if skip == 0 { Some(from) } else { self.nth_at(from, skip, to) };
        // A calendar series goes on from its first tick, not from where we start.
        let timing = match self.origin {
            None => self.clone().with_origin(from),
            Some(_) => self.clone(),
        };
        start.map_or_else(Vec::new, |start| timing.ticks_between(start, to, limit).collect())
    }

    /// The instant of the `n`-th tick after `from`, of which there are more up to `to`.
    fn nth_at(&self, from: Timestamp, n: u64, to: Timestamp) -> Option<Timestamp> {
        match &self.kind {
            Kind::Every { every: Every::Interval(every), anchor: Anchor::Completion | Anchor::Start } => {
                let (mut first, mut left) = (from, n);
                if !self.window.is_always() {
                    for (start, count) in self.stretches(*every, from, to) {
                        first = start;
                        if left <= count {
                            left -= 1;
                            break;
                        }
                        left -= count;
                    }
                }
                Timestamp::from_nanosecond(first.as_nanosecond() + every.as_nanos() * i128::from(left)).ok()
            }
            // Where a tick does not depend on the one before, halve the time until the count is right.
            Kind::Cron(_) | Kind::Every { every: Every::Interval(_), .. } => {
                let (mut low, mut high) = (floor_millisecond(from), floor_millisecond(to));
                while high - low > 1 {
                    let middle = low + (high - low) / 2;
                    let at = Timestamp::from_millisecond(middle).ok()?;
                    if self.count_between(from, at) < n { low = middle } else { high = middle }
                }
                Timestamp::from_millisecond(high).ok()
            }
            Kind::Every { .. } | Kind::At(_) | Kind::After(_) => {
                self.ticks(from).nth(usize::try_from(n).ok()? - 1).map(|tick| tick.tick_at)
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
        if span.start == second && span.before < span.offset && self.came_out_of_gap(second, local) {
            return Some(Shift::Moved);
        }
        if local < span.repeated_until() {
            return Some(Shift::SecondPass);
        }
        let following = self.zone.span_at(span.end.min(second.saturating_add(DAY * 2)));
        let repeats = following.start == span.end && local >= following.start + following.offset;
        (repeats && local < following.repeated_until()).then_some(Shift::FirstPass)
    }

    /// Whether the window allows an instant.
    pub fn allows(&self, at: Timestamp) -> Allowed {
        self.window.verdict(self.zone.local_second(floor_second(at)))
    }

    /// The first instant from this one on that the window allows; none where it never opens again.
    pub fn next_allowed(&self, at: Timestamp) -> Option<Timestamp> {
        if self.allows(at) == Allowed::Yes {
            return Some(at);
        }
        let opens = self.window.next_allowed(floor_second(at), &self.zone)?;
        Timestamp::from_second(opens).ok()
    }

    /// The end of the allowed stretch of time that an instant lies in, which is the first instant that is no longer allowed;
    /// none where it never ends.
    pub fn window_end(&self, at: Timestamp) -> Option<Timestamp> {
        self.window
            .end_of_stretch(floor_second(at), &self.zone)
            .and_then(|end| Timestamp::from_second(end).ok())
    }

    /// Plain English: "at 09:00, Monday to Friday".
    pub fn describe(&self) -> String {
        let mut words = self.describe_kind();
        if !self.window.is_always() {
            words.push_str(", ");
            words.push_str(&self.window.describe());
        }
        words
    }

    fn describe_kind(&self) -> String {
        match &self.kind {
            Kind::Every { every, .. } => every.describe(),
            Kind::Cron(cron) => cron.describe(),
            Kind::At(at) => format!("once, at {}", self.zone.rfc3339(*at)),
            Kind::After(delay) => {
                format!("once, {} after it is first seen", Compound(delay.as_millis() as i64))
            }
        }
    }

    fn next_at(&self, after: Timestamp) -> Option<Timestamp> {
        match &self.kind {
            Kind::Cron(cron) => self.next_cron(cron, after),
            Kind::Every { every: Every::Interval(every), anchor: Anchor::Slot { phase } } => {
                self.next_slot(Slots::new(*every, *phase), after)
            }
            Kind::Every { every: Every::Interval(every), .. } => {
                self.moved_into_window(after.checked_add(*every).ok()?)
            }
            Kind::Every { every, anchor } => self.next_calendar(*every, *anchor, after),
            Kind::At(at) => self.moved_into_window(*at).filter(|at| *at > after),
            Kind::After(_) => self.origin.filter(|at| *at > after),
        }
    }

    fn next_cron(&self, cron: &Cron, after: Timestamp) -> Option<Timestamp> {
        let mut second = cron.next_second(floor_second(after), &self.zone)?;
        if !self.window.is_always() {
            let horizon = second.saturating_add(CYCLE);
            while !self.window.allows(self.zone.local_second(second)) {
                let allowed =
                    self.window.next_allowed(second, &self.zone).filter(|allowed| *allowed < horizon)?;
                second = cron.next_second(allowed - 1, &self.zone)?;
            }
        }
        Timestamp::from_second(second).ok()
    }

    fn next_slot(&self, slots: Slots, after: Timestamp) -> Option<Timestamp> {
        let mut ms = slots.next(floor_millisecond(after));
        // A grid that misses the window this often (a hundred years of days) is taken to miss it always.
        const MISSES_MAX: u32 = 40_000;
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
            // Weekday and time of day come round long before this: the first of a month within 40 years.
            const STEPS_MAX: usize = 500;
            let ticks = std::iter::successors(series.next(after), |tick| series.next(*tick)).take(STEPS_MAX);
            return ticks
                .into_iter()
                .find(|tick| self.window.allows(self.zone.local_second(floor_second(*tick))));
        }
        // The window may have moved a tick that was not after `after` to an instant that is. The first tick of all is no
        // such one: it has been, or it is only what the series is counted from.
        let waiting = series.last(after).filter(|tick| Some(*tick) != self.origin);
        let waiting = waiting.and_then(|tick| self.moved_into_window(tick)).filter(|tick| *tick > after);
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

    /// One of its ticks, with its jitter.
    pub fn tick(&self, tick_at: Timestamp) -> Tick {
        let due_at = self.jitter.and_then(|jitter| self.delayed(jitter, tick_at)).unwrap_or(tick_at);
        Tick { tick_at, due_at }
    }

    fn delayed(&self, jitter: Jitter, tick_at: Timestamp) -> Option<Timestamp> {
        let tick_ms = floor_millisecond(tick_at);
        let distance = match &self.kind {
            Kind::At(_) | Kind::After(_) => None,
            Kind::Every { every: Every::Interval(every), .. } => Some(every.as_millis() as i64),
            Kind::Every { .. } | Kind::Cron(_) => {
                self.next_at(tick_at).map(|next| floor_millisecond(next) - tick_ms)
            }
        };
        let mut longest = jitter.longest_ms(distance);
        if let Some(end) = self.window.end_of_stretch(floor_second(tick_at), &self.zone) {
            longest = longest.min(end * 1000 - 1 - tick_ms);
        }
        add_ms(tick_at, jitter::delay_ms(self.seed, tick_ms, longest.max(0)))
    }

    /// Whether a tick at the end of a gap was meant for a time inside it.
    fn came_out_of_gap(&self, second: i64, local: i64) -> bool {
        let time_of_day = match &self.kind {
            Kind::Cron(cron) => return !cron.matches_local(local),
            Kind::Every { anchor: Anchor::Slot { phase }, .. } => Some(phase.as_secs()),
            Kind::Every { .. } => self.origin.map(|origin| self.zone.local_second(floor_second(origin))),
            Kind::At(_) | Kind::After(_) => None,
        };
        let Some(time_of_day) = time_of_day.map(|local| local.rem_euclid(DAY)) else { return false };
        let today = local.div_euclid(DAY);
        [today - 1, today].into_iter().any(|day| {
            matches!(self.zone.resolve(day * DAY + time_of_day), Local::Never { at, .. } if at == second)
        })
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
        if self.window.is_always() {
            return ((to.as_nanosecond() - from.as_nanosecond()) / every.as_nanos()) as u64;
        }
        self.stretches(every, from, to).map(|(_, count)| count).sum()
    }

    /// The ticks of an interval after `from`, up to and with `to`, as evenly spaced stretches inside the window: the first
    /// of each, and how many there are.
    fn stretches(
        &self,
        every: SignedDuration,
        from: Timestamp,
        to: Timestamp,
    ) -> impl Iterator<Item = (Timestamp, u64)> {
        let (every, to) = (every.as_nanos(), to.as_nanosecond());
        let mut tick = self.next_at(from);
        std::iter::from_fn(move || {
            let first = tick.filter(|tick| tick.as_nanosecond() <= to)?;
            let end = self.window.end_of_stretch(floor_second(first), &self.zone);
            let last = end.map_or(to, |end| to.min(i128::from(end) * 1_000_000_000 - 1));
            let more = (last - first.as_nanosecond()) / every;
            let last = Timestamp::from_nanosecond(first.as_nanosecond() + more * every).ok();
            tick = last.and_then(|last| self.next_at(last));
            Some((first, more as u64 + 1))
        })
    }

    fn check_phase(&self) -> Result<(), Error> {
        let Kind::Every { anchor: Anchor::Slot { phase }, .. } = &self.kind else { return Ok(()) };
        let distance = self.shortest_distance();
        if *phase >= distance || phase.is_negative() {
            let (phase, longest) =
                (Compound(phase.as_millis() as i64).to_string(), Compound(distance.as_millis() as i64));
            let message =
                format!("Phase {phase} must be smaller than the distance between two ticks, {longest}");
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
        let ticks_for_ever =
            matches!(self.kind, Kind::Cron(_) | Kind::Every { anchor: Anchor::Slot { .. }, .. });
        if !ticks_for_ever || self.next_at(RECENT).is_some() {
            return Ok(());
        }
        let what = match &self.kind {
            Kind::Cron(cron) => format!("Cron expression {}", Quoted(cron.text())),
            _ => format!("A grid {}", self.describe_kind()),
        };
        let by = if window.is_empty() { String::new() } else { format!(" ({window})") };
        never(format!("{what} has no tick in {} that is allowed{by}, so it would never run", self.zone))
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
                fail(format!("Jitter {text} must be smaller than the distance between two ticks, {distance}"))
            }
            _ => Ok(()),
        }
    }

    /// The shortest distance between two ticks on an even clock.
    fn shortest_distance(&self) -> SignedDuration {
        match &self.kind {
            Kind::Every { every: Every::Interval(every), .. } => *every,
            Kind::Every { every: Every::Daily, .. } => SignedDuration::from_hours(24),
            Kind::Every { every: Every::Weekly, .. } => SignedDuration::from_hours(7 * 24),
            Kind::Every { every: Every::Monthly, .. } => SignedDuration::from_hours(28 * 24),
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
        Slots { every: every.as_millis() as i64, phase: phase.as_millis() as i64 }
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
