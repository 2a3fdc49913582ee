//! Batches of plans and ends, written although a store refuses one of them for its content, or holds something that it
//! cannot read beside one of them.
//!
//! Such a batch is split until the culprit stands alone. The culprit is then written in a lesser form: a plan makes
//! its schedule invalid, an end is stored without its texts. Where that is refused as well, the schedule is left
//! alone for a while, and the end is tried again later. So it goes with those whose rows another transaction holds for
//! long, in their full form: the store says which these are, and the others are written without them. A store that is
//! away, busy or full refuses nothing: what was not answered is asked again by the caller.

use std::future::Future;

use belfry_core::RunState;
use belfry_core::text::bounded;
use belfry_time::Timestamp;

use crate::error::Error;
use crate::shapes::{Arm, Commit, Committed, Finish, Finished};
use crate::store::{Answer, Store};
use crate::views::{RefusedPart, TickFate};

/// So many parts of a batch are found to be locked before the rest is left for later: each takes time to find.
const LOCKED_MAX: u32 = 8;

/// What became of a batch.
#[derive(Debug)]
pub struct Written<T, A> {
    /// The answer to each part, in order; none where it was not written.
    pub answers: Vec<Option<A>>,
    /// Parts that were written in a lesser form, with their places.
    pub changed: Vec<(usize, T)>,
    /// Why parts were not written, where some were not.
    pub error: Option<Error>,
}

/// Commits plans. A plan that the store refuses is committed without the runs that live already, else it makes its schedule
/// invalid. After a crash each plan is committed as a whole or not at all.
pub async fn commit_apart<S: Store>(
    store: &S,
    now: Timestamp,
    commits: &[Commit],
) -> Written<Commit, Committed> {
    write_apart(store, now, commits).await
}

/// Stores the ends of attempts. An end that the store refuses is stored without its texts and figures, so that the run ends.
/// After a crash each end is stored as a whole or not at all.
pub async fn finish_apart<S: Store>(
    store: &S,
    now: Timestamp,
    finishes: &[Finish],
) -> Written<Finish, Finished> {
    write_apart(store, now, finishes).await
}

/// A part of a batch.
trait Part: Clone + Send + Sync {
    type Answer: Clone + Send;

    fn write<S: Store>(
        store: &S,
        now: Timestamp,
        parts: &[Self],
    ) -> impl Future<Output = Answer<Vec<Self::Answer>>> + Send;

    /// Whether another transaction holds a row of each part.
    fn held<S: Store>(store: &S, parts: &[Self]) -> impl Future<Output = Answer<Vec<bool>>> + Send;

    /// What can be written in its place, the most of it first.
    fn lesser<S: Store>(&self, store: &S, error: &Error) -> impl Future<Output = Vec<Self>> + Send;

    /// What it is, where it cannot be written in any form, or is locked.
    fn refused(&self, error: &Error) -> RefusedPart;
}

async fn write_apart<T: Part, S: Store>(store: &S, now: Timestamp, parts: &[T]) -> Written<T, T::Answer> {
    let error = match T::write(store, now, parts).await {
        Ok(answers) => {
            let answers = answers.into_iter().map(Some).collect();
            return Written { answers, changed: Vec::new(), error: None };
        }
        Err(error) if !error.is_of_part() => {
            return Written { answers: vec![None; parts.len()], changed: Vec::new(), error: Some(error) };
        }
        Err(error) => error,
    };
    let held = match error.is_locked() && parts.len() > 1 {
        true => T::held(store, parts).await.unwrap_or_default(),
        false => Vec::new(),
    };
    let count = held.iter().filter(|held| **held).count();
    if count == 0 {
        return write_halves(store, now, parts).await;
    }
    let (mut free, mut places) = (Vec::new(), Vec::new());
    for (place, part) in parts.iter().enumerate() {
        if held[place] {
            note_refusal(store, now, part, &error).await;
        } else {
            free.push(part.clone());
            places.push(place);
        }
    }
    let rest = write_halves(store, now, &free).await;
    let mut written = Written { answers: vec![None; parts.len()], changed: Vec::new(), error: None };
    for (place, answer) in places.iter().zip(rest.answers) {
        written.answers[*place] = answer;
    }
    written.changed = rest.changed.into_iter().map(|(at, part)| (places[at], part)).collect();
    written.error = rest.error.filter(|error| !error.is_of_part()).or(Some(error));
    written
}

