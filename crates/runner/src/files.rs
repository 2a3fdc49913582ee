//! The private directory of an attempt: its payload, what it reads, and where it leaves its result.
//!
//! `<state>/attempts/<node>/<run>.<epoch>/`, mode 0700, files 0600; gone when the attempt has ended. What a killed node left
//! is found under its id.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use belfry_core::model::NodeId;
use belfry_core::text::{ERROR_CHARS, SUMMARY_CHARS, bounded, on_node};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::path::Arg;
use serde_json::Value;
use uuid::Uuid;

use crate::attempt::{Attempt, Usage};
use crate::error::Error;
use crate::mask::Secrets;
use crate::plan::show;
use crate::processes::ChildRecord;
use crate::removal::{self, REMOVAL_MAX};
use crate::spawn::is_shortage;

/// The maximum length of a result file and of a record.
const SMALL_BYTES: u64 = 64 << 10;
/// The largest number in a result file: sums of many stay exact.
const NUMBER_MAX: u64 = 1_000_000_000_000;
/// How often the directory of an attempt is tried to be made.
const CREATE_TRIES: usize = 100;
/// The record of the child, for whoever ends leftovers.
const RECORD: &str = "child.json";

/// The private directory of one attempt. Removed when dropped.
#[derive(Debug)]
pub(crate) struct Files {
    directory: PathBuf,
    /// Removed as far as possible.
    is_removed: bool,
}

/// What a result file held.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Found {
    pub summary: Option<String>,
    pub usage: Option<Usage>,
}

/// Where a node keeps the directories of its attempts.
pub(crate) fn directory_of(state: &Path, node: NodeId) -> PathBuf {
    state.join("attempts").join(node.to_string())
}

