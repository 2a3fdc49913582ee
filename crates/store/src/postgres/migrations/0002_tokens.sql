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
