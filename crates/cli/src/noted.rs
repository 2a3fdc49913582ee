//! Who a command is for the audit; and the row of what it does to the store without asking a route.

use belfry::Engine;
use belfry_server::Caller;
use belfry_store::AuditEntry;
use nix::unistd::{User, getuid};

use crate::failure::Failure;

/// `cli:name(uid)`, on this host.
pub fn caller() -> Caller {
    let uid = getuid();
    let actor = match User::from_uid(uid) {
        Ok(Some(user)) => format!("cli:{}({uid})", user.name),
        _ => format!("cli:({uid})"),
    };
    Caller { actor, host: belfry::host() }
}

/// Does what is `reload` over HTTP. The row is there before the change is, so that no change goes without; where nothing was
/// changed it goes again, and where nobody knows it stays, and says so.
pub async fn noted<T, E>(engine: &Engine, work: impl Future<Output = Result<T, E>>) -> Result<T, Failure>
where
    Failure: From<E>,
{
    let Caller { actor, host } = caller();
    let entry = AuditEntry {
        at: engine.store_now().await?,
        actor,
        action: "reload".to_owned(),
        target: "/api/v1/reload".to_owned(),
        peer: host,
        status: None,
    };
    let row = engine.begin_audit(&entry).await?;
    let done = work.await.map_err(Failure::from);
    let status = match &done {
        Ok(_) => Some(200),
        Err(Failure::Store(_) | Failure::Io(_) | Failure::Timeout(_)) => return done,
        Err(_) => None,
    };
    // It is done; a row that cannot be completed says that nobody knows.
    let _ = engine.end_audit(row, status).await;
    done
}
