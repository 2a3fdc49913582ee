//! Why the engine could not do what it was asked.

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An interval cannot be read.
    #[error("{source}")]
    Interval {
        /// What was given.
        input: String,
        /// What is wrong with it.
        #[source]
        source: belfry_time::Error,
    },
    /// A cron expression cannot be read.
    #[error("{source}")]
    Cron {
        /// What was given.
        expr: String,
        /// The part that is wrong, as it was written.
        field: String,
        /// What is wrong with it.
        #[source]
        source: belfry_time::Error,
    },
    /// A run could not be made.
    #[error("cannot run {agent}/{schedule}: {detail}")]
    Trigger {
        /// Whose.
        agent: String,
        /// Which schedule.
        schedule: String,
        /// Why not.
        detail: String,
    },
    /// The engine did not stop in time, or not everything had ended by itself.
    #[error("{running} still running when the time was up{}", if *timed_out { ", and were ended" } else { "" })]
    Shutdown {
        /// Whether the time was up.
        timed_out: bool,
        /// How many were running then.
        running: usize,
    },
    /// There is no such schedule.
    #[error("there is no schedule {name}")]
    NotFound {
        /// What was asked for.
        name: String,
    },
    /// An idempotency key was used for something else.
    #[error("the key was used for run {run} of {name}, with another prompt or payload")]
    KeyReused {
        /// Of which schedule.
        name: String,
        /// What it was used for.
        run: belfry_core::RunId,
    },
    /// The engine is not in a state for that.
    #[error("the engine is {status}")]
    Status {
        /// What it is.
        status: &'static str,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] belfry_store::Error),
    /// Ticks of the past cannot be made up for.
    #[error("{detail}")]
    Backfill {
        /// Why not.
        detail: String,
    },
    /// A prompt cannot be filled in.
    #[error("the prompt of {name}: {detail}")]
    Prompt {
        /// Of which schedule.
        name: String,
        /// What is wrong with it.
        detail: String,
    },
}
