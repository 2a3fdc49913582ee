//! The lease, what it tells of our runs, and what others want of us: runs to cancel, whether to take new work.

use super::*;

impl Driver {
    pub(super) fn renew_maybe(&mut self, now: Now) {
        if self.phase != Phase::Stopped && self.renewer.is_due(now) {
            self.renewer.busy = true;
            let until = later(now.wall, self.options.lease);
            if self.is_joined {
                self.lease_until = until;
                self.ask(Ask::Renew { node: self.node, until });
            } else {
                // A new id for each try: an earlier try may have joined although it failed, and may be fenced by now.
                self.node = NodeId((self.new_id)(now.wall));
                self.lease_until = until;
                let (left, draining) = (self.joined_as, self.draining);
                self.effects.push(Effect::Join { node: self.node, left, until, draining });
            }
        }
        // Nobody may be running here when others take over.
        if !self.holds_lease(now) {
            self.stop_all(Stop::LeaseLost);
        }
    }

    /// Whether others surely wait for longer than it takes to end what runs here.
    pub(super) fn holds_lease(&self, now: Now) -> bool {
        now.mono + self.options.lease / 6 < self.lease_good
    }

    /// Whether enough of the lease is left for the keeper to take a child. It asks children to end a third of the lease
    /// before its end at the earliest; what it would refuse is not claimed.
    pub(super) fn may_start(&self, now: Now) -> bool {
        now.mono + self.options.lease / 3 < self.lease_good
    }

    pub(super) fn renewed(
        &mut self,
        now: Now,
        asked: Duration,
        renewed: Result<Renewed, Error>,
        is_held: bool,
    ) {
        self.renewer.rest(now, asked + self.options.lease / 3);
        // Nobody can take over: what runs goes on although the lease could not be stored.
        if is_held && renewed.is_err() && self.is_joined {
            self.hold(asked);
        }
        let Some(renewed) = self.written(now, Call::Lease, renewed) else {
            self.renewer.at = now.mono + self.backoff(Call::Lease);
            return;
        };
        match renewed {
            Renewed::Held { cancels, live } => {
                self.hold(asked);
                self.outlived(now, asked);
                self.claim_wanted |= std::mem::take(&mut self.claims_after_renewal);
                cancels.into_iter().for_each(|(run, epoch, reason)| self.cancel(run, epoch, reason));
                live.into_iter().for_each(|live| self.return_strays(live));
            }
            Renewed::Fenced => self.start_over(now),
        }
    }

    pub(super) fn joined(&mut self, now: Now, asked: Duration, joined: Result<(), Error>) {
        self.renewer.rest(now, asked + self.options.lease / 3);
        if self.written(now, Call::Lease, joined).is_none() {
            self.renewer.at = now.mono + self.backoff(Call::Lease);
            return;
        }
        self.is_joined = true;
        self.joined_as = self.node;
        self.note(Event { node: Some(self.node), ..Event::new(now.wall, Level::Info, Name::NodeRejoined) });
        self.hold(asked);
        self.claim_wanted = true;
        self.planner.wake(now);
    }

    /// The lease is good from the instant on at which it was asked for. The keeper knows it before anything is claimed.
    fn hold(&mut self, asked: Duration) {
        self.lease_good = asked + self.options.lease;
        self.effects.push(Effect::TellKeeper { asked });
    }

    /// Gives runs back that were claimed for this node and not started.
    pub(super) fn give_back(&mut self, runs: Vec<(RunId, Epoch)>) {
        if !runs.is_empty() {
            self.giving_back += 1;
            self.ask(Ask::GiveBack(self.node, runs));
        }
    }

    /// What was not given back is seen again at the next renewal.
    pub(super) fn given_back(
        &mut self,
        now: Now,
        given_back: Result<Vec<(RunId, RunState)>, Error>,
        runs: &[RunRecord],
    ) {
        self.giving_back = self.giving_back.saturating_sub(1);
        let Some(given_back) = self.read(now, Call::Lease, given_back) else { return };
        self.claim_wanted = true;
        for (run, state) in given_back {
            let name = match state {
                RunState::Cancelled => Name::RunCancelled,
                _ => Name::RunReturned,
            };
            let event = Event::new(now.wall, Level::Info, name);
            let event = match runs.iter().find(|known| known.id == run) {
                Some(record) if state == RunState::Cancelled => Event::ended(now.wall, record),
                Some(record) => event.of_run(record),
                None => event,
            };
            // Also if it has been claimed again since.
            let (run_id, state, node) = (Some(run), Some(state.as_str()), Some(self.node));
            self.note(Event { run_id, state, node, ..event });
        }
    }

