//! Removes a directory that a program could fill as it liked: of any depth, with links, with folders closed to their owner.
//!
//! The folders inside are moved up beside each other and emptied there, so neither the stack nor the number of open files
//! nor the length of a path grows with the depth. No link is followed: all names are looked up in an open folder.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::stat::{FchmodatFlags, fchmodat};
use rustix::fs::{AtFlags, CWD, Dir, DirEntry, FileType, Mode, OFlags, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;
use uuid::Uuid;

use crate::spawn::is_shortage;

/// How long a removal may take, enough for about a hundred thousand entries. What is left then stays.
pub(crate) const REMOVAL_MAX: Duration = Duration::from_secs(20);

/// Opens a folder for reading, and lets its owner remove what is in it. A link in its place is an error, see [`is_no_folder`].
pub(crate) fn open_to_empty(at: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let folder = match open_folder(&at, name) {
        Err(Errno::ACCESS) => {
            allow(&at, name);
            open_folder(&at, name)?
        }
        opened => opened?,
    };
    if rustix::fs::fstat(&folder).is_ok_and(|stat| stat.st_mode & 0o700 != 0o700) {
        let _ = rustix::fs::fchmod(&folder, Mode::RWXU);
    }
    Ok(folder)
}

/// Whether a folder could not be opened because something else, such as a link, stands there.
pub(crate) fn is_no_folder(error: Errno) -> bool {
    // Systems differ in what they say of a link.
    matches!(error, Errno::NOTDIR | Errno::LOOP | Errno::MLINK)
}

/// Opens the folders that stand directly in a folder, one after the other. Passes over everything else, and over folders that
/// cannot be opened at all.
pub(crate) fn folders_in(folder: &OwnedFd) -> io::Result<impl Iterator<Item = io::Result<OwnedFd>>> {
    let open = move |entry: DirEntry| match open_to_empty(folder, name_of(&entry)).map_err(io::Error::from) {
        Err(error) if !is_shortage(&error) => None,
        opened => Some(opened),
    };
    let entries = Dir::read_from(folder)?.filter(|entry| !entry.as_ref().is_ok_and(is_dots));
    Ok(entries.filter_map(move |entry| entry.map_or_else(|error| Some(Err(error.into())), open)))
}

/// Removes a directory with all that is in it, or whatever else stands in its place. Fails with `TimedOut` at `until`, or with
/// the first problem after everything else is removed. What is left can be removed by another call. Blocks.
pub(crate) fn remove(path: &Path, until: Instant) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let gone = |error: Errno| if error == Errno::NOENT { Ok(()) } else { Err(error.into()) };
    let parent = match open_folder(CWD, parent) {
        Ok(parent) => parent,
        Err(error) => return gone(error),
    };
    let root = match open_to_empty(&parent, name) {
        Ok(root) => root,
        Err(error) if is_no_folder(error) => {
            return unlinkat(&parent, name, AtFlags::empty()).or_else(gone);
        }
        Err(error) => return gone(error),
    };
    let mut removal = Removal { root, until, changes: 0, problem: None };
    removal.empty()?;
    match removal.problem {
        Some(problem) => Err(problem.into()),
        None => unlinkat(&parent, name, AtFlags::REMOVEDIR).or_else(gone),
    }
}

struct Removal {
    root: OwnedFd,
    until: Instant,
    /// How many entries were removed or moved.
    changes: u64,
    /// The first problem of the last pass.
    problem: Option<Errno>,
}

impl Removal {
    /// Empties the root, in passes: each empties the folders that stand directly in it.
    fn empty(&mut self) -> io::Result<()> {
        loop {
            let before = self.changes;
            self.problem = None;
            let mut entries = Dir::read_from(&self.root)?;
            while let Some(entry) = self.next(&mut entries)? {
                let name = name_of(&entry);
                let done = match is_folder(&self.root, &entry) {
                    true => self.remove_folder(name)?,
                    false => unlinkat(&self.root, name, AtFlags::empty()),
                };
                self.note(done);
            }
            if self.changes == before {
                return Ok(());
            }
        }
    }

    /// Removes a folder that stands in the root. The folders inside come to stand in the root.
    fn remove_folder(&mut self, name: &OsStr) -> io::Result<rustix::io::Result<()>> {
        let folder = match open_to_empty(&self.root, name) {
            Ok(folder) => folder,
            Err(error) => return Ok(Err(error)),
        };
        let mut entries = Dir::read_from(&folder)?;
        while let Some(entry) = self.next(&mut entries)? {
            let done = match is_folder(&folder, &entry) {
                true => self.move_up(&folder, name_of(&entry)),
                false => unlinkat(&folder, name_of(&entry), AtFlags::empty()),
            };
            self.note(done);
        }
        Ok(unlinkat(&self.root, name, AtFlags::REMOVEDIR))
    }

