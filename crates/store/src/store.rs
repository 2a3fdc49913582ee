//! The verbs of a store.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;

use belfry_core::breaker::Admits;
use belfry_core::edit::Resume;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, ScheduleDefinition, ScheduleId,
    SkipRange,
};
use belfry_time::Timestamp;

use crate::error::Error;
use crate::sessions::*;
use crate::shapes::*;
use crate::views::*;

/// What a verb gives back.
pub(crate) type Answer<T> = Result<T, Error>;

/// A store. Every verb is one transaction: after an error nothing has changed, unless the error is ambiguous; after an
/// answer the change survives a crash of this process and of the database.
///
/// `now` is the caller's reading of the store's clock; it never comes from elsewhere.
pub trait Store: Send + Sync + 'static {
    /// What time it is by the store's own clock; none if the store has no clock. Reads only.
    fn clock(&self) -> impl Future<Output = Answer<Option<Timestamp>>> + Send {
        async { Ok(None) }
    }

    /// Makes a source's agents and schedules what they are in the files. Timing that changed starts a new revision: no
    /// tick before `now` fires, none fires again. What left is retired and its pending runs end; history stays. What
    /// comes back while a run of it lives is the same agent, schedule and session as before, else it is new. What was
    /// made through the API is left alone, but goes with its agent. Crash: all of the source, or nothing of it.
    fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> impl Future<Output = Answer<Applied>> + Send;

    /// The digest that was applied last for a source.
    fn source_digest(&self, source: &str) -> impl Future<Output = Answer<Option<String>>> + Send;

    /// Schedules of a source that went with their run, as `delete_after_run` asks, by `agent/schedule`. `apply` leaves
    /// them out while their definition is the same. Reads only.
    fn spent(
        &self,
        source: &str,
    ) -> impl Future<Output = Answer<BTreeMap<String, ScheduleDefinition>>> + Send;

    /// Makes a schedule of the API what it is here, or makes it new, where it is what is expected: of several who edit what
    /// they have read, one changes it. Timing that changed starts a new revision, as for `apply`. What a file owns is not
    /// touched. Crash: the whole edit, or nothing of it.
    fn put_schedule(
        &self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> impl Future<Output = Answer<Put>> + Send;

    /// Removes a schedule of the API, where it is what is expected. Its runs that wait end cancelled, those that run go on, history stays. Crash: gone with
    /// all its waiting runs, or as it was.
    fn remove_schedule(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        expect: &Expect,
    ) -> impl Future<Output = Answer<Removed>> + Send;

    /// Makes an agent of the API what it is here, or makes it new, with its schedules; with `whole` those of the API that are
    /// not here go. What a file owns is not touched. Crash: the agent with all its schedules, or nothing of it.
    fn put_agent(
        &self,
        now: Timestamp,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> impl Future<Output = Answer<PutAgent>> + Send;

    /// Removes an agent of the API with all its schedules. Their runs that wait end cancelled, those that run go on, history
    /// stays. Crash: gone with all of that, or as it was.
    fn remove_agent(
        &self,
        now: Timestamp,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> impl Future<Output = Answer<Removed>> + Send;

    /// Ids of schedules, by their names, `agent/schedule`, in the order asked for. At a cost that does not depend on their runs.
    /// Reads only.
    fn schedule_ids(&self, names: &[&str]) -> impl Future<Output = Answer<Vec<Option<ScheduleId>>>> + Send;

    /// What schedules and their agents are now, also removed ones, in the order asked for. Reads only.
    fn definitions(
        &self,
        schedules: &[ScheduleId],
    ) -> impl Future<Output = Answer<Vec<Option<Definitions>>>> + Send;

    /// Schedules that this version cannot read, in the order of their ids: because a newer version wrote them or their
    /// agent, or because a verb has found them broken. `due` and `claim` leave these alone. Reads only.
    fn unreadable(&self) -> impl Future<Output = Answer<Vec<UnreadableSchedule>>> + Send;

    /// Pauses a schedule: it is unarmed, its runs go on. A pause until an instant ends by itself: then its token is due, and
    /// planning it is as if it had been resumed at that instant, however late. Another pause takes the place of the first.
    /// `false` where there is none such or it is paused like that already. Crash: paused, with what ends it, or not.
    fn pause(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> impl Future<Output = Answer<bool>> + Send;

    /// Ends a pause, and says how many ticks it has recorded as skipped; `None` where there was none. With
    /// [`Resume::FromNow`] also a schedule that waits for the clock goes on. After a crash it is resumed and recorded, or
    /// neither.
    fn resume(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        how: Resume,
    ) -> impl Future<Output = Answer<Option<u64>>> + Send;

    /// Schedules whose token is due, the earliest first, without locking them; behind a mark where there is one, so that
    /// a batch can be read while the one before it is committed. Reads only.
    fn due(
        &self,
        now: Timestamp,
        after: Option<Mark>,
        limit: u32,
    ) -> impl Future<Output = Answer<Vec<Due>>> + Send;

    /// When the earliest token is due. Reads only.
    fn next_due(&self) -> impl Future<Output = Answer<Option<Timestamp>>> + Send;

    /// Commits plans whose token is still there and unchanged, and for each says whether it was. A token that is gone
    /// means that somebody else has planned the tick. A plan that makes runs in a lane where `queue_limit` runs wait already,
    /// or where others have waited longer for a place, is deferred: its token leaves the due index. Whatever verb makes
    /// room there arms those that wait, the oldest first, as many as there is room for. Crash: of each plan everything
    /// (token consumed, runs, skips, next token), or nothing.
    fn commit(
        &self,
        now: Timestamp,
        commits: &[Commit],
    ) -> impl Future<Output = Answer<Vec<Committed>>> + Send;

    /// Makes runs outside a plan, in order. They move no schedule, but a plan that did not know of them is not committed. Crash:
    /// runs that were answered for exist, or none of the call.
    fn enqueue_many(
        &self,
        now: Timestamp,
        requests: &[Enqueue],
    ) -> impl Future<Output = Answer<Vec<Enqueued>>> + Send;

    /// Makes one run outside a plan, as [`Store::enqueue_many`] does.
    fn enqueue(&self, now: Timestamp, request: &Enqueue) -> impl Future<Output = Answer<Enqueued>> + Send {
        async move {
            let mut answers = self.enqueue_many(now, std::slice::from_ref(request)).await?;
            answers.pop().ok_or_else(|| Error::unexpected("a request without an answer"))
        }
    }

    /// Takes a message into a session, which is made where it is new: it opens a run, joins one that is open, or is refused.
    /// Those that it drops or interrupts end with it. Crash: a message that was answered for is in its run.
    fn send(&self, now: Timestamp, message: &NewMessage) -> impl Future<Output = Answer<Sent>> + Send;

    /// Stops, resets or measures a session, which is made where it is new. `None` where there is no such schedule. Crash:
    /// all of it, or nothing.
    fn session(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> impl Future<Output = Answer<Option<SessionDone>>> + Send;

    /// Sessions in the order in which they were made, behind one of them.
    fn sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Answer<Page<SessionRecord, i64>>> + Send;

    /// Makes the lanes of the files what they are here; others of the files are gone. Crash: all of them, or none.
    fn put_lanes(
        &self,
        now: Timestamp,
        lanes: &[(String, LaneSettings)],
    ) -> impl Future<Output = Answer<()>> + Send;

    /// Makes a lane hold something else than the files say, or again what they say. Lowering a limit ends nothing. Crash: so
    /// or so.
    fn set_lane(
        &self,
        now: Timestamp,
        lane: &str,
        settings: Option<LaneSettings>,
    ) -> impl Future<Output = Answer<()>> + Send;

    /// All lanes that were made or that runs are in, in the order of their names.
    fn lanes(&self, now: Timestamp) -> impl Future<Output = Answer<Vec<LaneRecord>>> + Send;

    /// What lanes may hold, without looking at what they do: little enough to be asked each second. Reads only. Lanes that
    /// nobody made are among them while a run is ready there, as an edit may leave it.
    fn lane_settings(&self) -> impl Future<Output = Answer<Vec<LaneRecord>>> + Send;

    /// Ends all runs that wait in a lane, and gives them. Crash: some of them; repeat it.
    fn clear_lane(&self, now: Timestamp, lane: &str) -> impl Future<Output = Answer<Vec<RunId>>> + Send;

    /// Starts pending runs under a node as far as its slots, the gates and its labels allow, in order: priority,
    /// `not_before`, id. Of rescued runs it starts at most one, see [`Claim::rescue`]. Each start is counted and fenced
    /// before it is answered. After a crash they are claimed under the node's lease, or still pending.
    fn claim(&self, now: Timestamp, claim: &Claim) -> impl Future<Output = Answer<Vec<Claimed>>> + Send;

    /// When the next run that is not due yet may start, of those that wait for nothing else. Reads only.
    fn next_start(&self, now: Timestamp) -> impl Future<Output = Answer<Option<Timestamp>>> + Send;

    /// Ends attempts. A stale epoch changes nothing. The end of a run, its schedule's last result and next token, the
    /// breaker, the budget and the release of waiting runs are one. Crash: all of a finish, or nothing of it; repeat it.
    fn finish(
        &self,
        now: Timestamp,
        finishes: &[Finish],
    ) -> impl Future<Output = Answer<Vec<Finished>>> + Send;

    /// Cancels a run: one that waits ends now, one that runs is marked for its node. Crash: cancelled or marked, or not.
    fn cancel(
        &self,
        now: Timestamp,
        run: RunId,
        reason: Reason,
    ) -> impl Future<Output = Answer<Cancelled>> + Send;

    /// Gives runs back that a node has claimed but never started; the attempt does not count. Says which of them were the
    /// node's, and what became of each: pending, or cancelled if that was asked for. Crash: given back, or still under the
    /// node's lease.
    fn give_back(
        &self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> impl Future<Output = Answer<Vec<(RunId, RunState)>>> + Send;

    /// Keeps output of an attempt; `false` where its claim no longer holds, and nothing was kept. A piece that is there
    /// already stays as it is. Crash: all pieces, or none: repeat it.
    fn append_output(
        &self,
        run: RunId,
        epoch: Epoch,
        chunks: &[OutputChunk],
    ) -> impl Future<Output = Answer<bool>> + Send;

    /// Output of a run behind a place, in order: pieces until there are `limit_bytes` or more, at least one where there is
    /// one. Reads only.
    fn output(
        &self,
        run: RunId,
        after: Option<u64>,
        limit_bytes: u32,
    ) -> impl Future<Output = Answer<Vec<OutputChunk>>> + Send;

    /// Makes a node known, with its first lease.
    fn join(&self, node: &Node) -> impl Future<Output = Answer<()>> + Send;

    /// Renews a node's lease, unless it was fenced. The new one ends earlier if the clock was set back since. After a crash the
    /// old or the new one holds.
    fn renew(&self, node: NodeId, lease_until: Timestamp) -> impl Future<Output = Answer<Renewed>> + Send;

    /// What others want of a node: which of its runs are to be ended, and whether it is to take no new work. Reads only,
    /// little enough to be asked each second.
    fn marks(&self, node: NodeId) -> impl Future<Output = Answer<Marks>> + Send;

    /// The lanes of the runs that a node runs: an edit of an agent moves them. Reads only.
    fn running_lanes(&self, node: NodeId) -> impl Future<Output = Answer<Vec<(RunId, String)>>> + Send;

    /// Marks a node that lives: it is to take no new work, or to take it again. What it has goes on. Crash: marked, or not.
    fn drain(
        &self,
        now: Timestamp,
        node: NodeId,
        draining: bool,
    ) -> impl Future<Output = Answer<Drained>> + Send;

    /// All nodes that were not fenced.
    fn nodes(&self) -> impl Future<Output = Answer<Vec<Node>>> + Send;

    /// Fences a node whose lease is still the one that was seen to lapse, and rescues its runs: each has used up an
    /// attempt; a run without attempts left ends failed, and so does a run that is a suspect for the second time
    /// (`belfry_core::rescue`). `None` where the lease was renewed or the node fenced meanwhile. After a crash the node
    /// is fenced and all its runs are rescued, or neither.
    fn fence(
        &self,
        now: Timestamp,
        node: NodeId,
        lease_seen: Timestamp,
    ) -> impl Future<Output = Answer<Option<Rescued>>> + Send;

    /// Asks the breaker of a run that was planned before whether it may start now: it may have opened since. A run that it lets
    /// through alone is its probe then. Crash: it is, or not.
    fn pass_breaker(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
        run: RunId,
    ) -> impl Future<Output = Answer<Admits>> + Send;

    /// Closes a breaker by hand.
    fn reset_breaker(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
    ) -> impl Future<Output = Answer<bool>> + Send;

    /// Clears what is used of an agent's failure budget, and the back-off of its runs: they may start now. False where
    /// nothing was used. Crash: all of it, or nothing.
    fn reset_budget(&self, now: Timestamp, agent: AgentId) -> impl Future<Output = Answer<bool>> + Send;

    /// Removes what is older than its retention, and runs beyond the number that is kept of a schedule's, at most a batch of
    /// each. Runs are never counted: each knows its place among those of its schedule, and each call walks on over a batch
    /// of them. Never touches what is live, nor any token: a tick that was planned is never planned again. Crash: all of a
    /// call, or nothing of it.
    fn prune(&self, now: Timestamp, retention: &Retention) -> impl Future<Output = Answer<Pruned>> + Send;

    /// A run.
    fn run(&self, run: RunId) -> impl Future<Output = Answer<Option<RunRecord>>> + Send;

    /// Those of these runs that are there, live or ended, in the order asked for, without their prompts and payloads. Reads
    /// only.
    fn runs_by_id(&self, runs: &[RunId]) -> impl Future<Output = Answer<Vec<RunRecord>>> + Send {
        async move {
            let mut found = Vec::with_capacity(runs.len());
            for run in runs {
                found.extend(self.run(*run).await?.map(RunRecord::listed));
            }
            Ok(found)
        }
    }

    /// All live runs, in the order in which they would be claimed, without their prompts and payloads.
    fn live_runs(&self) -> impl Future<Output = Answer<Vec<RunRecord>>> + Send;

    /// Ended runs of a schedule, the last first.
    fn ended_runs(
        &self,
        schedule: ScheduleId,
        limit: u32,
    ) -> impl Future<Output = Answer<Vec<RunRecord>>> + Send;

    /// A schedule by its name, `agent/schedule`.
    fn schedule(&self, name: &str) -> impl Future<Output = Answer<Option<ScheduleRecord>>> + Send;

    /// Schedules in the order of their names, behind a name. Looks at no more of them than it gives, but for those that the
    /// filter leaves out.
    fn schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> impl Future<Output = Answer<Page<ScheduleRecord, String>>> + Send;

    /// Runs, live and ended, the newest id first, behind an id, without their prompts and payloads. Looks at a bounded
    /// number of them; who wants more goes on at the page's `next`.
    fn runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> impl Future<Output = Answer<Page<RunRecord, RunId>>> + Send;

    /// All agents, in the order of their names.
    fn agents(&self) -> impl Future<Output = Answer<Vec<AgentRecord>>> + Send;

    /// All breakers that have counted or changed, by name of agent and command.
    fn breakers(&self) -> impl Future<Output = Answer<Vec<BreakerEntry>>> + Send;

    /// Complete ranges of skips and misses of a schedule, oldest first, that begin after an instant; also those from before it
    /// was removed and put back.
    fn skips(
        &self,
        schedule: ScheduleId,
        after: Option<Timestamp>,
        limit: u32,
    ) -> impl Future<Output = Answer<Vec<SkipRange>>> + Send;

    /// What became of a tick of a schedule, within what is kept. Whether the instant is a tick at all, its definition of
    /// that time tells: see `revision_at`. Looks at what has happened to the schedule since, also before it was removed and
    /// put back, and at nothing else.
    fn tick(&self, schedule: ScheduleId, tick_at: Timestamp)
    -> impl Future<Output = Answer<TickFate>> + Send;

    /// The revision of a schedule at an instant, with its definition when that began.
    fn revision_at(
        &self,
        schedule: ScheduleId,
        at: Timestamp,
    ) -> impl Future<Output = Answer<Option<(i64, ScheduleDefinition)>>> + Send;

    /// A breaker.
    fn breaker(&self, agent: AgentId, command: &str) -> impl Future<Output = Answer<BreakerRecord>> + Send;

    /// How many runs there are.
    fn counts(&self) -> impl Future<Output = Answer<Counts>> + Send;

    /// Waits until there may be work that was not there at the last call: tokens, waiting runs, cancel marks. Only a hint: it
    /// may come without reason, and may be lost where a process dies; who waits looks from time to time anyway. For one
    /// task of a process: two that wait take hints from each other.
    fn changed(&self) -> impl Future<Output = ()> + Send;

    /// Rows of which a part cannot be read, and counts as something that does no harm: a sentence for each, at most
    /// [`crate::UNREADABLE_ROWS_MAX`] for each kind. Of snapshots and the audit only the newest are looked at.
    fn unreadable_rows(&self) -> impl Future<Output = Answer<Vec<String>>> + Send {
        std::future::ready(Ok(Vec::new()))
    }

    /// Those of these runs whose end would wait for a row that another transaction holds. Only a store with locks on rows has
    /// any. Reads only.
    fn held_runs(&self, _runs: &[RunId]) -> impl Future<Output = Answer<HashSet<RunId>>> + Send {
        std::future::ready(Ok(HashSet::new()))
    }

    /// The same for schedules and their plans.
    fn held_schedules(
        &self,
        _schedules: &[ScheduleId],
    ) -> impl Future<Output = Answer<HashSet<ScheduleId>>> + Send {
        std::future::ready(Ok(HashSet::new()))
    }

    /// Notes that a plan or an end is refused in every form, for [`Store::refusals`]. The schedule of such a plan is not due
    /// on this node until [`Store::unreadable`] is asked next.
    /// Crash: it is noted or not.
    fn note_refusal(
        &self,
        now: Timestamp,
        part: RefusedPart,
        reason: &str,
    ) -> impl Future<Output = Answer<()>> + Send {
        let _ = (now, part, reason);
        std::future::ready(Ok(()))
    }

    /// Plans and ends that the store refuses, as far as that could be noted.
    fn refusals(&self) -> impl Future<Output = Answer<Vec<Refusal>>> + Send {
        std::future::ready(Ok(Vec::new()))
    }

    /// Writes something small, so that it is known whether the store takes writes: fails where it cannot, where a table of
    /// it is gone, or where this process may not write to one.
    /// Crash: nothing is lost.
    fn probe(&self) -> impl Future<Output = Answer<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Whether no other process can take over what runs here, for as long as this one lives: it alone serves the store, by a
    /// lock of the file, and the file is the one that was opened.
    fn is_held(&self) -> bool {
        false
    }

    /// Looks for damage and for broken promises among the rows; empty where all is well.
    fn integrity(&self) -> impl Future<Output = Answer<Vec<String>>> + Send;
}
