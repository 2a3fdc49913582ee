//! `belfry token`: who may do what over HTTP.

use belfry::api::List;
use belfry_time::{Timestamp, Zone, parse_duration};
use clap::{Args, Subcommand, ValueEnum};
use comfy_table::Color;
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::{Client, encoded};
use crate::failure::{Failure, InOption};
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reach;
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

/// Create, list and revoke tokens for the HTTP API
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry token create --scope trigger --ttl 90d --label \"deploy script\"
  belfry token ls
  belfry token revoke 3f9a2c41

A token is shown once, and only its hash is kept. Programs and other hosts need one; commands on this host use the local
token of the running server. A revoked token is refused within a second, and streams that it reads end.")]
pub struct Token {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Create a token, and show it
    Create {
        /// What it allows; each allows what those before it do
        #[arg(long, value_enum)]
        scope: ScopeArg,
        /// How long it is good [default: for ever]
        #[arg(long, value_name = "DURATION")]
        ttl: Option<String>,
        /// What it is for
        #[arg(long, value_name = "TEXT", default_value = "")]
        label: String,
    },
    /// List tokens and browser logins, good or not
    Ls,
    /// Revoke a token or a browser login
    Revoke {
        /// The id that `ls` shows, or the token itself
        id: String,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScopeArg {
    /// To look
    Read,
    /// To start and to end runs
    Trigger,
    /// To change schedules
    Manage,
    /// Everything
    Admin,
}

/// A token, with itself only when it is made.
#[derive(Serialize, Deserialize)]
struct Shown {
    id: String,
    kind: String,
    scope: String,
    label: String,
    created_at: Timestamp,
    expires_at: Option<Timestamp>,
    revoked_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl Token {
    /// Does it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reach::block_on(async {
            // Only a token that is made needs a store to be kept in.
            let need = if matches!(self.verb, Verb::Create { .. }) { Need::Files } else { Need::Store };
            let client = place.client(need).await?;
            match &self.verb {
                Verb::Create { scope, ttl, label } => {
                    create(&client, *scope, ttl.as_deref(), label, output).await
                }
                Verb::Ls => list(&client, &zone, output).await,
                Verb::Revoke { id } => revoke(&client, id, output).await,
            }
        })
    }
}

async fn create(
    client: &Client,
    scope: ScopeArg,
    ttl: Option<&str>,
    label: &str,
    output: &Output,
) -> Result<(), Failure> {
    let ttl = ttl.map(|text| parse_duration(text).in_option("--ttl")).transpose()?;
    let scope = scope.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let body = json!({
        "scope": scope,
        "label": words::one_line(label, 200),
        "ttl_ms": ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
    });
    let made: Shown = client.post("/api/v1/tokens", &body).await?;
    if output.format == Format::Table {
        reach::say("Copy it now: it is not shown again.");
    }
    reach::answer(output, &made, made.token.as_deref().unwrap_or_default())
}

async fn list(client: &Client, zone: &Zone, output: &Output) -> Result<(), Failure> {
    let tokens = client.get::<List<Shown>>("/api/v1/tokens").await?.items;
    if output.format != Format::Table {
        return reading::print_items(output.format, tokens);
    }
    if tokens.is_empty() {
        reading::remark(
            "no tokens; commands on this host need none, and `belfry token create` makes one for a program",
        );
        return Ok(());
    }
    let now = client.now();
    let mut sheet = Sheet::new(&[
        column("ID"),
        column("KIND"),
        column("SCOPE"),
        column("STATUS"),
        column("CREATED").rank(1),
        column("EXPIRES").rank(2),
        column("LABEL").wraps(40),
    ]);
    for token in &tokens {
        let is_good = token.expires_at.is_none_or(|at| now < at);
        let (status, colour) = match (token.revoked_at, is_good) {
            (Some(_), _) => ("revoked", Some(Color::Red)),
            (None, true) => ("good", Some(Color::Green)),
            (None, false) => ("expired", Some(Color::Yellow)),
        };
        sheet.row(vec![
            token.id.clone(),
            token.kind.clone(),
            token.scope.clone(),
            status.into(),
            words::short(token.created_at, now, zone),
            token.expires_at.map_or_else(String::new, |at| words::short(at, now, zone)),
            words::one_line(&token.label, 60),
        ]);
        sheet.colour("STATUS", colour);
    }
    reading::print_text(&sheet.render())
}

#[derive(Serialize)]
struct Revoked<'a> {
    revoked: &'a str,
}

async fn revoke(client: &Client, given: &str, output: &Output) -> Result<(), Failure> {
    // Whoever has only the token at hand may give that.
    let id = belfry_server::token_id(given).unwrap_or(given);
    match client.send::<()>(Method::DELETE, &format!("/api/v1/tokens/{}", encoded(id)), None, &[]).await {
        Ok(()) => reach::answer(output, &Revoked { revoked: id }, &format!("{id} revoked")),
        Err(Failure::NotFound(words)) => {
            Err(Failure::NotFound(format!("{words}; `belfry token ls` lists them")))
        }
        Err(other) => Err(other),
    }
}
