//! Tokens, and who did what.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use belfry::api::List;
use belfry_store::{AddedToken, AuditRow, Scope, TOKENS_MAX, TokenRecord};
use belfry_time::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::routes;

use super::{Routes, json};
use crate::extract::{self, Key, Object, Params, Segment};
use crate::page::{self, Cursor, hex};
use crate::problem::{Problem, ProblemBody};
use crate::secret;
use crate::state::Shared;

/// The longest life of a token: ten years.
const TTL_MAX_MS: u64 = 10 * 365 * 86_400_000;
const LABEL_MAX: usize = 200;

pub fn router() -> Routes {
    Routes::new().routes(routes!(list, create)).routes(routes!(revoke)).routes(routes!(audit))
}

/// What a token allows. Each allows what those before it do.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Scope)]
pub enum ScopeName {
    /// To look.
    Read,
    /// To start and to end runs.
    Trigger,
    /// To change schedules.
    Manage,
    /// Everything.
    Admin,
}

impl From<ScopeName> for Scope {
    fn from(name: ScopeName) -> Scope {
        match name {
            ScopeName::Read => Scope::Read,
            ScopeName::Trigger => Scope::Trigger,
            ScopeName::Manage => Scope::Manage,
            ScopeName::Admin => Scope::Admin,
        }
    }
}

impl From<Scope> for ScopeName {
    fn from(scope: Scope) -> ScopeName {
        match scope {
            Scope::Read => ScopeName::Read,
            Scope::Trigger => ScopeName::Trigger,
            Scope::Manage => ScopeName::Manage,
            Scope::Admin => ScopeName::Admin,
        }
    }
}

/// How a token came to be.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum TokenKind {
    /// Created by hand.
    Token,
    /// Bought by a browser with a login code.
    Login,
}

/// A token, without its secret.
#[derive(Serialize, ToSchema)]
pub struct Token {
    id: String,
    /// How it came to be.
    kind: TokenKind,
    scope: ScopeName,
    label: String,
    created_at: Timestamp,
    expires_at: Option<Timestamp>,
    revoked_at: Option<Timestamp>,
}

impl Token {
    fn of(record: &TokenRecord) -> Token {
        Token {
            id: record.id.clone(),
            kind: if record.is_login() { TokenKind::Login } else { TokenKind::Token },
            scope: record.scope.into(),
            label: record.label.clone(),
            created_at: record.created_at,
            expires_at: record.expires_at,
            revoked_at: record.revoked_at,
        }
    }
}

/// List tokens
#[utoipa::path(get, path = "/api/v1/tokens", operation_id = "list_tokens", tag = "tokens", security(("token" = ["admin"])),
    responses((status = 200, description = "All of them, good or not", body = List<Token>)))]
async fn list(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let tokens = shared.store().tokens().await?;
    Ok(json(StatusCode::OK, &List::whole(tokens.iter().map(Token::of).collect())))
}

/// A token to be made.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewToken {
    /// What it allows.
    scope: ScopeName,
    /// What it is for, in words.
    #[serde(default)]
    #[schema(max_length = 200)]
    label: String,
    /// How long it is good; for ever where nothing is said.
    #[schema(minimum = 1, maximum = 315_360_000_000_u64)]
    ttl_ms: Option<u64>,
}

/// A token that was made. The only time that it is shown.
#[derive(Serialize, ToSchema)]
struct MadeToken {
    #[serde(flatten)]
    known: Token,
    /// The token itself.
    token: String,
}

