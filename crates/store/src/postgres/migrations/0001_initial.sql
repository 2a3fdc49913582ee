-- Everything lives in the schema `belfry`, which the connection's search_path names.

-- Ids, versions and places in history: one sequence, so that no number ever stands for two things.
create sequence numbers;

create table sources (
    name text primary key,
    digest text not null,
    applied_at timestamptz not null
);

-- Cold. `edition` changes with the definition: it keys caches of what was read from it.
create table agents (
    id bigint primary key,
    source text not null,
    name text collate "C" not null,
    edition bigint not null,
    definition text not null,
    -- The lowest format that can read it.
    format integer not null default 1,
    -- Has a breaker or a budget: only then do the ends of its runs look here.
    policies boolean not null,
    retired_at timestamptz
);
create unique index agents_name on agents (name) where retired_at is null;
create index agents_policies on agents (id) where policies;
-- Those that not every version can read.
create index agents_format on agents (id) where format > 1;

-- Cold.
create table schedules (
    id bigint primary key,
    agent_id bigint not null,
    -- In the order of its bytes, whatever the database's locale.
    name text collate "C" not null,
    source text not null,
    revision bigint not null,
    definition text not null,
    format integer not null default 1,
    retired_at timestamptz
);
create unique index schedules_name on schedules (name) where retired_at is null;
-- An agent's live runs are found by its schedules: an index of them by agent would be written on every claim.
create index schedules_agent on schedules (agent_id);
create index schedules_retired on schedules (retired_at) where retired_at is not null;
create index schedules_format on schedules (id) where format > 1;
create index schedules_source on schedules (source) where retired_at is null;
-- Also for those that are gone.
create index schedules_every_name on schedules (name);

-- Schedules of files that went with their run, as their definitions ask: kept as long as the source names them.
create table spent (
    source text not null,
    name text collate "C" not null,
    definition text not null,
    format integer not null,
    primary key (source, name)
);

-- What a schedule was, by the instants of its edits.
create table schedule_revisions (
    schedule_id bigint not null,
    revision bigint not null,
    from_at timestamptz not null,
    definition text not null,
    format integer not null default 1,
    primary key (schedule_id, revision)
);

-- Written on ends, skips and edits; a plain tick does not touch it.
create table schedule_state (
    schedule_id bigint primary key,
    agent_id bigint not null,
    edition bigint not null,
    retired boolean not null default false,
    delete_after_run boolean not null default false,
    status smallint not null,
    status_since timestamptz not null,
    status_reason text,
    status_until timestamptz,
    origin timestamptz,
    -- No tick of this timing is armed at or before this instant. Written where a timer goes away that remembered it.
    cursor_at timestamptz,
    -- The last tick of any timing that has a result. Written where no timer tells it.
    planned_at timestamptz,
    waits_for uuid,
    skip_reason smallint,
    skip_from timestamptz,
    skip_to timestamptz,
    skip_count bigint,
    last_run uuid,
    last_state smallint,
    last_tick_at timestamptz,
    -- The last tick whose run has ended.
    fired_at timestamptz,
    last_finished_at timestamptz,
    last_success_at timestamptz,
    last_success_run uuid,
    last_error text,
    streak bigint not null default 0,
    -- Heads of the two chains of ended runs, by how long they are kept: failed ones, and others.
    last_failed uuid,
    last_other uuid,
    -- How many runs either has had.
    ended_failed bigint not null default 0,
    ended_other bigint not null default 0,
    -- What the last batch of ends found here: an update tells only what a row has become.
    prior_failed uuid,
    prior_other uuid,
    prior_waits_for uuid
) with (fillfactor = 80);

