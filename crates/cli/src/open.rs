//! `belfry open`: a link that logs a browser in.

use belfry_time::Timestamp;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::failure::Failure;
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;

/// Print a link that logs a browser in to the running server
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry open
  belfry open -o json

The link works once, within ten minutes. The browser stays logged in for twelve hours, also when the server restarts;
`belfry token ls` lists it, and `belfry token revoke` logs it out.")]
pub struct Open {}

/// The link.
#[derive(Serialize, Deserialize)]
struct Link {
    url: String,
    expires_at: Timestamp,
}

impl Open {
    /// Asks the server for a link, and prints it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let link: Link = client.post("/api/v1/logins", &json!({})).await?;
            reach::answer(output, &link, &link.url)
        })
    }
}
