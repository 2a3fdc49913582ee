//! The store as a node reaches it: each call takes its time, may fail, and may be done although its answer is lost.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::sync::Arc;

use belfry::{AgentDefinition, AgentSpec, NodeId, Resume, RunId, ScheduleDefinition};
use belfry_core::breaker::Admits;
use belfry_core::definition::Scope;
use belfry_core::{AgentId, Epoch, Reason, RunState, ScheduleId, SkipRange, Trigger};
use belfry_store::*;
use belfry_time::Timestamp;

use crate::beside::Beside;
use crate::world::{Fault, World};

/// The store, seen from one node.
pub struct Slow {
    /// The place of the node.
    pub node: usize,
    /// What delays and breaks calls.
    pub world: Arc<World>,
    /// The store behind it.
    pub store: Arc<Beside>,
    /// Whether the store has a clock of its own.
    pub has_clock: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

/// Reads in a thousand that are answered at once, and answers to writes that arrive at once. Every call that takes time is an
/// event; what a node does next after a read, a write, takes its time on the way to the store anyway.
const READS_AT_ONCE: u64 = 800;
const ANSWERS_AT_ONCE: u64 = 500;

fn unavailable<T>(ambiguous: bool) -> Result<T, Error> {
    Err(Error::Unavailable { detail: "simulated".into(), ambiguous })
}

impl Slow {
    async fn call<T>(
        &self,
        kind: Kind,
        call: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let at_once = if kind == Kind::Read { READS_AT_ONCE } else { 0 };
        self.world.sleep(self.world.latency(at_once)).await;
        let fault = self.world.fault(self.node, kind == Kind::Write);
        // One place that awaits the call: two would make each future twice as large.
        let done = match fault {
            Fault::None | Fault::LosesAnswer => Some(call.await),
            Fault::Refuses | Fault::Full => None,
        };
        let answer = match (fault, done) {
            (Fault::None, Some(answer)) => answer,
            (Fault::Full, _) => Err(Error::Full { place: "simulated".into() }),
            _ => unavailable(fault == Fault::LosesAnswer),
        };
        // What was read takes no time back: the node may be killed between two calls anyway.
        if kind == Kind::Write {
            self.world.sleep(self.world.latency(ANSWERS_AT_ONCE)).await;
        }
        answer
    }

    /// A scope beyond the schedule has the runs of its agent, or of a command of it, but for those of sessions.
    async fn check_scope(&self, due: &Due) -> Result<(), Error> {
        let Some(options) = due.compiled.as_ref().ok().map(|compiled| compiled.options()) else {
            return Ok(());
        };
        if options.overlap == Scope::Schedule || due.live == 0 {
            return Ok(());
        }
        let counts = |run: &&RunRecord| {
            run.agent == due.agent
                && run.trigger != Trigger::Message
                && (options.overlap == Scope::Agent || run.command == options.command)
        };
        let live = self.store.memory.live_runs().await?;
        let expected = live.iter().filter(counts).count();
        if expected != due.live as usize {
            self.world
                .breach(format!("{}: {} runs count for its overlap, not {expected}", due.name, due.live));
        }
        Ok(())
    }