-- The token: one narrow row for each armed schedule. Who deletes it plans the tick.
create table timers (
    due_at timestamptz not null,
    schedule_id bigint not null,
    kind smallint not null,
    tick_at timestamptz not null,
    version bigint not null,
    primary key (due_at, schedule_id),
    constraint timers_schedule unique (schedule_id)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

-- Distinct (lane, set of labels), apart for runs with and without gates.
create table queues (
    id bigint generated always as identity primary key,
    lane text not null,
    needs text[] not null,
    gated boolean not null,
    constraint queues_place unique (lane, needs, gated)
);

-- Limits on how many are running at once. Kinds: 0 an agent's limit, 1 the turn of a schedule that queues or cancels, 2 the
-- command and 3 the agent that runs of such schedules want for themselves, 4 a lane.
-- No cap is no limit.
create table gates (
    id bigint generated always as identity primary key,
    kind smallint not null,
    key bigint not null,
    command text not null default '',
    cap bigint,
    -- Of a lane: how many may wait before ticks are deferred.
    queue_limit bigint,
    -- Of an agent: runs that started up to then were not let in by this limit.
    cap_at timestamptz,
    constraint gates_place unique (kind, key, command)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

-- Commands (or '' for the whole agent) that runs of some schedule of an agent want for themselves: all runs of the agent
-- that belong there pass this gate. Who makes runs reads it in the same transaction; who edits locks it, so that no run is
-- made by the definitions of before.
create table scopes (
    agent_id bigint not null,
    command text not null,
    gate_id bigint not null,
    primary key (agent_id, command)
);

-- Runs that have not ended. States: 0 ready, 1 parked behind a gate, 2 running, 3 came back and waits until not_before.
create table live (
    id uuid primary key,
    state smallint not null,
    queue_id bigint not null,
    -- The order of starting, fixed when it is made: rank, due_at, id.
    rank integer not null,
    due_at timestamptz not null,
    -- When it may start, never before due_at.
    not_before timestamptz not null,
    -- When that was set, if that was after it was made.
    put_off_at timestamptz,
    schedule_id bigint not null,
    tick_at timestamptz,
    agent_id bigint not null,
    command text not null,
    agent_gate bigint,
    turn_gate bigint,
    command_gate bigint,
    whole_gate bigint,
    -- The one of these two that it wants for itself.
    alone_gate bigint,
    -- Its lane came with it.
    own_lane boolean not null,
    parked_on bigint,
    node_id uuid,
    epoch integer not null default 0,
    attempt bigint not null default 0,
    max_attempts bigint not null,
    cancel_reason smallint,
    trigger smallint not null,
    probe boolean not null,
    -- The key of the session that a message is for.
    session text,
    prompt text,
    payload text not null,
    trace_id uuid,
    created_at timestamptz not null,
    started_at timestamptz,
    exit_code integer,
    error text,
    -- Its queue's.
    lane text not null,
    -- It came back from a node that died: 0 while it waits, else the number of its claim.
    rescue bigint,
    -- How often it was the suspect when its node died.
    suspicions smallint not null default 0
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
-- Also the tripwire: a tick that is planned twice fails here.
create unique index live_tick on live (schedule_id, tick_at);
create index live_ready on live (queue_id, rank, due_at, id) where state = 0;
create index live_rescued on live (queue_id, rank, due_at, id) where state = 0 and rescue is not null;
create index live_parked on live (parked_on, queue_id, rank, due_at, id) where state = 1;
create index live_back on live (not_before) where state = 3;
create index live_turn on live (turn_gate, rank, due_at, id) where state <> 2 and turn_gate is not null;
create index live_alone on live (alone_gate, rank, due_at, id) where state <> 2 and alone_gate is not null;
create index live_agent_gate on live (agent_gate) where state = 2 and agent_gate is not null;
create index live_turn_gate on live (turn_gate) where state = 2 and turn_gate is not null;
create index live_command_gate on live (command_gate) where state = 2 and command_gate is not null;
create index live_whole_gate on live (whole_gate) where state = 2 and whole_gate is not null;
create index live_node on live (node_id) where state = 2;
create index live_cancelled on live (node_id) where cancel_reason is not null;
create index live_session on live (session, schedule_id) where session is not null;

-- Inserted once, at the end. `prev_run` is the one before of the same schedule that is kept as long as this one, so that
-- a schedule's runs are listed without an index by schedule.
create table history (
    id uuid primary key,
    seq bigint not null,
    failed boolean not null,
    -- Its place in the chain.
    ordinal bigint not null,
    prev_run uuid,
    schedule_id bigint not null,
    agent_id bigint not null,
    command text not null,
    trigger smallint not null,
    tick_at timestamptz,
    not_before timestamptz not null,
    due_at timestamptz,
    state smallint not null,
    reason smallint,
    lane text not null,
    attempt bigint not null,
    max_attempts bigint not null,
    epoch integer not null,
    node_id uuid,
    exit_code integer,
    error text,
    summary text,
    -- What the last attempt says that it used, as JSON.
    usage text,
    session text,
    prompt text,
    payload text not null,
    trace_id uuid,
    created_at timestamptz not null,
    started_at timestamptz,
    finished_at timestamptz not null
);
create index history_age on history (failed, finished_at, seq);
create index history_session on history (session, id) where session is not null;

-- What attempts wrote, in the order of places within their run.
create table output (
    run_id uuid not null,
    seq bigint not null,
    attempt bigint not null,
    stream smallint not null,
    bytes bytea not null,
    primary key (run_id, seq)
);

create table skips (
    id bigint primary key,
    schedule_id bigint not null,
    reason smallint not null,
    from_at timestamptz not null,
    to_at timestamptz not null,
    count bigint not null
);
create index skips_schedule on skips (schedule_id, from_at);
create index skips_age on skips (to_at);

create table nodes (
    id uuid primary key,
    host text not null,
    pid bigint not null,
    -- By which its process is found on the same system, and the records of its children.
    boot_id text not null default '',
    pid_ns text not null default '',
    process_start bigint not null default 0,
    state_dir text not null default '',
    version text not null default '',
    -- How long its leases are.
    lease_ms bigint not null default 0,
    -- How many runs it runs at once at most, if there is a limit.
    max_concurrent bigint,
    labels text[] not null,
    started_at timestamptz not null,
    lease_until timestamptz not null,
    fenced boolean not null,
    -- The number of its last renewal, to tell which claims came after it.
    renewal bigint not null
) with (fillfactor = 50);

create table breakers (
    agent_id bigint not null,
    command text collate "C" not null,
    state smallint not null,
    failures bigint not null,
    opened_at timestamptz,
    probe uuid,
    primary key (agent_id, command)
);

-- The last changes of each breaker.
create table breaker_log (
    id bigint generated always as identity primary key,
    agent_id bigint not null,
    command text not null,
    at timestamptz not null,
    from_state smallint not null,
    to_state smallint not null,
    failures bigint not null,
    reason smallint not null,
    run_id uuid
);
create index breaker_log_place on breaker_log (agent_id, command, id);

create table budgets (
    agent_id bigint primary key,
    period_start timestamptz not null,
    failures bigint not null
);

create table idempotency (
    schedule_id bigint not null,
    key text not null,
    body_hash bytea not null,
    run_id uuid not null,
    expires_at timestamptz not null,
    primary key (schedule_id, key)
);
create index idempotency_age on idempotency (expires_at);

-- Sessions of chats, and the line of each: the live runs of its present generation, by the number of their first message.
-- Those whose turn it is not are parked, at no gate.
create table sessions (
    id bigint generated always as identity primary key,
    schedule_id bigint not null,
    key text not null,
    generation bigint not null,
    last_seq bigint not null,
    cutoff_seq bigint not null,
    cutoff_at timestamptz,
    max_concurrent bigint,
    tokens bigint,
    context_window bigint,
    -- How many may be running at once by the schedule.
    at_once bigint not null,
    used_at timestamptz not null,
    constraint sessions_key unique (schedule_id, key)
) with (fillfactor = 80);
create index sessions_used on sessions (used_at);

create table session_runs (
    run_id uuid primary key,
    session_id bigint not null,
    seq bigint not null,
    alone boolean not null,
    constraint session_runs_line unique (session_id, seq)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);

-- What lanes may hold; origin: 0 what the files say, 1 what was said since.
create table lanes (
    name text not null,
    origin smallint not null,
    slots bigint not null,
    cap bigint,
    queue_limit bigint,
    primary key (name, origin)
);

-- Schedules whose tick waits for room in its lane. Those that are armed have it, and a token.
create table deferred (
    schedule_id bigint primary key,
    lane text not null,
    tick_at timestamptz not null,
    since timestamptz not null,
    armed boolean not null
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
create index deferred_lane on deferred (lane, armed, since, tick_at, schedule_id);
