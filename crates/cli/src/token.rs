//! `belfry token`: who may do what over HTTP.

use belfry_store::{Access, AddedToken, Scope, TOKENS_MAX, TokenRecord};
use belfry_time::{Timestamp, Zone, parse_duration};
use clap::{Args, Subcommand, ValueEnum};
use comfy_table::Color;
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::noted::{Deed, noted};
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

/// Make, list and revoke tokens for the HTTP API
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry token create --scope trigger --ttl 90d --label \"deploy script\"
  belfry token ls
  belfry token revoke 3f9a2c41

A token is shown once, and only its hash is kept. As soon as there is one, the API takes nothing without. One that is revoked is
refused within a second.")]
pub struct Token {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a token, and show it
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
    /// List tokens, good or not
    Ls,
    /// Make a token good no longer
    Revoke {
        /// Which: the part between the underscores, or as `ls` shows it
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

impl From<ScopeArg> for Scope {
    fn from(scope: ScopeArg) -> Scope {
        match scope {
            ScopeArg::Read => Scope::Read,
            ScopeArg::Trigger => Scope::Trigger,
            ScopeArg::Manage => Scope::Manage,
            ScopeArg::Admin => Scope::Admin,
        }
    }
}

#[derive(Serialize)]
struct Shown<'a> {
    id: &'a str,
    scope: &'static str,
    label: &'a str,
    created_at: Timestamp,
    expires_at: Option<Timestamp>,
    revoked_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'a str>,
}

impl<'a> Shown<'a> {
    fn of(record: &'a TokenRecord, token: Option<&'a str>) -> Shown<'a> {
        Shown {
            id: &record.id,
            scope: record.scope.as_str(),
            label: &record.label,
            created_at: record.created_at,
            expires_at: record.expires_at,
            revoked_at: record.revoked_at,
            token,
        }
    }
}

impl Token {
    /// Does it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reach::block_on(async {
            let reach = Reach::open_with_files(place).await?;
            let now = reach.now().await?;
            match &self.verb {
                Verb::Create { scope, ttl, label } => {
                    create(&reach, now, (*scope).into(), ttl.as_deref(), label, output).await
                }
                Verb::Ls => list(&reach, now, &zone, output).await,
                Verb::Revoke { id } => revoke(&reach, now, id, output).await,
            }
        })
    }
}

async fn create(
    reach: &Reach,
    now: Timestamp,
    scope: Scope,
    ttl: Option<&str>,
    label: &str,
    output: &Output,
) -> Result<(), Failure> {
    let expires_at = match ttl {
        None => None,
        Some(text) => {
            let ttl = parse_duration(text).in_option("--ttl")?;
            let at = now
                .checked_add(ttl)
                .map_err(|_| Failure::Usage(format!("--ttl {text} is beyond all time")))?;
            Some(at)
        }
    };
    let token = belfry_server::new_token();
    let record = TokenRecord {
        id: belfry_server::token_id(&token).unwrap_or_default().to_owned(),
        hash: belfry_server::token_hash(&token).to_vec(),
        scope,
        label: words::one_line(label, 200),
        created_at: now,
        expires_at,
        revoked_at: None,
    };
    let deed = Deed::to("create_token", "tokens");
    let is_added = |added: &AddedToken| *added == AddedToken::Added;
    match noted(&reach.store, deed, reach.store.add_token(&record), is_added).await? {
        AddedToken::Added => {
            if output.format == Format::Table {
                reach::say("shown only now; whoever has it may do what it allows");
            }
            reach::answer(output, &Shown::of(&record, Some(&token)), &token)
        }
        // An id is 32 random bits.
        AddedToken::Taken => Err(Failure::Usage("the id drawn for it is taken; try again".into())),
        AddedToken::Full => {
            Err(Failure::Usage(format!("there are {TOKENS_MAX} tokens already: revoke some")))
        }
    }
}

async fn list(reach: &Reach, now: Timestamp, zone: &Zone, output: &Output) -> Result<(), Failure> {
    let tokens = reach.store.tokens().await?;
    if output.format != Format::Table {
        return reading::print_items(
            output.format,
            tokens.iter().map(|token| Shown::of(token, None)).collect(),
        );
    }
    if tokens.is_empty() {
        reading::remark("no tokens: whoever is on this host may use the API");
        return Ok(());
    }
    let mut sheet = Sheet::new(&[
        column("ID"),
        column("SCOPE"),
        column("STATUS"),
        column("CREATED").rank(1),
        column("EXPIRES").rank(2),
        column("LABEL").wraps(40),
    ]);
    for token in &tokens {
        let (status, colour) = match (token.revoked_at, token.is_good(now)) {
            (Some(_), _) => ("revoked", Some(Color::Red)),
            (None, true) => ("good", Some(Color::Green)),
            (None, false) => ("expired", Some(Color::Yellow)),
        };
        sheet.row(vec![
            token.id.clone(),
            token.scope.as_str().into(),
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

async fn revoke(reach: &Reach, now: Timestamp, given: &str, output: &Output) -> Result<(), Failure> {
    // Whoever has only the token at hand may give that.
    let id = belfry_server::token_id(given).unwrap_or(given);
    let revoke = reach.store.revoke_token(now, id);
    match noted(&reach.store, Deed::to("revoke_token", format_args!("tokens/{id}")), revoke, |gone| *gone)
        .await?
    {
        true => reach::answer(output, &Revoked { revoked: id }, &format!("{id} revoked")),
        false => Err(Failure::NotFound(format!(
            "there is no token {id} that is good; `belfry token ls` lists them"
        ))),
    }
}
