//! Ways to break Belfry on purpose, so that tests can show that they notice. Each is a fault that Belfry once had, or could
//! have. Without the feature `testing`, and in every release build, nothing is broken and nothing is asked.

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Broken {
    /// A pause forgets the ticks that are overdue.
    PauseDropsOverdue,
    /// The last planned tick is forgotten, so that ticks fire again after the clock was set back.
    FiresAgain,
    /// A plan trusts a clock that was set back after what is due was read.
    PlansWithEarlierClock,
    /// A missed tick runs although the window of its schedule is closed.
    CatchUpOutsideWindow,
    /// A missed tick that waits is not looked at again when it starts.
    CatchUpStartsAnyway,
    /// A tick that is on time starts before those that were missed.
    MissedAfterOnTime,
    /// Missed ticks that `catch_up` leaves out are recorded nowhere.
    MissedNotRecorded,
    /// An edit of the timing forgets the ticks that are overdue.
    EditForgetsOverdue,
    /// The limit of an agent lets one run too many start.
    LimitOneTooMany,
    /// A lane's limit over all nodes does not count what is running.
    LaneLimitIgnored,
    /// A run that comes back goes to the end of its queue.
    QueueByRetry,
    /// Runs of a schedule that queues start beside each other.
    TurnIgnored,
    /// A node that was fenced can claim runs.
    FencedNodeClaims,
    /// The end of an attempt does not look at the epoch.
    FinishWithoutEpoch,
    /// Of the runs of a dead node one is forgotten.
    RescueForgetsOne,
    /// An attempt that is repeated does not count.
    RetryNotCounted,
    /// A run that was never started and is given back has used up an attempt.
    GiveBackCounts,
    /// Cancelling a run that waits does nothing.
    CancelLost,
    /// The runs of sessions count for the overlap of other schedules.
    ScopeCountsSessions,
    /// A breaker waits for ever for a probe that was cancelled.
    ProbeNeverFreed,
    /// A failed attempt that is repeated is not taken from the budget.
    BudgetIgnoresRetries,
    /// A node looks for work only if it gets a hint.
    HintsAreAll,
    /// A reload retires the schedules of other sources.
    ReloadRetiresForeign,
    /// The runs of a session do not wait for each other.
    SessionTwoAtOnce,
    /// A tick that waits for room in its lane is forgotten.
    DeferredForgotten,
    /// A tick that was deferred waits for a clock that was set back.
    DeferredByLaterClock,
    /// A run waits until a clock that was set back shows the instant at which it was made.
    RunByLaterClock,
    /// A schedule that was removed and comes back knows nothing of what was planned before.
    ReturnsWithoutPast,
    /// A plan is committed although another node has planned the same tick.
    PlannedTwice,
    /// The end of a run does not arm the schedule that waits for it.
    EndArmsNothing,
    /// Runs that cannot start for now take places of their lane's `queue_limit`.
    QueueLimitCountsAll,
    /// Runs that wait for their turn behind a run that was put off take places of their lane's `queue_limit`.
    QueueLimitCountsTurns,
    /// A node takes runs whose labels it has not.
    LabelsIgnored,
    /// A run that comes back after the clock was set back counts as put off by the clock as it is.
    BackByThisClock,
}

impl Broken {
    /// Everything that can be broken.
    pub const ALL: [Broken; 34] = [
        Broken::PauseDropsOverdue,
        Broken::FiresAgain,
        Broken::PlansWithEarlierClock,
        Broken::CatchUpOutsideWindow,
        Broken::CatchUpStartsAnyway,
        Broken::MissedAfterOnTime,
        Broken::MissedNotRecorded,
        Broken::EditForgetsOverdue,
        Broken::LimitOneTooMany,
        Broken::LaneLimitIgnored,
        Broken::QueueByRetry,
        Broken::TurnIgnored,
        Broken::FencedNodeClaims,
        Broken::FinishWithoutEpoch,
        Broken::RescueForgetsOne,
        Broken::RetryNotCounted,
        Broken::GiveBackCounts,
        Broken::CancelLost,
        Broken::ScopeCountsSessions,
        Broken::ProbeNeverFreed,
        Broken::BudgetIgnoresRetries,
        Broken::HintsAreAll,
        Broken::ReloadRetiresForeign,
        Broken::SessionTwoAtOnce,
        Broken::DeferredForgotten,
        Broken::DeferredByLaterClock,
        Broken::RunByLaterClock,
        Broken::ReturnsWithoutPast,
        Broken::PlannedTwice,
        Broken::EndArmsNothing,
        Broken::QueueLimitCountsAll,
        Broken::QueueLimitCountsTurns,
        Broken::LabelsIgnored,
        Broken::BackByThisClock,
    ];
}

#[cfg(all(feature = "testing", debug_assertions))]
thread_local! {
    static BROKEN: std::cell::Cell<Option<Broken>> = const { std::cell::Cell::new(None) };
}

/// Whether this is broken on this thread.
#[inline]
pub fn is(broken: Broken) -> bool {
    #[cfg(all(feature = "testing", debug_assertions))]
    return BROKEN.get() == Some(broken);
    #[cfg(not(all(feature = "testing", debug_assertions)))]
    {
        let _ = broken;
        false
    }
}

/// Does some work with this broken on this thread; in a release build, with nothing broken.
#[cfg(feature = "testing")]
pub fn with<T>(broken: Broken, work: impl FnOnce() -> T) -> T {
    #[cfg(debug_assertions)]
    BROKEN.set(Some(broken));
    let done = work();
    #[cfg(debug_assertions)]
    BROKEN.set(None);
    let _ = broken;
    done
}
