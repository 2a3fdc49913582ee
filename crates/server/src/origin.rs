//! Which name a request was sent to, and which page sent it. A name that we do not know may be an attacker's, pointed at this
//! address; a page of another site has no business here at all.

use std::net::{IpAddr, SocketAddr};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, header};

use crate::problem::Problem;

/// The name that a request was sent to, where it is one of ours: an address, `localhost`, or a name from `api.allowed_hosts`.
pub fn check_host(
    headers: &HeaderMap,
    uri: &Uri,
    listen: SocketAddr,
    allowed: &[String],
) -> Result<Authority, Problem> {
    let wrong = |detail: &str| Problem::bad("bad_host", detail).field("Host");
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err(wrong("a request has exactly one Host header"));
    };
    let host = host.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
    let host = host
        .filter(|host| !host.as_str().contains('@'))
        .ok_or_else(|| wrong("the Host header names no host"))?;
    let meant = uri.authority().unwrap_or(&host);
    for name in [host.host(), meant.host()] {
        if !is_ours(name, listen, allowed) {
            let problem = Problem::new(
                StatusCode::FORBIDDEN,
                "host_not_allowed",
                "the request was sent to a name that is not this server's",
            );
            return Err(problem.field("Host").way_out("add the name to `api.allowed_hosts`"));
        }
    }
    Ok(host)
}

fn is_ours(name: &str, listen: SocketAddr, allowed: &[String]) -> bool {
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    // No name server can make an address point elsewhere. A server that only this host reaches is only this host's.
    if let Ok(address) = bare.parse::<IpAddr>() {
        return !listen.ip().is_loopback() || address.is_loopback();
    }
    name.eq_ignore_ascii_case("localhost") || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
}

/// Refuses what a page of another site sent.
pub fn check_origin(headers: &HeaderMap, host: &Authority) -> Result<(), Problem> {
    let cross_site = |field: &str| {
        Problem::forbidden("cross_site", "the request comes from a page of another site").field(field)
    };
    for site in headers.get_all("sec-fetch-site") {
        if site != "same-origin" && site != "none" {
            return Err(cross_site("Sec-Fetch-Site"));
        }
    }
    for origin in headers.get_all(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or_default();
        let from = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        if from.is_none_or(|from| !from.eq_ignore_ascii_case(host.as_str())) {
            return Err(cross_site("Origin"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent_to(host: &'static str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert("host", host.parse().unwrap());
        let listen = SocketAddr::from(([127, 0, 0, 1], 7400));
        check_host(&headers, &Uri::from_static("/x"), listen, &["belfry.example".into()]).is_ok()
    }

    #[test]
    fn only_our_names_are_answered_to() {
        for host in [
            "localhost",
            "LOCALHOST:7400",
            "127.0.0.1:7400",
            "[::1]:7400",
            "belfry.example",
            "Belfry.Example:80",
        ] {
            assert!(sent_to(host), "{host}");
        }
        for host in [
            "evil.example",
            "belfry.example.evil",
            "localhost.",
            "10.0.0.1",
            "",
            "a b",
            "localhost@evil",
            "evil@localhost",
        ] {
            assert!(!sent_to(host), "{host}");
        }
    }

    #[test]
    fn a_page_of_another_site_is_refused() {
        let host: Authority = "localhost:7400".parse().unwrap();
        let check = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            check_origin(&headers, &host).is_ok()
        };
        assert!(check_origin(&HeaderMap::new(), &host).is_ok(), "no page at all");
        assert!(check("origin", "http://localhost:7400"));
        assert!(check("sec-fetch-site", "same-origin") && check("sec-fetch-site", "none"));
        for origin in
            ["null", "http://evil.example", "http://localhost:7401", "file://", "http://localhost:7400.evil"]
        {
            assert!(!check("origin", origin), "{origin}");
        }
        assert!(!check("sec-fetch-site", "cross-site") && !check("sec-fetch-site", "same-site"));
    }
}
