//! The pump: reads a child's pipes to their end, masks, caps, and hands on in chunks.
//!
//! The pipes are drained whether or not anyone takes the chunks: the first half of what is kept waits in memory for the
//! receiver, the last half in a ring until the end, so memory is bounded by `output_bytes` and a few buffers.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{ChildStderr, ChildStdout};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::attempt::{Chunk, Stream};
use crate::mask::{Masker, Secrets};

/// The longest chunk, and the buffer of a read.
const CHUNK: usize = 64 << 10;
/// How long bytes wait for company.
const FLUSH: Duration = Duration::from_secs(1);
/// What is set aside for the mark.
const MARK: usize = 80;
/// How much a pipe that is still held open may have in it when it is closed: what the kernel buffers at most.
const REST: usize = 1 << 20;
/// How long a busy runtime may take to notice that there is something in it.
const REST_WAIT: Duration = Duration::from_millis(20);

/// What the runner tells the pump, and hears from it.
pub(crate) struct Pump {
    /// Becomes true when both pipes have ended.
    pub ended: watch::Receiver<bool>,
    /// Set to true: take what is there, and close.
    pub close: watch::Sender<bool>,
    /// Ends when everything kept has been handed on, or nobody takes it.
    pub task: tokio::task::JoinHandle<()>,
}

/// Starts to pump.
pub(crate) fn start(
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    secrets: &Secrets,
    keep: u64,
    sink: mpsc::Sender<Chunk>,
) -> Pump {
    let (close, close_receiver) = watch::channel(false);
    let (ended_sender, ended) = watch::channel(false);
    let out = Pipe::new(Stream::Stdout, stdout.map(|pipe| Box::pin(pipe) as Source), secrets);
    let err = Pipe::new(Stream::Stderr, stderr.map(|pipe| Box::pin(pipe) as Source), secrets);
    let keep = Kept::new(usize::try_from(keep).unwrap_or(usize::MAX));
    let task = tokio::spawn(async move { pump(out, err, keep, sink, close_receiver, ended_sender).await });
    Pump { ended, close, task }
}

type Source = Pin<Box<dyn AsyncRead + Send>>;

struct Pipe {
    stream: Stream,
    /// None when it has ended.
    source: Option<Source>,
    masker: Masker,
    /// Masked, and not yet in a chunk.
    ready: Vec<u8>,
}

impl Pipe {
    fn new(stream: Stream, source: Option<Source>, secrets: &Secrets) -> Pipe {
        Pipe { stream, source, masker: Masker::new(secrets.clone()), ready: Vec::new() }
    }

    /// Reads once. Ends quietly: a pipe has no errors that anyone could act on.
    async fn read(&mut self, buffer: &mut [u8]) -> usize {
        let Some(source) = &mut self.source else { return std::future::pending().await };
        let read = source.read(buffer).await.unwrap_or(0);
        if read == 0 {
            self.source = None;
            self.masker.finish(&mut self.ready);
        } else {
            self.masker.feed(&buffer[..read], &mut self.ready);
        }
        read
    }

    /// What is there to be read by now.
    async fn read_rest(&mut self, buffer: &mut [u8], kept: &mut Kept) {
        let mut total = 0;
        while self.source.is_some() && total < REST {
            tokio::select! {
                biased;
                read = self.read(buffer) => total += read,
                () = tokio::time::sleep(REST_WAIT) => break,
            }
            self.flush(kept, false);
        }
        if self.source.take().is_some() {
            self.masker.finish(&mut self.ready);
        }
    }

    /// Hands on whole chunks, or all.
    fn flush(&mut self, kept: &mut Kept, all: bool) {
        while self.ready.len() >= CHUNK || (all && !self.ready.is_empty()) {
            let rest = self.ready.split_off(self.ready.len().min(CHUNK));
            kept.push(Chunk { stream: self.stream, bytes: std::mem::replace(&mut self.ready, rest) });
        }
    }
}

async fn pump(
    mut out: Pipe,
    mut err: Pipe,
    mut kept: Kept,
    sink: mpsc::Sender<Chunk>,
    mut close: watch::Receiver<bool>,
    ended: watch::Sender<bool>,
) {
    let mut out_buffer = vec![0; CHUNK];
    let mut err_buffer = vec![0; CHUNK];
    let mut flush_at: Option<Instant> = None;
    while out.source.is_some() || err.source.is_some() {
        let flush = async {
            match flush_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = out.read(&mut out_buffer) => out.flush(&mut kept, false),
            _ = err.read(&mut err_buffer) => err.flush(&mut kept, false),
            () = flush => {
                out.flush(&mut kept, true);
                err.flush(&mut kept, true);
            }
            permit = sink.reserve(), if kept.is_waiting() => match permit {
                Ok(permit) => {
                    if let Some(chunk) = kept.head.pop_front() {
                        permit.send(chunk);
                    }
                }
                Err(_) => kept.discard(),
            },
            () = closing(&mut close) => {
                out.read_rest(&mut out_buffer, &mut kept).await;
                err.read_rest(&mut err_buffer, &mut kept).await;
            }
        }
        flush_at = if out.ready.is_empty() && err.ready.is_empty() {
            None
        } else {
            flush_at.or_else(|| Some(Instant::now() + FLUSH))
        };
    }
    out.flush(&mut kept, true);
    err.flush(&mut kept, true);
    ended.send_replace(true);
    drop((out_buffer, err_buffer));
    for chunk in kept.finish() {
        if sink.send(chunk).await.is_err() {
            return;
        }
    }
}

