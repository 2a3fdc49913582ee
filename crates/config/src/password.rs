//! Where the address of a store holds a password: behind its user, or among its parameters.

use std::ops::Range;

/// Parameters whose value nobody is shown.
const SECRET: [&str; 2] = ["password", "sslpassword"];

/// The parts of an address that nobody is shown, in order and apart; it is given from behind its `://` on. Rather too much than
/// too little: a password may hold a slash, an `@`, or what looks like a parameter.
pub(crate) fn secrets(address: &str) -> Vec<Range<usize>> {
    let user = address.rfind('@').and_then(|host| Some(address[..host].find(':')? + 1..host));
    let mut found: Vec<Range<usize>> = user.into_iter().collect();
    let mut from = 0;
    for part in address.split(['?', '&']) {
        if let Some((name, _)) = part.split_once('=').filter(|(name, _)| is_secret(name)) {
            let value = from + name.len() + 1;
            // A question mark ends no parameter.
            let end = address[value..].find('&').map_or(address.len(), |end| value + end);
            match found.last_mut().filter(|last| value <= last.end) {
                Some(last) => last.end = last.end.max(end),
                None => found.push(value..end),
            }
        }
        from += part.len() + 1;
    }
    found
}

/// Whether a parameter holds a password, however its name is written.
fn is_secret(name: &str) -> bool {
    let (mut plain, mut rest) = (Vec::new(), name.as_bytes());
    while let [first, behind @ ..] = rest {
        let code = behind.get(..2).filter(|_| *first == b'%').and_then(|code| std::str::from_utf8(code).ok());
        let code = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { &behind[2..] } else { behind };
    }
    SECRET.iter().any(|secret| plain.eq_ignore_ascii_case(secret.as_bytes()))
}
