//! How a command is answered: by a server over HTTP, or by the same routes in this process where none runs. Whoever asks does
//! not see which: JSON in and out, and problems as failures with the exit codes that everything has.

use std::sync::Mutex;
use std::time::Duration;

use belfry::api::{Agent, List, Node, NodeStatus, Run};
use belfry::{GUEST, RunId};
use belfry_server::Inside;
use belfry_store::Holder;
use belfry_time::Timestamp;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Limited};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::events::Stream;
use crate::failure::Failure;
use crate::link::{Link, Sender};
use crate::pages::Pages;
use crate::reach::{Reach, Server};
use crate::words;

/// Maximum time to the end of an answer, and to the beginning of a slow one. No command asks a server to wait.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Maximum time to the beginning of an answer to any request of `belfry api`, which may ask to wait for a minute.
const ANY_WITHIN: Duration = Duration::from_secs(75);
/// How the paths of requests end that may take longer than others.
const SLOW: [&str; 2] = ["/backfill", "/reload"];
/// Whoever is told to wait longer is told no.
const WAIT_MAX: Duration = Duration::from_secs(15);
/// Longer answers are none of ours: a list comes page by page.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// Who answers.
pub struct Client {
    way: Way,
    /// What time it was for the store at the last answer.
    now: Mutex<Option<Timestamp>>,
}

enum Way {
    /// A server.
    Over(Link),
    /// This process, from the store.
    Here(Box<(Reach, Inside)>),
}

/// An answer whose body is still to come.
struct Answer {
    status: StatusCode,
    /// When to ask again.
    retry_after: Option<Duration>,
    body: Body,
    /// What it came over.
    sender: Option<Sender>,
}

/// The answer of `/readyz`.
#[derive(Deserialize)]
pub struct Readiness {
    pub ready: bool,
    pub checks: Vec<ReadyCheck>,
}

/// One thing that a server looked at.
#[derive(Deserialize)]
pub struct ReadyCheck {
    pub check: String,
    pub ok: bool,
    pub detail: String,
}

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, String>;

impl Client {
    /// A server.
    pub fn over(link: Link) -> Client {
        Client { way: Way::Over(link), now: Mutex::default() }
    }

    /// This process.
    pub fn here(reach: Reach, inside: Inside) -> Client {
        Client { way: Way::Here(Box::new((reach, inside))), now: Mutex::default() }
    }

    /// The store, where this process has opened it.
    pub fn reach(&self) -> Option<&Reach> {
        match &self.way {
            Way::Over(_) => None,
            Way::Here(here) => Some(&here.0),
        }
    }

    /// Whether somebody plans and runs what is in the store.
    pub fn is_served(&self) -> bool {
        self.reach().is_none_or(|reach| reach.server.is_some())
    }

    /// Who that is.
    pub async fn server(&self) -> Result<Option<Server>, Failure> {
        match &self.way {
            Way::Here(here) => Ok(here.0.server),
            Way::Over(Link { process: Some(pid), .. }) => {
                Ok(Some(Server::Process(Holder { pid: Some(*pid) })))
            }
            Way::Over(_) => {
                let nodes = self.get::<List<Node>>("/api/v1/nodes").await?.items;
                let serves = |node: &&Node| {
                    node.status != NodeStatus::Dead && !node.labels.iter().any(|label| label == GUEST)
                };
                Ok(Some(Server::Nodes(nodes.iter().filter(serves).count())))
            }
        }
    }

