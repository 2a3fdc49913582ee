//! Connections: taken up to a number, beyond which the idlest is closed for a new one; with a time for everything that a peer
//! may be slow at; and closed in good order at the end.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};
use tower::ServiceExt;

use crate::crowd::{Crowd, Place};
use crate::limits::Limits;
use crate::state::ended;

const HEAD_BYTES_MAX: usize = 16 << 10;
/// What a connection keeps of what has arrived. Many connections at once send bodies.
const ARRIVED_BYTES_MAX: usize = 24 << 10;
const HEADERS_MAX: usize = 64;
/// How long to wait after a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// What is under way at the end may take so long.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// Serves until told to end, then lets what is under way end.
pub async fn serve(listener: TcpListener, app: Router, mut ending: watch::Receiver<bool>, limits: Limits) {
    let crowd = Crowd::new(limits.connections_max);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ended(&mut ending) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(_) => {
                // Out of descriptors, for example: one that is idle is worth less than what needs one.
                crowd.drop_idlest();
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let place = tokio::select! {
            place = crowd.enter() => place,
            () = ended(&mut ending) => break,
        };
        tokio::spawn(connection(stream, peer, place, app.clone(), ending.clone(), limits));
    }
    drop(listener);
    let _ = tokio::time::timeout(LEAVE_WITHIN, crowd.empty()).await;
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    app: Router,
    mut ending: watch::Receiver<bool>,
    limits: Limits,
) {
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(|request: hyper::Request<Incoming>| {
        let answering = place.answering();
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer(peer));
        request.extensions_mut().insert(answering.asking());
        let answer = app.clone().oneshot(request);
        async move { answer.await.map(|answer| answer.map(|body| answering.body(body))) }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_within)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .max_buf_size(ARRIVED_BYTES_MAX);
    let connection = builder.serve_connection(
        TokioIo::new(Patient { stream, patience: limits.write_within, until: None }),
        service,
    );
    let mut connection = std::pin::pin!(connection);
    // Whatever ends a connection, it is over.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = place.told_to_leave() => return,
        () = ended(&mut ending) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// A stream whose peer may be slow to take what it is sent, but not for ever.
struct Patient {
    stream: TcpStream,
    patience: Duration,
    until: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// Passes on what came of a write; one that waits too long is over.
    fn judge<T>(&mut self, context: &mut Context<'_>, came: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if came.is_ready() {
            self.until = None;
            return came;
        }
        let end = Instant::now() + self.patience;
        let until = self.until.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        match until.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let came = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, came)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let came = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.judge(context, came)
    }
}
