//! Ticks that wait for room in their lane: `queue_limit`.
//!
//! Who decides whether there is room holds the gate of the lane, and counts in the next statement; who makes room there
//! holds it as well, until that is committed, and arms those that were deferred. So nobody is deferred while there is
//! room, and nobody is forgotten. Lanes without a limit have no part in this.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use belfry_core::ScheduleId;
use belfry_time::Timestamp;

use super::Postgres;
use super::books::Books;
use super::connection::{Fault, Tx};
use super::enqueue::Places;
use super::plan::{commit_plain, is_plain, take_token};
use super::rows::get;
use crate::Error;
use crate::shapes::*;
use crate::store::Answer;

/// How plans are committed together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    /// They look at no lane.
    Free,
    /// They look at nothing but their own schedules and their lanes.
    Queued,
    /// Alone.
    Single,
}

impl Group {
    fn of(commit: &Commit, limited: &HashSet<String>) -> Group {
        let is_limited = commit.lane().is_some_and(|lane| limited.contains(lane));
        match (commit.was_deferred(), is_limited, is_plain(commit)) {
            (false, false, _) => Group::Free,
            (false, true, true) => Group::Queued,
            _ => Group::Single,
        }
    }
}

impl Postgres {
    pub(super) async fn commit_or_defer(
        &self,
        now: Timestamp,
        commits: &[Commit],
        places: &Places,
    ) -> Answer<Vec<Committed>> {
        if !self.queues_limited.load(Ordering::Relaxed) && !commits.iter().any(Commit::was_deferred) {
            let answer = transact!(self, Work, |tx| self.commit_in(&mut tx, now, commits, places).await)?;
            if let Some(committed) = answer {
                return Ok(committed);
            }
        }
        let mut committed = Vec::with_capacity(commits.len());
        match self.commit_groups(now, commits, places, &mut committed).await {
            Err(error) if committed.is_empty() => return Err(error),
            // What was committed before must be told; the others are read again.
            Err(_) => committed.resize(commits.len(), Committed::Lost),
            Ok(()) => {}
        }
        Ok(committed)
    }

    async fn commit_groups(
        &self,
        now: Timestamp,
        commits: &[Commit],
        places: &Places,
        committed: &mut Vec<Committed>,
    ) -> Answer<()> {
        let mut limited = look!(self, Work, |tx| limited_lanes(&mut tx).await)?;
        self.queues_limited.store(!limited.is_empty(), Ordering::Relaxed);
        while let Some(first) = commits.get(committed.len()) {
            let rest = &commits[committed.len()..];
            let kind = Group::of(first, &limited);
            let mut seen = HashSet::new();
            let alike = |commit: &&Commit| {
                Group::of(commit, &limited) == kind && (kind == Group::Free || seen.insert(commit.schedule))
            };
            let group = match kind {
                Group::Single => &rest[..1],
                Group::Free | Group::Queued => &rest[..rest.iter().take_while(alike).count()],
            };
            let answer = match kind {
                Group::Free => transact!(self, Work, |tx| self.commit_in(&mut tx, now, group, places).await)?,
                Group::Queued => {
                    Some(transact!(self, Work, |tx| commit_queued(&mut tx, now, group, places).await)?)
                }
                Group::Single => Some(vec![transact!(self, Work, |tx| self
                    .commit_single(&mut tx, now, first, places)
                    .await)?]),
            };
            match answer {
                Some(answers) => committed.extend(answers),
                // A lane has been given a limit meanwhile.
                None => limited = look!(self, Work, |tx| limited_lanes(&mut tx).await)?,
            }
        }
        Ok(())
    }

