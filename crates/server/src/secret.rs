//! Tokens: made, hashed and compared. A token is `bf_ID_SECRET`; only the hash of the whole is ever kept.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use uuid::Uuid;

use crate::page::hex;

/// How every token begins, for those who look for leaked ones.
pub const PREFIX: &str = "bf_";

/// A new token: 244 random bits, and in front of them the id by which it is known.
pub fn random() -> String {
    make(&random_id())
}

/// A new id for a token.
pub fn random_id() -> String {
    hex(&Uuid::new_v4().as_bytes()[..4])
}

/// A new token of this id.
pub fn make(id: &str) -> String {
    let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
    format!("{PREFIX}{id}_{}{}", one.simple(), other.simple())
}

/// The id in a token.
pub fn id(token: &str) -> Option<&str> {
    token.strip_prefix(PREFIX)?.split_once('_').map(|(id, _)| id)
}

/// What is kept of a token.
pub fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

/// Whether two secrets are the same, in a time that tells nothing but their lengths.
pub fn same(one: &[u8], other: &[u8]) -> bool {
    one.ct_eq(other).into()
}
