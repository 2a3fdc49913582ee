//! What Belfry keeps, behind one trait of domain verbs.
//!
//! Three rooms with the same files inside: `memory` is the specification, `sqlite` the default, `postgres` for many
//! machines. Nothing is decided here that `belfry-core` can decide: a verb commits what it is given, all or nothing, if
//! what it was decided on still holds. Start reading at [`Store`]; the shapes that go in and out are in `shapes.rs`
//! and `views.rs`.

#[macro_use]
mod verbs;

mod access;
mod any;
mod apart;
mod cached;
mod clock;
mod error;
mod hint;
mod hook;
pub mod memory;
pub mod pauses;
pub mod postgres;
mod private;
pub mod sabotage;
mod sessions;
mod shapes;
pub mod sqlite;
mod stats;
mod storable;
mod store;
mod unknown;
mod unread;
mod views;
mod watch;

pub use access::{AddedToken, AuditEntry, AuditRow, Scope, TOKENS_MAX, TokenRecord};
pub use any::{AnyStore, Reader};
pub use apart::{Written, commit_apart, finish_apart};
pub use error::{Error, Holder};
pub use hook::{Knock, Knocked};
pub use private::{STATE_FOLDER, secure, secure_folder};
pub use sessions::*;
pub use shapes::*;
pub use stats::Stats;
pub use store::{Access, Hooks, Store, Watch};
pub use unread::UNREADABLE_ROWS_MAX;
pub use views::*;
pub use watch::{Snapshot, SnapshotFilter, SnapshotRow};
