//! How parts of a request come in: checked, bounded, and with a problem that names the part where they cannot be read.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::bodies::Share;
use crate::crowd::Asking;
use crate::gather::Gather;
use crate::json;
use crate::problem::Problem;
use crate::state::Shared;

/// Longer names are nobody's.
const NAME_MAX: usize = 256;
/// Longer keys are refused.
const KEY_MAX: usize = 256;
/// Room for a body is found in steps of so many bytes.
const STEP_BYTES: usize = 64 << 10;

/// The query, with nothing in it that is not known.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<Shared>> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Shared>) -> Result<Params<T>, Problem> {
        let query = parts.uri.query().unwrap_or_default();
        if query.contains("%00") {
            return Err(Problem::meaningless("bad_query", "the query holds a NUL character"));
        }
        match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Params(params)),
            Err(error) => {
                let detail =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                let field = detail
                    .split(['`', ':'])
                    .map(str::trim)
                    .find(|word| query.contains(word) && !word.is_empty());
                let field = field.map(str::to_owned);
                let problem = Problem::bad("bad_query", format!("the query cannot be read: {detail}"));
                Err(match field {
                    Some(field) => problem.field(field),
                    None => problem,
                })
            }
        }
    }
}

/// Segments of the path.
async fn segments<T: DeserializeOwned + Send>(parts: &mut Parts) -> Result<T, Problem> {
    let nothing = || Problem::not_found("the path names nothing that could be here");
    Path::<T>::from_request_parts(parts, &()).await.map(|Path(found)| found).map_err(|_| nothing())
}

/// Whether a text could be the name of anything.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= NAME_MAX && !text.chars().any(|c| c.is_control() || c == '/')
}

/// `{agent}/{name}` of the path.
pub struct Named {
    pub agent: String,
    pub schedule: String,
}

impl Named {
    /// `agent/schedule`.
    pub fn full(&self) -> String {
        format!("{}/{}", self.agent, self.schedule)
    }
}

impl FromRequestParts<Arc<Shared>> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Shared>) -> Result<Named, Problem> {
        let (agent, schedule): (String, String) = segments(parts).await?;
        if !is_name(&agent) || !is_name(&schedule) {
            return Err(Problem::not_found("there is no such schedule: the path holds no name"));
        }
        Ok(Named { agent, schedule })
    }
}

/// `{agent}/{schedule}/{key}` of the path.
pub struct SessionPath {
    named: Named,
    pub key: String,
}

impl SessionPath {
    /// `agent/schedule`.
    pub fn name(&self) -> String {
        self.named.full()
    }

    /// `agent/schedule:key`.
    pub fn address(&self) -> String {
        format!("{}:{}", self.named.full(), self.key)
    }
}

impl FromRequestParts<Arc<Shared>> for SessionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Shared>) -> Result<SessionPath, Problem> {
        let (agent, schedule, key): (String, String, String) = segments(parts).await?;
        let is_key = !key.is_empty() && key.len() <= NAME_MAX && !key.chars().any(char::is_control);
        // The first colon ends the name of a schedule.
        if !is_name(&agent)
            || !is_name(&schedule)
            || [&agent, &schedule].iter().any(|name| name.contains(':'))
            || !is_key
        {
            return Err(Problem::not_found("there is no such session: the path holds no name and key"));
        }
        Ok(SessionPath { named: Named { agent, schedule }, key })
    }
}

/// The one segment of the path that varies.
pub struct Segment(pub String);

impl FromRequestParts<Arc<Shared>> for Segment {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Shared>) -> Result<Segment, Problem> {
        let text: String = segments(parts).await?;
        match is_name(&text) {
            true => Ok(Segment(text)),
            false => Err(Problem::not_found("there is nothing of that name")),
        }
    }
}

/// A run's id in the path.
pub struct RunPath(pub belfry_core::RunId);

impl FromRequestParts<Arc<Shared>> for RunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Shared>) -> Result<RunPath, Problem> {
        let text: String = segments(parts).await?;
        // As ids are written, and in no other way.
        let id = Some(&text).filter(|text| text.len() == 36).and_then(|text| text.parse().ok());
        id.map(|id| RunPath(belfry_core::RunId(id))).ok_or_else(|| {
            Problem::not_found("there is no such run: its id is none").way_out(
                "ids look like 0198c0de-7a11-7000-8000-0123456789ab, and GET /api/v1/runs lists them",
            )
        })
    }
}

