//! The routes for whoever has the store itself: the command line where no server runs. There is no listener, no door and no
//! token; everything behind them is the same, and so are the answers.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use belfry_store::Scope;
use bytes::Bytes;
use tower::ServiceExt;
use utoipa::openapi::OpenApi;

use crate::bodies::Share;
use crate::client::Client;
use crate::guard::{Actor, Table, answer, is_change};
use crate::routes;
use crate::state::{Shared, Told};
use crate::trace::Trace;

/// The routes, open to whoever calls them.
pub struct Inside(Router);

/// Who calls them, for the audit.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Who it is.
    pub actor: String,
    /// On which host.
    pub host: String,
}

impl Inside {
    /// On what a server would be told; it reads no files again.
    pub fn new(told: Told, caller: Caller) -> Inside {
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let shared = Arc::new(Shared::new(told, nowhere));
        let (router, document) = routes::all().split_for_parts();
        let door = Door { shared: shared.clone(), document, caller };
        let router = router
            .fallback(routes::nothing)
            .method_not_allowed_fallback(routes::no_such_method)
            .layer(axum::middleware::from_fn_with_state(Arc::new(door), mark))
            .with_state(shared);
        Inside(router)
    }

    /// Answers a request as a server would.
    pub async fn answer(&self, request: hyper::Request<Bytes>) -> Response {
        match self.0.clone().oneshot(request.map(Body::from)).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

struct Door {
    shared: Arc<Shared>,
    document: OpenApi,
    caller: Caller,
}

/// What the door would add.
async fn mark(State(door): State<Arc<Door>>, mut request: Request, next: Next) -> Response {
    let trace = Trace::of(request.headers());
    request.extensions_mut().insert(trace);
    request.extensions_mut().insert(Client::inside());
    request.extensions_mut().insert(Share::default());
    request.extensions_mut().insert(Actor { id: door.caller.actor.clone(), scope: Scope::Admin });
    // A route that asks for a token itself finds one: the caller has the store, and so everything.
    if let Ok(token) = HeaderValue::from_str(&format!("Bearer {}", door.shared.local_token)) {
        request.headers_mut().entry(header::AUTHORIZATION).or_insert(token);
    }
    // Whoever only looks need not wait until all routes are known by name.
    let table = if is_change(request.method()) { Table::of(&door.document) } else { Table::default() };
    let operation = table.operation(&request).cloned();
    let who = (door.caller.actor.clone(), door.caller.host.clone());
    let mut response = answer(&door.shared, operation.as_ref(), who, request, next).await;
    door.shared.tell_time(&mut response);
    response
}
