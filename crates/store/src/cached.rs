//! What was read and is kept in memory, so that it is not read again.

use std::collections::HashMap;
use std::hash::Hash;

/// More entries than this are not kept.
const ENTRIES_MAX: usize = 16_384;
/// Nor more than so many bytes of text that they were read from: a definition may be large.
const BYTES_MAX: usize = 32 << 20;

/// A map that is emptied when it is full.
pub(crate) struct Cached<K, V> {
    entries: HashMap<K, (V, usize)>,
    bytes: usize,
}

impl<K, V> Default for Cached<K, V> {
    fn default() -> Cached<K, V> {
        Cached { entries: HashMap::new(), bytes: 0 }
    }
}

impl<K: Eq + Hash, V> Cached<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(value, _)| value)
    }

    /// Reads it anew the next time.
    pub fn forget(&mut self, key: &K) {
        if let Some((_, bytes)) = self.entries.remove(key) {
            self.bytes -= bytes;
        }
    }

    /// Keeps what was read from a text of so many bytes.
    pub fn insert(&mut self, key: K, value: V, bytes: usize) {
        if self.entries.len() >= ENTRIES_MAX || self.bytes + bytes > BYTES_MAX {
            *self = Cached::default();
        }
        self.bytes += bytes;
        if let Some((_, before)) = self.entries.insert(key, (value, bytes)) {
            self.bytes -= before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_so_many_entries_and_so_many_bytes() {
        let mut cached = Cached::default();
        for n in 0..100 {
            cached.insert(n, (), BYTES_MAX / 10);
            assert!(cached.get(&n).is_some());
            assert!(cached.entries.len() <= 10 && cached.bytes <= BYTES_MAX);
        }
        for n in 0..2 * ENTRIES_MAX {
            cached.insert(n, (), 0);
            assert!(cached.entries.len() <= ENTRIES_MAX);
        }
        let mut same = Cached::default();
        for _ in 0..100 {
            same.insert(1, (), BYTES_MAX / 10);
        }
        assert_eq!(
            (same.entries.len(), same.bytes),
            (1, BYTES_MAX / 10),
            "what it replaces no longer counts"
        );
    }
}
