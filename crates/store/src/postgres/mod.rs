//! A store in PostgreSQL, for many machines.
//!
//! Every verb is one short transaction under READ COMMITTED. Limits hold because a gate's row is locked first and what
//! runs behind it is counted in the next statement, which has a new snapshot; a run is parked only under that lock and
//! released under the same. Locks are taken in one order: sessions, agents, timers, running runs, states of schedules,
//! gates, waiting runs, each sorted by id. What a batch of claims or ends does in one round trip stands in `migrations/0001_functions.sql`.
//! Start reading at `claim.rs`.

/// Runs a verb in a transaction, and again where it lost against another; never longer than its deadline.
macro_rules! verb {
    ($store:expr, $part:expr, $within:expr, $begin:ident, |$tx:ident| $body:expr) => {{
        let committing = AtomicBool::new(false);
        let work = async {
            let mut tries = 0;
            loop {
                let mut $tx = $store.pool.$begin($part, &committing).await?;
                let outcome = $body;
                if let Some(answer) = $tx.close(outcome, &mut tries).await? {
                    if $store.pool.armed.swap(false, Ordering::SeqCst) {
                        $store.nudge();
                    }
                    break Ok(answer);
                }
            }
        };
        match tokio::time::timeout($within, work).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::Unavailable {
                detail: format!("no answer within {} s", $within.as_secs()),
                ambiguous: committing.load(Ordering::SeqCst),
            }),
        }
    }};
}

/// One transaction, on a connection for requests unless another part of the pool is named.
macro_rules! transact {
    ($store:expr, |$tx:ident| $body:expr) => {
        transact!($store, Requests, |$tx| $body)
    };
    ($store:expr, $part:ident, |$tx:ident| $body:expr) => {{
        let part = $crate::postgres::connection::Part::$part;
        verb!($store, part, part.deadline(), transaction, |$tx| $body)
    }};
}

/// One transaction that somebody asks for, and that is about one schedule, run or agent. It waits for no row for long: many that
/// wait would take all connections for requests.
macro_rules! request {
    ($store:expr, |$tx:ident| $body:expr) => {
        transact!($store, |$tx| {
            $tx.passes_locks();
            $body
        })
    };
}

/// Statements that only read, each for itself, on a connection for requests unless another part of the pool is named.
macro_rules! look {
    ($store:expr, |$tx:ident| $body:expr) => {
        look!($store, Requests, |$tx| $body)
    };
    ($store:expr, $part:ident, |$tx:ident| $body:expr) => {{
        let part = $crate::postgres::connection::Part::$part;
        verb!($store, part, part.deadline(), statements, |$tx| $body)
    }};
}

mod books;
mod claim;
mod claim_one;
mod connection;
mod defer;
mod edit;
mod enqueue;
mod finish;
mod held;
mod hook;
mod lane;
mod list;
mod moves;
mod node;
mod notify;
mod output;
mod overlap;
mod pause;
mod plan;
mod read;
mod refusal;
mod relay;
mod rows;
mod schema;
mod session;
mod source;
mod tls;
mod token;
mod unread;
mod watch;
mod why;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use belfry_core::breaker::Admits;
use belfry_core::definition::{Scope, Unreadable};
use belfry_core::edit::Resume;
use belfry_core::text::clean;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, Schedule, ScheduleDefinition,
    ScheduleId, SkipRange, Token,
};
use belfry_time::Timestamp;
use parking_lot::Mutex;
use uuid::Uuid;

use self::connection::{Fault, Part, Pool, Tx, error_of};
use self::defer::look_again;
use self::notify::Hints;
use crate::cached::Cached;
use crate::clock::LastClaim;
use crate::sabotage::Switch;
use crate::sessions::*;
use crate::shapes::*;
use crate::stats::Stats;
use crate::storable::{all_storable, check_name, check_names, storable};
use crate::store::{Answer, Store, wakes};
use crate::unread::{Unread, set_aside};
use crate::views::*;
use crate::{Error, hint};

/// A verb that takes longer has failed, whatever the server does.
const DEADLINE: Duration = Duration::from_secs(30);
/// A source may hold a million schedules, and whoever checks everything reads everything.
const LONG_DEADLINE: Duration = Duration::from_secs(600);

