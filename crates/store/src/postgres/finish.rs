//! The end of an attempt, and all that hangs on it: history, the schedule's last result and next token, breaker, budget,
//! and the release of what waits behind a gate. Every verb that takes runs away comes through [`Postgres::settle`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use belfry_core::definition::{Unreadable, read_stored};
use belfry_core::ending::{self, Then, Waiting};
use belfry_core::retry::Verdict;
use belfry_core::session::RunUsage;
use belfry_core::{AgentDefinition, AgentId, Epoch, Reason, RunId, RunState, Token, Trigger};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::Postgres;
use super::books::Books;
use super::connection::{Fault, Param, Tx};
use super::defer::look_again;
use super::rows::{self, Live, get, live_columns, sparse};
use super::session::{left_behind, lines_of, lock_sessions, of_messages, take_usage};
use crate::Error;
use crate::sabotage::Sabotage;
use crate::shapes::*;

/// A run that stops running or waiting.
pub(super) struct Change {
    pub(super) live: Live,
    /// What its attempt comes to, or what is asked for.
    pub(super) verdict: Verdict,
    /// Whether its attempt failed: it counts against the budget.
    pub(super) failed: bool,
    /// Why it must not wait for another attempt.
    pub(super) left_behind: Option<Reason>,
    summary: Option<String>,
    arm: Option<Token>,
}

impl Change {
    pub(super) fn end(live: Live, state: RunState, reason: Option<Reason>) -> Change {
        Change::of(live, Verdict::End { state, reason })
    }

    /// Of a run that no attempt reports on.
    pub(super) fn of(live: Live, verdict: Verdict) -> Change {
        Change { live, verdict, failed: false, left_behind: None, summary: None, arm: None }
    }
}

