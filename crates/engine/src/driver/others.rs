//! Looking after others: nodes that are gone, and what is too old.

use super::*;

impl Driver {
    pub(super) fn reap_maybe(&mut self, now: Now) {
        if self.reaper.is_due(now) {
            self.reaper.busy = true;
            self.effects.push(Effect::ReadNodes);
        }
    }

    pub(super) fn nodes(&mut self, now: Now, nodes: Result<Vec<(Node, bool)>, Error>) {
        self.reaper = Loop::from(now.mono + self.options.orphan_check.min(self.options.lease / 3));
        let Some(nodes) = self.read(now, nodes) else { return };
        self.observed.retain(|id, _| nodes.iter().any(|(node, _)| node.id == *id));
        for (node, gone) in nodes.into_iter().filter(|(node, _)| node.id != self.node) {
            let seen = self.observed.entry(node.id).or_insert((node.lease_until, now.mono));
            if seen.0 != node.lease_until {
                *seen = (node.lease_until, now.mono);
            }
            // By the store's clock it lapsed, and by our watch nobody renewed it for as long.
            let lapsed = node.lease_until < now.wall && now.mono >= seen.1 + self.options.lease;
            if gone || lapsed {
                self.effects.push(Effect::Fence { node: node.id, lease: node.lease_until });
            }
        }
    }

    pub(super) fn fenced(&mut self, now: Now, node: NodeId, rescued: Result<Option<Rescued>, Error>) {
        let Some(rescued) = self.written(now, Write::Lease, rescued) else { return };
        let Some(rescued) = rescued else { return };
        self.observed.remove(&node);
        self.claim_wanted = true;
        self.planner.wake(now);
        let count = rescued.pending.len() + rescued.ended.len();
        let event = Event::new(now.wall, Level::Warn, Name::NodeFenced);
        self.note(Event { node: Some(node), count: Some(count as u64), ..event });
        let ended = rescued.ended.iter().map(|(run, state)| (*run, state.as_str()));
        let pending = rescued.pending.iter().map(|run| (*run, RunState::Pending.as_str()));
        for (run, state) in pending.chain(ended).collect::<Vec<_>>() {
            let event = Event::new(now.wall, Level::Warn, Name::RunRescued);
            let from_outside =
                rescued.traces.iter().find(|(known, _)| *known == run).map(|(_, trace)| *trace);
            let trace = run.trace(from_outside).simple().to_string();
            let suspect = rescued
                .suspects
                .contains(&run)
                .then(|| "its node died soon after starting it: it is a suspect".to_owned());
            self.note(Event {
                run_id: Some(run),
                state: Some(state),
                node: Some(node),
                trace_id: Some(trace),
                detail: suspect,
                ..event
            });
        }
    }

    pub(super) fn prune_maybe(&mut self, now: Now) {
        if self.pruner.is_due(now) {
            self.pruner.busy = true;
            let before = |keep: Option<Duration>| keep.map_or(Timestamp::MIN, |keep| earlier(now.wall, keep));
            let keep = self.options.keep;
            let kept = |keep: Option<Duration>| keep.map(|keep| earlier(now.wall, keep));
            let retention = Retention {
                runs_before: before(keep.runs),
                failures_before: before(keep.failures),
                runs_per_schedule: keep.runs_per_schedule,
                after: self.prune_after,
                skips_before: before(keep.skips),
                output_before: before(keep.output),
                batch: PRUNE_BATCH,
            };
            self.ask(Ask::Prune {
                retention,
                snapshots_before: kept(keep.snapshots),
                nodes_before: kept(keep.heartbeats),
            });
        }
    }

    pub(super) fn pruned(&mut self, now: Now, pruned: Result<Pruned, Error>) {
        self.pruner.rest(now, now.mono + self.options.prune_every);
        let Some(pruned) = self.written(now, Write::Pruning, pruned) else {
            self.pruner.at = now.mono + self.backoff(Write::Pruning);
            return;
        };
        self.prune_after = pruned.next;
        // Where there is more, others go first.
        if pruned.runs + pruned.skips + pruned.keys + pruned.output >= PRUNE_BATCH {
            self.pruner.at = now.mono + Duration::from_millis(50);
        } else if pruned.next.is_some() {
            self.pruner.at = now.mono + Duration::from_millis(500);
        }
    }
}
