//! Webhooks: a request that is signed with a schedule's secret makes a run of it. What is signed is the bytes as they came:
//! nothing is parsed before the signature holds.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use belfry::event::Name;
use belfry_core::definition::When;
use belfry_core::{Reason, RunId, SkipReason, Trigger};
use belfry_store::{Enqueue, Hooks, Key, Knock, Knocked, NewRun, ScheduleRecord, Scope, Store};
use belfry_time::{SignedDuration, Timestamp};
use hmac::{Hmac, KeyInit, Mac};
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{Routes, json};
use crate::audit;
use crate::extract::{self, Named};
use crate::guard::identify;
use crate::json as strict;
use crate::page::{hex, unhex};
use crate::problem::{Problem, ProblemBody};
use crate::state::Shared;
use crate::trace::Trace;

/// How far the sender's clock may be off.
const WINDOW_S: i64 = 300;
/// How long a request is remembered, so that it is taken once; longer than the window is open.
const REMEMBERED: SignedDuration = SignedDuration::from_hours(24);
/// Signatures in one request: one, or two while the sender changes its secret.
const SIGNATURES_MAX: usize = 2;

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
/// `X-Belfry-Signature` is `sha256=` and the hex of the HMAC-SHA256 of `TIMESTAMP.BODY` with the schedule's secret, where
/// `X-Belfry-Timestamp` is that timestamp, in seconds since 1970, within five minutes of now. Two signatures, with a comma
/// between them, are for changing the secret. With `github: true`, `X-Hub-Signature-256` will do. A body that is a JSON
/// object is the run's payload; any other is its `body`. A request is taken once. A webhook without a
/// secret takes a token with scope trigger instead.
#[utoipa::path(post, path = "/hooks/{agent}/{schedule}", operation_id = "hook", tag = "hooks", security(()),
    params(("agent" = String, Path, description = "Whose"), ("schedule" = String, Path, description = "Which"),
        ("X-Belfry-Timestamp" = Option<String>, Header, description = "Seconds since 1970", nullable = false),
        ("X-Belfry-Signature" = Option<String>, Header, description = "`sha256=HEX`", nullable = false),
        ("X-Hub-Signature-256" = Option<String>, Header, description = "GitHub's, where it is configured", nullable = false)),
    request_body(content = Option<Value>, content_type = "application/json"),
    responses(
        (status = 202, description = "The run that it made", body = Accepted),
        (status = 401, description = "Not signed, or not so", body = ProblemBody, content_type = "application/problem+json"),
        (status = 409, description = "Taken before, or refused by the rules of the schedule; the code is the reason", body = ProblemBody, content_type = "application/problem+json"),
    ))]
async fn hook(
    State(shared): State<Arc<Shared>>,
    Extension(trace): Extension<Trace>,
    named: Named,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, stream) = request.into_parts();
    // No more is read, and hashed, than is allowed.
    let body = extract::body(&shared, &parts.headers, stream).await?;
    let now = shared.now();
    let record = shared.store().schedule(&named.full()).await?;
    let no_hook = || Problem::not_found(format!("there is no webhook {}", named.full()));
    let record = record.ok_or_else(no_hook)?;
    let When::Webhook(settings) = &record.definition.when else { return Err(no_hook()) };
    let secrets = secrets(settings, shared.env).map_err(|detail| {
        Problem::unavailable("secret_missing", format!("{} cannot check signatures: {detail}", record.name))
    })?;
    if secrets.is_empty() && identify(&shared, &parts).await?.scope < Scope::Trigger {
        return Err(Problem::forbidden(
            "scope_too_small",
            "a webhook without a secret takes a token with scope trigger",
        ));
    }
    let key = verify(&parts.headers, &body, &secrets, settings, now)?;
    shared.refuse_draining()?;
    let payload = payload(&body)?;
    audit::begin().await?;
    let run = knock(&shared, &record, payload, key, now, trace).await?;
    shared.tell_run(Name::RunCreated, &named, run, trace);
    shared.engine.hint().await;
    Ok(json(StatusCode::ACCEPTED, &Accepted { run_id: run }))
}

