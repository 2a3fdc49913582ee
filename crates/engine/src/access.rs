//! Commands on API tokens, and the audit: who did what.

use belfry_store::{Access, AddedToken, AuditEntry, Key, TokenRecord};
use belfry_time::Timestamp;

use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    /// Keeps an API token.
    pub async fn add_token(&self, token: &TokenRecord) -> Result<AddedToken, Error> {
        Ok(self.store().add_token(token).await?)
    }

    /// Makes an API token good no longer; `false` where there is none, or it was revoked before.
    pub async fn revoke_token(&self, id: &str) -> Result<bool, Error> {
        Ok(self.store().revoke_token(self.store_now().await?, id).await?)
    }

    /// Remembers the key of a request that makes something else than a run; `false` where it was used with another body.
    pub async fn use_key(&self, key: String, body_hash: Vec<u8>) -> Result<bool, Error> {
        let now = self.store_now().await?;
        Ok(self.store().use_key(now, &Key::new(key, body_hash, now)).await?)
    }

    /// Records what is about to be done, and gives the row's number.
    pub async fn begin_audit(&self, entry: &AuditEntry) -> Result<i64, Error> {
        Ok(self.store().begin_audit(entry).await?)
    }

    /// Completes a row of the audit by how it was answered, or takes it away where nothing was done.
    pub async fn end_audit(&self, number: i64, status: Option<u16>) -> Result<(), Error> {
        Ok(self.store().end_audit(number, status).await?)
    }

    /// Removes rows of the audit and tokens that are older than an instant, a batch at a time.
    pub async fn prune_access(&self, before: Timestamp, batch: u32) -> Result<u32, Error> {
        Ok(self.store().prune_access(before, batch).await?)
    }
}
