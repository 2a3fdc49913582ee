//! Every request passes here before any route. In order: the name it was sent to, who it is from, how often this client
//! asks, whether another site's page sent it, and whether that actor may. The OpenAPI document says which scope a
//! route takes; a route that says nothing is closed.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use belfry_config::Api;
use belfry_store::{AuditEntry, Scope};
use serde_json::Value;
use utoipa::openapi::OpenApi;

use crate::audit::Row;
use crate::bodies::Share;
use crate::client::Client;
use crate::lasting::while_good;
use crate::listen::Peer;
use crate::origin;
use crate::problem::Problem;
use crate::reduced::reduce;
use crate::signature;
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

/// Operations that probes use: the rate limit does not count them.
const PROBES: [&str; 2] = ["healthz", "readyz"];

/// Headers that decide something, where two would leave open which one counts. `Host`, `Authorization` and the headers
/// of signatures are judged where they are read.
const ONCE: [&str; 4] = ["Idempotency-Key", "Content-Type", "Content-Encoding", "Last-Event-ID"];

/// Cookies of one name that a request is tried with: more than browsers keep for a host, because other servers of this host
/// can set cookies of that name, too.
const COOKIES_MAX: usize = 512;

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

/// The actor of requests with the local token.
pub const LOCAL: &str = "local";
/// The actor of requests that need no token.
pub const ANONYMOUS: &str = "anonymous";

