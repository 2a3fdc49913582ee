//! Agents and schedules, as sources have them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use belfry_core::definition::{FORMAT, When, read_stored};
use belfry_core::edit::{self, Change};
use belfry_core::gate::turn;
use belfry_core::{AgentDefinition, AgentId, Reason, ScheduleDefinition, ScheduleId, Token};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::books::clear_breakers;
use super::connection::{Fault, Tx};
use super::pause::{take, take_all, write};
use super::plan::cold_of;
use super::rows::{self, get, status_columns};
use super::{Postgres, insert_skips, set_tokens};
use crate::Error;
use crate::memory::{self, Compiled, compile};
use crate::shapes::*;
use crate::views::*;

/// So many new schedules go into one statement.
const CHUNK: usize = 5_000;

/// An agent of a source, read before the transaction begins.
pub(super) struct Spec<'a> {
    pub(super) name: &'a str,
    pub(super) definition: &'a AgentDefinition,
    text: Result<String, String>,
    schedules: Vec<ScheduleSpec<'a>>,
}

impl Spec<'_> {
    /// Whether it has a schedule of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.schedules.iter().any(|schedule| schedule.name == name)
    }
}

struct ScheduleSpec<'a> {
    name: String,
    definition: &'a ScheduleDefinition,
    compiled: Compiled,
    text: Result<String, String>,
}

pub(super) fn compile_all(agents: &[AgentSpec]) -> Vec<Spec<'_>> {
    let schedule = |agent: &str, (name, definition)| {
        let (name, definition): (&String, &ScheduleDefinition) = (name, definition);
        let name = format!("{agent}/{name}");
        let compiled = compile(definition, &name);
        let text = serde_json::to_string(definition).map_err(|error| error.to_string());
        ScheduleSpec { name, definition, compiled, text }
    };
    let agent = |spec| {
        let spec: &AgentSpec = spec;
        let schedules = spec.schedules.iter();
        Spec {
            name: &spec.name,
            definition: &spec.definition,
            text: serde_json::to_string(&spec.definition).map_err(|error| error.to_string()),
            schedules: schedules.map(|(name, definition)| schedule(&spec.name, (name, definition))).collect(),
        }
    };
    agents.iter().map(agent).collect()
}

fn text(text: &Result<String, String>) -> Result<&str, Fault> {
    text.as_deref().map_err(|error| Error::unexpected(format!("a definition: {error}")).into())
}

pub(super) async fn digest(tx: &mut Tx<'_>, source: &str) -> Result<Option<String>, Fault> {
    let found = tx.query("select digest from sources where name = $1", &[&source]).await?;
    found.first().map(|row| get(row, "digest")).transpose()
}

/// A schedule that is there already.
pub(super) struct Known {
    id: ScheduleId,
    pub(super) source: String,
    pub(super) revision: i64,
    pub(super) text: String,
    pub(super) format: i32,
    /// It was retired while a run of it lived, which still does.
    pub(super) is_retired: bool,
}

impl Known {
    pub(super) fn read(row: &Row) -> Result<Known, Fault> {
        Ok(Known {
            id: get(row, "id")?,
            source: get(row, "source")?,
            revision: get(row, "revision")?,
            text: get(row, "definition")?,
            format: get(row, "format")?,
            is_retired: get(row, "is_retired")?,
        })
    }
}

