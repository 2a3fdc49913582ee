//! Ranges of IP addresses, as in `api.trusted_proxies`.

use std::net::IpAddr;
use std::str::FromStr;

/// An IP address, or all that share its first bits: `10.0.0.0/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    /// How many leading bits count.
    bits: u32,
}

impl Network {
    /// Whether an address is in the range. An IPv4 address written as IPv6 counts as the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(known), IpAddr::V4(other)) => {
                same(known.to_bits().into(), other.to_bits().into(), self.bits, 32)
            }
            (IpAddr::V6(known), IpAddr::V6(other)) => same(known.to_bits(), other.to_bits(), self.bits, 128),
            _ => false,
        }
    }
}

/// Whether two addresses of `width` bits agree in their first `bits`.
fn same(known: u128, other: u128, bits: u32, width: u32) -> bool {
    (known ^ other).checked_shr(width - bits).unwrap_or(0) == 0
}

/// The text is no IP address and no range of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotANetwork;

impl FromStr for Network {
    type Err = NotANetwork;

    fn from_str(text: &str) -> Result<Network, NotANetwork> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| NotANetwork)?;
        // An IPv4 address is written as such: one address has one form.
        if address != address.to_canonical() {
            return Err(NotANetwork);
        }
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            // `+8` and `08` are numbers to Rust and mistakes to people.
            Some(bits) if bits.starts_with(['+', '0']) && bits != "0" => return Err(NotANetwork),
            Some(bits) => bits.parse().ok().filter(|bits| *bits <= width).ok_or(NotANetwork)?,
            None => width,
        };
        Ok(Network { address, bits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_holds_the_addresses_that_share_its_first_bits() {
        for (range, inside, outside) in [
            (
                "10.0.0.0/8",
                &["10.0.0.0", "10.255.255.255", "::ffff:10.1.2.3"][..],
                &["11.0.0.0", "9.9.9.9", "::1"][..],
            ),
            ("192.0.2.7", &["192.0.2.7"], &["192.0.2.6", "192.0.2.8"]),
            ("192.0.2.4/30", &["192.0.2.4", "192.0.2.7"], &["192.0.2.3", "192.0.2.8"]),
            ("0.0.0.0/0", &["1.2.3.4", "255.255.255.255"], &["::1"]),
            ("2001:db8::/32", &["2001:db8::1", "2001:db8:ffff::"], &["2001:db9::", "10.0.0.1"]),
            ("::/0", &["::1", "ffff::"], &["10.0.0.1"]),
            ("::1", &["::1"], &["::2", "127.0.0.1"]),
        ] {
            let network: Network = range.parse().unwrap();
            inside
                .iter()
                .for_each(|text| assert!(network.contains(text.parse().unwrap()), "{text} in {range}"));
            outside
                .iter()
                .for_each(|text| assert!(!network.contains(text.parse().unwrap()), "{text} in {range}"));
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in [
            "",
            "localhost",
            "10.0.0.0/33",
            "10.0.0/8",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "::/129",
            "::ffff:10.0.0.0/104",
            "10.0.0.0/8/8",
            "10.0.0.0/08",
        ] {
            assert_eq!(text.parse::<Network>(), Err(NotANetwork), "{text}");
        }
    }
}
