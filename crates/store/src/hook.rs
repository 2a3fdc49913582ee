//! Requests from outside that make runs as ticks do: within overlap, breaker, budget and pause.

use std::future::Future;

use belfry_core::definition::Options;
use belfry_core::{RunId, SkipReason};
use belfry_time::Timestamp;

use crate::any::AnyStore;
use crate::shapes::{Key, NewRun};
use crate::store::Answer;

/// A request from outside.
#[derive(Debug, Clone, PartialEq)]
pub struct Knock {
    /// The run that it asks for. The store decides whether the run is a probe.
    pub run: NewRun,
    /// The content that was signed: it makes one run, whatever keys the request carries. None where nothing is signed.
    pub signed: Option<Key>,
    /// Keys that the sender chose. A repeat of any of them answers with the first run.
    pub keys: Vec<Key>,
    /// The rules of its schedule.
    pub options: Options,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Knocked {
    /// It made its run.
    Made {
        /// Runs that are to be cancelled for it; it waits until they are gone.
        cancel: Vec<RunId>,
    },
    /// It has made this run before: by the signed content, or by a key with the same body.
    Repeat(RunId),
    /// One of its keys was used with another body, for this run.
    KeyReused(RunId),
    /// It makes none, for this reason; it may be sent again.
    Refused(SkipReason),
    /// There is no such schedule.
    NotFound,
}

/// Requests from outside.
pub trait Hooks: Send + Sync + 'static {
    /// Makes a run if the rules of its schedule allow one now: what they look at cannot change in between. Crash: a run that
    /// was answered for exists, with the probe of a breaker if it is one, and with all keys of the request.
    ///
    /// A repeat that only a key tells also stores its signed content, for the first run: that content then makes no run
    /// of its own when it is sent without the key. A repeat by its signed content stores no key, because keys are not
    /// signed.
    fn knock(&self, now: Timestamp, knock: &Knock) -> impl Future<Output = Answer<Knocked>> + Send;
}

impl Hooks for AnyStore {
    async fn knock(&self, now: Timestamp, knock: &Knock) -> Answer<Knocked> {
        match self {
            AnyStore::Memory(store) => store.knock(now, knock).await,
            AnyStore::Sqlite(store) => store.knock(now, knock).await,
            AnyStore::Postgres(store) => store.knock(now, knock).await,
        }
    }
}

/// As it is told to whoever waits.
pub(crate) fn made(knocked: &Knocked) -> bool {
    matches!(knocked, Knocked::Made { .. })
}
