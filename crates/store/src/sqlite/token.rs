//! Tokens and the audit.

use belfry_core::RunId;
use belfry_time::Timestamp;
use rusqlite::{Row, params};
use uuid::Uuid;

use super::{Sqlite, instant, maybe_instant, maybe_number, micros, number, text};
use crate::access::*;
use crate::shapes::Key;
use crate::store::{Access, Answer};
use crate::unknown;
use crate::views::Page;

fn token(row: &Row<'_>) -> rusqlite::Result<TokenRecord> {
    Ok(TokenRecord {
        id: text(row, "id")?,
        hash: row.get("hash")?,
        cookie_hash: row.get("cookie_hash")?,
        scope: Scope::from_code(number(row, "scope")?),
        label: text(row, "label")?,
        created_at: instant(row, "created_at")?,
        expires_at: unknown::expiry(maybe_instant(row, "expires_at")?),
        revoked_at: maybe_instant(row, "revoked_at")?,
    })
}

fn entry(row: &Row<'_>) -> rusqlite::Result<AuditRow> {
    let entry = AuditEntry {
        at: instant(row, "at")?,
        actor: text(row, "actor")?,
        action: text(row, "action")?,
        target: text(row, "target")?,
        peer: text(row, "peer")?,
        status: maybe_number(row, "status")?,
    };
    Ok((row.get("number")?, entry))
}

impl Access for Sqlite {
    async fn add_token(&self, token: &TokenRecord) -> Answer<AddedToken> {
        let token = token.clone();
        self.write(move |verb| {
            verb.execute(
                "delete from tokens where cookie_hash is not null and (revoked_at is not null or expires_at <= ?)",
                [micros(token.created_at)],
            )?;
            let added = verb.execute(
                "insert into tokens (id, hash, cookie_hash, scope, label, created_at, expires_at, revoked_at)
                 select ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 where (select count(*) from tokens) < ?9 on conflict do nothing",
                params![
                    token.id,
                    token.hash,
                    token.cookie_hash,
                    token.scope.code(),
                    token.label,
                    micros(token.created_at),
                    token.expires_at.map(micros),
                    token.revoked_at.map(micros),
                    TOKENS_MAX as i64
                ],
            )?;
            let taken = verb.row("select 1 from tokens where id = ?", [token.id], |_| Ok(()))?.is_some();
            Ok(match (added, taken) {
                (1.., _) => AddedToken::Added,
                (0, true) => AddedToken::Taken,
                (0, false) => AddedToken::Full,
            })
        })
        .await
    }

    async fn tokens(&self) -> Answer<Vec<TokenRecord>> {
        self.read(|verb| verb.rows("select * from tokens order by id", [], token)).await
    }

    async fn revoke_token(&self, now: Timestamp, id: &str) -> Answer<bool> {
        let id = id.to_owned();
        self.write(move |verb| {
            let sql = "update tokens set revoked_at = ? where id = ? and revoked_at is null";
            Ok(verb.execute(sql, params![micros(now), id])? > 0)
        })
        .await
    }

    async fn use_key(&self, now: Timestamp, key: &Key) -> Answer<bool> {
        let key = key.clone();
        self.write(move |verb| match verb.first_with(now, NO_SCHEDULE, Some(&key))? {
            Some((_, is_same)) => Ok(is_same),
            None => verb.take_key(NO_SCHEDULE, &key, RunId(Uuid::nil())).map(|()| true),
        })
        .await
    }

    async fn begin_audit(&self, entry: &AuditEntry) -> Answer<i64> {
        let entry = entry.clone();
        self.write(move |verb| {
            verb.execute(
                "insert into audit (at, actor, action, target, peer, status) values (?, ?, ?, ?, ?, ?)",
                params![micros(entry.at), entry.actor, entry.action, entry.target, entry.peer, entry.status],
            )?;
            Ok(verb.connection.last_insert_rowid())
        })
        .await
    }

    async fn end_audit(&self, number: i64, status: Option<u16>) -> Answer<()> {
        self.write(move |verb| match status {
            Some(status) => verb
                .execute("update audit set status = ? where number = ?", params![status, number])
                .map(drop),
            None => verb.execute("delete from audit where number = ?", [number]).map(drop),
        })
        .await
    }

    async fn audits(&self, before: Option<i64>, limit: u32) -> Answer<Page<AuditRow, i64>> {
        let sql = "select * from audit where number < ? order by number desc limit ?";
        let asked = params_of(before, limit);
        let found = self.read(move |verb| verb.rows(sql, asked, entry)).await?;
        Ok(Page::of_numbered(found, limit))
    }

    async fn prune_access(&self, before: Timestamp, batch: u32) -> Answer<u32> {
        self.write(move |verb| {
            let audit = verb.execute(
                "delete from audit where number in (select number from audit where at < ? order by at limit ?)",
                params![micros(before), batch],
            )?;
            let tokens = verb.execute(
                "delete from tokens where id in
                   (select id from tokens where coalesce(revoked_at, expires_at) < ? order by id limit ?)",
                params![micros(before), batch],
            )?;
            Ok((audit + tokens) as u32)
        })
        .await
    }
}

fn params_of(before: Option<i64>, limit: u32) -> (i64, i64) {
    (before.unwrap_or(i64::MAX), i64::from(limit) + 1)
}
