//! What a run writes as it comes: server-sent events, read one by one. A server leaves readers that take nothing for a while,
//! and ends; whoever comes back goes on behind what it saw.

use std::pin::Pin;
use std::time::Duration;

use belfry::RunId;
use belfry::api::Run;
use http_body_util::BodyExt;
use tokio::time::Instant;

use crate::client::{Body, Client};
use crate::failure::Failure;
use crate::link::Sender;
use crate::logs::Piece;

/// An event longer than this is none of ours: a piece is at most 64 KiB, and each byte at most eight in JSON.
const EVENT_MAX: usize = 4 << 20;
/// How often a stream that ends too early is opened again, where nothing comes of it.
const TRIES_MAX: u32 = 5;
const TRY_EVERY: Duration = Duration::from_millis(100);

/// Events that come.
pub struct Events<'a> {
    client: &'a Client,
    run: RunId,
    /// The last piece that came.
    last: Option<u64>,
    stream: Option<Stream>,
    /// The next stream, until it is there: who stops waiting and comes back finds it further on.
    opening: Option<Opening<'a>>,
    tries: u32,
    try_at: Instant,
}

type Opening<'a> = Pin<Box<dyn Future<Output = Result<Stream, Failure>> + 'a>>;

/// An answer that goes on.
pub struct Stream {
    body: Body,
    read: Vec<u8>,
    /// Held while the answer goes on.
    _sender: Option<Sender>,
}

/// One event.
pub enum Event {
    /// A piece of what it wrote.
    Output(Piece),
    /// It has ended.
    End(Box<Run>),
}

impl<'a> Events<'a> {
    /// All that a run writes, from its beginning.
    pub fn of(client: &'a Client, run: RunId) -> Events<'a> {
        Events { client, run, last: None, stream: None, opening: None, tries: 0, try_at: Instant::now() }
    }

    /// The next one. Nothing is lost where nobody waits to the end.
    pub async fn next(&mut self) -> Result<Event, Failure> {
        loop {
            let Some(stream) = &mut self.stream else {
                let open = || open(self.client, self.run, self.last, self.try_at);
                let opened = self.opening.get_or_insert_with(|| Box::pin(open())).await;
                self.opening = None;
                self.stream = Some(opened?);
                continue;
            };
            match stream.next().await? {
                Some(event) => {
                    self.tries = 0;
                    if let Event::Output(piece) = &event {
                        self.last = Some(piece.seq);
                    }
                    return Ok(event);
                }
                None if self.tries < TRIES_MAX => {
                    self.stream = None;
                    self.tries += 1;
                    self.try_at = Instant::now() + TRY_EVERY * self.tries;
                }
                None => return Err(Failure::Unreachable("the server left before the run ended".into())),
            }
        }
    }
}

/// Opens a stream behind a place, not before its time.
async fn open(client: &Client, run: RunId, last: Option<u64>, at: Instant) -> Result<Stream, Failure> {
    tokio::time::sleep_until(at).await;
    client.stream(run, last).await
}

impl Stream {
    /// The body of an answer, and what it comes over.
    pub fn new(body: Body, sender: Option<Sender>) -> Stream {
        Stream { body, read: Vec::new(), _sender: sender }
    }

    /// The next event; none where the stream has ended.
    async fn next(&mut self) -> Result<Option<Event>, Failure> {
        loop {
            while let Some(end) = self.read.windows(2).position(|two| two == b"\n\n") {
                let frame: Vec<u8> = self.read.drain(..end + 2).collect();
                if let Some(event) = event(&String::from_utf8_lossy(&frame))? {
                    return Ok(Some(event));
                }
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.read.extend(frame.into_data().unwrap_or_default()),
                Some(Err(_)) | None => return Ok(None),
            }
            if self.read.len() > EVENT_MAX {
                return Err(Failure::Unreachable("the server sends an event without end".into()));
            }
        }
    }
}

fn event(frame: &str) -> Result<Option<Event>, Failure> {
    let part = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name));
    let strange = |error: serde_json::Error| {
        Failure::Unreachable(format!("the server sends an event that no Belfry does: {error}"))
    };
    let data = part("data: ").unwrap_or_default();
    Ok(match part("event: ") {
        Some("output") => Some(Event::Output(serde_json::from_str(data).map_err(strange)?)),
        Some("end") => Some(Event::End(serde_json::from_str(data).map_err(strange)?)),
        _ => None,
    })
}