impl Files {
    pub(crate) fn create(state: &Path, attempt: &Attempt) -> Result<Files, Error> {
        let parent = directory_of(state, attempt.node);
        let directory = parent.join(format!("{}.{}", attempt.run, attempt.epoch));
        // The node's directory goes with its last attempt, which may be just now.
        for _ in 0..CREATE_TRIES {
            // A program of this user may have put a link in its place, and what is private would be written elsewhere.
            if parent.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
                fs::remove_file(&parent).map_err(|cause| Error::File { path: parent.clone(), cause })?;
            }
            let made = DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&parent)
                .and_then(|()| DirBuilder::new().mode(0o700).create(&directory));
            match made {
                Ok(()) => return Ok(Files { directory, is_removed: false }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // A try of this attempt that could not go on left it behind, because it could not open it to remove it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    clear(&directory, Instant::now() + REMOVAL_MAX)
                        .map_err(|cause| Error::File { path: directory.clone(), cause })?;
                }
                Err(cause) => return Err(Error::File { path: directory, cause }),
            }
        }
        Err(Error::File { path: directory, cause: io::ErrorKind::NotFound.into() })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        let path = self.path(name);
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(bytes));
        match written {
            Ok(()) => Ok(path),
            Err(cause) => Err(Error::File { path, cause }),
        }
    }

    pub(crate) fn write_record(&self, record: &ChildRecord) -> Result<(), Error> {
        let json = serde_json::to_vec(record).unwrap_or_default();
        self.write(RECORD, &json).map(drop)
    }

    /// Reads the result and removes the directory. The summary says so if something is left of it.
    pub(crate) fn collect(mut self, secrets: &Secrets) -> Found {
        let found = self.result(secrets);
        match self.remove() {
            Ok(()) => found,
            Err(problem) => told_of_left(found, &self.directory, &problem),
        }
    }

    fn remove(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.is_removed, true) {
            return Ok(());
        }
        removal::remove(&self.directory, Instant::now() + REMOVAL_MAX)?;
        if let Some(parent) = self.directory.parent() {
            let _ = fs::remove_dir(parent);
        }
        Ok(())
    }

    /// What the program left in `result.json`. Never a failure: what cannot be used is said in the summary. Secrets are masked
    /// before anything is cut off, which would leave a part of one.
    fn result(&self, secrets: &Secrets) -> Found {
        match read_result(&self.path("result.json")) {
            Ok(found) => {
                let bound =
                    |summary: String| bounded(&secrets.mask_text(&summary), SUMMARY_CHARS).into_owned();
                Found { summary: found.summary.map(bound), ..found }
            }
            Err(problem) => {
                Found { summary: Some(format!("the result file was ignored: {problem}")), usage: None }
            }
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// Says at the end of the summary that the directory could not be removed. Without its place, which is not for
/// everybody, the program's own words stay whole.
fn told_of_left(mut found: Found, directory: &Path, problem: &io::Error) -> Found {
    let place = on_node(&show(&directory.to_string_lossy()));
    let left = format!("the directory of this attempt is left behind: {problem}{place}");
    found.summary = Some(match found.summary {
        Some(summary) => {
            let room = SUMMARY_CHARS.saturating_sub(left.chars().count() + 1);
            format!("{}\n{left}", bounded(&summary, room))
        }
        None => left,
    });
    found
}

/// Makes room at the path of an attempt's directory: what cannot be removed there is moved aside.
fn clear(directory: &Path, until: Instant) -> io::Result<()> {
    match removal::remove(directory, until) {
        Err(error) if !is_shortage(&error) => {
            fs::rename(directory, directory.with_file_name(Uuid::new_v4().simple().to_string()))
        }
        done => done,
    }
}

/// The record in an attempt's directory.
pub(crate) fn read_record(directory: impl AsFd) -> Option<ChildRecord> {
    serde_json::from_slice(&read_small(directory, RECORD).ok()??).ok()
}

/// Reads a file that the program could replace: by a link, a FIFO, a directory or something endless. `None` if it is gone.
fn read_small(at: impl AsFd, name: impl Arg) -> Result<Option<Vec<u8>>, String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(at, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(io::Error::from(error).to_string()),
    };
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Err("it is not a file".into());
    }
    let mut bytes = Vec::new();
    file.take(SMALL_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > SMALL_BYTES {
        return Err(format!("it is longer than {} KiB", SMALL_BYTES >> 10));
    }
    Ok(Some(bytes))
}

/// No message names a value: it may be a secret, written in another form than the mask looks for.
fn read_result(path: &Path) -> Result<Found, String> {
    let bytes = read_small(CWD, path)?.unwrap_or_default();
    if bytes.trim_ascii().is_empty() {
        return Ok(Found::default());
    }
    let result: Value = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let result = result.as_object().ok_or("it must be a JSON object")?;
    let given = |key: &str| result.get(key).filter(|value| !value.is_null());
    let whole = |key: &str| match given(key) {
        None => Ok(None),
        Some(value) => match value.as_u64().filter(|number| *number <= NUMBER_MAX) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("{key} must be a whole number up to {NUMBER_MAX}")),
        },
    };
    let cost_usd = match given("cost_usd") {
        None => None,
        Some(value) => match value.as_f64().filter(|cost| (0.0..=NUMBER_MAX as f64).contains(cost)) {
            Some(cost) => Some(cost),
            None => return Err(format!("cost_usd must be a number from 0 to {NUMBER_MAX}")),
        },
    };
    let summary = match given("summary") {
        None => None,
        Some(Value::String(summary)) => Some(summary.clone()),
        Some(_) => return Err("summary must be a text".into()),
    };
    let usage = Usage { tokens: whole("tokens")?, context_window: whole("context_window")?, cost_usd };
    Ok(Found { summary, usage: (usage != Usage::default()).then_some(usage) })
}

/// A message that stays one line, whatever went into it.
pub(crate) fn one_line(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { escaped.extend(c.escape_default()) } else { escaped.push(c) }
    }
    bounded(&escaped, ERROR_CHARS).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_removed_in_time_makes_room() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("attempt");
        fs::create_dir(&directory).unwrap();
        clear(&directory, Instant::now()).unwrap();
        assert!(!directory.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_that_is_left_is_told_of_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file/attempt");
        fs::write(dir.path().join("file"), "").unwrap();
        let files = Files { directory: path.clone(), is_removed: false };
        let summary = files.collect(&Secrets::default()).summary.unwrap();
        assert_eq!(summary.matches(" is left behind: ").count(), 1, "{summary}");
        assert!(summary.ends_with(&format!(" (on this node: {})", path.display())), "{summary}");
    }

    #[test]
    fn the_summary_of_a_program_stays_whole_without_the_directory_that_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let summary = |said: &str| {
            let found = Found { summary: Some(said.into()), usage: None };
            let problem = io::Error::from(io::ErrorKind::PermissionDenied);
            told_of_left(found, dir.path(), &problem).summary.unwrap()
        };
        let short = summary("all (well)");
        assert!(short.contains(dir.path().to_str().unwrap()), "{short}");
        let reduced = belfry_core::text::without_node(&short);
        assert_eq!(reduced, "all (well)\nthe directory of this attempt is left behind: permission denied");
        let long = summary(&"x".repeat(SUMMARY_CHARS));
        assert!(long.chars().count() == SUMMARY_CHARS && long.ends_with(')'), "{long}");
    }
}
