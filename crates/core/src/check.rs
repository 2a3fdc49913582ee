//! Whether something makes a run: the one list of checks, in the order in which planner, webhooks and `why` take them.

use belfry_time::{Allowed, Timestamp};
use serde::Serialize;

use crate::breaker::Admits;
use crate::definition::{IfRunning, Options, Schedule};
use crate::model::SkipReason;
use crate::plan::{Facts, Standing};

/// Where a schedule stands as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Status {
    /// It ticks.
    Active,
    /// A person paused it.
    Paused {
        /// Why.
        reason: Option<String>,
        /// Until when; else until somebody resumes it.
        until: Option<Timestamp>,
    },
    /// `enabled: false`.
    Disabled,
    /// Its definition is wrong.
    Invalid {
        /// What is wrong.
        reason: String,
    },
    /// It has fired for the last time.
    Exhausted,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The reason it would give.
    pub check: &'static str,
    /// Whether it passed.
    pub ok: bool,
    /// In words.
    pub detail: String,
}

/// The checks in their order: the first that fails names the reason.
pub const CHECKS: [SkipReason; 9] = [
    SkipReason::Disabled,
    SkipReason::Invalid,
    SkipReason::Exhausted,
    SkipReason::OutsideDay,
    SkipReason::OutsideWindow,
    SkipReason::CircuitOpen,
    SkipReason::BudgetExhausted,
    SkipReason::AlreadyRunning,
    SkipReason::QueueFull,
];

/// Something that asks for a run: a tick, a missed tick, a request.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// The schedule's policies.
    pub options: &'a Options,
    /// Where the schedule stands.
    pub status: &'a Status,
    /// Whether its window allows the instant at which the run could start.
    pub allowed: Allowed,
    /// What surrounds it.
    pub facts: &'a Facts,
    /// It belongs to a batch of missed ticks, which waits as a whole: neither `if_running` nor `max_pending` cuts it.
    pub in_batch: bool,
}

/// How a run comes to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// It is the one probe of a half-open breaker.
    pub probe: bool,
    /// What lives in the overlap scope is cancelled.
    pub cancel_live: bool,
}

impl Asking<'_> {
    /// Takes the checks in their order.
    pub fn admit(&self) -> Result<Admitted, SkipReason> {
        match CHECKS.into_iter().find(|check| self.fails(*check)) {
            Some(reason) => Err(reason),
            None => Ok(Admitted {
                probe: self.facts.breaker == Admits::Probe,
                cancel_live: self.options.if_running == IfRunning::Cancel && self.facts.live > 0,
            }),
        }
    }

    fn fails(&self, check: SkipReason) -> bool {
        let Asking { options, status, allowed, facts, in_batch } = self;
        match check {
            SkipReason::Disabled => matches!(status, Status::Paused { .. } | Status::Disabled),
            SkipReason::Invalid => matches!(status, Status::Invalid { .. }),
            SkipReason::Exhausted => **status == Status::Exhausted,
            SkipReason::OutsideDay => *allowed == Allowed::NotOnThatDay,
            SkipReason::OutsideWindow => *allowed == Allowed::NotAtThatTime,
            SkipReason::CircuitOpen => facts.breaker == Admits::No,
            SkipReason::BudgetExhausted => facts.budget_exhausted,
            SkipReason::AlreadyRunning => {
                !in_batch && options.if_running == IfRunning::Skip && facts.live > 0
            }
            SkipReason::QueueFull => {
                !in_batch && options.if_running == IfRunning::Queue && facts.pending >= options.max_pending
            }
            // Nothing that asks has these; they are what became of ticks.
            SkipReason::SpendExhausted
            | SkipReason::NoWork
            | SkipReason::MissedSkip
            | SkipReason::MissedRunOnce
            | SkipReason::MissedRunAll
            | SkipReason::Edited => false,
        }
    }

    /// A check in words.
    fn words(&self, check: SkipReason, window: &str) -> String {
        let Asking { options, status, facts, .. } = self;
        match (check, status) {
            (SkipReason::Disabled, Status::Paused { reason, until }) => {
                let why = reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
                let until =
                    until.map_or_else(|| "until it is resumed".into(), |until| format!("until {until}"));
                format!("paused{why} {until}")
            }
            (SkipReason::Disabled, Status::Disabled) => "enabled is false".into(),
            (SkipReason::Disabled, _) => "it is enabled".into(),
            (SkipReason::Invalid, Status::Invalid { reason }) => reason.clone(),
            (SkipReason::Invalid, _) => "its definition is right".into(),
            (SkipReason::Exhausted, Status::Exhausted) => "its last tick has passed".into(),
            (SkipReason::Exhausted, _) => "it has ticks to come".into(),
            (SkipReason::OutsideDay | SkipReason::OutsideWindow, _) if window.is_empty() => {
                "any time is allowed".into()
            }
            (SkipReason::OutsideDay | SkipReason::OutsideWindow, _) => window.to_owned(),
            (SkipReason::CircuitOpen, _) => match facts.breaker {
                Admits::Yes => "the breaker is closed".into(),
                Admits::Probe => "the breaker is open, and lets one probe through".into(),
                Admits::No => "the breaker is open, or its probe has not ended".into(),
            },
            (SkipReason::BudgetExhausted, _) if facts.budget_exhausted => {
                "the failure budget is used up".into()
            }
            (SkipReason::BudgetExhausted, _) => "the failure budget has room".into(),
            (SkipReason::AlreadyRunning, _) => {
                format!("{} live, if_running is {:?}", facts.live, options.if_running).to_lowercase()
            }
            (SkipReason::QueueFull, _) => format!("{} of {} wait", facts.pending, options.max_pending),
            (other, _) => other.as_str().into(),
        }
    }
}

