//! The door: every request passes here before any route. In order: the name it was sent to, how often this peer asks, whether
//! another site's page sent it, who it is from, and whether that one may. What a route takes stands in the document
//! that describes it; a route that says nothing is closed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use belfry_store::{AuditEntry, Scope};
use serde_json::Value;
use utoipa::openapi::OpenApi;

use crate::audit::Row;
use crate::listen::Peer;
use crate::origin;
use crate::problem::Problem;
use crate::state::Shared;
use crate::trace::Trace;

/// A request that takes longer has failed. Whoever waits for a run may wait a minute.
const ANSWER_WITHIN: Duration = Duration::from_secs(90);

/// What is closed off for browsers, whatever the answer is.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'self'; frame-ancestors 'none'; object-src 'none'; base-uri 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// What time it is for the store.
const NOW: HeaderName = HeaderName::from_static("belfry-now");

/// What a route takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Its stable name.
    pub id: String,
    /// What it takes; none is open to everybody.
    pub scope: Option<Scope>,
}

/// What every route takes.
#[derive(Debug, Default)]
pub struct Table(HashMap<(Method, String), Operation>);

impl Table {
    /// As the document says.
    pub fn of(document: &OpenApi) -> Table {
        let document = serde_json::to_value(document).unwrap_or_default();
        let mut table = HashMap::new();
        for (path, item) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let Ok(method) = Method::from_bytes(method.to_ascii_uppercase().as_bytes()) else { continue };
                if let Some(operation) = operation_of(operation) {
                    table.insert((method, path.clone()), operation);
                }
            }
        }
        Table(table)
    }

    /// Whether any method of a path is described.
    fn describes(&self, path: &str) -> bool {
        self.0.keys().any(|(_, known)| known == path)
    }

    /// What the route of a request takes.
    pub fn operation(&self, request: &Request) -> Option<&Operation> {
        let path = request.extensions().get::<MatchedPath>()?.as_str();
        // The answer to HEAD is that to GET without its body.
        let method = if request.method() == Method::HEAD { &Method::GET } else { request.method() };
        self.0.get(&(method.clone(), path.to_owned()))
    }
}

fn operation_of(operation: &Value) -> Option<Operation> {
    let id = operation["operationId"].as_str()?.to_owned();
    let security = operation["security"].as_array()?;
    let scope = match security.as_slice() {
        [open] if open.as_object().is_some_and(|open| open.is_empty()) => None,
        [one] => Some(Scope::from_name(one["token"].as_array()?.first()?.as_str()?)?),
        _ => return None,
    };
    Some(Operation { id, scope })
}

/// Who sent a request.
#[derive(Debug, Clone)]
pub struct Actor {
    /// The id of a token, or `local`, or `anonymous`.
    pub id: String,
    pub scope: Scope,
}

/// What the guard knows.
pub struct Guard {
    pub shared: Arc<Shared>,
    pub table: Table,
}

/// Lets a request through, or not.
pub async fn guard(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let shared = &guard.shared;
    let peer =
        request.extensions().get::<Peer>().map_or_else(String::new, |Peer(peer)| peer.ip().to_string());
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let operation = guard.table.operation(&request).cloned();
    let trace = Trace::of(request.headers());
    request.extensions_mut().insert(trace);
    let began = std::time::Instant::now();
    let (mut parts, body) = request.into_parts();
    let mut response = match admit(&guard, &parts, matched.as_deref(), operation.as_ref()).await {
        Ok(actor) => {
            let who = actor.id.clone();
            parts.extensions.insert(actor);
            answer(shared, operation.as_ref(), (who, peer), Request::from_parts(parts, body), next).await
        }
        Err(problem) => problem.into_response(),
    };
    let status = response.status();
    shared.meters.request(
        operation.as_ref().map_or("none", |operation| &operation.id),
        status,
        began.elapsed(),
    );
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    headers.insert("traceparent", trace.header());
    shared.tell_time(&mut response);
    response
}

