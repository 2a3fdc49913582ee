//! `belfry doctor --torture`: real nodes on a store of their own, disturbed on purpose, and an account of every tick.
//!
//! Nodes are processes of this program, and so is the work they start. While they run they are killed, stopped, cut off
//! from their store, restarted with another clock, told to read a changed file, and their schedules are paused. Every
//! schedule asks for a run of every tick (`catch_up: run_all`, `if_running: queue`), so afterwards each tick of the grid
//! has exactly one run, and no two attempts of one schedule have run at the same time.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use belfry::api::{Run, Schedule};
use belfry::{AnyStore, Reader};
use belfry_config::StoreUrl;
use belfry_core::{RunState, Trigger};
use belfry_time::{SignedDuration, Timestamp};
use fastrand::Rng;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;

use crate::client::Client;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reach;
use crate::reading;
use crate::words;

/// The agent that all schedules belong to.
const AGENT: &str = "torture";
/// How often each schedule ticks, in seconds. They are in use at once, and one second has no rest.
const EVERY_S: [i64; 12] = [1, 1, 2, 2, 2, 2, 3, 3, 3, 5, 5, 10];
/// How long nodes are trusted without renewing their lease: the shortest that a file may say.
const LEASE: Duration = Duration::from_secs(3);
/// How long a healed store may take until nothing waits.
const HEAL_WITHIN: Duration = Duration::from_secs(180);
/// The file in which every attempt writes its start and its end.
const RECORD: &str = "record";

/// What to do, and where.
pub struct Torture<'a> {
    pub store: Option<&'a str>,
    pub minutes: u32,
    pub nodes: u32,
    pub seed: u64,
}

/// What came of it.
#[derive(Debug, Default, Serialize)]
struct Account {
    /// Ticks of the grids.
    targets: u64,
    /// Those with one run that has completed.
    matched: u64,
    /// Those without a run.
    missed: u64,
    /// Runs beyond the first of a tick, and runs of no tick.
    extra: u64,
    /// Attempts that started while another one of their schedule ran.
    overlapping: u64,
    /// Runs that have not completed.
    stuck: u64,
    kills: u32,
    freezes: u32,
    outages: u32,
    edits: u32,
    pauses: u32,
    shifted_clocks: u32,
}

impl Account {
    fn is_clean(&self) -> bool {
        self.missed + self.extra + self.overlapping + self.stuck == 0 && self.targets > 0
    }
}

impl Torture<'_> {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        if std::env::var_os("BELFRY_STORE").is_some() {
            return Err(Failure::Usage(
                "BELFRY_STORE is set, and would be the store of every node; use `env -u BELFRY_STORE belfry doctor --torture`, \
                 with --store if it is the one that you mean"
                    .into(),
            ));
        }
        // Its files are for their owner alone: its nodes would refuse others.
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
        let folder = tempfile::Builder::new().prefix("belfry-torture-").tempdir()?;
        let address = match self.store {
            Some(address) => address.to_owned(),
            None => format!("sqlite:{}", folder.path().join("node-1/.belfry/belfry.db").display()),
        };
        reach::say(&format!(
            "torture of {} for {} min with {}, seed {}, in {}",
            StoreUrl::new(address.as_str()),
            self.minutes,
            words::count(self.nodes as usize, "node"),
            self.seed,
            folder.path().display()
        ));
        let account = reach::block_on(async {
            let mut house = House::new(folder.path(), &address, self.nodes, self.seed).await?;
            let done = tokio::select! {
                done = house.torture(Duration::from_secs(60 * u64::from(self.minutes))) => done,
                _ = tokio::signal::ctrl_c() => Err(Failure::Run("ended before its time; nothing was counted".into())),
            };
            house.end();
            done
        })?;
        match output.format {
            Format::Table => reading::print_text(&table(&account))?,
            format => reading::print_item(format, &account)?,
        }
        if account.is_clean() {
            return Ok(());
        }
        let kept = folder.keep();
        Err(Failure::Run(format!(
            "the account is not clean; what happened is in {}, `--seed {}` repeats the order of the faults",
            kept.display(),
            self.seed
        )))
    }
}

