//! Answers that go on: server-sent events. What is to be sent waits in a short queue; whoever does not take it in time is
//! left, so that nobody here waits for a reader.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use tokio::sync::mpsc;
use utoipa::ToSchema;

use crate::readers::Place;

/// The media type of server-sent events.
pub const MEDIA_TYPE: &str = "text/event-stream";

/// How often something is sent although nothing happens, so that both ends know that the other lives.
pub const BREATH: Duration = Duration::from_secs(15);

/// A server-sent event.
#[derive(ToSchema)]
#[allow(dead_code, reason = "this describes what goes over the wire")]
pub struct ServerEvent {
    /// Where a reader that comes back goes on: `Last-Event-ID`.
    #[schema(nullable = false)]
    id: Option<String>,
    /// What it is.
    event: String,
    /// JSON.
    data: String,
}

/// Where events go.
pub struct Sink {
    waiting: mpsc::Sender<Bytes>,
    take_within: Duration,
}

/// The reader has left.
pub struct Left;

impl Sink {
    /// Sends an event.
    pub async fn send(&self, id: Option<&str>, event: &str, data: &str) -> Result<(), Left> {
        self.put(frame(id, event, data)).await
    }

    /// Says that nothing happens.
    pub async fn breathe(&self) -> Result<(), Left> {
        self.put(": \n\n".to_owned()).await
    }

    /// Sends events that are written already.
    pub async fn put(&self, text: String) -> Result<(), Left> {
        self.waiting.send_timeout(text.into(), self.take_within).await.map_err(|_| Left)
    }

    /// Waits until the reader has left.
    pub async fn left(&self) {
        self.waiting.closed().await;
    }
}

/// An event as it goes over the wire.
pub fn frame(id: Option<&str>, event: &str, data: &str) -> String {
    let id = id.map_or_else(String::new, |id| format!("id: {id}\n"));
    // JSON on one line: it holds no line ends.
    format!("{id}event: {event}\ndata: {data}\n\n")
}

struct Events {
    waiting: mpsc::Receiver<Bytes>,
    _place: Place,
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.waiting.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// An answer that goes on, and where its events go. So many may wait for the reader; behind them are the buffers of the
/// connection. It keeps its place until it ends.
pub fn events(waiting_max: usize, take_within: Duration, place: Place) -> (Sink, Response) {
    let (waiting, receive) = mpsc::channel(waiting_max);
    let headers = [(header::CONTENT_TYPE, MEDIA_TYPE), (header::CACHE_CONTROL, "no-store")];
    let events = Events { waiting: receive, _place: place };
    (Sink { waiting, take_within }, (headers, Body::new(events)).into_response())
}
