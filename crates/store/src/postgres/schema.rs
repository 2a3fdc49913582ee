//! The schema and its versions. Only forward: a database that a newer Belfry has made is left alone.

use tokio_postgres::Client;

use super::connection::{Fault, error_of};
use crate::Error;

/// Every step from an empty database to today's schema, in order.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (
        1,
        "initial",
        concat!(include_str!("migrations/0001_initial.sql"), include_str!("migrations/0001_functions.sql")),
    ),
    (2, "tokens", include_str!("migrations/0002_tokens.sql")),
];

/// Held while the schema is looked at and changed, so that any number of nodes may start at once.
const LOCK: &str = "select pg_advisory_xact_lock(4850464448513)";

/// Brings the database to today's schema, or says why it cannot.
pub(super) async fn migrate(client: &Client, place: &str) -> Result<(), Error> {
    let outcome = async {
        client.batch_execute("begin; set local lock_timeout = 0; set local statement_timeout = 0").await?;
        client.batch_execute(LOCK).await?;
        step(client, place).await
    }
    .await;
    let end = if outcome.is_ok() { "commit" } else { "rollback" };
    let ended = client.batch_execute(end).await;
    outcome.map_err(|fault| error_of(fault, place))?;
    ended.map_err(|error| error_of(error.into(), place))
}

async fn step(client: &Client, place: &str) -> Result<(), Fault> {
    let found = version(client, place).await?;
    let known = MIGRATIONS.last().map_or(0, |(version, ..)| *version);
    if found > known {
        return Err(Error::Newer { place: place.to_owned(), found, known }.into());
    }
    for (version, name, sql) in MIGRATIONS.iter().filter(|(version, ..)| *version > found) {
        client.batch_execute(sql).await?;
        let record = "insert into migrations (version, name, applied_at) values ($1, $2, now())";
        client.execute(record, &[version, name]).await?;
    }
    Ok(())
}

/// The schema's version. Makes the table of versions where there is nothing at all.
async fn version(client: &Client, place: &str) -> Result<i64, Fault> {
    let foreign = |detail: &str| Error::Foreign { place: place.to_owned(), detail: detail.to_owned() };
    let found = "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                 where n.nspname = 'belfry' and c.relkind in ('r', 'p', 'v', 'm', 'S', 'f')";
    let names: Vec<String> = client.query(found, &[]).await?.iter().map(|row| row.get(0)).collect();
    if names.is_empty() {
        client.batch_execute("create schema if not exists belfry").await?;
        let table = "create table belfry.migrations (version bigint primary key, name text not null, \
                     applied_at timestamptz not null)";
        client.batch_execute(table).await?;
        return Ok(0);
    }
    if !names.iter().any(|name| name == "migrations") {
        return Err(foreign("its schema `belfry` has tables that Belfry did not make").into());
    }
    let columns = "select count(*) from information_schema.columns where table_schema = 'belfry' \
                   and table_name = 'migrations' and column_name in ('version', 'name', 'applied_at')";
    if client.query_one(columns, &[]).await?.get::<_, i64>(0) != 3 {
        return Err(foreign("its table `belfry.migrations` is not Belfry's").into());
    }
    let applied = client
        .query("select version, name from belfry.migrations order by version", &[])
        .await
        .map_err(|error| match error.as_db_error() {
            Some(_) => Fault::Store(foreign("its table `belfry.migrations` is not Belfry's")),
            None => Fault::Database(error),
        })?;
    let mut last = 0;
    for row in &applied {
        let (version, name): (i64, String) = match (row.try_get(0), row.try_get(1)) {
            (Ok(version), Ok(name)) => (version, name),
            _ => return Err(foreign("its table `belfry.migrations` is not Belfry's").into()),
        };
        let ours = MIGRATIONS.iter().find(|(known, ..)| *known == version);
        if ours.is_some_and(|(_, known, _)| *known != name) {
            return Err(foreign("its migrations are not Belfry's").into());
        }
        last = version;
    }
    if last == 0 {
        return Err(foreign("its table `belfry.migrations` is empty").into());
    }
    Ok(last)
}
