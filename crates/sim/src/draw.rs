//! What a seed makes: how nodes work, what agents and schedules there are, how much goes wrong.

use std::time::Duration;

use belfry::{AgentSpec, Options, ScheduleDefinition, ScheduleOptions, Timestamp, When};
use belfry_core::AgentDefinition;
use belfry_core::definition::{AnchorName, Breaker, Budget, CatchUp, IfRunning, Retry, Scope};
use serde_json::json;

use crate::random::Random;
use crate::world::{DAY, HOUR, MINUTE, Micros, SECOND};

/// Zones with changes of the clocks at different dates, and one without.
const ZONES: [&str; 7] = [
    "UTC",
    "Europe/London",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "America/Sao_Paulo",
    "Africa/Cairo",
];

/// The label of the first node, which no other has.
pub const LABEL: &str = "gpu";
/// A label that no node has.
pub const NO_LABEL: &str = "typo";

/// Beginnings: some weeks with a change of the clocks, and one without.
const STARTS: [&str; 6] = [
    "2026-03-01T00:00:00Z",
    "2026-03-20T13:37:11Z",
    "2026-10-10T23:59:58Z",
    "2026-06-01T06:00:00Z",
    "2026-12-20T10:00:00Z",
    "2028-02-15T00:00:01Z",
];

/// What a seed draws before anything happens.
#[derive(Debug, Clone)]
pub struct Params {
    /// The seed.
    pub seed: u64,
    /// The store's clock at the start.
    pub start: Timestamp,
    /// How long the first phase lasts.
    pub span: Micros,
    /// The store is shared by nodes on several hosts and has its own clock.
    pub is_shared: bool,
    /// How many nodes.
    pub nodes: usize,
    /// How nodes work.
    pub options: Options,
    /// Things that go wrong per day.
    pub faults_per_day: u64,
    /// Things that people do per day.
    pub verbs_per_day: u64,
    /// Calls in a thousand that fail.
    pub fails_permille: u64,
    /// Calls in a thousand whose answer is lost.
    pub loses_permille: u64,
    /// Whether the store's clock is stepped.
    pub steps_clock: bool,
    /// Hints in a thousand that are lost; in some lives all are.
    pub loses_hints_permille: u64,
}

impl Params {
    /// What a seed makes.
    pub fn draw(seed: u64, random: &mut Random) -> Params {
        let is_shared = random.permille(650);
        let lease = *random.one_of(&[60 * MINUTE, 120 * MINUTE, 240 * MINUTE]);
        let of_lease = |part: u64| Duration::from_micros(lease / part);
        let mut options = Options {
            check_interval: of_lease(3),
            poll_interval: of_lease(1),
            lease: of_lease(1),
            orphan_check: of_lease(3),
            heartbeat: of_lease(1) * 4,
            marks_every: of_lease(3),
            lanes_every: of_lease(1) * 2,
            backoff: of_lease(200),
            prune_every: Duration::from_micros(3 * DAY),
            batch: *random.one_of(&[500, 500, 3, 1]),
            max_concurrent: random.permille(200).then(|| random.between(1, 6) as u32),
            ..Options::default()
        };
        // Whether every tick has one result is checked at the end: nothing is removed before.
        options.keep.runs = None;
        options.keep.failures = None;
        options.keep.runs_per_schedule = None;
        options.keep.skips = None;
        options.lanes.insert("nightly".into(), random.between(1, 2) as u32);
        let calm = random.permille(150);
        let rate = |random: &mut Random, rates: &[u64]| if calm { 0 } else { *random.one_of(rates) };
        Params {
            seed,
            start: random.one_of(&STARTS).parse().unwrap_or(Timestamp::UNIX_EPOCH),
            span: 30 * DAY,
            is_shared,
            nodes: if is_shared { random.between(2, 4) as usize } else { 1 },
            options,
            faults_per_day: rate(random, &[0, 1, 2, 4]),
            verbs_per_day: rate(random, &[0, 4, 8, 16]),
            fails_permille: rate(random, &[0, 0, 2, 10]),
            loses_permille: rate(random, &[0, 0, 2, 10]),
            steps_clock: !calm && random.permille(400),
            loses_hints_permille: if Random(!seed).permille(150) { 1000 } else { 200 },
        }
    }

    /// The labels of a node.
    pub fn labels(place: usize) -> Vec<String> {
        if place == 0 { vec![LABEL.to_owned()] } else { Vec::new() }
    }

    /// How long a lease is.
    pub fn lease(&self) -> Micros {
        self.options.lease.as_micros() as Micros
    }
}

/// How the attempts of an agent go.
#[derive(Debug, Clone)]
pub struct Habit {
    /// The shortest attempt.
    pub shortest: Micros,
    /// The longest attempt.
    pub longest: Micros,
    /// Attempts in a thousand that fail.
    pub fails_permille: u64,
}

impl Habit {
    /// Quick and without failures.
    pub const HEALED: Habit = Habit { shortest: SECOND, longest: 2 * SECOND, fails_permille: 0 };

    /// Some habit.
    pub fn draw(random: &mut Random) -> Habit {
        let (shortest, longest) = *random.one_of(&[
            (10_000, SECOND),
            (SECOND, MINUTE),
            (SECOND, 10 * MINUTE),
            (MINUTE, 2 * HOUR),
            (HOUR, 9 * HOUR),
        ]);
        Habit { shortest, longest, fails_permille: *random.one_of(&[0, 20, 100, 300, 900]) }
    }
}

