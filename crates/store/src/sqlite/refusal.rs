//! What the store refuses to keep, and whether it takes writes at all.

use belfry_core::ScheduleId;
use belfry_time::Timestamp;
use rusqlite::params;

use super::{Done, Verb, bytes, instant, maybe_id, micros, run_id, text};
use crate::error::Error;
use crate::views::{REFUSAL_LASTS, Refusal, RefusedPart};

/// What stands in the place of a run if a plan is refused.
const NO_RUN: [u8; 16] = [0; 16];

/// The tables, without the one that is written to as a trial.
const TABLES: [&str; 27] = [
    "sources",
    "agents",
    "schedules",
    "spent",
    "schedule_revisions",
    "schedule_state",
    "timers",
    "queues",
    "gates",
    "scopes",
    "live",
    "history",
    "output",
    "skips",
    "nodes",
    "breakers",
    "breaker_log",
    "budgets",
    "idempotency",
    "sessions",
    "session_runs",
    "lanes",
    "deferred",
    "tokens",
    "audit",
    "snapshots",
    "refusals",
];

impl Verb<'_> {
    pub(super) fn note_refusal(&self, now: Timestamp, part: RefusedPart, reason: &str) -> Done<()> {
        let (schedule, run) = match part {
            RefusedPart::Plan(schedule) | RefusedPart::LockedPlan(schedule) => (schedule, NO_RUN),
            RefusedPart::End(run) => {
                let sql = "select schedule_id from live where id = ?";
                let Some(schedule) = self.row(sql, [bytes(run)], |row| row.get(0))? else { return Ok(()) };
                (schedule, bytes(run))
            }
        };
        let fresh = micros(now.saturating_sub(REFUSAL_LASTS).unwrap_or(now));
        self.execute("delete from refusals where last_at < ?", [fresh])?;
        self.execute(
            "insert into refusals (schedule_id, run_id, since, last_at, reason) values (?1, ?2, ?3, ?3, ?4)
             on conflict (schedule_id, run_id) do update set last_at = excluded.last_at, reason = excluded.reason",
            params![schedule, run, micros(now), reason],
        )
        .map(drop)
    }

    /// Plans of these schedules were stored.
    pub(super) fn forget_refusals(&self, schedules: &[ScheduleId]) -> Done<()> {
        for schedule in schedules {
            self.execute(
                "delete from refusals where schedule_id = ? and run_id = ?",
                params![schedule, NO_RUN],
            )?;
        }
        Ok(())
    }

    /// Those that still hold: the timer of the plan has not moved, the run lives.
    pub(super) fn refusals(&self) -> Done<Vec<Refusal>> {
        self.rows(
            "select f.schedule_id, f.run_id, f.since, f.reason, s.name from refusals f join schedules s on s.id = f.schedule_id
             where exists (select 1 from live l where l.id = f.run_id and l.state = 2)
                or f.run_id = zeroblob(16) and s.retired_at is null
                   and exists (select 1 from timers t where t.schedule_id = f.schedule_id and t.due_at <= f.last_at)
             order by f.since, f.schedule_id limit 1000",
            [],
            |row| {
                Ok(Refusal {
                    schedule: row.get("schedule_id")?,
                    name: text(row, "name")?,
                    run: maybe_id(row, "run_id")?.filter(|run| *run != NO_RUN).map(run_id),
                    since: instant(row, "since")?,
                    reason: text(row, "reason")?,
                })
            },
        )
    }

    /// Writes a row, and looks whether the file and its tables are there.
    pub(super) fn probe(&self) -> Done<()> {
        let place = || self.shared.path.display().to_string();
        let pages: i64 = self.row("pragma page_count", [], |row| row.get(0))?.unwrap_or(0);
        let bytes =
            |suffix| super::identity::beside(&self.shared.path, suffix).metadata().map_or(0, |it| it.len());
        let (file, log) = (bytes(""), bytes("-wal"));
        // Pages that the file does not hold stand in its log.
        let missing = (pages.unsigned_abs() * 4096).saturating_sub(file);
        if file < 512 || missing > log {
            let detail = format!("{missing} bytes are missing at its end");
            return Err(Error::Corrupt { place: place(), detail });
        }
        for table in TABLES {
            self.row(format!("select 1 from {table} limit 1"), [], |_| Ok(()))?;
        }
        self.execute(
            "insert into probes (id, at) values (1, ?) on conflict (id) do update set at = excluded.at",
            [micros(Timestamp::now())],
        )
        .map(drop)
    }
}
