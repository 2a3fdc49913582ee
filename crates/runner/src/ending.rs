//! How an attempt's processes are ended: TERM, a grace, KILL, until none of them lives. By the monotonic clock, and without
//! asking anyone.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use parking_lot::Mutex;
use tokio::process::Child;
use tokio::time::{Instant, sleep, sleep_until};

use crate::attempt::{CancelReceiver, Stop};
use crate::cgroup;
use crate::processes::{Family, Scope};

/// How often we look whether processes that are not our children have ended: at first, and at most.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// An attempt's processes, shared with the thread that reads `/proc`.
#[derive(Clone)]
pub(crate) struct Members(Arc<Mutex<Family>>);

impl Members {
    pub(crate) fn new(family: Family) -> Members {
        Members(Arc::new(Mutex::new(family)))
    }

    async fn signal(&self, signal: Signal, scope: Scope) {
        let family = self.0.clone();
        let _ = tokio::task::spawn_blocking(move || family.lock().signal(signal, scope)).await;
    }

    /// Whether any lives.
    pub(crate) async fn live(&self, scope: Scope) -> bool {
        if scope == Scope::Group && crate::processes::group_is_empty(self.0.lock().record().pgid) {
            return false;
        }
        let family = self.0.clone();
        tokio::task::spawn_blocking(move || {
            let mut family = family.lock();
            let cgroup = family.record().cgroup.clone();
            family.lives(scope)
                || (scope == Scope::Everyone && cgroup.is_some_and(|group| cgroup::lives(&group)))
        })
        .await
        .unwrap_or(true)
    }

    async fn kill(&self, scope: Scope) {
        let family = self.0.clone();
        let _ = tokio::task::spawn_blocking(move || {
            let mut family = family.lock();
            if scope == Scope::Everyone
                && let Some(group) = &family.record().cgroup
            {
                cgroup::kill(group);
            }
            family.signal(Signal::SIGKILL, scope);
        })
        .await;
    }
}

/// How to end them.
pub(crate) struct Ending {
    /// Whom.
    pub scope: Scope,
    /// How long they have after TERM; none is KILL at once.
    pub grace: Option<Duration>,
}

/// Ends an attempt's processes and returns when none of them lives; however long that takes.
pub(crate) async fn end(
    child: &mut Child,
    members: &Members,
    ending: Ending,
    cancel: &mut CancelReceiver,
) -> Option<ExitStatus> {
    let mut status = child.try_wait().ok().flatten();
    if let Some(grace) = ending.grace {
        members.signal(Signal::SIGTERM, ending.scope).await;
        let until = Instant::now() + grace;
        if gone_before(until, child, &mut status, members, ending.scope, cancel).await {
            return status;
        }
    }
    let (mut pause, longest) = LOOK_AGAIN;
    loop {
        // Again each time: someone may have been born between the look and the signal.
        members.kill(ending.scope).await;
        if status.is_none() {
            tokio::select! {
                ended = child.wait() => status = ended.ok(),
                () = sleep(pause) => {}
            }
        }
        if status.is_some() && !members.live(ending.scope).await {
            return status;
        }
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// Waits until all are gone, the time is over, or someone is in a hurry.
async fn gone_before(
    until: Instant,
    child: &mut Child,
    status: &mut Option<ExitStatus>,
    members: &Members,
    scope: Scope,
    cancel: &mut CancelReceiver,
) -> bool {
    let (mut pause, longest) = LOOK_AGAIN;
    loop {
        if status.is_some() && !members.live(scope).await {
            return true;
        }
        let exited = status.is_some();
        tokio::select! {
            ended = child.wait(), if !exited => *status = Some(ended.unwrap_or_default()),
            () = sleep(pause), if exited => pause = (pause * 2).min(longest),
            () = sleep_until(until) => return false,
            () = hurry(cancel) => return false,
        }
    }
}

async fn hurry(cancel: &mut CancelReceiver) {
    if cancel.wait_for(|stop| stop.is_some_and(Stop::is_at_once)).await.is_err() {
        std::future::pending().await
    }
}
