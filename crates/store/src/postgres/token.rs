//! Tokens and the audit.

use std::sync::atomic::{AtomicBool, Ordering};

use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::Fault;
use super::rows::get;
use super::{Postgres, enqueue};
use crate::Error;
use crate::access::*;
use crate::shapes::Key;
use crate::store::{Access, Answer};
use crate::unknown;
use crate::views::Page;

fn token(row: &Row) -> Result<TokenRecord, Fault> {
    Ok(TokenRecord {
        id: get(row, "id")?,
        hash: get(row, "hash")?,
        cookie_hash: get(row, "cookie_hash")?,
        scope: Scope::from_code(get(row, "scope")?),
        label: get(row, "label")?,
        created_at: get(row, "created_at")?,
        expires_at: unknown::expiry(get(row, "expires_at")?),
        revoked_at: get(row, "revoked_at")?,
    })
}

fn entry(row: &Row) -> Result<AuditRow, Fault> {
    let status: Option<i32> = get(row, "status")?;
    let entry = AuditEntry {
        at: get(row, "at")?,
        actor: get(row, "actor")?,
        action: get(row, "action")?,
        target: get(row, "target")?,
        peer: get(row, "peer")?,
        status: status.and_then(|status| u16::try_from(status).ok()),
    };
    Ok((get(row, "number")?, entry))
}

impl Access for Postgres {
    async fn add_token(&self, token: &TokenRecord) -> Answer<AddedToken> {
        transact!(self, |tx| {
            async {
            // Whoever else adds one waits, so that the number holds.
            tx.execute("lock table tokens in share row exclusive mode", &[]).await?;
            let sql = "delete from tokens \
                       where cookie_hash is not null and (revoked_at is not null or expires_at <= $1)";
            tx.execute(sql, &[&token.created_at]).await?;
            let taken = tx.query("select 1 from tokens where id = $1", &[&token.id]).await?;
            if !taken.is_empty() {
                return Ok(AddedToken::Taken);
            }
            let known = tx.query("select count(*) as known from tokens", &[]).await?;
            let known: i64 = known.first().map_or(Ok(0), |row| get(row, "known"))?;
            if known >= TOKENS_MAX as i64 {
                return Ok(AddedToken::Full);
            }
            let sql = "insert into tokens (id, hash, cookie_hash, scope, label, created_at, expires_at, revoked_at) \
                       values ($1, $2, $3, $4, $5, $6, $7, $8)";
            let scope = token.scope.code();
            tx.execute(
                sql,
                &[
                    &token.id,
                    &token.hash,
                    &token.cookie_hash,
                    &scope,
                    &token.label,
                    &token.created_at,
                    &token.expires_at,
                    &token.revoked_at,
                ],
            )
            .await?;
            Ok::<_, Fault>(AddedToken::Added)
        }
        .await
        })
    }

    async fn tokens(&self) -> Answer<Vec<TokenRecord>> {
        look!(self, |tx| async {
            let found = tx.query("select * from tokens order by id", &[]).await?;
            found.iter().map(token).collect::<Result<Vec<_>, Fault>>()
        }
        .await)
    }

    async fn revoke_token(&self, now: Timestamp, id: &str) -> Answer<bool> {
        transact!(self, |tx| async {
            let sql = "update tokens set revoked_at = $1 where id = $2 and revoked_at is null";
            Ok::<_, Fault>(tx.execute(sql, &[&now, &id]).await? > 0)
        }
        .await)
    }

    async fn use_key(&self, now: Timestamp, key: &Key) -> Answer<bool> {
        transact!(self, |tx| async {
            let first = enqueue::first_with(&mut tx, now, NO_SCHEDULE, Uuid::nil(), key).await?;
            Ok::<_, Fault>(first.is_none_or(|(_, is_same)| is_same))
        }
        .await)
    }

    async fn begin_audit(&self, entry: &AuditEntry) -> Answer<i64> {
        let status = entry.status.map(i32::from);
        transact!(self, |tx| async {
            let sql = "insert into audit (at, actor, action, target, peer, status) \
                       values ($1, $2, $3, $4, $5, $6) returning number";
            let made = tx
                .query(sql, &[&entry.at, &entry.actor, &entry.action, &entry.target, &entry.peer, &status])
                .await?;
            let row = made.first().ok_or_else(|| Error::unexpected("a row of the audit was not made"))?;
            get(row, "number")
        }
        .await)
    }

    async fn end_audit(&self, number: i64, status: Option<u16>) -> Answer<()> {
        let status = status.map(i32::from);
        transact!(self, |tx| async {
            // Nobody waits for the disk: what a crash undoes here is said to be unknown, and so it is.
            tx.execute("set local synchronous_commit = off", &[]).await?;
            match status {
                Some(_) => {
                    tx.execute("update audit set status = $2 where number = $1", &[&number, &status]).await?
                }
                None => tx.execute("delete from audit where number = $1", &[&number]).await?,
            };
            Ok::<_, Fault>(())
        }
        .await)
    }

    async fn audits(&self, before: Option<i64>, limit: u32) -> Answer<Page<AuditRow, i64>> {
        let (before, more) = (before.unwrap_or(i64::MAX), i64::from(limit) + 1);
        let found = look!(self, |tx| async {
            let sql = "select * from audit where number < $1 order by number desc limit $2";
            let found = tx.query(sql, &[&before, &more]).await?;
            found.iter().map(entry).collect::<Result<Vec<_>, Fault>>()
        }
        .await)?;
        Ok(Page::of_numbered(found, limit))
    }

    async fn prune_access(&self, before: Timestamp, batch: u32) -> Answer<u32> {
        let batch = i64::from(batch);
        transact!(self, |tx| {
            async {
            let sql =
                "delete from audit where number in (select number from audit where at < $1 order by at limit $2)";
            let audit = tx.execute(sql, &[&before, &batch]).await?;
            let sql = "delete from tokens where id in (select id from tokens \
                       where coalesce(revoked_at, expires_at) < $1 order by id limit $2)";
            let tokens = tx.execute(sql, &[&before, &batch]).await?;
            Ok::<_, Fault>(u32::try_from(audit + tokens).unwrap_or(u32::MAX))
        }
        .await
        })
    }
}
