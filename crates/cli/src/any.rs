//! `belfry api`: any request to the HTTP API, with the token that commands use.

use std::io::{IsTerminal, Read, Write};

use bytes::Bytes;
use clap::Args;
use hyper::Method;

use crate::failure::Failure;
use crate::place::{Need, Place};
use crate::reach;
use crate::tame::Tame;

/// The largest body that is read from a file or standard input.
const BODY_BYTES_MAX: u64 = 64 << 20;

/// Send any request to the HTTP API, and print the response
#[derive(Debug, Args)]
#[command(override_usage = "belfry api [OPTIONS] [METHOD] PATH")]
#[command(after_help = "Examples:
  belfry api /api/v1/schedules
  belfry api POST /api/v1/schedules/reporter/sweep/run
  belfry api PATCH /api/v1/lanes/cron -d '{\"slots\": 4}'
  belfry api POST /api/v1/schedules -d @schedule.json
  belfry api '/api/v1/events?event=run_finished'
  belfry --server http://host:7400 --token bf_… api /metrics

The request carries the local token of the server that runs in this folder, or --token. Without a server this process
answers it from the store. The body of the response goes to standard output as it comes; a problem goes to standard
error, with the exit code that every command has. /api/openapi.json describes every route.")]
pub struct Api {
    /// A method and a path with its query. Without a method it is GET, or POST if there is a body
    #[arg(value_name = "METHOD|PATH", num_args = 1..=2, required = true)]
    request: Vec<String>,

    /// The body, JSON: as it is, from a file (@FILE), or from standard input (-)
    #[arg(short = 'd', long = "data", value_name = "JSON|@FILE|-")]
    data: Option<String>,
}

impl Api {
    /// Sends the request, and prints the response.
    #[allow(clippy::disallowed_methods, reason = "a response is bytes in a pipe, and filtered on a terminal")]
    pub fn run(&self, place: &Place) -> Result<(), Failure> {
        let (method, path) = self.target()?;
        let body = self.data.as_deref().map(body).transpose()?;
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let mut out = std::io::stdout().lock();
            // On a terminal texts of others must not act as commands; elsewhere every byte is passed on as it is.
            let mut tame = out.is_terminal().then(|| Tame::new(false));
            let mut last = b'\n';
            let print = |piece: &[u8]| {
                last = piece.last().copied().unwrap_or(last);
                match &mut tame {
                    Some(tame) => out.write_all(tame.pass(piece).as_bytes())?,
                    None => out.write_all(piece)?,
                }
                out.flush()
            };
            client.pass_on(method, &path, body, print).await?;
            // The next prompt of a shell begins on a line of its own.
            if last != b'\n' {
                out.write_all(b"\n")?;
            }
            Ok(out.flush()?)
        })
    }

    fn target(&self) -> Result<(Method, String), Failure> {
        let (method, path) = match self.request.as_slice() {
            [path] if self.data.is_some() => ("POST", path),
            [path] => ("GET", path),
            [method, path] => (method.as_str(), path),
            _ => return Err(Failure::Usage("give a path, or a method and a path".into())),
        };
        const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];
        let method = method.to_ascii_uppercase();
        let known = METHODS.contains(&method.as_str()).then(|| Method::from_bytes(method.as_bytes()).ok());
        let method = known.flatten().ok_or_else(|| {
            Failure::Usage(format!("the method must be one of {}, got {method:?}", METHODS.join(", ")))
        })?;
        if !path.starts_with('/') {
            return Err(Failure::Usage(format!(
                "the path must begin with a slash, for example /api/v1/schedules, got {path:?}"
            )));
        }
        Ok((method, path.clone()))
    }
}

fn body(data: &str) -> Result<Bytes, Failure> {
    let mut bytes = Vec::new();
    let read = match data.strip_prefix('@') {
        Some(path) => {
            let wrong = |error| Failure::Usage(format!("cannot read {path:?}: {error}"));
            std::fs::File::open(path)
                .and_then(|file| file.take(BODY_BYTES_MAX + 1).read_to_end(&mut bytes))
                .map_err(wrong)?
        }
        None if data == "-" => std::io::stdin().take(BODY_BYTES_MAX + 1).read_to_end(&mut bytes)?,
        None => return Ok(Bytes::copy_from_slice(data.as_bytes())),
    };
    if read as u64 > BODY_BYTES_MAX {
        return Err(Failure::Usage(format!("the body must be at most {BODY_BYTES_MAX} bytes")));
    }
    Ok(bytes.into())
}