    /// Commits a plan whose tick was deferred before, or that looks beyond its own schedule in a lane with a limit.
    async fn commit_single(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        commit: &Commit,
        places: &Places,
    ) -> Result<Committed, Fault> {
        tx.passes_locks();
        let mut books = match is_plain(commit) {
            true => Books::default(),
            false => Books::of_agents(tx, &[commit.agent]).await?,
        };
        if !take_token(tx, commit).await? {
            return Ok(Committed::Lost);
        }
        lock_states(tx, &[commit.schedule]).await?;
        let sql = "select lane from deferred where schedule_id = $1";
        let found = tx.query(sql, &[&commit.schedule]).await?;
        let own: Option<&str> = found.first().map(|row| get(row, "lane")).transpose()?;
        if let Some(lane) = commit.lane() {
            // Who cancels waits for the gates of those that go, which others hold while they wait for this one.
            let limits = match commit.cancel_live {
                true => try_lanes(tx, lane).await?,
                false => Some(lock_lanes(tx, &[lane]).await?),
            };
            let Some(limits) = limits else { return Ok(Committed::Lost) };
            if let Some(limit) = limits.get(lane).copied().flatten() {
                let [waiting, deferred] = taken(tx, &[lane]).await?.get(lane).copied().unwrap_or_default();
                if waiting + if own == Some(lane) { 0 } else { deferred } >= limit {
                    own.into_iter().for_each(|own| tx.makes_room(own));
                    defer(tx, now, &[(commit, lane)]).await?;
                    return Ok(Committed::Deferred);
                }
            }
        }
        let committed = self.commit_one(tx, now, commit, places, &mut books).await?;
        books.close(tx).await?;
        if committed == Committed::Held
            && let Some(own) = own
        {
            tx.execute("delete from deferred where schedule_id = $1", &[&commit.schedule]).await?;
            tx.makes_room(own);
        }
        Ok(committed)
    }
}

/// Commits plans in lanes with a limit, as far as there is room for their runs, in order.
async fn commit_queued(
    tx: &mut Tx<'_>,
    now: Timestamp,
    commits: &[Commit],
    places: &Places,
) -> Result<Vec<Committed>, Fault> {
    tx.passes_locks();
    let mut answers = vec![Committed::Lost; commits.len()];
    let schedules: Vec<ScheduleId> = commits.iter().map(|commit| commit.schedule).collect();
    let versions: Vec<i64> = commits.iter().map(|commit| commit.version).collect();
    let dues: Vec<_> = commits.iter().map(|commit| super::rows::stored(commit.token.due_at)).collect();
    let sql = "select u.nth::bigint as nth from generate_series(1, cardinality($1::bigint[])) as u (nth) join timers t \
               on t.schedule_id = ($1::bigint[])[u.nth] and t.version = ($2::bigint[])[u.nth] \
               and t.due_at = ($3::timestamptz[])[u.nth] for update of t skip locked";
    let mut held: Vec<usize> = Vec::with_capacity(commits.len());
    for row in tx.query(sql, &[&schedules, &versions, &dues]).await? {
        held.push(usize::try_from(get::<i64>(&row, "nth")? - 1).unwrap_or(usize::MAX));
    }
    held.sort_unstable();
    lock_states(tx, &schedules).await?;
    let lanes: BTreeSet<&str> = commits.iter().filter_map(Commit::lane).collect();
    let lanes: Vec<&str> = lanes.into_iter().collect();
    let limits = lock_lanes(tx, &lanes).await?;
    let mut taken = taken(tx, &lanes).await?;
    let (mut fits, mut deferred) = (Vec::new(), Vec::new());
    for at in held {
        let Some((commit, lane)) = commits.get(at).and_then(|commit| Some((commit, commit.lane()?))) else {
            return Err(Error::unexpected("a token of a plan that nobody made").into());
        };
        let taken = taken.entry(lane.to_owned()).or_default();
        let limit = limits.get(lane).copied().flatten();
        if limit.is_some_and(|limit| taken[0] + taken[1] >= limit) {
            taken[1] += 1;
            answers[at] = Committed::Deferred;
            deferred.push((commit, lane));
        } else {
            taken[0] += commit.runs.len() as i64;
            answers[at] = Committed::Held;
            fits.push(commit);
        }
    }
    defer(tx, now, &deferred).await?;
    if !fits.is_empty() {
        let holds = commit_plain(tx, now, &fits, places, (false, true)).await?;
        if !holds.is_some_and(|holds| holds.iter().all(|one| *one == Committed::Held)) {
            return Err(Error::unexpected("a token that was locked is not there").into());
        }
    }
    Ok(answers)
}

/// Whether a lane of commits is limited in what may wait.
pub(super) async fn is_limited(tx: &mut Tx<'_>, commits: &[Commit]) -> Result<bool, Fault> {
    let lanes: BTreeSet<&str> = commits.iter().filter_map(Commit::lane).collect();
    let lanes: Vec<&str> = lanes.into_iter().collect();
    let sql =
        "select 1 from gates where kind = 4 and key = 0 and command = any($1) and queue_limit is not null";
    Ok(!lanes.is_empty() && !tx.query(sql, &[&lanes]).await?.is_empty())
}

