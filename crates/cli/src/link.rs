//! A server over HTTP: one connection at a time, kept for the next request.

use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::failure::Failure;

/// Another machine may be far away.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// One on this host answers at once or not at all.
const NEAR_WITHIN: Duration = Duration::from_millis(100);
/// Maximum time to the first byte of an answer from a server that has an SQLite file.
const ANSWER_NEAR_WITHIN: Duration = Duration::from_secs(15);
/// The same for other servers: one with a PostgreSQL that is away waits half a minute for it, and then says so.
const ANSWER_FAR_WITHIN: Duration = Duration::from_secs(40);
/// Maximum time between two pieces of an answer. On a stream of events a server sends something every 15 seconds, later if
/// its database is away.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// What requests go into.
pub type Sender = SendRequest<Full<Bytes>>;

/// A server, and how to reach it.
pub struct Link {
    pub authority: String,
    pub token: Option<String>,
    /// The process that alone serves the store, where that is known.
    pub process: Option<u32>,
    /// The process that listens, where that is known.
    pub pid: Option<u32>,
    idle: Mutex<Option<Sender>>,
}

impl Link {
    /// A server by its address, `http://host:port`.
    pub fn new(url: &str, token: Option<String>) -> Result<Link, Failure> {
        let wrong = || {
            // What stands before an `@` is a password.
            let got = if url.contains('@') { String::new() } else { format!(", got {url:?}") };
            Failure::Usage(format!(
                "--server must be an address such as http://127.0.0.1:7400{got}; for TLS, tunnel to it"
            ))
        };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let authority =
            uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(wrong)?;
        if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") {
            return Err(wrong());
        }
        let authority = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80));
        Ok(Link { authority, token, process: None, pid: None, idle: Mutex::default() })
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

    /// Sends a request, and waits for the head of its answer: at most this long, or as long as most requests may take.
    pub async fn ask(
        &self,
        request: Request<Bytes>,
        within: Option<Duration>,
    ) -> Result<(Response<Heard>, Sender), Failure> {
        let usual = if self.process.is_some() { ANSWER_NEAR_WITHIN } else { ANSWER_FAR_WITHIN };
        let within = within.unwrap_or(usual);
        let mut sender = self.sender().await?;
        let answer = sender.send_request(request.map(Full::new));
        match tokio::time::timeout(within, answer).await {
            Ok(Ok(answer)) => Ok((answer.map(|body| Heard::new(body, SILENCE_MAX)), sender)),
            Ok(Err(error)) => Err(self.unreachable(&error.to_string())),
            Err(_) => Err(self.silent(within)),
        }
    }

    /// The server took a request and did not answer it for so long.
    pub fn silent(&self, waited: Duration) -> Failure {
        let (process, way_out) = match self.pid {
            Some(pid) => (
                format!(" (process {pid})"),
                format!(
                    "; `kill -CONT {pid}` continues a stopped one, and if nothing else helps `kill -9 {pid}` ends it"
                ),
            ),
            None => (String::new(), String::new()),
        };
        Failure::Unreachable(format!(
            "the server at {}{process} has not answered for {} s: it is stopped, overloaded or waits for its store{way_out}. If the command \
             changes something, look whether it did before you repeat it",
            self.authority,
            waited.as_secs(),
        ))
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

/// The body of an answer. It ends with an error if no piece of it comes for too long.
pub struct Heard {
    body: Incoming,
    silence_max: Duration,
    /// Counts from the last piece.
    silence: Pin<Box<Sleep>>,
}

impl Heard {
    fn new(body: Incoming, silence_max: Duration) -> Heard {
        Heard { body, silence_max, silence: Box::pin(tokio::time::sleep(silence_max)) }
    }
}

impl Body for Heard {
    type Data = Bytes;
    type Error = String;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let until = Instant::now() + self.silence_max;
            self.silence.as_mut().reset(until);
            return Poll::Ready(frame.map(|frame| frame.map_err(|error| error.to_string())));
        }
        let silence = self.silence_max.as_secs();
        let told = format!("the server sent nothing for {silence} s; it is stopped or overloaded");
        self.silence.as_mut().poll(context).map(|()| Some(Err(told)))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn link(listener: &TcpListener) -> Link {
        Link::new(&format!("http://{}", listener.local_addr().unwrap()), None).unwrap()
    }

    fn request() -> Request<Bytes> {
        Request::get("/readyz").body(Bytes::new()).unwrap()
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        for pid in [None, Some(4711)] {
            let link = Link { pid, ..link(&listener).await };
            let asked = link.ask(request(), Some(Duration::from_millis(20)));
            let told = tokio::time::timeout(Duration::from_secs(20), asked).await.expect("it waits for ever");
            let Err(Failure::Unreachable(words)) = told else { panic!("it was answered") };
            let process = if pid.is_some() { " (process 4711)" } else { "" };
            assert!(
                words.starts_with(&format!("the server at {address}{process} has not answered")),
                "{words}"
            );
            assert_eq!(words.contains("`kill -CONT 4711`"), pid.is_some(), "{words}");
        }
    }

    #[tokio::test]
    async fn an_answer_ends_if_no_piece_of_it_comes_for_too_long() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = link(&listener).await;
        let server = async {
            let (mut peer, _) = listener.accept().await.unwrap();
            let _ = peer.read(&mut [0; 1024]).await.unwrap();
            peer.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nfirst").await.unwrap();
            peer
        };
        let (asked, _peer) = tokio::join!(link.ask(request(), None), server);
        let (answer, _sender) = asked.map_err(|_| "no answer").unwrap();
        let mut body = answer.into_body();
        body.silence_max = Duration::from_millis(20);
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "first");
        let silence = tokio::time::timeout(Duration::from_secs(20), body.frame()).await;
        let told = silence.expect("it waits for ever").unwrap().unwrap_err();
        assert!(told.starts_with("the server sent nothing"), "{told}");
    }
}
