//! Scalars as people write them: durations, sizes, rates, numbers.

use std::net::{Ipv4Addr, SocketAddr};

use belfry_time::{SignedDuration, parse_duration};

/// `true` or `false`, as YAML 1.2 writes them.
pub(crate) fn flag(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" => Some(true),
        "false" | "False" | "FALSE" => Some(false),
        _ => None,
    }
}

/// A whole number without decorations.
pub(crate) fn whole(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

/// A duration in milliseconds.
pub(crate) fn duration_ms(text: &str) -> Result<u64, belfry_time::Error> {
    parse_duration(text).map(|duration| u64::try_from(duration.as_millis()).unwrap_or(0))
}

/// `1y`, in milliseconds: 365 days. At most a hundred.
pub(crate) fn years(text: &str) -> Option<u64> {
    let number = text.trim().strip_suffix(['y', 'Y'])?;
    whole(number).filter(|years| (1..=100).contains(years)).map(|years| years as u64 * 365 * 86_400_000)
}

/// As [`duration_ms`] reads it.
pub(crate) fn format_ms(ms: u64) -> String {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    belfry_time::format_duration(SignedDuration::from_millis(ms)).to_string()
}

/// `100/s`: how many, and in how many milliseconds.
pub(crate) fn rate(text: &str) -> Option<(u32, u64)> {
    let (max, per) = text.trim().split_once('/')?;
    let per_ms = match per.trim() {
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    whole(max.trim()).and_then(|max| u32::try_from(max).ok()).filter(|max| *max > 0).map(|max| (max, per_ms))
}

/// Whether it is the URL of a store.
pub(crate) fn is_store(text: &str) -> bool {
    let schemes = ["sqlite:", "postgres://", "postgresql://"];
    // `sqlite:postgres://…` is no path.
    let is_rest = |rest: &str| !rest.is_empty() && !rest.contains("://");
    schemes.iter().any(|scheme| text.strip_prefix(scheme).is_some_and(is_rest))
}

/// An address with a port; `localhost` is the loopback.
pub(crate) fn address(text: &str) -> Option<SocketAddr> {
    if let Some(port) = text.strip_prefix("localhost:") {
        return port.parse().ok().map(|port| (Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_addresses_and_years_are_read() {
        assert_eq!(rate("100/s"), Some((100, 1_000)));
        assert_eq!(rate("0/s").or(rate("5")).or(rate("5/d")).or(rate("-1/s")), None);
        assert_eq!(address("localhost:0"), "127.0.0.1:0".parse().ok());
        assert_eq!(years("1y"), Some(31_536_000_000));
        assert_eq!(years("0y").or(years("101y")).or(years("1.5y")), None);
    }
}
