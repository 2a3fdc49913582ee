//! What changes something, over HTTP: the same words as where the store is opened.

use std::time::{Duration, Instant};

use belfry::api::Run;
use belfry::{RunId, RunState};
use belfry_time::{Timestamp, Zone};
use hyper::Method;
use hyper::header::HeaderName;
use serde_json::{Value, json};

use crate::client::{Client, encoded, schedule_path};
use crate::failure::Failure;
use crate::output::Output;
use crate::reach;

/// A server waits no longer in one request.
const WAIT_MS: u64 = 30_000;

/// How long to wait for a run.
#[derive(Debug, Clone, Copy)]
pub enum Wait {
    No,
    Until(Option<Instant>),
}

/// Makes a run, and waits for it where that is wanted.
pub async fn run(
    client: &Client,
    name: &str,
    body: Value,
    key: Option<&str>,
    wait: Wait,
    output: &Output,
) -> Result<(), Failure> {
    let path = schedule_path(name, "/run")?;
    let made: Run = client.send(Method::POST, &path, Some(&body), &key_header(key)).await?;
    see_to(client, made, wait, output).await
}

/// Repeats a run, and waits for it where that is wanted.
pub async fn retry(client: &Client, run: RunId, wait: Wait, output: &Output) -> Result<(), Failure> {
    let made: Run = client.send(Method::POST, &format!("/api/v1/runs/{run}/retry"), None, &[]).await?;
    see_to(client, made, wait, output).await
}

pub fn key_header(key: Option<&str>) -> Vec<(HeaderName, &str)> {
    key.map(|key| (HeaderName::from_static("idempotency-key"), key)).into_iter().collect()
}

/// Tells of a run that was made, and waits for it where that is wanted.
pub async fn see_to(client: &Client, made: Run, wait: Wait, output: &Output) -> Result<(), Failure> {
    let Wait::Until(until) = wait else {
        return reach::answer(output, &json!({"run_id": made.id}), &made.id.to_string());
    };
    let ended = ended(client, made.id, until).await?;
    let mut answer = json!({"run_id": ended.id, "state": ended.state});
    for (key, value) in [
        ("reason", json!(ended.reason)),
        ("exit_code", json!(ended.exit_code)),
        ("error", json!(ended.error)),
    ] {
        if !value.is_null() {
            answer[key] = value;
        }
    }
    reach::answer(output, &answer, &ended.id.to_string())?;
    match ended.state {
        RunState::Completed => Ok(()),
        state => {
            let why = ended.reason.map_or(String::new(), |reason| format!(" ({reason})"));
            Err(Failure::Run(format!("{}/{} {state}{why}", ended.agent, ended.schedule)))
        }
    }
}

async fn ended(client: &Client, run: RunId, until: Option<Instant>) -> Result<Run, Failure> {
    loop {
        let found: Run = client.get(&format!("/api/v1/runs/{run}")).await?;
        if !found.state.is_live() {
            return Ok(found);
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(Failure::Timeout(format!("run {run} is still {}; it goes on", found.state)));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Cancels a run, and waits for its end where that is wanted.
pub async fn cancel(client: &Client, what: &str, wait: bool, output: &Output) -> Result<(), Failure> {
    if what.contains('/') {
        return Err(Failure::Usage(
            "over --server a run is cancelled by its id; `belfry runs` lists them".into(),
        ));
    }
    let run = reach::run_id(what)?;
    let body = json!({"wait_ms": if wait { WAIT_MS } else { 0 }});
    let run: Run = client.post(&format!("/api/v1/runs/{run}/cancel"), &body).await?;
    let words = match run.state {
        RunState::Running => format!("{} is told to end", run.id),
        state => format!("{} {state}", run.id),
    };
    let answer = json!({"cancelled": [{"run_id": run.id, "state": run.state}]});
    reach::answer(output, &answer, &words)
}

/// The schedules that are meant: one, or all of an agent.
async fn meant(client: &Client, name: &str) -> Result<Vec<belfry::api::Schedule>, Failure> {
    if name.contains('/') {
        return Ok(vec![client.get(&schedule_path(name, "")?).await?]);
    }
    client.get::<Value>(&format!("/api/v1/agents/{}", encoded(name))).await?;
    client.list(&format!("/api/v1/schedules?agent={}", encoded(name)), usize::MAX).await
}

/// Pauses schedules.
pub async fn pause(
    client: &Client,
    names: &[String],
    reason: Option<&str>,
    until: Option<Timestamp>,
    zone: &Zone,
    output: &Output,
) -> Result<(), Failure> {
    let end = until
        .map_or("until it is resumed".into(), |until| format!("until {}", crate::up::local(until, zone)));
    let (mut paused, mut unchanged, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    for name in names {
        for schedule in meant(client, name).await? {
            let full = schedule.name();
            let body = json!({"reason": reason, "until": until});
            match client.post::<Value>(&schedule_path(&full, "/pause")?, &body).await {
                Ok(_) => {
                    lines.push(format!("{full} paused {end}"));
                    paused.push(full);
                }
                // Of several, those that cannot be paused need not be.
                Err(Failure::Usage(why)) if names.len() > 1 || !name.contains('/') => {
                    lines.push(format!("{full} left as it is: {why}"));
                    unchanged.push(full);
                }
                Err(other) => return Err(other),
            }
        }
    }
    let answer = json!({"paused": paused, "until": until, "unchanged": unchanged});
    reach::answer(output, &answer, &lines.join("\n"))
}

/// Resumes schedules.
pub async fn resume(
    client: &Client,
    names: &[String],
    catch_up: bool,
    output: &Output,
) -> Result<(), Failure> {
    let (mut resumed, mut unchanged, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    for name in names {
        for schedule in meant(client, name).await? {
            let full = schedule.name();
            if schedule.status != belfry::api::ScheduleStatus::Paused {
                lines.push(format!("{full} left as it is: it is not paused"));
                unchanged.push(full);
                continue;
            }
            client.post::<Value>(&schedule_path(&full, "/resume")?, &json!({"catch_up": catch_up})).await?;
            lines.push(format!("{full} resumed"));
            resumed.push(json!({"schedule": full}));
        }
    }
    reach::answer(output, &json!({"resumed": resumed, "unchanged": unchanged}), &lines.join("\n"))
}

/// Removes a schedule.
pub async fn remove(client: &Client, name: &str, output: &Output) -> Result<(), Failure> {
    let gone: Value = client.send(Method::DELETE, &schedule_path(name, "")?, None, &[]).await?;
    let words = match gone["cancelled"].as_u64() {
        None | Some(0) => format!("{name} removed"),
        Some(cancelled) => format!("{name} removed; {cancelled} waiting runs ended"),
    };
    let answer = json!({"schedule": name, "result": "removed", "cancelled": gone["cancelled"]});
    reach::answer(output, &answer, &words)
}

/// Tells the server to read its files again.
pub async fn reload(client: &Client, output: &Output) -> Result<(), Failure> {
    let done: Value = client.send(Method::POST, "/api/v1/reload", None, &[]).await?;
    let words = done["detail"].as_str().unwrap_or_default().to_owned();
    reach::answer(output, &done, &words)
}
