//! Planning: what is due, and committing what was decided.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use belfry_core::breaker::Breaker;
use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::definition::{Scope, Unreadable, read_stored};
use belfry_core::overlap::Overlap;
use belfry_core::plan::Standing;
use belfry_core::{AgentDefinition, AgentId, ScheduleId};
use belfry_time::Timestamp;

use super::books::{self, Books};
use super::connection::{Fault, Param, Tx};
use super::defer::{are_plain, is_limited};
use super::enqueue::{Columns, Places, insert_runs};
use super::finish;
use super::overlap::{Lives, in_scope, last_starts};
use super::rows::{self, big, get};
use super::{Cold, Postgres, insert_skips, set_token};
use crate::Error;
use crate::memory::compile;
use crate::sabotage::Sabotage;
use crate::shapes::*;
use crate::unknown;

/// A token that is due, with its schedule's state.
struct Token {
    schedule: ScheduleId,
    agent: AgentId,
    edition: i64,
    version: i64,
    standing: Standing,
    unreadable: Option<String>,
}

pub(super) async fn next_due(tx: &mut Tx<'_>, unread: &[ScheduleId]) -> Result<Option<Timestamp>, Fault> {
    let sql = "select t.due_at from timers t where not t.schedule_id = any($1) \
               and exists (select 1 from schedule_state st where st.schedule_id = t.schedule_id) \
               and exists (select 1 from schedules s where s.id = t.schedule_id and s.retired_at is null) \
               order by t.due_at limit 1";
    let first = tx.query(sql, &[&unread]).await?;
    first.first().map(|row| get(row, "due_at")).transpose()
}

/// Commits plans that look at nothing but their own schedules.
const PLAN_TICKS: &str = "select held from plan_ticks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, \
    $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29)";

