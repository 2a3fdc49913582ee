-- Who may do what over HTTP, and who did what.

create table tokens (
    id text collate "C" primary key,
    hash bytea not null,
    cookie_hash bytea, -- of a browser login, which alone has one
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
    status integer
);
create index audit_at on audit (at);

-- What nodes tell each other of what happens, for a few seconds: who listens, and what was told. Nothing is lost with it.
create unlogged table listeners (
    id uuid primary key,
    since timestamptz not null,
    until timestamptz not null
);
create unlogged table told (
    teller uuid not null,
    seq bigint not null,
    at timestamptz not null,
    lost bigint not null,
    lines text[] not null,
    primary key (teller, seq)
);

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

-- Plans and ends that the store refuses in every form. A plan has the nil id in the place of a run.
create table refusals (
    schedule_id bigint not null,
    run_id uuid not null,
    since timestamptz not null,
    last_at timestamptz not null,
    reason text not null,
    primary key (schedule_id, run_id)
);

-- When it was last tried whether the store takes writes: one row.
create table probes (id integer primary key, at timestamptz not null) with (fillfactor = 50);