/// A store in a PostgreSQL database, shared by any number of nodes.
pub struct Postgres {
    pool: Pool,
    cache: Mutex<Cache>,
    /// Whether the last claim met runs behind gates.
    gates_in_the_way: AtomicBool,
    last_claim: LastClaim,
    /// Whether the last plans met lanes with a limit on what waits.
    queues_limited: AtomicBool,
    hints: Box<Hints>,
    /// Schedules that this version cannot read.
    unread: Unread,
    /// Breaks it on purpose.
    pub sabotage: Switch,
}

/// What never changes once it was read: definitions by edition, and the numbers of queues and gates.
#[derive(Default)]
struct Cache {
    schedules: Cached<(ScheduleId, i64), Arc<Cold>>,
    agents: Cached<(AgentId, i64), Arc<AgentDefinition>>,
    queues: Cached<Queue, i64>,
    gates: Cached<Gate, i64>,
}

/// The part of a schedule that only an edit changes.
struct Cold {
    name: Arc<str>,
    compiled: Result<Arc<Schedule>, Arc<str>>,
    /// The definition, where it can be read but does not compile.
    uncompiled: Option<Arc<belfry_core::ScheduleDefinition>>,
    overlap: Scope,
    command: String,
    /// Why this version cannot read it.
    unreadable: Option<Unreadable>,
}

/// A queue, by what it takes to serve it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Queue {
    lane: String,
    needs: Vec<String>,
    gated: bool,
}

/// A gate, by what it limits: kind, agent or schedule, command.
type Gate = (i16, i64, String);

impl Postgres {
    /// Connects, and brings the schema up to date. Any number of nodes may do so at once on an empty database.
    ///
    /// `url` is `postgres://user@host/database` or `host=/folder/of/a/socket user=… dbname=…`.
    pub async fn open(url: &str) -> Result<Postgres, Error> {
        let pool = Pool::new(url)?;
        let client = pool.connect().await.map_err(|error| error_of(error.into(), &pool.place))?;
        schema::migrate(&client, &pool.place).await?;
        Ok(Postgres {
            pool,
            cache: Mutex::default(),
            gates_in_the_way: AtomicBool::new(false),
            last_claim: LastClaim::default(),
            queues_limited: AtomicBool::new(false),
            hints: Box::default(),
            unread: Unread::default(),
            sabotage: Switch::default(),
        })
    }
}

impl Postgres {
    pub(crate) async fn stats(&self) -> Answer<Stats> {
        look!(self, |tx| read::stats(&mut tx).await)
    }

    /// Ends the connections of everybody else to this database.
    pub(crate) async fn disturb(&self) -> Result<(), Error> {
        look!(self, |tx| read::disturb(&mut tx).await)
    }

    /// Clears the heads of the queues of what is dead: a node calls this every few seconds. Each claim and each tick leaves
    /// a dead row where the next one begins to look, and the server's own housekeeping comes once a minute. Any number
    /// of nodes may do so at once; where little is dead nothing is done.
    pub async fn tend(&self) -> Result<(), Error> {
        look!(self, |tx| read::tend(&mut tx).await)
    }
}

/// Replaces or removes a schedule's token. Whoever planned on the old one has lost.
async fn set_token(tx: &mut Tx<'_>, schedule: ScheduleId, token: Option<Token>) -> Result<(), Fault> {
    match token {
        Some(token) => set_tokens(tx, &[(schedule, token)]).await,
        None => clear_tokens(tx, &[schedule]).await.map(drop),
    }
}

