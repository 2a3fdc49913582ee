//! Carries out what the driver asks of a store, and makes the input that answers it. The shell calls it with a real store;
//! a simulator calls it with a store that is slow, fails, or loses answers.

use std::time::Duration;

use belfry_core::breaker::{self, Admits};
use belfry_core::{NodeId, Reason, RunId, RunState};
use belfry_store::{
    Claim, Claimed, Commit, Committed, Definitions, Error, Mark, RunFilter, RunRecord, Store, Watch,
    commit_apart, finish_apart,
};
use belfry_time::Timestamp;
use tokio::time::timeout;

use crate::clock::Time;
use crate::driver::{Ask, Input};

/// Runs on a page that is looked at for those that a plan has ended.
const REPLACED_PAGE: u32 = 100;
/// Snapshots and nodes that are pruned at once.
const BEATS_BATCH: u32 = 500;

/// Asks the store, and gives the answer as an input.
pub async fn carry_out<S: Store + Watch>(store: &S, clock: &impl Time, ask: Ask) -> Input {
    let now = clock.now();
    match ask {
        Ask::Due { limit } => {
            match store.clock().await {
                Ok(Some(at)) => clock.follow(at),
                Ok(None) => {}
                Err(error) => return Input::Due { at: now.wall, due: Err(error), next: None },
            }
            let at = clock.now().wall;
            let due = store.due(at, None, limit).await;
            let next = match &due {
                Ok(due) if due.is_empty() => store.next_due().await.unwrap_or(None),
                _ => None,
            };
            Input::Due { at, due, next }
        }
        // Boxed like the other rare ones: the future of every question has the size of the largest answer here.
        Ask::Commit { commits, at, ahead } => Box::pin(commit(store, now.wall, &commits, at, ahead)).await,
        Ask::Claim(claim) => {
            let claimed = claim_with_definitions(store, now.wall, &claim).await;
            let (claimed, held) = match claimed {
                Ok(claimed) => {
                    let held = held_by_breakers(store, now.wall, &claimed).await;
                    (held.as_ref().map(|_| claimed).map_err(Clone::clone), held.unwrap_or_default())
                }
                Err(error) => (Err(error), Vec::new()),
            };
            let slots = claim.lanes.iter().map(|(_, slots)| slots).sum::<u32>().min(claim.total);
            // If slots are left, the driver wakes up for the next run that may take one; if that read fails, it polls.
            let next = match &claimed {
                Ok(claimed) if claim.only.is_none() && claimed.len() < slots as usize => {
                    store.next_start(now.wall).await.unwrap_or(None)
                }
                _ => None,
            };
            Input::Claimed { claimed, held, next }
        }
        Ask::Lanes(node) => {
            // A node that drains does not read what is due, and has to follow the store's clock: it renews its lease by it.
            if let Ok(Some(at)) = store.clock().await {
                clock.follow(at);
            }
            let lanes = store.lane_settings().await;
            // What cannot be read now is read the next time.
            let own = store.running_lanes(node).await.unwrap_or_default();
            Input::Lanes { lanes, own, unreadable: store.unreadable().await }
        }
        Ask::UnreadableRows => Input::UnreadableRows(store.unreadable_rows().await),
        Ask::Finish(finishes) => Input::Finished(Box::pin(finish_apart(store, now.wall, &finishes)).await),
        Ask::Renew { node, until } => {
            let renewed = match store.is_held() {
                // The keeper must hear of a store that takes long to write while its lease is still good.
                true => {
                    let lease = Duration::try_from(until.duration_since(now.wall)).unwrap_or_default();
                    let late = |_| Error::Unavailable { detail: "no answer in time".into(), ambiguous: true };
                    timeout(lease / 6, store.renew(node, until)).await.map_err(late).flatten()
                }
                false => store.renew(node, until).await,
            };
            Input::Renewed { asked: now.mono, renewed, is_held: store.is_held() }
        }
        Ask::Marks(node) => Input::Marks(store.marks(node).await),
        Ask::GiveBack(node, runs) => {
            let given_back = store.give_back(now.wall, node, &runs).await;
            let ids: Vec<RunId> = given_back.iter().flatten().map(|(run, _)| *run).collect();
            // It is done: if this read fails, it is told without names.
            let runs = store.runs_by_id(&ids).await.unwrap_or_default();
            Input::GivenBack { given_back, runs }
        }
        Ask::Breaker(of) => {
            let history = store.breaker(of.agent, &of.command).await.map(|record| record.history);
            Input::Breaker { of, history }
        }
        Ask::Budget { schedule, agent, policy } => {
            let used = store.schedule(&schedule).await.map(|record| record.and_then(|record| record.budget));
            Input::Budget { agent, policy, used }
        }
        Ask::Prune { retention, snapshots_before, nodes_before } => {
            // What is left goes the next time.
            let _ = Box::pin(store.prune_beats(snapshots_before, nodes_before, BEATS_BATCH)).await;
            Input::Pruned(Box::pin(store.prune(now.wall, &retention)).await)
        }
    }
}

