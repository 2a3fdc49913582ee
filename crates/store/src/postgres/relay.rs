//! What nodes tell each other of what happens, for whoever listens to it: in tables that a crash empties.
//!
//! Each teller counts what it tells, and tells one thing after the other: what is missing between two numbers is lost.

use std::sync::atomic::{AtomicBool, Ordering};

use belfry_time::Timestamp;
use uuid::Uuid;

use super::Postgres;
use super::connection::Fault;
use super::rows::{big, get};
use crate::Error;
use crate::store::Answer;
use crate::views::Telling;

impl Postgres {
    pub(crate) async fn listen(&self, listener: Uuid) -> Answer<()> {
        transact!(self, |tx| {
            async {
            let sql = "insert into listeners (id, since, until) \
                       values ($1, clock_timestamp(), clock_timestamp() + interval '3 seconds') \
                       on conflict (id) do update set until = excluded.until, \
                       since = case when listeners.until < excluded.since then excluded.since else listeners.since end";
            tx.execute(sql, &[&listener]).await?;
            // Of those who left without a word.
            let sql = "delete from listeners where until < clock_timestamp() - interval '1 minute'";
            tx.execute(sql, &[]).await?;
            Ok::<_, Fault>(())
        }
        .await
        })
    }

    pub(crate) async fn listens(&self, teller: Uuid) -> Answer<Option<Timestamp>> {
        look!(self, |tx| async {
            let sql =
                "select min(since) as since from listeners where id <> $1 and until > clock_timestamp()";
            let found = tx.query(sql, &[&teller]).await?;
            found.first().map_or(Ok(None), |row| get(row, "since"))
        }
        .await)
    }

    pub(crate) async fn tell_others(&self, telling: &Telling) -> Answer<()> {
        let lost = big(telling.lost);
        transact!(self, |tx| async {
            let sql =
                "insert into told (teller, seq, at, lost, lines) values ($1, $2, clock_timestamp(), $3, $4)";
            tx.execute(sql, &[&telling.teller, &telling.seq, &lost, &telling.lines]).await?;
            Ok::<_, Fault>(())
        }
        .await)
    }

    pub(crate) async fn told_so_far(&self, listener: Uuid) -> Answer<Vec<(Uuid, i64)>> {
        look!(self, |tx| async {
            let sql = "select teller, max(seq) as seq from told where teller <> $1 group by teller";
            let found = tx.query(sql, &[&listener]).await?;
            found.iter().map(|row| Ok((get(row, "teller")?, get(row, "seq")?))).collect::<Result<_, Fault>>()
        }
        .await)
    }

    pub(crate) async fn told(&self, listener: Uuid, heard: &[(Uuid, i64)]) -> Answer<Vec<Telling>> {
        let tellers: Vec<Uuid> = heard.iter().map(|(teller, _)| *teller).collect();
        let seqs: Vec<i64> = heard.iter().map(|(_, seq)| *seq).collect();
        look!(self, |tx| async {
            let sql = "select t.teller, t.seq, t.lost, t.lines from told t where t.teller <> $1 and t.seq > \
                       coalesce((select h.seq from unnest($2::uuid[], $3::bigint[]) as h (teller, seq) \
                       where h.teller = t.teller), 0) order by t.teller, t.seq";
            let mut all = Vec::new();
            for row in tx.query(sql, &[&listener, &tellers, &seqs]).await? {
                all.push(Telling {
                    teller: get(&row, "teller")?,
                    seq: get(&row, "seq")?,
                    lost: u64::try_from(get::<i64>(&row, "lost")?).unwrap_or(0),
                    lines: get(&row, "lines")?,
                });
            }
            Ok::<_, Fault>(all)
        }
        .await)
    }

    pub(crate) async fn prune_told(&self) -> Answer<()> {
        look!(self, |tx| async {
            let sql = "delete from told where at < clock_timestamp() - interval '10 seconds'";
            tx.execute(sql, &[]).await.map(drop)
        }
        .await)
    }
}
