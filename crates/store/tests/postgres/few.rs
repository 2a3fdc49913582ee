//! A database that allows fewer connections than a node has parts of its work.

use std::sync::Arc;
use std::time::Duration;

use belfry_store::postgres::Postgres;
use belfry_store::*;
use tokio::task::JoinSet;

use crate::pg;
use crate::suite::world::*;

/// Asks until there is an answer. What fails with the connections that were ended is asked again; that there are too few is
/// no reason to fail.
async fn answered<T, F: Future<Output = Result<T, Error>>>(ask: impl Fn() -> F) -> T {
    let asked = async {
        loop {
            match ask().await {
                Ok(answer) => return answer,
                Err(error) => assert!(!error.to_string().contains("too many connections"), "{error}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), asked).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_shares_four_connections_among_all_its_work() {
    let Some(server) = pg::Own::fresh() else { return };
    let (admin, connection) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    for sql in ["create role few login connection limit 4", "create database few owner few"] {
        admin.batch_execute(sql).await.unwrap();
    }
    let url = format!("{} user=few dbname=few", server.url());
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let world = World::new(&*store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1m"))])]).await;
    let (now, until) = (world.now, world.now + belfry_time::SignedDuration::from_secs(30));
    for _ in 0..3 {
        // Whoever comes first has the connections then.
        let end = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'few'";
        admin.batch_execute(end).await.unwrap();
        let mut tasks = JoinSet::new();
        for n in 0..10 {
            let store = store.clone();
            tasks.spawn(async move {
                for _ in 0..40 {
                    match n {
                        0 => drop(answered(|| store.renew(node, until)).await),
                        1 => drop(answered(|| store.nodes()).await),
                        2 | 3 => drop(answered(|| store.due(now, None, 10)).await),
                        _ => drop(answered(|| store.schedule("a/s")).await),
                    }
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    }
}
