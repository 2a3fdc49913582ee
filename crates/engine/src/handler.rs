//! Work that is a Rust function.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use belfry_core::retry::Outcome;
use belfry_core::{Reason, RunId};
use belfry_runner::{Attempt, CancelReceiver, Chunk, Report, Stop, Stream, Usage};
use belfry_time::Timestamp;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use uuid::Uuid;

/// What a handler fails with.
pub type HandlerError = Box<dyn std::error::Error + Send + Sync>;
type HandlerFuture = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send>>;

/// A registered function.
#[derive(Clone)]
pub(crate) struct Handler(Arc<dyn Fn(Context) -> HandlerFuture + Send + Sync>);

/// What a handler is told about its attempt.
#[derive(Clone)]
pub struct Context {
    attempt: Arc<Attempt>,
    prompt: Arc<str>,
    payload: Arc<serde_json::Value>,
    cancel: CancelReceiver,
    output: mpsc::Sender<Chunk>,
    usage: Arc<Mutex<Option<Usage>>>,
}

impl Context {
    /// The agent's name.
    pub fn agent(&self) -> &str {
        &self.attempt.agent
    }

    /// The schedule's name.
    pub fn schedule(&self) -> &str {
        &self.attempt.schedule
    }

    /// The schedule's command.
    pub fn command(&self) -> &str {
        &self.attempt.command
    }

    /// The run.
    pub fn run(&self) -> RunId {
        self.attempt.run
    }

    /// Which attempt of it, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt.attempt
    }

    /// The instant it was meant for, where a tick made it.
    pub fn tick_at(&self) -> Option<Timestamp> {
        self.attempt.tick_at
    }

    /// The prompt, with everything filled in.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The payload: the run's over the schedule's over the agent's, key by key.
    pub fn payload(&self) -> &serde_json::Value {
        &self.payload
    }

    /// The key of its session, where a message made the run.
    pub fn session(&self) -> Option<&str> {
        self.attempt.session.as_deref()
    }

    /// Names the run in logs and traces; also once it is cancelled.
    pub fn trace_id(&self) -> Uuid {
        self.attempt.trace_id
    }

    /// Says how many tokens its session has used of its context window.
    pub fn used(&self, tokens: u64, context_window: u64) {
        let (tokens, context_window) = (Some(tokens), Some(context_window));
        *self.usage.lock() = Some(Usage { tokens, context_window, cost_usd: None });
    }

    /// Keeps a line of output with the run.
    pub async fn log(&self, line: impl Into<String>) {
        let bytes = format!("{}\n", line.into()).into_bytes();
        // Nobody listens any more once the attempt was given up.
        let _ = self.output.send(Chunk { stream: Stream::Stdout, bytes }).await;
    }

    /// Waits until the attempt should end: it was cancelled, or the node shuts down.
    pub async fn cancelled(&self) {
        let mut cancel = self.cancel.clone();
        if cancel.wait_for(Option::is_some).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Handler {
    pub(crate) fn new<F, R>(function: F) -> Handler
    where
        F: Fn(Context) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), HandlerError>> + Send + 'static,
    {
        Handler(Arc::new(move |context| Box::pin(function(context))))
    }

    /// Runs an attempt to its end. One that does not end within its grace is dropped where it waits. Calls `started` when
    /// the function waits for the first time.
    pub(crate) async fn run(
        &self,
        attempt: Attempt,
        mut cancel: CancelReceiver,
        output: mpsc::Sender<Chunk>,
        started: impl FnOnce() + Send + 'static,
    ) -> Report {
        let (timeout, grace) = (attempt.work().timeout_ms, Duration::from_millis(attempt.work().grace_ms));
        let (prompt, payload) = match belfry_runner::build_input(&attempt) {
            Ok((prompt, payload)) => (prompt.into(), payload.into()),
            Err(error) => {
                let outcome = Outcome::Failed { reason: error.reason(), retryable: error.is_retryable() };
                let error = Some(error.chain());
                return Report { outcome, exit_code: None, error, summary: None, usage: None };
            }
        };
        let usage = Arc::new(Mutex::new(None));
        let context = Context {
            attempt: Arc::new(attempt),
            prompt,
            payload,
            cancel: cancel.clone(),
            output,
            usage: usage.clone(),
        };
        // A task of its own, so that a panic ends the attempt and nothing else.
        let mut work = (self.0)(context);
        let mut task = AbortOnDrop(tokio::spawn(async move {
            if let Poll::Ready(done) = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await {
                return done;
            }
            started();
            work.await
        }));
        let outcome = tokio::select! {
            // A function that ends because it was asked to has not completed, however soon it does.
            biased;
            stop = asked(&mut cancel) => match stop {
                Stop::Cancel(reason) => Outcome::Cancelled(reason),
                Stop::Shutdown | Stop::ShutdownNow => Outcome::Shutdown,
                Stop::LeaseLost => Outcome::Failed { reason: Reason::Orphaned, retryable: true },
            },
            done = &mut task.0 => return Report { usage: *usage.lock(), ..report(done) },
            () = after(timeout.map(Duration::from_millis)) => Outcome::Failed { reason: Reason::Timeout, retryable: true },
        };
        let in_time = tokio::select! {
            done = &mut task.0 => Some(done),
            () = tokio::time::sleep(grace), if !matches!(outcome, Outcome::Failed { .. }) => None,
            () = asked_now(&mut cancel) => None,
            () = std::future::ready(()), if matches!(outcome, Outcome::Failed { .. }) => None,
        };
        if in_time.is_none() {
            task.0.abort();
            let _ = (&mut task.0).await;
        }
        Report { outcome, exit_code: None, error: None, summary: None, usage: *usage.lock() }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<Result<(), HandlerError>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn after(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

async fn asked(cancel: &mut CancelReceiver) -> Stop {
    loop {
        if let Some(stop) = *cancel.borrow_and_update() {
            return stop;
        }
        if cancel.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn asked_now(cancel: &mut CancelReceiver) {
    loop {
        if cancel.borrow_and_update().is_some_and(Stop::is_at_once) {
            return;
        }
        if cancel.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

fn report(done: Result<Result<(), HandlerError>, tokio::task::JoinError>) -> Report {
    let (outcome, error) = match done {
        Ok(Ok(())) => (Outcome::Completed, None),
        Ok(Err(error)) => {
            (Outcome::Failed { reason: Reason::Error, retryable: true }, Some(error.to_string()))
        }
        Err(error) => (
            Outcome::Failed { reason: Reason::Error, retryable: true },
            Some(format!("the handler panicked: {error}")),
        ),
    };
    Report { outcome, exit_code: None, error, summary: None, usage: None }
}
