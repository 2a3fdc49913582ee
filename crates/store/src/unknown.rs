//! Numbers in rows that this version does not know, as a newer one or a mistake may leave them. They are read as something
//! that does no harm, and said where that is possible; one row never fails a list.

use belfry_core::check::Status;
use belfry_core::{Reason, RunState, SkipReason, TokenKind};

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
