//! Whether a node applies its files: by what they say, what the store holds and what this node loaded last.

use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What a node does with files that it has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The store holds the same.
    Same,
    /// They are applied.
    Apply,
    /// They differ from what the other nodes run from, and have not changed here: they are left alone.
    Skew,
}

/// What is known when files were read; all by digest.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// What the files say.
    pub own: &'a str,
    /// What the store holds, if files were ever applied.
    pub stored: Option<&'a str>,
    /// What this node loaded last, if it ever did.
    pub last: Option<&'a str>,
    /// Whether another node lives.
    pub has_others: bool,
}

impl Content {
    /// Decides. While other nodes live, a node applies its files only if they changed since it loaded them last.
    pub fn of(known: Known<'_>) -> Content {
        let has_changed = known.last.is_some_and(|last| last != known.own);
        match known.stored {
            Some(stored) if stored == known.own => Content::Same,
            Some(_) if known.has_others && !has_changed => Content::Skew,
            _ => Content::Apply,
        }
    }
}

/// The file in a node's state folder with the digest of what the node loaded last.
#[derive(Debug, Clone)]
pub struct LastLoaded {
    path: PathBuf,
}

impl LastLoaded {
    /// That of a configuration file. Nodes with different files may share a folder.
    pub fn of(state_dir: &Path, config: &Path) -> LastLoaded {
        let name = config.file_name().unwrap_or_default().to_string_lossy();
        LastLoaded { path: state_dir.join(format!("loaded-{name}")) }
    }

    /// The digest, unless there is none that can be read.
    pub fn read(&self) -> Option<String> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        Some(text.trim().to_owned()).filter(|digest| !digest.is_empty())
    }

    /// Replaces the digest. After a crash either the old or the new one is there.
    pub fn write(&self, digest: &str) -> std::io::Result<()> {
        if self.read().as_deref() == Some(digest) {
            return Ok(());
        }
        if let Some(folder) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let mut fresh = self.path.clone().into_os_string();
        fresh.push(format!(".{}", std::process::id()));
        let written = write_new(Path::new(&fresh), digest).and_then(|()| std::fs::rename(&fresh, &self.path));
        if written.is_err() {
            let _ = std::fs::remove_file(&fresh);
        }
        written
    }
}

fn write_new(path: &Path, digest: &str) -> std::io::Result<()> {
    let _ = std::fs::remove_file(path);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{digest}")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_node_applies_what_changed_here_and_nothing_else_while_others_live() {
        for (own, stored, last, has_others, expected) in [
            // The first files of a store.
            ("v1", None, None, false, Content::Apply),
            ("v1", None, None, true, Content::Apply),
            ("v1", Some("v1"), None, true, Content::Same),
            ("v1", Some("v1"), Some("v0"), true, Content::Same),
            // Nobody else runs from the store.
            ("v1", Some("v2"), Some("v1"), false, Content::Apply),
            ("v1", Some("v2"), None, false, Content::Apply),
            // A file that was only touched, and a node that never loaded it.
            ("v1", Some("v2"), Some("v1"), true, Content::Skew),
            ("v1", Some("v2"), None, true, Content::Skew),
            // An edit, also while the node was down.
            ("v3", Some("v2"), Some("v1"), true, Content::Apply),
        ] {
            let known = Known { own, stored, last, has_others };
            assert_eq!(Content::of(known), expected, "{known:?}");
        }
    }

    #[test]
    fn what_was_loaded_last_is_kept_for_each_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join(".belfry/run");
        let one = LastLoaded::of(&state, Path::new("/etc/one.yaml"));
        let two = LastLoaded::of(&state, Path::new("two.yaml"));
        assert_eq!(one.read(), None);
        one.write("a").unwrap();
        two.write("b").unwrap();
        one.write("c").unwrap();
        assert_eq!((one.read().as_deref(), two.read().as_deref()), (Some("c"), Some("b")));
        let names = std::fs::read_dir(&state).unwrap().count();
        assert_eq!(names, 2, "no other file is left");
    }
}
