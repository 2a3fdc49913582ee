//! Connections and transactions: a small pool, prepared statements, deadlines, and what an error means.
//!
//! A connection whose transaction was not ended in order is closed, never handed on.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use belfry_core::AgentId;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Config, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::tls;
use crate::Error;
use crate::pauses::{Explained, Pauses, Point};

/// How long a request waits for a connection before it is refused; shorter than `lock_timeout`, after which a connection
/// that waits for a lock is free again. Work of the node itself waits as long as its verb may take.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// How long work of the node itself waits for a connection that the database does not allow, before it is told why.
const ALLOWED_WITHIN: Duration = Duration::from_secs(3);
/// How often the database is asked again meanwhile; connections of other parts that become free are taken at once.
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// A transaction that lost against another is repeated so often.
const TRIES_MAX: u32 = 10;
/// Before the second of them it waits about so long, then twice as long each time, within a bound.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(1);
const TRY_AGAIN_AFTER_MAX: Duration = Duration::from_millis(400);
/// A frozen node must not keep others waiting, so the server ends what takes too long. All that is asked often is a look-up
/// by key of a batch of rows, or the head of an index: without statistics, as after a first start, a planner would read
/// whole tables for that. With only that way left open a plan is the same whatever the tables hold, and is made once for
/// each connection; to make it anew for each batch took as long as a third of the work. Limits are counted under a lock, by a
/// statement that must see what was committed before the lock was had: a new snapshot for each statement, whatever the
/// database's own default is.
const OPTIONS: &str = "-c search_path=belfry -c plan_cache_mode=force_generic_plan -c jit=off \
     -c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off \
     -c statement_timeout=20s -c lock_timeout=10s -c idle_in_transaction_session_timeout=2s -c TimeZone=UTC \
     -c default_transaction_isolation=read\\ committed";

/// How long a plan, an end or a request for a run waits for a row that another transaction holds, before it is left for
/// later, or refused. The first waits for [`LOCK_WAIT`]; once one was found, others wait for [`LOCK_WAIT_AFTER`] while that is
/// so: a batch with such a row may be split until that stands alone, and requests have few connections.
const LOCK_WAIT: &str = "begin; set local lock_timeout = '2s'";
const LOCK_WAIT_AFTER: &str = "begin; set local lock_timeout = '200ms'";
/// So long after a lock that was waited for in vain the next one is not waited for as long.
const LOCKED_LASTS: Duration = Duration::from_secs(30);

/// The parts of the pool. Each has connections of its own, so that a slow statement of one part never delays another:
/// eight in all, because two cores of a database are busy with fewer. Where the database allows fewer, parts hand connections
/// on to each other, to the more important part first; these are the first here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// This node's lease: join, renew, marks, the clock. Alone, because a late renewal ends everything that runs here.
    Lease,
    /// Other nodes: who lives, fencing, giving runs back, heartbeats. These may wait for locks of runs.
    Rescue,
    /// The loops of this node: due, commit, claim, finish, output of attempts.
    Work,
    /// Everything that is asked from outside: lists, `why`, edits, triggers, webhooks; also pruning.
    Requests,
}

impl Part {
    const ALL: [Part; 4] = [Part::Lease, Part::Rescue, Part::Work, Part::Requests];

    /// Maximum number of connections.
    fn connections_max(self) -> usize {
        match self {
            Part::Lease | Part::Rescue => 1,
            Part::Work | Part::Requests => 3,
        }
    }

    /// How long a verb may take. A renewal that hangs is tried again on a new connection while the lease still holds.
    pub(super) fn deadline(self) -> Duration {
        match self {
            Part::Lease => Duration::from_secs(5),
            Part::Rescue | Part::Work | Part::Requests => super::DEADLINE,
        }
    }
}

/// A parameter of a statement.
pub(super) type Param<'a> = &'a (dyn ToSql + Sync);

