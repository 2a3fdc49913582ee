//! Commands on nodes, and how their machines do.

use std::path::Path;
use std::time::Duration;

use belfry_core::NodeId;
use belfry_runner::ProcessState;
use belfry_store::{Drained, NodeProcess, Page, SnapshotFilter, SnapshotRow, Store, Watch};

use crate::driver::{Input, Phase};
use crate::engine::Engine;
use crate::error::Error;
use crate::shell::Message;

/// A node does what it was told sooner than this.
const DRAINS_WITHIN: Duration = Duration::from_secs(2);

/// The name of this machine, by which a node tells where it is.
pub fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_else(|| "localhost".into())
}

/// This process, as its node's row names it.
pub(crate) fn own_process(state_dir: &Path, lease: Duration) -> NodeProcess {
    let start_time = match ProcessState::of(std::process::id()) {
        ProcessState::Found { start_time, .. } => start_time,
        ProcessState::Unknown | ProcessState::Gone => 0,
    };
    let state_dir = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned());
    NodeProcess {
        boot_id: belfry_runner::boot_id(),
        pid_ns: belfry_runner::pid_ns(),
        start_time,
        state_dir: state_dir.to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
    }
}

impl Engine {
    /// Who this is among the nodes of its store, from its start on. A node that was taken for gone comes back as another.
    pub fn node(&self) -> NodeId {
        self.view().borrow().node
    }

    /// How nodes and their machines did at each heartbeat, the last first, before a number.
    pub async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Page<SnapshotRow, i64>, Error> {
        Ok(self.store().snapshots(filter, before, limit).await?)
    }

    /// Lets a node take no new work, this one or another: it plans and claims nothing, lets what runs end, keeps its lease
    /// and stays up, until that is undone with `false`. This node does so before the answer, another within a second. Gives
    /// whether it was not so before.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let engine = belfry::Engine::builder().build();
    /// engine.start().await?;
    /// engine.drain(engine.node(), true).await?;
    /// assert_eq!(engine.status(), belfry::Status::Draining);
    /// engine.drain(engine.node(), false).await?;
    /// assert_eq!(engine.status(), belfry::Status::Running);
    /// engine.stop(belfry::StopOptions::default()).await?;
    /// # Ok::<_, belfry::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn drain(&self, node: NodeId, draining: bool) -> Result<bool, Error> {
        let is_news = match self.store().drain(self.store_now().await?, node, draining).await? {
            Drained::Marked { is_news } => is_news,
            Drained::Dead => return Err(Error::NodeDead { node }),
            Drained::NotFound => return Err(Error::NoNode { node }),
        };
        if node == self.node() && self.options().only.is_none() {
            self.message(Message::Input(Input::Drain(draining))).await;
            let mut view = self.view().subscribe();
            let is_so = |view: &crate::shell::View| {
                view.draining == draining || view.node != node || view.phase == Phase::Stopped
            };
            // An engine that is gone takes nothing either; and somebody may have said the opposite meanwhile.
            let _ = tokio::time::timeout(DRAINS_WITHIN, view.wait_for(is_so)).await;
        }
        Ok(is_news)
    }
}
