//! The bytes of one request body while they arrive.
//!
//! A long body gets pages of its own from the system, and they go back with it. In the allocator's memory many long bodies
//! leave gaps between what lives on, and the process would stay as large as a flood of requests made it.

use std::io;

use bytes::Bytes;
use memmap2::MmapMut;

/// Longer bodies get pages of their own.
const SMALL_BYTES: usize = 16 << 10;

/// What has arrived of a body.
pub enum Gather {
    Small(Vec<u8>),
    /// The pages, and how many bytes of them are filled.
    Large(MmapMut, usize),
}

impl Gather {
    /// Room for a body of at most so many bytes. Memory is taken as it is filled.
    pub fn new(bytes_max: usize) -> io::Result<Gather> {
        match bytes_max <= SMALL_BYTES {
            true => Ok(Gather::Small(Vec::new())),
            false => Ok(Gather::Large(MmapMut::map_anon(bytes_max)?, 0)),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Gather::Small(bytes) => bytes.len(),
            Gather::Large(_, filled) => *filled,
        }
    }

    /// Adds bytes; false where they are more than there is room for.
    pub fn add(&mut self, data: &[u8]) -> bool {
        match self {
            Gather::Small(bytes) if bytes.len() + data.len() <= SMALL_BYTES => bytes.extend_from_slice(data),
            Gather::Small(_) => return false,
            Gather::Large(pages, filled) => {
                let Some(room) = pages.get_mut(*filled..*filled + data.len()) else { return false };
                room.copy_from_slice(data);
                *filled += data.len();
            }
        }
        true
    }

    /// All of it.
    pub fn done(self) -> Bytes {
        match self {
            Gather::Small(bytes) => Bytes::from(bytes),
            Gather::Large(pages, filled) => Bytes::from_owner(pages).slice(..filled),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_comes_out_as_it_came_in_and_never_longer_than_announced() {
        for bytes_max in [0, 5, SMALL_BYTES, SMALL_BYTES + 1, 1 << 20] {
            let all: Vec<u8> = (0..bytes_max).map(|n| n as u8).collect();
            let mut gather = Gather::new(bytes_max).unwrap();
            for part in all.chunks(1_000) {
                assert!(gather.add(part));
            }
            assert_eq!(gather.len(), bytes_max);
            assert!(bytes_max < SMALL_BYTES || !gather.add(&[1]), "{bytes_max}");
            assert_eq!(gather.done(), all);
        }
    }
}
