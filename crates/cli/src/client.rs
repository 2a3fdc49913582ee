//! A server over HTTP, as the command line talks to it: one connection a request, JSON in and out, and problems as failures
//! with the exit codes that everything else has.

use std::time::Duration;

use belfry::api::List;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::failure::Failure;

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// A server answers sooner, also where it waits for a run.
const ANSWER_WITHIN: Duration = Duration::from_secs(100);

/// A server.
pub struct Client {
    authority: String,
    token: Option<String>,
}

impl Client {
    /// A server by its address, `http://host:port`.
    pub fn new(url: &str, token: Option<String>) -> Result<Client, Failure> {
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
        let port = authority.port_u16().unwrap_or(80);
        Ok(Client { authority: format!("{}:{port}", authority.host()), token })
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.send(Method::GET, path, None, &[]).await
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Failure> {
        self.send(Method::POST, path, Some(body), &[]).await
    }

    /// All items of a list, page by page, at most so many.
    pub async fn list<T: DeserializeOwned>(&self, path: &str, most: usize) -> Result<Vec<T>, Failure> {
        let (mut all, mut cursor) = (Vec::new(), None::<String>);
        let join = if path.contains('?') { '&' } else { '?' };
        loop {
            let limit = (most - all.len()).clamp(1, 1000);
            let more = cursor.map_or(String::new(), |cursor| format!("&cursor={cursor}"));
            let page: List<T> = self.get(&format!("{path}{join}limit={limit}{more}")).await?;
            all.extend(page.items);
            all.truncate(most);
            cursor = page.next;
            if cursor.is_none() || all.len() >= most {
                return Ok(all);
            }
        }
    }

    /// A request with everything; gives the answer's JSON.
    pub async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(HeaderName, &str)],
    ) -> Result<T, Failure> {
        let (status, bytes) = self.exchange(method, path, body, headers).await?;
        if !status.is_success() {
            return Err(failure(status, &bytes));
        }
        let bytes = if bytes.is_empty() { b"null".as_slice() } else { &bytes };
        serde_json::from_slice(bytes).map_err(|error| {
            Failure::Unreachable(format!("{} answers what no Belfry does: {error}", self.authority))
        })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(HeaderName, &str)],
    ) -> Result<(StatusCode, Bytes), Failure> {
        let unreachable =
            |why: String| Failure::Unreachable(format!("cannot reach {}: {why}", self.authority));
        let stream = tokio::time::timeout(CONNECT_WITHIN, TcpStream::connect(&self.authority)).await;
        let stream = stream.map_err(|_| unreachable("it does not answer".into()))?;
        let stream = stream.map_err(|error| unreachable(error.to_string()))?;
        let mut request = Request::builder().method(method).uri(path).header(HOST, &self.authority);
        request = request.header(ACCEPT, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let bytes = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let request = request
            .body(Full::new(bytes))
            .map_err(|error| Failure::Usage(format!("cannot be sent to a server: {error}")))?;
        let work = async {
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            let answer = sender.send_request(request).await?;
            let status = answer.status();
            Ok::<_, hyper::Error>((status, answer.into_body().collect().await?.to_bytes()))
        };
        match tokio::time::timeout(ANSWER_WITHIN, work).await {
            Ok(answer) => answer.map_err(|error| unreachable(error.to_string())),
            Err(_) => Err(unreachable("it does not answer".into())),
        }
    }
}

/// A problem as a failure.
fn failure(status: StatusCode, bytes: &[u8]) -> Failure {
    let problem: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let part = |key: &str| problem[key].as_str().map(str::to_owned);
    let detail = part("detail").unwrap_or_else(|| status.to_string());
    let words = match part("way_out") {
        Some(way_out) => format!("{detail}; {way_out}"),
        None => detail,
    };
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::Denied(words),
        StatusCode::NOT_FOUND => Failure::NotFound(words),
        _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            Failure::Unreachable(words)
        }
        _ => Failure::Usage(words),
    }
}

/// The path of a schedule, or of something of it.
pub fn schedule_path(name: &str, rest: &str) -> Result<String, Failure> {
    let (agent, schedule) = crate::reach::split(name)?;
    Ok(format!("/api/v1/schedules/{}/{}{rest}", encoded(agent), encoded(schedule)))
}

/// A text as part of a path or a query.
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