fn table(account: &Account) -> String {
    let Account { targets, matched, missed, extra, overlapping, stuck, .. } = account;
    let Account { kills, freezes, outages, edits, pauses, shifted_clocks, .. } = account;
    format!(
        "targets      {targets}\nmatched      {matched}\nmissed       {missed}\nextra        {extra}\n\
         overlapping  {overlapping}\nstuck        {stuck}\n\
         faults       {kills} kills, {freezes} freezes, {outages} outages, {edits} edits, {pauses} pauses, \
         {shifted_clocks} shifted clocks\n"
    )
}

/// The nodes, and where they are.
struct House {
    folder: PathBuf,
    address: String,
    nodes: Vec<Node>,
    random: Rng,
    account: Account,
    /// Counts the changes of the files.
    edition: u32,
    paused: Option<(String, Instant)>,
    shift: SignedDuration,
}

/// One node: a process, while it is up.
struct Node {
    folder: PathBuf,
    process: Option<Child>,
    /// When it is to be continued, or to be started again.
    rests_until: Option<Instant>,
}

impl House {
    async fn new(folder: &Path, address: &str, nodes: u32, seed: u64) -> Result<House, Failure> {
        let is_file = address.starts_with("sqlite:");
        if is_file && nodes > 1 {
            return Err(Failure::Usage("an SQLite file has one node; --nodes is for PostgreSQL".into()));
        }
        let nodes = (1..=nodes).map(|number| Node {
            folder: folder.join(format!("node-{number}")),
            process: None,
            rests_until: None,
        });
        let house = House {
            folder: folder.to_owned(),
            address: address.to_owned(),
            nodes: nodes.collect(),
            random: Rng::with_seed(seed),
            account: Account::default(),
            edition: 0,
            paused: None,
            shift: SignedDuration::ZERO,
        };
        for node in &house.nodes {
            std::fs::create_dir_all(&node.folder)?;
        }
        house.refuse_a_store_in_use().await?;
        house.write_files()?;
        Ok(house)
    }

    /// Nothing that somebody needs is disturbed.
    async fn refuse_a_store_in_use(&self) -> Result<(), Failure> {
        if let Some(path) = self.address.strip_prefix("sqlite:")
            && !Path::new(path).exists()
        {
            return Ok(());
        }
        let store = Reader::from(AnyStore::open(&self.address, false).await?);
        let counts = store.counts().await?;
        let is_empty = store.agents().await?.is_empty()
            && store.nodes().await?.is_empty()
            && counts.pending + counts.running + counts.ended == 0;
        match is_empty {
            true => Ok(()),
            false => Err(Failure::Usage(format!(
                "{} holds agents, nodes or runs; --torture kills and changes what it finds, so name an empty store that \
                 nobody else uses",
                StoreUrl::new(self.address.as_str())
            ))),
        }
    }

    /// Writes every node's file. An edition changes what no tick depends on.
    fn write_files(&self) -> Result<(), Failure> {
        let program = std::env::current_exe()?;
        let work = [
            program.to_string_lossy().into_owned(),
            "doctor".into(),
            "--torture-work".into(),
            self.folder.to_string_lossy().into_owned(),
        ];
        let mut text = format!(
            "store: {}\nengine: {{lease: {}s, heartbeat: 1s, check_interval: 1s, poll_interval: 1s, shutdown_timeout: 2s}}\n\
             retention: {{runs_per_schedule: none, runs: none}}\nagents:\n  {AGENT}:\n    run: {}\n    max_concurrent: none\n    \
             retry: {{max: 1000000, base: 100ms, max_delay: 1s}}\n    schedules:\n",
            serde_json::to_string(&self.address)?,
            LEASE.as_secs(),
            serde_json::to_string(&work)?,
        );
        for (number, every) in EVERY_S.iter().enumerate() {
            let priority = (self.edition as usize + number) % 3;
            let _ = writeln!(
                text,
                "      s{number}: {{every: {every}s, anchor: slot, catch_up: run_all, catch_up_limit: 100000, late_after: 1h, \
                 if_running: queue, max_pending: 100000, priority: {priority}}}"
            );
        }
        for node in &self.nodes {
            let (file, fresh) = (node.file(), node.folder.join("fresh.yaml"));
            std::fs::write(&fresh, &text)?;
            std::fs::rename(fresh, file)?;
        }
        Ok(())
    }