impl Postgres {
    /// Goes on past pages of which nothing can be read.
    pub(super) async fn due_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        mut after: Option<Mark>,
        limit: u32,
    ) -> Result<Vec<Due>, Fault> {
        loop {
            let (due, last) = self.due_page(tx, now, after, limit).await?;
            if !due.is_empty() || last.is_none() {
                return Ok(due);
            }
            after = last;
        }
    }

    /// What is due, and of a full page the place of the last token. The tokens first, then what lives: a run that is made in
    /// between is counted, or its maker changes the token.
    async fn due_page(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        after: Option<Mark>,
        limit: u32,
    ) -> Result<(Vec<Due>, Option<Mark>), Fault> {
        let sql = "select t.due_at, t.kind, t.tick_at as token_tick_at, s.skip_reason, s.skip_from, s.skip_to, \
                   s.skip_count, t.schedule_id, s.agent_id, s.edition, t.version, s.origin, s.cursor_at, \
                   s.waits_for is not null as waits \
                   from (select * from timers where due_at <= $1 \
                       and (due_at, schedule_id) > (coalesce($3, '-infinity'::timestamptz), coalesce($4, 0::bigint)) \
                       and not schedule_id = any($5) \
                       and exists (select 1 from schedule_state s where s.schedule_id = timers.schedule_id) order by due_at, schedule_id limit $2) t \
                   join schedule_state s on s.schedule_id = t.schedule_id order by t.due_at, t.schedule_id";
        let (due_at, schedule) = after.unzip();
        let unread = self.unread.not_planned();
        let found = tx.query(sql, &[&now, &i64::from(limit), &due_at, &schedule, &unread]).await?;
        let mut tokens = Vec::with_capacity(found.len());
        for row in &found {
            let Some(token) = rows::token(row)? else { continue };
            // By their places, which saves the search for names.
            tokens.push(Token {
                schedule: row.try_get(7)?,
                agent: row.try_get(8)?,
                edition: row.try_get(9)?,
                version: row.try_get(10)?,
                standing: Standing {
                    token,
                    origin: get(row, "origin")?,
                    open_skip: rows::open_skip(row)?,
                    cursor_at: get(row, "cursor_at")?,
                    waits: get(row, "waits")?,
                },
                unreadable: unknown::timer_kind(get(row, "kind")?)
                    .1
                    .or_else(|| unknown::timer_instants(&token)),
            });
        }
        let last: Option<Mark> = match found.last().filter(|_| found.len() >= limit as usize) {
            Some(row) => Some((get(row, "due_at")?, row.try_get(7)?)),
            None => None,
        };
        if tokens.is_empty() {
            return Ok((Vec::new(), last));
        }
        let cold = self.cold(tx, &tokens).await?;
        let agents = self.agents(tx, tokens.iter().map(|token| token.agent)).await?;
        let overlap = |token: &Token| {
            let cold = cold.get(&token.schedule)?;
            let (agent, schedule) = (token.agent, token.schedule);
            Some(Overlap { scope: cold.overlap, agent, schedule, command: &cold.command })
        };
        let overlaps: Vec<Overlap<'_>> = tokens.iter().filter_map(overlap).collect();
        let lives = Lives::count(tx, &overlaps).await?;
        let last_starts = last_starts(tx, &overlaps).await?;
        let books = Reading::open(tx, &agents).await?;
        let due = tokens.iter().filter_map(|token| {
            let cold = cold.get(&token.schedule)?;
            let Some(agent) = agents.get(&token.agent) else {
                self.unread.add(token.schedule, &"its agent does not exist");
                return None;
            };
            let agent = match (&cold.unreadable, agent) {
                (None, Ok(agent)) => agent,
                // Another version may be able to read it: it stays as it is.
                (Some(why), _) | (None, Err(why)) => {
                    self.unread.add(token.schedule, why);
                    return None;
                }
            };
            let (live, pending) = lives.of(overlap(token)?);
            Some(Due {
                schedule: token.schedule,
                agent: token.agent,
                name: cold.name.clone(),
                compiled: match &token.unreadable {
                    None => cold.compiled.clone(),
                    Some(words) => Err(Arc::from(words.as_str())),
                },
                agent_definition: agent.clone(),
                version: token.version,
                standing: token.standing,
                live,
                pending,
                breaker: books.breaker(token.agent, &cold.command),
                budget: books.budgets.get(&token.agent).copied(),
                last_start: last_starts.get(&token.schedule).copied(),
            })
        });
        Ok((due.collect(), last))
    }

    /// Definitions of schedules, from the cache where they did not change.
    async fn cold(&self, tx: &mut Tx<'_>, tokens: &[Token]) -> Result<HashMap<ScheduleId, Arc<Cold>>, Fault> {
        let mut found = HashMap::with_capacity(tokens.len());
        let mut missing: HashMap<ScheduleId, i64> = HashMap::new();
        {
            let cache = self.cache.lock();
            for token in tokens {
                match cache.schedules.get(&(token.schedule, token.edition)) {
                    Some(cold) => drop(found.insert(token.schedule, cold.clone())),
                    None => drop(missing.insert(token.schedule, token.edition)),
                }
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let ids: Vec<ScheduleId> = missing.keys().copied().collect();
        // One that was edited since the token was read is newer than its edition, which nobody will read again.
        let sql = "select name, definition, id, format from schedules where id = any($1)";
        for row in tx.query(sql, &[&ids]).await? {
            let (id, text): (ScheduleId, &str) = (row.try_get(2)?, row.try_get(1)?);
            let cold = Arc::new(cold_of(row.try_get(0)?, row.try_get(3)?, text));
            if let Some(edition) = missing.get(&id) {
                self.cache.lock().schedules.insert((id, *edition), cold.clone(), text.len());
            }
            found.insert(id, cold);
        }
        Ok(found)
    }

    /// Definitions of agents, from the cache where they did not change.
    async fn agents(
        &self,
        tx: &mut Tx<'_>,
        ids: impl Iterator<Item = AgentId>,
    ) -> Result<HashMap<AgentId, ReadAgent>, Fault> {
        let ids: Vec<AgentId> = ids.collect::<BTreeSet<_>>().into_iter().collect();
        let mut found = HashMap::with_capacity(ids.len());
        let mut missing = Vec::new();
        for row in tx.query("select id, edition from agents where id = any($1)", &[&ids]).await? {
            let place = (get(&row, "id")?, get(&row, "edition")?);
            match self.cache.lock().agents.get(&place) {
                Some(agent) => drop(found.insert(place.0, Ok(agent.clone()))),
                None => missing.push(place.0),
            }
        }
        if !missing.is_empty() {
            let sql = "select id, edition, format, definition from agents where id = any($1)";
            for row in tx.query(sql, &[&missing]).await? {
                let agent = finish::read_agent(&row)?.map(Arc::new);
                if let Ok(agent) = &agent {
                    let (place, text): (_, &str) =
                        ((get(&row, "id")?, get(&row, "edition")?), get(&row, "definition")?);
                    self.cache.lock().agents.insert(place, agent.clone(), text.len());
                }
                found.insert(get(&row, "id")?, agent);
            }
        }
        Ok(found)
    }

    /// Nothing is done and nothing answered where a lane is limited in what may wait.
    pub(super) async fn commit_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        commits: &[Commit],
        places: &Places,
    ) -> Result<Option<Vec<Committed>>, Fault> {
        tx.passes_locks();
        let blind = self.sabotage.is(Sabotage::NoTokenCheck);
        let agents: BTreeSet<AgentId> =
            commits.iter().filter(|commit| !is_plain(commit)).map(|commit| commit.agent).collect();
        // Where all go together that is seen on the way.
        if !are_plain(commits) && is_limited(tx, commits).await? {
            return Ok(None);
        }
        let mut books = match agents.is_empty() {
            true => Books::default(),
            false => Books::of_agents(tx, &agents.into_iter().collect::<Vec<_>>()).await?,
        };
        let mut answers = Vec::with_capacity(commits.len());
        let mut rest = commits;
        while !rest.is_empty() {
            // Plain ones go together; one that looks beyond its own schedule must see those before it.
            let mut seen = HashSet::new();
            let plain = rest
                .iter()
                .take_while(|commit| is_plain(commit) && !blind && seen.insert(commit.schedule))
                .count();
            let (batch, others) = rest.split_at(plain.max(1));
            match batch {
                [commit] if plain == 0 => {
                    answers.push(self.commit_one(tx, now, commit, places, &mut books).await?);
                }
                _ => {
                    let is_all = plain == commits.len();
                    let batch: Vec<&Commit> = batch.iter().collect();
                    match commit_plain(tx, now, &batch, places, (is_all, !is_all)).await? {
                        Some(committed) => answers.extend(committed),
                        None => return Ok(None),
                    }
                }
            }
            rest = others;
        }
        books.close(tx).await?;
        Ok(Some(answers))
    }

    /// Commits a plan that looks beyond its own schedule. What lives in its scope is counted once its token is ours and
    /// the agent locked: nobody who looks at the same runs can add one before we are done, and whoever was before us is
    /// seen.
    pub(super) async fn commit_one(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        commit: &Commit,
        places: &Places,
        books: &mut Books,
    ) -> Result<Committed, Fault> {
        if is_resume(commit) {
            return super::pause::commit_resume(tx, commit).await;
        }
        let blind = self.sabotage.is(Sabotage::NoTokenCheck);
        let taken = if blind { take_any(tx, commit).await? } else { take_token(tx, commit).await? };
        let looks =
            commit.scope != Scope::Schedule || !blind && (!commit.runs.is_empty() || commit.cancel_live);
        if !taken
            || looks && in_scope(tx, commit.overlap()).await?.len() > commit.live as usize
            || !books.take_probe(now, commit)
        {
            return Ok(Committed::Lost);
        }
        if commit.cancel_live {
            // An end may keep a breaker's books, which are open here.
            books.close(tx).await?;
            let live = in_scope(tx, commit.overlap()).await?;
            self.cancel_all(tx, now, &live).await?;
            books.reopen(tx).await?;
            // Its run is not stored yet, so that as a probe it does not count as alive.
            books.take_probe(now, commit);
        }
        write_skips(tx, &[commit]).await?;
        insert_runs(tx, now, &commit.runs.iter().collect::<Vec<_>>(), places).await?;
        write_states(tx, now, &[commit]).await?;
        set_token(tx, commit.schedule, commit.next.token()).await?;
        Ok(Committed::Held)
    }
}

