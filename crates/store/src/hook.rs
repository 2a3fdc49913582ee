//! Requests from outside that make runs as ticks do: within overlap, breaker, budget and pause.

use belfry_core::check::{Admitted, Asking, Status};
use belfry_core::definition::Options;
use belfry_core::overlap::Overlap;
use belfry_core::{Facts, RunId, SkipReason};
use belfry_time::Allowed;

use crate::shapes::{Key, NewRun};

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
