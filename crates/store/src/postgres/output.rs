//! What attempts write.

use belfry_core::{Epoch, RunId};

use super::connection::{Fault, Tx};
use super::rows::{big, get, small};
use crate::views::*;

/// One statement: the claim is looked at and the pieces are kept under one snapshot.
pub(super) async fn append(
    tx: &mut Tx<'_>,
    run: RunId,
    epoch: Epoch,
    chunks: &[OutputChunk],
) -> Result<bool, Fault> {
    let seqs: Vec<i64> = chunks.iter().map(|chunk| big(chunk.seq)).collect();
    let attempts: Vec<i64> = chunks.iter().map(|chunk| i64::from(chunk.attempt)).collect();
    let streams: Vec<i16> = chunks.iter().map(|chunk| chunk.stream.code()).collect();
    let bytes: Vec<&[u8]> = chunks.iter().map(|chunk| chunk.bytes.as_slice()).collect();
    let sql = "with ours as (select 1 from live where id = $1 and epoch = $2 and state + 0 = 2), \
               kept as (insert into output (run_id, seq, attempt, stream, bytes) select $1::uuid, u.* \
                   from unnest($3::bigint[], $4::bigint[], $5::smallint[], $6::bytea[]) as u \
                   where exists (select 1 from ours) on conflict do nothing) \
               select exists (select 1 from ours) as ours";
    let found = tx.query(sql, &[&run.0, &epoch, &seqs, &attempts, &streams, &bytes]).await?;
    found.first().map_or(Ok(false), |row| get(row, "ours"))
}

pub(super) async fn output(
    tx: &mut Tx<'_>,
    run: RunId,
    after: Option<u64>,
    limit_bytes: u32,
) -> Result<Vec<OutputChunk>, Fault> {
    let after = after.map_or(-1, big);
    let sql = "select seq, attempt, stream, bytes from ( \
                   select *, coalesce(sum(octet_length(bytes)) over \
                       (order by seq rows between unbounded preceding and 1 preceding), 0) as before \
                   from (select * from output where run_id = $1 and seq > $2 order by seq limit $4) o \
               ) o where before < $3 or before = 0 order by seq";
    let limits: (i64, i64) = (i64::from(limit_bytes), OUTPUT_CHUNKS_MAX as i64);
    let chunk = |row: &tokio_postgres::Row| {
        Ok(OutputChunk {
            seq: get::<i64>(row, "seq")?.unsigned_abs(),
            attempt: small(get(row, "attempt")?),
            stream: Stream::from_code(get(row, "stream")?),
            bytes: get(row, "bytes")?,
        })
    };
    tx.query(sql, &[&run.0, &after, &limits.0, &limits.1]).await?.iter().map(chunk).collect()
}