    /// Runs that are ours by the store and not by us were never started: their claim's answer was lost. Those seen twice go
    /// back; the answer for the others may still be on its way.
    pub(super) fn return_strays(&mut self, live: Vec<(RunId, Epoch)>) {
        let unknown: BTreeSet<_> = live
            .into_iter()
            .filter(|(run, epoch)| self.tasks.get(run).is_none_or(|task| task.epoch != *epoch))
            .collect();
        let refused = self.refused_ends.iter().map(|(_, ending)| ending);
        let endings = self.endings.iter().chain(&self.finishing).chain(refused);
        let waiting: HashSet<RunId> = endings.map(|ending| ending.finish.run).collect();
        let lost: Vec<_> = unknown
            .iter()
            .filter(|stray| self.strays.contains(*stray) && !waiting.contains(&stray.0))
            .copied()
            .collect();
        self.strays = unknown;
        if !self.dispatcher.busy {
            self.give_back(lost);
        }
    }

    /// Others have taken our runs: end everything, and begin as another node.
    pub(super) fn start_over(&mut self, now: Now) {
        let event = Event::new(now.wall, Level::Error, Name::NodeFenced);
        self.note(Event {
            node: Some(self.node),
            detail: Some("the lease was lost; what ran here is ended and runs elsewhere".into()),
            ..event
        });
        self.stop_all(Stop::LeaseLost);
        self.tasks.clear();
        self.endings.clear();
        self.refused_ends.clear();
        self.nothing_left(&[Call::Ends]);
        self.strays.clear();
        self.is_claim_old = self.dispatcher.busy;
        self.is_joined = false;
        self.lease_good = now.mono;
        self.renewer.at = now.mono;
    }

    pub(super) fn marks_maybe(&mut self, now: Now) {
        if self.phase != Phase::Stopped && self.marker.is_due(now) {
            self.marker.busy = true;
            self.ask(Ask::Marks(self.node));
        }
    }

    /// There may be new marks: at once where something runs that may be cancelled, else a little later, for hints come by
    /// the thousand.
    pub(super) fn marks_soon(&mut self, now: Now) {
        if !self.tasks.is_empty() || self.marker.busy {
            self.marker.wake(now);
        } else {
            self.marker.at = self.marker.at.min(now.mono + MARKS_SOON);
        }
    }

    pub(super) fn marks(&mut self, now: Now, marks: Result<Marks, Error>) {
        // Where nothing runs, a hint tells of a mark, and the time of a renewal is soon enough for one that was lost.
        let every = if self.tasks.is_empty() { self.options.lease / 3 } else { self.options.marks_every };
        // What was told meanwhile is newer than what was read.
        let is_old = std::mem::take(&mut self.drain_told);
        self.marker.rest(now, now.mono + every);
        let Some(marks) = self.read(now, Call::Marks, marks) else {
            self.marker.at = now.mono + self.options.marks_every;
            return;
        };
        marks.cancels.into_iter().for_each(|(run, epoch, reason)| self.cancel(run, epoch, reason));
        if let (false, Some(draining)) = (is_old, marks.draining) {
            self.drain(now, draining);
        }
    }

    /// Takes no new work, or takes it again. A guest is there for one run, and takes no other anyway.
    pub(super) fn drain(&mut self, now: Now, draining: bool) {
        if self.draining == draining || self.options.only.is_some() {
            return;
        }
        self.draining = draining;
        self.nothing_left(&[Call::Plans, Call::Claims]);
        self.planner.wake(now);
        self.claim_wanted = true;
        let event = Event::new(now.wall, Level::Info, Name::NodeDraining);
        let state = if draining { "draining" } else { "running" };
        self.note(Event { node: Some(self.node), state: Some(state), ..event });
    }

    pub(super) fn cancel(&mut self, run: RunId, epoch: Epoch, reason: Reason) {
        if let Some(task) = self.tasks.get_mut(&run)
            && task.epoch == epoch
            && !task.stopping
            && !task.ended
        {
            task.stopping = true;
            self.effects.push(Effect::Stop { run, epoch, stop: Stop::Cancel(reason) });
        }
    }

    pub(super) fn stop_all(&mut self, stop: Stop) {
        for (run, task) in &mut self.tasks {
            if !task.ended && (!task.stopping || stop.is_at_once()) {
                task.stopping = true;
                self.effects.push(Effect::Stop { run: *run, epoch: task.epoch, stop });
            }
        }
    }
}
