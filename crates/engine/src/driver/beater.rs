//! That this node lives, and what it does: once in a while, whatever else it is at.

use super::*;

/// Runs that are named at once; the lanes count the rest.
const RUNS_MAX: usize = 1000;

/// What a node says of itself; what its machine does is added outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beat {
    /// Who.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
    /// Its runs by lane.
    pub lanes: BTreeMap<String, u32>,
    /// Its runs.
    pub runs: Vec<RunId>,
    /// Sessions that have a run here.
    pub sessions: u32,
}

impl Driver {
    pub(super) fn beat_maybe(&mut self, now: Now) {
        if self.phase == Phase::Stopped || !self.beater.is_due(now) {
            return;
        }
        self.beater.busy = true;
        let running = self.tasks.iter().filter(|(_, task)| !task.ended);
        let (mut lanes, mut runs) = (BTreeMap::new(), Vec::new());
        let mut sessions = HashSet::new();
        for (run, task) in running {
            *lanes.entry(task.lane.clone()).or_default() += 1;
            runs.push(*run);
            sessions.extend(task.session.as_ref().map(|key| (task.definitions.schedule, key)));
        }
        runs.sort();
        runs.truncate(RUNS_MAX);
        let sessions = sessions.len() as u32;
        self.effects.push(Effect::Beat(Beat { node: self.node, at: now.wall, lanes, runs, sessions }));
    }

    /// A heartbeat that was not kept is tried again.
    pub(super) fn beaten(&mut self, now: Now, kept: Result<bool, Error>) {
        self.beater.rest(now, now.mono + self.options.heartbeat);
        if self.written(now, Call::Heartbeat, kept).is_none() {
            self.beater.at = now.mono + self.backoff(Call::Heartbeat);
        }
    }
}