impl Postgres {
    pub(super) async fn apply_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        source: &str,
        digest: &str,
        specs: &[Spec<'_>],
    ) -> Result<Applied, Fault> {
        lock_names(tx).await?;
        let mut applied = Applied::default();
        let agents = self.put_agents(tx, now, source, specs).await?;
        applied.agents = tx.edited() as u32;
        let known = known_schedules(tx, Some(source), specs).await?;
        let mut put = Vec::with_capacity(specs.len());
        for spec in specs {
            let agent = *agents.get(spec.name).ok_or_else(|| Error::unexpected("an agent without an id"))?;
            put.push((agent, spec));
        }
        let mut news = Vec::new();
        for put in put_schedules(tx, now, source, &known, &put).await? {
            applied.count(&put);
            if let Put::Added(id) | Put::Changed(id) = put {
                news.push(id);
            }
        }
        let is_at = |schedule: &ScheduleSpec<'_>| matches!(schedule.definition.when, When::At(_));
        if specs.iter().flat_map(|spec| &spec.schedules).any(is_at) {
            let sql = "select count(*) as expired from schedule_state s join schedules c on c.id = s.schedule_id \
                       where s.schedule_id = any($1) and s.status = 4 and s.origin is null \
                       and (s.planned_at is null or s.cursor_at > s.planned_at) and c.definition like '{\"at\"%'";
            let row = tx.query(sql, &[&news]).await?;
            applied.expired = row.first().map_or(Ok(0), |row| get::<i64>(row, "expired"))? as u32;
        }
        self.retire_missing(tx, now, source, specs, &known, &mut applied).await?;
        let sql = "insert into sources (name, digest, applied_at) values ($1, $2, $3) \
                   on conflict (name) do update set digest = excluded.digest, applied_at = excluded.applied_at";
        tx.execute(sql, &[&source, &digest, &now]).await?;
        self.move_edited(tx).await?;
        self.set_caps(tx, specs, &agents).await?;
        Ok(applied)
    }

