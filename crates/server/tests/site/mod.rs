//! A server on a free port of this host, with its engine in this process.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use belfry::Engine;
use belfry_config::{Host, load_text};
use belfry_server::{Limits, Server, Told};
use tokio::runtime::Runtime;

/// Far more than anything here takes, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Site {
    pub runtime: Runtime,
    pub engine: Engine,
    pub server: Server,
    pub address: SocketAddr,
}

impl Site {
    /// Starts a server, not its engine. `settings` is text of a file; the variable `SET` is the only one that is set.
    pub fn start(engine: Engine, settings: &str, limits: Limits) -> Site {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let text = format!("listen: 127.0.0.1:0\n{settings}\n");
        let host = Host::new(&|_| None, "UTC");
        let settings = load_text(&text, Path::new("belfry.yaml"), &host).unwrap().settings;
        let (reload, _) = tokio::sync::mpsc::channel(1);
        let told = Told {
            engine: engine.clone(),
            settings,
            options: belfry::Options::default(),
            file: "belfry.yaml".into(),
            reload,
            env: |name| (name == "SET").then(|| "a secret of sixteen".to_owned()),
            version: "0",
            limits,
        };
        let server = runtime.block_on(Server::start(told, engine.events())).unwrap();
        Site { runtime, engine, address: server.address(), server }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends the head of a request, after which the server closes the connection. `headers` are lines that end with
    /// CRLF.
    pub fn ask(&self, method: &str, path: &str, headers: &str) -> TcpStream {
        let mut stream = self.connect();
        let host = self.address;
        let head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }
}