/// Whether commits look at nothing but their own schedules, each at another.
pub(super) fn are_plain(commits: &[Commit]) -> bool {
    let mut seen = HashSet::new();
    commits.iter().all(|commit| is_plain(commit) && seen.insert(commit.schedule))
}

/// Lanes with a limit on what waits.
async fn limited_lanes(tx: &mut Tx<'_>) -> Result<HashSet<String>, Fault> {
    let sql = "select command from gates where kind = 4 and key = 0 and queue_limit is not null";
    tx.query(sql, &[]).await?.iter().map(|row| get(row, "command")).collect()
}

async fn lock_states(tx: &mut Tx<'_>, schedules: &[ScheduleId]) -> Result<(), Fault> {
    let sql =
        "select 1 from schedule_state where schedule_id = any($1) order by schedule_id for no key update";
    tx.query(sql, &[&schedules]).await?;
    Ok(())
}

type Limits = HashMap<String, Option<i64>>;

/// Locks the gates of lanes, and gives how many may wait there.
async fn lock_lanes(tx: &mut Tx<'_>, lanes: &[&str]) -> Result<Limits, Fault> {
    let sql = "select command, queue_limit from gates where kind = 4 and key = 0 and command = any($1) \
               order by id for no key update";
    let found = tx.query(sql, &[&lanes]).await?;
    found.iter().map(|row| Ok((get(row, "command")?, get(row, "queue_limit")?))).collect()
}

/// The same for one lane, but nothing where somebody else is at it.
async fn try_lanes(tx: &mut Tx<'_>, lane: &str) -> Result<Option<Limits>, Fault> {
    let sql = "select 1 from gates where kind = 4 and key = 0 and command = $1";
    if tx.query(sql, &[&lane]).await?.is_empty() {
        return Ok(Some(Limits::new()));
    }
    let sql = "select queue_limit from gates where kind = 4 and key = 0 and command = $1 \
               for no key update skip locked";
    let found = tx.query(sql, &[&lane]).await?;
    let Some(row) = found.first() else { return Ok(None) };
    Ok(Some(Limits::from([(lane.to_owned(), get(row, "queue_limit")?)])))
}

/// How many wait in lanes, and how many schedules are deferred there.
async fn taken(tx: &mut Tx<'_>, lanes: &[&str]) -> Result<HashMap<String, [i64; 2]>, Fault> {
    let sql = "select n.lane, queued_in(n.lane) as waiting, \
               (select count(*) from deferred d where d.lane = n.lane) as deferred \
               from unnest($1::text[]) as n (lane)";
    let found = tx.query(sql, &[&lanes]).await?;
    let counts =
        found.iter().map(|row| Ok((get(row, "lane")?, [get(row, "waiting")?, get(row, "deferred")?])));
    counts.collect()
}

/// Keeps ticks whose tokens are ours until there is room for them.
async fn defer(tx: &mut Tx<'_>, now: Timestamp, commits: &[(&Commit, &str)]) -> Result<(), Fault> {
    if commits.is_empty() {
        return Ok(());
    }
    let schedules: Vec<ScheduleId> = commits.iter().map(|(commit, _)| commit.schedule).collect();
    let deferred: Vec<Deferred> = commits.iter().map(|(commit, lane)| commit.deferred(lane, now)).collect();
    let lanes: Vec<&str> = deferred.iter().map(|it| it.lane.as_str()).collect();
    let ticks: Vec<Timestamp> = deferred.iter().map(|it| it.tick_at).collect();
    let since: Vec<Timestamp> = deferred.iter().map(|it| it.since).collect();
    tx.execute("delete from timers where schedule_id = any($1)", &[&schedules]).await?;
    let sql = "insert into deferred (armed, schedule_id, lane, tick_at, since) select false, u.* \
               from unnest($1::bigint[], $2::text[], $3::timestamptz[], $4::timestamptz[]) as u \
               on conflict (schedule_id) do update set armed = false, lane = excluded.lane, \
               tick_at = excluded.tick_at, since = excluded.since";
    tx.execute(sql, &[&schedules, &lanes, &ticks, &since]).await?;
    Ok(())
}

/// Looks again at all lanes where somebody was deferred and is not armed.
pub(super) async fn look_again(tx: &mut Tx<'_>) -> Result<(), Fault> {
    for row in tx.query("select distinct lane from deferred where not armed", &[]).await? {
        tx.makes_room(get(&row, "lane")?);
    }
    Ok(())
}
