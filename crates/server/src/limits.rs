//! How much a peer may take, and how long it may take for it. Nobody sets these but tests, which have no time to wait.

use std::time::Duration;

/// How much a peer may take, and how long it may take for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once. For one more the idlest is closed; where none is idle it waits. Each costs some ten kilobytes.
    /// Three quarters of them may be held by readers of events, by followers of logs and by requests that wait.
    pub connections_max: usize,
    /// A head of a request that has not come by then will not come. It also ends connections that idle.
    pub head_within: Duration,
    /// A body that has not come by then will not come.
    pub body_within: Duration,
    /// Memory for the bodies of all requests with a token together, in bytes; as much again for those of unknown senders.
    pub bodies_bytes_max: usize,
    /// A peer that takes nothing of an answer for so long is gone.
    pub write_within: Duration,
    /// A reader of events that takes nothing for so long has left.
    pub take_within: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections_max: 8192,
            head_within: Duration::from_secs(15),
            body_within: Duration::from_secs(15),
            bodies_bytes_max: 16 << 20,
            write_within: Duration::from_secs(30),
            take_within: Duration::from_secs(10),
        }
    }
}
