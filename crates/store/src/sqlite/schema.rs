//! Opening a file: is it ours, is it whole, is it of a version we know? Then its migrations.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::error::Error;

/// In the order in which they are applied; the number is the version of the schema.
const MIGRATIONS: [&str; 2] =
    [include_str!("migrations/0001_initial.sql"), include_str!("migrations/0002_tokens.sql")];
/// The version this code knows.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// "BELF", in the header of our files.
const APPLICATION_ID: i64 = 0x4245_4c46;
/// Files up to this size are checked as a whole before they are used.
const CHECKED_BYTES_MAX: u64 = 64 << 20;

/// How long a second server waits for the first to be gone.
const TAKE_OVER: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Opens a file for writing, making it where there is none. What is foreign, damaged or newer is refused untouched.
pub(super) fn open(path: &Path) -> Result<Connection, Error> {
    if path.exists() {
        inspect(path)?;
    } else {
        create_private(path)?;
    }
    let mut connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    migrate(&mut connection).map_err(|error| failure(path, &error))?;
    Ok(connection)
}

/// One more connection to a file that is open already.
pub(super) fn connect(path: &Path, flags: OpenFlags) -> Result<Connection, Error> {
    let connect = || -> rusqlite::Result<Connection> {
        let connection = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        connection.busy_timeout(std::time::Duration::from_secs(5))?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "full")?;
        // Small, because each commit that has rebalanced a tree walks all of it; the system caches the file as well.
        connection.pragma_update(None, "cache_size", -8_192)?;
        connection.pragma_update(None, "temp_store", "memory")?;
        // A page that changes often is copied back once per 40 MB of log rather than once per 4.
        connection.pragma_update(None, "wal_autocheckpoint", 10_000)?;
        // A plan does not depend on the values: else many a statement is compiled anew for each.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        connection.set_prepared_statement_cache_capacity(128);
        Ok(connection)
    };
    connect().map_err(|error| failure(path, &error))
}

/// The server's lock on a file, held for its life.
#[derive(Debug)]
pub(super) struct ServerLock(#[expect(dead_code, reason = "dropping it lets go of the lock")] File);

impl ServerLock {
    /// The process that holds the lock.
    pub(super) fn holder(path: &Path) -> Option<u32> {
        let mut file = File::open(lock_path(path)).ok()?;
        match file.try_lock_shared() {
            // Nobody has it, nor have we once the file is closed.
            Ok(()) | Err(TryLockError::Error(_)) => None,
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).ok()?;
                Some(pid.trim().parse().unwrap_or(0))
            }
        }
    }

    /// Takes the lock; refused while another process has it.
    pub(super) fn take(path: &Path) -> Result<ServerLock, Error> {
        let lock_path = lock_path(path);
        let unavailable = |error: std::io::Error| Error::Unavailable {
            detail: format!("{}: {error}", lock_path.display()),
            ambiguous: false,
        };
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(unavailable)?;
        // A server that was just killed lets go of the file a moment later, and who only asks for the holder at once.
        let give_up = Instant::now() + TAKE_OVER;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < give_up => std::thread::sleep(LOOK_AGAIN),
                Err(TryLockError::WouldBlock) => {
                    let mut pid = String::new();
                    file.read_to_string(&mut pid).map_err(unavailable)?;
                    return Err(Error::InUse {
                        place: path.display().to_string(),
                        pid: pid.trim().parse().unwrap_or(0),
                    });
                }
                Err(TryLockError::Error(error)) => return Err(unavailable(error)),
            }
        }
        let write = |file: &mut File| -> std::io::Result<()> {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            write!(file, "{}", std::process::id())
        };
        write(&mut file).map_err(unavailable)?;
        Ok(ServerLock(file))
    }
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

/// Looks at a file without changing it.
fn inspect(path: &Path) -> Result<(), Error> {
    let place = path.display().to_string();
    let metadata = path
        .metadata()
        .map_err(|error| Error::Unavailable { detail: format!("{place}: {error}"), ambiguous: false })?;
    if !metadata.is_file() {
        return Err(Error::Foreign { place, detail: "it is not a file".into() });
    }
    if metadata.len() == 0 {
        return Err(Error::Corrupt { place, detail: "it is empty; remove it to start anew".into() });
    }
    let look = || -> rusqlite::Result<(i64, i64, Option<String>)> {
        let connection = Connection::open_with_flags(
            path,
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        )?;
        connection.busy_timeout(std::time::Duration::from_secs(5))?;
        let pragma =
            |name: &str| connection.query_row(&format!("pragma {name}"), [], |row| row.get::<_, i64>(0));
        let (application, version) = (pragma("application_id")?, pragma("user_version")?);
        let mut damage = None;
        if metadata.len() <= CHECKED_BYTES_MAX {
            let found: String = connection.query_row("pragma quick_check(1)", [], |row| row.get(0))?;
            damage = Some(found).filter(|found| found != "ok");
        }
        Ok((application, version, damage))
    };
    let (application, version, damage) = look().map_err(|error| failure(path, &error))?;
    if let Some(detail) = damage {
        return Err(Error::Corrupt { place, detail });
    }
    if application != APPLICATION_ID {
        return Err(Error::Foreign { place, detail: "another program made it".into() });
    }
    if version > VERSION {
        return Err(Error::Newer { place, found: version, known: VERSION });
    }
    Ok(())
}

/// Makes an empty file that only its owner may read.
fn create_private(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    let make = || -> std::io::Result<()> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        File::options().write(true).create(true).truncate(false).mode(0o600).open(path).map(drop)
    };
    make().map_err(|error| Error::Unavailable {
        detail: format!("{}: {error}", path.display()),
        ambiguous: false,
    })
}

/// Brings the schema up to date; harmless when it is, and when another process does the same.
fn migrate(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let version: i64 = transaction.query_row("pragma user_version", [], |row| row.get(0))?;
    for (migration, number) in MIGRATIONS.iter().zip(1..).filter(|(_, number)| *number > version) {
        transaction.execute_batch(migration)?;
        transaction.pragma_update(None, "user_version", number)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.commit()
}

/// What SQLite says, as one of our errors.
pub(super) fn failure(path: &Path, error: &rusqlite::Error) -> Error {
    let place = path.display().to_string();
    match error.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => Error::Foreign { place, detail: "it is not a SQLite file".into() },
        Some(ErrorCode::DatabaseCorrupt) => Error::Corrupt { place, detail: error.to_string() },
        Some(ErrorCode::DiskFull) => Error::Full { place },
        Some(
            ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::CannotOpen
            | ErrorCode::ReadOnly
            | ErrorCode::SystemIoFailure,
        ) => Error::Unavailable { detail: format!("{place}: {error}"), ambiguous: false },
        Some(ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig) => {
            Error::Refused { detail: error.to_string() }
        }
        None if matches!(error, rusqlite::Error::ToSqlConversionFailure(_)) => {
            Error::Refused { detail: error.to_string() }
        }
        _ => Error::unexpected(format!("{place}: {error}")),
    }
}
