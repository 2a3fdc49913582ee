//! Belfry over HTTP: everything that the command line can do, for programs.
//!
//! A connection comes in through `listen.rs`, passes the guard, and reaches a handler in `routes/`, which reads its request
//! with `extract.rs`, asks the engine or its store, and answers with the shapes of [`belfry::api`] or with a `problem.rs`.
//! Nothing is decided here that the engine, the store or the parser of files can decide. Start reading at `routes/mod.rs`.

mod audit;
mod bodies;
mod client;
mod codes;
mod crowd;
mod extract;
mod gather;
mod guard;
mod inside;
mod json;
mod lasting;
mod limiter;
mod limits;
mod listen;
mod meters;
mod names;
mod origin;
mod others;
mod page;
mod problem;
mod readers;
mod ready;
mod reduced;
mod ring;
mod routes;
mod secret;
mod signature;
mod state;
mod stream;
mod tokens;
mod trace;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use belfry::Event;
use belfry_config::Settings;
use belfry_time::SignedDuration;
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use guard::{Guard, Table};
pub use inside::{Caller, Inside};
pub use limits::Limits;
pub use secret::{hash as token_hash, id as token_id, random as new_token};
pub use state::{Reload, Reloaded, Told};
use state::{Shared, ended};

/// Old rows of the audit go once in so many rounds of the house: hourly.
const PRUNE_ROUNDS: u64 = 720;
const PRUNE_BATCH: u32 = 1000;

/// A server that listens.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    serving: JoinHandle<()>,
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address is taken, or not ours.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// Others can reach the address, and there is no token for them.
    #[error("{address} can be reached by others, and there is no token that they would need")]
    Open {
        /// Where.
        address: SocketAddr,
    },
    /// Others can reach the address, and `api.open` would let all of them in.
    #[error("{address} can be reached by others, and `api.open` would let them in without a token")]
    OpenToAll {
        /// Where.
        address: SocketAddr,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] belfry_store::Error),
}

/// Every route, behind the guard that enforces what the document says.
fn router(shared: &Arc<Shared>) -> Router {
    let (router, document) = routes::all().split_for_parts();
    let document = routes::finish(document);
    let guard = Arc::new(Guard { shared: shared.clone(), table: Table::of(&document) });
    router
        .fallback(routes::nothing)
        .method_not_allowed_fallback(routes::no_such_method)
        .layer(axum::middleware::from_fn_with_state(guard, guard::guard))
        .with_state(shared.clone())
}

/// Takes in what the engine tells, for those who listen and for what is counted.
async fn note(shared: Arc<Shared>, mut events: broadcast::Receiver<Arc<Event>>) {
    let mut ending = shared.ending.subscribe();
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = ended(&mut ending) => return,
        };
        match event {
            Ok(event) => {
                shared.meters.note(&event);
                shared.ring.put(&event, shared.engine.node());
            }
            Err(RecvError::Lagged(count)) => shared.ring.lost(count),
            Err(RecvError::Closed) => return,
        }
    }
}

/// Looks at the store now and then, and removes what is too old of the audit.
async fn keep_house(shared: Arc<Shared>) {
    let mut ending = shared.ending.subscribe();
    let mut pulse = tokio::time::interval(meters::PULSE);
    let mut round = 0_u64;
    loop {
        tokio::select! {
            _ = pulse.tick() => shared.pulse().await,
            () = ended(&mut ending) => return,
        }
        if round.is_multiple_of(PRUNE_ROUNDS)
            && let Some(kept) = shared.settings().retention.audit_ms
        {
            let kept = SignedDuration::from_millis(i64::try_from(kept).unwrap_or(i64::MAX));
            let before = shared.now().checked_sub(kept).unwrap_or(belfry::Timestamp::MIN);
            // What cannot be removed now is removed an hour later.
            while shared.engine.prune_access(before, PRUNE_BATCH).await.is_ok_and(|gone| gone >= PRUNE_BATCH)
            {
            }
        }
        round += 1;
    }
}

/// The document that describes the API, OpenAPI 3.1.
pub fn openapi() -> String {
    let (_, document) = routes::all().split_for_parts();
    serde_json::to_string_pretty(&routes::finish(document)).unwrap_or_default()
}

impl Server {
    /// Listens, and answers from now on. Readers of events get what comes through `events`. Subscribe before files are
    /// applied, so that they hear of that.
    pub async fn start(told: Told, events: broadcast::Receiver<Arc<Event>>) -> Result<Server, Error> {
        let address = told.settings.listen;
        if !address.ip().is_loopback() {
            if told.settings.api.open {
                return Err(Error::OpenToAll { address });
            }
            let now = told.engine.now();
            let tokens = told.engine.reads().tokens().await?;
            if !tokens.iter().any(|token| token.is_good(now) && !token.is_login()) {
                return Err(Error::Open { address });
            }
        }
        let failed = |source| Error::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared::new(told, address));
        tokio::spawn(note(shared.clone(), events));
        tokio::spawn(others::hear_loop(shared.clone()));
        tokio::spawn(lasting::watch_loop(shared.clone()));
        tokio::spawn(keep_house(shared.clone()));
        let ending = shared.ending.subscribe();
        let serving = tokio::spawn(listen::serve(listener, router(&shared), ending, shared.limits));
        Ok(Server { shared, address, serving })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address for programs on this host, `http://127.0.0.1:7400`.
    pub fn url(&self) -> String {
        let mut address = self.address;
        // A server that listens on every address is found on the loopback one.
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        format!("http://{address}")
    }

    /// A link that logs a browser in: once, within ten minutes.
    pub fn login_link(&self) -> String {
        let (code, _) = self.shared.codes.make(self.shared.now());
        format!("{}/login#{code}", self.url())
    }

    /// The token of commands on this host, good while the server lives.
    pub fn local_token(&self) -> &str {
        &self.shared.local_token
    }

    /// The files say something else now.
    pub fn set_settings(&self, settings: Settings) {
        self.shared.set_settings(settings);
    }

    /// Takes nothing more in, and lets what is under way end.
    pub async fn stop(self) {
        self.shared.ending.send_replace(true);
        // It may have ended by a panic, which has nothing to tell.
        let _ = self.serving.await;
    }
}