    /// A failed attempt that is repeated has used a part of the failure budget.
    async fn check_budget(&self, finish: &Finish) -> Result<(), Error> {
        let Some(run) = self.store.memory.run(finish.run).await?.filter(|_| finish.failed) else {
            return Ok(());
        };
        let agents = self.store.memory.agents().await?;
        let Some(agent) = agents.iter().find(|agent| agent.id == run.agent) else { return Ok(()) };
        if agent.definition.budget.is_some() && agent.budget.is_none() {
            self.world
                .breach(format!("{} {}: a failed attempt used nothing of the budget", run.name, run.id));
        }
        Ok(())
    }
}

/// Passes verbs on to the store behind it.
macro_rules! forward {
    ($($(#[$about:meta])* $kind:ident fn $verb:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> $answer:ty
        $(, wakes $when:expr)? $(, else $otherwise:block)?;)*) => {
        $(forward!(one $kind $verb ($($arg: $type),*) $answer);)*
    };
    // Below.
    (one $kind:ident clock $($rest:tt)*) => {};
    (one $kind:ident due $($rest:tt)*) => {};
    (one $kind:ident claim $($rest:tt)*) => {};
    (one $kind:ident commit $($rest:tt)*) => {};
    (one $kind:ident finish $($rest:tt)*) => {};
    (one reads $verb:ident ($($arg:ident: $type:ty),*) $answer:ty) => {
        async fn $verb(&self, $($arg: $type),*) -> Result<$answer, Error> {
            self.call(Kind::Read, self.store.$verb($($arg),*)).await
        }
    };
    (one changes $verb:ident ($($arg:ident: $type:ty),*) $answer:ty) => {
        async fn $verb(&self, $($arg: $type),*) -> Result<$answer, Error> {
            self.call(Kind::Write, self.store.$verb($($arg),*)).await
        }
    };
}

impl Store for Slow {
    async fn clock(&self) -> Result<Option<Timestamp>, Error> {
        if !self.has_clock {
            return Ok(None);
        }
        self.call(Kind::Read, async { Ok(Some(self.world.wall())) }).await
    }

    async fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Result<Vec<Due>, Error> {
        let read = async {
            let due = self.store.due(now, after, limit).await;
            if due.as_ref().is_ok_and(|due| !due.is_empty()) {
                self.world.due_read();
            }
            for due in due.iter().flatten() {
                self.check_scope(due).await?;
            }
            due
        };
        self.call(Kind::Read, read).await
    }

    async fn claim(&self, now: Timestamp, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        let write = async {
            let claimed = self.store.claim(now, claim).await;
            if let Ok(claimed) = &claimed {
                self.world.claimed(now, claimed);
            }
            if claimed.as_ref().is_ok_and(|claimed| !claimed.is_empty()) {
                // Those that are fenced are left out.
                let nodes = self.store.memory.nodes().await?;
                if nodes.iter().all(|node| node.id != claim.node) {
                    self.world.breach(format!("node {} is fenced, and claims runs", self.node));
                }
            }
            claimed
        };
        self.call(Kind::Write, write).await
    }

    async fn commit(&self, now: Timestamp, commits: &[Commit]) -> Result<Vec<Committed>, Error> {
        let write = async {
            let committed = self.store.commit(now, commits).await;
            for (commit, _) in commits.iter().zip(committed.iter().flatten()) {
                self.world.planned(commit.runs.iter().map(|run| run.id));
            }
            committed
        };
        self.call(Kind::Write, write).await
    }

    async fn finish(&self, now: Timestamp, finishes: &[Finish]) -> Result<Vec<Finished>, Error> {
        let write = async {
            let finished = self.store.finish(now, finishes).await;
            if let ([finish], Ok([Finished::Pending])) = (finishes, finished.as_deref()) {
                self.check_budget(finish).await?;
            }
            finished
        };
        self.call(Kind::Write, write).await
    }

    async fn changed(&self) {
        std::future::pending().await
    }

    belfry_store::verbs!(store, forward);
}

impl Watch for Slow {
    belfry_store::verbs!(watch, forward);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use belfry::Time;
    use belfry::testing::Ask;
    use belfry::testing::carry_out;

    use super::*;
    use crate::random::Random;
    use crate::world::{HOUR, NodeClock, SECOND};

    /// Seed 326. A node followed the store's clock only when it read what is due, which one that drains does not. After that
    /// clock was set forward by more than a lease, each renewal was over before it was stored: the node counted as dead, and
    /// nobody could tell it to take work again.
    #[test]
    fn a_draining_node_follows_the_clock_of_the_store() {
        let world = Arc::new(World::new("2026-03-02T12:00:00Z".parse().unwrap(), Random(1), HOUR));
        let clock = NodeClock::new(&world, true);
        let store = Slow { node: 0, world: world.clone(), store: Arc::default(), has_clock: true };
        world.step(2 * HOUR as i64);
        assert!(clock.now().wall < world.wall());
        // A node that drains reads lanes and marks.
        let mut call = pin!(carry_out(&store, &clock, Ask::Lanes(NodeId(uuid::Uuid::nil()))));
        while call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            world.set_now(world.now() + SECOND);
        }
        assert_eq!(clock.now().wall, world.wall());
    }
}
