-- Who may do what over HTTP, and who did what.

create table tokens (
  id text primary key,
  hash blob not null,
  scope integer not null,
  label text not null,
  created_at integer not null,
  expires_at integer,
  revoked_at integer
) strict, without rowid;

create table audit (
  number integer primary key autoincrement,
  at integer not null,
  actor text not null,
  action text not null,
  target text not null,
  peer text not null,
  status integer not null
) strict;
create index audit_at on audit (at);

-- A node that is to take no new work.
alter table nodes add column draining integer not null default 0;
