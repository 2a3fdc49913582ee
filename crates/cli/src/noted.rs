//! Changes that a command makes in the store itself, without a server: each has its row in the audit, as those over HTTP have,
//! with the same names for what is done and to what.

use std::fmt::Display;

use belfry::AnyStore;
use belfry_store::{Access, AuditEntry};
use nix::unistd::{User, getuid};

use crate::failure::Failure;
use crate::reach;

/// What is done, and to what.
#[derive(Debug, Clone)]
pub struct Deed {
    action: &'static str,
    target: String,
}

impl Deed {
    /// By the name and the path that it has over HTTP.
    pub fn to(action: &'static str, path: impl Display) -> Deed {
        Deed { action, target: format!("/api/v1/{path}") }
    }
}

/// Does it. The row is there before the change is, so that no change goes without; where nothing was changed it goes again,
/// and where nobody knows it stays, and says so.
pub async fn noted<T, E>(
    store: &AnyStore,
    deed: Deed,
    work: impl Future<Output = Result<T, E>>,
    is_change: impl FnOnce(&T) -> bool,
) -> Result<T, Failure>
where
    Failure: From<E>,
{
    let entry = AuditEntry {
        at: reach::now(store).await?,
        actor: who(),
        action: deed.action.to_owned(),
        target: deed.target,
        peer: belfry::host(),
        status: None,
    };
    let row = store.begin_audit(&entry).await?;
    let done = work.await.map_err(Failure::from);
    let status = match &done {
        Ok(done) => Some(200).filter(|_| is_change(done)),
        Err(Failure::Store(_) | Failure::Io(_) | Failure::Timeout(_)) => return done,
        Err(_) => None,
    };
    // It is done; a row that cannot be completed says that nobody knows.
    let _ = store.end_audit(row, status).await;
    done
}

/// `cli:name(uid)`.
fn who() -> String {
    let uid = getuid();
    match User::from_uid(uid) {
        Ok(Some(user)) => format!("cli:{}({uid})", user.name),
        _ => format!("cli:({uid})"),
    }
}