/// Why a transaction did not come to its end.
#[derive(Debug)]
pub(super) enum Fault {
    Database(tokio_postgres::Error),
    Store(Error),
    /// What it was decided on has changed meanwhile: once more from the start.
    Again,
}

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Fault {
        Fault::Database(error)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Store(error)
    }
}

pub(super) struct Pool {
    config: Config,
    tls: MakeRustlsConnect,
    pub(super) place: String,
    /// By [`Part`].
    shares: Box<[Share; 4]>,
    pub(super) pauses: Pauses,
    pub(super) explained: Explained,
    /// Deferred ticks were armed, and nobody was told.
    pub(super) armed: AtomicBool,
    /// When a plan or an end last waited for a lock in vain.
    locked_at: Mutex<Option<Instant>>,
}

/// The connections of one part of the pool.
struct Share {
    idle: Mutex<Vec<Connection>>,
    permits: Semaphore,
    /// How many wait for a connection of another part, because the database allows no more.
    wanting: AtomicUsize,
    /// Tells them that there is one.
    came: Notify,
}

impl Share {
    fn new(part: Part) -> Share {
        let permits = Semaphore::new(part.connections_max());
        Share { idle: Mutex::default(), permits, wanting: AtomicUsize::new(0), came: Notify::new() }
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        idle.retain(|connection| !connection.client.is_closed());
        idle.pop()
    }

    fn wants_more(&self) -> bool {
        self.wanting.load(Ordering::SeqCst) > self.idle.lock().len()
    }
}

/// Somebody wants a connection of another part while this lives.
struct Want<'a>(&'a Share);

