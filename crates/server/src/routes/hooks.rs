//! Webhooks: a request that is signed with a schedule's secret makes a run of it. The hook is looked up and the headers
//! are judged before a byte of the body is read, and nothing is parsed before the signature holds.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{Extension, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::Response;
use belfry::Webhook;
use belfry_core::RunId;
use belfry_core::definition::When;
use belfry_core::hook::{self, Proof};
use belfry_store::{ScheduleRecord, Scope};
use belfry_time::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::audit;
use crate::bodies::Share;
use crate::client::Client;
use crate::extract::{self, Named};
use crate::guard::{Actor, identify, is_signed_stranger};
use crate::json as strict;
use crate::problem::{Problem, ProblemBody};
use crate::reduced::may_read;
use crate::signature::{Claim, Secret, Unusable};
use crate::state::Shared;
use crate::trace::Trace;

pub fn router() -> Routes {
    Routes::new().routes(routes!(hook))
}

/// A run that a request made.
#[derive(Serialize, ToSchema)]
struct Accepted {
    run_id: RunId,
}

/// Make a run of a webhook schedule
///
/// The request is signed with the schedule's secret, in one of three forms. Belfry's: `X-Belfry-Signature` is `sha256=`
/// and the hex of the HMAC-SHA256 of `TIMESTAMP.BODY`, where `X-Belfry-Timestamp` is that timestamp, in seconds since
/// 1970, within five minutes of now; two signatures, with a comma between them, are for changing the secret. Standard
/// Webhooks: `webhook-id`, `webhook-timestamp` and `webhook-signature`. GitHub's, with `github: true`:
/// `X-Hub-Signature-256`. A webhook with `secret: none` takes a token with scope trigger instead.
///
/// A body that is a JSON object is the run's payload; any other is its `body`. Signed content makes one run within 24
/// hours: a repeat, also one with the same `Idempotency-Key` or `webhook-id` and body, is answered with the first run.
#[utoipa::path(post, path = "/hooks/{agent}/{schedule}", operation_id = "hook", tag = "hooks", security(()),
    params(("agent" = String, Path, description = "Agent name"), ("schedule" = String, Path, description = "Schedule name"),
        ("X-Belfry-Timestamp" = Option<String>, Header, description = "Seconds since 1970", nullable = false),
        ("X-Belfry-Signature" = Option<String>, Header, description = "`sha256=HEX`", nullable = false),
        ("webhook-id" = Option<String>, Header, description = "Message id of Standard Webhooks", nullable = false),
        ("webhook-timestamp" = Option<String>, Header, description = "Seconds since 1970", nullable = false),
        ("webhook-signature" = Option<String>, Header, description = "`v1,BASE64`, several with blanks between", nullable = false),
        ("X-Hub-Signature-256" = Option<String>, Header, description = "GitHub's signature, where it is configured", nullable = false),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeat answer with the first run", nullable = false, min_length = 1, max_length = 256, pattern = "^[!-~]+$")),
    request_body(content = Option<Value>, content_type = "application/json"),
    responses(
        (status = 202, description = "The run, made now", body = Accepted),
        (status = 200, description = "The run that the first of these requests made", body = Accepted),
        (status = 401, description = "Not signed, or signed wrongly", body = ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "The key was used for something else, or the schedule's rules refuse a run; the code is the reason", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn hook(
    State(shared): State<Arc<Shared>>,
    Extension(trace): Extension<Trace>,
    named: Named,
    extract::Key(key): extract::Key,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, stream) = request.into_parts();
    let now = shared.now();
    let proven = proven(&shared, &named, &parts, stream, now).await;
    count(&shared, &named, &parts, proven.as_ref().err())?;
    let Proven { record, body, content, id, actor } = proven?;
    extract::make_room(&shared, &parts, &body).await?;
    let payload = payload(&body)?;
    // A blank keeps these apart from the keys of other requests, which have none.
    let keys =
        key.map(|key| format!("hook {key}")).into_iter().chain(id.map(|id| format!("webhook-id {id}")));
    let keys = keys.map(|key| (key, Sha256::digest(&body).to_vec())).collect();
    audit::begin(actor.as_deref()).await?;
    let webhook = Webhook { payload, signed: content, keys, trace_id: Some(trace.id) };
    let made = shared.engine.webhook(&record.name, webhook).await?;
    audit::made(made.is_new);
    let status = if made.is_new { StatusCode::ACCEPTED } else { StatusCode::OK };
    Ok(json(status, &Accepted { run_id: made.run }))
}

/// A request that was sent by somebody who may.
struct Proven {
    record: ScheduleRecord,
    body: Bytes,
    /// The SHA-256 of what was signed, if it was not a token that decided.
    content: Option<String>,
    /// The `webhook-id`.
    id: Option<String>,
    /// The id of the token that decided.
    actor: Option<String>,
}

/// Looks the hook up, judges the headers, reads the body and compares the signature, in this order.
async fn proven(
    shared: &Shared,
    named: &Named,
    parts: &Parts,
    stream: Body,
    now: Timestamp,
) -> Result<Proven, Problem> {
    let record = shared.store().schedule(&named.full()).await?;
    let no_hook = || Problem::not_found(format!("there is no webhook {}", named.full()));
    let record = record.ok_or_else(no_hook)?;
    belfry::refuse_unreadable(&record)?;
    let When::Webhook(settings) = &record.definition.when else { return Err(no_hook()) };
    let asked = asked(shared, &record.name, settings, parts, now).await?;
    shared.refuse_draining()?;
    if let (Asked::Token(actor), Some(share)) = (&asked, parts.extensions.get::<Share>()) {
        share.prove(&actor.id, actor.scope);
    }
    // No more is read, and hashed, than is allowed.
    let body = extract::body(shared, parts, stream).await?;
    let (content, id, actor) = match asked {
        Asked::Signature { claim, secrets } => (Some(claim.verify(&secrets, &body)?), claim.id, None),
        Asked::Token(actor) => (None, None, Some(actor.id)),
    };
    Ok(Proven { record, body, content, id, actor })
}

/// Counts a signed request: by the hook if its signature is right, else by the address, which has then one less of the
/// requests without a token. The guard has counted all others.
fn count(shared: &Shared, named: &Named, parts: &Parts, refusal: Option<&Problem>) -> Result<(), Problem> {
    let Some(client) = parts.extensions.get::<Client>().filter(|_| is_signed_stranger(&parts.headers)) else {
        return Ok(());
    };
    let rate = shared.api().rate;
    match refusal {
        None => shared.limiter.take_by_hook(&named.full(), client.address, rate),
        Some(problem) if problem.is_of_the_request() => shared.limiter.take_by_address(client.address, rate),
        Some(_) => Ok(()),
    }
}

/// What a request needs, and brings.
enum Asked {
    Signature { claim: Claim, secrets: Vec<Secret> },
    Token(Actor),
}

/// Judges the headers of a request. A webhook whose secrets cannot be read takes no request at all.
async fn asked(
    shared: &Shared,
    name: &str,
    settings: &Value,
    parts: &Parts,
    now: Timestamp,
) -> Result<Asked, Problem> {
    let references = match hook::proof(settings) {
        Ok(Proof::Secrets(references)) => references,
        Ok(Proof::Token) => {
            return match identify(shared, parts).await? {
                actor if actor.scope >= Scope::Trigger => Ok(Asked::Token(actor)),
                _ => Err(Problem::forbidden(
                    "scope_too_small",
                    "a webhook without a secret takes a token with scope trigger",
                )),
            };
        }
        Err(flaw) => {
            let detail = format!("{name} cannot check signatures: {}", flaw.message);
            return Err(Problem::unavailable("secret_wrong", detail)
                .way_out("correct the webhook's `secret`: a reference such as ${HOOK_SECRET}, or `none`"));
        }
    };
    let secrets = match resolved(&references, shared.env) {
        Ok(secrets) => secrets,
        Err((code, detail)) => {
            // The detail may name a variable of this host.
            let is_known = parts.headers.contains_key(header::AUTHORIZATION)
                && identify(shared, parts).await.is_ok_and(|actor| may_read(actor.scope));
            return Err(match is_known {
                true => Problem::unavailable(code, format!("{name} cannot check signatures: {detail}")),
                false => Problem::unavailable(code, format!("{name} cannot check signatures"))
                    .way_out("the same request with a token of scope manage is told why"),
            });
        }
    };
    let github = settings.get("github").is_some_and(|flag| flag == true || flag == "true");
    Ok(Asked::Signature { claim: Claim::of(&parts.headers, github, now)?, secrets })
}

/// The secrets behind references, from the environment of this moment. A secret that cannot be used is left out while
/// there is another. An error is a code and a detail, which holds nothing of a secret.
fn resolved(
    references: &[&str],
    env: fn(&str) -> Option<String>,
) -> Result<Vec<Secret>, (&'static str, String)> {
    let (mut found, mut flaw) = (Vec::new(), ("secret_missing", String::new()));
    for reference in references {
        match belfry_config::resolve_secret(reference, &env).map(Secret::read) {
            Ok(Ok(secret)) => found.push(secret),
            Ok(Err(Unusable::Empty)) => flaw = ("secret_missing", "a secret is empty".to_owned()),
            Ok(Err(Unusable::NotBase64)) => {
                flaw = ("secret_wrong", "what follows `whsec_` in a secret is not base64".to_owned());
            }
            Err(error) => flaw = ("secret_missing", error),
        }
    }
    if found.is_empty() { Err(flaw) } else { Ok(found) }
}

/// What a run gets of a body: an object as it is, anything else under `body`.
fn payload(body: &[u8]) -> Result<Map<String, Value>, Problem> {
    if body.is_empty() {
        return Ok(Map::new());
    }
    let looks_like_json =
        body.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|byte| b"{[\"".contains(byte));
    let value = match looks_like_json {
        true => strict::read(body)?,
        false => {
            let text = std::str::from_utf8(body).ok().filter(|text| !text.contains('\0'));
            Value::from(text.ok_or_else(|| Problem::bad("bad_body", "the body is no text"))?)
        }
    };
    Ok(match value {
        Value::Object(map) => map,
        other => Map::from_iter([("body".to_owned(), other)]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_is_not_there_signs_nothing() {
        let env = |name: &str| match name {
            "SET" => Some("s".to_owned()),
            "EMPTY" => Some(String::new()),
            "BLANK" => Some(" \t\n".to_owned()),
            "BARE" => Some("whsec_".to_owned()),
            "BARE_BLANK" => Some("whsec_  ".to_owned()),
            "ENCODED" => Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()),
            "BAD" => Some("whsec_no base64".to_owned()),
            _ => None,
        };
        for (reference, code) in [
            ("${EMPTY}", "secret_missing"),
            ("${BLANK}", "secret_missing"),
            ("x${BLANK}", "secret_missing"),
            ("${NOT:-}", "secret_missing"),
            ("${BARE}", "secret_missing"),
            ("${BARE_BLANK}", "secret_missing"),
            ("${NOT}", "secret_missing"),
            ("${BAD}", "secret_wrong"),
        ] {
            let flaw = resolved(&[reference], env).err().unwrap();
            assert_eq!(flaw.0, code, "{reference}");
            assert!(!flaw.1.contains("no base64"), "{}", flaw.1);
            for good in ["${SET}", "${ENCODED}"] {
                assert_eq!(resolved(&[good, reference], env).map(|found| found.len()), Ok(1), "{reference}");
            }
        }
        assert!(resolved(&[], env).is_err());
    }

    #[test]
    fn a_body_becomes_a_payload() {
        let of = |body: &[u8]| payload(body).map(Value::Object);
        assert_eq!(of(br#"{"ref": "main"}"#), Ok(serde_json::json!({"ref": "main"})));
        assert_eq!(of(b"[1]"), Ok(serde_json::json!({"body": [1]})));
        assert_eq!(of(b"a=1&b=2"), Ok(serde_json::json!({"body": "a=1&b=2"})));
        assert_eq!(of(b""), Ok(serde_json::json!({})));
        assert!(of(b"\xff\xfe").is_err() && of(br#"{"a":1,"a":2}"#).is_err());
    }
}
