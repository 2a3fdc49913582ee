//! What this version cannot read.

use std::sync::Arc;

use belfry_core::definition::{FORMAT, Unreadable, read_stored};
use belfry_core::{AgentDefinition, ScheduleDefinition};
use tokio_postgres::Row;

use super::Postgres;
use super::connection::{Fault, Tx};
use super::finish::UNPARK;
use super::rows::get;
use crate::unread::{UNREAD_MAX, UNREADABLE_ROWS_MAX};
use crate::views::UnreadableSchedule;

/// Whether no claim can start a run: it adds one to both.
macro_rules! unclaimable {
    () => {
        "(epoch > 2147483646 or attempt > 4294967294)"
    };
}

impl Postgres {
    /// Looks by format, which takes an index of those that not every version can read, and again at those that were found
    /// broken on the way.
    pub(super) async fn find_unreadable(&self, tx: &mut Tx<'_>) -> Result<Vec<UnreadableSchedule>, Fault> {
        let sql = "select s.id, s.name, s.format, a.format as agent_format, \
                   case when s.id = any($2) then s.definition end as definition, \
                   case when s.id = any($2) then a.definition end as agent_definition \
                   from schedules s join agents a on a.id = s.agent_id \
                   where s.retired_at is null and s.id = any(array( \
                       select id from schedules where format > 1 and format > $1 \
                       union select c.id from agents g join schedules c on c.agent_id = g.id \
                           where g.format > 1 and g.format > $1 \
                       union select unnest($2::bigint[]))) order by s.id limit $3";
        let known = self.unread.ids();
        let mut unreadable = Vec::new();
        for row in tx.query(sql, &[&FORMAT, &known, &(UNREAD_MAX as i64)]).await? {
            if let Some(why) = why(&row)? {
                let why = Arc::from(why.to_string());
                unreadable.push(UnreadableSchedule {
                    schedule: get(&row, "id")?,
                    name: get(&row, "name")?,
                    why,
                });
            }
        }
        self.unread.set(unreadable.iter().map(|found| (found.schedule, found.why.clone())));
        Ok(unreadable)
    }
}

fn why(row: &Row) -> Result<Option<Unreadable>, Fault> {
    let format = get::<i32>(row, "format")?.max(get(row, "agent_format")?);
    if format > FORMAT {
        return Ok(Some(Unreadable::Newer { format }));
    }
    let schedule = get::<Option<&str>>(row, "definition")?.unwrap_or("");
    let agent = get::<Option<&str>>(row, "agent_definition")?.unwrap_or("");
    let read = read_stored::<ScheduleDefinition>(format, schedule).err();
    Ok(read.or_else(|| read_stored::<AgentDefinition>(format, agent).err()))
}

/// Parks waiting runs that no claim can start, at no gate, and names them. Every other run can be claimed then: what waited
/// behind them is let through. A claim makes those ready that came back or that a gate held, and takes that back when it
/// fails: they are among these.
pub(super) async fn set_aside(tx: &mut Tx<'_>) -> Result<Vec<String>, Fault> {
    let sql = concat!(
        "select id from gates where id in (select unnest(array[agent_gate, turn_gate, alone_gate]) from live \
         where (state in (0, 3) or parked_on is not null) and ",
        unclaimable!(),
        ") order by id for update"
    );
    let gates =
        tx.query(sql, &[]).await?.iter().map(|row| get(row, "id")).collect::<Result<Vec<i64>, _>>()?;
    let sql = concat!(
        "update live set state = 1, parked_on = null, turn_gate = null, alone_gate = null \
         where (state in (0, 3) or parked_on is not null) and ",
        unclaimable!(),
        " returning id::text as run"
    );
    let named = tx.query(sql, &[]).await?.iter().map(|row| get(row, "run")).collect();
    tx.query(UNPARK, &[&gates]).await?;
    named
}