/// Answers a request. One that changes something has its row in the audit before, whoever `actor` and wherever `peer` is.
pub async fn answer(
    shared: &Arc<Shared>,
    operation: Option<&Operation>,
    (actor, peer): (String, String),
    request: Request,
    next: Next,
) -> Response {
    // A route that is open to everybody decides itself whom it takes seriously.
    let is_noted =
        is_change(request.method()) && operation.is_some_and(|operation| operation.scope.is_some());
    let entry = AuditEntry {
        at: shared.now(),
        actor,
        action: operation.map_or_else(String::new, |operation| operation.id.clone()),
        target: request.uri().path().chars().take(512).collect(),
        peer,
        status: None,
    };
    let row = Row::new(shared.engine.clone(), entry);
    if is_noted && let Err(problem) = row.begin().await {
        return problem.into_response();
    }
    row.answer(async {
        match tokio::time::timeout(ANSWER_WITHIN, next.run(request)).await {
            Ok(response) => response,
            Err(_) => Problem::unavailable("too_slow", "the answer took too long").into_response(),
        }
    })
    .await
}

pub fn is_change(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

async fn admit(
    guard: &Guard,
    request: &Parts,
    matched: Option<&str>,
    operation: Option<&Operation>,
) -> Result<Actor, Problem> {
    let shared = &guard.shared;
    let api = shared.api();
    let host = origin::check_host(&request.headers, &request.uri, shared.listen, &api.allowed_hosts)?;
    // Whoever owns the server is not counted: its commands would stand in the way of each other.
    let is_owner = bearer(&request.headers).is_some_and(|token| shared.is_local(token));
    if let Some(Peer(peer)) = request.extensions.get::<Peer>().filter(|_| !is_owner) {
        shared.limiter.take(peer.ip(), api.rate)?;
    }
    if is_change(&request.method) {
        origin::check_origin(&request.headers, &host)?;
    }
    if let Some(Operation { scope: None, .. }) = operation {
        return Ok(Actor { id: "anonymous".into(), scope: Scope::Read });
    }
    let actor = identify(shared, &request.headers).await?;
    let needed = match (operation, matched) {
        (Some(operation), _) => operation.scope.unwrap_or(Scope::Admin),
        (None, Some(path)) if !guard.table.describes(path) => {
            return Err(Problem::forbidden(
                "closed",
                "this route says nothing of who may use it, so nobody may",
            ));
        }
        // There is nothing there, or not with this method: whoever may look may know that.
        (None, _) => Scope::Read,
    };
    if actor.scope < needed {
        let detail = format!(
            "this takes a token with scope {}, and yours has {}",
            needed.as_str(),
            actor.scope.as_str()
        );
        let way_out = format!("`belfry token create --scope {}` makes one", needed.as_str());
        return Err(Problem::forbidden("scope_too_small", detail).way_out(way_out));
    }
    Ok(actor)
}

/// Whose request it is.
pub async fn identify(shared: &Shared, headers: &HeaderMap) -> Result<Actor, Problem> {
    let mut given = headers.get_all(header::AUTHORIZATION).iter();
    if given.next().is_none() {
        return match shared.is_open().await? {
            true => Ok(Actor { id: "anonymous".into(), scope: Scope::Admin }),
            false => Err(unauthorized("token_missing", "this takes a token")
                .way_out("send `Authorization: Bearer bf_…`; `belfry token create` makes one")),
        };
    }
    if given.next().is_some() {
        return Err(unauthorized("token_wrong", "there are two Authorization headers"));
    }
    match bearer(headers) {
        Some(token) => shared.actor_of(token).await,
        None => Err(unauthorized("token_wrong", "the Authorization header must be `Bearer bf_…`")),
    }
}

/// The token that a request brings.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

impl Shared {
    /// Says what time it is here: whoever shows how long ago something was counts from that.
    pub fn tell_time(&self, response: &mut Response) {
        if let Ok(now) = HeaderValue::from_str(&self.now().to_string()) {
            response.headers_mut().insert(NOW, now);
        }
    }
}

pub fn unauthorized(code: &'static str, detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, code, detail)
}