/// Commits plans that look at nothing but their own schedules. No runs are counted: whoever adds one to a schedule changes
/// its token. `None` where a lane is limited in what may wait, and they are not admitted there.
pub(super) async fn commit_plain(
    tx: &mut Tx<'_>,
    now: Timestamp,
    batch: &[&Commit],
    places: &Places,
    (is_all, admitted): (bool, bool),
) -> Result<Option<Vec<Committed>>, Fault> {
    let runs: Vec<(i32, &NewRun)> = (1..)
        .zip(batch.iter().copied())
        .flat_map(|(owner, commit)| commit.runs.iter().map(move |run| (owner, run)))
        .collect();
    let columns = Columns::new(&runs, places)?;
    /// One column of all plans.
    macro_rules! column {
        ($commit:ident => $value:expr) => {
            batch.iter().map(|$commit| $value).collect::<Vec<_>>()
        };
    }
    let tokens = column!(commit => commit.schedule);
    let versions = column!(commit => commit.version);
    let dues = column!(commit => rows::stored(commit.token.due_at));
    let kinds = column!(commit => commit.next.token().map(|token| token.kind.code()));
    let next_ticks = column!(commit => commit.next.token().map(|token| token.tick_at));
    let next_dues = column!(commit => commit.next.token().map(|token| token.due_at));
    let mut params: Vec<Param<'_>> = vec![&now, &tokens, &versions, &dues, &kinds, &next_ticks, &next_dues];
    params.extend(columns.params());
    params.push(&admitted);
    let is_last = is_all && !batch.iter().any(|commit| changes_state(commit) || !commit.closed.is_empty());
    let answer = match is_last {
        true => tx.query_and_commit(PLAN_TICKS, &params).await?,
        false => tx.query(PLAN_TICKS, &params).await?,
    };
    let row = answer.first().ok_or_else(|| Error::unexpected("no answer about plans"))?;
    let Some(held) = get::<Option<Vec<i32>>>(row, "held")? else { return Ok(None) };
    let mut answers = vec![Committed::Lost; batch.len()];
    for place in held {
        let at = usize::try_from(place - 1).ok().and_then(|at| answers.get_mut(at));
        *at.ok_or_else(|| Error::unexpected("an answer about a plan that nobody made"))? = Committed::Held;
    }
    if !is_last {
        let held = batch.iter().zip(&answers).filter(|(_, answer)| **answer == Committed::Held);
        let held: Vec<&Commit> = held.map(|(commit, _)| *commit).collect();
        write_skips(tx, &held).await?;
        write_states(tx, now, &held).await?;
    }
    Ok(Some(answers))
}

