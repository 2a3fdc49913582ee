//! What attempts write.

use belfry_core::{Epoch, RunId};
use rusqlite::params;

use super::{Done, Verb, bytes, number};
use crate::views::*;

impl Verb<'_> {
    pub(super) fn append_output(&self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> Done<bool> {
        let ours = self.row(
            "select 1 from live where id = ? and state = 2 and epoch = ?",
            params![bytes(run), epoch],
            |_| Ok(()),
        )?;
        if ours.is_none() {
            return Ok(false);
        }
        for chunk in chunks {
            self.execute(
                "insert into output (run_id, seq, attempt, stream, bytes) values (?, ?, ?, ?, ?) on conflict do nothing",
                params![bytes(run), chunk.seq as i64, chunk.attempt, chunk.stream.code(), chunk.bytes],
            )?;
        }
        Ok(true)
    }

    pub(super) fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Done<Vec<OutputChunk>> {
        self.rows(
            "select seq, attempt, stream, bytes from
               (select *, coalesce(sum(length(bytes)) over (order by seq rows between unbounded preceding and 1 preceding), 0) as before
                from (select * from output where run_id = ?1 and seq > ?2 order by seq limit ?4))
             where before < ?3 or before = 0 order by seq",
            params![
                bytes(run),
                after.map_or(-1, |after| after as i64),
                limit_bytes,
                OUTPUT_CHUNKS_MAX as i64
            ],
            |row| {
                Ok(OutputChunk {
                    seq: row.get::<_, i64>(0)? as u64,
                    attempt: number(row, 1)?,
                    stream: Stream::from_code(number(row, 2)?),
                    bytes: row.get(3)?,
                })
            },
        )
    }
}
