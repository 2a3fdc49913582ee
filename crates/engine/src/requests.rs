//! Requests for runs that come at one moment are made together: one look at their schedules, and one commit.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use belfry_core::{Schedule, Trigger};
use belfry_store::{Defined, Definitions, Enqueue, Enqueued, Given, Key, LaneRecord, NewRun, Store};
use belfry_time::Timestamp;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::driver::Options;
use crate::engine::Engine;
use crate::error::Error;
use crate::ids::{hash, new_run_id};
use crate::runs::{Requested, RunRequest};
use crate::session::{Made, refuse_message_keys};

/// Requests that go into one commit: more would make the first wait too long.
const BATCH_MAX: usize = 1000;

/// Requests that wait for the commit before theirs: as many as there are callers that wait for an answer.
#[derive(Default)]
pub(crate) struct Requests(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    requests: Vec<Request>,
    /// A task makes them.
    is_served: bool,
}

struct Request {
    name: String,
    request: RunRequest,
    tell: oneshot::Sender<Result<Requested, Error>>,
}

/// The task that makes the requests of an engine.
struct Serving {
    engine: Engine,
    is_over: bool,
}

impl Serving {
    async fn run(mut self) {
        loop {
            let batch = {
                let mut waiting = self.engine.requests().0.lock();
                let count = waiting.requests.len().min(BATCH_MAX);
                self.is_over = count == 0;
                waiting.is_served = !self.is_over;
                waiting.requests.drain(..count).collect::<Vec<_>>()
            };
            if self.is_over {
                return;
            }
            let (asked, tells): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|request| ((request.name, request.request), request.tell)).unzip();
            for (tell, answer) in tells.into_iter().zip(self.engine.make(asked).await) {
                // Nobody may wait for it any more: the run is made all the same.
                let _ = tell.send(answer);
            }
        }
    }
}

/// A task that goes with its runtime leaves its requests without an answer, and the next request to another task.
impl Drop for Serving {
    fn drop(&mut self) {
        if !self.is_over {
            *self.engine.requests().0.lock() = Waiting::default();
        }
    }
}

/// A run of a schedule that is to be made, or why it cannot be.
type Prepared = Result<(NewRun, Arc<Schedule>), Error>;

impl Engine {
    /// Makes a run of a schedule now, beside its ticks. It counts for limits and moves no schedule. Requests of one moment are
    /// one commit.
    pub async fn trigger(&self, name: &str, request: RunRequest) -> Result<Requested, Error> {
        self.refuse_while_draining()?;
        let (tell, told) = oneshot::channel();
        let is_first = {
            let mut waiting = self.requests().0.lock();
            waiting.requests.push(Request { name: name.to_owned(), request, tell });
            !std::mem::replace(&mut waiting.is_served, true)
        };
        if is_first {
            // Apart from the caller, who may go away while others wait.
            let serving = Serving { engine: self.clone(), is_over: false };
            tokio::spawn(serving.run());
        }
        told.await.map_err(|_| Error::Status { status: "ending" })?
    }

    /// Makes many runs of a schedule, in order, a thousand in a commit. After an error none of its thousand is made; those before
    /// are.
    pub async fn trigger_many(
        &self,
        name: &str,
        requests: impl IntoIterator<Item = RunRequest>,
    ) -> Result<Vec<Requested>, Error> {
        self.refuse_while_draining()?;
        let (mut requests, mut made) = (requests.into_iter().peekable(), Vec::new());
        while requests.peek().is_some() {
            let batch: Vec<_> = requests.by_ref().take(BATCH_MAX).collect();
            let batch = batch.into_iter().map(|request| (name.to_owned(), request)).collect();
            for answer in self.make(batch).await {
                made.push(answer?);
            }
        }
        Ok(made)
    }

    /// Makes runs, and tells of them. The answers are in the order of the requests.
    async fn make(&self, asked: Vec<(String, RunRequest)>) -> Vec<Result<Requested, Error>> {
        let names: Vec<String> = asked.iter().map(|(name, _)| name.clone()).collect();
        let (now, prepared) = match self.enqueues(asked).await {
            Ok(prepared) => prepared,
            Err(error) => return names.iter().map(|_| Err(Error::Store(error.clone()))).collect(),
        };
        let requests: Vec<Enqueue> = prepared.iter().filter_map(|one| one.as_ref().ok().cloned()).collect();
        let mut enqueued = self.enqueue_apart(now, &requests).await.into_iter();
        let answers: Vec<_> = names
            .iter()
            .zip(prepared)
            .map(|(name, prepared)| {
                let run = prepared?.run;
                let enqueued = enqueued.next().unwrap_or(Ok(Enqueued::NotFound))?;
                self.enqueued(name, Trigger::Manual, &run, enqueued)
            })
            .collect();
        self.hint().await;
        answers
    }

    /// Stores requests. Where the store refuses one of them, or meets rows that somebody holds, each is stored by itself.
    async fn enqueue_apart(
        &self,
        now: Timestamp,
        requests: &[Enqueue],
    ) -> Vec<Result<Enqueued, belfry_store::Error>> {
        if requests.is_empty() {
            return Vec::new();
        }
        match self.store().enqueue_many(now, requests).await {
            Ok(answers) => answers.into_iter().map(Ok).collect(),
            Err(error) if error.is_of_part() && requests.len() > 1 => {
                let mut answers = Vec::with_capacity(requests.len());
                for request in requests {
                    answers.push(self.store().enqueue(now, request).await);
                }
                answers
            }
            Err(error) => vec![Err(error); requests.len()],
        }
    }