/// Reads a body: no more of it and no longer than is allowed, within the memory for all bodies. What it takes of that
/// memory it keeps until the request is answered.
pub async fn body(shared: &Shared, parts: &Parts, body: Body) -> Result<Bytes, Problem> {
    let headers = &parts.headers;
    let max = shared.api().max_body_bytes;
    let too_large = || {
        Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the body is longer than {max} bytes"),
        )
        .way_out("send less, or raise `api.max_body`")
    };
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > max) {
        return Err(too_large());
    }
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        let detail = "the body is encoded; it must be sent as it is";
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "encoded_body", detail)
            .field("Content-Encoding"));
    }
    // Without a guard there is nobody to keep it: then it is given back once the body is read.
    let share = parts.extensions.get::<Share>().cloned().unwrap_or_default();
    // While it is awaited the connection makes room for another, as one does that sends no head.
    let _waiting = parts.extensions.get::<Asking>().map(Asking::waiting);
    let bytes_max = usize::try_from(length.unwrap_or(max)).unwrap_or(usize::MAX);
    let mut limited = Limited::new(body, usize::try_from(max).unwrap_or(usize::MAX));
    let reading = async {
        let mut all = Gather::new(bytes_max).map_err(|error| {
            let detail = format!("the system gave no memory for the body: {error}");
            Problem::unavailable("too_many_bodies", detail).way_out("try again in a moment")
        })?;
        loop {
            // Room is found before more is read: what waits for it stays with the sender.
            let next = match length {
                Some(_) => bytes_max.min(all.len() + STEP_BYTES),
                None => all.len(),
            };
            shared.bodies.grow(&share, next, bytes_max).await?;
            let Some(frame) = limited.frame().await else { break };
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => too_large(),
                false => Problem::bad("bad_body", format!("the body ended early: {error}")),
            })?;
            let Ok(data) = frame.into_data() else { continue };
            shared.bodies.grow(&share, all.len() + data.len(), bytes_max).await?;
            if !all.add(&data) {
                return Err(too_large());
            }
        }
        Ok(all.done())
    };
    let reading = async {
        tokio::select! {
            all = reading => all,
            problem = share.ended() => Err(problem),
        }
    };
    match tokio::time::timeout(shared.limits.body_within, reading).await {
        Ok(all) => {
            share.read();
            all
        }
        Err(_) => Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the body did not come in time")),
    }
}

/// A JSON object as the body.
pub struct Object(pub Map<String, Value>);

impl FromRequest<Arc<Shared>> for Object {
    type Rejection = Problem;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<Object, Problem> {
        let (parts, stream) = request.into_parts();
        let bytes = body(shared, &parts, stream).await?;
        if bytes.is_empty() {
            return Err(Problem::bad("bad_json", "the body is empty; it must be a JSON object"));
        }
        object(shared, &parts, &bytes).await
    }
}

/// A JSON object as the body, or no body at all.
pub struct MaybeObject(pub Map<String, Value>);

impl FromRequest<Arc<Shared>> for MaybeObject {
    type Rejection = Problem;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<MaybeObject, Problem> {
        let (parts, stream) = request.into_parts();
        let bytes = body(shared, &parts, stream).await?;
        if bytes.is_empty() {
            return Ok(MaybeObject(Map::new()));
        }
        if bytes.trim_ascii() == b"null" {
            return Ok(MaybeObject(Map::new()));
        }
        object(shared, &parts, &bytes).await.map(|Object(map)| MaybeObject(map))
    }
}

impl MaybeObject {
    /// As what it is meant to be.
    pub fn read<T: DeserializeOwned>(self) -> Result<T, Problem> {
        read(self.0)
    }
}

/// Numbers such as `5.0` as whole ones: to JSON they are the same. What is inside other values is left as it is.
pub fn whole(mut map: Map<String, Value>) -> Map<String, Value> {
    // Beyond this a floating point number no longer names one whole number.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    for value in map.values_mut() {
        let number =
            value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0 && number.abs() <= EXACT);
        if let Some(number) = number {
            *value = Value::from(number as i64);
        }
    }
    map
}