/// Locks running runs, after their sessions and the agents that keep books on them, and reads them in the order of their ids.
pub(super) async fn lock_running(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<(Books, Vec<Live>), Fault> {
    lock_sessions(tx, runs).await?;
    let books = Books::of_runs(tx, runs).await?;
    let sql = concat!(
        "select ",
        live_columns!(),
        " from live l join queues q on q.id = l.queue_id where l.id = any($1) and l.state + 0 = 2 \
          order by l.id for update of l"
    );
    let found = tx.query(sql, &[&runs]).await?;
    Ok((books, found.iter().map(Live::read).collect::<Result<_, Fault>>()?))
}

/// Locks waiting runs: their sessions, agents, schedules and gates first, so that no claim can hold what we wait for.
pub(super) async fn lock_waiting(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<(Books, Vec<Live>), Fault> {
    lock_sessions(tx, runs).await?;
    let books = Books::of_runs(tx, runs).await?;
    // With the gates of their lanes, where they leave room for others.
    let sql = "select l.schedule_id, l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate, l.lane, g.id as lane_gate from live l \
               left join gates g on g.kind = 4 and g.key = 0 and g.command = l.lane \
               where l.id = any($1) and l.state <> 2";
    let (mut schedules, mut gates) = (BTreeSet::new(), BTreeSet::new());
    for row in tx.query(sql, &[&runs]).await? {
        schedules.insert(get::<i64>(&row, "schedule_id")?);
        gates.extend(get::<Option<i64>>(&row, "agent_gate")?);
        gates.extend(get::<Option<i64>>(&row, "turn_gate")?);
        gates.extend(get::<Option<i64>>(&row, "command_gate")?);
        gates.extend(get::<Option<i64>>(&row, "whole_gate")?);
        if let Some(gate) = get::<Option<i64>>(&row, "lane_gate")? {
            gates.insert(gate);
            tx.makes_room(get(&row, "lane")?);
        }
    }
    let schedules: Vec<i64> = schedules.into_iter().collect();
    let sql =
        "select 1 from schedule_state where schedule_id = any($1) order by schedule_id for no key update";
    tx.query(sql, &[&schedules]).await?;
    lock_gates(tx, &gates.into_iter().collect::<Vec<_>>()).await?;
    let sql = concat!(
        "select ",
        live_columns!(),
        " from live l join queues q on q.id = l.queue_id where l.id = any($1) and l.state <> 2 \
          order by l.id for update of l"
    );
    let found = tx.query(sql, &[&runs]).await?;
    Ok((books, found.iter().map(Live::read).collect::<Result<_, Fault>>()?))
}

pub(super) async fn lock_gates(tx: &mut Tx<'_>, gates: &[i64]) -> Result<(), Fault> {
    if !gates.is_empty() {
        let sql = "select id from gates where id = any($1) order by id for no key update";
        tx.query(sql, &[&gates]).await?;
    }
    Ok(())
}

/// Un-parks what gates have room for. Whoever asks holds their locks.
pub(super) const UNPARK: &str = "select unpark($1)";

impl Postgres {
    pub(super) async fn finish_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        finishes: &[Finish],
    ) -> Result<Vec<Finished>, Fault> {
        tx.passes_locks();
        let blind = self.sabotage.is(Sabotage::FinishWithoutEpoch);
        let ids: Vec<Uuid> = finishes.iter().map(|finish| finish.run.0).collect();
        let (books, mut found) = lock_running(tx, &ids).await?;
        if blind {
            found.extend(lock_waiting(tx, &ids).await?.1);
        }
        let lines = lines_of(tx, &found).await?;
        let mut found: HashMap<RunId, Live> = found.into_iter().map(|live| (live.id, live)).collect();
        let (mut changes, mut places) = (Vec::new(), Vec::new());
        let mut answers = Vec::with_capacity(finishes.len());
        let mut of_sessions = BTreeMap::new();
        for finish in finishes {
            let is_ours = |live: &Live| blind || live.epoch == finish.epoch;
            let ours = found.get(&finish.run).is_some_and(is_ours);
            let Some(mut live) = ours.then(|| found.remove(&finish.run)).flatten() else {
                answers.push(Finished::Stale);
                continue;
            };
            let usage = finish.usage.and_then(RunUsage::of_session);
            of_sessions.extend(lines.get(&finish.run).copied().zip(usage));
            live.exit_code = finish.exit_code;
            live.error.clone_from(&finish.error);
            let left_behind = left_behind(&live, &lines);
            let (summary, arm) = (finish.summary.clone(), finish.arm);
            places.push(answers.len());
            answers.push(Finished::Pending);
            let (verdict, failed) = (finish.verdict, finish.failed);
            changes.push(Change { live, verdict, failed, left_behind, summary, arm });
        }
        take_usage(tx, &of_sessions).await?;
        for (place, then) in places.into_iter().zip(self.settle(tx, now, books, changes).await?) {
            if let Then::End { state, .. } = then {
                answers[place] = Finished::Ended(state);
            }
        }
        let (mut used, mut usages) = (Vec::new(), Vec::new());
        for (finish, answer) in finishes.iter().zip(&answers) {
            if let (Some(usage), Finished::Ended(_)) = (&finish.usage, answer) {
                used.push(finish.run.0);
                usages.push(serde_json::to_string(usage).unwrap_or_default());
            }
        }
        if !used.is_empty() {
            let sql = "update history h set usage = u.usage from unnest($1::uuid[], $2::text[]) as u (id, usage) \
                       where h.id = u.id";
            tx.execute(sql, &[&used, &usages]).await?;
        }
        Ok(answers)
    }

    /// Finishes in one round trip, commit and all, where no agent keeps books on the runs; elsewhere it does nothing.
    pub(super) async fn finish_unbooked(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        finishes: &[Finish],
    ) -> Result<Option<Vec<Finished>>, Fault> {
        tx.passes_locks();
        // Few attempts say what they used.
        let is_plain = finishes.iter().all(|finish| finish.usage.is_none());
        if self.sabotage.is(Sabotage::FinishWithoutEpoch) || !is_plain {
            return Ok(None);
        }
        let mut seen = HashSet::with_capacity(finishes.len());
        // Of what is told twice the first counts.
        let first: Vec<usize> =
            (0..finishes.len()).filter(|at| seen.insert((finishes[*at].run, finishes[*at].epoch))).collect();
        let steps: Vec<Step> = first.iter().map(|at| Step::of_finish(now, &finishes[*at])).collect();
        let ask = Ask { unbooked: true, running: true, commit: true };
        let Some(settled) = self.take_steps(tx, now, ask, &steps).await? else { return Ok(None) };
        let mut answers = vec![Finished::Stale; finishes.len()];
        for (place, state) in settled {
            let answer = match state {
                RunState::Pending => Finished::Pending,
                state => Finished::Ended(state),
            };
            let at = first.get(place).and_then(|at| answers.get_mut(*at));
            *at.ok_or_else(|| Error::unexpected("an answer about a run that nobody asked for"))? = answer;
        }
        Ok(Some(answers))
    }

    pub(super) async fn cancel_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        run: RunId,
        reason: Reason,
    ) -> Result<Cancelled, Fault> {
        // A node that is not there hears nothing: somebody has removed it by hand. Its run waits for nobody then.
        let sql = "update live l set state = 0, node_id = null where l.id = $1 and l.state + 0 = 2 \
                   and not exists (select 1 from nodes n where n.id = l.node_id)";
        tx.execute(sql, &[&run.0]).await?;
        if let Some(node) = mark(tx, &[run.0], reason).await?.pop() {
            return Ok(Cancelled::Told(node));
        }
        if !self.end_waiting(tx, now, &[run.0], reason).await?.is_empty() {
            return Ok(Cancelled::Ended);
        }
        let before = tx.query("select state from history where id = $1", &[&run.0]).await?;
        if let Some(row) = before.first() {
            return Ok(Cancelled::Before(rows::run_state(get(row, "state")?)?));
        }
        // It was claimed or ended between two of our looks.
        match tx.query("select 1 from live where id = $1", &[&run.0]).await?.is_empty() {
            true => Ok(Cancelled::NotFound),
            false => Err(Fault::Again),
        }
    }

    /// Ends those of the given runs that wait, and gives them.
    pub(super) async fn end_waiting(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        runs: &[Uuid],
        reason: Reason,
    ) -> Result<Vec<RunId>, Fault> {
        let (books, found) = lock_waiting(tx, runs).await?;
        let ended = found.iter().map(|live| live.id).collect();
        let end = |live| Change::end(live, RunState::Cancelled, Some(reason));
        self.settle(tx, now, books, found.into_iter().map(end).collect()).await?;
        Ok(ended)
    }

    /// Decides what becomes of runs that are locked, writes it, and releases what waits behind their gates.
    pub(super) async fn settle(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        mut books: Books,
        changes: Vec<Change>,
    ) -> Result<Vec<Then>, Fault> {
        let thens = books.end_all(now, &changes);
        books.close(tx).await?;
        let messages = of_messages(changes.iter().map(|change| &change.live).zip(&thens));
        for running in [true, false] {
            let own = changes.iter().zip(&thens).filter(|(change, _)| change.live.is_running() == running);
            let steps: Vec<Step> = own.map(|(change, then)| Step::of_change(change, *then)).collect();
            if steps.is_empty() {
                continue;
            }
            let settled =
                self.take_steps(tx, now, Ask { unbooked: false, running, commit: false }, &steps).await?;
            if settled.is_none_or(|settled| settled.len() != steps.len()) {
                return Err(Error::unexpected("a run that was locked is not there").into());
            }
        }
        let own: Vec<Uuid> = changes.iter().map(|change| change.live.id.0).collect();
        for (agent, waiting) in books.moves() {
            self.move_waiting(tx, now, agent, waiting, &own).await?;
        }
        self.leave_lines(tx, &messages).await?;
        Ok(thens)
    }

    /// Holds or frees the runs of an agent that wait, as its budget does, but for those that are decided on.
    pub(super) async fn move_waiting(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        agent: AgentId,
        waiting: Waiting,
        decided: &[Uuid],
    ) -> Result<(), Fault> {
        if waiting == Waiting::Stay {
            return Ok(());
        }
        if matches!(waiting, Waiting::Hold(_)) {
            // Plans that were made before do not hold.
            let sql = "select touch_token(id) from schedules where agent_id = $1 and retired_at is null order by id";
            tx.query(sql, &[&agent]).await?;
        }
        let sql = "select id, trigger, attempt, due_at, not_before, agent_gate, turn_gate, command_gate, whole_gate \
                   from live where schedule_id = any(array(select id from schedules where agent_id = $1)) \
                   and state <> 2 and not id = any($2) order by id";
        let (mut runs, mut times, mut gates) = (Vec::new(), Vec::new(), BTreeSet::new());
        for row in tx.query(sql, &[&agent, &decided]).await? {
            let trigger = Trigger::from_code(get(&row, "trigger")?).unwrap_or(Trigger::Manual);
            let (due_at, not_before): (Timestamp, Timestamp) =
                (get(&row, "due_at")?, get(&row, "not_before")?);
            let is_held = ending::holds(trigger, rows::small(get(&row, "attempt")?));
            let at = match waiting {
                Waiting::Hold(until) if is_held => ending::held_at(not_before, until, now),
                Waiting::Free => not_before.min(now.max(due_at)),
                Waiting::Hold(_) | Waiting::Stay => not_before,
            };
            if at != not_before {
                runs.push(get::<Uuid>(&row, "id")?);
                times.push(at);
                for gate in ["agent_gate", "turn_gate", "command_gate", "whole_gate"] {
                    gates.extend(get::<Option<i64>>(&row, gate)?);
                }
            }
        }
        let gates: Vec<i64> = gates.into_iter().collect();
        lock_gates(tx, &gates).await?;
        // A run without a turn in its session keeps waiting for that.
        let sql = "update live set not_before = ($2::timestamptz[])[array_position($1::uuid[], id)], put_off_at = greatest(coalesce(put_off_at, created_at), $3), \
                   state = case when state + 0 = 1 and parked_on is null then 1 else 3 end, parked_on = null \
                   where id = any($1) and state + 0 <> 2";
        if !runs.is_empty() {
            tx.execute(sql, &[&runs, &times, &now]).await?;
            // Those that wait for their turn behind them may be in other lanes.
            look_again(tx).await?;
        }
        self.release(tx, &gates).await
    }

    /// Ends runs or returns them to pending, and gives the new state of each that was still as it was thought to be, by
    /// its place. `None` where an agent keeps books that must be locked first.
    async fn take_steps(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        ask: Ask,
        steps: &[Step<'_>],
    ) -> Result<Option<Vec<(usize, RunState)>>, Fault> {
        /// One column of all rows.
        macro_rules! column {
            ($step:ident => $value:expr) => {
                steps.iter().map(|$step| $value).collect::<Vec<_>>()
            };
        }
        let hold = !self.sabotage.is(Sabotage::ReleaseOutsideLock);
        let sql = "select places, states, held from settle($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, \
                   $14, $15, $16, $17)";
        let params: &[Param<'_>] = &[
            &now,
            &ask.unbooked,
            &ask.running,
            &hold,
            &column!(step => step.run.0),
            &column!(step => step.epoch),
            &column!(step => step.end.map(|(state, _)| state.code())),
            &sparse(column!(step => step.end.and_then(|(_, reason)| reason).map(Reason::code))),
            &sparse(column!(step => step.exit_code)),
            &sparse(column!(step => step.error)),
            &sparse(column!(step => step.words())),
            &sparse(column!(step => step.summary)),
            &sparse(column!(step => step.arm.map(|token| token.kind.code()))),
            &sparse(column!(step => step.arm.map(|token| token.tick_at))),
            &sparse(column!(step => step.arm.map(|token| token.due_at))),
            &column!(step => step.not_before),
            &column!(step => step.counted),
        ];
        let answer = match ask.commit && hold {
            true => tx.query_and_commit(sql, params).await?,
            false => tx.query(sql, params).await?,
        };
        let row = answer.first().ok_or_else(|| Error::unexpected("no answer about ends"))?;
        let Some(places) = get::<Option<Vec<i32>>>(row, "places")? else { return Ok(None) };
        if !hold && let Some(gates) = get::<Option<Vec<i64>>>(row, "held")? {
            self.release(tx, &gates).await?;
        }
        let states: Vec<i16> = get(row, "states")?;
        let places = places.into_iter().map(|place| usize::try_from(place - 1).unwrap_or(usize::MAX));
        let settled = places.zip(states).map(|(place, state)| Ok((place, rows::run_state(state)?)));
        settled.collect::<Result<_, Fault>>().map(Some)
    }

    /// Locks gates, and un-parks what they have room for. The second statement sees all that ended before the lock.
    pub(super) async fn release(&self, tx: &mut Tx<'_>, gates: &[i64]) -> Result<(), Fault> {
        if gates.is_empty() {
            return Ok(());
        }
        if self.sabotage.is(Sabotage::ReleaseOutsideLock) {
            let elsewhere = self.pool.connect().await?;
            elsewhere.query(UNPARK, &[&gates]).await?;
            return Ok(());
        }
        tx.query("select release($1)", &[&gates]).await?;
        Ok(())
    }
}

/// How steps are taken.
#[derive(Clone, Copy)]
struct Ask {
    /// Nobody has locked the books of agents.
    unbooked: bool,
    /// The runs are running; else they wait.
    running: bool,
    /// Nothing follows.
    commit: bool,
}

/// One run's step out of running or waiting.
struct Step<'a> {
    run: RunId,
    epoch: Epoch,
    /// None where it returns to pending, unless it is to be cancelled.
    end: Option<(RunState, Option<Reason>)>,
    exit_code: Option<i32>,
    error: Option<&'a str>,
    summary: Option<&'a str>,
    arm: Option<Token>,
    not_before: Timestamp,
    counted: bool,
}