    /// What time it is for the store, as the last answer said.
    pub fn now(&self) -> Timestamp {
        let now = self.now.lock().ok().and_then(|now| *now);
        now.unwrap_or_else(Timestamp::now)
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.send(Method::GET, path, None, &[]).await
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Failure> {
        self.send(Method::POST, path, Some(body), &[]).await
    }

    /// All items of a list, page by page, at most so many.
    pub async fn list<T: DeserializeOwned>(&self, path: &str, most: usize) -> Result<Vec<T>, Failure> {
        let (mut all, mut pages, mut more) = (Vec::new(), Pages::default(), String::new());
        let join = if path.contains('?') { '&' } else { '?' };
        loop {
            let limit = (most - all.len()).clamp(1, 1000);
            let bytes =
                self.bytes(Method::GET, &format!("{path}{join}limit={limit}{more}"), None, &[]).await?;
            let page: List<T> = parsed(&bytes)?;
            let count = page.items.len();
            all.extend(page.items);
            all.truncate(most);
            match pages.next(count, bytes.len(), page.next)? {
                Some(cursor) if all.len() < most => more = format!("&cursor={}", encoded(&cursor)),
                _ => return Ok(all),
            }
        }
    }

    /// An agent, which must be there.
    pub async fn agent(&self, name: &str) -> Result<Agent, Failure> {
        self.get(&format!("/api/v1/agents/{}", encoded(name))).await
    }

    /// A run, which must be there.
    pub async fn run(&self, run: RunId) -> Result<Run, Failure> {
        self.get(&format!("/api/v1/runs/{run}")).await
    }

    /// What a run writes behind a place, as it comes.
    pub async fn stream(&self, run: RunId, after: Option<u64>) -> Result<Stream, Failure> {
        let after = after.map_or(String::new(), |after| format!("&after={after}"));
        let path = format!("/api/v1/runs/{run}/log?follow=true{after}");
        let answer = self.ask(self.request(Method::GET, &path, None, &[])?, None).await?;
        if !answer.status.is_success() {
            return Err(failure(answer.status, &collect(answer.body).await?));
        }
        Ok(Stream::new(answer.body, answer.sender))
    }

    /// Sends any request, and hands on the body of the response piece by piece as it comes. A problem is a failure; another
    /// answer that is no success, such as that of `/readyz`, is handed on, and then a failure.
    pub async fn pass_on(
        &self,
        method: Method,
        path: &str,
        body: Option<Bytes>,
        mut each: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), Failure> {
        let kind = body.as_ref().map(|_| (CONTENT_TYPE, "application/json"));
        let mut request = self.request(method, path, None, kind.as_slice())?;
        *request.body_mut() = body.unwrap_or_default();
        let mut answer = self.ask(request, Some(ANY_WITHIN)).await?;
        if !answer.status.is_success() {
            let (status, bytes) = (answer.status, collect(answer.body).await?);
            let is_problem = serde_json::from_slice(&bytes).is_ok_and(|body: Value| body["code"].is_string());
            if !is_problem {
                each(&bytes)?;
            }
            return Err(failure(status, &bytes));
        }
        while let Some(frame) = answer.body.frame().await {
            let frame =
                frame.map_err(|error| Failure::Unreachable(format!("the answer ended early: {error}")))?;
            each(&frame.into_data().unwrap_or_default())?;
        }
        Ok(())
    }

    /// What a server says of itself, also if it is not ready.
    pub async fn readiness(&self) -> Result<Readiness, Failure> {
        let (status, bytes) = self.whole(self.request(Method::GET, "/readyz", None, &[])?).await?;
        match serde_json::from_slice(&bytes) {
            Ok(told) => Ok(told),
            Err(error) if status.is_success() => Err(no_belfry(&error)),
            Err(_) => Err(failure(status, &bytes)),
        }
    }

    /// A request with everything; gives the answer's JSON.
    pub async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(HeaderName, &str)],
    ) -> Result<T, Failure> {
        parsed(&self.bytes(method, path, body, headers).await?)
    }

    /// A request with everything; gives the answer as it came.
    async fn bytes(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(HeaderName, &str)],
    ) -> Result<Bytes, Failure> {
        let request = self.request(method, path, body, headers)?;
        let late = |_| self.silent(ANSWER_WITHIN);
        let whole = tokio::time::timeout(ANSWER_WITHIN, self.whole(request));
        let (status, bytes) = whole.await.map_err(late)??;
        if status.is_success() { Ok(bytes) } else { Err(failure(status, &bytes)) }
    }

    /// A whole answer. Whoever asks too often waits, as it is told, and asks again.
    async fn whole(&self, request: Request<Bytes>) -> Result<(StatusCode, Bytes), Failure> {
        let mut waited = Duration::ZERO;
        let is_slow = SLOW.iter().any(|end| request.uri().path().ends_with(end));
        loop {
            let answer = self.ask(request.clone(), is_slow.then_some(ANSWER_WITHIN)).await?;
            let bytes = collect(answer.body).await?;
            if let (Way::Over(link), Some(sender)) = (&self.way, answer.sender) {
                link.keep(sender);
            }
            match answer.retry_after.filter(|_| answer.status == StatusCode::TOO_MANY_REQUESTS) {
                Some(wait) if waited + wait <= WAIT_MAX => {
                    waited += wait;
                    tokio::time::sleep(wait).await;
                }
                _ => return Ok((answer.status, bytes)),
            }
        }
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(HeaderName, &str)],
    ) -> Result<Request<Bytes>, Failure> {
        let mut request = Request::builder().method(method).uri(path).header(ACCEPT, "application/json");
        if let Way::Over(link) = &self.way {
            request = request.header(HOST, &link.authority);
            if let Some(token) = &link.token {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
        }
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        let trace = std::env::var("TRACEPARENT").ok();
        if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(&trace).ok()) {
            request = request.header("traceparent", trace);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let bytes = body.map_or_else(Bytes::new, |body| body.to_string().into());
        request.body(bytes).map_err(|error| Failure::Usage(format!("cannot be sent to a server: {error}")))
    }

    /// Waits for the beginning of an answer: at most this long, or as long as most requests may take.
    async fn ask(&self, request: Request<Bytes>, within: Option<Duration>) -> Result<Answer, Failure> {
        let (head, body, sender) = match &self.way {
            Way::Over(link) => {
                let (answer, sender) = link.ask(request, within).await?;
                let (head, body) = answer.into_parts();
                (head, body.boxed_unsync(), Some(sender))
            }
            Way::Here(here) => {
                let within = within.unwrap_or(ANSWER_WITHIN);
                let answer = tokio::time::timeout(within, here.1.answer(request)).await;
                let (head, body) = answer.map_err(|_| self.silent(within))?.into_parts();
                (head, body.map_err(|error| error.to_string()).boxed_unsync(), None)
            }
        };
        let part = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let told = part("belfry-now").and_then(|now| now.parse().ok());
        let retry_after = part("retry-after").and_then(|wait| wait.parse().ok()).map(Duration::from_secs);
        if let (Some(told), Ok(mut now)) = (told, self.now.lock()) {
            *now = Some(told);
        }
        Ok(Answer { status: head.status, retry_after, body, sender })
    }

    fn silent(&self, waited: Duration) -> Failure {
        match &self.way {
            Way::Over(link) => link.silent(waited),
            Way::Here(here) => Failure::Unreachable(format!(
                "the store at {} has not answered for {} s",
                belfry_config::StoreUrl::new(&here.0.address),
                waited.as_secs()
            )),
        }
    }
}