/// Notes a part that cannot be written. A store that refuses this as well is told of by events alone.
async fn note_refusal<T: Part, S: Store>(store: &S, now: Timestamp, part: &T, error: &Error) {
    let _ = store.note_refusal(now, part.refused(error), &bounded(&error.to_string(), 500)).await;
}

/// Writes parts; those that are refused are found by halving.
async fn write_halves<T: Part, S: Store>(store: &S, now: Timestamp, parts: &[T]) -> Written<T, T::Answer> {
    let mut written = Written { answers: Vec::with_capacity(parts.len()), changed: Vec::new(), error: None };
    // Lengths of what is left to write, the next one last.
    let mut lengths = vec![parts.len()];
    let mut locked = 0;
    while let Some(length) = lengths.pop() {
        let from = written.answers.len();
        match T::write(store, now, &parts[from..from + length]).await {
            Ok(answers) => written.answers.extend(answers.into_iter().map(Some)),
            Err(error) if !error.is_of_part() => {
                written.error = Some(error);
                break;
            }
            Err(error) if error.is_locked() && locked == LOCKED_MAX => {
                let detail = error.to_string();
                written.error = Some(Error::Unavailable { detail, ambiguous: false });
                break;
            }
            Err(_) if length > 1 => lengths.extend([length - length / 2, length / 2]),
            Err(error) => match write_lesser(store, now, &parts[from], error).await {
                Ok((part, answer)) => {
                    written.changed.push((from, part));
                    written.answers.push(Some(answer));
                }
                Err(error) => {
                    let is_of_part = error.is_of_part();
                    if is_of_part {
                        note_refusal(store, now, &parts[from], &error).await;
                    }
                    locked += u32::from(error.is_locked());
                    written.error = Some(error);
                    if !is_of_part {
                        break;
                    }
                    written.answers.push(None);
                }
            },
        }
    }
    written.answers.resize(parts.len(), None);
    written
}

/// Writes the most of a part that the store takes. Of one that is locked nothing is left out.
async fn write_lesser<T: Part, S: Store>(
    store: &S,
    now: Timestamp,
    part: &T,
    mut error: Error,
) -> Answer<(T, T::Answer)> {
    if error.is_locked() {
        return Err(error);
    }
    for lesser in part.lesser(store, &error).await {
        match T::write(store, now, std::slice::from_ref(&lesser)).await {
            Ok(mut answers) => {
                let answer = answers.pop().ok_or_else(|| Error::unexpected("no answer to a write"))?;
                return Ok((lesser, answer));
            }
            Err(again) if again.is_of_content() => error = again,
            Err(again) => return Err(again),
        }
    }
    Err(error)
}

impl Part for Commit {
    type Answer = Committed;

    async fn write<S: Store>(store: &S, now: Timestamp, parts: &[Commit]) -> Answer<Vec<Committed>> {
        store.commit(now, parts).await
    }

    async fn held<S: Store>(store: &S, parts: &[Commit]) -> Answer<Vec<bool>> {
        let held = store.held_schedules(&parts.iter().map(|part| part.schedule).collect::<Vec<_>>()).await?;
        Ok(parts.iter().map(|part| held.contains(&part.schedule)).collect())
    }

    async fn lesser<S: Store>(&self, store: &S, error: &Error) -> Vec<Commit> {
        let error = error.to_string();
        let error = bounded(&error, 500);
        let invalid = format!("its tick could not be stored: {error}. `resume` tries again");
        vec![self.without_live_ticks(store).await, self.made_invalid(&invalid)]
    }