/// The secrets of a webhook, from the environment of this moment. An empty one is none.
fn secrets(settings: &Value, env: fn(&str) -> Option<String>) -> Result<Vec<String>, String> {
    let several = ["secret", "secrets"].into_iter().filter_map(|key| settings.get(key));
    let references = several.flat_map(|secret| match secret {
        Value::Array(several) => several.iter().collect::<Vec<_>>(),
        one => vec![one],
    });
    let (mut found, mut missing, mut written) = (Vec::new(), None, 0);
    for reference in references.filter_map(Value::as_str) {
        written += 1;
        match belfry_config::resolve_secret(reference, &env) {
            Ok(secret) if !secret.is_empty() => found.push(secret),
            Ok(_) => missing = Some("a secret is empty".to_owned()),
            Err(error) => missing = Some(error),
        }
    }
    match (found.is_empty(), missing, written) {
        (false, ..) => Ok(found),
        (true, Some(missing), _) => Err(missing),
        // Then a token is asked for.
        (true, None, _) => Ok(Vec::new()),
    }
}

/// Checks the signature, and gives what the request is remembered by.
fn verify(
    headers: &HeaderMap,
    body: &[u8],
    secrets: &[String],
    settings: &Value,
    now: Timestamp,
) -> Result<Option<String>, Problem> {
    let refused = |code: &'static str, detail: &str| Problem::new(StatusCode::UNAUTHORIZED, code, detail);
    let one = |name: &str| {
        let mut values = headers.get_all(name).iter();
        values.next().filter(|_| values.next().is_none()).and_then(|value| value.to_str().ok())
    };
    if secrets.is_empty() {
        return Ok(None);
    }
    let github = settings.get("github").is_some_and(|flag| flag == true || flag == "true");
    if let Some(signature) =
        one("x-hub-signature-256").filter(|_| github && !headers.contains_key("x-belfry-signature"))
    {
        return match is_signed(signature, &[body], secrets) {
            // It has no timestamp: what is remembered is what was said.
            true => Ok(Some(format!("github {}", hex(&Sha256::digest(body))))),
            false => Err(refused("signature_wrong", "the signature is not that of this body")
                .field("X-Hub-Signature-256")),
        };
    }
    let (Some(timestamp), Some(signature)) = (one("x-belfry-timestamp"), one("x-belfry-signature")) else {
        return Err(refused(
            "signature_missing",
            "a request is signed: X-Belfry-Timestamp and X-Belfry-Signature, once each",
        )
        .way_out("X-Belfry-Signature: sha256=HEX of the HMAC-SHA256 of TIMESTAMP.BODY"));
    };
    let plain =
        !timestamp.is_empty() && timestamp.len() <= 12 && timestamp.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = timestamp.parse::<i64>().ok().filter(|_| plain);
    let seconds = seconds.ok_or_else(|| {
        refused("timestamp_wrong", "the timestamp must be seconds since 1970").field("X-Belfry-Timestamp")
    })?;
    if !is_signed(signature, &[timestamp.as_bytes(), b".", body], secrets) {
        return Err(
            refused("signature_wrong", "the signature is not that of this body").field("X-Belfry-Signature")
        );
    }
    if (now.as_second() - seconds).abs() > WINDOW_S {
        return Err(refused("timestamp_late", "the timestamp is more than five minutes away from now")
            .field("X-Belfry-Timestamp"));
    }
    let mut said = Sha256::new();
    said.update(timestamp.as_bytes());
    said.update(b".");
    said.update(body);
    Ok(Some(format!("webhook {}", hex(&said.finalize()))))
}

/// Whether one of the signatures is made with one of the secrets. All are looked at, whichever fits.
fn is_signed(signatures: &str, pieces: &[&[u8]], secrets: &[String]) -> bool {
    let given: Vec<&str> = signatures.split(',').map(str::trim).collect();
    if given.len() > SIGNATURES_MAX {
        return false;
    }
    let mut fits = false;
    for secret in secrets {
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret.as_bytes()) else { continue };
        pieces.iter().for_each(|piece| mac.update(piece));
        let right = mac.finalize().into_bytes();
        for signature in &given {
            let bytes = signature.strip_prefix("sha256=").filter(|text| text.len() == 64).and_then(unhex);
            fits |= bytes.is_some_and(|bytes| crate::secret::same(&bytes, &right));
        }
    }
    fits
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