    fn move_up(&self, folder: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
        let fresh = Uuid::new_v4().simple().to_string();
        match renameat(folder, name, &self.root, &fresh) {
            // A folder must be writable itself to be moved.
            Err(Errno::ACCESS) => {
                allow(folder, name);
                renameat(folder, name, &self.root, &fresh)
            }
            done => done,
        }
    }

    /// The next entry, unless the time is over.
    fn next(&self, entries: &mut Dir) -> io::Result<Option<DirEntry>> {
        loop {
            if Instant::now() >= self.until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match entries.read().transpose()? {
                Some(entry) if is_dots(&entry) => {}
                other => return Ok(other),
            }
        }
    }

    fn note(&mut self, done: rustix::io::Result<()>) {
        match done {
            Ok(()) => self.changes += 1,
            Err(error) => self.problem = self.problem.or(Some(error)),
        }
    }
}

fn open_folder(at: impl AsFd, name: impl Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

/// Gives the owner of an entry all rights; if it cannot, the next step says why.
fn allow(at: impl AsFd, name: &OsStr) {
    let all = nix::sys::stat::Mode::S_IRWXU;
    let _ = fchmodat(at, name, all, FchmodatFlags::NoFollowSymlink);
}

fn is_dots(entry: &DirEntry) -> bool {
    matches!(entry.file_name().to_bytes(), b"." | b"..")
}

fn name_of(entry: &DirEntry) -> &OsStr {
    OsStr::from_bytes(entry.file_name().to_bytes())
}

fn is_folder(at: &OwnedFd, entry: &DirEntry) -> bool {
    match entry.file_type() {
        FileType::Unknown => statat(at, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
        known => known == FileType::Directory,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + REMOVAL_MAX
    }

    #[test]
    fn the_stack_does_not_grow_with_the_depth() {
        let dir = tempfile::tempdir().unwrap();
        let (path, next) = (dir.path().join("path"), dir.path().join("next"));
        fs::create_dir(&path).unwrap();
        // Five thousand levels, put together from chains that a path can still name.
        let chain = next.join("d/".repeat(1000));
        for _ in 0..5 {
            fs::create_dir_all(&chain).unwrap();
            fs::rename(&path, chain.join("all")).unwrap();
            fs::rename(&next, &path).unwrap();
        }
        let small = std::thread::Builder::new().stack_size(128 << 10);
        let removed = path.clone();
        small.spawn(move || remove(&removed, soon())).unwrap().join().unwrap().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_is_not_a_directory_is_removed_itself() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, path) = (dir.path().join("kept"), dir.path().join("path"));
        fs::write(&kept, "").unwrap();
        symlink(dir.path(), &path).unwrap();
        remove(&path, soon()).unwrap();
        assert!(path.symlink_metadata().is_err() && kept.exists());
        fs::write(&path, "").unwrap();
        remove(&path, soon()).unwrap();
        assert!(!path.exists());
        remove(&path, soon()).unwrap();
        remove(&path.join("below"), soon()).unwrap();
        // Nor is a link on the way followed.
        symlink(dir.path(), &path).unwrap();
        assert!(remove(&path.join("kept"), soon()).is_err());
        assert!(kept.exists());
    }

    #[test]
    fn a_removal_ends_in_time_and_another_one_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("path");
        fs::create_dir_all(path.join("a/b/c")).unwrap();
        assert_eq!(remove(&path, Instant::now()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(path.exists());
        remove(&path, soon()).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn folders_that_are_closed_to_their_owner_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("path");
        fs::create_dir_all(path.join("a/b/c/d")).unwrap();
        let all = ["a/b/c/d", "a/b/c", "a/b", "a", "."].map(|name| path.join(name));
        let is_root = nix::unistd::geteuid().is_root();
        for (folder, mode) in all.iter().zip([0o500, 0, 0o500, 0, 0o500]) {
            // Root may do everything: another user removes them, on a thread of its own.
            if is_root {
                chown(folder, Some(65_534), None).unwrap();
            }
            fs::set_permissions(folder, PermissionsExt::from_mode(mode)).unwrap();
        }
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let removed = std::thread::scope(|scope| {
            let remove = || {
                if is_root {
                    nix::unistd::setfsuid(65_534.into());
                }
                remove(&path, soon())
            };
            scope.spawn(remove).join().unwrap()
        });
        removed.unwrap();
        assert!(!path.exists());
    }
}