/// Whether a commit looks at nothing but its own schedule.
pub(super) fn is_plain(commit: &Commit) -> bool {
    commit.scope == Scope::Schedule
        && !commit.cancel_live
        && !commit.runs.iter().any(|run| run.probe)
        && !is_resume(commit)
}

/// Whether a commit ends a pause.
fn is_resume(commit: &Commit) -> bool {
    commit.token.kind == belfry_core::TokenKind::Resume && commit.invalid.is_none()
}

/// Locks a plan's token if it is still what the plan was made on. One that somebody else has locked is as good as gone.
pub(super) async fn take_token(tx: &mut Tx<'_>, commit: &Commit) -> Result<bool, Fault> {
    let sql =
        "select 1 from timers where schedule_id = $1 and version = $2 and due_at = $3 for update skip locked";
    Ok(!tx
        .query(sql, &[&commit.schedule, &commit.version, &rows::stored(commit.token.due_at)])
        .await?
        .is_empty())
}

/// Deletes whatever token there is: only for a store that is broken on purpose.
async fn take_any(tx: &mut Tx<'_>, commit: &Commit) -> Result<bool, Fault> {
    tx.execute("delete from timers where schedule_id = $1", &[&commit.schedule]).await?;
    let sql = "select 1 from schedule_state where schedule_id = $1";
    Ok(!tx.query(sql, &[&commit.schedule]).await?.is_empty())
}

/// Whether a commit changes more than a token: a plain tick does not.
fn changes_state(commit: &Commit) -> bool {
    commit.open_skip.is_some()
        || commit.open_skip_before.is_some()
        || commit.origin.is_some()
        || commit.invalid.is_some()
        || commit.cursor_at.is_some()
        || !matches!(commit.next, Arm::Token(_))
}

async fn write_skips(tx: &mut Tx<'_>, commits: &[&Commit]) -> Result<(), Fault> {
    let closed: Vec<_> = commits
        .iter()
        .flat_map(|commit| commit.closed.iter().map(|range| (commit.schedule, *range)))
        .collect();
    insert_skips(tx, &closed).await
}

