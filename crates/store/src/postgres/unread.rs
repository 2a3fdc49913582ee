//! What this version cannot read.

use std::sync::Arc;

use belfry_core::definition::{FORMAT, Unreadable, read_stored};
use belfry_core::{AgentDefinition, ScheduleDefinition};
use tokio_postgres::Row;

use super::Postgres;
use super::connection::{Fault, Tx};
use super::rows::get;
use crate::unread::UNREAD_MAX;
use crate::views::UnreadableSchedule;

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
