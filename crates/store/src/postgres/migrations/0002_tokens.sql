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

-- A node that is to take no new work.
alter table nodes add column draining boolean not null default false;
