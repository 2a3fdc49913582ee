//! A store in one SQLite file.
//!
//! One writer thread takes all commands that wait at a moment into one transaction, each in a savepoint of its own, and
//! answers when that is on disk: group commit. Readers have connections of their own. The same steps as in PostgreSQL,
//! without its locks: whoever writes is alone.

mod claim;
mod defer;
mod edit;
mod finish;
mod gate;
mod hook;
mod identity;
mod lane;
mod list;
mod node;
mod notify;
mod output;
mod overlap;
mod pause;
mod plan;
mod read;
mod refusal;
mod schema;
mod session;
mod source;
mod statements;
mod token;
mod unread;
mod watch;
mod why;

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use belfry_core::breaker::Admits;
use belfry_core::definition::{FORMAT, read_stored};
use belfry_core::edit::Resume;
use belfry_core::ending::Waiting;
use belfry_core::text::clean;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, Schedule, ScheduleDefinition,
    ScheduleId, SkipRange,
};
use belfry_time::Timestamp;
use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::{mpsc, oneshot};

use crate::cached::Cached;
use crate::clock::LastClaim;
use crate::error::{Error, Holder};
use crate::hint::{self, Hint};
use crate::private;
use crate::sabotage::Switch;
use crate::sessions::*;
use crate::shapes::*;
use crate::stats::Stats;
use crate::storable::{all_storable, check_name, check_names, storable};
use crate::store::{Answer, Store, wakes};
use crate::unknown::{self, Number};
use crate::unread::{Unread, set_aside};
use crate::views::*;
use identity::{Identity, ServerLock};
use source::to_json;
use statements::Statements;

/// A store in one SQLite file.
pub struct Sqlite {
    /// To the writer and to the readers; gone only while the store is being closed.
    threads: Option<Channels>,
    running: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    lock: Option<ServerLock>,
}

struct Channels {
    writer: mpsc::Sender<Job>,
    /// What the loops of this node read. Apart, so that no list delays a renewal or the planner.
    loops: mpsc::Sender<Job>,
    readers: mpsc::Sender<Job>,
}

/// The lock is let go of only when nobody writes any more.
impl Drop for Sqlite {
    fn drop(&mut self) {
        self.threads = None;
        for thread in self.running.drain(..) {
            // A thread that panicked has nothing left to finish.
            let _ = thread.join();
        }
    }
}

/// What the verbs share beside the file.
struct Shared {
    path: PathBuf,
    identity: Identity,
    sabotage: Switch,
    hint: Hint,
    /// What the file's counter of others' writes was when it was looked at last.
    seen_version: AtomicI64,
    /// Definitions that were read, by schedule.
    compiled: Mutex<Cached<ScheduleId, (Box<str>, Compiled)>>,
    /// Schedules that this version cannot read.
    unread: Unread,
    last_claim: LastClaim,
    /// The same for agents, by revision.
    agents: Mutex<Cached<(AgentId, i64), Arc<AgentDefinition>>>,
}

type Compiled = Result<Arc<Schedule>, Arc<str>>;