    /// What became of a run that somebody asked for. Tells of it if it is new.
    pub(crate) fn enqueued(
        &self,
        name: &str,
        trigger: Trigger,
        run: &NewRun,
        enqueued: Enqueued,
    ) -> Result<Requested, Error> {
        match enqueued {
            Enqueued::Made => {
                self.tell_created(name, Made::by(trigger, run.id, run.trace_id));
                Ok(Requested { run: run.id, is_new: true })
            }
            Enqueued::Repeat(first) => Ok(Requested { run: first, is_new: false }),
            Enqueued::KeyReused(run) => Err(Error::KeyReused { name: name.to_owned(), run }),
            Enqueued::NotFound => Err(Error::NotFound { name: name.to_owned() }),
        }
    }

    /// What is to be stored for requests: an error for each that asks for something which cannot be.
    async fn enqueues(
        &self,
        asked: Vec<(String, RunRequest)>,
    ) -> Result<(Timestamp, Vec<Result<Enqueue, Error>>), belfry_store::Error> {
        let now = match self.store_now().await {
            Ok(now) => now,
            Err(Error::Store(error)) => return Err(error),
            Err(error) => return Err(belfry_store::Error::Unexpected { detail: error.to_string() }),
        };
        let names: HashSet<&str> = asked.iter().map(|(name, _)| name.as_str()).collect();
        let names: Vec<&str> = names.into_iter().collect();
        let known = definitions_of(&**self.store(), &names).await?;
        let known: HashMap<String, Option<Definitions>> =
            names.iter().map(|name| (*name).to_owned()).zip(known).collect();
        let prepared = asked.into_iter().map(|(name, request)| {
            let definitions = known.get(&name).and_then(Option::as_ref);
            let (run, schedule) = by_hand(definitions, now, &name)?;
            enqueue_of(run, &schedule, now, request)
        });
        let mut prepared: Vec<Result<Enqueue, Error>> = prepared.collect();
        let runs: Vec<&mut NewRun> = prepared.iter_mut().flatten().map(|enqueue| &mut enqueue.run).collect();
        to_known_lanes(&**self.store(), self.options(), runs).await?;
        Ok((now, prepared))
    }
}

/// What schedules and their agents are now, by the names of the schedules.
async fn definitions_of(
    store: &impl Store,
    names: &[&str],
) -> Result<Vec<Option<Definitions>>, belfry_store::Error> {
    let ids = store.schedule_ids(names).await?;
    let there: Vec<_> = ids.iter().flatten().copied().collect();
    let mut found = store.definitions(&there).await?.into_iter();
    Ok(ids.into_iter().map(|id| id.and_then(|_| found.next().flatten())).collect())
}

/// A run of a schedule that is defined so, made by hand.
fn by_hand(definitions: Option<&Definitions>, now: Timestamp, name: &str) -> Prepared {
    let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
    let definitions = definitions.ok_or_else(|| Error::NotFound { name: name.to_owned() })?;
    if let Some(why) = &definitions.unreadable {
        return Err(Error::Unreadable { name: name.to_owned(), why: why.to_string() });
    }
    let compiled = definitions.compiled.clone().map_err(|why| Error::Trigger {
        agent: agent.into(),
        schedule: schedule.into(),
        detail: why.to_string(),
    })?;
    let defined =
        Defined::new(definitions.agent, definitions.schedule, &compiled, &definitions.agent_definition);
    Ok((NewRun::by_hand(defined, new_run_id(now), now), compiled))
}

/// A run with what came with the request for it, and its key.
fn enqueue_of(
    run: NewRun,
    schedule: &Schedule,
    now: Timestamp,
    request: RunRequest,
) -> Result<Enqueue, Error> {
    if schedule.chat.is_some() {
        refuse_message_keys(&request.payload)?;
    }
    let RunRequest { prompt, payload, trace_id, key } = request;
    let run = run.given(Given { prompt, payload, trace_id });
    let key = key.map(|key| {
        let body = serde_json::to_vec(&(&run.prompt, &run.payload)).unwrap_or_default();
        Key::new(key, hash(&body), now)
    });
    Ok(Enqueue { run, key })
}

/// A run of a schedule as it is now, to be enqueued: made by hand, to be started at once; and the schedule. What it lacks or
/// what is different about it, the caller says.
pub async fn prepare(
    store: &impl Store,
    options: &Options,
    now: Timestamp,
    name: &str,
) -> Result<(NewRun, Arc<Schedule>), Error> {
    let definitions = definitions_of(store, &[name]).await?.pop().flatten();
    let (mut run, schedule) = by_hand(definitions.as_ref(), now, name)?;
    to_known_lanes(store, options, [&mut run]).await?;
    Ok((run, schedule))
}

/// A run of a lane that nobody made goes to `main`, and stays there. Gives the lanes that nobody made.
pub(crate) async fn to_known_lanes(
    store: &impl Store,
    options: &Options,
    runs: impl IntoIterator<Item = &mut NewRun>,
) -> Result<Vec<String>, belfry_store::Error> {
    let (mut known, mut unknown) = (None::<Vec<LaneRecord>>, Vec::new());
    for run in runs.into_iter().filter(|run| !options.lanes.contains_key(&run.lane)) {
        let lanes = match known.take() {
            Some(lanes) => lanes,
            None => store.lane_settings().await?,
        };
        if !lanes.iter().any(|lane| lane.name == run.lane && lane.settings().is_some()) {
            unknown.push(run.move_to_main());
        }
        known = Some(lanes);
    }
    Ok(unknown)
}
