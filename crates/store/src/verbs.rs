//! Every verb of a store, once: what it takes, what it gives, whether it changes something, and whether its answer wakes those
//! who wait for work. Traits, [`AnyStore`](crate::AnyStore), [`Reader`](crate::Reader) and hints are made from this list.
//!
//! `reads` or `changes`, then the signature; `wakes` says when an answer gives a hint; `else` is what a store does that
//! says nothing else.

/// Gives the verbs of one trait to a macro.
#[doc(hidden)]
#[macro_export]
macro_rules! verbs {
    (store, $then:ident) => { $then! {
        /// What time it is by the store's own clock; none if the store has no clock.
        reads fn clock(&self) -> Option<Timestamp>, else { Ok(None) };

        /// Replaces the agents and schedules of a source by these. Timing that changed starts a new revision: no tick
        /// before `now` fires, none fires again. An agent or schedule that is no longer there is retired and its
        /// pending runs end; history stays. If it comes back while a run of it lives, it is the same agent, schedule
        /// and session as before, else a new one. Schedules of the API stay, but go with their agent. After a crash
        /// all of the source is stored, or nothing of it.
        changes fn apply(
            &self,
            now: Timestamp,
            source: &str,
            digest: &str,
            agents: &[AgentSpec],
        ) -> Applied, wakes |_| true;

        /// The digest that was applied last for a source.
        reads fn source_digest(&self, source: &str) -> Option<String>;

        /// Schedules of a source that went with their run, as `delete_after_run` asks, by `agent/schedule`. `apply`
        /// leaves them out while their definition is the same.
        reads fn spent(&self, source: &str) -> BTreeMap<String, ScheduleDefinition>;

        /// Creates or replaces a schedule of the API, if the stored definition still equals `expect`: of several
        /// edits of one reading only the first succeeds. Timing that changed starts a new revision, as for `apply`. A
        /// schedule that a file owns is left alone. After a crash the whole edit is stored, or nothing of it.
        changes fn put_schedule(
            &self,
            now: Timestamp,
            agent: &str,
            name: &str,
            definition: &ScheduleDefinition,
            expect: &Expect,
        ) -> Put, wakes Put::is_news;

        /// Removes a schedule of the API, if the stored definition still equals `expect`. Its waiting runs end
        /// cancelled, running ones go on, history stays. After a crash it is gone with all its waiting runs, or as it
        /// was.
        changes fn remove_schedule(
            &self,
            now: Timestamp,
            schedule: ScheduleId,
            expect: &Expect,
        ) -> Removed, wakes |_| true;

        /// Creates or replaces an agent of the API with its schedules; with `whole` its other schedules of the API
        /// are removed. An agent that a file owns is left alone. After a crash the agent is stored with all its
        /// schedules, or nothing of it.
        changes fn put_agent(
            &self,
            now: Timestamp,
            agent: &AgentSpec,
            whole: bool,
            expect: &Expect<AgentDefinition>,
        ) -> PutAgent, wakes PutAgent::is_news;

        /// Removes an agent of the API with all its schedules. Their waiting runs end cancelled, running ones go on,
        /// history stays. After a crash all of that is gone, or nothing.
        changes fn remove_agent(
            &self,
            now: Timestamp,
            agent: &str,
            expect: &Expect<AgentDefinition>,
        ) -> Removed, wakes |_| true;

        /// Ids of schedules, by their names, `agent/schedule`, in the order asked for. At a cost that does not depend
        /// on their runs.
        reads fn schedule_ids(&self, names: &[&str]) -> Vec<Option<ScheduleId>>;

        /// What schedules and their agents are now, also removed ones, in the order asked for.
        reads fn definitions(&self, schedules: &[ScheduleId]) -> Vec<Option<Definitions>>;

        /// Schedules that this version cannot read, in the order of their ids: because a newer version wrote them or
        /// their agent, or because a verb has found them broken. `due` and `claim` leave these alone.
        reads fn unreadable(&self) -> Vec<UnreadableSchedule>;

        /// Pauses a schedule: it is unarmed, its runs go on. A pause until an instant ends by itself: then its token
        /// is due, and planning it is as if it had been resumed at that instant, however late. Another pause takes
        /// the place of the first. `false` where there is none such or it is paused like that already. After a crash:
        /// paused, with what ends it, or not.
        changes fn pause(
            &self,
            now: Timestamp,
            schedule: ScheduleId,
            reason: Option<&str>,
            until: Option<Timestamp>,
        ) -> bool, wakes |is_news| *is_news;

        /// Ends a pause, and says how many ticks it has recorded as skipped; `None` where there was none. With
        /// [`Resume::FromNow`] also a schedule that waits for the clock goes on. After a crash it is resumed and
        /// recorded, or neither.
        changes fn resume(
            &self,
            now: Timestamp,
            schedule: ScheduleId,
            how: Resume,
        ) -> Option<u64>, wakes Option::is_some;

        /// Schedules whose token is due, the earliest first, without locking them; behind a mark where there is one,
        /// so that a batch can be read while the one before it is committed.
        reads fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Vec<Due>;

        /// When the earliest token is due.
        reads fn next_due(&self) -> Option<Timestamp>;

        /// Commits plans whose token is still there and unchanged, and for each says whether it was. A token that is
        /// gone means that somebody else has planned the tick. A plan that makes runs in a lane where `queue_limit`
        /// runs wait already, or where others have waited longer for a place, is deferred: its token leaves the due
        /// index. Whatever verb makes room there arms those that wait, the oldest first, as many as there is room
        /// for. After a crash: of each plan everything (token consumed, runs, skips, next token), or nothing.
        changes fn commit(&self, now: Timestamp, commits: &[Commit]) -> Vec<Committed>;

        /// Makes runs outside a plan, in order. They move no schedule, but a plan that did not know of them is not
        /// committed. After a crash: runs that were answered for exist, or none of the call.
        changes fn enqueue_many(
            &self,
            now: Timestamp,
            requests: &[Enqueue],
        ) -> Vec<Enqueued>, wakes |made| made.contains(&Enqueued::Made);

        /// Makes one run outside a plan, as [`Store::enqueue_many`] does.
        changes fn enqueue(&self, now: Timestamp, request: &Enqueue) -> Enqueued, else {
            let mut answers = self.enqueue_many(now, std::slice::from_ref(request)).await?;
            answers.pop().ok_or_else(|| Error::unexpected("a request without an answer"))
        };

        /// Takes a message into a session, which is made where it is new: it opens a run, joins one that is open, or
        /// is refused. Those that it drops or interrupts end with it. After a crash: a message that was answered for
        /// is in its run.
        changes fn send(
            &self,
            now: Timestamp,
            message: &NewMessage,
        ) -> Sent, wakes |sent| matches!(sent, Sent::Taken { .. });

        /// Stops, resets or measures a session, which is made where it is new. `None` where there is no such
        /// schedule. After a crash: all of it, or nothing.
        changes fn session(
            &self,
            now: Timestamp,
            schedule: ScheduleId,
            key: &str,
            verb: SessionVerb,
        ) -> Option<SessionDone>, wakes Option::is_some;

        /// Sessions in the order in which they were made, behind one of them.
        reads fn sessions(&self, filter: &SessionFilter, after: Option<i64>, limit: u32) -> Page<SessionRecord, i64>;

        /// Replaces the lanes of the files by these. After a crash all of them are stored, or none.
        changes fn put_lanes(&self, now: Timestamp, lanes: &[(String, LaneSettings)]) -> (), wakes |()| true;

        /// Overrides what the files say of a lane, or removes the override. Lowering a limit ends nothing. After a
        /// crash either the old or the new settings hold.
        changes fn set_lane(&self, now: Timestamp, lane: &str, settings: Option<LaneSettings>) -> (), wakes |()| true;

        /// All lanes that were made or that runs are in, in the order of their names.
        reads fn lanes(&self, now: Timestamp) -> Vec<LaneRecord>;

        /// What lanes may hold, without looking at what they do: little enough to be asked each second. Lanes that
        /// nobody made are among them while a run is ready there, as an edit may leave it.
        reads fn lane_settings(&self) -> Vec<LaneRecord>;

        /// Ends all runs that wait in a lane, and gives them. After a crash some of them have ended: repeat it.
        changes fn clear_lane(&self, now: Timestamp, lane: &str) -> Vec<RunId>, wakes |ended| !ended.is_empty();

        /// Starts pending runs under a node as far as its slots, the gates and its labels allow, in order: priority,
        /// `not_before`, id. Of rescued runs it starts at most one, see [`Claim::rescue`]. Each start is counted and
        /// fenced before it is answered. After a crash they are claimed under the node's lease, or still pending.
        changes fn claim(&self, now: Timestamp, claim: &Claim) -> Vec<Claimed>;

        /// When the next run that is not due yet may start, of those that wait for nothing else.
        reads fn next_start(&self, now: Timestamp) -> Option<Timestamp>;

        /// Ends attempts. A stale epoch changes nothing. The end of a run, its schedule's last result and next token,
        /// the breaker, the budget and the release of waiting runs are one. After a crash: all of a finish, or
        /// nothing of it; repeat it.
        changes fn finish(
            &self,
            now: Timestamp,
            finishes: &[Finish],
        ) -> Vec<Finished>, wakes |ends| ends.iter().any(|end| *end != Finished::Stale);

        /// Cancels a run: one that waits ends now, one that runs is marked for its node. After a crash: cancelled or
        /// marked, or not.
        changes fn cancel(
            &self,
            now: Timestamp,
            run: RunId,
            reason: Reason,
        ) -> Cancelled, wakes |done| matches!(done, Cancelled::Ended | Cancelled::Told(_));

        /// Gives runs back that a node has claimed but never started; the attempt does not count. Says which of them
        /// were the node's, and what became of each: pending, or cancelled if that was asked for. After a crash:
        /// given back, or still under the node's lease.
        changes fn give_back(
            &self,
            now: Timestamp,
            node: NodeId,
            runs: &[(RunId, Epoch)],
        ) -> Vec<(RunId, RunState)>, wakes |given| !given.is_empty();

        /// Keeps output of an attempt; `false` where its claim no longer holds, and nothing was kept. A piece that is
        /// there already stays as it is. After a crash: all pieces, or none: repeat it.
        changes fn append_output(&self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> bool;

        /// Output of a run behind a place, in order: pieces until there are `limit_bytes` or more, at least one where
        /// there is one.
        reads fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Vec<OutputChunk>;

        /// Makes a node known, with its first lease. A node that was fenced and joins again gives the id that it had:
        /// what was last said of that one, to take new work or none, holds for it instead of its own `draining`.
        changes fn join(&self, node: &Node, left: Option<NodeId>) -> ();

        /// Renews a node's lease, unless it was fenced. The new one ends earlier if the clock was set back since.
        /// After a crash the old or the new one holds.
        changes fn renew(&self, node: NodeId, lease_until: Timestamp) -> Renewed;

        /// What others want of a node: which of its runs are to be ended, and whether it is to take no new work.
        /// Little enough to be asked each second.
        reads fn marks(&self, node: NodeId) -> Marks;

        /// The lanes of the runs that a node runs: an edit of an agent moves them.
        reads fn running_lanes(&self, node: NodeId) -> Vec<(RunId, String)>;

        /// Marks a node that lives: it is to take no new work, or to take it again. What it has goes on. After a
        /// crash: marked, or not.
        changes fn drain(
            &self,
            now: Timestamp,
            node: NodeId,
            draining: bool,
        ) -> Drained, wakes |done| matches!(done, Drained::Marked { is_news: true });

        /// All nodes that were not fenced.
        reads fn nodes(&self) -> Vec<Node>;

        /// Fences a node whose lease is still the one that was seen to lapse, and rescues its runs: each has used up
        /// an attempt; a run without attempts left ends failed, and so does a run that is a suspect for the second
        /// time (`belfry_core::rescue`). `None` where the lease was renewed or the node fenced meanwhile. After a
        /// crash the node is fenced and all its runs are rescued, or neither.
        changes fn fence(
            &self,
            now: Timestamp,
            node: NodeId,
            lease_seen: Timestamp,
        ) -> Option<Rescued>, wakes Option::is_some;

        /// Asks the breaker of a run that was planned before whether it may start now: it may have opened since. A
        /// run that it lets through alone is its probe then. After a crash: it is, or not.
        changes fn pass_breaker(&self, now: Timestamp, agent: AgentId, command: &str, run: RunId) -> Admits;

        /// Closes a breaker by hand.
        changes fn reset_breaker(&self, now: Timestamp, agent: AgentId, command: &str) -> bool;

        /// Clears what is used of an agent's failure budget, and the back-off of its runs: they may start now. False
        /// where nothing was used. After a crash: all of it, or nothing.
        changes fn reset_budget(&self, now: Timestamp, agent: AgentId) -> bool, wakes |is_used| *is_used;

        /// Removes what is older than its retention, and runs beyond the number that is kept of a schedule's, at most
        /// a batch of each. Runs are never counted: each knows its place among those of its schedule, and each call
        /// walks on over a batch of them. Never touches what is live, nor any token: a tick that was planned is never
        /// planned again. After a crash: all of a call, or nothing of it.
        changes fn prune(&self, now: Timestamp, retention: &Retention) -> Pruned;

        /// A run.
        reads fn run(&self, run: RunId) -> Option<RunRecord>;

        /// Those of these runs that are there, live or ended, in the order asked for, without their prompts and
        /// payloads.
        reads fn runs_by_id(&self, runs: &[RunId]) -> Vec<RunRecord>, else {
            let mut found = Vec::with_capacity(runs.len());
            for run in runs {
                found.extend(self.run(*run).await?.map(RunRecord::listed));
            }
            Ok(found)
        };

        /// All live runs, in the order in which they would be claimed, without their prompts and payloads.
        reads fn live_runs(&self) -> Vec<RunRecord>;

        /// Ended runs of a schedule, the last first.
        reads fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Vec<RunRecord>;

        /// A schedule by its name, `agent/schedule`.
        reads fn schedule(&self, name: &str) -> Option<ScheduleRecord>;

        /// Schedules in the order of their names, behind a name. Looks at no more of them than it gives, but for
        /// those that the filter leaves out.
        reads fn schedules(
            &self,
            filter: &ScheduleFilter,
            after: Option<&str>,
            limit: u32,
        ) -> Page<ScheduleRecord, String>;

        /// Runs, live and ended, the newest id first, behind an id, without their prompts and payloads. Looks at a
        /// bounded number of them; who wants more goes on at the page's `next`.
        reads fn runs(&self, filter: &RunFilter, after: Option<RunId>, limit: u32) -> Page<RunRecord, RunId>;

        /// All agents, in the order of their names.
        reads fn agents(&self) -> Vec<AgentRecord>;

        /// All breakers that have counted or changed, by name of agent and command.
        reads fn breakers(&self) -> Vec<BreakerEntry>;

        /// Complete ranges of skips and misses of a schedule, oldest first, that begin after an instant; also those
        /// from before it was removed and put back.
        reads fn skips(&self, schedule: ScheduleId, after: Option<Timestamp>, limit: u32) -> Vec<SkipRange>;

        /// What became of a tick of a schedule, within what is kept. Whether the instant is a tick at all, its
        /// definition of that time tells: see `revision_at`. Looks at what has happened to the schedule since, also
        /// before it was removed and put back, and at nothing else.
        reads fn tick(&self, schedule: ScheduleId, tick_at: Timestamp) -> TickFate;

        /// The revision of a schedule at an instant, with its definition when that began.
        reads fn revision_at(&self, schedule: ScheduleId, at: Timestamp) -> Option<(i64, ScheduleDefinition)>;

        /// A breaker.
        reads fn breaker(&self, agent: AgentId, command: &str) -> BreakerRecord;

        /// Which of these breakers, by agent and command, do not let everybody pass, in the order asked for.
        reads fn tripped(&self, breakers: &[(AgentId, String)]) -> Vec<bool>;

        /// How many runs there are.
        reads fn counts(&self) -> Counts;

        /// Rows of which a part cannot be read, and counts as something that does no harm: a sentence for each, at
        /// most [`crate::UNREADABLE_ROWS_MAX`] for each kind. Of snapshots and the audit only the newest are looked
        /// at.
        reads fn unreadable_rows(&self) -> Vec<String>, else { Ok(Vec::new()) };

        /// Those of these runs whose end would wait for a row that another transaction holds. Only a store with locks
        /// on rows has any.
        reads fn held_runs(&self, runs: &[RunId]) -> HashSet<RunId>, else { Ok(HashSet::new()) };

        /// The same for schedules and their plans.
        reads fn held_schedules(&self, schedules: &[ScheduleId]) -> HashSet<ScheduleId>, else { Ok(HashSet::new()) };

        /// Notes that a plan or an end is refused in every form, for [`Store::refusals`]. The schedule of such a plan
        /// is not due on this node until [`Store::unreadable`] is asked next. After a crash: it is noted or not.
        changes fn note_refusal(&self, now: Timestamp, part: RefusedPart, reason: &str) -> (), else { Ok(()) };

        /// Plans and ends that the store refuses, as far as that could be noted.
        reads fn refusals(&self) -> Vec<Refusal>, else { Ok(Vec::new()) };

        /// Writes something small, so that it is known whether the store takes writes: fails where it cannot, where a
        /// table of it is gone, or where this process may not write to one. After a crash: nothing is lost.
        reads fn probe(&self) -> (), else { Ok(()) };

        /// Looks for damage and for broken promises among the rows; empty where all is well.
        reads fn integrity(&self) -> Vec<String>;
    } };
    (hooks, $then:ident) => { $then! {
        /// Makes a run if the rules of its schedule allow one now: what they look at cannot change in between. With
        /// `if_running: cancel` what lives in its overlap scope is cancelled with it. After a crash a run that was
        /// answered for exists, with the probe of a breaker if it is one, and with all keys of the request; what it
        /// cancels is cancelled.  A repeat that only a key tells also stores its signed content, for the first run:
        /// that content then makes no run of its own when it is sent without the key. A repeat by its signed content
        /// stores no key, because keys are not signed.
        changes fn knock(
            &self,
            now: Timestamp,
            knock: &Knock,
        ) -> Knocked, wakes |done| matches!(done, Knocked::Made { .. });
    } };
    (watch, $then:ident) => { $then! {
        /// Keeps a snapshot, and that its node and the runs in it lived then. `false` where the node is unknown or
        /// fenced, and nothing was kept. After a crash: both, or neither.
        changes fn beat(&self, snapshot: &Snapshot) -> bool;

        /// Snapshots, the last first, before a number.
        reads fn snapshots(&self, filter: &SnapshotFilter, before: Option<i64>, limit: u32) -> Page<SnapshotRow, i64>;

        /// Removes snapshots that were taken before an instant, and nodes that were fenced and not heard of since
        /// another, at most a batch of each; none keeps them all. Says how many went. After a crash: all of a call,
        /// or nothing of it.
        changes fn prune_beats(
            &self,
            snapshots_before: Option<Timestamp>,
            nodes_before: Option<Timestamp>,
            batch: u32,
        ) -> u32;
    } };
    (access, $then:ident) => { $then! {
        /// Keeps a token. Browser logins that have ended by its `created_at` are removed first: they would add up.
        /// After a crash either both have happened or neither.
        changes fn add_token(&self, token: &TokenRecord) -> AddedToken;

        /// All tokens, good or not, in the order of their ids.
        reads fn tokens(&self) -> Vec<TokenRecord>;

        /// Makes a token good no longer; `false` where there is none, or it was revoked before. After a crash:
        /// revoked, or not.
        changes fn revoke_token(&self, now: Timestamp, id: &str) -> bool;

        /// Remembers the key of a request that makes something else than a run, until it expires; `false` where it
        /// was used with another body. After a crash: remembered, or not.
        changes fn use_key(&self, now: Timestamp, key: &Key) -> bool;

        /// Records what is about to be done, and gives the row's number. After a crash: recorded, or not.
        changes fn begin_audit(&self, entry: &AuditEntry) -> i64;

        /// Completes a row by how it was answered, or takes it away where nothing was done. A crash may undo this,
        /// and this alone: then the row says that nobody knows.
        changes fn end_audit(&self, number: i64, status: Option<u16>) -> ();

        /// What was done, the last first, before a row.
        reads fn audits(&self, before: Option<i64>, limit: u32) -> Page<AuditRow, i64>;

        /// Removes what was done before an instant, and tokens that were good no longer by then, at most a batch of
        /// each; says how many went. After a crash: all of a call, or nothing of it.
        changes fn prune_access(&self, before: Timestamp, batch: u32) -> u32;
    } };
}
