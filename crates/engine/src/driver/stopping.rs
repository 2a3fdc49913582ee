//! The end of the node.

use super::*;

impl Driver {
    pub(super) fn stop(&mut self, now: Now, timeout: Duration) {
        self.nothing_left(&[
            Call::Plans,
            Call::Claims,
            Call::Pruning,
            Call::Nodes,
            Call::Lanes,
            Call::Unreadable,
        ]);
        self.phase = match self.phase {
            Phase::Running => Phase::Draining { until: now.mono + timeout },
            Phase::Draining { .. } => {
                self.stop_all(Stop::ShutdownNow);
                Phase::Ending { overrun: self.under_way(), give_up: now.mono + GIVE_UP_SOON }
            }
            Phase::Ending { overrun, .. } => {
                self.stop_all(Stop::ShutdownNow);
                Phase::Ending { overrun, give_up: now.mono + GIVE_UP_SOON }
            }
            Phase::Stopped => Phase::Stopped,
        };
    }

    pub(super) fn under_way(&self) -> usize {
        self.tasks.values().filter(|task| !task.ended).count()
    }

    pub(super) fn stop_maybe(&mut self, now: Now) {
        // An end that the store refuses is not waited for: the run is rescued when this node is gone.
        let idle = self.under_way() == 0
            && self.endings.is_empty()
            && !self.finisher.busy
            && !self.dispatcher.busy
            && !self.planner.busy
            && self.giving_back == 0
            && !self.renewer.busy;
        let overrun = match self.phase {
            Phase::Draining { .. } if idle => 0,
            // Nothing runs, and the store is gone: waiting any longer would store nothing.
            Phase::Draining { .. } if self.health.is_replaced() && self.under_way() == 0 => {
                self.phase = Phase::Ending { overrun: 0, give_up: now.mono + GIVE_UP_SOON };
                return;
            }
            Phase::Draining { until } if now.mono >= until => {
                self.phase = Phase::Ending { overrun: self.under_way(), give_up: now.mono + GIVE_UP };
                return self.stop_all(Stop::Shutdown);
            }
            Phase::Ending { overrun, .. } if idle => overrun,
            // What still runs is waited for; only then is it the store that takes its time.
            Phase::Ending { overrun, give_up } if self.under_way() > 0 => {
                self.phase = Phase::Ending { overrun, give_up: give_up.max(now.mono + GIVE_UP_SOON) };
                return;
            }
            // Nothing runs any more, and the store does not take in what has ended: whoever finds this node gone does. One
            // that says nothing may only be slow.
            Phase::Ending { overrun, give_up }
                if now.mono >= give_up && (!self.health.is_well() || now.mono >= give_up + SILENT) =>
            {
                overrun.max(self.tasks.len()).max(1)
            }
            _ => return,
        };
        self.phase = Phase::Stopped;
        self.effects.push(Effect::Stopped { overrun });
    }
}
