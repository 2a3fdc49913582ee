//! How large a store is, and of which version.

use crate::any::AnyStore;
use crate::store::Answer;

/// How large a store is, and of which version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// The version of its schema; none where it has no such thing.
    pub schema_version: Option<i64>,
    /// Bytes of the file or the database.
    pub bytes: Option<u64>,
    /// Bytes of the log of changes beside the file that are not in it yet.
    pub log_bytes: Option<u64>,
}

impl AnyStore {
    /// How large it is, and of which version. Reads only.
    pub async fn stats(&self) -> Answer<Stats> {
        match self {
            AnyStore::Memory(_) => Ok(Stats::default()),
            AnyStore::Sqlite(store) => store.stats().await,
            AnyStore::Postgres(store) => store.stats().await,
        }
    }
}