/// We are told to close, or nobody is left who could tell us.
async fn closing(close: &mut watch::Receiver<bool>) {
    let _ = close.wait_for(|close| *close).await;
}

/// What is kept of the output: a head that is handed on as it comes, and a tail that waits for the end.
struct Kept {
    /// Not yet taken.
    head: VecDeque<Chunk>,
    head_room: usize,
    tail: VecDeque<Chunk>,
    tail_bytes: usize,
    tail_room: usize,
    /// Between the two.
    omitted: u64,
    /// Nobody wants it.
    discarded: bool,
}

impl Kept {
    fn new(keep: usize) -> Kept {
        let tail_room = keep / 2;
        Kept {
            head: VecDeque::new(),
            head_room: keep - tail_room,
            tail: VecDeque::new(),
            tail_bytes: 0,
            tail_room,
            omitted: 0,
            discarded: false,
        }
    }

    fn is_waiting(&self) -> bool {
        !self.head.is_empty()
    }

    fn discard(&mut self) {
        self.discarded = true;
        self.head.clear();
        self.tail.clear();
        self.tail_bytes = 0;
    }

    fn push(&mut self, mut chunk: Chunk) {
        if self.discarded {
            return;
        }
        if self.head_room > 0 {
            let rest = chunk.bytes.split_off(chunk.bytes.len().min(self.head_room));
            self.head_room -= chunk.bytes.len();
            let stream = chunk.stream;
            self.head.push_back(chunk);
            chunk = Chunk { stream, bytes: rest };
        }
        if !chunk.bytes.is_empty() {
            self.tail_bytes += chunk.bytes.len();
            self.tail.push_back(chunk);
            self.shorten_tail(self.tail_room);
        }
    }

    fn shorten_tail(&mut self, room: usize) {
        while self.tail_bytes > room {
            let excess = self.tail_bytes - room;
            let Some(first) = self.tail.front_mut() else { return };
            let cut = excess.min(first.bytes.len());
            if cut == first.bytes.len() {
                self.tail.pop_front();
            } else {
                first.bytes.drain(..cut);
            }
            self.tail_bytes -= cut;
            self.omitted += cut as u64;
        }
    }

    /// Everything that has not been taken yet.
    fn finish(mut self) -> impl Iterator<Item = Chunk> {
        let mut mark = None;
        if self.omitted > 0 && self.tail_room >= MARK {
            self.shorten_tail(self.tail_room - MARK);
            self.start_tail_at_a_character();
            let text = format!("\n[… {} bytes of output left out …]\n", self.omitted);
            let stream = self.tail.front().map_or(Stream::Stdout, |chunk| chunk.stream);
            mark = Some(Chunk { stream, bytes: text.into_bytes() });
        }
        self.head.into_iter().chain(mark).chain(self.tail).filter(|chunk| !chunk.bytes.is_empty())
    }

    fn start_tail_at_a_character(&mut self) {
        let Some(first) = self.tail.front_mut() else { return };
        let cut = first.bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
        first.bytes.drain(..cut);
        self.omitted += cut as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(keep: usize, written: usize) -> Vec<u8> {
        let mut kept = Kept::new(keep);
        let bytes: Vec<u8> = (0..written).map(|i| b'a' + (i % 26) as u8).collect();
        for part in bytes.chunks(7) {
            kept.push(Chunk { stream: Stream::Stdout, bytes: part.to_vec() });
        }
        kept.finish().flat_map(|chunk| chunk.bytes).collect()
    }

    #[test]
    fn what_fits_is_kept_without_a_mark() {
        for written in [0, 1, 500, 999, 1_000] {
            assert_eq!(kept(1_000, written).len(), written);
        }
    }

    #[test]
    fn what_does_not_fit_keeps_head_and_tail_and_says_how_much_is_missing() {
        for written in [1_001, 1_026, 5_000, 100_000] {
            let bytes = kept(1_000, written);
            assert!(bytes.len() <= 1_000, "{}", bytes.len());
            let text = String::from_utf8(bytes).unwrap();
            let (head, rest) = text.split_once("\n[… ").unwrap();
            let (omitted, tail) = rest.split_once(" bytes of output left out …]\n").unwrap();
            assert_eq!(head.len(), 500);
            assert_eq!(head.len() + omitted.parse::<usize>().unwrap() + tail.len(), written);
            assert_eq!(tail.as_bytes()[tail.len() - 1], b'a' + ((written - 1) % 26) as u8);
        }
    }

    #[test]
    fn a_cap_too_small_for_a_mark_is_still_a_cap() {
        for keep in [0, 1, 2, 100] {
            assert_eq!(kept(keep, 10_000).len(), keep);
        }
    }

    #[test]
    fn the_tail_does_not_start_inside_a_character() {
        let mut kept = Kept::new(400);
        kept.push(Chunk { stream: Stream::Stderr, bytes: "€".repeat(1_000).into_bytes() });
        let mut chunks: Vec<Chunk> = kept.finish().collect();
        assert!(String::from_utf8(chunks.pop().unwrap().bytes).unwrap().starts_with('€'));
    }
}