    /// Disturbs for so long, heals, waits until nothing is left to do, and counts.
    async fn torture(&mut self, time: Duration) -> Result<Account, Failure> {
        for number in 0..self.nodes.len() {
            self.start(number)?;
        }
        let client = self.first_client().await?;
        let schedules: Vec<Schedule> = client.list("/api/v1/schedules?", usize::MAX).await?;
        drop(client);
        let (began, mut next) = (Instant::now(), Instant::now());
        while began.elapsed() < time {
            self.mend_what_is_due(false).await?;
            if next <= Instant::now() {
                self.disturb().await?;
                next = Instant::now() + Duration::from_millis(self.random.u64(500..4_000));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        reach::say("no more faults; waiting until every tick so far has run");
        self.mend_what_is_due(true).await?;
        self.settle(&schedules).await?;
        Ok(std::mem::take(&mut self.account))
    }

    /// One fault, drawn by chance.
    async fn disturb(&mut self) -> Result<(), Failure> {
        let number = self.random.usize(0..self.nodes.len());
        let rests = self.nodes[number].rests_until.is_some();
        match self.random.u32(0..10) {
            0 | 1 if !rests => {
                let with_keeper = self.random.bool();
                self.nodes[number].kill(with_keeper);
                self.nodes[number].rests_until = Some(self.soon(3_000));
                self.account.kills += 1;
            }
            2 | 3 if !rests => {
                self.nodes[number].signal(Signal::SIGSTOP);
                // Some wake up before their lease is over, some long after.
                self.nodes[number].rests_until = Some(self.soon(8_000));
                self.account.freezes += 1;
            }
            4 => {
                let store = AnyStore::open(&self.address, false).await?;
                let time = Duration::from_millis(self.random.u64(100..4_000));
                // Whoever is cut off while cutting has done so.
                let _ = store.disturb(time).await;
                self.account.outages += 1;
            }
            5 => {
                self.edition += 1;
                self.write_files()?;
                self.account.edits += 1;
            }
            6 if self.paused.is_none() => {
                let name = format!("{AGENT}/s{}", self.random.usize(0..EVERY_S.len()));
                if self.command(number, &["pause", &name]).await? {
                    self.paused = Some((name, self.soon(10_000)));
                    self.account.pauses += 1;
                }
            }
            7 if !rests && self.address.starts_with("sqlite:") => {
                // The database's clock rules where there is one: only a node of a file has a clock that can be wrong.
                let seconds = self.random.i64(-20..20);
                self.shift = SignedDuration::from_secs(seconds);
                self.nodes[number].kill(false);
                self.nodes[number].rests_until = Some(Instant::now());
                self.account.shifted_clocks += 1;
            }
            8 if !rests => {
                self.nodes[number].signal(Signal::SIGTERM);
                self.nodes[number].rests_until = Some(self.soon(4_000));
                self.account.kills += 1;
            }
            _ => {}
        }
        Ok(())
    }

    fn soon(&mut self, most_ms: u64) -> Instant {
        Instant::now() + Duration::from_millis(self.random.u64(0..most_ms))
    }

    /// Continues, restarts and resumes what has rested long enough, or everything.
    async fn mend_what_is_due(&mut self, all: bool) -> Result<(), Failure> {
        let now = Instant::now();
        if all {
            self.shift = SignedDuration::ZERO;
        }
        for number in 0..self.nodes.len() {
            if self.nodes[number].rests_until.is_some_and(|until| all || until <= now) {
                self.nodes[number].rests_until = None;
                self.nodes[number].signal(Signal::SIGCONT);
            }
            if self.nodes[number].rests_until.is_none() && !self.nodes[number].lives() {
                self.start(number)?;
            }
        }
        if let Some((name, until)) = self.paused.take() {
            let is_due = all || until <= now;
            if !is_due || !self.command(0, &["resume", "--catch-up", &name]).await? {
                self.paused = Some((name, until));
            }
        }
        Ok(())
    }

    fn start(&mut self, number: usize) -> Result<(), Failure> {
        let node = &mut self.nodes[number];
        let log = File::options().create(true).append(true).open(node.folder.join("log"))?;
        let mut command = Command::new(std::env::current_exe()?);
        for name in own_settings() {
            command.env_remove(name);
        }
        command.args(["up", "--log-format", "json", "--listen", "127.0.0.1:0"]);
        if !self.shift.is_zero() {
            command.args(["--clock-shift", &format!("{}s", self.shift.as_secs())]);
        }
        command.arg("-c").arg(node.file()).current_dir(&node.folder).stdin(Stdio::null());
        node.process = Some(command.stdout(log.try_clone()?).stderr(log).spawn()?);
        Ok(())
    }

    /// A command as a person gives it; says whether it did something. A node that is down or stopped may keep it from that.
    async fn command(&self, number: usize, arguments: &[&str]) -> Result<bool, Failure> {
        let node = &self.nodes[number];
        let log = File::options().create(true).append(true).open(node.folder.join("log"))?;
        let mut command = tokio::process::Command::new(std::env::current_exe()?);
        for name in own_settings() {
            command.env_remove(name);
        }
        command.args(arguments).arg("-c").arg(node.file()).current_dir(&node.folder).stdin(Stdio::null());
        let mut process = command.stdout(log.try_clone()?).stderr(log).kill_on_drop(true).spawn()?;
        let ended = tokio::time::timeout(Duration::from_secs(5), process.wait()).await;
        Ok(matches!(ended, Ok(Ok(status)) if status.success()))
    }

    async fn first_client(&self) -> Result<Client, Failure> {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let place = Place::of_file(self.nodes[0].file());
            match place.client(Need::Store).await {
                Ok(client) if client.is_served() => return Ok(client),
                _ if Instant::now() < until => tokio::time::sleep(Duration::from_millis(100)).await,
                Ok(_) => return Err(Failure::Timeout("no node came up within 30 s".into())),
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Waits until nothing waits, and counts.
    async fn settle(&mut self, schedules: &[Schedule]) -> Result<(), Failure> {
        let until = Instant::now() + HEAL_WITHIN;
        let place = Place::of_file(self.nodes[0].file());
        // A clock that was set back has to reach again where it was.
        let end = Timestamp::now();
        loop {
            self.mend_what_is_due(true).await?;
            let client = place.client(Need::Store).await?;
            let runs: Vec<Run> = client.list(&format!("/api/v1/runs?agent={AGENT}"), usize::MAX).await?;
            self.count(schedules, &runs, end)?;
            let is_over = self.paused.is_none() && self.account.missed + self.account.stuck == 0;
            if is_over || until <= Instant::now() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Compares the grids with the runs, up to an instant.
    fn count(&mut self, schedules: &[Schedule], runs: &[Run], end: Timestamp) -> Result<(), Failure> {
        let account = &mut self.account;
        (account.targets, account.matched, account.missed, account.extra, account.stuck) = (0, 0, 0, 0, 0);
        let mut of_schedule: BTreeMap<&str, BTreeMap<Timestamp, Vec<&Run>>> = BTreeMap::new();
        for run in runs {
            match run.tick_at.filter(|_| run.trigger != Trigger::Manual) {
                Some(tick) => {
                    let ticks = of_schedule.entry(&run.schedule).or_default();
                    ticks.entry(tick).or_default().push(run);
                }
                None => account.extra += 1,
            }
        }
        for schedule in schedules {
            let number = schedule.schedule.strip_prefix('s').and_then(|text| text.parse::<usize>().ok());
            let Some(every) = number.and_then(|number| EVERY_S.get(number)) else { continue };
            let mut ticks = of_schedule.remove(schedule.schedule.as_str()).unwrap_or_default();
            let mut at = (schedule.status_since.as_millisecond().div_euclid(every * 1000) + 1) * every;
            while at <= end.as_second() {
                account.targets += 1;
                let tick = Timestamp::from_second(at).unwrap_or(Timestamp::MAX);
                match ticks.remove(&tick).as_deref() {
                    None => account.missed += 1,
                    Some([run]) if run.state == RunState::Completed => account.matched += 1,
                    Some([_]) => account.stuck += 1,
                    Some(several) => {
                        account.matched += 1;
                        account.extra += several.len() as u64 - 1;
                    }
                }
                at += every;
            }
            // Later ones are not judged, if they are ticks at all.
            let is_tick = |tick: &Timestamp| *tick > end && tick.as_millisecond() % (every * 1000) == 0;
            account.extra +=
                ticks.iter().filter(|(tick, runs)| !is_tick(tick) || runs.len() > 1).count() as u64;
        }
        account.extra += of_schedule.values().map(|ticks| ticks.len() as u64).sum::<u64>();
        let record = std::fs::read_to_string(self.folder.join(RECORD)).unwrap_or_default();
        let overlapping: HashSet<&str> = record.lines().filter(|line| line.starts_with("overlap")).collect();
        account.overlapping = overlapping.len() as u64;
        Ok(())
    }

    fn end(&mut self) {
        for node in &mut self.nodes {
            node.signal(Signal::SIGCONT);
            node.signal(Signal::SIGTERM);
        }
        for node in &mut self.nodes {
            if let Some(mut process) = node.process.take() {
                let _ = process.wait();
            }
        }
    }
}

impl Node {
    fn file(&self) -> PathBuf {
        self.folder.join("belfry.yaml")
    }

    fn pid(&self) -> Option<Pid> {
        self.process.as_ref().and_then(|process| i32::try_from(process.id()).ok()).map(Pid::from_raw)
    }

    fn lives(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// A process that has ended meanwhile is not waited for before it is started again, so the pid is still its own.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let _ = kill(pid, signal);
        }
    }

    /// Kills the node, and the process that ends its children with it.
    fn kill(&mut self, with_keeper: bool) {
        if with_keeper && let Some(pid) = self.pid() {
            for keeper in keepers(pid) {
                let _ = kill(keeper, Signal::SIGKILL);
            }
        }
        self.signal(Signal::SIGKILL);
        if let Some(mut process) = self.process.take() {
            let _ = process.wait();
        }
    }
}

/// Variables that would tell a node or a command something else than its file.
fn own_settings() -> impl Iterator<Item = std::ffi::OsString> {
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_string_lossy().starts_with("BELFRY_"))
}

/// The children of a node that run this program and are no attempts.
fn keepers(node: Pid) -> Vec<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{node}/task/{node}/children")).unwrap_or_default();
    let is_keeper = |pid: &Pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        !String::from_utf8_lossy(&line).contains("torture-work")
    };
    let pids = children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok().map(Pid::from_raw));
    pids.filter(is_keeper).collect()
}

/// The work of one attempt: it holds the lock of its schedule for a moment, and writes down if somebody else had it. Every
/// seventh first attempt fails.
pub fn work(folder: &Path) -> Result<(), Failure> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (schedule, run, attempt) =
        (variable("BELFRY_SCHEDULE"), variable("BELFRY_RUN_ID"), variable("BELFRY_ATTEMPT"));
    let write = |word: &str| -> std::io::Result<()> {
        let mut record = File::options().create(true).append(true).open(folder.join(RECORD))?;
        record.write_all(format!("{word} {schedule} {run} {attempt} {}\n", Timestamp::now()).as_bytes())
    };
    let lock = File::options().create(true).append(true).open(folder.join(format!("lock-{schedule}")))?;
    let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock);
    write(if lock.is_ok() { "start" } else { "overlap" })?;
    let chance = run.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    std::thread::sleep(Duration::from_millis(20 + chance % 200));
    write("end")?;
    match chance % 7 == 0 && attempt == "1" {
        true => Err(Failure::Run("this attempt fails on purpose".into())),
        false => Ok(()),
    }
}
