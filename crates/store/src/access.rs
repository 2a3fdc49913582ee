//! Who may do what over HTTP, and who did what: tokens and the audit. Apart from the verbs of scheduling, which know
//! nothing of either.

use belfry_time::Timestamp;

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