/// Make a token
///
/// It is shown once, and only its hash is kept. A repeat with the same `Idempotency-Key` makes none, and names the first.
#[utoipa::path(post, path = "/api/v1/tokens", operation_id = "create_token", tag = "tokens", security(("token" = ["admin"])),
    params(("Idempotency-Key" = Option<String>, Header, description = "Keeps a repeat from making another", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body = NewToken,
    responses(
        (status = 201, description = "It is made", body = MadeToken),
        (status = 409, description = "There are too many, or the key was used", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn create(
    State(shared): State<Arc<Shared>>,
    Key(key): Key,
    Object(body): Object,
) -> Result<Response, Problem> {
    let new: NewToken = extract::read(body)?;
    if new.label.chars().count() > LABEL_MAX {
        return Err(
            Problem::bad("bad_field", format!("a label is at most {LABEL_MAX} characters")).field("label")
        );
    }
    if new.ttl_ms.is_some_and(|ttl| !(1..=TTL_MAX_MS).contains(&ttl)) {
        return Err(Problem::bad("bad_field", format!("ttl_ms must be 1-{TTL_MAX_MS}")).field("ttl_ms"));
    }
    let now = shared.now();
    let id = key.as_ref().map(|key| hex(&secret::hash(key)[..8]));
    let token = id.as_ref().map_or_else(secret::random, |id| secret::make(id));
    let ttl = new.ttl_ms.map(|ttl| SignedDuration::from_millis(ttl as i64));
    let record = TokenRecord {
        id: secret::id(&token).unwrap_or_default().to_owned(),
        hash: secret::hash(&token).to_vec(),
        cookie_hash: None,
        scope: new.scope.into(),
        label: new.label,
        created_at: now,
        expires_at: ttl.and_then(|ttl| now.checked_add(ttl).ok()),
        revoked_at: None,
    };
    match shared.engine.add_token(&record).await? {
        AddedToken::Added => {
            shared.forget_tokens().await;
            Ok(json(StatusCode::CREATED, &MadeToken { known: Token::of(&record), token }))
        }
        AddedToken::Taken => Err(Problem::conflict(
            "key_reused",
            format!("the key has made token {}, which is shown only once", record.id),
        )
        .field("Idempotency-Key")
        .way_out("revoke that one, and make another with a new key")),
        AddedToken::Full => {
            Err(Problem::conflict("too_many", format!("there are {TOKENS_MAX} tokens already")))
        }
    }
}

/// Revoke a token
#[utoipa::path(delete, path = "/api/v1/tokens/{id}", operation_id = "revoke_token", tag = "tokens", security(("token" = ["admin"])),
    params(("id" = String, Path, description = "Which")),
    responses((status = 204, description = "It is good no longer")))]
async fn revoke(State(shared): State<Arc<Shared>>, Segment(id): Segment) -> Result<StatusCode, Problem> {
    if !shared.engine.revoke_token(&id).await? {
        return Err(Problem::not_found(format!("there is no token {id} that is good")));
    }
    shared.forget_tokens().await;
    Ok(StatusCode::NO_CONTENT)
}

/// Something that was done over HTTP, or by a command that opened the store itself.
#[derive(Serialize, ToSchema)]
struct Audit {
    at: Timestamp,
    /// The id of a token; `local` for commands on the server's host, `anonymous` if no token was needed;
    /// `cli:user(uid)` for commands without a server.
    actor: String,
    /// The operation.
    action: String,
    /// The path.
    target: String,
    /// From where.
    peer: String,
    /// How it was answered; null where it is under way, or nobody knows whether it was done.
    status: Option<u16>,
}

impl Audit {
    fn of((_, entry): AuditRow) -> Audit {
        Audit {
            at: entry.at,
            actor: entry.actor,
            action: entry.action,
            target: entry.target,
            peer: entry.peer,
            status: entry.status,
        }
    }
}

/// How many, and from where.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditParams {
    /// How many; 100 where nothing is said.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    #[param(nullable = false)]
    cursor: Option<String>,
}

/// Who did what, the last first
#[utoipa::path(get, path = "/api/v1/audit", operation_id = "list_audit", tag = "tokens", params(AuditParams),
    security(("token" = ["admin"])), responses((status = 200, description = "A page", body = List<Audit>)))]
async fn audit(
    State(shared): State<Arc<Shared>>,
    Params(params): Params<AuditParams>,
) -> Result<Response, Problem> {
    let limit = page::limit(params.limit)?;
    let before = Cursor::audit(params.cursor.as_deref())?;
    let found = shared.store().audits(before, limit).await?;
    let next = found.next.map(|number| Cursor::Audit(number).write());
    Ok(json(StatusCode::OK, &List { items: found.items.into_iter().map(Audit::of).collect(), next }))
}
