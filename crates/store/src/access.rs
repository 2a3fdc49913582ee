//! Who may do what over HTTP, and who did what: tokens and the audit. Apart from the verbs of scheduling, which know
//! nothing of either.

use std::future::Future;

use belfry_time::Timestamp;

use crate::any::{AnyStore, each};
use crate::shapes::Key;
use crate::store::Answer;
use crate::views::Page;

/// More tokens than this are not kept: they are read as a whole.
pub const TOKENS_MAX: usize = 1000;

/// Keys that belong to no schedule are kept under this one, which there never is.
pub(crate) const NO_SCHEDULE: i64 = 0;

/// What a token allows. Each allows what those before it do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// To look.
    Read = 0,
    /// To start and to end runs.
    Trigger = 1,
    /// To change schedules.
    Manage = 2,
    /// Everything.
    Admin = 3,
}

impl Scope {
    /// All of them, the smallest first.
    pub const ALL: [Scope; 4] = [Scope::Read, Scope::Trigger, Scope::Manage, Scope::Admin];

    /// The stable name.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Trigger => "trigger",
            Scope::Manage => "manage",
            Scope::Admin => "admin",
        }
    }

    /// From the stable name.
    pub fn from_name(name: &str) -> Option<Scope> {
        Scope::ALL.into_iter().find(|scope| scope.as_str() == name)
    }

    pub(crate) fn code(self) -> i16 {
        self as i16
    }

    /// A number that nobody has written allows nothing but to look.
    pub(crate) fn from_code(code: i16) -> Scope {
        Scope::ALL.into_iter().find(|scope| scope.code() == code).unwrap_or(Scope::Read)
    }
}

/// A token, as far as it is kept: never itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRecord {
    /// By which it is known.
    pub id: String,
    /// The SHA-256 of the token.
    pub hash: Vec<u8>,
    /// The SHA-256 of the cookie that goes with it, which is good for reading; only a browser login has one.
    pub cookie_hash: Option<Vec<u8>>,
    /// What it allows.
    pub scope: Scope,
    /// What it is for, in words.
    pub label: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// From then on it is refused.
    pub expires_at: Option<Timestamp>,
    /// Since then it is refused.
    pub revoked_at: Option<Timestamp>,
}

impl TokenRecord {
    /// Whether it is good at an instant.
    pub fn is_good(&self, now: Timestamp) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|expires_at| now < expires_at)
    }

    /// Whether it was made by a browser login, and not by hand.
    pub fn is_login(&self) -> bool {
        self.cookie_hash.is_some()
    }
}

/// What became of a token that was to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddedToken {
    /// It is kept.
    Added,
    /// There is one of this id.
    Taken,
    /// There are too many.
    Full,
}

/// Something that was done over HTTP, or by a command that opened the store itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// When.
    pub at: Timestamp,
    /// By whom: the id of a token, `local`, `anonymous`, or `cli` with the user of the host.
    pub actor: String,
    /// What.
    pub action: String,
    /// To what.
    pub target: String,
    /// From where.
    pub peer: String,
    /// How it was answered; none where it is under way, or nobody knows.
    pub status: Option<u16>,
}

/// A row of the audit with its number, which grows.
pub type AuditRow = (i64, AuditEntry);

/// Tokens and the audit. Every verb is one transaction, as those of [`Store`](crate::Store) are.
pub trait Access: Send + Sync + 'static {
    /// Keeps a token. Browser logins that have ended by its `created_at` are removed first: they would add up.
    /// After a crash either both have happened or neither.
    fn add_token(&self, token: &TokenRecord) -> impl Future<Output = Answer<AddedToken>> + Send;

    /// All tokens, good or not, in the order of their ids.
    fn tokens(&self) -> impl Future<Output = Answer<Vec<TokenRecord>>> + Send;

    /// Makes a token good no longer; `false` where there is none, or it was revoked before. Crash: revoked, or not.
    fn revoke_token(&self, now: Timestamp, id: &str) -> impl Future<Output = Answer<bool>> + Send;

    /// Remembers the key of a request that makes something else than a run, until it expires; `false` where it was used
    /// with another body. Crash: remembered, or not.
    fn use_key(&self, now: Timestamp, key: &Key) -> impl Future<Output = Answer<bool>> + Send;

    /// Records what is about to be done, and gives the row's number. Crash: recorded, or not.
    fn begin_audit(&self, entry: &AuditEntry) -> impl Future<Output = Answer<i64>> + Send;

    /// Completes a row by how it was answered, or takes it away where nothing was done. A crash may undo this, and this alone:
    /// then the row says that nobody knows.
    fn end_audit(&self, number: i64, status: Option<u16>) -> impl Future<Output = Answer<()>> + Send;

    /// What was done, the last first, before a row.
    fn audits(
        &self,
        before: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Answer<Page<AuditRow, i64>>> + Send;

    /// Removes what was done before an instant, and tokens that were good no longer by then, at most a batch of each; says
    /// how many went. Crash: all of a call, or nothing of it.
    fn prune_access(&self, before: Timestamp, batch: u32) -> impl Future<Output = Answer<u32>> + Send;
}

impl Access for AnyStore {
    async fn add_token(&self, token: &TokenRecord) -> Answer<AddedToken> {
        each!(self, store => store.add_token(token).await)
    }

    async fn tokens(&self) -> Answer<Vec<TokenRecord>> {
        each!(self, store => store.tokens().await)
    }

    async fn revoke_token(&self, now: Timestamp, id: &str) -> Answer<bool> {
        each!(self, store => store.revoke_token(now, id).await)
    }

    async fn use_key(&self, now: Timestamp, key: &Key) -> Answer<bool> {
        each!(self, store => store.use_key(now, key).await)
    }

    async fn begin_audit(&self, entry: &AuditEntry) -> Answer<i64> {
        each!(self, store => store.begin_audit(entry).await)
    }

    async fn end_audit(&self, number: i64, status: Option<u16>) -> Answer<()> {
        each!(self, store => store.end_audit(number, status).await)
    }

    async fn audits(&self, before: Option<i64>, limit: u32) -> Answer<Page<AuditRow, i64>> {
        each!(self, store => store.audits(before, limit).await)
    }

    async fn prune_access(&self, before: Timestamp, batch: u32) -> Answer<u32> {
        each!(self, store => store.prune_access(before, batch).await)
    }
}
