//! Responses that go on: they end when the token of their reader is revoked or expires, whichever node revoked it. One
//! loop looks at the store while anyone reads; readers wait for what it finds.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::header;
use axum::response::Response;
use bytes::Bytes;
use http_body::Frame;
use tokio::sync::watch;

use crate::guard::{ANONYMOUS, LOCAL};
use crate::state::{Shared, ended};
use crate::stream;

/// How often the store is asked for tokens while anyone reads a stream.
const LOOK_EVERY: Duration = Duration::from_millis(400);
/// How often a reader with a token that expires looks at the clock, which may be set.
const CLOCK_EVERY: Duration = Duration::from_millis(500);

/// Reads the tokens again and again while anyone reads a stream, and tells readers of changes.
pub async fn watch_loop(shared: Arc<Shared>) {
    let mut ending = shared.ending.subscribe();
    loop {
        tokio::select! {
            () = shared.tokens.came.notified() => {}
            () = ended(&mut ending) => return,
        }
        while shared.tokens.changes.receiver_count() > 0 {
            // A store that does not answer now is asked again.
            let _ = shared.refresh_tokens().await;
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = ended(&mut ending) => return,
            }
        }
    }
}

/// Makes a stream of events end when `actor` may no longer read. Other responses stay as they are.
pub fn while_good(shared: &Arc<Shared>, actor: &str, response: Response) -> Response {
    let is_stream =
        response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == stream::MEDIA_TYPE);
    // The local token is good as long as the server lives.
    if !is_stream || actor == LOCAL {
        return response;
    }
    let changes = shared.tokens.changes.subscribe();
    shared.tokens.came.notify_one();
    let over = Box::pin(no_longer_good(shared.clone(), actor.to_owned(), changes));
    response.map(|body| Body::new(WhileGood { body, over: Some(over) }))
}

async fn no_longer_good(shared: Arc<Shared>, actor: String, mut changes: watch::Receiver<()>) {
    loop {
        let expires = match actor.as_str() {
            ANONYMOUS if shared.is_open() => false,
            ANONYMOUS => return,
            id => match shared.token(id).await {
                Ok(Some(token)) if token.is_good(shared.now()) => token.expires_at.is_some(),
                Ok(_) => return,
                // Whether it is still good shows when the store answers again.
                Err(_) => true,
            },
        };
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(CLOCK_EVERY), if expires => {}
        }
    }
}

/// A body that ends early once `over` is.
struct WhileGood {
    body: Body,
    over: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl http_body::Body for WhileGood {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let is_over = self.over.as_mut().is_none_or(|over| over.as_mut().poll(context).is_ready());
        if !is_over {
            return Pin::new(&mut self.body).poll_frame(context);
        }
        // When the body goes, the task that fills it learns that the reader has left.
        (self.over, self.body) = (None, Body::empty());
        Poll::Ready(None)
    }
}
