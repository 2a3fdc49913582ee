//! Which name a request was sent to, and which page sent it. A name that we do not know may be an attacker's, pointed at this
//! address; a page of another site has no business here at all.

use std::net::{IpAddr, SocketAddr};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, header};

use crate::problem::Problem;

/// The name that a request was sent to, if it is one of ours: an address, `localhost`, or a name from
/// `api.allowed_hosts`. `forwarded` is the name that a trusted proxy was asked for, which then counts alone.
pub fn check_host(
    headers: &HeaderMap,
    uri: &Uri,
    forwarded: Option<&str>,
    listen: SocketAddr,
    allowed: &[String],
) -> Result<Authority, Problem> {
    let wrong = |detail: &str| Problem::bad("bad_host", detail).field("Host");
    let not_ours = |field: &str| {
        let detail = "the request was sent to a name that is not this server's";
        let problem = Problem::new(StatusCode::FORBIDDEN, "host_not_allowed", detail);
        problem.field(field).way_out("add the name to `api.allowed_hosts`")
    };
    if let Some(forwarded) = forwarded {
        return authority(forwarded)
            .filter(|host| is_ours(host.host(), listen, allowed))
            .ok_or_else(|| not_ours("X-Forwarded-Host"));
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err(wrong("a request has exactly one Host header"));
    };
    let host = host.to_str().ok().and_then(authority);
    let host = host.ok_or_else(|| wrong("the Host header names no host"))?;
    let meant = uri.authority().unwrap_or(&host);
    for name in [host.host(), meant.host()] {
        if !is_ours(name, listen, allowed) {
            return Err(not_ours("Host"));
        }
    }
    Ok(host)
}

/// A host, and a port or none. Nothing else stands beside them.
fn authority(text: &str) -> Option<Authority> {
    let authority = text.parse::<Authority>().ok()?;
    let rest = text.strip_prefix(authority.host())?;
    (rest.is_empty() || authority.port_u16().is_some_and(|port| rest == format!(":{port}")))
        .then_some(authority)
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
    if is_cross_site(headers) {
        return Err(cross_site("Sec-Fetch-Site"));
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

/// Whether a browser says that a page of another site, or of another port of this host, sent the request.
pub fn is_cross_site(headers: &HeaderMap) -> bool {
    headers.get_all("sec-fetch-site").iter().any(|site| site != "same-origin" && site != "none")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent_to(host: &'static str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert("host", host.parse().unwrap());
        let listen = SocketAddr::from(([127, 0, 0, 1], 7400));
        check_host(&headers, &Uri::from_static("/x"), None, listen, &["belfry.example".into()]).is_ok()
    }

    #[test]
    fn the_name_that_a_proxy_was_asked_for_counts_alone() {
        let mut headers = HeaderMap::new();
        headers.insert("host", "backend".parse().unwrap());
        let listen = SocketAddr::from(([127, 0, 0, 1], 7400));
        let check = |forwarded| {
            let allowed = ["belfry.example".into()];
            check_host(&headers, &Uri::from_static("/x"), forwarded, listen, &allowed).ok()
        };
        assert_eq!(check(Some("belfry.example")).unwrap().as_str(), "belfry.example");
        assert_eq!(check(Some("belfry.example:8443")).unwrap().as_str(), "belfry.example:8443");
        for wrong in [None, Some("evil.example"), Some(""), Some("a b"), Some("x@belfry.example")] {
            assert_eq!(check(wrong), None, "{wrong:?}");
        }
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
            "[::1].evil",
            "[::1]evil:7400",
            "localhost:99999",
            "localhost:+80",
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
