//! The routes, one file a subject. Each says in its `security` which scope it takes: the guard enforces exactly that, and
//! refuses a route that says nothing. To add one: write the handler with `#[utoipa::path]`, and name it in its file's
//! `router`.

pub mod health;
mod runs;
mod schedules;

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;

use crate::problem::ProblemBody;
use crate::state::Shared;

pub type Routes = OpenApiRouter<Arc<Shared>>;

/// What the document says of itself.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Belfry",
        description = "Decides when work runs, how much of it at once, and what happens when it goes wrong.",
        license(name = "MIT OR Apache-2.0"),
        contact()
    ),
    components(schemas(ProblemBody))
)]
struct Document;

/// All routes, with the document that describes them.
pub fn all() -> Routes {
    let mut document = Document::openapi();
    let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    document.components.get_or_insert_default().add_security_scheme("token", bearer);
    OpenApiRouter::with_openapi(document)
        .merge(health::router())
        .merge(schedules::router())
        .merge(runs::router())
}

/// JSON that was written already, or can be.
pub fn json<T: serde::Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => {
            (status, [(axum::http::header::CONTENT_TYPE, "application/json")], bytes).into_response()
        }
        Err(error) => crate::problem::Problem::internal(error.to_string()).into_response(),
    }
}
