//! Who starts, within the slots of this node.

use belfry_core::Trigger;
use belfry_core::broken::{self, Broken};

use super::*;

/// A run that its breaker or its window holds is looked at again after a part of the time since it was made, within these
/// bounds: a reset of the breaker, or an edit, may let it go on.
const LOOK_AGAIN_PART: u64 = 20;
const LOOK_AGAIN_MIN: Duration = Duration::from_secs(10);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(10 * 60);

/// Whether a claimed run stands for missed ticks, and has had no attempt: its window holds when it starts, too.
fn is_caught_up_late(claimed: &Claimed) -> bool {
    claimed.trigger == Trigger::CatchUp && claimed.attempt == 1
}

impl Driver {
    /// A run may start at an instant: now, or at a moment to wake up for.
    pub(super) fn wake_for(&mut self, now: Now, not_before: Timestamp) {
        if not_before <= now.wall {
            self.claim_wanted = true;
        } else if self.later.len() < LATER_MAX {
            self.later.insert(not_before);
        }
    }

    pub(super) fn claim_maybe(&mut self, now: Now) {
        while self.later.first().is_some_and(|at| *at <= now.wall) {
            self.later.pop_first();
            self.claim_wanted = true;
        }
        let wanted = (self.claim_wanted && self.health.is_well()) || self.dispatcher.at <= now.mono;
        if !wanted || self.dispatcher.busy {
            return;
        }
        if !self.may_start(now) || self.unfenced.as_ref().is_none_or(|unfenced| !unfenced.is_empty()) {
            // The answer to a renewal, or to a fence, asks again.
            self.dispatcher.at = now.mono + self.options.lease / 10;
            return;
        }
        if self.watches_suspect() {
            // Its end, or the renewal after it was watched, asks again.
            self.dispatcher.at = now.mono + self.options.lease / 10;
            return;
        }
        let rescues = self.rescues(now);
        if self.suspect_waits && (now.mono < self.quiet_at() || !rescues.allow(false)) {
            // The answer to a renewal, or the start or end of a rescued run, asks again.
            let again_at = now.mono + self.options.lease / 10;
            self.dispatcher.at = if now.mono < self.quiet_at() { self.quiet_at() } else { again_at };
            return;
        }
        let only = self.options.only;
        let (lanes, total) = if only.is_some() { (Vec::new(), 1) } else { self.free_slots() };
        let has_room = if only.is_some() { self.tasks.is_empty() } else { total > 0 && !lanes.is_empty() };
        if !has_room {
            // The end of an attempt makes room, and asks again.
            self.dispatcher.at = now.mono + self.poll_interval();
            (self.claim_wanted, self.is_full) = (false, true);
            return;
        }
        (self.claim_wanted, self.is_full) = (false, false);
        self.dispatcher.busy = true;
        self.suspect_waits = false;
        let labels = self.options.labels.clone();
        self.ask(Ask::Claim(Claim { node: self.node, lanes, total, labels, only, rescues }));
    }

    /// What kills a node must not take other rescued runs with it: also none that has ended and whose end is not stored yet,
    /// unless the store refuses it.
    fn rescues(&mut self, now: Now) -> Rescues {
        // A renewal between the claim of a run and the death of the node would clear that run.
        let watched_until = now.mono + watched_for(self.options.lease);
        self.claims_after_renewal = self.renewer.busy || self.renewer.at < watched_until;
        match self.rescuing().next().is_some() {
            true => Rescues::None,
            false if self.claims_after_renewal => Rescues::Soon,
            false if now.mono < self.steady_at.max(self.suspects_from) => Rescues::Unsuspected,
            false => Rescues::Any,
        }
    }

    /// From when on a suspect may start: the attempt that was started last would have shown by then that it ends this node.
    fn quiet_at(&self) -> Duration {
        self.last_start.map_or(Duration::ZERO, |at| at + watched_for(self.options.lease))
    }

    /// Whether a suspect has neither ended nor outlived a renewal.
    fn watches_suspect(&self) -> bool {
        self.rescuing()
            .any(|rescue| matches!(rescue, Rescue::Starting { suspect: true } | Rescue::Watched { .. }))
    }

    /// Rescued runs that hold back others.
    fn rescuing(&self) -> impl Iterator<Item = Rescue> {
        let is_refused = |run| self.refused_ends.iter().any(|(_, ending)| ending.finish.run == run);
        let tasks =
            self.tasks.iter().filter(move |(run, task)| task.rescue != Rescue::Over && !is_refused(**run));
        tasks.map(|(_, task)| task.rescue)
    }

