//! Servers that are far away, or lost on the way: between them and the command line stands a proxy.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::client::{Api, CONFIG};
use crate::remote::Said;
use crate::support::Site;

/// What comes from a client: whether it goes on to the server, or the connection ends.
type Passes = dyn Fn(&[u8]) -> bool + Send + Sync;

/// Stands before a server, with so much time for each direction; gives its address. It ends with the test.
fn proxy(server: &str, delay: Duration, passes: impl Fn(&[u8]) -> bool + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (server, passes): (_, Arc<Passes>) = (server.to_owned(), Arc::new(passes));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            let (back_from, back_to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let passes = passes.clone();
            std::thread::spawn(move || carry(client, server, delay, &*passes));
            std::thread::spawn(move || carry(back_from, back_to, delay, &|_| true));
        }
    });
    address
}

/// Carries bytes until either side leaves.
fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration, passes: &Passes) {
    let mut buffer = [0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        // The distance itself: nothing is waited for.
        std::thread::sleep(delay);
        if !passes(&buffer[..read]) || to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Asks a server by another address, where there is no file and no store.
fn ask(api: &Api, address: &str, arguments: &[&str]) -> Said {
    let server = format!("http://{address}");
    let all = [&["--server", &server, "--token", &api.local, "--tz", "UTC"], arguments].concat();
    Said::of(Site::sqlite().belfry(&all))
}

#[test]
fn what_a_backfill_has_made_is_told_where_the_rest_fails() {
    let site = Site::sqlite();
    site.config(&format!("{CONFIG}      hourly: {{cron: \"0 * * * *\"}}\n"));
    let api = Api::start(&site);
    // The second part of the ticks begins where the first ended.
    let is_second =
        |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(r#""from":"2020-02-11T16:00:00Z""#);
    let lossy = proxy(&api.address, Duration::ZERO, move |bytes| !is_second(bytes));
    let span = ["--from", "2020-01-01T00:00:00Z", "--to", "2020-03-01T00:00:00Z", "--limit", "2000"];
    let said = ask(&api, &lossy, &[&["backfill", "slow/hourly"], &span[..]].concat());
    assert_eq!(said.code, 5, "{said:?}");
    assert!(said.out.starts_with("made 1000 runs of slow/hourly, from 2020-01-01 00:00:00"), "{said:?}");
    assert!(
        said.out.contains("440 more ticks left: raise --limit, or go on with --from 2020-02-11T16:00:00")
    );
    assert!(said.err.contains("cannot reach"), "{said:?}");
    let rest = ask(&api, &api.address, &[&["backfill", "slow/hourly", "-o", "json"], &span[..]].concat());
    let rest: serde_json::Value = serde_json::from_str(&rest.out).unwrap();
    assert_eq!((rest["runs"].as_array().unwrap().len(), &rest["left_out"]), (440, &1000.into()));
}

#[test]
fn a_run_is_followed_on_a_server_that_is_far_away() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    // There and back takes longer than the time between two looks at the run.
    let far = proxy(&api.address, Duration::from_millis(80), |_| true);
    let said = ask(&api, &far, &["run", "hello/quiet", "--follow", "--timeout", "20s"]);
    assert_eq!((said.code, said.out.as_str()), (0, "hello\nnone"), "{said:?}");
}

#[test]
fn a_stopped_server_is_named_after_a_while() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let up = api.up.lock().unwrap();
    up.signal(Signal::SIGSTOP);
    let server = format!("http://{}", api.address);
    // By its file, and by its address beside the file.
    let ways: [&[&str]; 3] =
        [&["ls"], &["logs", "-f", "hello/quiet"], &["--server", &server, "pause", "hello/quiet"]];
    std::thread::scope(|scope| {
        let asked = ways.map(|arguments| scope.spawn(|| Said::of(site.belfry(arguments))));
        for said in asked.map(|asked| asked.join().unwrap()) {
            assert_eq!((said.code, said.out.as_str()), (5, ""), "{said:?}");
            let named = format!("the server at {} (process {}) has not answered for ", api.address, up.pid());
            assert!(said.err.contains(&named), "{said:?}");
            assert!(said.err.contains(&format!("`kill -CONT {}`", up.pid())), "{said:?}");
        }
    });
    up.signal(Signal::SIGCONT);
}