/// An object as what it is meant to be.
pub fn read<T: DeserializeOwned>(map: Map<String, Value>) -> Result<T, Problem> {
    serde_path_to_error::deserialize(Value::Object(whole(map))).map_err(|error| {
        let words = error.inner().to_string();
        let path = error.path().to_string();
        // The path of a field that is missing ends above it, and that of one too many at it.
        let missing = words.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let field = match (path.as_str(), missing) {
            (".", Some(missing)) => missing.to_owned(),
            (path, Some(missing)) => format!("{path}.{missing}"),
            (path, None) => path.to_owned(),
        };
        let detail = match missing {
            Some(_) => words,
            None => format!("{field}: {words}"),
        };
        Problem::bad("bad_field", format!("the body cannot be read: {detail}")).field(field)
    })
}

async fn object(shared: &Shared, parts: &Parts, bytes: &[u8]) -> Result<Object, Problem> {
    let kind =
        parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let detail = format!("the body must be application/json, got {kind:?}");
        return Err(
            Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", detail).field("Content-Type")
        );
    }
    make_room(shared, parts, bytes).await?;
    match json::read(bytes)? {
        Value::Object(map) => Ok(Object(map)),
        _ => Err(Problem::bad("bad_json", "the body must be a JSON object")),
    }
}

/// Waits for the memory that a JSON document takes beside its text. It is kept as that of the body is.
pub async fn make_room(shared: &Shared, parts: &Parts, bytes: &[u8]) -> Result<(), Problem> {
    match parts.extensions.get::<Share>() {
        Some(share) => shared.bodies.open(share, json::memory(bytes)).await,
        None => Ok(()),
    }
}

/// The `Idempotency-Key` of a request.
pub struct Key(pub Option<String>);

impl FromRequestParts<Arc<Shared>> for Key {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Shared>) -> Result<Key, Problem> {
        let Some(value) = parts.headers.get("idempotency-key") else { return Ok(Key(None)) };
        let is_plain = value.as_bytes().iter().all(|byte| (b'!'..=b'~').contains(byte));
        let text = value.to_str().ok().filter(|key| is_plain && !key.is_empty() && key.len() <= KEY_MAX);
        match text {
            Some(key) => Ok(Key(Some(key.to_owned()))),
            None => {
                let detail =
                    format!("an idempotency key is 1-{KEY_MAX} printable ASCII characters without blanks");
                Err(Problem::bad("bad_key", detail).field("Idempotency-Key"))
            }
        }
    }
}

impl Key {
    /// Refuses a key that was used with another body for the same kind of request.
    pub async fn refuse_reused(
        &self,
        shared: &Shared,
        operation: &str,
        body: &impl Serialize,
    ) -> Result<(), Problem> {
        let Key(Some(key)) = self else { return Ok(()) };
        let text = serde_json::to_vec(body).map_err(|error| Problem::internal(error.to_string()))?;
        let body_hash = Sha256::digest(&text).to_vec();
        match shared.engine.use_key(format!("{operation} {key}"), body_hash).await? {
            true => Ok(()),
            false => Err(Problem::conflict("key_reused", "this key was used for another request")
                .field("Idempotency-Key")
                .way_out("use a new key for a new request")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "only read")]
    struct Outer {
        count: u32,
        #[serde(default)]
        inner: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "only read")]
    struct Inner {
        flag: bool,
    }

    #[test]
    fn a_field_that_cannot_be_read_is_named() {
        for (body, field) in [
            (json!({}), "count"),
            (json!({"count": "5"}), "count"),
            (json!({"count": -1}), "count"),
            (json!({"count": 5e9}), "count"),
            (json!({"count": 5, "more": 1}), "more"),
            (json!({"count": 5, "inner": {}}), "inner"),
            (json!({"count": 5, "inner": [{"flag": true}, {"flag": "yes"}]}), "inner[1].flag"),
            (json!({"count": 5, "inner": [{}]}), "inner[0].flag"),
            (json!({"count": 5, "inner": [{"flag": true, "x": 1}]}), "inner[0].x"),
        ] {
            let Value::Object(map) = body.clone() else { unreachable!() };
            let problem = format!("{:?}", read::<Outer>(map).unwrap_err());
            assert!(problem.contains(&format!("field: Some({field:?})")), "{body}: {problem}");
        }
    }
}
