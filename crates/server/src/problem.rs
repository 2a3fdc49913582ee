//! How a request fails: one shape, a stable code, the field, and the way out. `application/problem+json`, RFC 9457.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::reduced::Reduced;

/// Why a request was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: String,
    field: Option<Box<str>>,
    way_out: Option<Box<str>>,
    report: Option<Box<str>>,
    retry_after_s: Option<u64>,
}

/// What a problem looks like.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Problem)]
pub struct ProblemBody<'a> {
    /// The status once more.
    status: u16,
    /// What the status is called.
    title: &'a str,
    /// Stable, for programs.
    code: &'a str,
    /// For people.
    detail: &'a str,
    /// The part of the request that is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    field: Option<&'a str>,
    /// What to do instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    way_out: Option<&'a str>,
    /// Every mistake with its place, as a command line shows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    report: Option<&'a str>,
}

/// The media type of problems.
pub const MEDIA_TYPE: &str = "application/problem+json";

/// Maximum of a detail or a field, in bytes: they may quote a request, and an answer must not be as large as its request.
const TEXT_MAX: usize = 2048;

/// A text with its middle left out where it is too long.
fn bounded(text: String) -> String {
    if text.len() <= TEXT_MAX {
        return text;
    }
    let (first, last) =
        (text.floor_char_boundary(TEXT_MAX / 2), text.ceil_char_boundary(text.len() - TEXT_MAX / 2));
    format!("{} … {}", &text[..first], &text[last..])
}

impl Problem {
    pub fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Problem {
        Problem {
            status,
            code,
            detail: bounded(detail.into()),
            field: None,
            way_out: None,
            report: None,
            retry_after_s: None,
        }
    }

    /// The request cannot be read.
    pub fn bad(code: &'static str, detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, code, detail)
    }

    /// It can be read, and means nothing that could be done.
    pub fn meaningless(code: &'static str, detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, code, detail)
    }

    pub fn not_found(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::NOT_FOUND, "not_found", detail)
    }

    /// As things stand, it cannot be done.
    pub fn conflict(code: &'static str, detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::CONFLICT, code, detail)
    }

    /// This version cannot read the definition of a schedule or an agent.
    pub fn unreadable(name: &str, why: &str) -> Problem {
        Problem::conflict("unreadable", format!("{name}: {why}"))
            .way_out("use the version of Belfry that wrote it, or remove it")
    }

    pub fn forbidden(code: &'static str, detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::FORBIDDEN, code, detail)
    }

    /// Something is wrong here, not with the request.
    pub fn internal(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
    }

    /// Later it may work.
    pub fn unavailable(code: &'static str, detail: impl Into<String>) -> Problem {
        Problem { retry_after_s: Some(1), ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, code, detail) }
    }

    /// Whether the request is at fault, not this server.
    pub fn is_of_the_request(&self) -> bool {
        self.status.is_client_error()
    }

    pub fn field(mut self, field: impl Into<String>) -> Problem {
        self.field = Some(bounded(field.into()).into());
        self
    }

    pub fn way_out(mut self, way_out: impl Into<String>) -> Problem {
        self.way_out = Some(way_out.into().into());
        self
    }

    pub fn report(mut self, report: String) -> Problem {
        self.report = Some(report.into());
        self
    }

    pub fn retry_after(mut self, seconds: u64) -> Problem {
        self.retry_after_s = Some(seconds);
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = ProblemBody {
            status: self.status.as_u16(),
            title: self.status.canonical_reason().unwrap_or("Error"),
            code: self.code,
            detail: &self.detail,
            field: self.field.as_deref(),
            way_out: self.way_out.as_deref(),
            report: self.report.as_deref(),
        };
        let text = serde_json::to_string(&body).unwrap_or_default();
        let reduced = Reduced::of(&text);
        let mut response = (self.status, text).into_response();
        if let Some(reduced) = reduced {
            response.extensions_mut().insert(reduced);
        }
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"belfry\""));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<belfry_store::Error> for Problem {
    fn from(error: belfry_store::Error) -> Problem {
        let (code, detail) = (error.code(), error.marked());
        if error.is_ambiguous() {
            return Problem::unavailable(code, format!("{detail}. The change may have been made"))
                .way_out("look, or repeat it with the same Idempotency-Key");
        }
        match (error.is_refused(), error.is_retryable()) {
            (true, _) => Problem::meaningless(code, detail),
            (false, true) => Problem::unavailable(code, detail),
            (false, false) => Problem::internal(detail),
        }
    }
}

