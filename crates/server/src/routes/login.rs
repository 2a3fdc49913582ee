//! Browser logins: the page, the codes, and who is logged in.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use belfry_config::Rate;
use belfry_store::{AddedToken, Scope, TOKENS_MAX, TokenRecord};
use belfry_time::{SignedDuration, Timestamp};
use http_body_util::{BodyExt, Limited};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::tokens::ScopeName;
use super::{Routes, json};
use crate::audit;
use crate::client::Client;
use crate::guard::Actor;
use crate::problem::{Problem, ProblemBody};
use crate::secret;
use crate::state::Shared;

/// How long a browser stays logged in.
const LOGIN_LIFE: SignedDuration = SignedDuration::from_hours(12);
/// The largest body of a login: anyone may send one.
const BODY_BYTES_MAX: usize = 4 << 10;
/// Wrong codes that one peer may try. A right one is taken whatever came before it, so that nobody can lock others out:
/// a code is far too long to be guessed.
const WRONG_CODES: Rate = Rate { max: 10, per_ms: 60_000 };

pub fn router() -> Routes {
    Routes::new()
        .routes(routes!(root))
        .routes(routes!(page, login))
        .routes(routes!(script))
        .routes(routes!(style))
        .routes(routes!(create))
        .routes(routes!(whoami))
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Go to the login page
#[utoipa::path(get, path = "/", operation_id = "root", tag = "login", security(()),
    responses((status = 303, description = "The login page is elsewhere", headers(("Location" = String)))))]
async fn root() -> Redirect {
    Redirect::to("/login")
}

/// The login page
#[utoipa::path(get, path = "/login", operation_id = "login_page", tag = "login", security(()),
    responses((status = 200, description = "A page", body = String, content_type = "text/html")))]
async fn page() -> Response {
    asset("text/html; charset=utf-8", include_str!("../../assets/login.html"))
}

/// The script of the login page
#[utoipa::path(get, path = "/login.js", operation_id = "login_script", tag = "login", security(()),
    responses((status = 200, description = "A script", body = String, content_type = "text/javascript")))]
async fn script() -> Response {
    asset("text/javascript; charset=utf-8", include_str!("../../assets/login.js"))
}

/// The style of the login page
#[utoipa::path(get, path = "/login.css", operation_id = "login_style", tag = "login", security(()),
    responses((status = 200, description = "A style sheet", body = String, content_type = "text/css")))]
async fn style() -> Response {
    asset("text/css; charset=utf-8", include_str!("../../assets/login.css"))
}

/// A link that logs a browser in.
#[derive(Serialize, ToSchema)]
struct LoginLink {
    /// The link. The part after `#` is a code that can be used once.
    url: String,
    /// When the code expires.
    expires_at: Timestamp,
}

/// Create a login link
///
/// It logs one browser in, with scope admin, for twelve hours. The code in the link is good for ten minutes.
#[utoipa::path(post, path = "/api/v1/logins", operation_id = "create_login", tag = "login", security(("token" = ["admin"])),
    responses((status = 201, description = "The link", body = LoginLink)))]
async fn create(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, Problem> {
    if shared.listen.port() == 0 {
        audit::made(false);
        let problem = Problem::unavailable("no_server", "no server runs that a browser could log in to");
        return Err(problem.way_out("`belfry up` starts one, `--server URL` names one elsewhere"));
    }
    let (parts, _) = request.into_parts();
    let host = shared.host(&parts, &client, &shared.api())?;
    let (code, expires_at) = shared.codes.make(shared.now());
    let scheme = if client.is_https { "https" } else { "http" };
    let url = format!("{scheme}://{host}/login#{code}");
    Ok(json(StatusCode::CREATED, &LoginLink { url, expires_at }))
}

/// A code for a login.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct LoginBody {
    /// What stands behind `#` in a login link.
    code: String,
}

/// A browser login.
#[derive(Serialize, ToSchema)]
struct Login {
    /// Its id, as `GET /api/v1/tokens` lists it.
    id: String,
    /// What the secret allows. The cookie allows reading alone.
    scope: ScopeName,
    /// When both end.
    expires_at: Timestamp,
    /// For changes: `Authorization: Bearer …`. It is not shown again.
    secret: String,
}