    fn refused(&self, error: &Error) -> RefusedPart {
        match error.is_locked() {
            true => RefusedPart::LockedPlan(self.schedule),
            false => RefusedPart::Plan(self.schedule),
        }
    }
}

impl Commit {
    /// The plan without the runs of ticks that have a live run already. Where none has, the plan as it is: a run that it was
    /// refused for may have ended since.
    async fn without_live_ticks<S: Store>(&self, store: &S) -> Commit {
        let mut plan = self.clone();
        for run in &self.runs {
            let Some(tick_at) = run.tick_at else { continue };
            let Ok(TickFate::Run(known)) = store.tick(self.schedule, tick_at).await else { continue };
            if !matches!(known.state, RunState::Pending | RunState::Running) {
                continue;
            }
            plan.runs.retain(|other| other.id != run.id);
            // The tick has its run: that one is not to be cancelled, and is the one to wait for.
            plan.cancel_live = false;
            if plan.next == Arm::Wait(run.id) {
                plan.next = Arm::Wait(known.id);
            }
        }
        plan
    }
}

impl Part for Finish {
    type Answer = Finished;

    async fn write<S: Store>(store: &S, now: Timestamp, parts: &[Finish]) -> Answer<Vec<Finished>> {
        store.finish(now, parts).await
    }

    async fn held<S: Store>(store: &S, parts: &[Finish]) -> Answer<Vec<bool>> {
        let held = store.held_runs(&parts.iter().map(|part| part.run).collect::<Vec<_>>()).await?;
        Ok(parts.iter().map(|part| held.contains(&part.run)).collect())
    }

    async fn lesser<S: Store>(&self, _store: &S, error: &Error) -> Vec<Finish> {
        let error = format!("could not be stored: {}", bounded(&error.to_string(), 500));
        let without_text = Finish { error: Some(error), summary: None, usage: None, ..self.clone() };
        let bare = Finish { exit_code: None, arm: None, ..without_text.clone() };
        vec![without_text, bare]
    }

    fn refused(&self, _error: &Error) -> RefusedPart {
        RefusedPart::End(self.run)
    }
}

#[cfg(test)]
mod tests {
    use belfry_core::definition::When;
    use belfry_core::plan::plan;
    use belfry_core::{AgentDefinition, AgentSpec, RunId, ScheduleDefinition};
    use uuid::Uuid;

    use super::*;
    use crate::memory::Memory;

    #[tokio::test]
    async fn a_plan_that_was_refused_for_a_run_that_has_ended_since_is_written_as_it_is() {
        let store = Memory::new();
        let mut now: Timestamp = "2026-03-02T11:59:30Z".parse().unwrap();
        let every_minute = ScheduleDefinition::new(When::Cron("* * * * *".into()));
        let agent = AgentSpec {
            name: "a".into(),
            definition: AgentDefinition::default(),
            schedules: vec![("s".into(), every_minute)],
        };
        store.apply(now, "files", "digest", &[agent]).await.unwrap();
        let mut commit = None;
        for _ in 0..2 {
            let due = store.due(now, None, 1).await.unwrap();
            let schedule = due[0].compiled.clone().unwrap();
            let planned = plan(&schedule, &due[0].standing, &due[0].facts(now), now);
            let made = due[0].commit(&schedule, planned, || RunId(Uuid::from_u128(1)));
            store.commit(now, std::slice::from_ref(&made)).await.unwrap();
            commit = Some(made);
            now = "2026-03-02T12:00:00Z".parse().unwrap();
        }
        let commit = commit.unwrap();
        assert_eq!(commit.runs.len(), 1);
        let refused = Error::Refused { detail: "it lives".into() };
        let while_it_lives = commit.lesser(&store, &refused).await;
        assert!(while_it_lives[0].runs.is_empty() && while_it_lives[0].invalid.is_none());
        store.cancel(now, commit.runs[0].id, belfry_core::Reason::Requested).await.unwrap();
        let lesser = commit.lesser(&store, &refused).await;
        assert_eq!(lesser[0], commit);
        assert!(lesser[1].invalid.is_some(), "if that is refused, too");
    }
}
