//! The routes for whoever has the store itself: the command line where no server runs. There is no listener, no door and no
//! token; everything behind them is the same, and so are the answers.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use tower::ServiceExt;

use crate::routes;
use crate::state::{Shared, Told};
use crate::trace::Trace;

/// The routes, open to whoever calls them.
pub struct Inside(Router);

impl Inside {
    /// On what a server would be told; it reads no files again.
    pub fn new(told: Told) -> Inside {
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let shared = Arc::new(Shared::new(told, nowhere));
        let (router, _) = routes::all().split_for_parts();
        let router = router
            .fallback(routes::nothing)
            .layer(axum::middleware::from_fn_with_state(shared.clone(), mark))
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

/// What the door would add.
async fn mark(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let trace = Trace::of(request.headers());
    request.extensions_mut().insert(trace);
    let mut response = next.run(request).await;
    shared.tell_time(&mut response);
    response
}
