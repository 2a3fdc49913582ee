//! `belfry reload`: the server reads its files again.

use std::time::Duration;

use belfry_time::parse_duration;
use clap::Args;
use hyper::Method;
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::failure::{Failure, InOption};
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach::{self, Server};
use crate::words;

/// Tell the running server to read its files again
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry reload
  belfry -c /etc/belfry/belfry.yaml reload

A file that is wrong changes nothing, and is shown here. On PostgreSQL, while other nodes run, a server applies its files
only if they changed since it loaded them last; `belfry apply` always applies them.")]
pub struct Reload {
    /// Wait no longer than this for the server to have done it
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    timeout: String,
}

/// What a server has done.
#[derive(Serialize, Deserialize)]
struct Answer {
    pid: u32,
    detail: String,
    digest: Option<String>,
}

impl Reload {
    /// Tells it, and sees whether the store has what the files say.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let timeout = parse_duration(&self.timeout).in_option("--timeout")?;
        let timeout = Duration::try_from(timeout).unwrap_or_default();
        if place.names_server() {
            return reach::block_on(async {
                tell(&self.ask(&place.client(Need::Store).await?, timeout).await?, output)
            });
        }
        let loaded = place.load()?;
        reach::block_on(async {
            let client = place.client(Need::Files).await?;
            if let Some(reach) = client.reach() {
                return Err(Failure::Unreachable(match reach.server {
                    Some(Server::Process(holder)) => format!(
                        "{holder} serves {} and cannot be asked: its server.json is not there, or not its own. SIGHUP \
                         tells it",
                        reach.address
                    ),
                    Some(Server::Nodes(_)) => {
                        "no server runs in this folder. SIGHUP tells a server on another host, and \
                                               `belfry apply` brings these files into the store"
                            .into()
                    }
                    None => format!(
                        "no server runs on {}. `belfry up` starts one, and `belfry apply` brings the files into the store without one",
                        reach.address
                    ),
                }));
            }
            let answer = self.ask(&client, timeout).await?;
            if answer.digest.as_deref() != Some(&loaded.digest) {
                return Err(Failure::Timeout(format!(
                    "process {} was told, but does not run from these files: {}. Does it run from another file, or with another environment?",
                    answer.pid, answer.detail
                )));
            }
            tell(&answer, output)
        })
    }

    async fn ask(&self, client: &Client, timeout: Duration) -> Result<Answer, Failure> {
        let asked = client.send(Method::POST, "/api/v1/reload", None, &[]);
        let late = |_| Failure::Timeout(format!("the server has not read its files after {}", self.timeout));
        tokio::time::timeout(timeout, asked).await.map_err(late)?
    }
}

fn tell(answer: &Answer, output: &Output) -> Result<(), Failure> {
    reach::answer(
        output,
        answer,
        &format!(
            "process {} has read its files again: {}",
            answer.pid,
            words::one_line(&answer.detail, usize::MAX)
        ),
    )
}