impl<'a> Want<'a> {
    fn new(share: &'a Share) -> Want<'a> {
        share.wanting.fetch_add(1, Ordering::SeqCst);
        Want(share)
    }
}

impl Drop for Want<'_> {
    fn drop(&mut self) {
        self.0.wanting.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Connection {
    client: Client,
    statements: HashMap<&'static str, Statement>,
}

impl Pool {
    pub(super) fn new(url: &str) -> Result<Pool, Error> {
        let (mut config, tls) = tls::read(url)?;
        let options = match config.get_options() {
            Some(own) => format!("{own} {OPTIONS}"),
            None => OPTIONS.to_owned(),
        };
        config.options(options).connect_timeout(Duration::from_secs(5));
        config.tcp_user_timeout(Duration::from_secs(15));
        if config.get_application_name().is_none() {
            config.application_name("belfry");
        }
        let place = format!("the database {}", config.get_dbname().unwrap_or("of that name"));
        Ok(Pool {
            config,
            tls,
            place,
            shares: Box::new(Part::ALL.map(Share::new)),
            pauses: Pauses::default(),
            explained: Explained::default(),
            armed: AtomicBool::new(false),
            locked_at: Mutex::default(),
        })
    }

    /// For a connection that hears notifications.
    pub(super) fn config(&self) -> (Config, MakeRustlsConnect) {
        (self.config.clone(), self.tls.clone())
    }

    /// A new connection, outside the pool.
    pub(super) async fn connect(&self) -> Result<Client, tokio_postgres::Error> {
        let (client, connection) = self.config.connect(self.tls.clone()).await?;
        // It ends with its client; what went wrong is told to whoever waits for an answer.
        tokio::spawn(async move { drop(connection.await) });
        Ok(client)
    }

    async fn take(&self, part: Part) -> Result<Held<'_>, Error> {
        let share = &self.shares[part as usize];
        let wait = if part == Part::Requests { WAIT_MAX } else { Duration::MAX };
        let permit = tokio::time::timeout(wait, share.permits.acquire()).await.map_err(|_| {
            let (max, wait) = (part.connections_max(), wait.as_secs());
            let detail =
                format!("all {max} connections for requests were busy for {wait} s; try again later");
            Error::Unavailable { detail, ambiguous: false }
        })?;
        let permit = permit.map_err(|_| Error::unexpected("the pool is closed"))?;
        let connection = match share.take_idle() {
            Some(connection) => connection,
            None => self.connect_or_borrow(part).await?,
        };
        Ok(Held { pool: self, part, connection: Some(connection), _permit: permit })
    }

    /// A new connection for a part; if the database allows no more, one that another part has.
    async fn connect_or_borrow(&self, part: Part) -> Result<Connection, Error> {
        let share = &self.shares[part as usize];
        let give_up_at = Instant::now() + if part == Part::Requests { WAIT_MAX } else { ALLOWED_WITHIN };
        loop {
            match self.connect().await {
                Ok(client) => return Ok(Connection { client, statements: HashMap::new() }),
                Err(error) if is_too_many(&error) && Instant::now() < give_up_at => {}
                Err(error) => return Err(error_of(Fault::Database(error), &self.place)),
            }
            let want = Want::new(share);
            // The least important first. Nobody takes the one of the lease: it is needed every few seconds.
            let lenders = Part::ALL.into_iter().rev().filter(|lender| *lender != Part::Lease);
            let mut idle = lenders.filter_map(|lender| self.shares[lender as usize].take_idle());
            if let Some(connection) = idle.next() {
                return Ok(connection);
            }
            // Whether it was told or not: it may have been handed on just before.
            let _ = tokio::time::timeout(ASK_AGAIN, share.came.notified()).await;
            drop(want);
            if let Some(connection) = share.take_idle() {
                return Ok(connection);
            }
        }
    }

    /// Keeps a connection that a part no longer needs: for a more important part that waits for one, or for the same part.
    fn keep(&self, connection: Connection, part: Part) {
        let wanting = Part::ALL.into_iter().find(|to| *to < part && self.shares[*to as usize].wants_more());
        let share = &self.shares[wanting.unwrap_or(part) as usize];
        share.idle.lock().push(connection);
        share.came.notify_one();
    }

    /// A transaction. It begins with its first statement.
    pub(super) async fn transaction<'a>(
        &'a self,
        part: Part,
        committing: &'a AtomicBool,
    ) -> Result<Tx<'a>, Error> {
        Tx::new(self, part, Step::Before, committing).await
    }

    /// Statements that stand each for itself.
    pub(super) async fn statements<'a>(
        &'a self,
        part: Part,
        committing: &'a AtomicBool,
    ) -> Result<Tx<'a>, Error> {
        Tx::new(self, part, Step::Never, committing).await
    }
}

/// A connection that goes back to the pool only when told.
struct Held<'a> {
    pool: &'a Pool,
    part: Part,
    connection: Option<Connection>,
    _permit: SemaphorePermit<'a>,
}

impl Held<'_> {
    fn connection(&mut self) -> Result<&mut Connection, Fault> {
        self.connection.as_mut().ok_or_else(|| Error::unexpected("the connection is gone").into())
    }

    fn give_back(mut self) {
        if let Some(connection) = self.connection.take().filter(|connection| !connection.client.is_closed()) {
            self.pool.keep(connection, self.part);
        }
    }
}

#[derive(PartialEq)]
enum Step {
    /// There is no transaction.
    Never,
    /// It begins with the first statement.
    Before,
    /// It has begun.
    Inside,
    /// Its commit was sent with its last statement, and neither was answered.
    Unknown,
}

/// A transaction under way, or a row of single statements.
pub(super) struct Tx<'a> {
    held: Held<'a>,
    step: Step,
    /// How it begins.
    begin: &'static str,
    /// Set while nobody can say whether it is committed.
    committing: &'a AtomicBool,
    /// Lanes where it may have made room for those that were deferred, to be looked at once, at its end.
    roomy: BTreeSet<String>,
    /// Agents whose definitions it has changed.
    edited: BTreeSet<AgentId>,
    /// Such were armed.
    armed: bool,
}