/// Fences a node, and reads the runs that it had.
pub async fn fence<S: Store>(store: &S, now: Timestamp, node: NodeId, lease: Timestamp) -> Input {
    let rescued = store.fence(now, node, lease).await;
    let runs = match &rescued {
        Ok(Some(rescued)) => {
            let ended = rescued.ended.iter().map(|(run, _)| *run);
            let runs: Vec<RunId> = rescued.pending.iter().copied().chain(ended).collect();
            // It is done: if this read fails, it is told without names.
            store.runs_by_id(&runs).await.unwrap_or_default()
        }
        _ => Vec::new(),
    };
    Input::Fenced { node, rescued, runs }
}

/// Stores plans, and reads what is due behind the mark meanwhile.
async fn commit<S: Store>(
    store: &S,
    now: Timestamp,
    commits: &[Commit],
    at: Timestamp,
    ahead: Option<(Mark, u32)>,
) -> Input {
    let read = async {
        let (mark, limit) = ahead?;
        // What cannot be read now is asked for again.
        Some((now, store.due(now, Some(mark), limit).await.ok()?))
    };
    let (written, ahead) = tokio::join!(commit_apart(store, at, commits), read);
    let mut replaced = Vec::new();
    let held = commits.iter().zip(&written.answers);
    for (commit, _) in held.filter(|(_, answer)| **answer == Some(Committed::Held)) {
        if commit.cancel_live {
            // What cannot be read is not told.
            replaced.extend(replaced_by(store, at, commit).await.unwrap_or_default());
        }
    }
    Input::Committed { written, replaced: replaced.into(), ahead }
}

/// Waiting runs that a plan has ended, because its own runs take their place.
async fn replaced_by<S: Store>(store: &S, now: Timestamp, commit: &Commit) -> Result<Vec<RunRecord>, Error> {
    let Some(agent) = store.definitions(&[commit.schedule]).await?.into_iter().flatten().next() else {
        return Ok(Vec::new());
    };
    let filter = RunFilter {
        agent: Some(agent.agent_name.to_string()),
        states: vec![RunState::Cancelled],
        ..RunFilter::default()
    };
    let is_replaced = |run: &RunRecord| run.finished_at == Some(now) && run.reason == Some(Reason::Overlap);
    let (mut replaced, mut after) = (Vec::new(), None);
    // They were waiting, so they are among the newest: the first page without any ends the search.
    loop {
        let page = store.runs(&filter, after, REPLACED_PAGE).await?;
        let before = replaced.len();
        replaced.extend(page.items.into_iter().filter(is_replaced));
        after = page.next;
        if after.is_none() || replaced.len() == before {
            return Ok(replaced);
        }
    }
}

/// Those of claimed runs that their breakers do not let through now. The runs are claimed: if a breaker cannot be asked, a renewal
/// gives them back.
async fn held_by_breakers<S: Store>(
    store: &S,
    now: Timestamp,
    claimed: &[(Claimed, Option<Definitions>)],
) -> Result<Vec<RunId>, Error> {
    let has_breaker = |known: &Definitions| known.agent_definition.breaker.is_some();
    let is_gated = |(claimed, definitions): &&(Claimed, Option<Definitions>)| {
        breaker::is_gated(claimed.trigger, claimed.attempt) && definitions.as_ref().is_some_and(has_breaker)
    };
    let gated: Vec<&Claimed> = claimed.iter().filter(is_gated).map(|(claimed, _)| claimed).collect();
    if gated.is_empty() {
        return Ok(Vec::new());
    }
    let breakers: Vec<_> = gated.iter().map(|run| (run.agent, run.command.to_string())).collect();
    let tripped = store.tripped(&breakers).await?;
    let mut held = Vec::new();
    for (run, _) in gated.into_iter().zip(tripped).filter(|(_, is_tripped)| *is_tripped) {
        if store.pass_breaker(now, run.agent, &run.command, run.run).await? == Admits::No {
            held.push(run.run);
        }
    }
    Ok(held)
}

/// Claims runs and reads their definitions.
async fn claim_with_definitions<S: Store>(
    store: &S,
    now: Timestamp,
    claim: &Claim,
) -> Result<Vec<(Claimed, Option<Definitions>)>, Error> {
    let claimed = store.claim(now, claim).await?;
    if claimed.is_empty() {
        return Ok(Vec::new());
    }
    let schedules: Vec<_> = claimed.iter().map(|claimed| claimed.schedule).collect();
    // The runs are claimed: if this read fails, a renewal gives them back.
    let definitions = store.definitions(&schedules).await?;
    Ok(claimed.into_iter().zip(definitions).collect())
}