/// A command for a thread: does its work, and gives back what tells the caller once that is committed.
type Job = Box<dyn FnOnce(Result<&Verb<'_>, Error>) -> Deliver + Send>;
type Deliver = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// More commands than this are not taken into one transaction: the first would wait too long.
const BATCH_MAX: usize = 256;
/// Callers beyond this wait before they can hand over a command.
const WAITING_MAX: usize = 1024;
const READERS: usize = 2;
/// Maximum time of a read: others wait for its thread, also the end of the store.
const READ_MAX: Duration = Duration::from_secs(60);
/// After so many steps of SQLite, some milliseconds, a read looks at the clock.
const STEPS_UNNOTICED: i32 = 100_000;

/// Gives a file's own path. Its folder is made where there is none; the file and its logs are made private, and refused if
/// another user owns them or could replace them: what a store holds is run.
fn secure_files(path: &Path) -> Result<PathBuf, Error> {
    if let Some(folder) = path.parent() {
        private::secure_folder(folder)?;
    }
    let path = identity::own_path(path)?;
    // A link may lead to another folder.
    if let Some(folder) = path.parent() {
        private::secure_folder(folder)?;
    }
    for suffix in ["", "-wal", "-shm", "-journal"] {
        private::secure(&identity::beside(&path, suffix))?;
    }
    Ok(path)
}

impl Sqlite {
    /// Opens a file beside others that may have it open, making it where there is none.
    pub fn open(path: &Path) -> Result<Sqlite, Error> {
        Sqlite::start(&secure_files(path)?, None)
    }

    /// Opens a file as its one server: refused while another process is.
    pub fn serve(path: &Path) -> Result<Sqlite, Error> {
        let path = secure_files(path)?;
        let lock = ServerLock::take(&path)?;
        Sqlite::start(&path, Some(lock))
    }

    /// The process that serves a file, if one does. Reads only.
    pub fn server(path: &Path) -> Option<Holder> {
        ServerLock::holder(path)
    }

    /// The process that serves this store's file, if one does.
    pub fn served_by(&self) -> Option<Holder> {
        ServerLock::holder(&self.shared.path)
    }

    /// The kind of a file system on which a server of another machine may not be noticed.
    pub fn network_file_system(path: &Path) -> Option<&'static str> {
        identity::network_file_system(path)
    }

    fn start(path: &Path, mut lock: Option<ServerLock>) -> Result<Sqlite, Error> {
        let connection = schema::open(path, lock.as_mut())?;
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            identity: Identity::of(path, lock.as_ref())?,
            sabotage: Switch::default(),
            hint: Hint::default(),
            seen_version: AtomicI64::new(-1),
            compiled: Mutex::default(),
            unread: Unread::default(),
            last_claim: LastClaim::default(),
            agents: Mutex::default(),
        });
        let (writer, commands) = mpsc::channel(WAITING_MAX);
        let mut running = vec![spawn("belfry-writer", {
            let shared = shared.clone();
            move || write_loop(connection, commands, &shared)
        })?];
        let mut readers_of = |name: &str, threads: usize| -> Result<mpsc::Sender<Job>, Error> {
            let (sender, questions) = mpsc::channel(WAITING_MAX);
            let questions = Arc::new(Mutex::new(questions));
            for _ in 0..threads {
                let mut connection = schema::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
                let (questions, shared) = (questions.clone(), shared.clone());
                let began_at = Arc::new(Mutex::new(Instant::now()));
                let began = began_at.clone();
                let is_over = move || began.lock().elapsed() > READ_MAX;
                let bounded = connection.progress_handler(STEPS_UNNOTICED, Some(is_over));
                bounded.map_err(|error| schema::failure(path, &error))?;
                running.push(spawn(name, move || read_loop(&connection, &questions, &shared, &began_at))?);
            }
            Ok(sender)
        };
        let loops = readers_of("belfry-loops", 1)?;
        let readers = readers_of("belfry-reader", READERS)?;
        Ok(Sqlite { threads: Some(Channels { writer, loops, readers }), running, shared, lock })
    }

    /// Breaks it on purpose.
    pub fn sabotage(&self) -> &Switch {
        &self.shared.sabotage
    }

    /// Lets the file grow to so many pages and no further, as a full disk would.
    #[cfg(feature = "testing")]
    pub async fn limit_pages(&self, pages: Option<u32>) -> Answer<()> {
        self.write(move |verb| {
            let set = format!("pragma max_page_count = {}", pages.unwrap_or(u32::MAX - 1));
            verb.connection.query_row(&set, [], |_| Ok(())).map_err(|error| verb.failure(&error))
        })
        .await
    }

    /// Keeps every other writer of the file waiting for so long.
    pub(crate) async fn disturb(&self, time: Duration) -> Answer<()> {
        self.write(move |_| {
            std::thread::sleep(time);
            Ok(())
        })
        .await
    }

    pub(crate) async fn stats(&self) -> Answer<Stats> {
        let version = self.read(|verb| verb.row("pragma user_version", [], |row| row.get(0))).await?;
        let mut log = self.shared.path.as_os_str().to_owned();
        log.push("-wal");
        let bytes = |path: &Path| path.metadata().ok().map(|data| data.len());
        Ok(Stats {
            schema_version: version,
            bytes: bytes(&self.shared.path),
            log_bytes: bytes(Path::new(&log)),
        })
    }

    async fn write<T: Send + 'static>(
        &self,
        verb: impl FnOnce(&Verb<'_>) -> Done<T> + Send + 'static,
    ) -> Answer<T> {
        self.ask(|channels| &channels.writer, verb).await
    }

    /// A read of this node's own loops.
    async fn look<T: Send + 'static>(
        &self,
        verb: impl FnOnce(&Verb<'_>) -> Done<T> + Send + 'static,
    ) -> Answer<T> {
        self.ask(|channels| &channels.loops, verb).await
    }

    /// A read that somebody asked for.
    async fn read<T: Send + 'static>(
        &self,
        verb: impl FnOnce(&Verb<'_>) -> Done<T> + Send + 'static,
    ) -> Answer<T> {
        self.ask(|channels| &channels.readers, verb).await
    }

    async fn ask<T: Send + 'static>(
        &self,
        to: impl FnOnce(&Channels) -> &mpsc::Sender<Job> + Send,
        verb: impl FnOnce(&Verb<'_>) -> Done<T> + Send + 'static,
    ) -> Answer<T> {
        let (sender, answer) = oneshot::channel();
        let job: Job = Box::new(move |context| {
            let done = context.and_then(|context| context.in_savepoint(verb));
            // Whoever no longer listens does not need the answer.
            Box::new(move |committed| drop(sender.send(done.and_then(|done| committed.map(|()| done)))))
        });
        let gone = || Error::Unavailable { detail: "the store's thread has ended".into(), ambiguous: false };
        let channels = self.threads.as_ref().ok_or_else(gone)?;
        to(channels).send(job).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let failed =
        |error| Error::Unavailable { detail: format!("cannot start a thread: {error}"), ambiguous: false };
    std::thread::Builder::new().name(name.into()).spawn(work).map_err(failed)
}

