//! Numbers in rows that this version does not know, as a newer one or a mistake may leave them. They are read as something
//! that does no harm, and said where that is possible; one row never fails a list.

use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::session::RunUsage;
use belfry_core::{Reason, RunState, SkipReason, Token, TokenKind};
use belfry_time::Timestamp;

/// What is read for an instant before all that a [`Timestamp`] can hold: the year 1, which every store can keep.
pub(crate) const EARLIEST: Timestamp = Timestamp::constant(-62_135_596_800, 0);

/// An instant by its microseconds since 1970. One that a [`Timestamp`] cannot hold is [`EARLIEST`] or the last there is.
pub(crate) fn instant(micros: i64) -> Timestamp {
    let nearest = if micros < 0 { EARLIEST } else { Timestamp::MAX };
    Timestamp::from_microsecond(micros).unwrap_or(nearest)
}

/// When a token expires. An expiry that cannot be read has passed.
pub(crate) fn expiry(at: Option<Timestamp>) -> Option<Timestamp> {
    at.map(|at| if at == Timestamp::MAX { EARLIEST } else { at })
}

/// A number that is stored in a column with more room.
pub(crate) trait Number {
    /// The nearest one that there is.
    fn nearest(stored: i64) -> Self;
}

macro_rules! numbers {
    ($($kind:ty),+) => {
        $(impl Number for $kind {
            fn nearest(stored: i64) -> $kind {
                <$kind>::try_from(stored).unwrap_or(if stored < 0 { <$kind>::MIN } else { <$kind>::MAX })
            }
        })+
    };
}
numbers!(i16, i32, u16, u32, u64);

/// What is wrong with the instants of a timer. No schedule has a tick at the end of time.
pub(crate) fn timer_instants(token: &Token) -> Option<String> {
    let is_end = |at: Timestamp| at == EARLIEST || at == Timestamp::MAX;
    let wrong = is_end(token.tick_at) || is_end(token.due_at);
    wrong.then(|| "its stored timer has an instant that is out of range".to_owned())
}

/// The failure budget of an agent, none where its period has not begun yet for all time.
pub(crate) fn budget(period_start: Timestamp, failures: i64) -> Option<Budget> {
    let failures = u32::nearest(failures);
    (period_start < Timestamp::MAX).then_some(Budget { period_start, failures })
}

/// The kind of a timer, and what is wrong with it.
pub(crate) fn timer_kind(code: i16) -> (TokenKind, Option<String>) {
    match TokenKind::from_code(code) {
        Some(kind) => (kind, None),
        None => (TokenKind::Tick, Some(format!("its stored timer is of kind {code}, which is not known"))),
    }
}

/// Why ticks were skipped.
pub(crate) fn skip_reason(code: i16) -> SkipReason {
    SkipReason::from_code(code).unwrap_or(SkipReason::Invalid)
}

/// Why a run is to be cancelled: it is, whatever the reason.
pub(crate) fn cancel_reason(code: i16) -> Reason {
    Reason::from_code(code).unwrap_or(Reason::Requested)
}

/// How a run has ended, and why; `wrong` is told what is not known.
pub(crate) fn ending(
    state: i16,
    reason: Option<i16>,
    wrong: &mut Option<String>,
) -> (RunState, Option<Reason>) {
    let known_state = RunState::from_code(state);
    if known_state.is_none() {
        wrong.get_or_insert_with(|| format!("its stored state {state} is not known"));
    }
    let known_reason = reason.and_then(Reason::from_code);
    if let Some(code) = reason.filter(|_| known_reason.is_none()) {
        wrong.get_or_insert_with(|| format!("its stored reason {code} is not known"));
    }
    (known_state.unwrap_or(RunState::Failed), known_reason)
}

/// The status of a schedule whose stored one is not known.
pub(crate) fn status(code: i64) -> Status {
    Status::Invalid { reason: format!("its stored status {code} is not known") }
}

/// What an attempt used; what cannot be read is nothing.
pub(crate) fn usage(text: Option<String>) -> Option<RunUsage> {
    serde_json::from_str(&text?).ok()
}
