//! What a run writes as it comes: server-sent events, read one by one.

use belfry::api::Run;
use http_body_util::BodyExt;

use crate::client::Body;
use crate::failure::Failure;
use crate::link::Sender;
use crate::logs::Piece;

/// An event longer than this is none of ours: a piece is at most 64 KiB, and each byte at most eight in JSON.
const EVENT_MAX: usize = 4 << 20;

/// Events that come.
pub struct Events {
    body: Body,
    read: Vec<u8>,
    /// Held while the answer goes on.
    _sender: Option<Sender>,
}

/// One of them.
pub enum Event {
    /// A piece of what it wrote.
    Output(Piece),
    /// It has ended.
    End(Box<Run>),
}

impl Events {
    pub fn new(body: Body, sender: Option<Sender>) -> Events {
        Events { body, read: Vec::new(), _sender: sender }
    }

    /// The next one. Nothing is lost where nobody waits to the end.
    pub async fn next(&mut self) -> Result<Event, Failure> {
        loop {
            while let Some(end) = self.read.windows(2).position(|two| two == b"\n\n") {
                let frame: Vec<u8> = self.read.drain(..end + 2).collect();
                if let Some(event) = event(&String::from_utf8_lossy(&frame))? {
                    return Ok(event);
                }
            }
            let ended =
                |why: &str| Failure::Unreachable(format!("the server left before the run ended{why}"));
            match self.body.frame().await {
                Some(Ok(frame)) => self.read.extend(frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Err(ended(&format!(": {error}"))),
                None => return Err(ended("")),
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
