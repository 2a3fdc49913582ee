//! Nodes and their leases: renewal, fencing, rescue.

use belfry_core::broken::{self, Broken};
use belfry_core::ending::Then;
use belfry_core::rescue::{Fate, Orphan, fate};
use belfry_core::retry::Verdict;
use belfry_core::{Epoch, NodeId, RunId, RunState};
use belfry_time::Timestamp;

use super::State;
use crate::shapes::*;

impl State {
    pub(super) fn renew(&mut self, id: NodeId, lease_until: Timestamp) -> Renewed {
        let Some(node) = self.nodes.get_mut(&id).filter(|node| !node.fenced) else { return Renewed::Fenced };
        node.lease_until = lease_until;
        let number = self.number();
        self.renewals.insert(id, number);
        let own = self.live.iter().filter(|(_, live)| live.running == Some(id));
        Renewed::Held {
            cancels: own.clone().filter_map(|(run, live)| Some((*run, live.epoch, live.cancel?))).collect(),
            live: Some(own.map(|(run, live)| (*run, live.epoch)).collect()),
        }
    }

    pub(super) fn marks(&self, id: NodeId) -> Marks {
        let own = self.live.iter().filter(|(_, live)| live.running == Some(id));
        Marks {
            cancels: own.filter_map(|(run, live)| Some((*run, live.epoch, live.cancel?))).collect(),
            draining: self.nodes.get(&id).map(|node| node.draining),
        }
    }

    pub(super) fn drain(&mut self, now: Timestamp, id: NodeId, draining: bool) -> Drained {
        match self.nodes.get_mut(&id) {
            None => Drained::NotFound,
            Some(node) if !node.is_alive(now) => Drained::Dead,
            Some(node) => {
                let before = std::mem::replace(&mut node.draining, draining);
                Drained::Marked { is_news: before != draining }
            }
        }
    }

    pub(super) fn fence(&mut self, now: Timestamp, id: NodeId, lease_seen: Timestamp) -> Option<Rescued> {
        let node = self.nodes.get_mut(&id).filter(|node| !node.fenced && node.lease_until == lease_seen)?;
        node.fenced = true;
        let runs: Vec<RunId> =
            self.live.iter().filter(|(_, live)| live.running == Some(id)).map(|(run, _)| *run).collect();
        let forgotten = usize::from(broken::is(Broken::RescueForgetsOne));
        let orphans: Vec<Orphan<RunId>> = runs
            .into_iter()
            .skip(forgotten)
            .filter_map(|run| Some((run, self.live.get(&run)?)))
            .map(|(run, live)| Orphan {
                run,
                cancel: self.left_behind(live),
                attempt: live.attempt,
                max_attempts: live.new.max_attempts,
                rescue: live.rescue,
                suspicions: live.suspicions,
            })
            .collect();
        let renewal = self.renewals.get(&id).copied().unwrap_or(0);
        let mut rescued = Rescued::default();
        for orphan in orphans {
            let run = orphan.run;
            let Some(live) = self.live.get_mut(&run) else { continue };
            let is_suspect = orphan.is_suspect(renewal);
            rescued.suspects.extend(is_suspect.then_some(run));
            match fate(&orphan, is_suspect) {
                Fate::End { state, reason, error } => {
                    live.error = error.map(str::to_owned).or(live.error.take());
                    self.end_now(now, run, state, Some(reason));
                    rescued.ended.push((run, state));
                }
                Fate::Back => {
                    live.suspicions = orphan.suspicions_after(is_suspect);
                    self.come_back(now, run, Verdict::Retry { at: now });
                    if let Some(live) = self.live.get_mut(&run) {
                        live.rescue = Some(0);
                    }
                    rescued.pending.push(run);
                }
            }
        }
        Some(rescued)
    }

    /// Returns a run to where it waits, from its budget's instant on.
    fn come_back(&mut self, now: Timestamp, run: RunId, verdict: Verdict) {
        if let Some(Then::Back { at, counted }) = self.settle(now, run, verdict, false) {
            self.back_to_pending(now, run, at, counted);
        }
    }

    pub(super) fn give_back(
        &mut self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Vec<(RunId, RunState)> {
        let mut given_back = Vec::new();
        for (run, epoch) in runs {
            let Some(live) =
                self.live.get(run).filter(|live| live.running == Some(node) && live.epoch == *epoch)
            else {
                continue;
            };
            let left_behind = self.left_behind(live);
            given_back.push((*run, left_behind.map_or(RunState::Pending, |_| RunState::Cancelled)));
            match left_behind {
                Some(reason) => self.end_now(now, *run, RunState::Cancelled, Some(reason)),
                None => self.come_back(now, *run, Verdict::Return),
            }
        }
        given_back
    }
}
