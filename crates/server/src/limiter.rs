//! How often one client may ask: a bucket of permits for each, filled again as time passes.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::time::Instant;

use axum::http::StatusCode;
use belfry_config::Rate;
use parking_lot::Mutex;

use crate::problem::Problem;

/// Clients that are remembered; beyond it the full buckets go first, then all.
const CLIENTS_MAX: usize = 16_384;

/// The buckets.
#[derive(Default)]
pub struct Limiter {
    by_token: Mutex<HashMap<String, Bucket>>,
    by_hook: Mutex<HashMap<(String, IpAddr), Bucket>>,
    by_network: Mutex<HashMap<IpAddr, Bucket>>,
}

#[derive(Clone, Copy)]
struct Bucket {
    permits: f64,
    at: Instant,
}

impl Limiter {
    /// Takes a permit of a token that is good, or says when there is one again.
    pub fn take_by_token(&self, id: &str, rate: Rate) -> Result<(), Problem> {
        take(&self.by_token, id.to_owned(), rate, Instant::now())
    }

    /// Takes a permit of a sender that signs its requests to a hook, or says when there is one again.
    pub fn take_by_hook(&self, name: &str, peer: IpAddr, rate: Rate) -> Result<(), Problem> {
        take(&self.by_hook, (name.to_owned(), network(peer)), rate, Instant::now())
    }

    /// Takes a permit of an address, or says when there is one again.
    pub fn take_by_address(&self, peer: IpAddr, rate: Rate) -> Result<(), Problem> {
        take(&self.by_network, network(peer), rate, Instant::now())
    }
}

fn take<K: Eq + Hash>(
    buckets: &Mutex<HashMap<K, Bucket>>,
    client: K,
    rate: Rate,
    now: Instant,
) -> Result<(), Problem> {
    let full = f64::from(rate.max).max(1.0);
    let per_second = full * 1000.0 / (rate.per_ms as f64).max(1.0);
    let filled = |bucket: &Bucket| {
        let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.permits + passed * per_second).min(full)
    };
    let mut buckets = buckets.lock();
    if buckets.len() >= CLIENTS_MAX && !buckets.contains_key(&client) {
        buckets.retain(|_, bucket| filled(bucket) < full);
        if buckets.len() >= CLIENTS_MAX {
            buckets.clear();
        }
    }
    let bucket = buckets.entry(client).or_insert(Bucket { permits: full, at: now });
    *bucket = Bucket { permits: filled(bucket), at: now };
    if bucket.permits < 1.0 {
        let seconds = ((1.0 - bucket.permits) / per_second).ceil().clamp(1.0, 3600.0);
        let detail = format!("more than {} requests in {} ms", rate.max, rate.per_ms);
        let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", detail);
        return Err(problem.retry_after(seconds as u64).way_out("wait, or raise `api.rate`"));
    }
    bucket.permits -= 1.0;
    Ok(())
}

/// One household has many addresses of version 6.
pub fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let bits = address.to_bits() >> 64 << 64;
            IpAddr::V6(std::net::Ipv6Addr::from_bits(bits))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_peer_gets_its_rate_and_no_more() {
        let (limiter, now) = (Limiter::default(), Instant::now());
        let rate = Rate { max: 10, per_ms: 1000 };
        let (one, other): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let count =
            |peer, at| (0..50).filter(|_| take(&limiter.by_network, network(peer), rate, at).is_ok()).count();
        assert_eq!(count(one, now), 10);
        assert_eq!(count(other, now), 10, "each has its own");
        assert_eq!(count(one, now + Duration::from_millis(500)), 5);
        assert_eq!(count(one, now + Duration::from_secs(60)), 10, "never more than its bucket holds");
    }

    #[test]
    fn peers_do_not_pile_up() {
        let (limiter, now) = (Limiter::default(), Instant::now());
        for n in 0..3 * CLIENTS_MAX as u32 {
            let peer = std::net::Ipv4Addr::from_bits(n).into();
            let _ = take(&limiter.by_network, peer, Rate { max: 1, per_ms: 1000 }, now);
        }
        assert!(limiter.by_network.lock().len() <= CLIENTS_MAX);
    }
}