/// Log a browser in with a code
///
/// Sets a cookie that is good for reading, and returns a secret for changes. Browsers send cookies to every port of a
/// host, so the cookie alone changes nothing.
#[utoipa::path(post, path = "/login", operation_id = "login", tag = "login", security(()),
    request_body(content = LoginBody),
    responses(
        (status = 200, description = "Logged in", body = Login, headers(("Set-Cookie" = String))),
        (status = 401, description = "The code is wrong, used or too old", body = ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "There are too many tokens", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn login(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, Problem> {
    let code = code_of(&shared, request).await?;
    let now = shared.now();
    if !shared.codes.take(&code, now) {
        shared
            .wrong_codes
            .take_by_address(client.address, WRONG_CODES)
            .map_err(|problem| problem.way_out("wait"))?;
        let problem =
            Problem::new(StatusCode::UNAUTHORIZED, "code_wrong", "this code is wrong, used or too old");
        return Err(problem.way_out("`belfry open` prints a new link"));
    }
    audit::begin(None).await?;
    let id = secret::random_id();
    let (token, cookie) = (secret::make(&id), secret::make(&id));
    let expires_at = now.checked_add(LOGIN_LIFE).unwrap_or(Timestamp::MAX);
    let record = TokenRecord {
        id: id.clone(),
        hash: secret::hash(&token).to_vec(),
        cookie_hash: Some(secret::hash(&cookie).to_vec()),
        scope: Scope::Admin,
        label: format!("browser login from {}", client.address),
        created_at: now,
        expires_at: Some(expires_at),
        revoked_at: None,
    };
    match shared.engine.add_token(&record).await? {
        AddedToken::Added => shared.forget_tokens().await,
        AddedToken::Taken => return Err(Problem::conflict("exists", "the drawn id is taken; try again")),
        AddedToken::Full => {
            return Err(Problem::conflict("too_many", format!("there are {TOKENS_MAX} tokens already"))
                .way_out("`belfry token revoke` and time make room"));
        }
    }
    let login = Login { id, scope: Scope::Admin.into(), expires_at, secret: token };
    let mut response = json(StatusCode::OK, &login);
    let cookie = format!(
        "{}={cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{}",
        shared.cookie_name(),
        LOGIN_LIFE.as_secs(),
        if client.is_https { "; Secure" } else { "" }
    );
    let cookie = HeaderValue::from_str(&cookie).map_err(|error| Problem::internal(error.to_string()))?;
    response.headers_mut().insert(header::SET_COOKIE, cookie);
    Ok(response)
}

/// Reads the code from a body, which is small whatever `api.max_body` allows.
async fn code_of(shared: &Shared, request: Request) -> Result<String, Problem> {
    let (parts, body) = request.into_parts();
    let kind =
        parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        let detail = format!("the body must be application/json, got {kind:?}");
        return Err(
            Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", detail).field("Content-Type")
        );
    }
    let whole = Limited::new(body, BODY_BYTES_MAX).collect();
    let bytes = match tokio::time::timeout(shared.limits.body_within, whole).await {
        Ok(Ok(whole)) => whole.to_bytes(),
        Ok(Err(_)) => {
            let detail = format!("the body ended early, or is longer than {BODY_BYTES_MAX} bytes");
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail));
        }
        Err(_) => {
            let detail = "the body did not come in time";
            return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "too_slow", detail));
        }
    };
    // What serde says of a wrong body may quote the code.
    let wrong = |_| Problem::bad("bad_json", "the body must be {\"code\": \"…\"}").field("code");
    serde_json::from_slice::<LoginBody>(&bytes).map(|body| body.code).map_err(wrong)
}

/// Who sent a request.
#[derive(Serialize, ToSchema)]
struct Me {
    /// The id of a token; `local`, `anonymous`, or `cli:user(uid)` for a command without a server.
    actor: String,
    /// What this request may do. The cookie of a browser login may read.
    scope: ScopeName,
    /// What the token is for.
    label: Option<String>,
    /// When the token expires; null if it does not.
    expires_at: Option<Timestamp>,
}

/// Show who sends this request
#[utoipa::path(get, path = "/api/v1/me", operation_id = "whoami", tag = "login", security(("token" = ["read"])),
    responses((status = 200, description = "The actor and its scope", body = Me)))]
async fn whoami(
    State(shared): State<Arc<Shared>>,
    Extension(actor): Extension<Actor>,
) -> Result<Response, Problem> {
    let token = shared.token(&actor.id).await?;
    let me = Me {
        scope: actor.scope.into(),
        label: token.as_ref().map(|token| token.label.clone()),
        expires_at: token.and_then(|token| token.expires_at),
        actor: actor.id,
    };
    Ok(json(StatusCode::OK, &me))
}
