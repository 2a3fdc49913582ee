//! Looking after others: nodes that are gone, and what is too old.

use belfry_runner::ProcessState;
use belfry_store::NodeProcess;

use super::*;

/// What a node sees of another node's process.
#[derive(Debug, Clone)]
pub struct Sight {
    /// The process that looks.
    pub here: Arc<NodeProcess>,
    /// Whether the store is a file of the other node's host, and that host is this one by its name.
    pub is_same_host: bool,
    /// The process with the other node's pid, as this system shows it.
    pub process: ProcessState,
    /// Whether the other node's process holds the lock of the store's file.
    pub serves_file: bool,
}

impl Sight {
    /// Whether the process of a node is surely gone: by boot, pid namespace, pid and start time, never by a clock that
    /// somebody can set.
    fn is_gone(&self, node: &Node) -> bool {
        let there = &node.process;
        if self.here.boot_id.is_empty() || there.boot_id.is_empty() {
            return false;
        }
        if self.here.boot_id != there.boot_id {
            // The host was booted since. Only a file says that both are of one host: names of hosts are not unique.
            return self.is_same_host;
        }
        self.here.is_beside(there)
            && match self.process {
                ProcessState::Unknown => false,
                ProcessState::Gone => true,
                ProcessState::Found { start_time, lives } => !lives || start_time != there.start_time,
            }
    }
}

/// Whether the lease of a node has lapsed: by the store's clock, and by the monotonic clock of this node, which saw its last
/// change at `seen`. A lease that ends later than a renewal could set it is one of before the store's clock was set back.
fn is_lapsed(node: &Node, seen: Duration, now: Now, own_lease: Duration) -> bool {
    let lease = own_lease.max(Duration::from_millis(node.process.lease_ms));
    let is_over = node.lease_until < now.wall || node.lease_until > later(now.wall, lease);
    is_over && now.mono >= seen.saturating_add(lease)
}

impl Driver {
    pub(super) fn reap_maybe(&mut self, now: Now) {
        if self.reaper.is_due(now) {
            self.reaper.busy = true;
            self.effects.push(Effect::ReadNodes);
        }
    }

    pub(super) fn nodes(&mut self, now: Now, nodes: Result<Vec<(Node, Sight)>, Error>) {
        self.reaper = Loop::from(now.mono + self.options.orphan_check.min(self.options.lease / 3));
        let Some(nodes) = self.read(now, Call::Nodes, nodes) else {
            self.reaper.at = now.mono + self.backoff(Call::Nodes);
            return;
        };
        let (is_first, mut fencing) = (self.unfenced.is_none(), BTreeSet::new());
        self.observed.retain(|id, _| nodes.iter().any(|(node, _)| node.id == *id));
        for (node, sight) in nodes.into_iter().filter(|(node, _)| node.id != self.node) {
            let seen = self.observed.entry(node.id).or_insert((node.lease_until, now.mono));
            if seen.0 != node.lease_until {
                *seen = (node.lease_until, now.mono);
            }
            // While the server of a file holds the file's lock nobody takes over from it.
            let is_lapsed = is_lapsed(&node, seen.1, now, self.options.lease) && !sight.serves_file;
            if is_lapsed || sight.is_gone(&node) {
                let is_beside = sight.here.is_beside(&node.process);
                fencing.insert(node.id);
                self.effects.push(Effect::Fence {
                    node: node.id,
                    lease: node.lease_until,
                    state_dir: is_beside.then_some(node.process.state_dir),
                    is_lapsed,
                });
            }
        }
        if is_first {
            self.claim_wanted = true;
            self.unfenced = Some(fencing);
        }
    }

    pub(super) fn fenced(
        &mut self,
        now: Now,
        node: NodeId,
        rescued: Result<Option<Rescued>, Error>,
        runs: &[RunRecord],
    ) {
        if self.unfenced.as_mut().is_some_and(|unfenced| unfenced.remove(&node)) {
            self.claim_wanted = true;
        }
        let Some(rescued) = self.written(now, Call::Lease, rescued) else { return };
        let Some(rescued) = rescued else { return };
        self.observed.remove(&node);
        self.claim_wanted = true;
        self.planner.wake(now);
        let count = rescued.pending.len() + rescued.ended.len();
        let event = Event::new(now.wall, Level::Warn, Name::NodeFenced);
        self.note(Event { node: Some(node), count: Some(count as u64), ..event });
        for run in &rescued.pending {
            let event = Event::new(now.wall, Level::Warn, Name::RunRescued);
            let event = match runs.iter().find(|known| known.id == *run) {
                Some(run) => event.of_run(run),
                None => event,
            };
            let is_suspect = rescued.suspects.contains(run);
            self.note(Event {
                run_id: Some(*run),
                node: Some(node),
                // Also if it has been claimed again since.
                state: Some(RunState::Pending.as_str()),
                reason: Some(Reason::Orphaned.as_str().to_owned()),
                detail: is_suspect
                    .then(|| "its node died soon after starting it: it starts alone, on a node that has been up for a while".to_owned()),
                ..event
            });
        }
        for (run, state) in &rescued.ended {
            let event = match runs.iter().find(|known| known.id == *run) {
                Some(run) => {
                    self.read_breaker_of(run);
                    Event::ended(now.wall, run)
                }
                None if *state == RunState::Cancelled => {
                    Event::new(now.wall, Level::Info, Name::RunCancelled)
                }
                None => Event::new(now.wall, Level::Warn, Name::RunFinished),
            };
            self.note(Event { run_id: Some(*run), state: Some(state.as_str()), node: Some(node), ..event });
        }
    }

