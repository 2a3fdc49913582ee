//! The row of the audit that a change has. It is there before the change is made, so that none goes without whatever happens
//! meanwhile; how the request was answered completes it, or it goes again where nothing was changed.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use belfry::Engine;
use belfry_store::AuditEntry;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::problem::Problem;

tokio::task_local! {
    /// The row of the request that is answered.
    static ROW: Arc<Row>;
}

/// A request's row.
pub struct Row {
    engine: Engine,
    entry: AuditEntry,
    number: OnceCell<i64>,
    /// Whether something was changed, once a route has said so.
    made: Mutex<Option<bool>>,
}

impl Row {
    pub fn new(engine: Engine, entry: AuditEntry) -> Arc<Row> {
        Arc::new(Row { engine, entry, number: OnceCell::new(), made: Mutex::default() })
    }

    /// Before anything is changed: without a row it is not. `actor` is the sender if only the route knows it.
    pub async fn begin(&self, actor: Option<&str>) -> Result<(), Problem> {
        let actor = actor.unwrap_or(&self.entry.actor).to_owned();
        let entry = AuditEntry { actor, ..self.entry.clone() };
        self.number.get_or_try_init(|| self.engine.begin_audit(&entry)).await?;
        Ok(())
    }

    /// Answers the request, and completes its row.
    pub async fn answer(self: Arc<Row>, answer: impl Future<Output = Response>) -> Response {
        let response = ROW.scope(self.clone(), answer).await;
        self.end(response.status()).await;
        response
    }

    async fn end(&self, status: StatusCode) {
        let Some(number) = self.number.get() else { return };
        // Where a route has said nothing, what was refused changed nothing, and anything else may have.
        let is_kept = self.made.lock().unwrap_or(!status.is_client_error());
        // It is done; a row that cannot be completed says that nobody knows.
        let _ = self.engine.end_audit(*number, is_kept.then_some(status.as_u16())).await;
    }
}

/// Stores the row of the request that is answered, where that is left to its route.
pub async fn begin(actor: Option<&str>) -> Result<(), Problem> {
    match ROW.try_with(Arc::clone) {
        Ok(row) => row.begin(actor).await,
        Err(_) => Err(Problem::internal("nothing is changed without a row of the audit")),
    }
}

/// Whether the request has changed something. A route says it as soon as it knows, however it answers then: yes once a verb of
/// the store has succeeded, no only where none is to follow.
pub fn made(changed: bool) {
    // Outside of a request there is no row.
    let _ = ROW.try_with(|row| {
        let mut made = row.made.lock();
        *made = Some(changed || *made == Some(true));
    });
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;
    use belfry::Timestamp;

    use super::*;

    /// What is left of the row of a request.
    async fn left(status: StatusCode, said: &[bool]) -> Option<Option<u16>> {
        let engine = Engine::builder().build();
        let entry = AuditEntry {
            at: Timestamp::UNIX_EPOCH,
            actor: "local".into(),
            action: "pause_schedule".into(),
            target: "/".into(),
            peer: "here".into(),
            status: None,
        };
        let row = Row::new(engine.clone(), entry);
        row.begin(None).await.unwrap();
        let answer = async {
            said.iter().for_each(|changed| made(*changed));
            status.into_response()
        };
        row.answer(answer).await;
        let rows = engine.reads().audits(None, 10).await.unwrap().items;
        rows.first().map(|(_, row)| row.status)
    }

    #[tokio::test]
    async fn a_row_stays_where_something_was_changed_however_it_is_answered() {
        for status in [StatusCode::OK, StatusCode::NOT_FOUND, StatusCode::CONFLICT, StatusCode::BAD_GATEWAY] {
            for said in [&[true][..], &[true, false], &[false, true]] {
                assert_eq!(left(status, said).await, Some(Some(status.as_u16())), "{status} {said:?}");
            }
            assert_eq!(left(status, &[false]).await, None, "{status}, and nothing was");
        }
    }

    #[tokio::test]
    async fn where_nothing_is_said_only_what_was_refused_has_no_row() {
        assert_eq!(left(StatusCode::CREATED, &[]).await, Some(Some(201)));
        assert_eq!(left(StatusCode::SERVICE_UNAVAILABLE, &[]).await, Some(Some(503)), "nobody knows");
        assert_eq!(left(StatusCode::NOT_FOUND, &[]).await, None);
    }

    #[tokio::test]
    async fn a_route_changes_nothing_where_there_is_no_row() {
        assert!(begin(None).await.is_err());
    }
}
