//! The output of one attempt on its way to the store: kept while it cannot be stored, within a bound, and tried again.
//!
//! [`Output`] decides, without waiting: what is stored next, when, and what is let go of. The shell brings pieces and the
//! answers of the store. Where output is let go of, a line in its place says how much.

use std::collections::VecDeque;
use std::time::Duration;

use belfry_core::Epoch;
use belfry_store::{Error, OutputChunk, Stream};

/// Bytes of one attempt that wait to be stored. As much as is kept of an attempt's output unless it says otherwise.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Pieces are joined up to this size.
const CHUNK_BYTES: usize = 64 << 10;
/// Bytes that are stored at once.
const BATCH_BYTES: usize = 256 << 10;
/// How long to wait before a piece is tried again: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// What became of an attempt's output so far.
#[derive(Debug)]
pub(crate) struct Output {
    attempt: u32,
    next_seq: u64,
    /// In order. Those that were tried keep their content: a try that failed may have stored them.
    waiting: VecDeque<OutputChunk>,
    waiting_bytes: usize,
    /// How many at the front have been tried.
    tried: usize,
    /// How many at the front are being stored.
    under_way: usize,
    /// Bytes that were let go of since the last mark.
    lost: u64,
    failures: u32,
    /// The attempt has lost its claim: nothing more of it is stored.
    is_stale: bool,
}

impl Output {
    pub(crate) fn new(epoch: Epoch, attempt: u32) -> Output {
        Output {
            attempt,
            next_seq: OutputChunk::first_seq(epoch),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            tried: 0,
            under_way: 0,
            lost: 0,
            failures: 0,
            is_stale: false,
        }
    }

    /// Takes a piece in. What does not fit is let go of; the child does not wait for the store.
    pub(crate) fn push(&mut self, stream: Stream, bytes: Vec<u8>) {
        if self.is_stale {
            return;
        }
        if self.waiting_bytes > 0 && self.waiting_bytes + bytes.len() > WAITING_BYTES_MAX {
            self.lost += bytes.len() as u64;
            return;
        }
        self.mark_lost();
        self.waiting_bytes += bytes.len();
        let is_untried = self.waiting.len() > self.tried;
        match self.waiting.back_mut().filter(|_| is_untried) {
            Some(last) if last.stream == stream && last.bytes.len() + bytes.len() <= CHUNK_BYTES => {
                last.bytes.extend(bytes);
            }
            _ => self.add(stream, bytes),
        }
    }

    /// What to store now: nothing while a call is under way, or nothing waits.
    pub(crate) fn batch(&mut self) -> Option<Vec<OutputChunk>> {
        if self.under_way > 0 {
            return None;
        }
        if self.waiting.is_empty() {
            self.mark_lost();
        }
        let mut bytes = 0;
        let fits = |chunk: &&OutputChunk| {
            let is_first = bytes == 0;
            bytes += chunk.bytes.len();
            is_first || bytes <= BATCH_BYTES
        };
        let batch: Vec<OutputChunk> = self.waiting.iter().take_while(fits).cloned().collect();
        self.under_way = batch.len();
        self.tried = self.tried.max(batch.len());
        (!batch.is_empty()).then_some(batch)
    }

    /// The store has answered for the last batch. Gives how long to wait before the next one.
    pub(crate) fn answered(&mut self, answer: Result<bool, Error>) -> Duration {
        let asked = std::mem::take(&mut self.under_way);
        match answer {
            Ok(true) => {
                self.take(asked);
                self.failures = 0;
                Duration::ZERO
            }
            Ok(false) => {
                self.take(self.waiting.len());
                (self.lost, self.is_stale) = (0, true);
                Duration::ZERO
            }
            // Another try would be refused as well.
            Err(error) if error.is_of_content() => {
                self.lost += self.take(asked) as u64;
                self.pause()
            }
            Err(_) => self.pause(),
        }
    }

    /// Whether something waits to be stored.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.lost > 0
    }

    /// Bytes that are not stored.
    pub(crate) fn unstored(&self) -> u64 {
        self.waiting_bytes as u64 + self.lost
    }

    fn pause(&mut self) -> Duration {
        let pause = PAUSE.0.saturating_mul(1 << self.failures.min(10)).min(PAUSE.1);
        self.failures = self.failures.saturating_add(1);
        pause
    }

    /// Removes pieces from the front, and gives how many bytes they had. A mark counts for nothing.
    fn take(&mut self, count: usize) -> usize {
        let taken: usize = self
            .waiting
            .drain(..count)
            .filter(|chunk| chunk.stream != Stream::Note)
            .map(|chunk| chunk.bytes.len())
            .sum();
        self.tried = self.tried.saturating_sub(count);
        self.waiting_bytes = self.waiting_bytes.saturating_sub(taken);
        taken
    }

    fn mark_lost(&mut self) {
        let lost = std::mem::take(&mut self.lost);
        if lost > 0 {
            self.add(Stream::Note, mark(lost).into_bytes());
        }
    }

    fn add(&mut self, stream: Stream, bytes: Vec<u8>) {
        self.waiting.push_back(OutputChunk { seq: self.next_seq, attempt: self.attempt, stream, bytes });
        self.next_seq += 1;
    }
}