/// All commands that wait at a moment go into one transaction; they are answered when it is on disk.
fn write_loop(connection: Connection, mut commands: mpsc::Receiver<Job>, shared: &Shared) {
    let verb = Verb {
        connection: &connection,
        shared,
        lost: RefCell::default(),
        alone: Cell::default(),
        freed: RefCell::default(),
        moved: RefCell::default(),
        edited: RefCell::default(),
        scopes: Cell::default(),
        policies: RefCell::default(),
        lanes: RefCell::default(),
        limits: RefCell::default(),
        made_room: Cell::default(),
        armed: Cell::default(),
        statements: Statements::default(),
    };
    let fail = |error: &rusqlite::Error| schema::failure(&shared.path, error);
    while let Some(first) = commands.blocking_recv() {
        let begun = shared
            .identity
            .check()
            .and_then(|()| connection.execute_batch("begin immediate").map_err(|error| fail(&error)));
        if let Err(error) = begun {
            first(Err(error))(Ok(()));
            continue;
        }
        verb.lost.take();
        verb.alone.set(true);
        verb.armed.take();
        let mut delivers = vec![first(Ok(&verb))];
        verb.alone.set(false);
        while verb.lost.borrow().is_none()
            && delivers.len() < BATCH_MAX
            && let Ok(job) = commands.try_recv()
        {
            delivers.push(job(Ok(&verb)));
        }
        let committed = match verb.lost.take() {
            Some(error) => Err(error),
            // Nothing is acknowledged that went into a file that was taken away meanwhile.
            None => connection
                .execute_batch("commit")
                .map_err(|error| fail(&error))
                .and_then(|()| shared.identity.check()),
        };
        if let Err(Error::Full { .. }) = committed {
            // The log may be what fills the disk: copied back it is written anew from its start.
            let _ = connection.query_row("pragma wal_checkpoint(passive)", [], |_| Ok(()));
        }
        if !connection.is_autocommit() {
            // Where this fails as well, the next `begin` says so.
            let _ = connection.execute_batch("rollback");
        }
        for deliver in delivers {
            deliver(committed.clone());
        }
        if verb.armed.take() {
            shared.hint.give();
        }
    }
}

fn read_loop(
    connection: &Connection,
    questions: &Mutex<mpsc::Receiver<Job>>,
    shared: &Shared,
    began_at: &Mutex<Instant>,
) {
    let verb = Verb {
        connection,
        shared,
        lost: RefCell::default(),
        alone: Cell::default(),
        freed: RefCell::default(),
        moved: RefCell::default(),
        edited: RefCell::default(),
        scopes: Cell::default(),
        policies: RefCell::default(),
        lanes: RefCell::default(),
        limits: RefCell::default(),
        made_room: Cell::default(),
        armed: Cell::default(),
        statements: Statements::default(),
    };
    loop {
        let job = questions.lock().blocking_recv();
        let Some(job) = job else { return };
        *began_at.lock() = Instant::now();
        match shared.identity.check() {
            Ok(()) => job(Ok(&verb))(Ok(())),
            Err(error) => job(Err(error))(Ok(())),
        }
    }
}

/// A verb at work: inside a transaction of its own.
struct Verb<'a> {
    connection: &'a Connection,
    shared: &'a Shared,
    /// Why the whole transaction is gone, if it is: a full disk takes back more than the verb that met it.
    lost: RefCell<Option<Error>>,
    /// Whether the transaction holds nothing else yet: then it is this verb's savepoint, and spares it the copies of all
    /// that it changes.
    alone: Cell<bool>,
    /// Gates that may have room now, to be looked at once, at the end of the verb.
    freed: RefCell<BTreeSet<i64>>,
    /// Sessions whose line is another now, likewise.
    moved: RefCell<BTreeSet<i64>>,
    /// Agents whose definitions, or those of whose schedules, are others now, likewise.
    edited: RefCell<BTreeSet<AgentId>>,
    /// Whether there are scopes, once asked for.
    scopes: Cell<Option<bool>>,
    /// Policies of agents that this verb has asked for.
    policies: RefCell<HashMap<AgentId, finish::Policies>>,
    /// Lanes of queues that this verb has asked for.
    lanes: RefCell<HashMap<i64, Rc<str>>>,
    /// How many may wait in lanes that this verb has asked for.
    limits: RefCell<HashMap<String, Option<i64>>>,
    /// There may be room in a lane for those that were deferred, to be looked at at the end of the verb.
    made_room: Cell<bool>,
    /// Such were armed in this transaction.
    armed: Cell<bool>,
    statements: Statements<'a>,
}

/// What a step inside a verb gives back.
type Done<T> = Result<T, Error>;

