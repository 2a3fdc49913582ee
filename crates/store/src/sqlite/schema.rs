//! Opening a file: is it ours, is it whole, is it of a version we know? Then its migrations.

use std::fs::File;
use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use super::identity::{ServerLock, beside};
use crate::error::Error;
use crate::private;

/// In the order in which they are applied; the number is the version of the schema.
const MIGRATIONS: [&str; 2] =
    [include_str!("migrations/0001_initial.sql"), include_str!("migrations/0002_tokens.sql")];
/// The version this code knows.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// "BELF", in the header of our files.
const APPLICATION_ID: i64 = 0x4245_4c46;
/// Bytes of a page, as SQLite makes them.
const PAGE_BYTES: i64 = 4096;
/// Files up to this size are checked as a whole before they are used.
const CHECKED_BYTES_MAX: u64 = 64 << 20;

/// Opens a file for writing, making it where there is none. What is foreign, damaged or newer is refused untouched. A
/// server's lock is extended to the file before SQLite opens it.
pub(super) fn open(path: &Path, lock: Option<&mut ServerLock>) -> Result<Connection, Error> {
    if !path.exists() {
        refuse_lone_log(path)?;
        create(path)?;
    }
    if let Some(lock) = lock
        && path.is_file()
    {
        lock.take_store(path)?;
    }
    inspect(path)?;
    let mut connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    migrate(&mut connection).map_err(|error| failure(path, &error))?;
    Ok(connection)
}

/// A log without its file: a new file must not be mixed with it.
fn refuse_lone_log(path: &Path) -> Result<(), Error> {
    let log = beside(path, "-wal");
    match std::fs::metadata(&log) {
        Ok(about) if about.len() > 0 => Err(Error::Corrupt {
            place: path.display().to_string(),
            detail: format!(
                "the file is missing, and its log {} is there. Put the file back; if it is lost, remove the log",
                log.display()
            ),
        }),
        _ => Ok(()),
    }
}

/// Makes a store that only its owner may read: under another name, which becomes its own once it is whole. A process that is
/// killed meanwhile leaves no store, and where another process was first its store stays.
fn create(path: &Path) -> Result<(), Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    private::secure_folder(folder)?;
    let fresh = beside(path, &format!(".new-{}", uuid::Uuid::new_v4().simple()));
    let make = || -> Result<(), Error> {
        private::open(&fresh)?;
        let mut connection = connect(&fresh, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        migrate(&mut connection).map_err(|error| failure(path, &error))?;
        connection.close().map_err(|(_, error)| failure(path, &error))
    };
    let name = || -> std::io::Result<()> {
        match rustix::fs::renameat_with(CWD, &fresh, CWD, path, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => std::fs::remove_file(&fresh),
            // A file system that cannot look and rename in one step.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => std::fs::rename(&fresh, path),
            named => Ok(named?),
        }?;
        File::open(folder)?.sync_all()
    };
    let made = make().and_then(|()| {
        name().map_err(|error| Error::Unavailable {
            detail: format!("{}: {error}", path.display()),
            ambiguous: false,
        })
    });
    if made.is_err() {
        for suffix in ["", "-wal", "-shm"] {
            // It may never have been there.
            let _ = std::fs::remove_file(beside(&fresh, suffix));
        }
    }
    made
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
        let log_pages = log_pages(path);
        connection.pragma_update(None, "wal_autocheckpoint", log_pages)?;
        connection.pragma_update(None, "journal_size_limit", log_pages * PAGE_BYTES)?;
        // A plan does not depend on the values: else many a statement is compiled anew for each.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        connection.set_prepared_statement_cache_capacity(128);
        Ok(connection)
    };
    connect().map_err(|error| failure(path, &error))
}

/// How many pages the log may have before they are copied back. Up to 40 MB, so that a page that changes often is copied once
/// per 40 MB rather than once per 4; less where the disk has little room, so that the log does not fill it.
fn log_pages(path: &Path) -> i64 {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let free =
        rustix::fs::statvfs(folder).map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    i64::try_from(free / 8).unwrap_or(i64::MAX).div_euclid(PAGE_BYTES).clamp(50, 10_000)
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
        return Err(Error::Corrupt { place, detail: "it is empty, and a store never is".into() });
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

/// Brings the schema up to date; harmless when it is, and when another process does the same.
fn migrate(connection: &mut Connection) -> rusqlite::Result<()> {
    let version_of = |connection: &Connection| -> rusqlite::Result<i64> {
        connection.query_row("pragma user_version", [], |row| row.get(0))
    };
    // A command that only reads takes no lock, and needs no room on the disk.
    if version_of(connection)? == VERSION {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let version = version_of(&transaction)?;
    for (migration, number) in MIGRATIONS.iter().zip(1..).filter(|(_, number)| *number > version) {
        transaction.execute_batch(migration)?;
        transaction.pragma_update(None, "user_version", number)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.commit()
}

/// Whether a statement cannot be compiled, because a table or a column is gone.
fn is_missing(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqlInputError { msg, .. } => msg.starts_with("no such "),
        rusqlite::Error::SqliteFailure(_, Some(words)) => words.starts_with("no such "),
        _ => false,
    }
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
            | ErrorCode::SystemIoFailure
            | ErrorCode::OutOfMemory
            | ErrorCode::PermissionDenied
            | ErrorCode::OperationInterrupted
            | ErrorCode::OperationAborted
            | ErrorCode::FileLockingProtocolFailed,
        ) => Error::Unavailable { detail: format!("{place}: {error}"), ambiguous: false },
        Some(ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig) => {
            Error::Refused { detail: error.to_string() }
        }
        // A statement that cannot be compiled: a table or a column of it is gone.
        _ if is_missing(error) => Error::Corrupt { place, detail: error.to_string() },
        None if matches!(error, rusqlite::Error::ToSqlConversionFailure(_)) => {
            Error::Refused { detail: error.to_string() }
        }
        _ => Error::unexpected(format!("{place}: {error}")),
    }
}