/// The line that stands for output that was let go of.
fn mark(bytes: u64) -> String {
    format!("\n[{bytes} bytes of output could not be stored]\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AWAY: Result<bool, ()> = Err(());

    fn away() -> Error {
        Error::Unavailable { detail: "away".into(), ambiguous: true }
    }

    /// A store that keeps the first piece of each place, as the real ones do.
    #[derive(Default)]
    struct Kept(std::collections::BTreeMap<u64, OutputChunk>);

    impl Kept {
        fn store(&mut self, batch: &[OutputChunk]) {
            for chunk in batch {
                self.0.entry(chunk.seq).or_insert_with(|| chunk.clone());
            }
        }

        fn text(&self) -> String {
            self.0.values().map(|chunk| String::from_utf8_lossy(&chunk.bytes).into_owned()).collect()
        }
    }

    #[test]
    fn what_could_not_be_stored_is_tried_again_as_it_was() {
        // For each try: whether the store kept it, and what it answered.
        for tries in [
            vec![(true, Ok(true))],
            vec![(false, AWAY), (true, Ok(true))],
            // The answer was lost.
            vec![(true, AWAY), (true, Ok(true))],
            vec![(false, AWAY), (true, AWAY), (false, AWAY), (true, Ok(true))],
        ] {
            let (mut output, mut kept) = (Output::new(1, 1), Kept::default());
            output.push(Stream::Out, b"one ".to_vec());
            for (keeps, answer) in &tries {
                let batch = output.batch().unwrap();
                assert!(output.batch().is_none(), "one call at a time");
                // What comes meanwhile is not joined to what may be stored already.
                output.push(Stream::Out, b"more ".to_vec());
                if *keeps {
                    kept.store(&batch);
                }
                output.answered(answer.map_err(|()| away()));
            }
            while let Some(batch) = output.batch() {
                kept.store(&batch);
                output.answered(Ok(true));
            }
            assert_eq!(kept.text(), format!("one {}", "more ".repeat(tries.len())), "{tries:?}");
            assert_eq!(output.unstored(), 0);
        }
    }

    #[test]
    fn tries_come_slower_and_at_once_after_one_that_succeeded() {
        let mut output = Output::new(1, 1);
        output.push(Stream::Out, b"x".to_vec());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            output.batch().unwrap();
            pauses.push(output.answered(Err(away())).as_millis());
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 2000, 2000, 2000]);
        output.batch().unwrap();
        assert_eq!(output.answered(Ok(true)), Duration::ZERO);
        assert!(!output.is_waiting());
    }

    #[test]
    fn what_does_not_fit_is_marked_in_its_place() {
        let (mut output, mut kept) = (Output::new(1, 1), Kept::default());
        let line = vec![b'x'; CHUNK_BYTES];
        for _ in 0..WAITING_BYTES_MAX / CHUNK_BYTES + 3 {
            output.push(Stream::Out, line.clone());
        }
        output.batch().unwrap();
        output.answered(Err(away()));
        assert_eq!(output.unstored() as usize, WAITING_BYTES_MAX + 3 * CHUNK_BYTES);
        while let Some(batch) = output.batch() {
            kept.store(&batch);
            output.answered(Ok(true));
            if output.waiting_bytes == 0 {
                output.push(Stream::Err, b"end".to_vec());
                kept.store(&output.batch().unwrap());
                output.answered(Ok(true));
                break;
            }
        }
        let text = kept.text();
        let after = text.trim_start_matches('x');
        assert_eq!(text.len() - after.len(), WAITING_BYTES_MAX);
        assert_eq!(after, "\n[196608 bytes of output could not be stored]\nend");
    }

    #[test]
    fn what_is_refused_is_marked_and_not_tried_again() {
        let (mut output, mut kept) = (Output::new(1, 1), Kept::default());
        output.push(Stream::Out, b"four".to_vec());
        output.batch().unwrap();
        output.answered(Err(Error::Unexpected { detail: "no".into() }));
        let batch = output.batch().unwrap();
        kept.store(&batch);
        // Even the mark is refused: then nothing is left to try.
        output.answered(Err(Error::Unexpected { detail: "no".into() }));
        assert_eq!(kept.text(), "\n[4 bytes of output could not be stored]\n");
        assert!(!output.is_waiting() && output.batch().is_none());
    }

    #[test]
    fn an_attempt_that_lost_its_claim_stores_nothing_more() {
        let mut output = Output::new(1, 1);
        output.push(Stream::Out, b"x".to_vec());
        output.batch().unwrap();
        output.push(Stream::Err, b"y".to_vec());
        output.answered(Ok(false));
        output.push(Stream::Out, b"z".to_vec());
        assert!(!output.is_waiting() && output.batch().is_none() && output.unstored() == 0);
    }
}
