//! Why a store could not do what it was asked.

use std::fmt;

use belfry_core::text::on_node;

/// The process that holds a file, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Its number; none where it is in another pid namespace or the system does not say.
    pub pid: Option<u32>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("another process (`lslocks` shows it)"),
        }
    }
}

/// Why a store could not do what it was asked. Nothing was changed, unless [`Error::is_ambiguous`].
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file or database belongs to something else.
    #[error("{place} is not a Belfry store: {detail}. It was left untouched")]
    Foreign {
        /// Where.
        place: String,
        /// What was found.
        detail: String,
    },
    /// The file is damaged.
    #[error("{place} is damaged: {detail}. It was left untouched; restore it from a backup")]
    Corrupt {
        /// Where.
        place: String,
        /// What is wrong.
        detail: String,
    },
    /// A newer Belfry made it.
    #[error(
        "{place} has schema version {found}, and this Belfry knows versions up to {known}. Use a newer Belfry"
    )]
    Newer {
        /// Where.
        place: String,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// The address is of no kind of store.
    #[error(
        "a store's address is sqlite:PATH or postgres://USER@HOST/DATABASE, got one that begins with {beginning:?}"
    )]
    Address {
        /// How it begins; the rest may hold a password.
        beginning: String,
    },
    /// Another server holds it.
    #[error("{place} is in use by {holder}")]
    InUse {
        /// Where.
        place: String,
        /// Who holds it.
        holder: Holder,
    },
    /// Another server holds the file itself, and not its lock file.
    #[error(
        "{place} is in use by {holder}, which serves the same file under another path (a bind mount, a container), or \
         had its lock file removed. Stop it and start again, or give this server a store of its own"
    )]
    Held {
        /// Where.
        place: String,
        /// Who holds it.
        holder: Holder,
    },
    /// Another user owns it.
    #[error(
        "{place} is not safe to use: it belongs to user {owner}, and this is user {ours}. Run as its owner, or move it \
         away"
    )]
    OtherUser {
        /// Where.
        place: String,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        ours: u32,
    },
    /// Another user could replace it.
    #[error("{place} is not safe to use: {detail}. {way_out}")]
    Unsafe {
        /// Where.
        place: String,
        /// Why.
        detail: String,
        /// What helps.
        way_out: String,
    },
    /// The file was removed or replaced while it was open.
    #[error(
        "{place} was removed or replaced while it was in use. Nothing is stored any more: put the file back, or stop this \
         process and start it again"
    )]
    Replaced {
        /// Where.
        place: String,
    },
    /// There is no room left to write.
    #[error("no space left for {place}. Nothing was lost; it goes on when there is room")]
    Full {
        /// Where.
        place: String,
    },
    /// The store does not answer.
    #[error("the store is unavailable: {detail}")]
    Unavailable {
        /// What happened.
        detail: String,
        /// Whether the change may have been made all the same.
        ambiguous: bool,
    },
    /// Another transaction, of a person for example, holds a row of the store for long.
    #[error(
        "another transaction holds a row of the store that is to be written: {detail}. It is tried again; end that \
         transaction if it hangs"
    )]
    Locked {
        /// What the database says.
        detail: String,
    },
    /// The store cannot keep something for what it is: it breaks a constraint, is too large or out of range. The same call
    /// fails again, however well the store is.
    #[error("the store refused what it was to keep: {detail}")]
    Refused {
        /// What, and why.
        detail: String,
    },
    /// Something that is stored cannot be understood.
    #[error("the store holds something unexpected: {detail}")]
    Unexpected {
        /// What.
        detail: String,
    },
}

impl Error {
    /// The stable name of the kind, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Refused { .. } => "refused",
            error if error.is_retryable() => "store_unavailable",
            _ => "internal",
        }
    }

    /// The error in words for many readers: what it tells of the place and of the database stands in the part that
    /// [`on_node`] marks and that is left out for most of them.
    pub fn marked(&self) -> String {
        let (words, detail) = match self {
            Error::Replaced { .. } => {
                ("the store was removed or replaced while it was in use", self.to_string())
            }
            Error::Full { .. } => ("no space left for the store", self.to_string()),
            Error::Unavailable { detail, .. } => ("the store is unavailable", detail.clone()),
            Error::Locked { .. } => ("another transaction holds a row of the store", self.to_string()),
            Error::Refused { detail } => ("the store refused what it was to keep", detail.clone()),
            Error::Unexpected { detail } => ("the store holds something unexpected", detail.clone()),
            Error::Foreign { .. }
            | Error::Corrupt { .. }
            | Error::Newer { .. }
            | Error::Address { .. }
            | Error::InUse { .. }
            | Error::Held { .. }
            | Error::OtherUser { .. }
            | Error::Unsafe { .. } => ("the store cannot be used", self.to_string()),
        };
        format!("{words}{}", on_node(&detail))
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Error::Full { .. } | Error::Unavailable { .. } | Error::Replaced { .. } | Error::Locked { .. }
        )
    }

    /// Whether the store that was opened is no longer the one at its place: another server may be at work there, so nothing
    /// may go on running here.
    pub fn is_replaced(&self) -> bool {
        matches!(self, Error::Replaced { .. })
    }

    /// Whether the content of the call was refused: without that content it may succeed.
    pub fn is_refused(&self) -> bool {
        matches!(self, Error::Refused { .. })
    }

    /// Whether the store is there, and what was to be kept or what it holds is at fault: then other calls may succeed.
    pub fn is_of_content(&self) -> bool {
        matches!(self, Error::Refused { .. } | Error::Unexpected { .. })
    }

    /// Whether somebody else holds a row for long that was to be written: calls that touch other rows may succeed.
    pub fn is_locked(&self) -> bool {
        matches!(self, Error::Locked { .. })
    }

    /// Whether one part of a batch is at fault: then the other parts may be written.
    pub fn is_of_part(&self) -> bool {
        self.is_of_content() || self.is_locked()
    }

    /// Whether the change may have been made although the call failed.
    pub fn is_ambiguous(&self) -> bool {
        matches!(self, Error::Unavailable { ambiguous: true, .. })
    }

    pub(crate) fn unexpected(detail: impl Into<String>) -> Error {
        Error::Unexpected { detail: detail.into() }
    }
}

#[cfg(test)]
mod tests {
    use belfry_core::text::without_node;

    use super::*;

    #[test]
    fn place_and_detail_can_be_left_out() {
        let (place, detail) = (|| "/srv/SECRET (1)".to_owned(), || "SECRET (2): relation".to_owned());
        for (error, words) in [
            (Error::Replaced { place: place() }, "the store was removed or replaced while it was in use"),
            (Error::Full { place: place() }, "no space left for the store"),
            (Error::Unavailable { detail: detail(), ambiguous: true }, "the store is unavailable"),
            (Error::Locked { detail: detail() }, "another transaction holds a row of the store"),
            (Error::Refused { detail: detail() }, "the store refused what it was to keep"),
            (Error::Unexpected { detail: detail() }, "the store holds something unexpected"),
            (Error::Corrupt { place: place(), detail: detail() }, "the store cannot be used"),
        ] {
            let marked = error.marked();
            assert!(marked.contains("SECRET"), "{marked}");
            assert_eq!(without_node(&marked), words);
        }
    }
}