impl<'a> Tx<'a> {
    async fn new(
        pool: &'a Pool,
        part: Part,
        step: Step,
        committing: &'a AtomicBool,
    ) -> Result<Tx<'a>, Error> {
        Ok(Tx {
            held: pool.take(part).await?,
            step,
            begin: "begin",
            committing,
            roomy: BTreeSet::new(),
            edited: BTreeSet::new(),
            armed: false,
        })
    }

    /// It writes a batch of plans or ends, or a run that is asked for, which waits for no row for long: others need its
    /// connection. Called before its first statement.
    pub(super) fn passes_locks(&mut self) {
        let locked_at = *self.held.pool.locked_at.lock();
        let is_recent = locked_at.is_some_and(|at| at.elapsed() < LOCKED_LASTS);
        self.begin = if is_recent { LOCK_WAIT_AFTER } else { LOCK_WAIT };
    }

    /// How long each of its further statements waits for a lock.
    pub(super) async fn waits_for_locks(&mut self, within: &str) -> Result<(), Fault> {
        self.query("select set_config('lock_timeout', $1, true)", &[&within]).await.map(drop)
    }

    /// There may be room in a lane when this is committed.
    pub(super) fn makes_room(&mut self, lane: &str) {
        if !self.roomy.contains(lane) {
            self.roomy.insert(lane.to_owned());
        }
    }

    /// The definitions of an agent, or of a schedule of it, are others now.
    pub(super) fn edits(&mut self, agent: AgentId) {
        self.edited.insert(agent);
    }

    /// How many agents have different definitions now.
    pub(super) fn edited(&self) -> usize {
        self.edited.len()
    }

    /// Agents whose definitions are others now.
    pub(super) fn take_edited(&mut self) -> BTreeSet<AgentId> {
        std::mem::take(&mut self.edited)
    }

    /// Whether something is left to do before it is committed.
    pub(super) fn has_made_room(&self) -> bool {
        !self.roomy.is_empty()
    }

    /// Arms those that were deferred in lanes that have room now.
    async fn arm_deferred(&mut self) -> Result<(), Fault> {
        if self.step == Step::Inside && !self.roomy.is_empty() {
            let lanes: Vec<String> = std::mem::take(&mut self.roomy).into_iter().collect();
            let armed = self.query("select arm_deferred($1)", &[&lanes]).await?;
            self.armed = armed.first().map_or(Ok(0), |row| row.try_get::<_, i64>(0))? > 0;
        }
        Ok(())
    }

    /// A statement, prepared once for each connection.
    async fn prepared(&mut self, sql: &'static str) -> Result<(&Client, Statement), Fault> {
        let connection = self.held.connection()?;
        let statement = match connection.statements.get(sql) {
            Some(statement) => statement.clone(),
            None => {
                let statement = connection.client.prepare(sql).await?;
                connection.statements.insert(sql, statement.clone());
                statement
            }
        };
        Ok((&connection.client, statement))
    }

    /// Runs a statement.
    pub(super) async fn query(&mut self, sql: &'static str, params: &[Param<'_>]) -> Result<Vec<Row>, Fault> {
        if self.held.pool.explained.is_wanted() {
            self.explain(sql, params).await?;
        }
        let (begins, begin) = (self.step == Step::Before, self.begin);
        if begins {
            self.step = Step::Inside;
        }
        let (client, statement) = self.prepared(sql).await?;
        if !begins {
            return Ok(client.query(&statement, params).await?);
        }
        // Both go out together: one round trip.
        let (begun, rows) =
            tokio::join!(biased; client.batch_execute(begin), client.query(&statement, params));
        begun?;
        let rows = rows?;
        self.held.pool.pauses.at(Point::Begun).await;
        Ok(rows)
    }

    /// Asks how a statement would be done, for tests.
    async fn explain(&mut self, sql: &'static str, params: &[Param<'_>]) -> Result<(), Fault> {
        let client = &self.held.connection()?.client;
        let rows = client.query(&format!("explain {sql}"), params).await?;
        let lines: Vec<&str> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        self.held.pool.explained.keep(sql, lines.join("\n"));
        Ok(())
    }

    /// Runs the last statement of a transaction and commits, in one round trip. Where it fails nothing is committed.
    pub(super) async fn query_and_commit(
        &mut self,
        sql: &'static str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Fault> {
        if self.held.pool.pauses.is_armed() {
            // It is to be held before its commit, which then follows by itself.
            return self.query(sql, params).await;
        }
        let begin = if self.step == Step::Before { self.begin } else { "" };
        let committing = self.committing;
        let (client, statement) = self.prepared(sql).await?;
        committing.store(true, Ordering::SeqCst);
        let (begun, rows, ended) = tokio::join!(
            biased;
            client.batch_execute(begin),
            client.query(&statement, params),
            client.batch_execute("commit"),
        );
        // A transaction that has failed ends with its commit; one that was refused was never there.
        let refused = |error: &tokio_postgres::Error| error.as_db_error().is_some();
        let fault = match (begun, rows, ended) {
            (Ok(()), Ok(rows), Ok(())) => {
                self.step = Step::Never;
                return Ok(rows);
            }
            (Err(error), ..) | (Ok(()), Err(error), _) if refused(&error) => {
                committing.store(false, Ordering::SeqCst);
                self.step = if is_shutdown(&error) { Step::Inside } else { Step::Never };
                return Err(error.into());
            }
            (Ok(()), Ok(_), Err(error)) if refused(&error) && !is_shutdown(&error) => {
                committing.store(false, Ordering::SeqCst);
                self.step = Step::Never;
                return Err(error.into());
            }
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => error,
        };
        self.step = Step::Unknown;
        Err(fault.into())
    }

    /// Runs a statement and counts the rows it touched.
    pub(super) async fn execute(&mut self, sql: &'static str, params: &[Param<'_>]) -> Result<u64, Fault> {
        if self.step == Step::Before {
            let begin = self.begin;
            self.held.connection()?.client.batch_execute(begin).await?;
            self.step = Step::Inside;
        }
        let (client, statement) = self.prepared(sql).await?;
        Ok(client.execute(&statement, params).await?)
    }

    /// Commits or rolls back. `None` asks for another try.
    pub(super) async fn close<T>(
        mut self,
        outcome: Result<T, Fault>,
        tries: &mut u32,
    ) -> Result<Option<T>, Error> {
        let outcome = match outcome {
            Ok(answer) => self.arm_deferred().await.map(|()| answer),
            Err(fault) => Err(fault),
        };
        let place = self.held.pool.place.clone();
        let committing = self.committing;
        if self.step == Step::Unknown
            && let Err(Fault::Database(error)) = &outcome
        {
            let detail = format!("the connection was lost in a commit: {}", words(error));
            return Err(Error::Unavailable { detail, ambiguous: true });
        }
        let inside = self.step == Step::Inside;
        let fault = match outcome {
            Ok(answer) if !inside => {
                self.held.give_back();
                return Ok(Some(answer));
            }
            Ok(answer) => {
                self.held.pool.pauses.at(Point::Ready).await;
                let Ok(connection) = self.held.connection() else { return Ok(Some(answer)) };
                committing.store(true, Ordering::SeqCst);
                let committed = connection.client.batch_execute("commit").await;
                match committed {
                    Ok(()) => {
                        self.held.pool.armed.fetch_or(self.armed, Ordering::SeqCst);
                        self.held.give_back();
                        return Ok(Some(answer));
                    }
                    // The server said no: nothing was changed.
                    Err(error) if error.as_db_error().is_some() && !is_shutdown(&error) => {
                        committing.store(false, Ordering::SeqCst);
                        Fault::Database(error)
                    }
                    Err(error) => {
                        let detail = format!("the connection was lost in a commit: {}", words(&error));
                        return Err(Error::Unavailable { detail, ambiguous: true });
                    }
                }
            }
            Err(fault) => {
                if self.begin != "begin" && fault.is_locked() {
                    *self.held.pool.locked_at.lock() = Some(Instant::now());
                }
                let rolled_back = match self.held.connection() {
                    Ok(connection) if inside => connection.client.batch_execute("rollback").await.is_ok(),
                    _ => !inside,
                };
                let mut healed = false;
                if rolled_back
                    && is_double(&fault)
                    && let Ok(connection) = self.held.connection()
                {
                    healed = connection.client.batch_execute("select drop_doubles()").await.is_ok();
                }
                if rolled_back {
                    self.held.give_back();
                }
                if healed && *tries == 0 {
                    *tries += 1;
                    return Ok(None);
                }
                fault
            }
        };
        *tries += 1;
        match is_worth_another_try(&fault) && *tries < TRIES_MAX {
            true => {
                // Whoever stands in the way may take a moment. The connection is not held meanwhile.
                tokio::time::sleep(TRY_AGAIN_AFTER.saturating_mul(1 << *tries).min(TRY_AGAIN_AFTER_MAX))
                    .await;
                Ok(None)
            }
            false => Err(error_of(fault, &place)),
        }
    }
}

