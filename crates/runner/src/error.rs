//! The one error of this crate.

use std::io;
use std::path::{Path, PathBuf};

use belfry_core::Reason;
use belfry_core::text::on_node;

use crate::plan::show;

/// What is said of a start that takes long.
pub(crate) const HANGS: &str =
    "its start takes long: a file system of its program or its directory may not answer";

/// Why an attempt could not be started, or something around it failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The action cannot be started as a process.
    #[error("{0}")]
    Action(String),
    /// A template cannot be parsed, or its values are missing or too large.
    #[error("the template `{name}`: {message}")]
    Template {
        /// Its place in the definition: `run[2]`, `shell`, `prompt`, `env.DIR`.
        name: String,
        /// What is wrong with it.
        message: String,
    },
    /// An entry of `env` or `env_pass` cannot be used.
    #[error("{0}")]
    Environment(String),
    /// The program could not be executed.
    #[error("cannot start {program}: {message}")]
    Spawn {
        /// As configured.
        program: String,
        /// Why.
        message: String,
        /// Whether it could work another time.
        retryable: bool,
    },
    /// The system has no descriptor, process, memory or room on the disk left for now, or the process ended before it had
    /// a session of its own. Nothing was started.
    #[error("cannot start {program} for now")]
    Shortage {
        /// As configured.
        program: String,
        /// Of what.
        source: io::Error,
    },
    /// The start took too long, and was given up. Nothing was executed.
    #[error("{HANGS}, and it was given up")]
    Hangs,
    /// A file of the attempt could not be written.
    #[error("cannot write {}: {cause}{}", name(path), on_node(&show(&path.to_string_lossy())))]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The keeper does not answer, so nothing may be started.
    #[error("the keeper {0}")]
    Keeper(String),
    /// The keeper does not take a child, because too little of the lease is left to end it in time. Nothing was executed.
    #[error("the keeper does not take new children: the lease is about to end")]
    Refused,
}

impl Error {
    /// Whether another attempt could help.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Action(_) | Error::Template { .. } | Error::Environment(_) => false,
            Error::Spawn { retryable, .. } => *retryable,
            Error::Shortage { .. }
            | Error::Hangs
            | Error::File { .. }
            | Error::Keeper(_)
            | Error::Refused => true,
        }
    }

    /// Whether the system has too little of something for now, and nothing was started.
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            Error::Shortage { .. } => true,
            Error::File { cause, .. } => crate::spawn::is_shortage(cause),
            _ => false,
        }
    }

    /// The reason for which the attempt failed.
    pub fn reason(&self) -> Reason {
        match self {
            Error::Template { .. } => Reason::Template,
            _ => Reason::SpawnFailed,
        }
    }

    /// The message with its causes.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        text
    }
}

/// A file's name without its directory, which is not for everybody.
fn name(path: &Path) -> String {
    show(&path.file_name().unwrap_or_default().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_disk_that_takes_nothing_for_now_is_a_shortage() {
        let cannot = |errno: Errno| Error::File { path: "payload.json".into(), cause: errno.into() };
        for errno in [Errno::ENOSPC, Errno::EDQUOT, Errno::EROFS, Errno::EMFILE] {
            assert!(cannot(errno).is_shortage(), "{errno}");
        }
        for errno in [Errno::EACCES, Errno::ENOTDIR, Errno::EIO] {
            assert!(!cannot(errno).is_shortage(), "{errno}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_shows_its_directory_to_few() {
        let path = "/srv/secret/payload.json".into();
        let said = Error::File { path, cause: Errno::EACCES.into() }.chain();
        assert!(said.ends_with(" (on this node: /srv/secret/payload.json)"), "{said}");
        let reduced = belfry_core::text::without_node(&said);
        assert_eq!(reduced, "cannot write payload.json: Permission denied (os error 13)");
    }
}