/// Agents with their schedules.
pub fn agents(random: &mut Random) -> Vec<AgentSpec> {
    let mut agents = Vec::new();
    for number in 0..random.between(2, 5) {
        agents.push(AgentSpec {
            name: format!("a{number}"),
            definition: agent(random),
            schedules: Vec::new(),
        });
    }
    for number in 0..random.between(10, 15) {
        let place = random.below(agents.len() as u64) as usize;
        agents[place].schedules.push((format!("s{number}"), schedule(random)));
    }
    agents
}

/// An agent of another source, which people leave alone: it ticks more than two thousand times in a life.
pub fn foreign(random: &mut Random) -> Vec<AgentSpec> {
    let slot = ScheduleOptions { anchor: AnchorName::Slot, ..ScheduleOptions::default() };
    let schedules = vec![
        ("cron".into(), ScheduleDefinition::new(When::Cron(format!("{} * * * *", random.below(60))))),
        ("slot".into(), ScheduleDefinition { when: When::Every("33m".into()), options: slot }),
    ];
    let definition = AgentDefinition { needs: Vec::new(), ..agent(random) };
    vec![AgentSpec { name: "foreign".into(), definition, schedules }]
}

/// An agent.
pub fn agent(random: &mut Random) -> AgentDefinition {
    AgentDefinition {
        max_concurrent: *random.one_of(&[Some(1), Some(1), Some(2), Some(5), None]),
        limits_sessions: random.permille(300),
        retry: Retry {
            max: *random.one_of(&[0, 0, 1, 3]),
            base_ms: *random.one_of(&[2_000, 60_000, 600_000]),
            max_delay_ms: *random.one_of(&[30_000, 3_600_000]),
        },
        budget: random.permille(200).then(|| Budget {
            max: random.between(1, 4) as u32,
            period_ms: *random.one_of(&[3_600_000, 86_400_000]),
        }),
        breaker: random.permille(300).then(|| Breaker {
            threshold: random.between(1, 3) as u32,
            reset_after_ms: *random.one_of(&[1_800_000, 7_200_000, 86_400_000]),
        }),
        // Nobody makes the last: its runs go to `main`.
        lane: (*random.one_of(&["cron", "cron", "cron", "main", "main", "nightly", "nightly", "unmade"]))
            .into(),
        needs: match random.below(20) {
            0 | 1 => vec![LABEL.into()],
            2 => vec![NO_LABEL.into()],
            _ => Vec::new(),
        },
        ..AgentDefinition::default()
    }
}

/// A schedule.
pub fn schedule(random: &mut Random) -> ScheduleDefinition {
    let (when, anchor) = match random.below(100) {
        0..45 => (When::Cron(cron(random)), AnchorName::Completion),
        45..65 => (every(random, ["2h", "5h", "7h30m"]), AnchorName::Slot),
        65..77 => (every(random, ["3h", "5h", "daily"]), AnchorName::Completion),
        77..84 => (every(random, ["4h", "daily", "weekly"]), AnchorName::Start),
        84..88 => (When::After(format!("{}h", random.between(1, 600))), AnchorName::Completion),
        88..93 => (When::Webhook(json!({"secret": "none"})), AnchorName::Completion),
        _ => (When::Chat(json!({})), AnchorName::Completion),
    };
    let is_ticked = matches!(when, When::Cron(_) | When::Every(_));
    let options = ScheduleOptions {
        timezone: Some((*random.one_of(&ZONES)).into()),
        anchor,
        jitter: (is_ticked && random.permille(300)).then(|| (*random.one_of(&["10s", "5m", "10%"])).into()),
        only_between: random
            .permille(150)
            .then(|| (*random.one_of(&["08:00-18:00", "22:00-04:00", "00:00-23:00"])).into()),
        not_on: match random.below(10) {
            0 => vec!["sat".into(), "sun".into()],
            1 => vec!["wed".into()],
            _ => Vec::new(),
        },
        ..policies(random)
    };
    ScheduleDefinition { when, options }
}

/// Options that are no timing.
pub fn policies(random: &mut Random) -> ScheduleOptions {
    ScheduleOptions {
        catch_up: *random.one_of(&[
            None,
            None,
            Some(CatchUp::Skip),
            Some(CatchUp::RunOnce),
            Some(CatchUp::RunAll),
        ]),
        catch_up_limit: *random.one_of(&[100, 100, 3]),
        if_running: *random.one_of(&[
            IfRunning::Skip,
            IfRunning::Skip,
            IfRunning::Queue,
            IfRunning::Cancel,
            IfRunning::Allow,
        ]),
        overlap: *random.one_of(&[Scope::Schedule, Scope::Schedule, Scope::Command, Scope::Agent]),
        max_pending: *random.one_of(&[10, 10, 2]),
        command: (*random.one_of(&["poll", "poll", "sync"])).into(),
        priority: *random.one_of(&[0, 0, 0, 5, -5]),
        ..ScheduleOptions::default()
    }
}

fn every(random: &mut Random, intervals: [&str; 3]) -> When {
    When::Every((*random.one_of(&intervals)).into())
}

/// A cron expression.
fn cron(random: &mut Random) -> String {
    let minute = random.below(60);
    match random.below(6) {
        0 => format!("{minute} */4 * * *"),
        1 => format!("{minute} */2 * * *"),
        2 => format!("{minute} {} * * *", random.below(24)),
        3 => format!("0,30 {} * * *", random.below(4)),
        4 => "*/40 1-3 * * *".into(),
        _ => format!("{minute} 9-17 * * 1-5"),
    }
}
