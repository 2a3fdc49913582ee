//! Any of the three rooms behind one type, chosen by an address at run time.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use belfry_core::breaker::Admits;
use belfry_core::edit::Resume;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, ScheduleDefinition, ScheduleId,
    SkipRange,
};
use belfry_time::Timestamp;
use uuid::Uuid;

use crate::access::*;
use crate::error::Error;
use crate::hook::{Knock, Knocked};
use crate::memory::Memory;
use crate::postgres::Postgres;
use crate::sessions::*;
use crate::shapes::*;
use crate::sqlite::Sqlite;
use crate::stats::Stats;
use crate::store::{Access, Answer, Hooks, Store, Watch};
use crate::views::*;
use crate::watch::*;

/// A store whose kind is known only at run time.
pub enum AnyStore {
    /// In memory; gone with the process.
    Memory(Memory),
    /// In one file.
    Sqlite(Sqlite),
    /// In a PostgreSQL database.
    Postgres(Postgres),
}

impl AnyStore {
    /// Opens the store at an address: `memory`, `sqlite:PATH` or `postgres://…`. With `serve` a file is locked for the one
    /// server that it may have.
    pub async fn open(address: &str, serve: bool) -> Result<AnyStore, Error> {
        if address == "memory" {
            return Ok(AnyStore::Memory(Memory::new()));
        }
        if let Some(path) = address.strip_prefix("sqlite:").filter(|path| !path.contains("://")) {
            let path = Path::new(path);
            let store = if serve { Sqlite::serve(path)? } else { Sqlite::open(path)? };
            return Ok(AnyStore::Sqlite(store));
        }
        if address.starts_with("postgres://") || address.starts_with("postgresql://") {
            return Ok(AnyStore::Postgres(Postgres::open(address).await?));
        }
        // What follows may be a password.
        let beginning = address.split([':', '=', '@', '/']).next().unwrap_or_default();
        let beginning = beginning.chars().take(20).collect();
        Err(Error::Address { beginning })
    }
}

impl AnyStore {
    /// Says of running runs whose end the store refuses that it does.
    async fn with_refused_ends(&self, mut runs: Vec<RunRecord>) -> Answer<Vec<RunRecord>> {
        if runs.iter().any(|run| run.state == RunState::Running) {
            for refusal in self.refusals().await? {
                let run =
                    runs.iter_mut().find(|run| refusal.run == Some(run.id) && run.state == RunState::Running);
                run.into_iter().for_each(|run| run.error = Some(refusal.words()));
            }
        }
        Ok(runs)
    }

    /// Says of schedules whose plans the store refuses that it does.
    async fn with_refused_plans(&self, mut schedules: Vec<ScheduleRecord>) -> Answer<Vec<ScheduleRecord>> {
        // Only a schedule with a timer can be planned.
        if schedules.iter().any(|schedule| schedule.token.is_some()) {
            for refusal in self.refusals().await?.into_iter().filter(|refusal| refusal.run.is_none()) {
                let schedule = schedules.iter_mut().find(|schedule| schedule.id == refusal.schedule);
                schedule.into_iter().for_each(|schedule| schedule.last_error = Some(refusal.words()));
            }
        }
        Ok(schedules)
    }

    /// Whether nodes on several machines may share it.
    pub fn is_shared(&self) -> bool {
        matches!(self, AnyStore::Postgres(_))
    }

    /// Makes the store unavailable to all other processes, as an outage does: an SQLite file is locked for so long, the
    /// connections of others to a PostgreSQL database are ended. For a store that exists to be tested.
    pub async fn disturb(&self, time: Duration) -> Answer<()> {
        match self {
            AnyStore::Memory(_) => Ok(()),
            AnyStore::Sqlite(store) => store.disturb(time).await,
            AnyStore::Postgres(store) => store.disturb().await,
        }
    }

    /// Leaves a mark that somebody listens to what others tell, for the next few seconds.
    pub async fn listen(&self, listener: Uuid) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.listen(listener).await,
        }
    }

    /// Since when somebody else listens.
    pub async fn listens(&self, teller: Uuid) -> Answer<Option<Timestamp>> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(None),
            AnyStore::Postgres(store) => store.listens(teller).await,
        }
    }

    /// Tells those who listen elsewhere what happened. It is kept for a few seconds, and not beyond a crash of the database.
    pub async fn tell(&self, telling: &Telling) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.tell_others(telling).await,
        }
    }

    /// How far others have come with telling.
    pub async fn told_so_far(&self, listener: Uuid) -> Answer<Vec<(Uuid, i64)>> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(Vec::new()),
            AnyStore::Postgres(store) => store.told_so_far(listener).await,
        }
    }

    /// What others have told behind what was heard of each, in the order in which each told it.
    pub async fn told(&self, listener: Uuid, heard: &[(Uuid, i64)]) -> Answer<Vec<Telling>> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(Vec::new()),
            AnyStore::Postgres(store) => store.told(listener, heard).await,
        }
    }

    /// Removes what was told some seconds ago.
    pub async fn prune_told(&self) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.prune_told().await,
        }
    }

    /// What a store needs done every few seconds while it is worked on, so that it stays as fast as it is.
    pub async fn tend(&self) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.tend().await,
        }
    }
}

