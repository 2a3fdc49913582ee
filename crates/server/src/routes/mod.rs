//! The routes, one file a subject. Each says in its `security` which scope it takes: the guard enforces exactly that, and
//! refuses a route that says nothing. To add one: write the handler with `#[utoipa::path]`, and name it in its file's
//! `router`. How any route can fail is added to the document once, in `finish`.

mod actions;
mod agents;
mod breakers;
mod budgets;
mod edit;
mod events;
pub mod health;
mod hooks;
mod lanes;
mod log;
mod login;
mod nodes;
mod runs;
mod schedules;
mod sessions;
mod snapshots;
mod ticks;
mod tokens;
mod written;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi as Document, Ref, RefOr, ResponseBuilder};
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::problem::{self, Problem, ProblemBody};
use crate::reduced::Reduced;
use crate::state::Shared;

pub type Routes = OpenApiRouter<Arc<Shared>>;

/// What the document says of itself.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Belfry",
        description = "Decides when work runs, how much of it at once, and what happens when it goes wrong. Every \
                       request carries `Authorization: Bearer TOKEN`, except to the few routes that need no token.",
        license(name = "MIT OR Apache-2.0"),
        contact()
    ),
    components(schemas(ProblemBody))
)]
struct Base;

/// All routes, with the document that describes them.
pub fn all() -> Routes {
    let mut document = Base::openapi();
    let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    document.components.get_or_insert_default().add_security_scheme("token", bearer);
    OpenApiRouter::with_openapi(document)
        .merge(health::router())
        .merge(schedules::router())
        .merge(edit::router())
        .merge(written::router())
        .merge(actions::router())
        .merge(ticks::router())
        .merge(agents::router())
        .merge(runs::router())
        .merge(log::router())
        .merge(breakers::router())
        .merge(budgets::router())
        .merge(sessions::router())
        .merge(lanes::router())
        .merge(nodes::router())
        .merge(snapshots::router())
        .merge(tokens::router())
        .merge(login::router())
        .merge(events::router())
        .merge(hooks::router())
        .routes(routes!(document_route))
}

/// The document that describes this API
#[utoipa::path(get, path = "/api/openapi.json", operation_id = "openapi", tag = "health", security(()),
    responses((status = 200, description = "OpenAPI 3.1", body = Object)))]
async fn document_route(State(shared): State<Arc<Shared>>) -> Response {
    let text = shared.document.get_or_init(crate::openapi).clone();
    (StatusCode::OK, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// Adds to each operation how it can fail for reasons that all share.
pub fn finish(mut document: Document) -> Document {
    for (path, item) in &mut document.paths.paths {
        let PathItem { get, put, post, patch, delete, .. } = item;
        for operation in [get, put, post, patch, delete].into_iter().flatten() {
            failures(path, operation);
        }
    }
    document
}

fn failures(path: &str, operation: &mut Operation) {
    let mut all = vec![
        ("400", "The request cannot be read"),
        ("403", "Not from here, or not with this token"),
        ("429", "Too often"),
        ("503", "Not now: the store does not answer, or the node is ending"),
    ];
    if path.contains('{') {
        all.push(("404", "There is none"));
    }
    if path.starts_with("/api/v1") || path == "/metrics" {
        all.push(("401", "The token is missing or wrong"));
    }
    if operation.request_body.is_some() {
        all.extend([
            ("408", "The body did not come in time"),
            ("413", "The body is too long"),
            ("415", "The body is not application/json"),
        ]);
    }
    if operation.request_body.is_some() || operation.parameters.is_some() {
        all.push(("422", "The request can be read, and means nothing that could be done"));
    }
    for (status, description) in all {
        operation
            .responses
            .responses
            .entry(status.to_owned())
            .or_insert_with(|| RefOr::T(failure(description)));
    }
}

fn failure(description: &str) -> utoipa::openapi::Response {
    let schema = Ref::from_schema_name(ProblemBody::name());
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new().description(description).content(problem::MEDIA_TYPE, content).build()
}

/// Nothing is there.
pub async fn nothing() -> Problem {
    Problem::not_found("there is nothing at this path").way_out("GET /api/openapi.json lists what there is")
}

/// Something is there, but not for this method.
pub async fn no_such_method() -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this path does not take this method")
}

/// An answer in JSON.
pub fn json<T: serde::Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => {
            let reduced = Reduced::of(&text);
            let mut response = (status, [(header::CONTENT_TYPE, "application/json")], text).into_response();
            if let Some(reduced) = reduced {
                response.extensions_mut().insert(reduced);
            }
            response
        }
        Err(error) => Problem::internal(error.to_string()).into_response(),
    }
}
