//! Config skew: the files of a node differ from what the store holds, and so from what the other nodes run from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use belfry::event::{Level, Name};
use belfry::{Engine, Event};

use crate::content::LastLoaded;
use crate::place::SOURCE;

/// What is said of files that differ from what the other nodes run from.
pub const WORDS: &str = "config skew: the files of this node differ from what the store holds, and have not changed \
                         since this node loaded them; `belfry diff` shows how, `belfry apply` applies them";
/// How often a node compares. A difference counts when it is seen twice: a node that applies its files changes the
/// store first, and notes then what it has loaded.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Tells that a skew begins, and that it ends, each once.
#[derive(Clone)]
pub struct Skew {
    engine: Engine,
    /// Whether it was told that the files differ.
    is_told: Arc<AtomicBool>,
}

impl Skew {
    pub fn new(engine: &Engine) -> Skew {
        Skew { engine: engine.clone(), is_told: Arc::default() }
    }

    /// The files differ: somebody asked for them to be applied, or it was not so before.
    pub fn tell(&self) {
        self.is_told.store(true, Ordering::Relaxed);
        self.event(Level::Warn, "began", WORDS);
    }

    /// Compares the files as this node loaded them last with what the store holds, now and then.
    pub async fn watch_loop(self, last: LastLoaded) {
        let mut look = tokio::time::interval(LOOK_EVERY);
        let mut before = false;
        loop {
            look.tick().await;
            // A store that does not answer is told of elsewhere.
            let Ok(stored) = self.engine.reads().source_digest(SOURCE).await else { continue };
            let differs = stored != last.read();
            match (before && differs, self.is_told.load(Ordering::Relaxed)) {
                (true, false) => self.tell(),
                (false, true) if !differs => {
                    self.is_told.store(false, Ordering::Relaxed);
                    self.event(Level::Info, "ended", "the store holds what the files of this node say");
                }
                _ => {}
            }
            before = differs;
        }
    }

    fn event(&self, level: Level, state: &'static str, detail: &str) {
        let event = Event::new(self.engine.now(), level, Name::ConfigSkew);
        self.engine.tell(Event { state: Some(state), detail: Some(detail.to_owned()), ..event });
    }
}
