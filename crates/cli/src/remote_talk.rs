//! Conversations and lanes, over HTTP: the same words as where the store is opened.

use belfry::api::{Lane, Run, Schedule, Session};
use belfry::{RunId, SendOptions, SessionDone, Taken};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::{Client, encoded};
use crate::failure::Failure;
use crate::output::Output;
use crate::remote::{self, Wait, key_header};
use crate::stop::tell_stopped;

/// The path of a session, or of something of it; the schedule may be left out where the agent has one chat.
async fn path(client: &Client, target: &str, key: &str, rest: &str) -> Result<String, Failure> {
    let (agent, schedule) = match target.split_once('/') {
        Some((agent, schedule)) => (agent.to_owned(), schedule.to_owned()),
        None => {
            let all: Vec<Schedule> =
                client.list(&format!("/api/v1/schedules?agent={}", encoded(target)), usize::MAX).await?;
            let chats: Vec<&Schedule> = all.iter().filter(|schedule| schedule.kind == "chat").collect();
            match chats.as_slice() {
                [chat] => (chat.agent.clone(), chat.schedule.clone()),
                [] => return Err(Failure::NotFound(format!("agent {target} has no chat schedule"))),
                _ => {
                    let words = format!("agent {target} has several chats: say which, AGENT/SCHEDULE");
                    return Err(Failure::Usage(words));
                }
            }
        }
    };
    if key.is_empty() {
        return Err(Failure::Usage("the key of a session is empty".into()));
    }
    Ok(format!("/api/v1/sessions/{}/{}/{}{rest}", encoded(&agent), encoded(&schedule), encoded(key)))
}

/// What a server says of a message or a stop.
#[derive(Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
enum Said {
    Taken(Taken),
    Stopped(Done),
    NothingRunning(Done),
}

#[derive(Deserialize)]
struct Done {
    generation: i64,
    ended: Vec<RunId>,
    told: Vec<RunId>,
}

fn done(done: Done) -> SessionDone {
    SessionDone { generation: done.generation, ended: done.ended, told: done.told }
}

/// What came of a message.
pub enum Sent {
    /// It was a stop, and that was told.
    Stopped,
    /// Its run was waited for, and that was told.
    Waited,
    /// It is in a run.
    Taken(Box<Taken>),
}

/// Sends a message, and waits for its run where that is wanted.
pub async fn send(
    client: &Client,
    (target, key): (&str, &str),
    text: &str,
    with: SendOptions,
    wait: Wait,
    output: &Output,
) -> Result<Sent, Failure> {
    let path = path(client, target, key, "/messages").await?;
    let mut body = json!({"text": text, "payload": with.payload});
    let optional = [
        ("mode", json!(with.mode)),
        ("lane", json!(with.lane)),
        ("max_concurrent", json!(with.max_concurrent)),
        ("sent_at", json!(with.sent_at)),
        ("generation", json!(with.generation)),
    ];
    for (name, value) in optional.into_iter().filter(|(_, value)| !value.is_null()) {
        body[name] = value;
    }
    let said: Said = client.send(Method::POST, &path, Some(&body), &key_header(with.key.as_deref())).await?;
    match said {
        Said::Stopped(stopped) | Said::NothingRunning(stopped) => {
            tell_stopped(&done(stopped), output)?;
            Ok(Sent::Stopped)
        }
        Said::Taken(taken) if matches!(wait, Wait::Until(_)) => {
            let run: Run = client.get(&format!("/api/v1/runs/{}", taken.run)).await?;
            remote::see_to(client, run, wait, output).await?;
            Ok(Sent::Waited)
        }
        Said::Taken(taken) => Ok(Sent::Taken(Box::new(taken))),
    }
}

/// Stops a session: one run, or all of them.
pub async fn stop(client: &Client, (target, key): (&str, &str), all: bool) -> Result<SessionDone, Failure> {
    let path = path(client, target, key, if all { "/stopall" } else { "/stop" }).await?;
    match client.send(Method::POST, &path, None, &[]).await? {
        Said::Stopped(stopped) | Said::NothingRunning(stopped) => Ok(done(stopped)),
        Said::Taken(_) => Err(Failure::Unreachable("the server answers something else".into())),
    }
}

/// Begins a session anew; gives it.
pub async fn reset(client: &Client, (target, key): (&str, &str)) -> Result<Session, Failure> {
    let path = path(client, target, key, "/reset").await?;
    client.send(Method::POST, &path, None, &[]).await
}

/// Lists sessions, all or those of an agent or a chat.
pub async fn sessions(client: &Client, name: Option<&str>) -> Result<Vec<Session>, Failure> {
    let query = match name.map(|name| name.split_once('/').map_or((name, None), |(a, s)| (a, Some(s)))) {
        None => String::new(),
        Some((agent, None)) => format!("?agent={}", encoded(agent)),
        Some((agent, Some(schedule))) => format!("?agent={}&schedule={}", encoded(agent), encoded(schedule)),
    };
    client.list(&format!("/api/v1/sessions{query}"), usize::MAX).await
}

/// All lanes.
pub async fn lanes(client: &Client) -> Result<Vec<Lane>, Failure> {
    Ok(client.get::<belfry::api::List<Lane>>("/api/v1/lanes").await?.items)
}

/// Changes a lane; gives it.
pub async fn set_lane(client: &Client, lane: &str, change: &Value) -> Result<Lane, Failure> {
    client.send(Method::PATCH, &format!("/api/v1/lanes/{}", encoded(lane)), Some(change), &[]).await
}

/// Ends what waits in a lane; gives the runs.
pub async fn clear_lane(client: &Client, lane: &str) -> Result<Vec<RunId>, Failure> {
    #[derive(Deserialize)]
    struct Cleared {
        ended: Vec<RunId>,
    }
    let path = format!("/api/v1/lanes/{}/clear", encoded(lane));
    Ok(client.send::<Cleared>(Method::POST, &path, None, &[]).await?.ended)
}
