//! The traits of a store. Their verbs are listed in `verbs.rs`.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;

use belfry_core::breaker::Admits;
use belfry_core::edit::Resume;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, ScheduleDefinition, ScheduleId,
    SkipRange,
};
use belfry_time::Timestamp;

use crate::access::*;
use crate::error::Error;
use crate::hook::*;
use crate::sessions::*;
use crate::shapes::*;
use crate::views::*;
use crate::watch::*;

/// What a verb gives back.
pub(crate) type Answer<T> = Result<T, Error>;

/// Declares verbs as methods of a trait.
macro_rules! declare {
    ($($(#[$about:meta])* $kind:ident fn $verb:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> $answer:ty
        $(, wakes $when:expr)? $(, else $otherwise:block)?;)*) => {
        $(declare!(one $(#[$about])* $verb, $this, ($($arg: $type),*), $answer $(, $otherwise)?);)*
    };
    (one $(#[$about:meta])* $verb:ident, $this:ident, ($($arg:ident: $type:ty),*), $answer:ty) => {
        $(#[$about])*
        fn $verb(&$this, $($arg: $type),*) -> impl Future<Output = Answer<$answer>> + Send;
    };
    (one $(#[$about:meta])* $verb:ident, $this:ident, ($($arg:ident: $type:ty),*), $answer:ty, $otherwise:block) => {
        $(#[$about])*
        fn $verb(&$this, $($arg: $type),*) -> impl Future<Output = Answer<$answer>> + Send {
            $(let _ = &$arg;)*
            async move { $otherwise }
        }
    };
}

/// A store. Every verb is one transaction: after an error nothing has changed, unless the error is ambiguous; after an
/// answer the change survives a crash of this process and of the database.
///
/// `now` is the caller's reading of the store's clock; it never comes from elsewhere.
pub trait Store: Send + Sync + 'static {
    verbs!(store, declare);

    /// Waits until there may be work that was not there at the last call: timers, waiting runs, cancel marks. Only a hint: it
    /// may come without reason, and may be lost when a process dies; the caller looks from time to time anyway. For one
    /// task of a process: two tasks that wait take hints from each other.
    fn changed(&self) -> impl Future<Output = ()> + Send;

    /// Whether no other process can take over what runs here, for as long as this one lives: it alone serves the store, by a
    /// lock of the file, and the file is the one that was opened.
    fn is_held(&self) -> bool {
        false
    }
}

/// Requests from outside that make runs.
pub trait Hooks: Send + Sync + 'static {
    verbs!(hooks, declare);
}

/// Heartbeats and snapshots. Every verb is one transaction, as those of [`Store`] are.
pub trait Watch: Send + Sync + 'static {
    verbs!(watch, declare);
}

/// API tokens and the audit. Every verb is one transaction, as those of [`Store`] are.
pub trait Access: Send + Sync + 'static {
    verbs!(access, declare);
}

/// When the answer of a verb gives a hint, as `verbs.rs` says.
pub(crate) mod wakes {
    use super::*;

    macro_rules! wakes {
        ($($(#[$about:meta])* $kind:ident fn $verb:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> $answer:ty
            $(, wakes $when:expr)? $(, else $otherwise:block)?;)*) => {
            $($(pub(crate) fn $verb(answer: &$answer) -> bool {
                let when: fn(&$answer) -> bool = $when;
                when(answer)
            })?)*
        };
    }

    verbs!(store, wakes);
    verbs!(hooks, wakes);
}
