//! A server over HTTP: one connection at a time, kept for the next request.

use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::failure::Failure;

/// Another machine may be far away.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// One on this host answers at once or not at all.
const NEAR_WITHIN: Duration = Duration::from_millis(100);

/// What requests go into.
pub type Sender = SendRequest<Full<Bytes>>;

/// A server, and how to reach it.
pub struct Link {
    pub authority: String,
    pub token: Option<String>,
    /// The process that alone serves the store, where that is known.
    pub process: Option<u32>,
    idle: Mutex<Option<Sender>>,
}

impl Link {
    /// A server by its address, `http://host:port`.
    pub fn new(url: &str, token: Option<String>) -> Result<Link, Failure> {
        let wrong = || {
            Failure::Usage(format!(
                "--server must be an address such as http://127.0.0.1:7400, got {url:?}; for TLS, tunnel to it"
            ))
        };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let authority =
            uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(wrong)?;
        if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") {
            return Err(wrong());
        }
        let authority = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80));
        Ok(Link { authority, token, process: None, idle: Mutex::default() })
    }

    /// Connects to a server that should be on this host; says whether it is there.
    pub async fn is_there(&self) -> bool {
        match tokio::time::timeout(NEAR_WITHIN, self.connect()).await {
            Ok(Ok(sender)) => {
                self.keep(sender);
                true
            }
            _ => false,
        }
    }

    /// Keeps a connection for the next request.
    pub fn keep(&self, sender: Sender) {
        if let Ok(mut idle) = self.idle.lock() {
            *idle = Some(sender);
        }
    }

    /// Sends a request, and waits for the head of its answer.
    pub async fn ask(&self, request: Request<Bytes>) -> Result<(Response<Incoming>, Sender), Failure> {
        let mut sender = self.sender().await?;
        match sender.send_request(request.map(Full::new)).await {
            Ok(answer) => Ok((answer, sender)),
            Err(error) => Err(self.unreachable(&error.to_string())),
        }
    }

    async fn sender(&self) -> Result<Sender, Failure> {
        let idle = self.idle.lock().ok().and_then(|mut idle| idle.take());
        if let Some(mut sender) = idle
            && sender.ready().await.is_ok()
        {
            return Ok(sender);
        }
        match tokio::time::timeout(CONNECT_WITHIN, self.connect()).await {
            Ok(Ok(sender)) => Ok(sender),
            Ok(Err(error)) => Err(self.unreachable(&error)),
            Err(_) => Err(self.unreachable("it does not answer")),
        }
    }

    async fn connect(&self) -> Result<Sender, String> {
        let stream = TcpStream::connect(&self.authority).await.map_err(|error| error.to_string())?;
        // Where it cannot be set, small requests are slower.
        let _ = stream.set_nodelay(true);
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        Ok(sender)
    }

    fn unreachable(&self, why: &str) -> Failure {
        Failure::Unreachable(format!("cannot reach {}: {why}", self.authority))
    }
}
