-- Who may do what over HTTP, and who did what.

create table tokens (
    id text collate "C" primary key,
    hash bytea not null,
    scope smallint not null,
    label text not null,
    created_at timestamptz not null,
    expires_at timestamptz,
    revoked_at timestamptz
);

create table audit (
    number bigint generated always as identity primary key,
    at timestamptz not null,
    actor text not null,
    action text not null,
    target text not null,
    peer text not null,
    status integer not null
);
create index audit_at on audit (at);

-- Whether a node is to take no new work, and when it was heard of last.
alter table nodes add column draining boolean not null default false;
alter table nodes add column last_seen_at timestamptz not null default to_timestamp(0);

-- What nodes say of themselves and their machines.
create table snapshots (
    number bigint generated always as identity primary key,
    at timestamptz not null,
    node_id uuid not null,
    snapshot text not null
);
create index snapshots_at on snapshots (at);
create index snapshots_node on snapshots (node_id, number);
