//! What happens on other nodes, for those who listen here. Only while somebody does is a mark left that the others look for, and
//! what they tell is read; nothing of it is counted or logged here.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_store::Telling;
use uuid::Uuid;

use crate::ring::Ring;
use crate::state::{Shared, ended};

/// How often what others tell is read.
const READ_EVERY: Duration = Duration::from_millis(300);
/// The mark is good for three seconds, and left anew in good time.
const MARK_EVERY: Duration = Duration::from_secs(1);
/// Who comes back so soon has missed nothing.
const LINGER: Duration = Duration::from_secs(5);
/// Whoever has told nothing for so long is forgotten: every start of a node is another teller.
const FORGET_AFTER: Duration = Duration::from_secs(60);

/// How far others were heard, and when last. All of it goes along with every question for more.
type Heard = HashMap<Uuid, (i64, Instant)>;

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
        if shared.readers.listening() == 0 {
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
    let engine = &shared.engine;
    let mut heard: Option<Heard> = None;
    let (mut marked_at, mut needed_at, mut tidied_at) = (None::<Instant>, Instant::now(), Instant::now());
    while needed_at.elapsed() < LINGER {
        if shared.readers.listening() > 0 {
            needed_at = Instant::now();
        }
        if heard.is_none() {
            let since = |(teller, seq)| (teller, (seq, Instant::now()));
            heard = engine.told_so_far().await.ok().map(|told| told.into_iter().map(since).collect());
        }
        if marked_at.is_none_or(|at| at.elapsed() >= MARK_EVERY) && engine.listen().await.is_ok() {
            marked_at = Some(Instant::now());
        }
        if let Some(heard) = &mut heard {
            let behind: Vec<(Uuid, i64)> = heard.iter().map(|(teller, (seq, _))| (*teller, *seq)).collect();
            // Where the store does not answer, the next time tells whether something is missing.
            for telling in engine.told(&behind).await.unwrap_or_default() {
                pass_on(&shared.ring, heard, telling);
            }
            if tidied_at.elapsed() >= FORGET_AFTER
                && let Ok(told) = engine.told_so_far().await
            {
                forget(heard, &told, Instant::now());
                tidied_at = Instant::now();
            }
        }
        tokio::time::sleep(READ_EVERY).await;
    }
    // What others do from now on is not known here: who comes back later is told of a gap. Also where there are no others: some
    // may come meanwhile.
    shared.ring.lost(1);
}

/// Forgets whom nobody has heard for long. Of whom the store still has something is not: it would be read again.
fn forget(heard: &mut Heard, told: &[(Uuid, i64)], now: Instant) {
    heard.retain(|teller, (_, at)| {
        now.duration_since(*at) < FORGET_AFTER || told.iter().any(|(still, _)| still == teller)
    });
}

fn pass_on(ring: &Ring, heard: &mut Heard, telling: Telling) {
    let before = heard.insert(telling.teller, (telling.seq, Instant::now()));
    if telling.lost > 0 || before.is_some_and(|(before, _)| before + 1 != telling.seq) {
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

    #[test]
    fn who_is_gone_is_forgotten() {
        let (gone, quiet, kept) = (Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3));
        let (at, second) = (Instant::now(), Duration::from_secs(1));
        let mut heard = Heard::from([(gone, (4, at)), (quiet, (5, at + second)), (kept, (6, at))]);
        forget(&mut heard, &[], at + FORGET_AFTER - second);
        assert_eq!(heard.len(), 3, "a minute is not over");
        forget(&mut heard, &[(kept, 6)], at + FORGET_AFTER);
        assert_eq!(heard, Heard::from([(quiet, (5, at + second)), (kept, (6, at))]));
    }
}
