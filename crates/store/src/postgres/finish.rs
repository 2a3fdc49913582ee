//! The end of an attempt, and all that hangs on it: history, the schedule's last result and next token, breaker, budget,
//! and the release of what waits behind a gate. Every verb that takes runs away comes through [`Postgres::settle`].

use std::collections::{BTreeSet, HashMap, HashSet};

use belfry_core::definition::{Unreadable, read_stored};
use belfry_core::retry::Verdict;
use belfry_core::{AgentDefinition, Epoch, Reason, RunId, RunState, Token};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::Postgres;
use super::books::Books;
use super::connection::{Fault, Param, Tx};
use super::rows::{self, Live, get, live_columns, sparse};
use super::session::{left_behind, lines_of, lock_sessions, of_messages, take_usage};
use crate::Error;
use crate::sabotage::Sabotage;
use crate::shapes::*;

/// A run that stops running or waiting.
pub(super) struct Change {
    pub(super) live: Live,
    /// Whether its attempt failed: it counts against the budget.
    pub(super) failed: bool,
    pub(super) then: Then,
}

/// What becomes of it.
pub(super) enum Then {
    End { state: RunState, reason: Option<Reason>, summary: Option<String>, arm: Option<Token> },
    Return { not_before: Timestamp, counted: bool },
}

impl Change {
    pub(super) fn is_end(&self) -> bool {
        matches!(self.then, Then::End { .. })
    }

    pub(super) fn end(live: Live, state: RunState, reason: Option<Reason>) -> Change {
        Change { live, failed: false, then: Then::End { state, reason, summary: None, arm: None } }
    }

    pub(super) fn back(live: Live, not_before: Timestamp, counted: bool) -> Change {
        Change { live, failed: false, then: Then::Return { not_before, counted } }
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
    let sql = "select l.schedule_id, l.agent_gate, l.turn_gate, l.lane, g.id as lane_gate from live l \
               left join gates g on g.kind = 4 and g.key = 0 and g.command = l.lane \
               where l.id = any($1) and l.state <> 2";
    let (mut schedules, mut gates) = (BTreeSet::new(), BTreeSet::new());
    for row in tx.query(sql, &[&runs]).await? {
        schedules.insert(get::<i64>(&row, "schedule_id")?);
        gates.extend(get::<Option<i64>>(&row, "agent_gate")?);
        gates.extend(get::<Option<i64>>(&row, "turn_gate")?);
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
        let blind = self.sabotage.is(Sabotage::FinishWithoutEpoch);
        let ids: Vec<Uuid> = finishes.iter().map(|finish| finish.run.0).collect();
        let (books, mut found) = lock_running(tx, &ids).await?;
        if blind {
            found.extend(lock_waiting(tx, &ids).await?.1);
        }
        let lines = lines_of(tx, &found).await?;
        take_usage(tx, finishes, &lines).await?;
        let mut found: HashMap<RunId, Live> = found.into_iter().map(|live| (live.id, live)).collect();
        let mut changes = Vec::new();
        let mut answers = Vec::with_capacity(finishes.len());
        for finish in finishes {
            let is_ours = |live: &Live| blind || live.epoch == finish.epoch;
            let ours = found.get(&finish.run).is_some_and(is_ours);
            let Some(mut live) = ours.then(|| found.remove(&finish.run)).flatten() else {
                answers.push(Finished::Stale);
                continue;
            };
            live.exit_code = finish.exit_code;
            live.error.clone_from(&finish.error);
            // Whoever is to be cancelled, or is none of its session's business any more, does not wait for another attempt.
            let verdict = match (finish.verdict, left_behind(&live, &lines)) {
                (Verdict::Retry { .. } | Verdict::Return, Some(reason)) => {
                    Verdict::End { state: RunState::Cancelled, reason: Some(reason) }
                }
                (verdict, _) => verdict,
            };
            let (then, answer) = match verdict {
                Verdict::End { state, reason } => {
                    let summary = finish.summary.clone();
                    (Then::End { state, reason, summary, arm: finish.arm }, Finished::Ended(state))
                }
                Verdict::Retry { at } => (Then::Return { not_before: at, counted: true }, Finished::Pending),
                Verdict::Return => (Then::Return { not_before: now, counted: false }, Finished::Pending),
            };
            answers.push(answer);
            changes.push(Change { live, failed: finish.failed, then });
        }
        self.settle(tx, now, books, changes).await?;
        for (finish, answer) in finishes.iter().zip(&answers) {
            if let (Some(usage), Finished::Ended(_)) = (&finish.usage, answer) {
                let usage = serde_json::to_string(usage).unwrap_or_default();
                tx.execute("update history set usage = $2 where id = $1", &[&finish.run.0, &usage]).await?;
            }
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

    /// Writes what becomes of runs that are locked, and releases what waits behind their gates.
    pub(super) async fn settle(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        mut books: Books,
        changes: Vec<Change>,
    ) -> Result<(), Fault> {
        for Change { live, failed, then } in &changes {
            if *failed {
                books.spend(now, live.agent);
            }
            if let Then::End { state, .. } = then {
                books.ended(now, live, *state);
            }
        }
        books.close(tx).await?;
        let messages = of_messages(&changes);
        let (running, waiting): (Vec<Change>, Vec<Change>) =
            changes.into_iter().partition(|change| change.live.is_running());
        for (running, changes) in [(true, running), (false, waiting)] {
            if changes.is_empty() {
                continue;
            }
            let all = changes.len();
            let steps: Vec<Step> = changes.iter().map(Step::of_change).collect();
            let settled =
                self.take_steps(tx, now, Ask { unbooked: false, running, commit: false }, &steps).await?;
            if settled.is_none_or(|settled| settled.len() != all) {
                return Err(Error::unexpected("a run that was locked is not there").into());
            }
        }
        self.leave_lines(tx, &messages).await
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
    fn of_change(change: &'a Change) -> Step<'a> {
        let live = &change.live;
        let mut step = Step {
            run: live.id,
            epoch: live.epoch,
            end: None,
            exit_code: live.exit_code,
            error: live.error.as_deref(),
            summary: None,
            arm: None,
            not_before: live.not_before,
            counted: true,
        };
        match &change.then {
            Then::End { state, reason, summary, arm } => {
                step.end = Some((*state, *reason));
                step.summary = summary.as_deref();
                step.arm = *arm;
            }
            Then::Return { not_before, counted } => {
                step.not_before = *not_before;
                step.counted = *counted;
            }
        }
        step
    }

    fn of_finish(now: Timestamp, finish: &'a Finish) -> Step<'a> {
        let (end, not_before, counted) = match finish.verdict {
            Verdict::End { state, reason } => (Some((state, reason)), now, true),
            Verdict::Retry { at } => (None, at, true),
            Verdict::Return => (None, now, false),
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

/// An agent's definition.
pub(super) fn definition(row: &tokio_postgres::Row) -> Result<AgentDefinition, Fault> {
    read_agent(row)?.map_err(|why| Error::unexpected(format!("an agent {why}")).into())
}