    /// The end of a run whose node is gone may have opened a breaker.
    fn read_breaker_of(&mut self, run: &RunRecord) {
        if run.state == RunState::Failed {
            self.ask(Ask::Breaker(Box::new(BreakerOf {
                agent: run.agent,
                name: Arc::from(run.agent_name.as_str()),
                command: run.command.clone(),
                run: run.id,
                trace: run.id.trace(run.trace_id).simple().to_string(),
                is_probe: false,
            })));
        }
    }

    pub(super) fn prune_maybe(&mut self, now: Now) {
        if self.pruner.is_due(now) {
            self.pruner.busy = true;
            let before = |keep: Option<Duration>| keep.map_or(EARLIEST, |keep| earlier(now.wall, keep));
            let keep = self.options.keep;
            let kept = |keep: Option<Duration>| keep.map(|keep| earlier(now.wall, keep));
            let retention = Retention {
                runs_before: before(keep.runs),
                failures_before: before(keep.failures),
                runs_per_schedule: keep.runs_per_schedule,
                after: self.prune_after,
                skips_before: before(keep.skips),
                output_before: before(keep.output),
                retired_before: before(keep.retired),
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
        let Some(pruned) = self.written(now, Call::Pruning, pruned) else {
            self.pruner.at = now.mono + self.backoff(Call::Pruning);
            return;
        };
        self.prune_after = pruned.next;
        // Where there is more, others go first.
        if pruned.runs + pruned.skips + pruned.keys + pruned.output + pruned.retired >= PRUNE_BATCH {
            self.pruner.at = now.mono + Duration::from_millis(50);
        } else if pruned.next.is_some() {
            self.pruner.at = now.mono + Duration::from_millis(500);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(boot_id: &str, pid_ns: &str, start_time: u64) -> NodeProcess {
        NodeProcess {
            boot_id: boot_id.into(),
            pid_ns: pid_ns.into(),
            start_time,
            state_dir: "/state".into(),
            version: String::new(),
            lease_ms: 30_000,
        }
    }

    fn node(process: NodeProcess, lease_until: Timestamp) -> Node {
        let at = Timestamp::UNIX_EPOCH;
        Node {
            id: NodeId(Uuid::nil()),
            host: "host".into(),
            pid: 1,
            labels: Vec::new(),
            started_at: at,
            lease_until,
            fenced: false,
            draining: false,
            last_seen_at: at,
            max_concurrent: None,
            process,
        }
    }

    #[test]
    fn a_lease_lapses_by_both_clocks_whatever_was_done_to_the_wall_clock() {
        // Seconds: the end of the lease, the wall clock, for how long nobody has renewed it; the lease of the node that looks.
        for (lease_until, wall, unrenewed, own, wanted) in [
            (1_000, 1_001, 30, 30, true),
            (1_000, 1_000, 30, 30, false),
            // The wall clock goes forward: a node that lives renews its lease within that time.
            (1_000, 8_200, 29, 30, false),
            (1_000, 8_200, 30, 30, true),
            // It goes back by more than a lease, and the node has died before.
            (8_200, 1_000, 30, 30, true),
            (8_200, 1_000, 29, 30, false),
            // A lease that may have been renewed just now.
            (1_030, 1_000, 30, 30, false),
            // The longer one of the two leases counts.
            (1_000, 1_001, 30, 60, false),
            (1_000, 1_001, 30, 10, true),
            (1_000, 1_001, 29, 10, false),
        ] {
            let at = |seconds| Timestamp::from_second(seconds).unwrap();
            let [seen, now, own] = [100, 100 + unrenewed, own].map(Duration::from_secs);
            let node = node(process("b1", "ns1", 1), at(lease_until));
            let lapsed = is_lapsed(&node, seen, Now { wall: at(wall), mono: now }, own);
            assert_eq!(lapsed, wanted, "until {lease_until}, at {wall}, for {unrenewed}");
        }
    }

    #[test]
    fn a_process_is_gone_only_where_the_system_says_so() {
        let found = |start_time, lives| ProcessState::Found { start_time, lives };
        let (here, file, lives) = (process("b1", "ns1", 7), true, found(100, true));
        // The node's process, whether the store is a file of this host, what has its pid here: whether it is gone.
        for (there, is_same_host, state, wanted) in [
            (process("b1", "ns1", 100), file, lives, false),
            (process("b1", "ns1", 100), false, lives, false),
            // A zombie, another process with its pid, nobody with its pid.
            (process("b1", "ns1", 100), false, found(100, false), true),
            (process("b1", "ns1", 100), false, found(101, true), true),
            (process("b1", "ns1", 100), false, ProcessState::Gone, true),
            (process("b1", "ns1", 100), file, ProcessState::Unknown, false),
            // Its pid means nothing here.
            (process("b1", "ns2", 100), file, ProcessState::Gone, false),
            // Another host, or this one before it was booted.
            (process("b2", "ns1", 100), false, ProcessState::Gone, false),
            (process("b2", "ns1", 100), file, lives, true),
            // A system that does not say.
            (process("", "", 0), file, ProcessState::Gone, false),
        ] {
            let sight =
                Sight { here: Arc::new(here.clone()), is_same_host, process: state, serves_file: false };
            let node = node(there, Timestamp::UNIX_EPOCH);
            assert_eq!(sight.is_gone(&node), wanted, "{:?} {state:?} {is_same_host}", node.process);
        }
        let nowhere = Sight {
            here: Arc::default(),
            is_same_host: true,
            process: ProcessState::Gone,
            serves_file: false,
        };
        assert!(
            !nowhere.here.is_beside(&NodeProcess::default()),
            "two systems that do not say are not the same"
        );
    }
}