/// Takes all checks of a schedule at an instant. The first that is not ok is the reason why nothing runs then.
pub fn checks(
    schedule: &Schedule,
    status: &Status,
    standing: Option<&Standing>,
    facts: &Facts,
    now: Timestamp,
) -> Vec<Check> {
    let allowed = schedule.timing.as_ref().map_or(Allowed::Yes, |timing| timing.allows(now));
    let window = schedule.timing.as_ref().map_or(String::new(), |timing| timing.window().describe());
    let asking = Asking { options: schedule.options(), status, allowed, facts, in_batch: false };
    let taken = CHECKS.map(|check| Check {
        check: check.as_str(),
        ok: !asking.fails(check),
        detail: asking.words(check, &window),
    });
    let mut checks = Vec::from(taken);
    let ticks = schedule.timing.is_some();
    let words = if ticks { "it ticks by itself" } else { "it runs on request only" };
    // A pause says more of a schedule that runs on request than that it does so.
    let place = CHECKS.iter().position(|check| *check == SkipReason::Exhausted).map_or(0, |place| place + 1);
    checks.insert(place, Check { check: "unsupported_type", ok: ticks, detail: words.into() });
    let due = standing.map(|standing| standing.token.due_at);
    let words = match due {
        Some(due) if due > now => format!("due at {due}"),
        Some(due) => format!("due since {due}"),
        None => "waits for its run to end".into(),
    };
    checks.push(Check { check: "not_due", ok: due.is_some_and(|due| due <= now), detail: words });
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_check_that_fails_names_the_reason() {
        let queue = |max_pending| Options { if_running: IfRunning::Queue, max_pending, ..Options::default() };
        let skip = Options::default;
        let allow = || Options { if_running: IfRunning::Allow, ..Options::default() };
        let busy = Facts { live: 1, pending: 1, ..Facts::CLEAR };
        let open = Facts { breaker: Admits::No, budget_exhausted: true, ..busy };
        let spent = Facts { budget_exhausted: true, ..busy };
        let paused = Status::Paused { reason: None, until: None };
        let invalid = Status::Invalid { reason: String::new() };
        let (yes, day, time) = (Allowed::Yes, Allowed::NotOnThatDay, Allowed::NotAtThatTime);
        let table = [
            (skip(), Status::Active, yes, Facts::CLEAR, None),
            (skip(), paused, day, open, Some(SkipReason::Disabled)),
            (skip(), Status::Disabled, day, open, Some(SkipReason::Disabled)),
            (skip(), invalid, day, open, Some(SkipReason::Invalid)),
            (skip(), Status::Exhausted, day, open, Some(SkipReason::Exhausted)),
            (skip(), Status::Active, day, open, Some(SkipReason::OutsideDay)),
            (skip(), Status::Active, time, open, Some(SkipReason::OutsideWindow)),
            (skip(), Status::Active, yes, open, Some(SkipReason::CircuitOpen)),
            (skip(), Status::Active, yes, spent, Some(SkipReason::BudgetExhausted)),
            (skip(), Status::Active, yes, busy, Some(SkipReason::AlreadyRunning)),
            (queue(1), Status::Active, yes, busy, Some(SkipReason::QueueFull)),
            (queue(2), Status::Active, yes, busy, None),
            (allow(), Status::Active, yes, busy, None),
        ];
        for (options, status, allowed, facts, reason) in table {
            let asking =
                Asking { options: &options, status: &status, allowed, facts: &facts, in_batch: false };
            assert_eq!(asking.admit().err(), reason, "{status:?} {allowed:?} {facts:?}");
        }
    }

    #[test]
    fn what_is_admitted_may_be_a_probe_and_may_cancel_what_lives() {
        let admitted = |if_running, facts: Facts, in_batch| {
            let options = Options { if_running, max_pending: 1, ..Options::default() };
            let (status, allowed) = (&Status::Active, Allowed::Yes);
            Asking { options: &options, status, allowed, facts: &facts, in_batch }.admit()
        };
        let busy = Facts { live: 2, pending: 1, ..Facts::CLEAR };
        let probe = Facts { breaker: Admits::Probe, ..Facts::CLEAR };
        let plain = Admitted { probe: false, cancel_live: false };
        assert_eq!(admitted(IfRunning::Cancel, Facts::CLEAR, false), Ok(plain));
        assert_eq!(admitted(IfRunning::Cancel, busy, false), Ok(Admitted { cancel_live: true, ..plain }));
        assert_eq!(admitted(IfRunning::Skip, probe, false), Ok(Admitted { probe: true, ..plain }));
        for if_running in [IfRunning::Skip, IfRunning::Queue] {
            assert_eq!(admitted(if_running, busy, true), Ok(plain), "a batch is not cut");
            assert!(admitted(if_running, busy, false).is_err());
        }
    }
}
