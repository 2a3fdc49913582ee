-- Times are microseconds since 1970 in UTC, ids of runs and nodes are 16 bytes.

create table sources (name text primary key, digest text not null, applied_at integer not null) strict, without rowid;

-- No number stands for another agent or schedule later: nodes remember by it what they have read.
create table agents (
  id integer primary key autoincrement,
  name text not null,
  source text not null,
  revision integer not null,
  definition text not null,
  -- The lowest format that can read it.
  format integer not null default 1,
  -- Parts of the definition that the end of a run looks at, where there are such.
  breaker text,
  budget text,
  retired_at integer
) strict;
create unique index agents_name on agents (name) where retired_at is null;

-- What a schedule is: cold and wide.
create table schedules (
  id integer primary key autoincrement,
  agent_id integer not null,
  name text not null,
  source text not null,
  revision integer not null,
  definition text not null,
  format integer not null default 1,
  retired_at integer
) strict;
create unique index schedules_name on schedules (name) where retired_at is null;
-- Also for those that are gone.
create index schedules_every_name on schedules (name);
create index schedules_agent on schedules (agent_id);
create index schedules_retired on schedules (retired_at) where retired_at is not null;
-- Those that not every version can read.
create index schedules_format on schedules (id) where format > 1;
create index agents_format on agents (id) where format > 1;

-- Schedules of files that went with their run, as their definitions ask: kept as long as the source names them.
create table spent (
  source text not null,
  name text not null,
  definition text not null,
  format integer not null,
  primary key (source, name)
) strict, without rowid;

create table schedule_revisions (
  schedule_id integer not null,
  revision integer not null,
  from_at integer not null,
  definition text not null,
  format integer not null default 1,
  primary key (schedule_id, revision)
) strict, without rowid;

-- How it stands: written by skips, edits and ends.
create table schedule_state (
  schedule_id integer primary key,
  status integer not null,
  status_reason text,
  status_until integer,
  status_since integer not null,
  origin integer,
  -- No tick of this timing is armed at or before this instant. Written where a timer goes away that remembered it.
  cursor_at integer,
  -- The last tick of any timing that has a result. Written where no timer tells it.
  planned_at integer,
  waits_for blob,
  skip_reason integer,
  skip_from integer,
  skip_to integer,
  skip_count integer,
  last_run blob,
  last_state integer,
  last_tick_at integer,
  -- The last tick whose run has ended.
  fired_at integer,
  last_finished_at integer,
  last_success_at integer,
  last_success_run blob,
  last_error text,
  streak integer not null default 0,
  -- How many of its runs have ended, how many of these failed, and the heads of the two chains of them in history.
  ended integer not null default 0,
  ended_failed integer not null default 0,
  last_failed blob,
  last_other blob,
  delete_after_run integer not null
) strict;

-- The due index: one token per armed schedule, narrow. Who deletes it plans the tick.
create table timers (
  due_at integer not null,
  schedule_id integer not null,
  kind integer not null,
  tick_at integer not null,
  version integer not null,
  primary key (due_at, schedule_id)
) strict, without rowid;
create unique index timers_schedule on timers (schedule_id);

create table queues (
  id integer primary key,
  lane text not null,
  needs text not null,
  gated integer not null,
  unique (lane, needs, gated)
) strict;

-- Kinds: 0 an agent's limit, 1 the turn of a schedule that queues or cancels, 2 the command and 3 the agent that runs of such
-- schedules want for themselves.
create table gates (
  id integer primary key,
  kind integer not null,
  key text not null,
  cap integer,
  unique (kind, key)
) strict;

-- Commands (or '' for the whole agent) that runs of some schedule of an agent want for themselves: all runs of the agent
-- that belong there pass this gate.
create table scopes (
  agent_id integer not null,
  command text not null,
  gate_id integer not null,
  primary key (agent_id, command)
) strict, without rowid;

-- Runs that can still change, in the order of their ids, which is that of their making. state: 0 ready, 1 parked at a gate,
-- 2 running, 3 came back and waits until not_before. It has rowids, as history has: without them a search by id would read
-- the long texts of the rows that it passes.
create table live (
  id blob not null primary key,
  state integer not null,
  queue_id integer not null,
  -- The order of starting, fixed when it is made: rank, due_at, id.
  rank integer not null,
  due_at integer not null,
  -- When it may start, never before due_at.
  not_before integer not null,
  -- When that was set, if that was after it was made.
  put_off_at integer,
  schedule_id integer not null,
  tick_at integer,
  agent_id integer not null,
  command text not null,
  trigger integer not null,
  agent_gate integer,
  turn_gate integer,
  command_gate integer,
  whole_gate integer,
  -- The one of these two that it wants for itself.
  alone_gate integer,
  -- Its lane came with it.
  own_lane integer not null default 0,
  parked_on integer,
  node_id blob,
  epoch integer not null,
  attempt integer not null,
  max_attempts integer not null,
  cancel_reason integer,
  -- The key of the session that a message is for.
  session text,
  trace_id blob,
  created_at integer not null,
  started_at integer,
  exit_code integer,
  error text,
  -- It came back from a node that died: 0 while it waits, else the number of its claim, see nodes.
  rescue integer,
  -- How often it was the suspect when its node died.
  suspicions integer not null default 0,
  -- Last, because what stands behind a long text is read through all of its pages.
  prompt text,
  payload text not null
) strict;
-- Also the tripwire: no tick lives twice.
create unique index live_schedule on live (schedule_id, tick_at);
create index live_ready on live (queue_id, rank, due_at, id) where state = 0;
create index live_rescued on live (queue_id, rank, due_at, id) where state = 0 and rescue is not null;
create index live_parked on live (parked_on, rank, due_at, id) where state = 1;
create index live_back on live (not_before) where state = 3;
create index live_turn on live (turn_gate, rank, due_at, id) where state <> 2 and turn_gate is not null;
create index live_alone on live (alone_gate, rank, due_at, id) where state <> 2 and alone_gate is not null;
create index live_cancelled on live (node_id) where cancel_reason is not null;
create index live_agent_gate on live (agent_gate) where state = 2 and agent_gate is not null;
create index live_turn_gate on live (turn_gate) where state = 2 and turn_gate is not null;
create index live_command_gate on live (command_gate) where state = 2 and command_gate is not null;
create index live_whole_gate on live (whole_gate) where state = 2 and whole_gate is not null;
create index live_session on live (session, schedule_id) where session is not null;