pub(super) async fn unreadable_rows(tx: &mut Tx<'_>) -> Result<Vec<String>, Fault> {
    let mut found = Vec::new();
    for sql in UNREADABLE_ROWS {
        for row in tx.query(sql, &[&UNREADABLE_ROWS_MAX]).await? {
            found.push(row.try_get::<_, String>(0)?);
        }
    }
    Ok(found)
}

/// Whether an instant is out of range: none is not.
macro_rules! beyond {
    ($at:literal) => {
        concat!("(", $at, " < '0001-01-01Z' or ", $at, " > '9999-12-30 22:00:00Z')")
    };
}

/// Whether a number is: none is not.
macro_rules! no_u32 {
    ($number:literal) => {
        concat!("(", $number, " < 0 or ", $number, " > 4294967295)")
    };
}

/// Rows of which a part counts as something else: each query gives a sentence for each row.
const UNREADABLE_ROWS: &[&str] = &[
    concat!(
        "select format('run %s: its stored epoch or attempt is out of range; it is never started. `belfry cancel` ends it', id) \
         from live where ",
        unclaimable!(),
        " limit $1"
    ),
    "select format('a timer of schedule %s, which does not exist: nothing is planned for it', schedule_id) from timers t \
     where not exists (select 1 from schedule_state s where s.schedule_id = t.schedule_id) limit $1",
    "select format('schedule %s: its agent %s does not exist; nothing is planned for it, and lists leave it out', name, agent_id) \
     from schedules s where retired_at is null and not exists (select 1 from agents a where a.id = s.agent_id) limit $1",
    concat!(
        "select format('agent %s: its stored failure budget is out of range', coalesce(a.name, b.agent_id::text)) \
         from budgets b left join agents a on a.id = b.agent_id where ",
        beyond!("b.period_start"),
        " or ",
        no_u32!("b.failures"),
        " limit $1"
    ),
    concat!(
        "select format('agent %s: its stored breaker cannot be read; it counts as closed', coalesce(a.name, b.agent_id::text)) \
         from breakers b left join agents a on a.id = b.agent_id where b.state not between 0 and 2 or ",
        no_u32!("b.failures"),
        " or ",
        beyond!("b.opened_at"),
        " limit $1"
    ),
    concat!(
        "select format('schedule %s: an instant of its stored state is out of range', c.name) \
         from schedule_state s join schedules c on c.id = s.schedule_id where not s.retired and (",
        beyond!("s.status_since"),
        " or ",
        beyond!("s.status_until"),
        " or ",
        beyond!("s.origin"),
        " or ",
        beyond!("s.skip_from"),
        " or ",
        beyond!("s.skip_to"),
        " or ",
        beyond!("s.last_tick_at"),
        " or ",
        beyond!("s.last_finished_at"),
        " or ",
        beyond!("s.last_success_at"),
        ") limit $1"
    ),
    concat!(
        "select format('lane %s: its stored slots or limits are out of range; the nearest number holds', name) \
         from lanes where ",
        no_u32!("slots"),
        " or ",
        no_u32!("cap"),
        " or ",
        no_u32!("queue_limit"),
        " limit $1"
    ),
    concat!(
        "select format('node %s: an instant of it is out of range', id) from nodes where not fenced and (",
        beyond!("started_at"),
        " or ",
        beyond!("lease_until"),
        " or ",
        beyond!("last_seen_at"),
        ") limit $1"
    ),
    "select format('snapshot %s cannot be read', number) \
     from (select number, snapshot from snapshots order by number desc limit 1000) s \
     where snapshot not like '{%}' limit $1",
    concat!(
        "select format('row %s of the audit: its instant or status is out of range', number) \
         from (select number, at, status from audit order by number desc limit 1000) a where ",
        beyond!("at"),
        " or status not between 0 and 65535 limit $1"
    ),
    concat!(
        "select format('token %s: an instant of it is out of range; one with such an expiry has expired', id) \
         from tokens where ",
        beyond!("created_at"),
        " or ",
        beyond!("expires_at"),
        " or ",
        beyond!("revoked_at"),
        " limit $1"
    ),
];