impl Verb<'_> {
    fn in_savepoint<T>(&self, verb: impl FnOnce(&Verb<'_>) -> Done<T>) -> Done<T> {
        let savepoint = |sql: &str| self.connection.execute_batch(sql).map_err(|error| self.failure(&error));
        let alone = self.alone.get();
        if !alone {
            savepoint("savepoint verb")?;
        }
        self.freed.take();
        self.moved.take();
        self.edited.take();
        self.scopes.take();
        self.policies.take();
        self.lanes.take();
        self.limits.take();
        self.made_room.take();
        let done = verb(self).and_then(|done| {
            self.settle_moved()?;
            self.move_edited()?;
            self.release_freed()?;
            self.arm_deferred()?;
            Ok(done)
        });
        if let Err(error) = &done
            && self.connection.is_autocommit()
        {
            self.lost.replace(Some(error.clone()));
            return done;
        }
        match (&done, alone) {
            (Ok(_), true) => {}
            (Err(_), true) => {
                if let Err(error) = savepoint("rollback; begin immediate") {
                    self.lost.replace(Some(error));
                }
            }
            (Ok(_), false) => savepoint("release verb")?,
            (Err(_), false) => savepoint("rollback to verb; release verb")?,
        }
        done
    }

    fn failure(&self, error: &rusqlite::Error) -> Error {
        schema::failure(&self.shared.path, error)
    }

    /// Runs a statement; gives the number of rows changed.
    fn execute(&self, sql: impl Into<Cow<'static, str>>, parameters: impl rusqlite::Params) -> Done<usize> {
        self.prepared(sql, |statement| statement.execute(parameters))
    }

    /// All rows of a query but those whose own id has a wrong length: nothing is done with these, and `doctor` names them.
    fn rows<T>(
        &self,
        sql: impl Into<Cow<'static, str>>,
        parameters: impl rusqlite::Params,
        map: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Done<Vec<T>> {
        self.prepared(sql, |statement| {
            let rows = statement.query_map(parameters, map)?;
            rows.filter(|row| !row.as_ref().is_err_and(has_wrong_length)).collect()
        })
    }

    /// The first row of a query, if there is one.
    fn row<T>(
        &self,
        sql: impl Into<Cow<'static, str>>,
        parameters: impl rusqlite::Params,
        map: impl FnOnce(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Done<Option<T>> {
        use rusqlite::OptionalExtension;
        self.prepared(sql, |statement| statement.query_row(parameters, map).optional())
    }

    fn prepared<T>(
        &self,
        sql: impl Into<Cow<'static, str>>,
        run: impl FnOnce(&mut rusqlite::Statement<'_>) -> rusqlite::Result<T>,
    ) -> Done<T> {
        self.statements.with(self.connection, sql.into(), run).map_err(|error| self.failure(&error))
    }

    /// Reads a schedule's definition, once for each text.
    fn compile(&self, id: ScheduleId, name: &str, definition: &str) -> Compiled {
        let mut known = self.shared.compiled.lock();
        if let Some((text, compiled)) = known.get(&id)
            && **text == *definition
        {
            return compiled.clone();
        }
        let compiled = read_stored(FORMAT, definition)
            .map_err(|error| Arc::from(error.to_string()))
            .and_then(|definition: belfry_core::ScheduleDefinition| {
                definition.compile(name).map(Arc::new).map_err(Arc::from)
            });
        known.insert(id, (definition.into(), compiled.clone()), definition.len());
        compiled
    }
}

/// An instant as it is stored.
fn micros(at: Timestamp) -> i64 {
    at.as_microsecond()
}

/// A stored instant.
fn instant(row: &rusqlite::Row<'_>, column: &str) -> rusqlite::Result<Timestamp> {
    Ok(unknown::instant(row.get(column)?))
}

/// A stored instant that may be missing.
fn maybe_instant(row: &rusqlite::Row<'_>, column: &str) -> rusqlite::Result<Option<Timestamp>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(unknown::instant))
}

/// A stored number that may be larger or smaller than its type allows: then it is the nearest that this does.
fn number<T: Number>(row: &rusqlite::Row<'_>, column: impl rusqlite::RowIndex) -> rusqlite::Result<T> {
    Ok(T::nearest(row.get(column)?))
}

/// A stored number that may be missing.
fn maybe_number<T: Number>(
    row: &rusqlite::Row<'_>,
    column: impl rusqlite::RowIndex,
) -> rusqlite::Result<Option<T>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(T::nearest))
}

/// A stored text, also where it is not UTF-8: then with replacement characters.
fn lossy(row: &rusqlite::Row<'_>, column: impl rusqlite::RowIndex) -> rusqlite::Result<Option<String>> {
    Ok(row.get_ref(column)?.as_bytes_or_null()?.map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
}

/// A stored text that is there, also where it is not UTF-8.
fn text(row: &rusqlite::Row<'_>, column: impl rusqlite::RowIndex) -> rusqlite::Result<String> {
    Ok(lossy(row, column)?.unwrap_or_default())
}

/// A stored definition. One that is not UTF-8 is empty, which no definition is.
fn json(row: &rusqlite::Row<'_>, column: impl rusqlite::RowIndex) -> rusqlite::Result<String> {
    let bytes = row.get_ref(column)?.as_bytes()?;
    Ok(std::str::from_utf8(bytes).unwrap_or_default().to_owned())
}

/// A stored id that may be missing. One that is not of 16 bytes counts as missing.
fn maybe_id(row: &rusqlite::Row<'_>, column: impl rusqlite::RowIndex) -> rusqlite::Result<Option<[u8; 16]>> {
    Ok(row.get_ref(column)?.as_blob_or_null()?.and_then(|bytes| bytes.try_into().ok()))
}

/// Whether a row could not be read because its own id, or a hash, has a wrong length. No version makes such rows.
fn has_wrong_length(error: &rusqlite::Error) -> bool {
    let rusqlite::Error::FromSqlConversionFailure(_, _, source) = error else { return false };
    matches!(source.downcast_ref(), Some(rusqlite::types::FromSqlError::InvalidBlobSize { .. }))
}

/// A stored id of a run.
fn run_id(bytes: [u8; 16]) -> RunId {
    RunId(uuid::Uuid::from_bytes(bytes))
}

fn bytes(id: RunId) -> [u8; 16] {
    *id.0.as_bytes()
}

fn node_bytes(id: NodeId) -> [u8; 16] {
    *id.0.as_bytes()
}

fn node_id(bytes: [u8; 16]) -> NodeId {
    NodeId(uuid::Uuid::from_bytes(bytes))
}

impl Store for Sqlite {
    async fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Answer<Applied> {
        check_names(agents)?;
        let (source, digest, agents) = (source.to_owned(), digest.to_owned(), agents.to_vec());
        let answer = self.write(move |verb| verb.apply(now, &source, &digest, &agents)).await;
        self.shared.hint.after(answer, wakes::apply)
    }

    async fn source_digest(&self, source: &str) -> Answer<Option<String>> {
        let source = source.to_owned();
        self.read(move |verb| {
            verb.row("select digest from sources where name = ?", [&source], |row| row.get(0))
        })
        .await
    }

    async fn spent(&self, source: &str) -> Answer<BTreeMap<String, ScheduleDefinition>> {
        let source = source.to_owned();
        self.read(move |verb| verb.spent(&source)).await
    }

    async fn put_schedule(
        &self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Answer<Put> {
        check_name(&format!("agent {agent}: schedule"), name)?;
        let (agent, name, definition) = (agent.to_owned(), name.to_owned(), definition.clone());
        let expect = expect.clone();
        let answer = self.write(move |verb| verb.put_by_api(now, &agent, &name, &definition, &expect)).await;
        self.shared.hint.after(answer, wakes::put_schedule)
    }

    async fn remove_schedule(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        expect: &Expect,
    ) -> Answer<Removed> {
        let expect = expect.clone();
        let answer = self.write(move |verb| verb.remove_by_api(now, schedule, &expect)).await;
        self.shared.hint.after(answer, wakes::remove_schedule)
    }

    async fn put_agent(
        &self,
        now: Timestamp,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<PutAgent> {
        check_names(std::slice::from_ref(agent))?;
        let agent = agent.clone();
        let expect = expect.clone();
        let answer = self.write(move |verb| verb.put_agent_by_api(now, &agent, whole, &expect)).await;
        self.shared.hint.after(answer, wakes::put_agent)
    }

    async fn remove_agent(
        &self,
        now: Timestamp,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<Removed> {
        let agent = agent.to_owned();
        let expect = expect.clone();
        let answer = self.write(move |verb| verb.remove_agent_by_api(now, &agent, &expect)).await;
        self.shared.hint.after(answer, wakes::remove_agent)
    }

    async fn schedule_ids(&self, names: &[&str]) -> Answer<Vec<Option<ScheduleId>>> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let sql = "select id from schedules where name = ? and retired_at is null";
        self.read(move |verb| names.iter().map(|name| verb.row(sql, [name], |row| row.get(0))).collect())
            .await
    }

    async fn definitions(&self, schedules: &[ScheduleId]) -> Answer<Vec<Option<Definitions>>> {
        let schedules = schedules.to_vec();
        self.look(move |verb| schedules.iter().map(|schedule| verb.definitions(*schedule)).collect()).await
    }

    async fn unreadable(&self) -> Answer<Vec<UnreadableSchedule>> {
        self.look(|verb| verb.find_unreadable()).await
    }

    async fn pause(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Answer<bool> {
        let reason = reason.map(|reason| clean(reason).into_owned());
        let answer = self.write(move |verb| verb.pause(now, schedule, reason.as_deref(), until)).await;
        self.shared.hint.after(answer, wakes::pause)
    }

    async fn resume(&self, now: Timestamp, schedule: ScheduleId, how: Resume) -> Answer<Option<u64>> {
        let answer = self.write(move |verb| verb.resume(now, schedule, how)).await;
        self.shared.hint.after(answer, wakes::resume)
    }

    async fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Answer<Vec<Due>> {
        self.look(move |verb| verb.due(now, after, limit)).await
    }

    async fn next_due(&self) -> Answer<Option<Timestamp>> {
        self.look(|verb| {
            verb.row(
                "select t.due_at from timers t cross join schedules s on s.id = t.schedule_id
                   cross join schedule_state st on st.schedule_id = t.schedule_id
                 where t.schedule_id not in (select value from json_each(?)) and s.retired_at is null
                 order by t.due_at limit 1",
                [to_json(&verb.shared.unread.not_awaited())?],
                |row| instant(row, "due_at"),
            )
        })
        .await
    }

    async fn commit(&self, now: Timestamp, commits: &[Commit]) -> Answer<Vec<Committed>> {
        let own = all_storable(commits).into_owned();
        let committed =
            self.write(move |verb| own.iter().map(|commit| verb.commit_and_arm(now, commit)).collect()).await;
        self.shared.last_claim.shown(now);
        let stored = self.shared.unread.stored(hint::held(commits, &committed));
        if !stored.is_empty() {
            // If this fails, the note goes when the next tick is planned.
            let _ = self.write(move |verb| verb.forget_refusals(&stored)).await;
        }
        self.shared.hint.after(committed, |committed: &Vec<Committed>| hint::made_runs(commits, committed))
    }

    async fn enqueue_many(&self, now: Timestamp, requests: &[Enqueue]) -> Answer<Vec<Enqueued>> {
        let requests = all_storable(requests).into_owned();
        let enqueue = move |verb: &Verb<'_>| {
            requests.iter().map(|request| verb.enqueue_in_scope(now, request)).collect()
        };
        let answers = self.write(enqueue).await;
        self.shared.last_claim.shown(now);
        self.shared.hint.after(answers, wakes::enqueue_many)
    }

    async fn send(&self, now: Timestamp, message: &NewMessage) -> Answer<Sent> {
        let message = storable(message).into_owned();
        let answer = self.write(move |verb| verb.send(now, &message)).await;
        self.shared.last_claim.shown(now);
        self.shared.hint.after(answer, wakes::send)
    }

    async fn session(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Answer<Option<SessionDone>> {
        let key = clean(key).into_owned();
        let answer = self.write(move |at_work| at_work.session(now, schedule, &key, verb)).await;
        self.shared.hint.after(answer, wakes::session)
    }

    async fn sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SessionRecord, i64>> {
        let filter = filter.clone();
        self.read(move |verb| verb.list_sessions(&filter, after, limit)).await
    }

    async fn put_lanes(&self, _now: Timestamp, lanes: &[(String, LaneSettings)]) -> Answer<()> {
        let lanes = lanes.to_vec();
        let answer = self.write(move |verb| verb.put_lanes(&lanes)).await;
        self.shared.hint.after(answer, wakes::put_lanes)
    }

    async fn set_lane(&self, _now: Timestamp, lane: &str, settings: Option<LaneSettings>) -> Answer<()> {
        let lane = lane.to_owned();
        let answer = self.write(move |verb| verb.set_lane(&lane, settings)).await;
        self.shared.hint.after(answer, wakes::set_lane)
    }

    async fn lanes(&self, now: Timestamp) -> Answer<Vec<LaneRecord>> {
        self.read(move |verb| verb.list_lanes(now)).await
    }

    async fn lane_settings(&self) -> Answer<Vec<LaneRecord>> {
        self.look(|verb| verb.lane_settings()).await
    }

    async fn next_start(&self, now: Timestamp) -> Answer<Option<Timestamp>> {
        self.look(move |verb| verb.next_start(now)).await
    }

    async fn clear_lane(&self, now: Timestamp, lane: &str) -> Answer<Vec<RunId>> {
        let lane = lane.to_owned();
        let answer = self.write(move |verb| verb.clear_lane(now, &lane)).await;
        self.shared.hint.after(answer, wakes::clear_lane)
    }

    async fn claim(&self, now: Timestamp, claim: &Claim) -> Answer<Vec<Claimed>> {
        let claim = claim.clone();
        let claimed = self
            .write(move |verb| {
                let claimed = verb.claim(now, &claim)?;
                verb.made_room.set(verb.made_room.get() || !claimed.is_empty());
                Ok(claimed)
            })
            .await;
        if claimed.is_ok() {
            self.shared.last_claim.settled(now);
        }
        match claimed {
            Err(error) if error.is_of_content() => {
                Err(set_aside(self.write(|verb| verb.set_aside()).await?, error))
            }
            claimed => claimed,
        }
    }

    async fn finish(&self, now: Timestamp, finishes: &[Finish]) -> Answer<Vec<Finished>> {
        let finishes = all_storable(finishes).into_owned();
        let answer =
            self.write(move |verb| finishes.iter().map(|finish| verb.finish(now, finish)).collect()).await;
        self.shared.last_claim.shown(now);
        self.shared.hint.after(answer, wakes::finish)
    }

    async fn cancel(&self, now: Timestamp, run: RunId, reason: Reason) -> Answer<Cancelled> {
        let answer = self.write(move |verb| verb.cancel(now, run, reason)).await;
        self.shared.hint.after(answer, wakes::cancel)
    }

    async fn give_back(
        &self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Answer<Vec<(RunId, RunState)>> {
        let runs = runs.to_vec();
        let answer = self.write(move |verb| verb.give_back(now, node, &runs)).await;
        self.shared.hint.after(answer, wakes::give_back)
    }

    async fn append_output(&self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> Answer<bool> {
        let chunks = chunks.to_vec();
        self.write(move |verb| verb.append_output(run, epoch, &chunks)).await
    }

    async fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Answer<Vec<OutputChunk>> {
        self.read(move |verb| verb.output(run, after, limit_bytes)).await
    }

    fn is_held(&self) -> bool {
        self.lock.is_some() && self.shared.identity.check().is_ok()
    }

    async fn join(&self, node: &Node, left: Option<NodeId>) -> Answer<()> {
        let node = node.clone();
        self.write(move |verb| verb.join(&node, left)).await
    }

    async fn renew(&self, node: NodeId, lease_until: Timestamp) -> Answer<Renewed> {
        if !self.write(move |verb| verb.renew(node, lease_until)).await? {
            return Ok(Renewed::Fenced);
        }
        // The lease is renewed, whatever comes of the list.
        Ok(self.look(move |verb| verb.held(node)).await.unwrap_or(Renewed::HELD))
    }

    async fn marks(&self, node: NodeId) -> Answer<Marks> {
        self.look(move |verb| verb.marks(node)).await
    }

    async fn running_lanes(&self, node: NodeId) -> Answer<Vec<(RunId, String)>> {
        let sql = "select l.id, q.lane from live l join queues q on q.id = l.queue_id
                   where l.state = 2 and l.node_id = ? order by l.id";
        let lane = |row: &rusqlite::Row<'_>| Ok((run_id(row.get(0)?), text(row, 1)?));
        self.look(move |verb| verb.rows(sql, [node_bytes(node)], lane)).await
    }

    async fn drain(&self, now: Timestamp, node: NodeId, draining: bool) -> Answer<Drained> {
        let answer = self.write(move |verb| verb.drain(now, node, draining)).await;
        self.shared.hint.after(answer, wakes::drain)
    }

    async fn nodes(&self) -> Answer<Vec<Node>> {
        self.look(|verb| verb.nodes()).await
    }

    async fn fence(&self, now: Timestamp, node: NodeId, lease_seen: Timestamp) -> Answer<Option<Rescued>> {
        let answer = self.write(move |verb| verb.fence(now, node, lease_seen)).await;
        self.shared.hint.after(answer, wakes::fence)
    }

    async fn pass_breaker(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
        run: RunId,
    ) -> Answer<Admits> {
        let command = command.to_owned();
        self.write(move |verb| {
            let policy = verb.agent_definition(agent)?.and_then(|definition| definition.breaker);
            let Some(policy) = policy else { return Ok(Admits::Yes) };
            let breaker = verb.breaker_of(agent, &command)?;
            let sql = "select 1 from live where id = ? and (state = 2 or attempt > 0)";
            let started = match breaker.probe {
                Some(probe) => verb.row(sql, [bytes(probe)], |_| Ok(()))?.is_some(),
                None => false,
            };
            let admits = breaker.admits_waiting(&policy, run, now, |_| started);
            if admits == Admits::Probe {
                let (next, transition) = breaker.probing(run, now);
                verb.put_breaker(agent, &command, &next, transition)?;
            }
            Ok(admits)
        })
        .await
    }

    async fn reset_breaker(&self, now: Timestamp, agent: AgentId, command: &str) -> Answer<bool> {
        let command = command.to_owned();
        self.write(move |verb| {
            let (next, transition) = verb.breaker_of(agent, &command)?.reset(now);
            verb.put_breaker(agent, &command, &next, transition)?;
            Ok(transition.is_some())
        })
        .await
    }

    async fn reset_budget(&self, now: Timestamp, agent: AgentId) -> Answer<bool> {
        let answer = self
            .write(move |verb| {
                let is_used = verb.set_budget(agent, None)?;
                if is_used {
                    verb.move_waiting(now, agent, Waiting::Free)?;
                }
                Ok(is_used)
            })
            .await;
        self.shared.hint.after(answer, wakes::reset_budget)
    }

    async fn prune(&self, now: Timestamp, retention: &Retention) -> Answer<Pruned> {
        let retention = *retention;
        self.write(move |verb| verb.prune(now, &retention)).await
    }

    async fn runs_by_id(&self, runs: &[RunId]) -> Answer<Vec<RunRecord>> {
        let runs = runs.to_vec();
        self.read(move |verb| verb.runs_by_id(&runs)).await
    }

    async fn run(&self, run: RunId) -> Answer<Option<RunRecord>> {
        self.read(move |verb| verb.run(run)).await
    }

    async fn live_runs(&self) -> Answer<Vec<RunRecord>> {
        self.read(|verb| verb.live_runs()).await
    }

    async fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Answer<Vec<RunRecord>> {
        self.read(move |verb| verb.ended_runs(schedule, limit)).await
    }

    async fn schedule(&self, name: &str) -> Answer<Option<ScheduleRecord>> {
        let name = name.to_owned();
        self.read(move |verb| verb.schedule(&name)).await
    }

    async fn schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Answer<Page<ScheduleRecord, String>> {
        let (filter, after) = (filter.clone(), after.map(str::to_owned));
        self.read(move |verb| verb.list_schedules(&filter, after.as_deref(), limit)).await
    }

    async fn runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Answer<Page<RunRecord, RunId>> {
        let filter = filter.clone();
        self.read(move |verb| verb.list_runs(&filter, after, limit)).await
    }

    async fn agents(&self) -> Answer<Vec<AgentRecord>> {
        self.read(|verb| verb.list_agents()).await
    }

    async fn breakers(&self) -> Answer<Vec<BreakerEntry>> {
        self.read(|verb| verb.list_breakers()).await
    }

    async fn skips(
        &self,
        schedule: ScheduleId,
        after: Option<Timestamp>,
        limit: u32,
    ) -> Answer<Vec<SkipRange>> {
        self.read(move |verb| verb.skips(schedule, after, limit)).await
    }

    async fn tick(&self, schedule: ScheduleId, tick_at: Timestamp) -> Answer<TickFate> {
        self.read(move |verb| verb.tick(schedule, tick_at)).await
    }

    async fn revision_at(
        &self,
        schedule: ScheduleId,
        at: Timestamp,
    ) -> Answer<Option<(i64, ScheduleDefinition)>> {
        self.read(move |verb| verb.revision_at(schedule, at)).await
    }

    async fn breaker(&self, agent: AgentId, command: &str) -> Answer<BreakerRecord> {
        let command = command.to_owned();
        self.read(move |verb| verb.breaker_record(agent, &command)).await
    }

    async fn tripped(&self, breakers: &[(AgentId, String)]) -> Answer<Vec<bool>> {
        let breakers = breakers.to_vec();
        self.look(move |verb| {
            let breaker = |(agent, command): &(AgentId, String)| verb.breaker_of(*agent, command);
            breakers.iter().map(|place| Ok(!breaker(place)?.is_closed())).collect()
        })
        .await
    }

    async fn counts(&self) -> Answer<Counts> {
        self.read(|verb| verb.counts()).await
    }

    async fn changed(&self) {
        self.hinted().await;
    }

    async fn unreadable_rows(&self) -> Answer<Vec<String>> {
        self.look(|verb| verb.unreadable_rows()).await
    }

    async fn note_refusal(&self, now: Timestamp, part: RefusedPart, reason: &str) -> Answer<()> {
        self.shared.unread.note(part);
        let reason = clean(reason).into_owned();
        self.write(move |verb| verb.note_refusal(now, part, &reason)).await
    }

    async fn refusals(&self) -> Answer<Vec<Refusal>> {
        self.read(|verb| verb.refusals()).await
    }

    async fn probe(&self) -> Answer<()> {
        self.write(|verb| verb.probe()).await
    }

    async fn integrity(&self) -> Answer<Vec<String>> {
        self.read(|verb| verb.integrity()).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn readers_at_work_delay_neither_renewal_nor_planning() {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Sqlite::serve(&folder.path().join("belfry.db")).unwrap());
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let id = NodeId(uuid::Uuid::from_u128(1));
        let (host, labels) = ("here".to_owned(), Vec::new());
        let (fenced, draining) = (false, false);
        let (started_at, lease_until, last_seen_at) = (now, now, now);
        let process = NodeProcess::default();
        let node = Node {
            id,
            host,
            pid: 1,
            labels,
            started_at,
            lease_until,
            fenced,
            draining,
            last_seen_at,
            max_concurrent: None,
            process,
        };
        store.join(&node, None).await.unwrap();
        let (let_go, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let readers: Vec<_> = (0..READERS + 5)
            .map(|_| {
                let (store, held) = (store.clone(), held.clone());
                // It ends when the other side of the channel is dropped.
                tokio::spawn(async move { store.read(move |_| Ok(held.lock().recv().is_err())).await })
            })
            .collect();
        let own_loops = async {
            assert!(matches!(store.renew(id, now).await.unwrap(), Renewed::Held { .. }));
            store.marks(id).await.unwrap();
            assert_eq!(store.nodes().await.unwrap().len(), 1);
            assert!(store.due(now, None, 10).await.unwrap().is_empty());
            store.next_due().await.unwrap();
            store.next_start(now).await.unwrap();
            store.lane_settings().await.unwrap();
        };
        tokio::time::timeout(Duration::from_secs(3), own_loops).await.expect("the loops wait for readers");
        drop(let_go);
        for reader in readers {
            assert!(reader.await.unwrap().unwrap());
        }
    }
}
