//! Requests from outside that make runs as ticks do: within overlap, breaker, budget and pause.

use std::future::Future;

use belfry_core::check::{Admitted, Asking, Status};
use belfry_core::definition::Options;
use belfry_core::overlap::Overlap;
use belfry_core::{Facts, RunId, SkipReason};
use belfry_time::{Allowed, Timestamp};

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

impl Knock {
    /// The live runs that its schedule's overlap policy looks at.
    pub(crate) fn overlap(&self) -> Overlap<'_> {
        Overlap::of(&self.options, self.run.agent, self.run.schedule)
    }

    /// Whether it makes a run, and how: by the checks that ticks pass, too.
    pub(crate) fn admit(&self, status: &Status, facts: &Facts) -> Result<Admitted, SkipReason> {
        Asking { options: &self.options, status, allowed: Allowed::Yes, facts, in_batch: false }.admit()
    }
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Knocked {
    /// It made its run.
    Made {
        /// Runs that were cancelled for it, in the order of their ids. Those that were running are marked, and it waits until
        /// they are gone.
        cancelled: Vec<RunId>,
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
    /// Makes a run if the rules of its schedule allow one now: what they look at cannot change in between. With
    /// `if_running: cancel` what lives in its overlap scope is cancelled with it. After a crash a run that was answered for
    /// exists, with the probe of a breaker if it is one, and with all keys of the request; what it cancels is cancelled.
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