async fn write_states(tx: &mut Tx<'_>, now: Timestamp, commits: &[&Commit]) -> Result<(), Fault> {
    let mut changed: Vec<&Commit> = commits.iter().copied().filter(|commit| changes_state(commit)).collect();
    if changed.is_empty() {
        return Ok(());
    }
    changed.sort_by_key(|commit| commit.schedule);
    /// One column of all rows.
    macro_rules! column {
        ($commit:ident => $value:expr) => {
            changed.iter().map(|$commit| $value).collect::<Vec<_>>()
        };
    }
    let waits_for = |commit: &Commit| match commit.next {
        Arm::Wait(run) => Some(run.0),
        Arm::Token(_) | Arm::Exhausted => None,
    };
    // Below zero the status stays as it is.
    let status = |commit: &Commit| match (&commit.invalid, commit.next) {
        (Some(_), _) => rows::status_columns(&Status::Invalid { reason: String::new() }).0,
        (None, Arm::Exhausted) => rows::status_columns(&Status::Exhausted).0,
        (None, Arm::Token(_) | Arm::Wait(_)) => -1,
    };
    let sql = "insert into schedule_state as s (agent_id, edition, status_since, schedule_id, origin, waits_for, \
               skip_reason, skip_from, skip_to, skip_count, status, status_reason, cursor_at, planned_at) \
               select 0, 0, $1::timestamptz, u.* from unnest($2::bigint[], $3::timestamptz[], $4::uuid[], \
               $5::smallint[], $6::timestamptz[], $7::timestamptz[], $8::bigint[], $9::smallint[], $10::text[], \
               $11::timestamptz[], $12::timestamptz[]) as u \
               on conflict (schedule_id) do update set origin = coalesce(excluded.origin, s.origin), \
               cursor_at = coalesce(excluded.cursor_at, s.cursor_at), \
               planned_at = coalesce(excluded.planned_at, s.planned_at), \
               waits_for = excluded.waits_for, skip_reason = excluded.skip_reason, \
               skip_from = excluded.skip_from, skip_to = excluded.skip_to, skip_count = excluded.skip_count, \
               status = case when excluded.status < 0 then s.status else excluded.status end, \
               status_since = case when excluded.status < 0 then s.status_since else excluded.status_since end, \
               status_reason = case when excluded.status < 0 then s.status_reason else excluded.status_reason end, \
               status_until = case when excluded.status < 0 then s.status_until end";
    tx.execute(
        sql,
        &[
            &now,
            &column!(commit => commit.schedule),
            &column!(commit => commit.origin),
            &column!(commit => waits_for(commit)),
            &column!(commit => commit.open_skip.map(|skip| skip.reason.code())),
            &column!(commit => commit.open_skip.map(|skip| skip.from)),
            &column!(commit => commit.open_skip.map(|skip| skip.to)),
            &column!(commit => commit.open_skip.map(|skip| big(skip.count))),
            &column!(commit => status(commit)),
            &column!(commit => commit.invalid.as_deref()),
            &column!(commit => commit.cursor_at),
            &column!(commit => commit.planned_at),
        ],
    )
    .await?;
    Ok(())
}

/// Breakers and budgets, read without locks for agents that have such policies.
#[derive(Default)]
struct Reading {
    breakers: HashMap<AgentId, HashMap<String, Breaker>>,
    budgets: HashMap<AgentId, Budget>,
}

impl Reading {
    fn breaker(&self, agent: AgentId, command: &str) -> Breaker {
        let known = self.breakers.get(&agent).and_then(|commands| commands.get(command));
        known.copied().unwrap_or_default()
    }

    async fn open(tx: &mut Tx<'_>, agents: &HashMap<AgentId, ReadAgent>) -> Result<Reading, Fault> {
        let mut reading = Reading::default();
        let with = |has: fn(&AgentDefinition) -> bool| -> Vec<AgentId> {
            let reads = |agent: &ReadAgent| agent.as_ref().is_ok_and(|agent| has(agent));
            agents.iter().filter(|(_, agent)| reads(agent)).map(|(id, _)| *id).collect()
        };
        let breakers = with(|agent| agent.breaker.is_some());
        if !breakers.is_empty() {
            for row in tx.query(books::BREAKERS, &[&breakers]).await? {
                let commands = reading.breakers.entry(get(&row, "agent_id")?).or_default();
                commands.insert(get(&row, "command")?, books::breaker(&row)?);
            }
        }
        let budgets = with(|agent| agent.budget.is_some());
        if !budgets.is_empty() {
            for row in tx.query("select * from budgets where agent_id = any($1)", &[&budgets]).await? {
                if let Some(budget) = books::budget(&row)? {
                    reading.budgets.insert(get(&row, "agent_id")?, budget);
                }
            }
        }
        Ok(reading)
    }
}

/// An agent's definition, or why it cannot be read.
type ReadAgent = Result<Arc<AgentDefinition>, Unreadable>;

/// A schedule as it was written. One that cannot be read says why, and disturbs no other.
pub(super) fn cold_of(name: &str, format: i32, text: &str) -> Cold {
    match read_stored::<belfry_core::ScheduleDefinition>(format, text) {
        Ok(definition) => {
            let compiled = compile(&definition, name);
            Cold {
                unreadable: None,
                name: Arc::from(name),
                overlap: definition.options.overlap,
                command: definition.options.command.clone(),
                uncompiled: compiled.is_err().then(|| Arc::new(definition)),
                compiled,
            }
        }
        Err(why) => Cold {
            name: Arc::from(name),
            compiled: Err(Arc::from(why.to_string())),
            uncompiled: None,
            unreadable: Some(why),
            overlap: Scope::Schedule,
            command: String::new(),
        },
    }
}

/// A schedule's definition from its text.
pub(super) fn schedule_definition(text: &str) -> Result<belfry_core::ScheduleDefinition, Fault> {
    serde_json::from_str(text)
        .map_err(|error| Error::unexpected(format!("a schedule's definition: {error}")).into())
}
