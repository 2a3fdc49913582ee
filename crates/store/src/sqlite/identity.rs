//! Which file is served: found by one name however it is written, locked for one server, and watched while it is used.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Holder};
use crate::private;

/// How long a second server waits for the first to be gone.
const TAKE_OVER: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// No number of a process is longer.
const PID_BYTES_MAX: u64 = 20;
/// The system's list of locks is read so often before a lock counts as not listed: entries move while it is read.
const LIST_READS_MAX: usize = 3;

/// A file's own path: links are followed, whether the file exists or not. A file with a second name is refused: SQLite would
/// keep a log beside each name, and neither would be whole. A link that another user owns is refused, too.
pub(super) fn own_path(path: &Path) -> Result<PathBuf, Error> {
    let unsafe_file = |detail: &str, way_out: &str| Error::Unsafe {
        place: path.display().to_string(),
        detail: detail.into(),
        way_out: way_out.into(),
    };
    private::refuse_links_of_others(path)?;
    match path.canonicalize() {
        Ok(own) => {
            let links = own.metadata().map_or(1, |data| if data.is_file() { data.nlink() } else { 1 });
            if links > 1 {
                let detail =
                    format!("the file has {links} names (hard links), and may be in use under another");
                return Err(unsafe_file(&detail, "keep one name; `find -samefile` shows the others"));
            }
            Ok(own)
        }
        Err(_) if path.is_symlink() => {
            Err(unsafe_file("it is a symbolic link that leads to no file", "remove it, or name its target"))
        }
        Err(_) => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = parent.unwrap_or(Path::new(".")).canonicalize();
            match (parent, path.file_name()) {
                (Ok(parent), Some(name)) => Ok(parent.join(name)),
                _ => Ok(path.to_owned()),
            }
        }
    }
}

/// A file beside the store's, named after it.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The kind of a file system on which locks of other machines may not be seen, by its name.
#[cfg(target_os = "linux")]
pub(super) fn network_file_system(path: &Path) -> Option<&'static str> {
    // Numbers of `statfs(2)`; its type differs between machines.
    let number = rustix::fs::statfs(path).ok()?.f_type as u32;
    match number {
        0x6969 => Some("NFS"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x6573_5546 => Some("FUSE"),
        0x0102_1997 => Some("9p"),
        0x00c3_6400 => Some("Ceph"),
        _ => None,
    }
}

/// Known on Linux only.
#[cfg(not(target_os = "linux"))]
pub(super) fn network_file_system(_: &Path) -> Option<&'static str> {
    None
}

/// A file as it was opened: its path must go on leading to it.
#[derive(Debug)]
struct Watched {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Watched {
    fn of(path: &Path) -> Result<Watched, Error> {
        let data = path.metadata().map_err(|error| Error::Unavailable {
            detail: format!("{}: {error}", path.display()),
            ambiguous: false,
        })?;
        Ok(Watched { path: path.to_owned(), device: data.dev(), inode: data.ino() })
    }

    fn is_there(&self) -> bool {
        self.path.metadata().is_ok_and(|data| data.dev() == self.device && data.ino() == self.inode)
    }
}

/// The files of an open store. While one of them was removed or replaced, the store takes and gives nothing: what it wrote
/// would be lost, and another server may have the path.
#[derive(Debug)]
pub(super) struct Identity(Vec<Watched>);

impl Identity {
    /// The store's file, its log and the log's index, and the lock's file where this process serves the store. SQLite
    /// keeps the log and its index while a connection is open, so there must be one, and it must have read or written
    /// already.
    pub(super) fn of(path: &Path, lock: Option<&ServerLock>) -> Result<Identity, Error> {
        // A file system without shared memory has neither.
        let logs = ["-wal", "-shm"].map(|suffix| beside(path, suffix)).into_iter().filter(|log| log.exists());
        let lock = lock.map(|lock| lock.path.clone());
        let files = std::iter::once(path.to_owned()).chain(logs).chain(lock);
        Ok(Identity(files.map(|file| Watched::of(&file)).collect::<Result<_, _>>()?))
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match self.0.iter().find(|file| !file.is_there()) {
            None => Ok(()),
            Some(file) => Err(Error::Replaced { place: file.path.display().to_string() }),
        }
    }
}

/// The server's lock on a file, held for its life: on a file beside it, which names the process, and where it can be
/// had on the file itself, which another path leads to through a bind mount.
#[derive(Debug)]
pub(super) struct ServerLock {
    path: PathBuf,
    /// Dropping it lets go of the lock.
    _file: File,
    /// The same for the store's file. SQLite's own locks are lost when any descriptor of the file is closed, so this
    /// one is opened before SQLite's connections and closed after them.
    store: Option<File>,
}

impl ServerLock {
    /// The process that holds the lock.
    pub(super) fn holder(path: &Path) -> Option<Holder> {
        let mut file = File::open(beside(&own_path(path).ok()?, ".lock")).ok()?;
        match file.try_lock_shared() {
            // Nobody has it, nor have we once the file is closed.
            Ok(()) | Err(TryLockError::Error(_)) => None,
            Err(TryLockError::WouldBlock) => Some(named(&mut file)),
        }
    }

