//! What happens on other nodes, for those who listen here. Only while somebody does is a mark left that the others look for, and
//! what they tell is read; nothing of it is counted or logged here.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_store::{Node, Store, Telling};
use uuid::Uuid;

use crate::ring::Ring;
use crate::state::{Shared, ended};

/// How often what others tell is read.
const READ_EVERY: Duration = Duration::from_millis(300);
/// The mark is good for three seconds, and left anew in good time.
const MARK_EVERY: Duration = Duration::from_secs(1);
/// Who comes back so soon has missed nothing.
const LINGER: Duration = Duration::from_secs(5);

/// Listens to others while somebody listens here.
pub async fn hear_loop(shared: Arc<Shared>) {
    if !shared.store().is_shared() {
        return;
    }
    let mut ending = shared.ending.subscribe();
    loop {
        tokio::select! {
            () = shared.came.notified() => {}
            () = ended(&mut ending) => return,
        }
        // It may have come and gone while we listened for others.
        if shared.readers() == 0 {
            continue;
        }
        tokio::select! {
            () = hear(&shared) => {}
            () = ended(&mut ending) => return,
        }
    }
}

/// Listens until nobody has listened here for a while.
async fn hear(shared: &Shared) {
    let (store, me) = (shared.store(), shared.engine.teller());
    let mut heard: Option<HashMap<Uuid, i64>> = None;
    let (mut marked_at, mut needed_at) = (None::<Instant>, Instant::now());
    while needed_at.elapsed() < LINGER {
        if shared.readers() > 0 {
            needed_at = Instant::now();
        }
        if heard.is_none() {
            heard = store.told_so_far(me).await.ok().map(|told| told.into_iter().collect());
        }
        if marked_at.is_none_or(|at| at.elapsed() >= MARK_EVERY) && store.listen(me).await.is_ok() {
            marked_at = Some(Instant::now());
        }
        if let Some(heard) = &mut heard {
            let behind: Vec<(Uuid, i64)> = heard.iter().map(|(teller, seq)| (*teller, *seq)).collect();
            // Where the store does not answer, the next time tells whether something is missing.
            for telling in store.told(me, &behind).await.unwrap_or_default() {
                pass_on(&shared.ring, heard, telling);
            }
        }
        tokio::time::sleep(READ_EVERY).await;
    }
    // What others do from now on is not known here: who comes back later is told of a gap.
    let is_alone = |nodes: Vec<Node>| nodes.iter().all(|node| node.id == shared.engine.node());
    if !store.nodes().await.is_ok_and(is_alone) {
        shared.ring.lost(1);
    }
}

fn pass_on(ring: &Ring, heard: &mut HashMap<Uuid, i64>, telling: Telling) {
    let before = heard.insert(telling.teller, telling.seq);
    if telling.lost > 0 || before.is_some_and(|before| before + 1 != telling.seq) {
        ring.lost(telling.lost.max(1));
    }
    telling.lines.into_iter().for_each(|line| ring.put_line(line));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_between_two_tellings_is_a_gap() {
        let (ring, mut heard, teller) = (Ring::new(), HashMap::new(), Uuid::from_u128(1));
        let mut hear = |seq, lost| {
            let (before, lines) = (ring.last(), vec![r#"{"event":"run_started"}"#.to_owned()]);
            pass_on(&ring, &mut heard, Telling { teller, seq, lost, lines });
            let behind = ring.behind(before, 10);
            (behind.gap.is_some(), behind.events.len())
        };
        assert_eq!(hear(7, 0), (false, 1), "what was told before we listened is not missed");
        assert_eq!(hear(8, 0), (false, 1));
        assert_eq!(hear(10, 0), (true, 1), "one was never read");
        assert_eq!(hear(11, 3), (true, 1), "some were too many to be told");
        assert_eq!(hear(12, 0), (false, 1));
    }
}