    /// Free slots by lane, and how many runs may start in all of them together. The lane in which nothing has started for
    /// longest goes first, so that a limit over all lanes starves none.
    fn free_slots(&self) -> (Vec<(String, u32)>, u32) {
        let mut used: BTreeMap<&str, u32> = BTreeMap::new();
        for task in self.tasks.values().filter(|task| !task.ended) {
            *used.entry(&task.lane).or_default() += 1;
        }
        let total: u32 = used.values().sum();
        let left = self.options.max_concurrent.map_or(u32::MAX, |max| max.saturating_sub(total));
        let mut lanes: Vec<_> = self.slots.iter().collect();
        lanes.sort_by_key(|(lane, _)| self.last_claims.get(*lane).copied());
        let free = lanes.into_iter().map(|(lane, slots)| {
            let taken = used.get(lane.as_str()).copied().unwrap_or(0);
            (lane.clone(), slots.saturating_sub(taken).min(CLAIM_MAX))
        });
        (free.filter(|(_, slots)| *slots > 0).collect(), left)
    }

    pub(super) fn claimed(
        &mut self,
        now: Now,
        claimed: Result<Vec<(Claimed, Option<Definitions>)>, Error>,
        held: &[RunId],
        next: Option<Timestamp>,
    ) {
        let poll_at = now.mono + self.poll_interval();
        // Suspects may start from a certain instant on.
        let suspects_at = self.steady_at.max(self.suspects_from);
        let ask_at = if now.mono < suspects_at { poll_at.min(suspects_at) } else { poll_at };
        self.dispatcher.rest(now, ask_at);
        let Some(claimed) = self.written(now, Call::Claims, claimed) else {
            self.dispatcher.at = now.mono + self.backoff(Call::Claims);
            (self.claim_wanted, self.is_claim_old) = (true, false);
            return;
        };
        if std::mem::take(&mut self.is_claim_old) {
            self.claim_wanted = true;
            return;
        }
        if let Some(next) = next {
            self.wake_for(now, next);
        }
        // Where there was something there may be more.
        self.claim_wanted |= !claimed.is_empty();
        self.claims += 1;
        for (claimed, _) in &claimed {
            self.last_claims.insert(claimed.lane.clone(), self.claims);
        }
        // Nothing starts that would have to be ended at once: the node may have been frozen since it asked.
        if self.phase != Phase::Running || self.draining || !self.may_start(now) {
            let runs = claimed.iter().map(|(claimed, _)| (claimed.run, claimed.epoch)).collect();
            return self.give_back(runs);
        }
        // Nothing starts beside a suspect.
        let is_suspect = |(claimed, _): &(Claimed, _)| claimed.rescued && claimed.suspect;
        let has_suspect = claimed.iter().any(is_suspect);
        if has_suspect && now.mono < self.quiet_at() {
            self.suspect_waits = true;
            let runs = claimed.iter().map(|(claimed, _)| (claimed.run, claimed.epoch)).collect();
            return self.give_back(runs);
        }
        let (claimed, beside): (Vec<_>, Vec<_>) =
            claimed.into_iter().partition(|claimed| !has_suspect || is_suspect(claimed));
        self.give_back(beside.iter().map(|(claimed, _)| (claimed.run, claimed.epoch)).collect());
        let mut unreadable = Vec::new();
        for (claimed, definitions) in claimed {
            match definitions {
                // The next claim leaves it to a node that can read it.
                Some(definitions) if definitions.unreadable.is_some() => {
                    unreadable.push((claimed.run, claimed.epoch));
                    self.lanes_soon(now);
                }
                definitions => match self.waits_until(now, &claimed, definitions.as_ref(), held) {
                    Some(at) => {
                        let verdict = Verdict::Wait { at };
                        let ending = Ending::unstarted(claimed.run, claimed.epoch, verdict, None);
                        self.endings.push_back(ending);
                    }
                    None => self.start(now, claimed, definitions),
                },
            }
        }
        self.give_back(unreadable);
    }

    /// When a run is looked at again, if its breaker has opened while it waited or, for one that was to be caught up, its window
    /// has closed.
    fn waits_until(
        &self,
        now: Now,
        claimed: &Claimed,
        definitions: Option<&Definitions>,
        held: &[RunId],
    ) -> Option<Timestamp> {
        if broken::is(Broken::CatchUpStartsAnyway) {
            return None;
        }
        let definitions = definitions?;
        let age = Duration::try_from(now.wall.duration_since(claimed.run.made_at())).unwrap_or_default();
        // Stores keep no more than microseconds.
        let look_after =
            Duration::from_millis(u64::try_from(age.as_millis()).unwrap_or(u64::MAX) / LOOK_AGAIN_PART);
        let look_after = look_after.clamp(LOOK_AGAIN_MIN, LOOK_AGAIN_MAX);
        if held.contains(&claimed.run) {
            // It may be the probe as soon as the breaker has been open for long enough.
            let reset_after = definitions
                .agent_definition
                .breaker
                .map(|policy| Duration::from_millis(policy.reset_after_ms));
            let reset_after = reset_after.unwrap_or_default().max(LOOK_AGAIN_MIN);
            return Some(later(now.wall, look_after.min(reset_after)));
        }
        if !is_caught_up_late(claimed) {
            return None;
        }
        let timing = definitions.compiled.as_ref().ok()?.timing.as_ref()?;
        // A window that never opens again holds nobody.
        let opens_at = timing.next_allowed(now.wall).filter(|at| *at > now.wall)?;
        Some(opens_at.min(later(now.wall, look_after)))
    }