    /// Takes the lock of a file by its own path; refused while another process has it.
    pub(super) fn take(path: &Path) -> Result<ServerLock, Error> {
        let lock_path = beside(path, ".lock");
        let unavailable = |error: std::io::Error| Error::Unavailable {
            detail: format!("{}: {error}", lock_path.display()),
            ambiguous: false,
        };
        let mut file = private::open(&lock_path)?;
        if !lock(&file).map_err(unavailable)? {
            return Err(Error::InUse { place: path.display().to_string(), holder: named(&mut file) });
        }
        let write = |file: &mut File| -> std::io::Result<()> {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            write!(file, "{}", std::process::id())
        };
        write(&mut file).map_err(unavailable)?;
        Ok(ServerLock { path: lock_path, _file: file, store: None })
    }

    /// Takes the lock of the store's file itself, which must be there and not be open in this process; refused while
    /// a server has it under another path. Only where this lock is known to be none of those that SQLite uses.
    pub(super) fn take_store(&mut self, path: &Path) -> Result<(), Error> {
        if cfg!(not(target_os = "linux")) || network_file_system(path).is_some() {
            return Ok(());
        }
        self.store = Some(lock_store(path)?);
        Ok(())
    }
}

fn lock_store(path: &Path) -> Result<File, Error> {
    let unavailable = |error: std::io::Error| Error::Unavailable {
        detail: format!("{}: {error}", path.display()),
        ambiguous: false,
    };
    let file = File::options().read(true).write(true).open(path).map_err(unavailable)?;
    match lock(&file).map_err(unavailable)? {
        true => Ok(file),
        false => {
            Err(Error::Held { place: path.display().to_string(), holder: Holder { pid: holder_of(&file) } })
        }
    }
}

/// The process that has locked a lock file: as it wrote there, or as the system tells where that is no process.
fn named(file: &mut File) -> Holder {
    let mut text = Vec::new();
    let read = Read::by_ref(file).take(PID_BYTES_MAX).read_to_end(&mut text);
    let pid = read.ok().and_then(|_| String::from_utf8(text).ok()?.trim().parse().ok());
    Holder { pid: pid.filter(|pid| *pid > 0).or_else(|| holder_of(file)) }
}

/// The process that has locked a file, as the system tells: `1: FLOCK  ADVISORY  WRITE 4711 08:02:131090 0 EOF`. None
/// where it is in another pid namespace, or the system does not say.
fn holder_of(file: &File) -> Option<u32> {
    let data = file.metadata().ok()?;
    let (major, minor) = (rustix::fs::major(data.dev()), rustix::fs::minor(data.dev()));
    let place = format!("{major:02x}:{minor:02x}:{}", data.ino());
    (0..LIST_READS_MAX).find_map(|_| {
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        locks.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [_, "FLOCK", _, _, pid, at, ..] if *at == place => pid.parse().ok().filter(|pid| *pid > 0),
                _ => None,
            }
        })
    })
}

/// Locks a file, unless another has locked it. A killed server lets go of a file a moment later, and a command that
/// asks for the holder does so at once.
fn lock(file: &File) -> std::io::Result<bool> {
    let give_up = Instant::now() + TAKE_OVER;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if Instant::now() < give_up => std::thread::sleep(LOOK_AGAIN),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_with_no_process_in_it_names_none_that_does_not_exist() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one.db");
        let _held = ServerLock::take(&path).unwrap();
        let ours = Holder { pid: Some(std::process::id()) };
        assert_eq!(ServerLock::holder(&path), Some(ours));
        for text in [&b""[..], b"0", b"-1", b"x", b"\xff\xfe", &[b'1'; 1 << 20]] {
            std::fs::write(folder.path().join("one.db.lock"), text).unwrap();
            let error = ServerLock::take(&path).unwrap_err();
            let Error::InUse { holder, .. } = error else { panic!("{error}") };
            // Some file systems tell the system another device than its locks have, and the system's list may miss a lock while
            // others come and go.
            for holder in [holder, ServerLock::holder(&path).unwrap()] {
                assert!(holder == ours || holder.pid.is_none(), "{holder}");
            }
        }
        assert_eq!(Holder { pid: None }.to_string(), "another process (`lslocks` shows it)");
    }

    #[test]
    fn one_file_under_two_names_is_locked_once() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one.db", "other.db"].map(|name| folder.path().join(name));
        std::fs::write(&one, "x").unwrap();
        std::fs::hard_link(&one, &other).unwrap();
        let held = lock_store(&one).unwrap();
        let error = lock_store(&other).unwrap_err();
        assert!(error.to_string().contains("under another path"), "{error}");
        // Some file systems tell the system another device than its locks have.
        assert!(holder_of(&held).is_none_or(|pid| pid == std::process::id()), "{error}");
        drop(held);
        lock_store(&other).unwrap();
    }
}