async fn collect(body: Body) -> Result<Bytes, Failure> {
    let all = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
    all.map(|all| all.to_bytes())
        .map_err(|error| Failure::Unreachable(format!("the answer ended early: {error}")))
}

/// The JSON of an answer.
fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    let bytes = if bytes.is_empty() { b"null".as_slice() } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| no_belfry(&error))
}

fn no_belfry(error: &serde_json::Error) -> Failure {
    Failure::Unreachable(format!("the server answers what no Belfry does: {error}"))
}

/// A problem as a failure.
fn failure(status: StatusCode, bytes: &[u8]) -> Failure {
    let problem: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let part = |key: &str| problem[key].as_str().map(str::to_owned);
    if let Some(report) = part("report") {
        return Failure::Report(report);
    }
    let detail = part("detail").unwrap_or_else(|| status.to_string());
    let words = match way_out(&problem) {
        Some(way_out) => format!("{detail}; {way_out}"),
        None => detail,
    };
    // It may quote texts from outside. What has lines is a report.
    let words = words::one_line(&words, usize::MAX);
    match (status, problem["code"].as_str()) {
        (_, Some("queue_full" | "stale")) => Failure::Run(words),
        (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => Failure::Denied(words),
        (StatusCode::NOT_FOUND, _) => Failure::NotFound(words),
        _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            Failure::Unreachable(words)
        }
        _ => Failure::Usage(words),
    }
}

/// What to do instead, for people at a command line.
fn way_out(problem: &Value) -> Option<&str> {
    let way_out = problem["way_out"].as_str();
    match problem["code"].as_str() {
        Some("exists") => Some("`belfry set` changes it, `belfry rm` removes it"),
        Some("past") => Some("use a later time, or `belfry run` to run it now"),
        Some("token_missing") => {
            Some("--token or BELFRY_TOKEN gives it; `belfry token create` on the server's host makes one")
        }
        _ if way_out.is_some_and(|way_out| way_out.starts_with("GET /api/v1/sessions ")) => {
            Some("`belfry sessions` lists those that somebody has")
        }
        // Requests are for programs.
        _ => way_out.filter(|way_out| !["GET ", "PUT "].iter().any(|verb| way_out.starts_with(verb))),
    }
}

/// The path of a schedule, or of something of it.
pub fn schedule_path(name: &str, rest: &str) -> Result<String, Failure> {
    let (agent, schedule) = crate::reach::split(name)?;
    Ok(format!("/api/v1/schedules/{}/{}{rest}", encoded(agent), encoded(schedule)))
}

/// The query for an agent or one schedule of it.
pub fn of_name(name: &str) -> String {
    match name.split_once('/') {
        Some((agent, schedule)) => format!("agent={}&schedule={}", encoded(agent), encoded(schedule)),
        None => format!("agent={}", encoded(name)),
    }
}

/// The header for a key that makes a repeat answer with the first run.
pub fn key_header(key: Option<&str>) -> Vec<(HeaderName, &str)> {
    key.map(|key| (HeaderName::from_static("idempotency-key"), key)).into_iter().collect()
}

/// A text as part of a path or a query.
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
