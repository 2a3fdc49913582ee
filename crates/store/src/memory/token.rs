//! Tokens and the audit.

use std::collections::BTreeMap;

use belfry_core::RunId;
use belfry_time::Timestamp;
use uuid::Uuid;

use super::Memory;
use crate::access::*;
use crate::shapes::Key;
use crate::store::{Access, Answer};
use crate::views::Page;

#[derive(Default)]
pub(super) struct Doors {
    tokens: BTreeMap<String, TokenRecord>,
    audit: BTreeMap<i64, AuditEntry>,
    last: i64,
}

impl Access for Memory {
    async fn add_token(&self, token: &TokenRecord) -> Answer<AddedToken> {
        let mut doors = self.doors.lock();
        doors.tokens.retain(|_, known| !known.is_login() || known.is_good(token.created_at));
        if doors.tokens.contains_key(&token.id) {
            return Ok(AddedToken::Taken);
        }
        if doors.tokens.len() >= TOKENS_MAX {
            return Ok(AddedToken::Full);
        }
        doors.tokens.insert(token.id.clone(), token.clone());
        Ok(AddedToken::Added)
    }

    async fn tokens(&self) -> Answer<Vec<TokenRecord>> {
        Ok(self.doors.lock().tokens.values().cloned().collect())
    }

    async fn revoke_token(&self, now: Timestamp, id: &str) -> Answer<bool> {
        let mut doors = self.doors.lock();
        let token = doors.tokens.get_mut(id).filter(|token| token.revoked_at.is_none());
        Ok(token.map(|token| token.revoked_at = Some(now)).is_some())
    }

    async fn use_key(&self, now: Timestamp, key: &Key) -> Answer<bool> {
        let mut state = self.state.lock();
        let place = (NO_SCHEDULE, key.key.clone());
        match state.keys.get(&place).filter(|(_, kept)| kept.expires_at > now) {
            Some((_, kept)) => Ok(kept.body_hash == key.body_hash),
            None => {
                state.keys.insert(place, (RunId(Uuid::nil()), key.clone()));
                Ok(true)
            }
        }
    }

    async fn begin_audit(&self, entry: &AuditEntry) -> Answer<i64> {
        let mut doors = self.doors.lock();
        doors.last += 1;
        let number = doors.last;
        doors.audit.insert(number, entry.clone());
        Ok(number)
    }

    async fn end_audit(&self, number: i64, status: Option<u16>) -> Answer<()> {
        let mut doors = self.doors.lock();
        match (status, doors.audit.get_mut(&number)) {
            (None, _) => drop(doors.audit.remove(&number)),
            (Some(_), Some(entry)) => entry.status = status,
            (Some(_), None) => {}
        }
        Ok(())
    }

    async fn audits(&self, before: Option<i64>, limit: u32) -> Answer<Page<AuditRow, i64>> {
        let doors = self.doors.lock();
        let found = doors.audit.range(..before.unwrap_or(i64::MAX)).rev().take(limit as usize + 1);
        Ok(Page::of_numbered(found.map(|(number, entry)| (*number, entry.clone())).collect(), limit))
    }

    async fn prune_access(&self, before: Timestamp, batch: u32) -> Answer<u32> {
        let mut doors = self.doors.lock();
        let old = doors.audit.iter().filter(|(_, entry)| entry.at < before).map(|(number, _)| *number);
        let old: Vec<i64> = old.take(batch as usize).collect();
        let ended = |token: &TokenRecord| token.revoked_at.or(token.expires_at).is_some_and(|at| at < before);
        let tokens = doors.tokens.values().filter(|token| ended(token)).map(|token| token.id.clone());
        let tokens: Vec<String> = tokens.take(batch as usize).collect();
        old.iter().for_each(|number| drop(doors.audit.remove(number)));
        tokens.iter().for_each(|id| drop(doors.tokens.remove(id)));
        Ok((old.len() + tokens.len()) as u32)
    }
}