    pub(super) fn start(&mut self, now: Now, claimed: Claimed, definitions: Option<Definitions>) {
        let Some(definitions) = definitions else {
            // Its schedule is unknown: nobody can say what to start.
            let verdict = Verdict::End { state: RunState::Cancelled, reason: Some(Reason::ScheduleRemoved) };
            return self.endings.push_back(Ending::unstarted(claimed.run, claimed.epoch, verdict, None));
        };
        let Some(schedule_definition) = definitions.definition().cloned() else {
            let verdict = Verdict::End { state: RunState::Failed, reason: Some(Reason::SpawnFailed) };
            let error = definitions.compiled.as_ref().err().map(|error| format!("its schedule: {error}"));
            return self.endings.push_back(Ending::unstarted(claimed.run, claimed.epoch, verdict, error));
        };
        let session = claimed.session();
        let trace = claimed.run.trace(claimed.trace_id);
        let (_, schedule) = definitions.name.split_once('/').unwrap_or(("", &definitions.name));
        let attempt = Attempt {
            run: claimed.run,
            epoch: claimed.epoch,
            attempt: claimed.attempt,
            node: self.node,
            agent: definitions.agent_name.clone(),
            schedule: schedule.into(),
            command: claimed.command.clone(),
            tick_at: claimed.tick_at,
            session: session.clone(),
            last_success_at: definitions.last_success_at,
            prompt: claimed.prompt,
            payload: claimed.payload,
            trace_id: trace,
            agent_definition: definitions.agent_definition.clone(),
            schedule_definition,
        };
        let name = definitions.name.clone();
        self.tasks.insert(
            claimed.run,
            Task {
                epoch: claimed.epoch,
                attempt: claimed.attempt,
                max_attempts: claimed.max_attempts,
                lane: claimed.lane,
                session: session.clone(),
                tick_at: claimed.tick_at,
                started: now.mono,
                definitions,
                command: claimed.command,
                trace,
                rescue: match claimed.rescued {
                    true => Rescue::Starting { suspect: claimed.suspect },
                    false => Rescue::Over,
                },
                stopping: false,
                ended: claimed.unreadable.is_some(),
            },
        );
        if let Some(unreadable) = claimed.unreadable {
            // It is never started: what it would be given is not what somebody asked for.
            let verdict = Verdict::End { state: RunState::Failed, reason: Some(Reason::SpawnFailed) };
            self.endings.push_back(Ending::unstarted(claimed.run, claimed.epoch, verdict, Some(unreadable)));
            return;
        }
        let lag = claimed.tick_at.map(|tick| now.wall.duration_since(tick).as_millis().max(0) as u64);
        let event = Event::new(now.wall, Level::Info, Name::RunStarted).of(&name);
        self.note(Event {
            tick_at: claimed.tick_at,
            run_id: Some(claimed.run),
            attempt: Some(claimed.attempt),
            node: Some(self.node),
            trace_id: Some(trace.simple().to_string()),
            reason: Some(claimed.trigger.as_str().into()),
            lag_ms: lag,
            session,
            ..event
        });
        self.counters.triggers += 1;
        self.last_start = Some(now.mono);
        self.marker.at = self.marker.at.min(now.mono + self.options.marks_every);
        self.effects.push(Effect::Start { attempt: Box::new(attempt), tell: claimed.rescued });
    }

    /// The program or handler of a rescued run has started: the next rescued run may follow. After a suspect something else
    /// starts only when the suspect was watched, and the lease is renewed then.
    pub(super) fn started(&mut self, now: Now, run: RunId, epoch: Epoch) {
        let Some(task) = self.tasks.get_mut(&run).filter(|task| task.epoch == epoch) else { return };
        task.rescue = match task.rescue {
            Rescue::Starting { suspect: true } => {
                self.renewer.at = self.renewer.at.min(now.mono + watched_for(self.options.lease));
                Rescue::Watched { since: now.mono }
            }
            _ => Rescue::Over,
        };
        self.claim_wanted = true;
    }

    /// Suspects that had started before a renewal was asked for have not killed this node: others may start, for as long as
    /// these were watched, before the next suspect. Those that have started since are watched for as long as others were.
    pub(super) fn outlived(&mut self, now: Now, asked: Duration) {
        let watched_for = watched_for(self.options.lease);
        for task in self.tasks.values_mut() {
            match task.rescue {
                Rescue::Watched { since } if since < asked => {
                    task.rescue = Rescue::Over;
                    self.claim_wanted = true;
                    self.suspects_from = now.mono + watched_for;
                }
                Rescue::Watched { since } => self.renewer.at = self.renewer.at.min(since + watched_for),
                Rescue::Starting { .. } | Rescue::Over => {}
            }
        }
    }
}
