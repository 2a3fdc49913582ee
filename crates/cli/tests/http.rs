//! The API of `belfry up` from outside: the real binary, real sockets, both stores.

#![allow(clippy::unwrap_used)]

#[path = "outside/mod.rs"]
mod support;

#[path = "http/agents.rs"]
mod agents;
#[path = "http/audit.rs"]
mod audit;
#[path = "http/client.rs"]
mod client;
#[path = "http/cluster.rs"]
mod cluster;
#[path = "http/document.rs"]
mod document;
#[path = "http/events.rs"]
mod events;
#[path = "http/far.rs"]
mod far;
#[path = "http/files.rs"]
mod files;
#[path = "http/found.rs"]
mod found;
#[path = "http/hooks.rs"]
mod hooks;
#[path = "http/hostile.rs"]
mod hostile;
#[path = "http/lists.rs"]
mod lists;
#[path = "http/login.rs"]
mod login;
#[path = "http/memory.rs"]
mod memory;
#[path = "http/nodes.rs"]
mod nodes;
#[path = "http/poison.rs"]
mod poison;
#[path = "http/proxies.rs"]
mod proxies;
#[path = "http/remote.rs"]
mod remote;
#[path = "http/schedules.rs"]
mod schedules;
#[path = "http/scopes.rs"]
mod scopes;
#[path = "http/security.rs"]
mod security;
#[path = "http/snapshots.rs"]
mod snapshots;
#[path = "http/talk.rs"]
mod talk;