async fn knock(
    shared: &Shared,
    record: &ScheduleRecord,
    payload: Map<String, Value>,
    key: Option<String>,
    now: Timestamp,
    trace: Trace,
) -> Result<RunId, Problem> {
    let mut run = belfry::prepare(shared.store(), &shared.options, now, &record.name).await?;
    if let Value::Object(merged) = &mut run.payload {
        merged.extend(payload);
    }
    let run = NewRun { trigger: Trigger::Webhook, trace_id: Some(trace.id), ..run };
    let id = run.id;
    let expires_at = now.saturating_add(REMEMBERED).unwrap_or(Timestamp::MAX);
    let key = key.map(|key| Key { key, body_hash: Vec::new(), expires_at });
    let knock = Knock { enqueue: Enqueue { run, key }, options: record.definition.options.clone() };
    match shared.store().knock(now, &knock).await? {
        Knocked::Made { cancel } => {
            for run in cancel {
                shared.store().cancel(now, run, Reason::Overlap).await?;
            }
            Ok(id)
        }
        Knocked::Repeat(first) => {
            Err(Problem::conflict("replayed", format!("this request has made run {first} already")))
        }
        Knocked::Refused(reason) => Err(Problem::conflict(reason.as_str(), refusal(&record.name, reason))),
        Knocked::NotFound => Err(Problem::not_found(format!("{} is gone", record.name))),
    }
}

fn refusal(name: &str, reason: SkipReason) -> String {
    format!("{name} makes no run now: {}", belfry::skip_words(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_790_000_000;

    fn sign(secret: &str, timestamp: &str, body: &[u8]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
        for piece in [timestamp.as_bytes(), b".", body] {
            mac.update(piece);
        }
        format!("sha256={}", hex(&mac.finalize().into_bytes()))
    }

    fn judge(
        timestamp: &str,
        signature: &str,
        body: &[u8],
        secrets: &[&str],
    ) -> Result<Option<String>, Problem> {
        let mut headers = HeaderMap::new();
        headers.insert("x-belfry-timestamp", timestamp.parse().unwrap());
        headers.insert("x-belfry-signature", signature.parse().unwrap());
        let secrets: Vec<String> = secrets.iter().map(ToString::to_string).collect();
        verify(&headers, body, &secrets, &Value::Null, Timestamp::from_second(NOW).unwrap())
    }

    #[test]
    fn a_signature_over_the_bytes_as_they_came_holds() {
        let (at, body) = (NOW.to_string(), br#"{"b": 1,  "a": 2}"#);
        let good = sign("one", &at, body);
        let key = judge(&at, &good, body, &["one"]).unwrap().unwrap();
        assert_eq!(
            judge(&at, &good, body, &["new", "one"]).unwrap().unwrap(),
            key,
            "the old secret, while it changes"
        );
        let both = format!("{}, {good}", sign("new", &at, body));
        assert_eq!(
            judge(&at, &both, body, &["one"]).unwrap().unwrap(),
            key,
            "two signatures, the same request"
        );
        assert_eq!(
            judge(&at, &good.to_uppercase().replace("SHA256", "sha256"), body, &["one"]).unwrap().unwrap(),
            key
        );
    }

    #[test]
    fn what_is_not_signed_so_is_refused() {
        let (at, body) = (NOW.to_string(), br#"{"a":1}"#.as_slice());
        let good = sign("one", &at, body);
        let three = format!("{good},{good},{good}");
        for (signature, body) in [
            (good.as_str(), br#"{"a": 1}"#.as_slice()),
            (&sign("other", &at, body), body),
            (&sign("", &at, body), body),
            (&good[..70], body),
            (&good.replace("sha256=", "sha1="), body),
            (&good.replace("sha256=", ""), body),
            ("sha256=", body),
            (&three, body),
        ] {
            assert!(judge(&at, signature, body, &["one"]).is_err(), "{signature}");
        }
    }

    #[test]
    fn a_timestamp_is_good_for_five_minutes() {
        let body = b"x";
        for (seconds, good) in [(-300, true), (300, true), (-301, false), (301, false)] {
            let at = (NOW + seconds).to_string();
            assert_eq!(judge(&at, &sign("one", &at, body), body, &["one"]).is_ok(), good, "{seconds}");
        }
        for at in ["", "now", "-5", "1e9", "+1790000000", "99999999999999999999", " 1790000000"] {
            let signature = sign("one", at, body);
            assert!(judge(at, &signature, body, &["one"]).is_err(), "{at}");
        }
    }

    #[test]
    fn a_secret_that_is_not_there_signs_nothing() {
        let env = |name: &str| match name {
            "SET" => Some("s".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        let of = |settings: Value| secrets(&settings, env);
        assert_eq!(of(serde_json::json!({"secret": "${SET}", "secrets": ["${NOT}"]})), Ok(vec!["s".into()]));
        assert!(of(serde_json::json!({"secret": "${EMPTY}"})).is_err());
        assert!(of(serde_json::json!({"secret": ["${NOT}"]})).is_err());
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
