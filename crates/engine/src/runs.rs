//! Commands on runs that are there: repeat one, cancel one, wait for one. `requests.rs` makes new ones.

use std::time::Duration;

use belfry_core::{Reason, RunId, RunState, Trigger};
use belfry_store::{Cancelled, Enqueue, Key, NewRun, RunRecord, Store};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::engine::Engine;
use crate::error::Error;
use crate::event::Name;
use crate::requests::prepare;

/// How often a run that is waited for is looked at, where no event tells of it.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A run that is asked for by hand.
#[derive(Debug, Clone, Default)]
pub struct RunRequest {
    /// Instead of the schedule's. Used as it is: it is no template.
    pub prompt: Option<String>,
    /// Over the schedule's, key by key.
    pub payload: Map<String, Value>,
    /// Makes a repeat answer with the first run.
    pub key: Option<String>,
    /// Its trace, where the caller has one.
    pub trace_id: Option<Uuid>,
}

/// What came of a request for a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requested {
    /// The run.
    pub run: RunId,
    /// Whether it was made now, and not for an earlier request with the same key.
    pub is_new: bool,
}

/// What cancelling a run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelling {
    /// It waited, and has ended.
    Ended,
    /// It runs, and its node is told to end it.
    Told,
    /// It had been cancelled before.
    Before,
}

impl Engine {
    /// Repeats a run that has ended: a new one of its schedule as that is now, with the prompt and payload that came with it.
    /// With a `key` a repeat of this request answers with the first run.
    pub async fn retry(
        &self,
        run: RunId,
        key: Option<String>,
        trace_id: Option<Uuid>,
    ) -> Result<Requested, Error> {
        self.refuse_while_draining()?;
        let old = self.listed(run).await?;
        if old.state.is_live() {
            return Err(Error::NotEnded { run, state: old.state });
        }
        let now = self.store_now().await?;
        let (new, _) = prepare(&**self.store(), self.options(), now, &old.name).await?;
        let given = self.store().run(run).await?.ok_or(Error::NoRun { run })?;
        if given.payload.is_null() {
            return Err(Error::NoPayload { run });
        }
        let new = new.again(old.command, given.prompt, given.payload);
        let key = key.map(|key| Key::new(key, run.0.as_bytes().to_vec(), now));
        let request = Enqueue { run: NewRun { trace_id, ..new }, key };
        let enqueued = self.store().enqueue(now, &request).await?;
        let made = self.enqueued(&old.name, Trigger::Manual, &request.run, enqueued)?;
        self.hint().await;
        Ok(made)
    }

    /// Cancels a run: one that waits ends at once, one that runs is told to end. One that has ended otherwise is an error.
    pub async fn cancel(&self, run: RunId) -> Result<Cancelling, Error> {
        let now = self.store_now().await?;
        let done = match self.store().cancel(now, run, Reason::Requested).await? {
            Cancelled::NotFound => return Err(Error::NoRun { run }),
            Cancelled::Before(RunState::Cancelled) => Cancelling::Before,
            Cancelled::Before(state) => return Err(Error::EndedBefore { run, state }),
            // The node that runs it tells of the others.
            Cancelled::Ended => {
                self.tell_ends(&[run]).await;
                Cancelling::Ended
            }
            Cancelled::Told(_) => Cancelling::Told,
        };
        self.hint().await;
        Ok(done)
    }

    /// A run.
    pub async fn run(&self, run: RunId) -> Result<Option<RunRecord>, Error> {
        Ok(self.store().run(run).await?)
    }

    /// A run without its prompt and its payload, which may take a lot of memory.
    pub async fn listed(&self, run: RunId) -> Result<RunRecord, Error> {
        self.store().runs_by_id(&[run]).await?.pop().ok_or(Error::NoRun { run })
    }

    /// Waits until a run has ended, wherever it runs; gives it without its prompt and payload. Who does not want to wait for
    /// ever drops the future.
    pub async fn wait(&self, run: RunId) -> Result<RunRecord, Error> {
        let mut events = self.events();
        loop {
            let record = self.listed(run).await?;
            if !record.state.is_live() {
                return Ok(record);
            }
            let told = async {
                // One that fell behind looks again, as after its time.
                while let Ok(event) = events.recv().await {
                    if event.run_id == Some(run)
                        && matches!(event.event, Name::RunFinished | Name::RunCancelled)
                    {
                        return;
                    }
                }
            };
            tokio::select! {
                () = told => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }
}