async fn set_tokens(tx: &mut Tx<'_>, tokens: &[(ScheduleId, Token)]) -> Result<(), Fault> {
    if tokens.is_empty() {
        return Ok(());
    }
    let due_at: Vec<_> = tokens.iter().map(|(_, token)| token.due_at).collect();
    let schedules: Vec<_> = tokens.iter().map(|(schedule, _)| *schedule).collect();
    let kinds: Vec<_> = tokens.iter().map(|(_, token)| token.kind.code()).collect();
    let tick_at: Vec<_> = tokens.iter().map(|(_, token)| token.tick_at).collect();
    let sql = "insert into timers (due_at, schedule_id, kind, tick_at, version) \
               select u.due_at, u.schedule_id, u.kind, u.tick_at, nextval('numbers') \
               from unnest($1::timestamptz[], $2::bigint[], $3::smallint[], $4::timestamptz[]) \
               as u (due_at, schedule_id, kind, tick_at) \
               on conflict (schedule_id) do update set due_at = excluded.due_at, kind = excluded.kind, \
               tick_at = excluded.tick_at, version = excluded.version";
    tx.execute(sql, &[&due_at, &schedules, &kinds, &tick_at]).await?;
    Ok(())
}

/// Removes the tokens of schedules, and gives them. A plan that is being committed may put another in its place while we
/// wait for it, which only the next statement sees.
async fn clear_tokens(
    tx: &mut Tx<'_>,
    schedules: &[ScheduleId],
) -> Result<HashMap<ScheduleId, Token>, Fault> {
    let mut tokens = HashMap::new();
    loop {
        let sql = "delete from timers where schedule_id = any($1) \
                   returning schedule_id, kind, tick_at as token_tick_at, due_at";
        for row in tx.query(sql, &[&schedules]).await? {
            if let Some(token) = rows::token(&row)? {
                tokens.insert(rows::get(&row, "schedule_id")?, token);
            }
        }
        let sql = "select 1 from timers where schedule_id = any($1) limit 1";
        if tx.query(sql, &[&schedules]).await?.is_empty() {
            return Ok(tokens);
        }
    }
}

/// Records ranges of skips that are complete.
async fn insert_skips(tx: &mut Tx<'_>, skips: &[(ScheduleId, SkipRange)]) -> Result<(), Fault> {
    if skips.is_empty() {
        return Ok(());
    }
    let schedules: Vec<_> = skips.iter().map(|(schedule, _)| *schedule).collect();
    let reasons: Vec<_> = skips.iter().map(|(_, skip)| skip.reason.code()).collect();
    let from: Vec<_> = skips.iter().map(|(_, skip)| skip.from).collect();
    let to: Vec<_> = skips.iter().map(|(_, skip)| skip.to).collect();
    let counts: Vec<_> = skips.iter().map(|(_, skip)| rows::big(skip.count)).collect();
    let sql = "insert into skips (id, schedule_id, reason, from_at, to_at, count) \
               select nextval('numbers'), u.* \
               from unnest($1::bigint[], $2::smallint[], $3::timestamptz[], $4::timestamptz[], $5::bigint[]) as u";
    tx.execute(sql, &[&schedules, &reasons, &from, &to, &counts]).await?;
    Ok(())
}

impl Postgres {
    /// Where a test can hold its verbs.
    #[cfg(feature = "testing")]
    pub fn pauses(&self) -> &crate::pauses::Pauses {
        &self.pool.pauses
    }

    /// Where a test can ask how its statements are done.
    #[cfg(feature = "testing")]
    pub fn explained(&self) -> &crate::pauses::Explained {
        &self.pool.explained
    }
}

impl Store for Postgres {
    async fn clock(&self) -> Answer<Option<Timestamp>> {
        look!(self, Lease, |tx| read::clock(&mut tx).await).map(Some)
    }

    async fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Answer<Applied> {
        check_names(agents)?;
        let specs = source::compile_all(agents);
        let answer = verb!(self, Part::Requests, LONG_DEADLINE, transaction, |tx| self
            .apply_in(&mut tx, now, source, digest, &specs)
            .await);
        self.tell(answer, wakes::apply).await
    }

    async fn source_digest(&self, source: &str) -> Answer<Option<String>> {
        look!(self, |tx| source::digest(&mut tx, source).await)
    }

    async fn spent(&self, source: &str) -> Answer<BTreeMap<String, ScheduleDefinition>> {
        look!(self, |tx| source::spent(&mut tx, source).await)
    }