/// Who sent a request.
#[derive(Debug, Clone)]
pub struct Actor {
    /// The id of a token, [`LOCAL`] or [`ANONYMOUS`].
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
    let api = shared.api();
    // A connection has a peer; without one a request would be from nowhere, and so not local.
    let peer =
        request.extensions().get::<Peer>().map_or(Ipv6Addr::UNSPECIFIED.into(), |Peer(peer)| peer.ip());
    let client = Client::of(peer, request.headers(), &api.trusted_proxies);
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let operation = guard.table.operation(&request).cloned();
    let trace = Trace::of(request.headers());
    request.extensions_mut().insert(trace);
    // Kept here until the request is answered, whatever becomes of its body.
    let share = Share::from_address(client.address);
    request.extensions_mut().insert(share.clone());
    let began = std::time::Instant::now();
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(client.clone());
    let mut response =
        match admit(&guard, &api, &parts, &client, matched.as_deref(), operation.as_ref()).await {
            Ok(actor) => {
                let (id, scope, peer) = (actor.id.clone(), actor.scope, client.address.to_string());
                parts.extensions.insert(actor);
                // A route that is open to everybody has not asked who sends the body.
                if operation.as_ref().is_some_and(|operation| operation.scope.is_some()) {
                    share.prove(&id, scope);
                }
                let request = Request::from_parts(parts, body);
                let response = answer(shared, operation.as_ref(), (id.clone(), peer), request, next).await;
                while_good(shared, &id, reduce(response, scope))
            }
            // Nobody knows who asks, or too little is allowed.
            Err(problem) => reduce(problem.into_response(), Scope::Read),
        };
    drop(share);
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
    if is_noted && let Err(problem) = row.begin(None).await {
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
    api: &Api,
    request: &Parts,
    client: &Client,
    matched: Option<&str>,
    operation: Option<&Operation>,
) -> Result<Actor, Problem> {
    let shared = &guard.shared;
    let host = shared.host(request, client, api)?;
    // Those of a probe are not counted: that would end a server that is only busy.
    let is_probe = operation.is_some_and(|operation| PROBES.contains(&operation.id.as_str()));
    let is_open = operation.is_some_and(|operation| operation.scope.is_none());
    // A route that is open to everybody needs no store to know who asks, unless the request brings a token. A probe
    // never waits for the store: of tokens only the local one counts there.
    let is_asked = match (is_probe, bearer(&request.headers)) {
        (true, token) => token.is_some_and(|token| shared.is_local(token)),
        (false, token) => !is_open || token.is_some(),
    };
    let actor = match is_asked {
        true => identify(shared, request).await,
        false => Ok(Actor { id: ANONYMOUS.into(), scope: Scope::Read }),
    };
    match &actor {
        _ if is_probe => {}
        // Nor are these: commands of one user would stand in the way of each other.
        Ok(actor) if actor.id == LOCAL => {}
        // Strangers behind the same address take nothing from a token.
        Ok(actor) if actor.id != ANONYMOUS => shared.limiter.take_by_token(&actor.id, api.rate)?,
        // The route judges the signature first, and counts then.
        _ if is_hook(operation) && is_signed_stranger(&request.headers) => {}
        _ => shared.limiter.take_by_address(client.address, api.rate)?,
    }
    refuse_twice(&request.headers)?;
    if is_change(&request.method) {
        origin::check_origin(&request.headers, &host)?;
    }
    let is_open_metrics = |operation: &Operation| operation.id == "metrics" && api.open_metrics;
    if is_open || operation.is_some_and(is_open_metrics) {
        // The scope of a token decides how much of an error is shown.
        return Ok(Actor { id: ANONYMOUS.into(), scope: actor.map_or(Scope::Read, |actor| actor.scope) });
    }
    let actor = actor?;
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

/// Finds out who sent a request: by its token; without one by `api.open`, or by the cookie of a browser login.
pub async fn identify(shared: &Shared, request: &Parts) -> Result<Actor, Problem> {
    let is_local = request.extensions.get::<Client>().is_some_and(|client| client.is_local);
    let mut given = request.headers.get_all(header::AUTHORIZATION).iter();
    match (given.next(), given.next()) {
        (Some(_), Some(_)) => Err(unauthorized("token_wrong", "there are two Authorization headers")),
        (Some(_), None) => match bearer(&request.headers) {
            Some(token) => shared.actor_of(token, is_local).await,
            None => Err(unauthorized("token_wrong", "the Authorization header must be `Bearer bf_…`")),
        },
        (None, _) if is_local && shared.is_open() => Ok(Actor { id: ANONYMOUS.into(), scope: Scope::Admin }),
        (None, _) => {
            let mut refusal = unauthorized("token_missing", "this takes a token")
                .way_out("send `Authorization: Bearer bf_…`; `belfry token create` makes one");
            // Any server on this host can set a cookie of the same name, and the browser sends it, too.
            for cookie in shared.cookies(request) {
                match shared.reader_of(cookie).await {
                    Ok(actor) => return Ok(actor),
                    Err(problem) => refusal = problem,
                }
            }
            Err(refusal)
        }
    }
}

fn is_hook(operation: Option<&Operation>) -> bool {
    operation.is_some_and(|operation| operation.id == "hook")
}

/// Whether a request has a signature and no token: it is counted after the signature is compared, by the hook if it is
/// right and by the address if not. So nobody at an address can use up what signed requests from there are allowed.
pub fn is_signed_stranger(headers: &HeaderMap) -> bool {
    bearer(headers).is_none() && signature::is_claimed(headers)
}

/// Refuses a request that has one of the headers [`ONCE`] twice.
fn refuse_twice(headers: &HeaderMap) -> Result<(), Problem> {
    for name in ONCE {
        let count = headers.get_all(name).iter().count();
        if count > 1 {
            let detail = format!("the request has {count} {name} headers, and may have one");
            let problem = Problem::bad("header_twice", detail).field(name);
            return Err(problem.way_out(format!("send one {name} header")));
        }
    }
    Ok(())
}

/// The token that a request brings.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

impl Shared {
    /// The name that a request was sent to, if it is one of ours.
    pub fn host(&self, request: &Parts, client: &Client, api: &Api) -> Result<Authority, Problem> {
        let forwarded = client.host.as_deref();
        origin::check_host(&request.headers, &request.uri, forwarded, self.listen, &api.allowed_hosts)
    }

    /// The name of the cookie of a browser login. Browsers send a cookie to every port of a host, so it names the port.
    pub fn cookie_name(&self) -> String {
        format!("belfry_{}", self.listen.port())
    }

    /// The first cookies of a request that have the name of a browser login's. None for a change, which takes the
    /// secret of the login, and for a request of another site's page.
    fn cookies<'a>(&self, request: &'a Parts) -> Vec<&'a str> {
        if is_change(&request.method) || origin::is_cross_site(&request.headers) {
            return Vec::new();
        }
        let name = self.cookie_name();
        let lines = request.headers.get_all(header::COOKIE).into_iter();
        let pairs = lines.flat_map(|line| line.to_str().unwrap_or_default().split(';'));
        let ours = pairs.filter_map(|pair| pair.trim().strip_prefix(&name)?.strip_prefix('='));
        ours.take(COOKIES_MAX).collect()
    }

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
