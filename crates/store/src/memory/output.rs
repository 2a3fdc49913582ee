//! What attempts write.

use belfry_core::{Epoch, RunId};

use super::State;
use crate::views::*;

impl State {
    pub(super) fn append_output(&mut self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> bool {
        let ours = |live: &super::Live| live.running.is_some() && live.epoch == epoch;
        if !self.live.get(&run).is_some_and(ours) {
            return false;
        }
        for chunk in chunks {
            self.output.entry((run, chunk.seq)).or_insert_with(|| chunk.clone());
        }
        true
    }

    pub(super) fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Vec<OutputChunk> {
        let first = after.map_or(0, |after| after.saturating_add(1));
        let mut before = 0;
        let chunks = self.output.range((run, first)..=(run, u64::MAX)).map(|(_, chunk)| chunk);
        chunks
            .take(OUTPUT_CHUNKS_MAX)
            .take_while(|chunk| {
                let fits = before < limit_bytes as usize || before == 0;
                before += chunk.bytes.len();
                fits
            })
            .cloned()
            .collect()
    }
}