    async fn put_schedule(
        &self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Answer<Put> {
        check_name(&format!("agent {agent}: schedule"), name)?;
        let spec = [AgentSpec {
            name: agent.to_owned(),
            definition: AgentDefinition::default(),
            schedules: vec![(name.to_owned(), definition.clone())],
        }];
        let specs = source::compile_all(&spec);
        let answer = transact!(self, |tx| self.put_by_api(&mut tx, now, &specs[0], expect).await);
        self.tell(answer, wakes::put_schedule).await
    }

    async fn remove_schedule(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        expect: &Expect,
    ) -> Answer<Removed> {
        let answer = transact!(self, |tx| self.remove_by_api(&mut tx, now, schedule, expect).await);
        self.tell(answer, wakes::remove_schedule).await
    }

    async fn put_agent(
        &self,
        now: Timestamp,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<PutAgent> {
        check_names(std::slice::from_ref(agent))?;
        let specs = source::compile_all(std::slice::from_ref(agent));
        let answer =
            transact!(self, |tx| self.put_agent_by_api(&mut tx, now, &specs[0], whole, expect).await);
        self.tell(answer, wakes::put_agent).await
    }

    async fn remove_agent(
        &self,
        now: Timestamp,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<Removed> {
        let answer = transact!(self, |tx| self.remove_agent_by_api(&mut tx, now, agent, expect).await);
        self.tell(answer, wakes::remove_agent).await
    }

    async fn schedule_ids(&self, names: &[&str]) -> Answer<Vec<Option<ScheduleId>>> {
        look!(self, |tx| self.ids_of(&mut tx, names).await)
    }

    async fn definitions(&self, schedules: &[ScheduleId]) -> Answer<Vec<Option<Definitions>>> {
        if schedules.is_empty() {
            return Ok(Vec::new());
        }
        look!(self, Work, |tx| self.definitions_in(&mut tx, schedules).await)
    }

    async fn unreadable(&self) -> Answer<Vec<UnreadableSchedule>> {
        look!(self, Work, |tx| self.find_unreadable(&mut tx).await)
    }

    async fn pause(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Answer<bool> {
        let reason = reason.map(clean);
        let answer =
            request!(self, |tx| pause::pause(&mut tx, now, schedule, reason.as_deref(), until).await);
        self.tell(answer, wakes::pause).await
    }

    async fn resume(&self, now: Timestamp, schedule: ScheduleId, how: Resume) -> Answer<Option<u64>> {
        let answer = request!(self, |tx| pause::resume(&mut tx, now, schedule, how).await);
        self.tell(answer, wakes::resume).await
    }

    async fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Answer<Vec<Due>> {
        look!(self, Work, |tx| self.due_in(&mut tx, now, after, limit).await)
    }

    async fn next_due(&self) -> Answer<Option<Timestamp>> {
        look!(self, Work, |tx| plan::next_due(&mut tx, &self.unread.not_awaited()).await)
    }

    async fn commit(&self, now: Timestamp, commits: &[Commit]) -> Answer<Vec<Committed>> {
        if commits.is_empty() {
            return Ok(Vec::new());
        }
        let commits = &*all_storable(commits);
        let runs: Vec<&NewRun> = commits.iter().flat_map(|commit| &commit.runs).collect();
        let places = look!(self, Work, |tx| self.places(&mut tx, &runs).await)?;
        let answer = self.commit_or_defer(now, commits, &places).await;
        self.last_claim.shown(now);
        let stored = self.unread.stored(hint::held(commits, &answer));
        if !stored.is_empty() {
            // If this fails, the note goes when the next tick is planned.
            let _ = transact!(self, Work, |tx| refusal::forget(&mut tx, &stored).await);
        }
        self.hint(answer, |committed| hint::made_runs(commits, committed))
    }

    async fn enqueue_many(&self, now: Timestamp, requests: &[Enqueue]) -> Answer<Vec<Enqueued>> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let requests = &*all_storable(requests);
        let runs: Vec<&NewRun> = requests.iter().map(|request| &request.run).collect();
        let places = look!(self, |tx| self.places(&mut tx, &runs).await)?;
        let new_scopes = look!(self, |tx| enqueue::new_scopes(&mut tx, &runs).await)?;
        let answers =
            transact!(self, |tx| self.enqueue_in(&mut tx, now, requests, (&places, &new_scopes)).await);
        self.last_claim.shown(now);
        self.tell(answers, wakes::enqueue_many).await
    }

    async fn send(&self, now: Timestamp, message: &NewMessage) -> Answer<Sent> {
        let message = &*storable(message);
        let places = look!(self, |tx| self.places(&mut tx, &[&message.run]).await)?;
        let answer = transact!(self, |tx| self.send_in(&mut tx, now, message, &places).await);
        self.last_claim.shown(now);
        self.tell(answer, wakes::send).await
    }

    async fn session(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Answer<Option<SessionDone>> {
        let key = &*clean(key);
        let answer = transact!(self, |tx| self.session_in(&mut tx, now, schedule, key, verb).await);
        self.tell(answer, wakes::session).await
    }

    async fn sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SessionRecord, i64>> {
        look!(self, |tx| session::sessions(&mut tx, filter, after, limit).await)
    }

    async fn put_lanes(&self, _now: Timestamp, lanes: &[(String, LaneSettings)]) -> Answer<()> {
        let answer = transact!(self, |tx| lane::put_lanes(&mut tx, lanes).await);
        self.tell(answer, wakes::put_lanes).await
    }

    async fn set_lane(&self, _now: Timestamp, lane: &str, settings: Option<LaneSettings>) -> Answer<()> {
        let answer = transact!(self, |tx| lane::set_lane(&mut tx, lane, settings).await);
        self.tell(answer, wakes::set_lane).await
    }

    async fn lanes(&self, now: Timestamp) -> Answer<Vec<LaneRecord>> {
        look!(self, |tx| lane::lanes(&mut tx, now).await)
    }

    async fn lane_settings(&self) -> Answer<Vec<LaneRecord>> {
        look!(self, Work, |tx| lane::lane_settings(&mut tx).await)
    }

    async fn next_start(&self, now: Timestamp) -> Answer<Option<Timestamp>> {
        look!(self, Work, |tx| claim::next_start(&mut tx, now).await)
    }

    async fn clear_lane(&self, now: Timestamp, lane: &str) -> Answer<Vec<RunId>> {
        // What comes meanwhile is left alone, so that clearing a busy lane comes to an end.
        let last = look!(self, |tx| lane::last_waiting(&mut tx, lane).await)?;
        let (mut cleared, mut after) = (Vec::new(), last.map(|_| Uuid::nil()));
        while let (Some(behind), Some(last)) = (after, last) {
            let range = (behind, last);
            let (ended, next) = transact!(self, |tx| self.clear_some(&mut tx, now, lane, range).await)?;
            cleared.extend(ended);
            after = next;
        }
        self.tell(Ok(cleared), wakes::clear_lane).await
    }

    async fn claim(&self, now: Timestamp, claim: &Claim) -> Answer<Vec<Claimed>> {
        let claimed = match claim.only {
            Some(run) => {
                transact!(self, Work, |tx| claim_one::claim_one(&mut tx, now, claim, run, &self.unread.ids())
                    .await)
            }
            None => self.claim_until_settled(now, claim).await,
        };
        match claimed {
            Err(error) if error.is_of_content() => {
                Err(set_aside(transact!(self, Work, |tx| unread::set_aside(&mut tx).await)?, error))
            }
            claimed => claimed,
        }
    }

    async fn finish(&self, now: Timestamp, finishes: &[Finish]) -> Answer<Vec<Finished>> {
        if finishes.is_empty() {
            return Ok(Vec::new());
        }
        let finishes = &*all_storable(finishes);
        let unbooked = transact!(self, Work, |tx| self.finish_unbooked(&mut tx, now, finishes).await);
        let answer = match unbooked {
            Ok(Some(answers)) => Ok(answers),
            Ok(None) => transact!(self, Work, |tx| self.finish_in(&mut tx, now, finishes).await),
            Err(error) => Err(error),
        };
        self.last_claim.shown(now);
        if answer.as_ref().is_ok_and(|answers| answers.contains(&Finished::Pending)) {
            // Those that wait for their turn behind such a run no longer have a place in their lane. Where this fails,
            // pruning does it.
            let _ = transact!(self, Work, |tx| look_again(&mut tx).await);
        }
        self.hint(answer, wakes::finish)
    }

    async fn cancel(&self, now: Timestamp, run: RunId, reason: Reason) -> Answer<Cancelled> {
        let answer = request!(self, |tx| self.cancel_in(&mut tx, now, run, reason).await);
        self.tell(answer, wakes::cancel).await
    }

    async fn give_back(
        &self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Answer<Vec<(RunId, RunState)>> {
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        let answer = transact!(self, Rescue, |tx| self.give_back_in(&mut tx, now, node, runs).await);
        if answer.as_ref().is_ok_and(|given| !given.is_empty()) {
            // As after an attempt that is repeated.
            let _ = transact!(self, Rescue, |tx| look_again(&mut tx).await);
        }
        self.hint(answer, wakes::give_back)
    }

    async fn append_output(&self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> Answer<bool> {
        look!(self, Work, |tx| output::append(&mut tx, run, epoch, chunks).await)
    }

    async fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Answer<Vec<OutputChunk>> {
        look!(self, |tx| output::output(&mut tx, run, after, limit_bytes).await)
    }

    async fn join(&self, node: &Node, left: Option<NodeId>) -> Answer<()> {
        transact!(self, Lease, |tx| node::join(&mut tx, node, left).await)
    }

    async fn renew(&self, node: NodeId, lease_until: Timestamp) -> Answer<Renewed> {
        if !transact!(self, Lease, |tx| node::renew(&mut tx, node, lease_until).await)? {
            return Ok(Renewed::Fenced);
        }
        // The lease is renewed, whatever comes of the list.
        Ok(transact!(self, Lease, |tx| node::held(&mut tx, node).await).unwrap_or(Renewed::HELD))
    }

    async fn marks(&self, node: NodeId) -> Answer<Marks> {
        transact!(self, Lease, |tx| node::marks(&mut tx, node).await)
    }

    async fn running_lanes(&self, node: NodeId) -> Answer<Vec<(RunId, String)>> {
        look!(self, Work, |tx| node::running_lanes(&mut tx, node).await)
    }

    async fn drain(&self, now: Timestamp, node: NodeId, draining: bool) -> Answer<Drained> {
        let answer = transact!(self, |tx| node::drain(&mut tx, now, node, draining).await);
        if matches!(answer, Ok(Drained::Marked { is_news: true })) {
            let _ = transact!(self, |tx| look_again(&mut tx).await);
        }
        self.tell(answer, wakes::drain).await
    }

    async fn nodes(&self) -> Answer<Vec<Node>> {
        look!(self, Rescue, |tx| node::nodes(&mut tx).await)
    }

    async fn fence(&self, now: Timestamp, node: NodeId, lease_seen: Timestamp) -> Answer<Option<Rescued>> {
        let answer = transact!(self, Rescue, |tx| self.fence_in(&mut tx, now, node, lease_seen).await);
        if matches!(answer, Ok(Some(_))) {
            // Runs that only this node could take no longer have a place in their lanes. Where this fails, pruning does it.
            let _ = transact!(self, Rescue, |tx| look_again(&mut tx).await);
        }
        // A node that leaves fences itself, and its process ends then.
        self.tell_by(Part::Rescue, answer, wakes::fence).await
    }

    async fn pass_breaker(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
        run: RunId,
    ) -> Answer<Admits> {
        transact!(self, Work, |tx| books::pass_breaker(&mut tx, now, (agent, command), run).await)
    }

    async fn reset_breaker(&self, now: Timestamp, agent: AgentId, command: &str) -> Answer<bool> {
        request!(self, |tx| books::reset_breaker(&mut tx, now, agent, command).await)
    }

    async fn reset_budget(&self, now: Timestamp, agent: AgentId) -> Answer<bool> {
        let answer = request!(self, |tx| self.reset_budget_in(&mut tx, now, agent).await);
        self.tell(answer, wakes::reset_budget).await
    }

    async fn prune(&self, now: Timestamp, retention: &Retention) -> Answer<Pruned> {
        transact!(self, |tx| self.prune_in(&mut tx, now, retention).await)
    }

    async fn run(&self, run: RunId) -> Answer<Option<RunRecord>> {
        look!(self, |tx| read::run(&mut tx, run).await)
    }

    async fn runs_by_id(&self, runs: &[RunId]) -> Answer<Vec<RunRecord>> {
        look!(self, |tx| read::runs_by_id(&mut tx, runs).await)
    }

    async fn live_runs(&self) -> Answer<Vec<RunRecord>> {
        look!(self, |tx| read::live_runs(&mut tx).await)
    }

    async fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Answer<Vec<RunRecord>> {
        look!(self, |tx| read::ended_runs(&mut tx, schedule, limit).await)
    }

    async fn schedule(&self, name: &str) -> Answer<Option<ScheduleRecord>> {
        look!(self, |tx| list::schedule(&mut tx, name).await)
    }

    async fn schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Answer<Page<ScheduleRecord, String>> {
        look!(self, |tx| list::schedules(&mut tx, filter, after, limit).await)
    }

    async fn runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Answer<Page<RunRecord, RunId>> {
        look!(self, |tx| list::runs(&mut tx, filter, after, limit).await)
    }

    async fn agents(&self) -> Answer<Vec<AgentRecord>> {
        look!(self, |tx| list::agents(&mut tx).await)
    }

    async fn breakers(&self) -> Answer<Vec<BreakerEntry>> {
        look!(self, |tx| list::breakers(&mut tx).await)
    }

    async fn skips(
        &self,
        schedule: ScheduleId,
        after: Option<Timestamp>,
        limit: u32,
    ) -> Answer<Vec<SkipRange>> {
        look!(self, |tx| why::skips(&mut tx, schedule, after, limit).await)
    }

    async fn tick(&self, schedule: ScheduleId, tick_at: Timestamp) -> Answer<TickFate> {
        look!(self, |tx| why::tick(&mut tx, schedule, tick_at).await)
    }

    async fn revision_at(
        &self,
        schedule: ScheduleId,
        at: Timestamp,
    ) -> Answer<Option<(i64, ScheduleDefinition)>> {
        look!(self, |tx| why::revision_at(&mut tx, schedule, at).await)
    }

    async fn breaker(&self, agent: AgentId, command: &str) -> Answer<BreakerRecord> {
        look!(self, |tx| read::breaker(&mut tx, agent, command).await)
    }

    async fn tripped(&self, breakers: &[(AgentId, String)]) -> Answer<Vec<bool>> {
        look!(self, Work, |tx| books::tripped(&mut tx, breakers).await)
    }

    async fn counts(&self) -> Answer<Counts> {
        look!(self, |tx| read::counts(&mut tx).await)
    }

    async fn changed(&self) {
        self.hinted().await;
    }

    async fn unreadable_rows(&self) -> Answer<Vec<String>> {
        look!(self, |tx| unread::unreadable_rows(&mut tx).await)
    }

    async fn held_runs(&self, runs: &[RunId]) -> Answer<HashSet<RunId>> {
        transact!(self, Work, |tx| held::runs(&mut tx, runs).await)
    }

    async fn held_schedules(&self, schedules: &[ScheduleId]) -> Answer<HashSet<ScheduleId>> {
        transact!(self, Work, |tx| held::schedules(&mut tx, schedules).await)
    }

    async fn note_refusal(&self, now: Timestamp, part: RefusedPart, reason: &str) -> Answer<()> {
        self.unread.note(part);
        let reason = clean(reason);
        transact!(self, Work, |tx| refusal::note(&mut tx, now, part, &reason).await)
    }

    async fn refusals(&self) -> Answer<Vec<Refusal>> {
        look!(self, |tx| refusal::list(&mut tx).await)
    }

    async fn probe(&self) -> Answer<()> {
        transact!(self, |tx| refusal::probe(&mut tx).await)
    }

    async fn integrity(&self) -> Answer<Vec<String>> {
        verb!(self, Part::Requests, LONG_DEADLINE, statements, |tx| read::integrity(&mut tx).await)
    }
}
