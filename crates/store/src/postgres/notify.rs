//! Hints to and from other nodes, by LISTEN and NOTIFY on a connection of their own.
//!
//! A notification is never sent inside a verb's transaction, for commits that notify wait for each other; and at most one
//! in a while, for many hints are one. Who misses one looks again after a while.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Part, Tx};
use crate::Error;
use crate::hint::Hint;
use crate::store::Answer;

/// So long at least between two notifications.
const APART: Duration = Duration::from_millis(10);
/// Who waits for hints looks himself after so long while the listener is well …
const LOOK_SECONDS: u32 = 30;
/// … and each such step while it is not. Also how soon a lost listener tries again.
const STEP: Duration = Duration::from_secs(1);
/// The listener asks its connection whether it is still there.
const PROBE_EVERY: Duration = Duration::from_secs(15);
const PROBE_WITHIN: Duration = Duration::from_secs(5);

/// The hints of one store.
#[derive(Default)]
pub(super) struct Hints {
    inner: Arc<Inner>,
    listener: Mutex<Option<Listener>>,
}

#[derive(Default)]
struct Inner {
    here: Hint,
    /// Others are to be told.
    untold: Notify,
    is_listening: AtomicBool,
    told_at: Mutex<Option<Instant>>,
    /// By which a store knows its own notifications.
    name: Name,
}

struct Name(String);

impl Default for Name {
    fn default() -> Name {
        Name(Uuid::now_v7().to_string())
    }
}

struct Listener(JoinHandle<()>);

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Postgres {
    /// Gives a hint if an answer is news, soon also to others: for what happens often.
    pub(super) fn hint<T>(&self, answer: Answer<T>, is_news: impl FnOnce(&T) -> bool) -> Answer<T> {
        if answer.as_ref().is_ok_and(is_news) {
            self.nudge();
        }
        answer
    }

    pub(super) fn nudge(&self) {
        self.hints.inner.here.give();
        self.hints.inner.untold.notify_one();
        self.start_listener();
    }

    /// The same, telling others before it returns, for whoever asked may be gone in a moment. Only the first of many does.
    pub(super) async fn tell<T>(&self, answer: Answer<T>, is_news: impl FnOnce(&T) -> bool) -> Answer<T> {
        self.tell_by(Part::Requests, answer, is_news).await
    }

    /// The same on a connection of another part, so that it does not wait for those of requests.
    pub(super) async fn tell_by<T>(
        &self,
        part: Part,
        answer: Answer<T>,
        is_news: impl FnOnce(&T) -> bool,
    ) -> Answer<T> {
        if !answer.as_ref().is_ok_and(is_news) {
            return answer;
        }
        let inner = &self.hints.inner;
        let is_first = {
            let mut told_at = inner.told_at.lock();
            let is_first = told_at.is_none_or(|at| at.elapsed() >= APART);
            if is_first {
                *told_at = Some(Instant::now());
            }
            is_first
        };
        if !is_first {
            return self.hint(answer, |_| true);
        }
        inner.here.give();
        // It is only a hint: what it is about has been committed, and whoever misses it looks himself.
        let _ = verb!(self, part, part.deadline(), statements, |tx| notify(&mut tx, &inner.name.0).await);
        answer
    }

    /// Waits for a hint, or for the time to look without one.
    pub(super) async fn hinted(&self) {
        self.start_listener();
        let inner = &self.hints.inner;
        for _ in 0..LOOK_SECONDS {
            if timeout(STEP, inner.here.given()).await.is_ok() || !inner.is_listening.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    fn start_listener(&self) {
        let mut listener = self.hints.listener.lock();
        if listener.is_none() {
            let task = tokio::spawn(listen_loop(self.pool.config(), self.hints.inner.clone()));
            *listener = Some(Listener(task));
        }
    }
}

async fn notify(tx: &mut Tx<'_>, name: &str) -> Result<(), Fault> {
    tx.query("select pg_notify('belfry', $1)", &[&name]).await.map(drop)
}

async fn listen_loop((config, tls): (Config, MakeRustlsConnect), inner: Arc<Inner>) {
    loop {
        if let Ok((client, connection)) = config.connect(tls.clone()).await {
            tokio::select! {
                () = hear(connection, &inner) => {}
                _ = speak(client, &inner) => {}
            }
        }
        inner.is_listening.store(false, Ordering::SeqCst);
        sleep(STEP).await;
    }
}

/// Hears notifications until the connection is gone.
async fn hear<S>(mut connection: Connection<Socket, S>, inner: &Inner)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
        if let AsyncMessage::Notification(heard) = message
            && heard.payload() != inner.name.0
        {
            inner.here.give();
        }
    }
}

/// Subscribes, tells others what is untold, and probes the connection, until it fails.
async fn speak(client: Client, inner: &Inner) -> Result<(), tokio_postgres::Error> {
    client.batch_execute("listen belfry").await?;
    inner.is_listening.store(true, Ordering::SeqCst);
    // What happened while nobody listened.
    inner.here.give();
    loop {
        match timeout(PROBE_EVERY, inner.untold.notified()).await {
            Ok(()) => {
                *inner.told_at.lock() = Some(Instant::now());
                client.query("select pg_notify('belfry', $1)", &[&inner.name.0]).await?;
                sleep(APART).await;
            }
            Err(_) => match timeout(PROBE_WITHIN, client.batch_execute("select 1")).await {
                Ok(answer) => answer?,
                Err(_) => return Ok(()),
            },
        }
    }
}