/// The code is the library's; only the status is decided here.
impl From<belfry::Error> for Problem {
    fn from(error: belfry::Error) -> Problem {
        use belfry::Error as E;
        let (code, detail) = (error.code(), error.to_string());
        match error {
            E::Store(error) => error.into(),
            E::NotFound { .. } | E::NoChat { .. } | E::NoRun { .. } | E::NoAgent { .. } => {
                Problem::new(StatusCode::NOT_FOUND, code, detail)
            }
            E::NoBreaker { .. } => Problem::new(StatusCode::NOT_FOUND, code, detail)
                .way_out("GET /api/v1/breakers lists those that have"),
            E::NoNode { .. } => {
                Problem::new(StatusCode::NOT_FOUND, code, detail).way_out("GET /api/v1/nodes lists them")
            }
            E::NoSession { .. } => Problem::new(StatusCode::NOT_FOUND, code, detail)
                .way_out("GET /api/v1/sessions lists those that somebody has"),
            E::Unreadable { name, why } => Problem::unreadable(&name, &why),
            E::KeyReused { .. } => Problem::conflict(code, detail)
                .field("Idempotency-Key")
                .way_out("use a new key for another request"),
            E::NodeDead { .. } | E::EndedBefore { .. } | E::Skipped { .. } | E::NotPaused { .. } => {
                Problem::conflict(code, detail)
            }
            E::NotEnded { .. } => Problem::conflict(code, detail).way_out("wait for it, or cancel it"),
            E::NoPayload { .. } => Problem::conflict(code, detail).way_out("make a new run with its payload"),
            E::Past { field, .. } => Problem::meaningless(code, detail).field(field),
            E::Argument { field, .. } => Problem::bad(code, detail).field(field),
            E::QueueFull { .. } => Problem::conflict(code, detail)
                .way_out("send it again when the session has caught up, or stop the session"),
            E::Stale { .. } => Problem::conflict(code, detail)
                .way_out("GET the session for its generation, and send it as a new message"),
            E::ReservedKey { key } => Problem::meaningless(code, detail).field(format!("payload.{key}")),
            E::Draining | E::Status { .. } => Problem::unavailable(code, detail),
            _ => Problem::meaningless(code, detail),
        }
    }
}

#[cfg(test)]
mod tests {
    use belfry::Error as E;
    use belfry_store::Error as S;

    use super::*;

    #[test]
    fn the_code_of_an_error_is_the_same_in_the_library_and_over_http() {
        let run = belfry::RunId(uuid::Uuid::nil());
        let name = || "a/s".to_owned();
        let unavailable = |ambiguous| E::Store(S::Unavailable { detail: "away".into(), ambiguous });
        for (error, status, code) in [
            (E::NotFound { name: name() }, 404, "not_found"),
            (E::NoNode { node: belfry::NodeId(uuid::Uuid::nil()) }, 404, "not_found"),
            (E::NoSession { session: name() }, 404, "not_found"),
            (E::NoChat { name: name(), detail: "no chat".into() }, 404, "not_found"),
            (E::KeyReused { name: name(), run }, 409, "key_reused"),
            (E::QueueFull { session: name(), cap: 1 }, 409, "queue_full"),
            (E::Stale { session: name(), generation: 1, run }, 409, "stale"),
            (E::ReservedKey { key: "text" }, 422, "reserved_key"),
            (E::Draining, 503, "draining"),
            (E::Backfill { detail: "no".into() }, 422, "backfill"),
            (E::Trigger { agent: "a".into(), schedule: "s".into(), detail: "no".into() }, 422, "refused"),
            (E::Prompt { name: name(), detail: "no".into() }, 422, "prompt"),
            (unavailable(false), 503, "store_unavailable"),
            (unavailable(true), 503, "store_unavailable"),
            (E::Store(S::Unexpected { detail: "odd".into() }), 500, "internal"),
        ] {
            assert_eq!(error.code(), code, "{error}");
            let problem = Problem::from(error);
            assert_eq!((problem.status.as_u16(), problem.code), (status, code), "{}", problem.detail);
        }
    }

    #[test]
    fn a_problem_quotes_no_more_of_a_request_than_a_person_reads() {
        let problem =
            Problem::bad("bad_field", format!("begin {} end", "ä".repeat(1 << 20))).field("x".repeat(5000));
        assert!(problem.detail.len() < 2100 && problem.field.unwrap().len() < 2100);
        assert!(
            problem.detail.starts_with("begin ") && problem.detail.ends_with(" end"),
            "{}",
            problem.detail
        );
    }
}