    /// Makes the limits what they are now. Who raises one releases what waits behind it.
    pub(super) async fn set_caps(
        &self,
        tx: &mut Tx<'_>,
        specs: &[Spec<'_>],
        agents: &HashMap<String, AgentId>,
    ) -> Result<(), Fault> {
        let caps: BTreeMap<AgentId, Option<i64>> = specs
            .iter()
            .filter_map(|spec| Some((*agents.get(spec.name)?, spec.definition.max_concurrent.map(i64::from))))
            .collect();
        let ids: Vec<AgentId> = caps.keys().copied().collect();
        let caps: Vec<Option<i64>> = caps.into_values().collect();
        // What a newer version wrote keeps its limit.
        let sql = "insert into gates (kind, key, cap) select 0, u.id, u.cap \
                   from unnest($1::bigint[], $2::bigint[]) as u (id, cap) join agents a on a.id = u.id and a.format <= $3 \
                   on conflict (kind, key, command) do update set cap = excluded.cap, cap_at = last_start(gates.id) \
                   where gates.cap is distinct from excluded.cap returning id";
        let changed = tx.query(sql, &[&ids, &caps, &FORMAT]).await?;
        let changed: Vec<i64> = changed.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
        self.release(tx, &changed).await
    }

    async fn retire_missing(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        source: &str,
        specs: &[Spec<'_>],
        known: &HashMap<String, Known>,
        applied: &mut Applied,
    ) -> Result<(), Fault> {
        let agents: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
        let sql = "update agents set retired_at = $3 \
                   where source = $1 and retired_at is null and not (name = any($2)) returning id";
        let gone_agents = tx.query(sql, &[&source, &agents, &now]).await?;
        let gone_agents: Vec<AgentId> =
            gone_agents.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
        let kept: HashSet<&str> =
            specs.iter().flat_map(|spec| &spec.schedules).map(|schedule| schedule.name.as_str()).collect();
        let names: Vec<&str> = kept.iter().copied().collect();
        let sql = "delete from spent where source = $1 and not (name = any($2) \
                   and not exists (select 1 from schedules c where c.name = spent.name and c.retired_at is null))";
        tx.execute(sql, &[&source, &names]).await?;
        let mut gone: Vec<ScheduleId> = known
            .iter()
            .filter(|(name, known)| known.source == source && !kept.contains(name.as_str()))
            .map(|(_, known)| known.id)
            .collect();
        if !gone_agents.is_empty() {
            // Whatever made a schedule, it goes with its agent.
            let sql = "select id from schedules where agent_id = any($1) and retired_at is null";
            for row in tx.query(sql, &[&gone_agents]).await? {
                gone.push(get(&row, "id")?);
            }
        }
        gone.sort_unstable();
        gone.dedup();
        self.retire(tx, now, &gone, applied).await
    }

    /// Retires schedules, and counts them and those of their runs that were waiting and have ended.
    pub(super) async fn retire(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        gone: &[ScheduleId],
        applied: &mut Applied,
    ) -> Result<(), Fault> {
        if gone.is_empty() {
            return Ok(());
        }
        applied.retired = gone.len() as u32;
        let sql = "select distinct agent_id from schedules where id = any($1)";
        let agents: Result<Vec<AgentId>, Fault> =
            tx.query(sql, &[&gone]).await?.iter().map(|row| get(row, "agent_id")).collect();
        lock_timers_and_running(tx, gone, &agents?).await?;
        let mut found = take_all(tx, gone).await?;
        let sql = "select id, name, format, definition from schedules where id = any($1)";
        let mut closed = Vec::new();
        let (mut ids, mut cursors, mut planned) = (Vec::new(), Vec::new(), Vec::new());
        for row in tx.query(sql, &[&gone]).await? {
            let id: ScheduleId = get(&row, "id")?;
            let Some(found) = found.remove(&id) else { continue };
            let cold = cold_of(get(&row, "name")?, get(&row, "format")?, get(&row, "definition")?);
            let change = edit::remove(&found, memory::compiled(&cold.compiled), now);
            closed.extend(change.closed.into_iter().map(|range| (id, range)));
            ids.push(id);
            cursors.push(change.cursor_at);
            planned.push(change.planned_at);
        }
        insert_skips(tx, &closed).await?;
        let sql = "update schedule_state s set cursor_at = u.cursor_at, planned_at = u.planned_at \
                   from unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[]) as u (id, cursor_at, planned_at) \
                   where s.schedule_id = u.id";
        tx.execute(sql, &[&ids, &cursors, &planned]).await?;
        // Those that cannot be read go as well.
        let sql = "update schedule_state set retired = true, waits_for = null, skip_reason = null, \
                   skip_from = null, skip_to = null, skip_count = null where schedule_id = any($1)";
        tx.execute(sql, &[&gone]).await?;
        let sql = "update schedules set retired_at = $2 where id = any($1) returning agent_id";
        for row in tx.query(sql, &[&gone, &now]).await? {
            tx.edits(get(&row, "agent_id")?);
        }
        for (agent_is_gone, reason) in [(true, Reason::AgentRemoved), (false, Reason::ScheduleRemoved)] {
            let sql = "select l.id from live l join schedules c on c.id = l.schedule_id \
                       join agents a on a.id = c.agent_id where l.schedule_id = any($1) and l.state <> 2 \
                       and (a.retired_at is not null) = $2";
            let runs = tx.query(sql, &[&gone, &agent_is_gone]).await?;
            let runs: Vec<Uuid> = runs.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
            if !runs.is_empty() {
                applied.ended.extend(self.end_waiting(tx, now, &runs, reason).await?);
            }
        }
        applied.ended.sort_unstable();
        Ok(())
    }
}

impl Postgres {
    /// Makes agents what they are in the source, and gives their ids.
    pub(super) async fn put_agents(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        source: &str,
        specs: &[Spec<'_>],
    ) -> Result<HashMap<String, AgentId>, Fault> {
        let names: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
        bring_agents_back(tx, &names).await?;
        let sql = "select id, name, source, definition, format from agents where retired_at is null and name = any($1)";
        let mut known = HashMap::new();
        let mut newer = HashSet::new();
        for row in tx.query(sql, &[&names]).await? {
            if get::<i32>(&row, "format")? > FORMAT {
                newer.insert(get::<AgentId>(&row, "id")?);
            }
            let same: (AgentId, String, String) =
                (get(&row, "id")?, get(&row, "source")?, get(&row, "definition")?);
            known.insert(get::<String>(&row, "name")?, same);
        }
        let (mut ids, mut edited) = (HashMap::new(), Vec::new());
        for spec in specs {
            let text = text(&spec.text)?;
            let policies = spec.definition.breaker.is_some() || spec.definition.budget.is_some();
            let format = spec.definition.format();
            let id = match (ids.get(spec.name), known.get(spec.name)) {
                (Some(id), _) => *id,
                (None, Some((id, _, _))) => *id,
                (None, None) => {
                    let sql = "insert into agents (id, source, name, edition, definition, policies, format) \
                               values (nextval('numbers'), $1, $2, nextval('numbers'), $3, $4, $5) returning id";
                    let made = tx.query(sql, &[&source, &spec.name, &text, &policies, &format]).await?;
                    let row = made.first().ok_or_else(|| Error::unexpected("an agent was not made"))?;
                    ids.insert(spec.name.to_owned(), get(row, "id")?);
                    continue;
                }
            };
            // What a newer version wrote stays: that version knows better what it is.
            let same = newer.contains(&id)
                || known.get(spec.name).is_some_and(|(_, from, known)| from == source && known == text);
            if !same {
                let sql = "update agents set source = $2, edition = nextval('numbers'), definition = $3, \
                           policies = $4, format = $5 where id = $1";
                tx.execute(sql, &[&id, &source, &text, &policies, &format]).await?;
            }
            let old = known.get(spec.name).map(|(_, _, known)| known).filter(|known| !same && *known != text);
            if let Some(old) = old {
                if spec.definition.breaker.is_none() {
                    clear_breakers(tx, now, &[id]).await?;
                }
                edited.push(id);
                tx.edits(id);
                let old: Option<AgentDefinition> = read_stored(FORMAT, old).ok();
                let old = old.and_then(|old| old.budget);
                if old != spec.definition.budget {
                    self.redefine_budget(tx, now, id, old.as_ref(), spec.definition.budget.as_ref()).await?;
                }
            }
            ids.insert(spec.name.to_owned(), id);
        }
        // Plans that were made with the old definitions do not hold: they have their limits, labels and lanes. Timers are
        // locked in the order in which everybody locks them: the files name agents in any order.
        let sql = "select touch_token(c.id) from (select id from schedules where agent_id = any($1) \
                   and retired_at is null order by id) c";
        tx.query(sql, &[&edited]).await?;
        Ok(ids)
    }
}

/// Brings agents back that were retired while a run of them lived, if that still does.
async fn bring_agents_back(tx: &mut Tx<'_>, names: &[&str]) -> Result<(), Fault> {
    let sql = "update agents a set retired_at = null where a.retired_at is not null and a.name = any($1) \
               and a.format <= $2 and not exists (select 1 from agents o where o.name = a.name and o.retired_at is null) \
               and exists (select 1 from schedules c join live l on l.schedule_id = c.id where c.agent_id = a.id)";
    tx.execute(sql, &[&names, &FORMAT]).await.map(drop)
}

/// One at a time: names are looked up and then made.
pub(super) async fn lock_names(tx: &mut Tx<'_>) -> Result<(), Fault> {
    tx.query("select pg_advisory_xact_lock(4850464448514)", &[]).await?;
    Ok(())
}

/// Makes the schedules of agents what they are in a source. What the API owns is the API's alone; sources of files take
/// over from each other.
pub(super) async fn put_schedules(
    tx: &mut Tx<'_>,
    now: Timestamp,
    source: &str,
    known: &HashMap<String, Known>,
    agents: &[(AgentId, &Spec<'_>)],
) -> Result<Vec<Put>, Fault> {
    lock_changing(tx, known, agents).await?;
    let mut put = Vec::new();
    let mut fresh: Vec<(AgentId, &ScheduleSpec<'_>)> = Vec::new();
    let mut names = HashSet::new();
    let spent = spent(tx, source).await?;
    for (agent, spec) in agents {
        for schedule in &spec.schedules {
            match known.get(&schedule.name) {
                None | Some(Known { is_retired: true, .. })
                    if spent.get(&schedule.name).is_some_and(|spent| spent == schedule.definition) =>
                {
                    put.push(Put::Spent);
                }
                None if names.insert(schedule.name.as_str()) => {
                    if turn(&schedule.definition.options).is_some() {
                        tx.edits(*agent);
                    }
                    fresh.push((*agent, schedule));
                }
                None => return Err(Error::unexpected(format!("{} is there twice", schedule.name)).into()),
                Some(known) if known.is_retired => {
                    restore(tx, now, source, known, schedule).await?;
                    tx.edits(*agent);
                    put.push(Put::Added(known.id));
                }
                Some(known) if known.format > FORMAT => put.push(Put::OwnedBy(NEWER_VERSION.to_owned())),
                Some(known) if known.source != source && [known.source.as_str(), source].contains(&API) => {
                    put.push(Put::OwnedBy(known.source.clone()));
                }
                Some(known) => {
                    if known.source != source {
                        let sql = "update schedules set source = $2 where id = $1";
                        tx.execute(sql, &[&known.id, &source]).await?;
                    }
                    let changed = change(tx, now, known, schedule).await?;
                    if changed {
                        tx.edits(*agent);
                    }
                    put.push(if changed { Put::Changed(known.id) } else { Put::Unchanged(known.id) });
                }
            }
        }
    }
    for chunk in fresh.chunks(CHUNK) {
        put.extend(insert_schedules(tx, now, source, chunk).await?.into_iter().map(Put::Added));
    }
    Ok(put)
}

/// Schedules of a source of files that went with their run, as their definitions ask.
pub(super) async fn spent(
    tx: &mut Tx<'_>,
    source: &str,
) -> Result<BTreeMap<String, ScheduleDefinition>, Fault> {
    let mut spent = BTreeMap::new();
    let sql = "select name, definition, format from spent where source = $1";
    for row in tx.query(sql, &[&source]).await? {
        if let Ok(definition) = read_stored(get(&row, "format")?, get(&row, "definition")?) {
            spent.insert(get(&row, "name")?, definition);
        }
    }
    Ok(spent)
}

/// Locks what is about to change in the order in which everybody does: all timers, then what runs, then all states. The files
/// name schedules in any order.
async fn lock_changing(
    tx: &mut Tx<'_>,
    known: &HashMap<String, Known>,
    agents: &[(AgentId, &Spec<'_>)],
) -> Result<(), Fault> {
    let (mut changing, mut edited) = (Vec::new(), Vec::new());
    for (agent, schedule) in
        agents.iter().flat_map(|(agent, spec)| spec.schedules.iter().map(move |it| (agent, it)))
    {
        match known.get(&schedule.name) {
            Some(known)
                if known.is_retired || schedule.text.as_ref().is_ok_and(|text| *text != known.text) =>
            {
                changing.push(known.id);
                edited.push(*agent);
            }
            Some(_) => {}
            None if turn(&schedule.definition.options).is_some() => edited.push(*agent),
            None => {}
        }
    }
    if edited.is_empty() {
        return Ok(());
    }
    lock_timers_and_running(tx, &changing, &edited).await?;
    let states =
        "select 1 from schedule_state where schedule_id = any($1) order by schedule_id for no key update";
    tx.query(states, &[&changing]).await.map(drop)
}

/// Locks timers of schedules, and what runs of their agents: an edit moves it, see [`Postgres::move_edited`]. The end of a run
/// takes that before the state of its schedule, too.
async fn lock_timers_and_running(
    tx: &mut Tx<'_>,
    schedules: &[ScheduleId],
    agents: &[AgentId],
) -> Result<(), Fault> {
    let sql = "select 1 from timers where schedule_id = any($1) order by schedule_id for update";
    tx.query(sql, &[&schedules]).await?;
    // Other edits wait behind this one.
    tx.waits_for_locks("2s").await?;
    let sql = "select 1 from live where schedule_id = any(array(select id from schedules where agent_id = any($1))) \
               and state = 2 order by id for update";
    tx.query(sql, &[&agents]).await?;
    tx.waits_for_locks("10s").await
}

/// Schedules that have a name of the source or come from it. One that was retired is among them while a run of it lives: it
/// is what comes back under its name.
pub(super) async fn known_schedules(
    tx: &mut Tx<'_>,
    source: Option<&str>,
    specs: &[Spec<'_>],
) -> Result<HashMap<String, Known>, Fault> {
    let names: Vec<&str> =
        specs.iter().flat_map(|spec| &spec.schedules).map(|schedule| schedule.name.as_str()).collect();
    let sql = "select id, name, source, revision, definition, format, false as is_retired from schedules \
               where retired_at is null and (source = $1 or name = any($2)) \
               union all select c.id, c.name, c.source, c.revision, c.definition, c.format, true from schedules c \
               join agents a on a.id = c.agent_id and a.retired_at is null \
               where c.retired_at is not null and c.name = any($2) and c.format <= $3 \
               and not exists (select 1 from schedules o where o.name = c.name and o.retired_at is null) \
               and exists (select 1 from live l where l.schedule_id = c.id)";
    let mut known = HashMap::new();
    for row in tx.query(sql, &[&source, &names, &FORMAT]).await? {
        known.insert(get(&row, "name")?, Known::read(&row)?);
    }
    Ok(known)
}

async fn insert_schedules(
    tx: &mut Tx<'_>,
    now: Timestamp,
    source: &str,
    fresh: &[(AgentId, &ScheduleSpec<'_>)],
) -> Result<Vec<ScheduleId>, Fault> {
    let sql = "select nextval('numbers') as id from generate_series(1, $1::bigint)";
    let ids = tx.query(sql, &[&(fresh.len() as i64)]).await?;
    let ids: Vec<ScheduleId> = ids.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
    let agents: Vec<AgentId> = fresh.iter().map(|(agent, _)| *agent).collect();
    let names: Vec<&str> = fresh.iter().map(|(_, spec)| spec.name.as_str()).collect();
    let formats: Vec<i32> = fresh.iter().map(|(_, spec)| spec.definition.format()).collect();
    let texts: Vec<&str> = fresh.iter().map(|(_, spec)| text(&spec.text)).collect::<Result<_, Fault>>()?;
    let sql = "insert into schedules (source, revision, id, agent_id, name, definition, format) \
               select $1::text, 1, u.* \
               from unnest($2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::integer[]) as u";
    tx.execute(sql, &[&source, &ids, &agents, &names, &texts, &formats]).await?;
    // What an earlier schedule of the same name has taken is not taken again.
    let sql = "update idempotency i set schedule_id = u.id from unnest($1::bigint[], $2::text[]) as u (id, name) \
               join schedules old on old.name = u.name and old.id <> u.id where i.schedule_id = old.id";
    tx.execute(sql, &[&ids, &names]).await?;
    let sql = "insert into schedule_revisions (revision, from_at, schedule_id, definition, format) \
               select 1, $1::timestamptz, u.* from unnest($2::bigint[], $3::text[], $4::integer[]) as u";
    tx.execute(sql, &[&now, &ids, &texts, &formats]).await?;
    let sql = "select old.name, max(s.planned_at) as planned_at from schedules old \
               join schedule_state s on s.schedule_id = old.id where old.name = any($1) and old.id <> all($2) group by old.name";
    let mut planned_before: HashMap<String, Option<Timestamp>> = HashMap::new();
    for row in tx.query(sql, &[&names, &ids]).await? {
        planned_before.insert(get(&row, "name")?, get(&row, "planned_at")?);
    }
    let add = |(_, spec): &(AgentId, &ScheduleSpec<'_>)| {
        let before = planned_before.get(&spec.name).copied().flatten();
        edit::add(spec.definition, memory::compiled(&spec.compiled), before, now)
    };
    let added: Vec<Change> = fresh.iter().map(add).collect();
    let codes: Vec<i16> = added.iter().map(|change| status_columns(&change.status).0).collect();
    let reasons: Vec<Option<&str>> = added.iter().map(|change| status_columns(&change.status).1).collect();
    let going: Vec<bool> = fresh.iter().map(|(_, spec)| spec.definition.options.delete_after_run).collect();
    let origins: Vec<Option<Timestamp>> = added.iter().map(|change| change.origin).collect();
    let cursors: Vec<Option<Timestamp>> = added.iter().map(|change| change.cursor_at).collect();
    let planned: Vec<Option<Timestamp>> = added.iter().map(|change| change.planned_at).collect();
    let sql = "insert into schedule_state (edition, status_since, schedule_id, agent_id, delete_after_run, status, \
               status_reason, origin, cursor_at, planned_at) select nextval('numbers'), $1::timestamptz, u.* \
               from unnest($2::bigint[], $3::bigint[], $4::boolean[], $5::smallint[], $6::text[], \
               $7::timestamptz[], $8::timestamptz[], $9::timestamptz[]) as u";
    tx.execute(sql, &[&now, &ids, &agents, &going, &codes, &reasons, &origins, &cursors, &planned]).await?;
    let tokens: Vec<(ScheduleId, Token)> =
        ids.iter().zip(&added).filter_map(|(id, change)| Some((*id, change.timer?))).collect();
    set_tokens(tx, &tokens).await?;
    Ok(ids)
}

/// Makes a schedule what it is in the source; `false` where it is so already.
async fn change(
    tx: &mut Tx<'_>,
    now: Timestamp,
    known: &Known,
    spec: &ScheduleSpec<'_>,
) -> Result<bool, Fault> {
    let text = text(&spec.text)?;
    if known.text == text {
        return Ok(false);
    }
    let old: Option<ScheduleDefinition> = read_stored(known.format, &known.text).ok();
    if old.as_ref() == Some(spec.definition) {
        return Ok(false);
    }
    let compiled = memory::compiled(&spec.compiled);
    let status = "select * from schedule_state where schedule_id = $1 and not retired";
    let status = tx.query(status, &[&known.id]).await?.first().map(rows::status).transpose()?;
    let moves = edit::redefines(&status.ok_or(Fault::Again)?, old.as_ref(), spec.definition, compiled);
    let change = match moves {
        true => {
            let found = take(tx, known.id).await?.ok_or(Fault::Again)?;
            let old_compiled =
                old.as_ref().map_or_else(|| Err(Arc::from("")), |old| compile(old, &spec.name));
            let old = (old.as_ref(), memory::compiled(&old_compiled));
            Some(edit::define(&found, old, (spec.definition, compiled), now))
        }
        false => {
            // Plans that were made with the old definition do not hold.
            tx.query("select touch_token($1)", &[&known.id]).await?;
            None
        }
    };
    write_changed(tx, now, known, spec, change.as_ref()).await?;
    Ok(true)
}

/// Brings a schedule back that was retired. A run of it lives, and counts for it again.
async fn restore(
    tx: &mut Tx<'_>,
    now: Timestamp,
    source: &str,
    known: &Known,
    spec: &ScheduleSpec<'_>,
) -> Result<(), Fault> {
    let sql = "update schedules set retired_at = null, source = $2 where id = $1";
    tx.execute(sql, &[&known.id, &source]).await?;
    tx.execute("update schedule_state set retired = false where schedule_id = $1", &[&known.id]).await?;
    let found = take(tx, known.id).await?.ok_or(Fault::Again)?;
    let change = edit::restore(&found, spec.definition, memory::compiled(&spec.compiled), now);
    write_changed(tx, now, known, spec, Some(&change)).await
}

/// Writes a new definition, and what it changes beside that.
async fn write_changed(
    tx: &mut Tx<'_>,
    now: Timestamp,
    known: &Known,
    spec: &ScheduleSpec<'_>,
    change: Option<&Change>,
) -> Result<(), Fault> {
    let text = text(&spec.text)?;
    let new_revision = change.is_some_and(|change| change.new_revision);
    let revision = known.revision + i64::from(new_revision);
    let format = spec.definition.format();
    let sql = "update schedules set definition = $2, revision = $3, format = $4 where id = $1";
    tx.execute(sql, &[&known.id, &text, &revision, &format]).await?;
    let sql = "update schedule_state set edition = nextval('numbers'), delete_after_run = $2 where schedule_id = $1";
    tx.execute(sql, &[&known.id, &spec.definition.options.delete_after_run]).await?;
    if let Some(change) = change {
        write(tx, known.id, change).await?;
    }
    if new_revision {
        let sql = "insert into schedule_revisions (schedule_id, revision, from_at, definition, format) \
                   values ($1, $2, $3, $4, $5) on conflict do nothing";
        tx.execute(sql, &[&known.id, &revision, &now, &text, &format]).await?;
        if revision > edit::REVISIONS_KEPT {
            let sql = "delete from schedule_revisions where schedule_id = $1 and revision <= $2";
            tx.execute(sql, &[&known.id, &(revision - edit::REVISIONS_KEPT)]).await?;
        }
    }
    Ok(())
}
