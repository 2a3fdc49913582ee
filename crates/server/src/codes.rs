//! One-time codes that buy a browser login. They live in memory alone, as hashes: a restart forgets them.

use std::collections::VecDeque;

use belfry_time::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use subtle::{Choice, ConstantTimeEq};
use uuid::Uuid;

use crate::page::hex;
use crate::secret;

/// How long a code can be used.
const CODE_LIFE: SignedDuration = SignedDuration::from_mins(10);
/// Codes at once. Each is made by an admin; with one more, the oldest goes.
const CODES_MAX: usize = 16;
/// Longer texts are no codes.
const CODE_LENGTH_MAX: usize = 256;

/// The codes that can still be used.
#[derive(Default)]
pub struct Codes(Mutex<VecDeque<Code>>);

struct Code {
    hash: [u8; 32],
    expires_at: Timestamp,
}

impl Codes {
    /// Makes a code of 154 random bits. Returns it, and when it expires.
    pub fn make(&self, now: Timestamp) -> (String, Timestamp) {
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        let code = format!("{}{}", one.simple(), hex(&other.as_bytes()[..4]));
        let expires_at = now.checked_add(CODE_LIFE).unwrap_or(Timestamp::MAX);
        let mut codes = self.0.lock();
        if codes.len() == CODES_MAX {
            codes.pop_front();
        }
        codes.push_back(Code { hash: secret::hash(&code), expires_at });
        (code, expires_at)
    }

    /// Uses a code up. Returns whether it was good.
    pub fn take(&self, code: &str, now: Timestamp) -> bool {
        if code.len() > CODE_LENGTH_MAX {
            return false;
        }
        let hash = secret::hash(code);
        let mut codes = self.0.lock();
        codes.retain(|code| now < code.expires_at);
        // All are compared, so that the time tells nothing.
        let found =
            codes.iter().map(|code| code.hash.ct_eq(&hash)).fold(Choice::from(0), |any, one| any | one);
        let found = bool::from(found);
        if found {
            codes.retain(|code| code.hash != hash);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_790_000_000 + seconds).unwrap()
    }

    #[test]
    fn a_code_is_used_once_and_in_time() {
        let codes = Codes::default();
        let (one, expires_at) = codes.make(at(0));
        let (other, _) = codes.make(at(1));
        assert_eq!((one.len(), expires_at), (40, at(600)));
        assert!(
            !codes.take("", at(1))
                && !codes.take(&one[..39], at(1))
                && !codes.take(&"0".repeat(10_000), at(1))
        );
        assert!(codes.take(&one, at(599)));
        assert!(!codes.take(&one, at(599)), "once");
        assert!(codes.take(&other, at(600)), "the other is a second younger");
        let (late, _) = codes.make(at(0));
        assert!(!codes.take(&late, at(600)), "ten minutes are over");
        assert!(!codes.take(&late, at(0)), "for good");
    }

    #[test]
    fn codes_do_not_pile_up() {
        let codes = Codes::default();
        let made: Vec<String> = (0..100).map(|_| codes.make(at(0)).0).collect();
        assert_eq!(codes.0.lock().len(), CODES_MAX);
        assert!(!codes.take(&made[0], at(1)) && codes.take(&made[99], at(1)));
    }
}