-- Runs that have ended: inserted once. Each knows its place among those of its schedule, and the one before it of the same
-- kind (failed, or not), so that a schedule's runs are listed along two chains, both pruned from the end.
create table history (
  id blob not null primary key,
  place integer not null,
  -- Among those of the same kind.
  ordinal integer not null,
  previous blob,
  schedule_id integer not null,
  tick_at integer,
  agent_id integer not null,
  command text not null,
  trigger integer not null,
  lane text not null,
  not_before integer not null,
  due_at integer,
  state integer not null,
  reason integer,
  attempt integer not null,
  max_attempts integer not null,
  epoch integer not null,
  node_id blob,
  exit_code integer,
  error text,
  summary text,
  -- What the last attempt says that it used, as JSON.
  usage text,
  session text,
  trace_id blob,
  created_at integer not null,
  started_at integer,
  finished_at integer not null,
  -- Last, as in live.
  prompt text,
  -- None is an empty object.
  payload text
) strict;
create index history_session on history (session, id) where session is not null;

-- What attempts wrote, in the order of places within their run.
create table output (
  run_id blob not null,
  seq integer not null,
  attempt integer not null,
  stream integer not null,
  bytes blob not null,
  primary key (run_id, seq)
) strict, without rowid;

create table skips (
  number integer primary key,
  schedule_id integer not null,
  revision integer not null,
  reason integer not null,
  from_tick integer not null,
  to_tick integer not null,
  count integer not null
) strict;
create index skips_schedule on skips (schedule_id, from_tick);

create table nodes (
  id blob primary key,
  host text not null,
  pid integer not null,
  -- By which its process is found on the same system, and the records of its children.
  boot_id text not null default '',
  pid_ns text not null default '',
  process_start integer not null default 0,
  state_dir text not null default '',
  version text not null default '',
  -- How long its leases are.
  lease_ms integer not null default 0,
  -- How many runs it runs at once at most, if there is a limit.
  max_concurrent integer,
  labels text not null,
  started_at integer not null,
  lease_until integer not null,
  fenced integer not null,
  -- How many rescued runs it has claimed, and how many of these before its last renewal.
  rescues integer not null default 0,
  renewal integer not null default 0
) strict, without rowid;

create table breakers (
  agent_id integer not null,
  command text not null,
  breaker text not null,
  primary key (agent_id, command)
) strict, without rowid;

create table breaker_log (
  number integer primary key,
  agent_id integer not null,
  command text not null,
  transition text not null
) strict;
create index breaker_log_agent on breaker_log (agent_id, command);

create table budgets (agent_id integer primary key, period_start integer not null, failures integer not null) strict;

create table idempotency (
  schedule_id integer not null,
  key text not null,
  body_hash blob not null,
  run_id blob not null,
  expires_at integer not null,
  primary key (schedule_id, key)
) strict, without rowid;
create index idempotency_expires on idempotency (expires_at);

-- Sessions of chats, and the line of each: the live runs of its present generation, by the number of their first message.
-- Those whose turn it is not are parked, at no gate.
create table sessions (
  id integer primary key,
  schedule_id integer not null,
  key text not null,
  generation integer not null,
  last_seq integer not null,
  cutoff_seq integer not null,
  cutoff_at integer,
  max_concurrent integer,
  tokens integer,
  context_window integer,
  -- How many may be running at once by the schedule.
  at_once integer not null,
  used_at integer not null,
  unique (schedule_id, key)
) strict;
create index sessions_used on sessions (used_at);

create table session_runs (
  run_id blob primary key,
  session_id integer not null,
  seq integer not null,
  alone integer not null
) strict, without rowid;
create unique index session_runs_line on session_runs (session_id, seq);

-- What lanes may hold; origin: 0 what the files say, 1 what was said since.
create table lanes (
  name text not null,
  origin integer not null,
  slots integer not null,
  cap integer,
  queue_limit integer,
  primary key (name, origin)
) strict, without rowid;

-- Schedules whose tick waits for room in its lane. Those that are armed have it, and a token.
create table deferred (
  schedule_id integer primary key,
  lane text not null,
  tick_at integer not null,
  since integer not null,
  armed integer not null
) strict;
create index deferred_lane on deferred (lane, armed, since, tick_at, schedule_id);
