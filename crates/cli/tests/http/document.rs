//! The document that describes the API is kept: who changes it sees so.

use std::path::Path;

use crate::client::{Api, CONFIG};
use crate::support::Site;

#[test]
fn the_document_is_the_one_that_is_kept() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/openapi.json");
    let document = format!("{}\n", belfry_server::openapi());
    if std::env::var_os("BELFRY_GOLDEN").is_some() {
        std::fs::write(&file, &document).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(kept == document, "it has changed: `cargo xtask golden` writes it anew, and the diff is read");
}

#[test]
fn the_server_gives_the_same_document() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let served = api.get("/api/openapi.json").is(200);
    let kept: serde_json::Value = serde_json::from_str(&belfry_server::openapi()).unwrap();
    assert_eq!(served, kept);
    assert_eq!(served["openapi"], "3.1.0");
    assert_eq!(served["info"]["title"], "Belfry");
}