macro_rules! each {
    ($any:expr, $store:ident => $call:expr) => {
        match $any {
            AnyStore::Memory($store) => $call,
            AnyStore::Sqlite($store) => $call,
            AnyStore::Postgres($store) => $call,
        }
    };
}

/// Passes verbs on to the store that it is.
macro_rules! dispatch {
    ($($(#[$about:meta])* $kind:ident fn $verb:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> $answer:ty
        $(, wakes $when:expr)? $(, else $otherwise:block)?;)*) => {
        $(dispatch!(one $verb ($($arg: $type),*) $answer);)*
    };
    // Below: what is refused is added to these.
    (one run $($rest:tt)*) => {};
    (one runs_by_id $($rest:tt)*) => {};
    (one live_runs $($rest:tt)*) => {};
    (one runs $($rest:tt)*) => {};
    (one schedule $($rest:tt)*) => {};
    (one schedules $($rest:tt)*) => {};
    (one $verb:ident ($($arg:ident: $type:ty),*) $answer:ty) => {
        async fn $verb(&self, $($arg: $type),*) -> Answer<$answer> {
            each!(self, store => store.$verb($($arg),*).await)
        }
    };
}

impl Store for AnyStore {
    verbs!(store, dispatch);

    async fn run(&self, run: RunId) -> Answer<Option<RunRecord>> {
        let found = each!(self, store => store.run(run).await)?;
        Ok(self.with_refused_ends(found.into_iter().collect()).await?.pop())
    }

    async fn runs_by_id(&self, runs: &[RunId]) -> Answer<Vec<RunRecord>> {
        let found = each!(self, store => store.runs_by_id(runs).await)?;
        self.with_refused_ends(found).await
    }

    async fn live_runs(&self) -> Answer<Vec<RunRecord>> {
        let found = each!(self, store => store.live_runs().await)?;
        self.with_refused_ends(found).await
    }

    async fn runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Answer<Page<RunRecord, RunId>> {
        let found = each!(self, store => store.runs(filter, after, limit).await)?;
        Ok(Page { items: self.with_refused_ends(found.items).await?, next: found.next })
    }

    async fn schedule(&self, name: &str) -> Answer<Option<ScheduleRecord>> {
        let found = each!(self, store => store.schedule(name).await)?;
        Ok(self.with_refused_plans(found.into_iter().collect()).await?.pop())
    }

    async fn schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Answer<Page<ScheduleRecord, String>> {
        let found = each!(self, store => store.schedules(filter, after, limit).await)?;
        Ok(Page { items: self.with_refused_plans(found.items).await?, next: found.next })
    }

    async fn changed(&self) {
        each!(self, store => store.changed().await);
    }

    fn is_held(&self) -> bool {
        each!(self, store => store.is_held())
    }
}

impl Hooks for AnyStore {
    verbs!(hooks, dispatch);
}

impl Watch for AnyStore {
    verbs!(watch, dispatch);
}

impl Access for AnyStore {
    verbs!(access, dispatch);
}

/// A store of which nothing can be changed: it has the verbs that read.
#[derive(Clone)]
pub struct Reader(Arc<AnyStore>);

/// The verbs that read, as methods.
macro_rules! read {
    ($($(#[$about:meta])* $kind:ident fn $verb:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> $answer:ty
        $(, wakes $when:expr)? $(, else $otherwise:block)?;)*) => {
        $(read!(one $kind $(#[$about])* $verb ($($arg: $type),*) $answer);)*
    };
    (one changes $($rest:tt)*) => {};
    (one reads $(#[$about:meta])* $verb:ident ($($arg:ident: $type:ty),*) $answer:ty) => {
        $(#[$about])*
        pub async fn $verb(&self, $($arg: $type),*) -> Result<$answer, Error> {
            self.0.$verb($($arg),*).await
        }
    };
}

impl Reader {
    /// Of a store.
    pub fn of(store: &Arc<AnyStore>) -> Reader {
        Reader(store.clone())
    }

    verbs!(store, read);
    verbs!(watch, read);
    verbs!(access, read);

    /// Whether nodes on several machines may share it.
    pub fn is_shared(&self) -> bool {
        self.0.is_shared()
    }

    /// How large it is.
    pub async fn stats(&self) -> Result<Stats, Error> {
        self.0.stats().await
    }
}

impl From<AnyStore> for Reader {
    fn from(store: AnyStore) -> Reader {
        Reader(Arc::new(store))
    }
}
