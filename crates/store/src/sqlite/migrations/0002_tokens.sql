-- Who may do what over HTTP, and who did what.

create table tokens (
  id text primary key,
  hash blob not null,
  cookie_hash blob, -- of a browser login, which alone has one
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
  status integer
) strict;
create index audit_at on audit (at);

-- Whether a node is to take no new work, and when it was heard of last.
alter table nodes add column draining integer not null default 0;
alter table nodes add column last_seen_at integer not null default 0;

-- What nodes say of themselves and their machines.
create table snapshots (
  number integer primary key autoincrement,
  at integer not null,
  node_id blob not null,
  snapshot text not null
) strict;
create index snapshots_at on snapshots (at);
create index snapshots_node on snapshots (node_id, number);

-- Plans and ends that the store refuses in every form. A plan has 16 zero bytes in the place of a run.
create table refusals (
  schedule_id integer not null,
  run_id blob not null,
  since integer not null,
  last_at integer not null,
  reason text not null,
  primary key (schedule_id, run_id)
) strict, without rowid;

-- When it was last tried whether the store takes writes: one row.
create table probes (id integer primary key, at integer not null) strict;
