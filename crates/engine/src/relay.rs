//! What happens here, told to nodes on which somebody listens: for stores that nodes share. Apart from all work: nothing waits
//! for it, and what is too much is dropped and counted.
//!
//! Nobody is told while nobody listens. Who begins to listen leaves a mark, which is looked for each second; what happened
//! between the two is still at hand then.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use belfry_store::{AnyStore, Telling};
use belfry_time::{SignedDuration, Timestamp};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::event::Event;
use crate::shell::View;

/// How often it tells: a reader elsewhere is hardly later than one here.
const TELL_EVERY: Duration = Duration::from_millis(250);
/// It looks whether somebody listens once in so many rounds: each second.
const LOOK_ROUNDS: u32 = 4;
/// So many events at a time; more are dropped. Two thousand a second are more than a person reads.
const BATCH_MAX: usize = 500;
/// What has happened lately, for who has just begun to listen.
const AT_HAND: Duration = Duration::from_millis(2500);
/// So far the clocks of two nodes may be apart.
const APART: SignedDuration = SignedDuration::from_millis(100);
/// The last words of a node may take so long.
const LAST_WITHIN: Duration = Duration::from_secs(1);

/// By which an engine is known among those who tell each other what happens, and how often it has told something: its next
/// life goes on behind that.
#[derive(Debug, Clone)]
pub(crate) struct Teller {
    pub(crate) id: Uuid,
    told: Arc<AtomicI64>,
}

impl Teller {
    pub(crate) fn new() -> Teller {
        Teller { id: Uuid::new_v4(), told: Arc::default() }
    }
}

/// A task that tells others.
pub(crate) struct Relay {
    task: JoinHandle<()>,
    end: oneshot::Sender<()>,
}

impl Relay {
    /// Tells others what comes through `events` from now on.
    pub(crate) fn start(
        store: Arc<AnyStore>,
        teller: Teller,
        events: broadcast::Receiver<Arc<Event>>,
        view: watch::Receiver<View>,
    ) -> Relay {
        let (end, ended) = oneshot::channel();
        let state = State::new(store, teller, view);
        Relay { task: tokio::spawn(state.run(events, ended)), end }
    }

    /// Tells what is left, and ends.
    pub(crate) async fn end(mut self) {
        // A task that has ended needs no telling.
        let _ = self.end.send(());
        if tokio::time::timeout(LAST_WITHIN, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

struct State {
    store: Arc<AnyStore>,
    teller: Teller,
    view: watch::Receiver<View>,
    /// Dropped since something was told.
    lost: u64,
    waiting: VecDeque<(Instant, Arc<Event>)>,
    /// Whether somebody listens.
    is_heard: bool,
}

impl State {
    fn new(store: Arc<AnyStore>, teller: Teller, view: watch::Receiver<View>) -> State {
        State { store, teller, view, lost: 0, waiting: VecDeque::new(), is_heard: false }
    }

    async fn run(mut self, mut events: broadcast::Receiver<Arc<Event>>, mut ended: oneshot::Receiver<()>) {
        let mut rounds = tokio::time::interval(TELL_EVERY);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut round = 0_u32;
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(event) => self.take(event),
                    Err(broadcast::error::RecvError::Lagged(count)) => self.lost += count,
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                _ = rounds.tick() => {
                    if round.is_multiple_of(LOOK_ROUNDS) {
                        self.look().await;
                    }
                    round = round.wrapping_add(1);
                    self.tell().await;
                }
                // Whoever started it is gone, or wants it to end.
                _ = &mut ended => {
                    while let Ok(event) = events.try_recv() {
                        self.take(event);
                    }
                    return self.tell().await;
                }
            }
        }
    }

    fn take(&mut self, event: Arc<Event>) {
        if self.waiting.len() == BATCH_MAX {
            self.waiting.pop_front();
            self.lost += 1;
        }
        self.waiting.push_back((Instant::now(), event));
    }

    /// Whether somebody listens, and since when.
    async fn look(&mut self) {
        // Where the store does not answer, others have nothing to read from either.
        let since = self.store.listens(self.teller.id).await.unwrap_or(None);
        match (self.is_heard, since) {
            (false, Some(since)) => {
                let from = since.saturating_sub(APART).unwrap_or(Timestamp::MIN);
                self.waiting.retain(|(_, event)| event.timestamp >= from);
            }
            (_, None) => {
                self.waiting.retain(|(at, _)| at.elapsed() < AT_HAND);
                self.lost = 0;
            }
            (true, Some(_)) => {}
        }
        self.is_heard = since.is_some();
        if self.teller.told.load(Ordering::Relaxed) > 0 {
            // What is left now goes the next time, here or elsewhere.
            let _ = self.store.prune_told().await;
        }
    }

    async fn tell(&mut self) {
        if !self.is_heard || self.waiting.is_empty() && self.lost == 0 {
            return;
        }
        let node = self.view.borrow().node;
        let lines = self.waiting.drain(..).map(|(_, event)| event.to_json(node)).collect();
        let seq = self.teller.told.fetch_add(1, Ordering::Relaxed) + 1;
        let telling = Telling { teller: self.teller.id, seq, lost: self.lost, lines };
        self.lost = 0;
        // What cannot be told is missing, and the next number tells that.
        let _ = self.store.tell(&telling).await;
    }
}

#[cfg(test)]
mod tests {
    use belfry_store::memory::Memory;

    use super::*;
    use crate::event::{Level, Name};

    #[test]
    fn what_is_too_much_is_dropped_and_counted() {
        let view = View {
            draining: false,
            phase: crate::driver::Phase::Running,
            counters: crate::driver::Counters::default(),
            running: Default::default(),
            overrun: 0,
            node: belfry_core::NodeId(Uuid::nil()),
            store_is_well: true,
            delayed: Default::default(),
        };
        let store = Arc::new(AnyStore::Memory(Memory::new()));
        let (_sender, view) = watch::channel(view);
        let mut state = State::new(store, Teller::new(), view);
        for second in 0..BATCH_MAX as i64 + 7 {
            let at = Timestamp::from_second(second).unwrap();
            state.take(Arc::new(Event::new(at, Level::Info, Name::RunStarted)));
        }
        assert_eq!((state.waiting.len(), state.lost), (BATCH_MAX, 7));
        assert_eq!(state.waiting[0].1.timestamp.as_second(), 7, "the oldest go");
    }
}