impl<'a> Step<'a> {
    fn of_change(change: &'a Change, then: Then) -> Step<'a> {
        let live = &change.live;
        let (end, not_before, counted) = match then {
            Then::End { state, reason } => (Some((state, reason)), live.not_before, true),
            Then::Back { at, counted } => (None, at, counted),
        };
        Step {
            run: live.id,
            epoch: live.epoch,
            end,
            exit_code: live.exit_code,
            error: live.error.as_deref(),
            summary: change.summary.as_deref(),
            arm: change.arm,
            not_before,
            counted,
        }
    }

    fn of_finish(now: Timestamp, finish: &'a Finish) -> Step<'a> {
        let (end, not_before, counted) = match finish.verdict {
            Verdict::End { state, reason } => (Some((state, reason)), now, true),
            Verdict::Retry { at } => (None, at, true),
            Verdict::Return => (None, now, false),
            Verdict::Wait { at } => (None, at, false),
        };
        Step {
            run: finish.run,
            epoch: finish.epoch,
            end,
            exit_code: finish.exit_code,
            error: finish.error.as_deref(),
            summary: finish.summary.as_deref(),
            arm: finish.arm,
            not_before,
            counted,
        }
    }

    /// What a schedule's last error says.
    fn words(&self) -> Option<&'a str> {
        let (state, reason) = self.end?;
        let words = || self.error.unwrap_or_else(|| reason.map_or("failed", Reason::as_str));
        (state == RunState::Failed).then(words)
    }
}

/// Marks running runs for their nodes, and says which nodes these are.
pub(super) async fn mark(
    tx: &mut Tx<'_>,
    runs: &[Uuid],
    reason: Reason,
) -> Result<Vec<belfry_core::NodeId>, Fault> {
    let sql = "update live set cancel_reason = coalesce(cancel_reason, $2) \
               where id = any($1) and state + 0 = 2 returning node_id";
    let told = tx.query(sql, &[&runs, &reason.code()]).await?;
    told.iter().map(|row| Ok(belfry_core::NodeId(get(row, "node_id")?))).collect()
}

/// An agent's definition, or why it cannot be read.
pub(super) fn read_agent(row: &tokio_postgres::Row) -> Result<Result<AgentDefinition, Unreadable>, Fault> {
    Ok(read_stored(get(row, "format")?, get(row, "definition")?))
}