fn is_too_many(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::TOO_MANY_CONNECTIONS)
}

fn is_shutdown(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| code.code().starts_with("57P"))
}

/// Whether a run was to end that has ended before: by damage it stands among the live runs all the same.
fn is_double(fault: &Fault) -> bool {
    let Fault::Database(error) = fault else { return false };
    error.as_db_error().is_some_and(|error| error.constraint() == Some("history_pkey"))
}

impl Fault {
    /// Whether it waited for a lock in vain.
    pub(super) fn is_locked(&self) -> bool {
        matches!(self, Fault::Database(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE))
    }
}

fn is_worth_another_try(fault: &Fault) -> bool {
    match fault {
        Fault::Again => true,
        Fault::Store(_) => false,
        Fault::Database(error) => match error.code() {
            Some(code) => {
                *code == SqlState::T_R_SERIALIZATION_FAILURE
                    || *code == SqlState::T_R_DEADLOCK_DETECTED
                    || is_shutdown(error)
            }
            // A connection that was closed before the commit: another may do.
            None => error.is_closed(),
        },
    }
}

/// What an error of the database means to whoever called.
pub(super) fn error_of(fault: Fault, place: &str) -> Error {
    let error = match fault {
        Fault::Store(error) => return error,
        Fault::Again => {
            let detail = "others were faster too often".to_owned();
            return Error::Unavailable { detail, ambiguous: false };
        }
        Fault::Database(error) => error,
    };
    let detail = words(&error);
    let Some(code) = error.code() else {
        // What this side could not write or read; the connection is well.
        return match detail.as_str() {
            text if text.starts_with("error serializing parameter") => Error::Refused { detail },
            text if text.starts_with("error deserializing column") => Error::unexpected(detail),
            _ => Error::Unavailable { detail, ambiguous: false },
        };
    };
    match &code.code()[..2] {
        // Wrong data, a broken constraint, a limit of the server.
        "21" | "22" | "23" | "54" => Error::Refused { detail },
        "55" if *code == SqlState::LOCK_NOT_AVAILABLE => Error::Locked { detail },
        "53" if *code == SqlState::DISK_FULL => Error::Full { place: place.to_owned() },
        // Also a missing right or table, and a failure of the system below the database.
        "08" | "25" | "28" | "3D" | "40" | "42" | "53" | "55" | "57" | "58" => {
            Error::Unavailable { detail, ambiguous: false }
        }
        "XX" => Error::Corrupt { place: place.to_owned(), detail },
        _ => Error::unexpected(detail),
    }
}

/// The whole chain of an error in one line.
pub(super) fn words(error: &tokio_postgres::Error) -> String {
    if let Some(error) = error.as_db_error() {
        return format!("{} ({})", error.message(), error.code().code());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}
