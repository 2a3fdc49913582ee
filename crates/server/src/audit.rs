//! The row of the audit that a change has. It is there before the change is made, so that none goes without whatever happens
//! meanwhile; how the request was answered completes it.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use belfry_store::{Access, AuditEntry};
use tokio::sync::OnceCell;

use crate::problem::Problem;
use crate::state::Shared;

/// Marks an answer to a request that changed nothing: a repeat. It needs no row.
#[derive(Debug, Clone, Copy)]
pub struct Unchanged;

/// A request's row.
pub struct Noted {
    shared: Arc<Shared>,
    entry: AuditEntry,
    number: OnceCell<i64>,
}

impl Noted {
    pub fn new(shared: Arc<Shared>, entry: AuditEntry) -> Noted {
        Noted { shared, entry, number: OnceCell::new() }
    }

    /// Before anything is changed: without a row it is not.
    pub async fn begin(&self) -> Result<(), Problem> {
        self.number.get_or_try_init(|| self.shared.store().begin_audit(&self.entry)).await?;
        Ok(())
    }

    /// What was refused changed nothing, and leaves no row.
    pub async fn end(&self, answer: Answered) {
        let Some(number) = self.number.get() else { return };
        let status = match answer {
            Answered::Refused => None,
            Answered::With(status) => Some(status.as_u16()),
        };
        // It is done; a row that cannot be completed says that nobody knows.
        let _ = self.shared.store().end_audit(*number, status).await;
    }
}

/// What an answer means for the row.
#[derive(Debug, Clone, Copy)]
pub enum Answered {
    /// Nothing was changed.
    Refused,
    /// Something was changed, or may have been.
    With(StatusCode),
}

impl Answered {
    pub fn of(response: &Response) -> Answered {
        match response.status() {
            status if status.is_client_error() => Answered::Refused,
            _ if response.extensions().get::<Unchanged>().is_some() => Answered::Refused,
            status => Answered::With(status),
        }
    }
}
