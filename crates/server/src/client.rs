//! Where a request comes from. A reverse proxy stands between; only one from `api.trusted_proxies` may say for whom.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use axum::http::HeaderMap;
use belfry_config::Network;

/// What a proxy adds to a request.
const FORWARDED: [&str; 6] =
    ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via"];

/// Who sent a request, as far as addresses tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// The address that the rate limit and the audit use: the peer's, or the one that trusted proxies name.
    pub address: IpAddr,
    /// Whether it comes from this host, and through no proxy that says so.
    pub is_local: bool,
    /// Whether a trusted proxy took the request over TLS.
    pub is_https: bool,
    /// The host name that a trusted proxy was asked for.
    pub host: Option<String>,
}

impl Client {
    /// Reads who a peer speaks for. A request that was forwarded is never local, whoever says so: it may come from
    /// anywhere.
    pub fn of(peer: IpAddr, headers: &HeaderMap, trusted: &[Network]) -> Client {
        let is_trusted = |address: IpAddr| trusted.iter().any(|network| network.contains(address));
        let peer = peer.to_canonical();
        let hops: Vec<&str> = values(headers, "x-forwarded-for").collect();
        // Each proxy adds its peer at the end. What stands before the last address that is not trusted, anyone may have
        // written.
        let mut address = peer;
        for hop in hops.into_iter().rev() {
            match hop_address(hop).filter(|_| is_trusted(address)) {
                Some(next) => address = next,
                None => break,
            }
        }
        let is_local = peer.is_loopback() && !FORWARDED.iter().any(|name| headers.contains_key(*name));
        let told = |name| values(headers, name).last().filter(|_| is_trusted(peer));
        Client {
            address,
            is_local,
            is_https: told("x-forwarded-proto").is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")),
            host: told("x-forwarded-host").map(str::to_owned),
        }
    }

    /// A request that this process makes itself.
    pub fn inside() -> Client {
        Client { address: Ipv4Addr::LOCALHOST.into(), is_local: true, is_https: false, host: None }
    }
}

/// The items of a header that is a list, over all its lines.
fn values<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = &'a str> {
    // What is no text is an item that nobody can read.
    headers
        .get_all(name)
        .into_iter()
        .flat_map(|value| value.to_str().unwrap_or("?").split(','))
        .map(str::trim)
}

/// An address with or without a port, and with or without brackets.
fn hop_address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().ok().or_else(|| text.parse().ok().map(|address: SocketAddr| address.ip()));
    address.map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn only_a_trusted_proxy_says_for_whom_it_speaks() {
        let trusted: Vec<Network> =
            ["127.0.0.1", "10.0.0.0/8"].iter().map(|text| text.parse().unwrap()).collect();
        // From whom, what the headers say; then the address that counts, and whether the request is local.
        for (peer, forwarded, address, is_local) in [
            ("127.0.0.1", &[][..], "127.0.0.1", true),
            ("::ffff:127.0.0.1", &[], "127.0.0.1", true),
            ("::1", &[], "::1", true),
            ("192.0.2.1", &[], "192.0.2.1", false),
            // A peer that is not trusted is what it is, whatever it says.
            ("192.0.2.1", &["127.0.0.1"], "192.0.2.1", false),
            ("::1", &["192.0.2.9"], "::1", false),
            ("::1", &["::1"], "::1", false),
            // A trusted one names its client: the last address that is not trusted.
            ("127.0.0.1", &["192.0.2.9"], "192.0.2.9", false),
            ("127.0.0.1", &["127.0.0.1, 192.0.2.9"], "192.0.2.9", false),
            ("127.0.0.1", &["127.0.0.1", "192.0.2.9"], "192.0.2.9", false),
            ("127.0.0.1", &["198.51.100.1, 192.0.2.9, 10.1.2.3"], "192.0.2.9", false),
            ("127.0.0.1", &["nonsense, 192.0.2.9"], "192.0.2.9", false),
            ("10.1.2.3", &["192.0.2.9:4711"], "192.0.2.9", false),
            ("10.1.2.3", &["[2001:db8::1]:4711"], "2001:db8::1", false),
            ("10.1.2.3", &["[2001:db8::1]"], "2001:db8::1", false),
            ("10.1.2.3", &["127.0.0.1"], "127.0.0.1", false),
            ("127.0.0.1", &["127.0.0.1"], "127.0.0.1", false),
            ("127.0.0.1", &["10.9.9.9"], "10.9.9.9", false),
            // What cannot be read names nobody.
            ("127.0.0.1", &["unknown"], "127.0.0.1", false),
            ("127.0.0.1", &[""], "127.0.0.1", false),
        ] {
            let lines: Vec<_> = forwarded.iter().map(|value| ("x-forwarded-for", *value)).collect();
            let client = Client::of(peer.parse().unwrap(), &headers(&lines), &trusted);
            let wanted: IpAddr = address.parse().unwrap();
            assert_eq!((client.address, client.is_local), (wanted, is_local), "{peer} {forwarded:?}");
        }
    }

    #[test]
    fn scheme_and_host_are_believed_of_trusted_proxies_alone() {
        let trusted = ["127.0.0.1".parse().unwrap()];
        let said = headers(&[("x-forwarded-proto", "HTTPS"), ("x-forwarded-host", "evil, belfry.example")]);
        let of = |peer: &str, headers: &HeaderMap| Client::of(peer.parse().unwrap(), headers, &trusted);
        let client = of("127.0.0.1", &said);
        assert_eq!((client.is_https, client.host.as_deref()), (true, Some("belfry.example")));
        let stranger = of("192.0.2.1", &said);
        assert_eq!((stranger.is_https, stranger.host), (false, None));
        assert!(!of("127.0.0.1", &headers(&[("x-forwarded-proto", "http")])).is_https);
        for name in FORWARDED {
            assert!(!of("127.0.0.1", &headers(&[(name, "127.0.0.1")])).is_local, "{name}");
        }
    }
}
