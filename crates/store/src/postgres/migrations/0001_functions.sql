-- What a batch does in one round trip. Decisions stay in `core`; these only carry them out. Every statement in a
-- volatile PL/pgSQL function takes a snapshot of its own under READ COMMITTED, so that what is counted after a lock is
-- counted as it is after the lock, just as from outside.

-- The queue for runs with gates that has the lane and the labels of another queue.
create function gated_queue(which bigint) returns bigint language plpgsql as $$
declare
    found_id bigint;
begin
    insert into queues (lane, needs, gated) select q.lane, q.needs, true from queues q where q.id = which and not q.gated
        on conflict do nothing;
    select g.id into found_id from queues q join queues g on g.lane = q.lane and g.needs = q.needs and g.gated
        where q.id = which;
    return found_id;
end $$;

-- Makes runs: of each its kind, which names what many have in common, by its place among the kinds. With `held` only
-- those whose owner is among these. Arguments that are arrays are read by place, which is faster than to unnest them.
create function make_runs(
    made_at timestamptz, held integer[], owners integer[], runs uuid[], kinds integer[], schedules bigint[],
    not_befores timestamptz[], tick_ats timestamptz[], trace_ids uuid[],
    queues bigint[], ranks integer[], agents bigint[], commands text[], agent_gates bigint[], turn_gates bigint[],
    max_attempts bigint[], triggers smallint[], probes boolean[], prompts text[], payloads text[], lanes text[],
    turns smallint[], own_lanes boolean[]
) returns void language plpgsql as $$
declare
    command_gates bigint[];
    whole_gates bigint[];
    alone_gates bigint[];
begin
    -- Beside the gates of their own definitions those that other schedules of their agents want for themselves.
    perform 1 from scopes s where s.agent_id = any(agents);
    if found then
        select array_agg(c.gate_id order by k.nth), array_agg(w.gate_id order by k.nth),
            array_agg(case turns[k.nth] when 2 then c.gate_id when 3 then w.gate_id end order by k.nth),
            array_agg(case when c.gate_id is null and w.gate_id is null then queues[k.nth]
                else gated_queue(queues[k.nth]) end order by k.nth)
            into command_gates, whole_gates, alone_gates, queues
        from generate_series(1, cardinality(agents)) as k (nth)
        left join scopes c on c.agent_id = agents[k.nth] and c.command = commands[k.nth] and triggers[k.nth] <> 4
        left join scopes w on w.agent_id = agents[k.nth] and w.command = '' and triggers[k.nth] <> 4;
    end if;
    insert into live (id, state, created_at, schedule_id, due_at, not_before, tick_at, trace_id, queue_id, rank, agent_id,
        command, agent_gate, turn_gate, command_gate, whole_gate, alone_gate, own_lane, max_attempts, trigger, probe, prompt,
        payload, lane)
    select runs[u.place], 0, made_at, schedules[u.place], not_befores[u.place], not_befores[u.place], tick_ats[u.place],
        trace_ids[u.place], queues[kinds[u.place]], ranks[kinds[u.place]], agents[kinds[u.place]],
        commands[kinds[u.place]], agent_gates[kinds[u.place]], turn_gates[kinds[u.place]], command_gates[kinds[u.place]],
        whole_gates[kinds[u.place]], alone_gates[kinds[u.place]], own_lanes[kinds[u.place]],
        max_attempts[kinds[u.place]], triggers[kinds[u.place]], probes[kinds[u.place]], prompts[kinds[u.place]],
        payloads[kinds[u.place]], lanes[kinds[u.place]]
    from generate_series(1, cardinality(runs)) as u (place)
    where held is null or owners[u.place] = any(held);
end $$;

-- Commits plans that look at nothing but their own schedules: those hold whose tokens are still what the plans were made
-- on, and nobody else's. Their runs are made, and the tokens moved to the next tick, or removed where there is none.
-- Says which hold, by place. Nothing is done and nothing answered where a lane of theirs is limited in what may wait,
-- unless they are `admitted` there.
create function plan_ticks(
    planned_at timestamptz, tokens bigint[], versions bigint[], dues timestamptz[], next_kinds smallint[],
    next_ticks timestamptz[], next_dues timestamptz[], owners integer[], runs uuid[], kinds integer[],
    schedules bigint[], not_befores timestamptz[], tick_ats timestamptz[], trace_ids uuid[],
    queues bigint[], ranks integer[], agents bigint[], commands text[], agent_gates bigint[], turn_gates bigint[],
    max_attempts bigint[], triggers smallint[], probes boolean[], prompts text[], payloads text[], lanes text[],
    turns smallint[], own_lanes boolean[], admitted boolean, out held integer[]
) language plpgsql as $$
declare
    places tid[];
    number bigint := nextval('numbers') << 20;
begin
    if not admitted and cardinality(lanes) > 0 then
        perform 1 from gates g where g.kind = 4 and g.key = 0 and g.command = any(lanes) and g.queue_limit is not null;
        if found then
            return;
        end if;
    end if;
    select array_agg(f.nth), array_agg(f.place) into held, places from (
        select u.nth, t.ctid as place from generate_series(1, cardinality(tokens)) as u (nth)
        join timers t on t.schedule_id = tokens[u.nth] and t.version = versions[u.nth] and t.due_at = dues[u.nth]
        for update of t skip locked
    ) f;
    held := coalesce(held, '{}');
    -- They are locked and do not move. To delete and to insert is less work than to update where every index changes.
    delete from timers where ctid = any(places);
    perform make_runs(planned_at, case when cardinality(held) < cardinality(tokens) then held end, owners, runs, kinds,
        schedules, not_befores, tick_ats, trace_ids, queues, ranks, agents, commands, agent_gates, turn_gates,
        max_attempts, triggers, probes, prompts, payloads, lanes, turns, own_lanes);
    -- The versions are below zero, where nobody else's are.
    insert into timers (due_at, schedule_id, kind, tick_at, version)
    select next_dues[u.nth], tokens[u.nth], next_kinds[u.nth], next_ticks[u.nth], - (number + u.nth)
    from unnest(held) as u (nth) where next_dues[u.nth] is not null;
end $$;

-- Gives a schedule's token another version, so that plans that were made on it do not hold. A plan that is being committed
-- puts another token in its place, which only the next statement sees.
create function touch_token(wanted bigint) returns boolean language plpgsql as $$
begin
    loop
        update timers set version = nextval('numbers') where schedule_id = wanted;
        if found then return true; end if;
        perform 1 from timers where schedule_id = wanted;
        if not found then return false; end if;
    end loop;
end $$;

-- When the last of those that run behind a gate of an agent started.
create function last_start(wanted bigint) returns timestamptz language sql as $$
    select max(r.started_at) from live r where r.state = 2 and r.agent_gate = wanted
$$;

-- How many more may run behind a gate.
create function room_at(gate gates) returns bigint language plpgsql as $$
begin
    -- A stored limit may be any number.
    return greatest(least(coalesce(gate.cap, 2147483647), 2147483647), -1) - case gate.kind
        when 0 then (select count(*) from live r where r.state = 2 and r.agent_gate = gate.id)
        when 1 then (select count(*) from live r where r.state = 2 and r.turn_gate = gate.id)
        when 2 then (select count(*) from live r where r.state = 2 and r.command_gate = gate.id)
        else (select count(*) from live r where r.state = 2 and r.whole_gate = gate.id) end;
end $$;

-- The first that waits at a gate: of a turn the first of its schedule that is due, of a scope the first that waits to be
-- alone and that no earlier run of its own schedule holds back. Runs of schedules that the caller cannot read hold nobody.
create function first_at(gate gates, asked_at timestamptz, unread bigint[], out rank integer, out due_at timestamptz, out id uuid)
language plpgsql as $$
begin
    if gate.kind = 1 then
        select l.rank, l.due_at, l.id into rank, due_at, id from live l
        where l.turn_gate = gate.id and l.state <> 2 and l.due_at <= asked_at order by l.rank, l.due_at, l.id limit 1;
    elsif gate.kind in (2, 3) then
        select l.rank, l.due_at, l.id into rank, due_at, id from live l
        where l.alone_gate = gate.id and l.state <> 2 and l.due_at <= asked_at and l.not_before <= asked_at
            and not l.schedule_id = any(unread) and not exists (select 1 from live e where e.turn_gate = l.turn_gate and e.state <> 2 and e.due_at <= asked_at
                and (e.rank, e.due_at, e.id) < (l.rank, l.due_at, l.id))
            and not exists (select 1 from live e where e.turn_gate = l.turn_gate and e.state = 2)
        order by l.rank, l.due_at, l.id limit 1;
    end if;
end $$;

-- Un-parks runs. At a limit, for each queue, as many as there is room for: who serves one queue may not be able to serve
-- another. At a turn the first of all. At a scope all: what holds them is looked at by the next claim. Whoever calls this
-- holds the gates' locks.
create function unpark(held bigint[]) returns void language plpgsql as $$
begin
    update live set state = 0, parked_on = null where state + 0 = 1 and id = any(array(
        select w.id from (
            select g.id, g.kind, case when g.kind < 2 then room_at(g) end as room from gates g where g.id = any(held)
            and exists (select 1 from live p where p.state = 1 and p.parked_on = g.id)
        ) f cross join lateral (
            select p.id from (select q.id from queues q where q.gated) q cross join lateral (
                select p.id from live p where f.kind = 0 and p.state = 1 and p.parked_on = f.id and p.queue_id = q.id
                order by p.rank, p.due_at, p.id limit greatest(f.room, 0)
            ) p
            union all
            (select p.id from live p where f.kind = 1 and f.room > 0 and p.state = 1 and p.parked_on = f.id
                order by p.rank, p.due_at, p.id limit 1)
            union all
            select p.id from live p where f.kind > 1 and p.state = 1 and p.parked_on = f.id
        ) w));
end $$;

-- Makes those ready that came back and whose time has come.
create function wake_waiting(asked_at timestamptz) returns void language plpgsql as $$
begin
    update live set state = 0 where state + 0 = 3 and id = any(array(
        select l.id from live l where l.state = 3 and l.not_before <= asked_at for update skip locked));
end $$;

-- Locks gates, and un-parks what they have room for. The second statement sees all that ended before the lock.
create function release(wanted bigint[]) returns void language plpgsql as $$
begin
    perform 1 from gates where id = any(wanted) order by id for no key update;
    perform unpark(wanted);
end $$;

-- Starts the first ready runs of lanes, as far as nobody who waits behind a gate comes before them. Of a lane that has
-- slots left then, and somebody who waits, it tells the place and the slots, with no run. Rescued runs are not started
-- here: if one may start and there is one, nothing is started and all slots are told. A suspect may start if `may_suspect`.
create function claim_free(
    claimed_at timestamptz, node uuid, lanes text[], slots bigint[], labels text[], may_rescue boolean,
    may_suspect boolean
) returns table (
    place integer, id uuid, rank integer, due_at timestamptz, epoch integer, attempt bigint, max_attempts bigint,
    agent_id bigint, schedule_id bigint, command text, trigger smallint, tick_at timestamptz, prompt text, payload text,
    trace_id uuid
) language plpgsql as $$
declare
    plain bigint[];
    first tid[];
    before record;
    gated boolean;
    rescued boolean := false;
begin
    perform wake_waiting(claimed_at);
    if may_rescue then
        perform 1 from live l where l.state = 0 and l.rescue is not null and l.due_at <= claimed_at and l.not_before <= claimed_at
            and (may_suspect or l.suspicions <= 0) limit 1;
        rescued := found;
    end if;
    for nth in 1 .. cardinality(lanes) loop
        -- A lane with a limit is for whoever holds its gate.
        perform 1 from gates g where g.kind = 4 and g.key = 0 and g.command = lanes[nth]
            and coalesce(g.cap, g.queue_limit) is not null;
        if found or rescued then
            return query select nth, null::uuid, 0, claimed_at, 0, slots[nth], 0::bigint, 0::bigint,
                0::bigint, null::text, 0::smallint, null::timestamptz, null::text, null::text, null::uuid;
            continue;
        end if;
        select w.* into before from queues q cross join lateral (
            select l.rank, l.due_at, l.id from live l
            where l.state = 0 and l.queue_id = q.id and l.rescue is null and l.due_at <= claimed_at and l.not_before <= claimed_at
            order by l.rank, l.due_at, l.id limit 1
        ) w where q.lane = lanes[nth] and q.gated and q.needs <@ labels order by w.rank, w.due_at, w.id limit 1;
        gated := found;
        if not gated then
            select 2147483647 as rank, claimed_at as due_at, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid as id into before;
        end if;
        plain := array(select q.id from queues q where q.lane = lanes[nth] and not q.gated and q.needs <@ labels);
        first := array(
            select c.place from unnest(plain) as q (id) cross join lateral (
                select l.ctid as place, l.rank, l.due_at, l.id from live l
                where l.state = 0 and l.queue_id = q.id and l.rescue is null and l.due_at <= claimed_at and l.not_before <= claimed_at
                    and (l.rank, l.due_at, l.id) <= (before.rank, before.due_at, before.id)
                order by l.rank, l.due_at, l.id limit slots[nth] for update skip locked
            ) c order by c.rank, c.due_at, c.id limit slots[nth]);
        if cardinality(first) > 0 then
            -- A node whose claims do not hold gets none; the lock keeps it from being fenced until we are done.
            perform 1 from nodes n where n.id = node and not n.fenced for share;
            if not found then
                return;
            end if;
        end if;
        -- They are locked and do not move.
        return query update live l set state = 2, node_id = node, attempt = l.attempt + 1, epoch = l.epoch + 1,
            started_at = claimed_at where l.ctid = any(first)
            returning nth, l.id, l.rank, l.due_at, l.epoch, l.attempt, l.max_attempts, l.agent_id, l.schedule_id,
                l.command, l.trigger, l.tick_at, l.prompt, l.payload, l.trace_id;
        if gated and cardinality(first) < slots[nth] then
            return query select nth, null::uuid, 0, claimed_at, 0, slots[nth] - cardinality(first), 0::bigint, 0::bigint,
                0::bigint, null::text, 0::smallint, null::timestamptz, null::text, null::text, null::uuid;
        end if;
    end loop;
end $$;

-- When the next run that is not due yet may start. Queue by queue and rank by rank, so that those that are due are not
-- walked over.
create function next_start(asked_at timestamptz) returns timestamptz language plpgsql stable as $$
declare
    queue bigint := -9223372036854775808;
    ranked integer := -2147483648;
    earliest timestamptz := (select l.not_before from live l where l.state = 3 and l.not_before > asked_at
        order by l.not_before limit 1);
    first timestamptz;
begin
    loop
        select l.queue_id, l.rank into queue, ranked from live l where l.state = 0 and (l.queue_id, l.rank) > (queue, ranked)
            order by l.queue_id, l.rank limit 1;
        exit when not found;
        select l.due_at into first from live l where l.state = 0 and l.queue_id = queue and l.rank = ranked
            and l.due_at > asked_at order by l.due_at limit 1;
        if found then
            earliest := least(earliest, first);
        end if;
    end loop;
    return earliest;
end $$;

-- Nothing but an empty row where somebody is fencing the node; else who waits in a lane, the first `wanted` of those behind
-- gates, after locking those of their gates that nobody else holds; where somebody does, also the first `wanted` of those
-- that need none of these; the room of all gates that are held then, and the first that are parked at limits with room;
-- and once also who waits without gates, locked. The locks come first, and what is counted and read afterwards is as it is
-- under them.
create function candidates(
    claimed_at timestamptz, node uuid, served text, labels text[], wanted bigint, slots bigint, held bigint[],
    may_rescue boolean, may_suspect boolean, unread bigint[]
) returns table (
    id uuid, rank integer, due_at timestamptz, agent_gate bigint, turn_gate bigint, command_gate bigint, whole_gate bigint,
    alone_gate bigint, room bigint, rescued boolean, suspect boolean, parked boolean
) language plpgsql as $$
declare
    -- First, so that what is read below has them.
    woken boolean := slots > 0 and wake_waiting(claimed_at) is null;
    behind bigint[] := array(select q.id from queues q where q.lane = served and q.gated and q.needs <@ labels);
    -- Rescued runs behind gates. They keep their places at the gates also while they are held back.
    back uuid[] := array(
        select l.id from unnest(behind) as q (id) cross join lateral (
            select l.id from live l
            where l.state = 0 and l.rescue is not null and l.queue_id = q.id and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
        ) l);
    most bigint := wanted + case when cardinality(back) > 0 then 1000 else 0 end;
    others uuid[] := '{}';
    needed bigint[] := array(
        select distinct w.gate from (
            select f.* from unnest(behind) as q (id) cross join lateral (
                select l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate from live l
                where l.state = 0 and l.queue_id = q.id and l.rescue is null and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
                order by l.rank, l.due_at, l.id limit most
            ) f
            union all
            select l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate from live l where l.id = any(back)
            union all
            -- The place at a limit may have been given to a run that the caller cannot read, and that keeps it.
            select distinct l.agent_gate, null::bigint, null::bigint, null::bigint from live l
            where l.state = 0 and l.schedule_id = any(unread) and l.agent_gate is not null
        ) c cross join lateral (values (c.agent_gate), (c.turn_gate), (c.command_gate), (c.whole_gate)) as w (gate)
        where w.gate is not null and not w.gate = any(held));
    ours bigint[] := array(select g.id from gates g where g.id = any(needed) order by g.id for no key update skip locked);
    theirs bigint[] := array(select unnest(needed) except select unnest(ours));
begin
    -- As above; but who fences it waits for gates, and we hold some.
    perform 1 from nodes n where n.id = node and not n.fenced for share skip locked;
    if not found then
        perform 1 from nodes n where n.id = node and not n.fenced;
        if found then
            return query select null::uuid, 0, claimed_at, null::bigint, null::bigint, null::bigint, null::bigint, null::bigint,
                null::bigint, false, false, false;
        end if;
        return;
    end if;
    -- Whoever holds a gate may hold it for long: those behind it must not fill the window.
    if cardinality(theirs) > 0 then
        others := array(
            select f.id from unnest(behind) as q (id) cross join lateral (
                select l.* from live l
                where l.state = 0 and l.queue_id = q.id and l.rescue is null and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
                order by l.rank, l.due_at, l.id limit most + 2000
            ) f where not array[f.agent_gate, f.turn_gate, f.command_gate, f.whole_gate] && theirs
            order by f.rank, f.due_at, f.id limit most);
        ours := ours || array(select g.id from gates g where g.id = any(array(
            select distinct w.gate from live l
            cross join lateral (values (l.agent_gate), (l.turn_gate), (l.command_gate), (l.whole_gate)) as w (gate)
            where l.id = any(others) and not w.gate = any(held || ours)
        )) order by g.id for no key update skip locked);
    end if;
    -- Of each gate its room, and the first that waits there; of limits with room also who is parked there, as many as there is
    -- room for: a ready run to which that was given may not be due yet by this clock.
    return query with standing as materialized (
            select g.id, g.kind, room_at(g) as room, f.rank, f.due_at, f.id as first
            from gates g cross join lateral first_at(g, claimed_at, unread) f where g.id = any(held || ours)
        )
        select s.first, s.rank, s.due_at, s.id, null::bigint, null::bigint, null::bigint, null::bigint, s.room, false, false, false
        from standing s
        union all
        select p.id, p.rank, p.due_at, s.id, null::bigint, null::bigint, null::bigint, null::bigint, null::bigint, false, false, true
        from standing s cross join unnest(behind) as q (id) cross join lateral (
            select l.id, l.rank, l.due_at from live l
            where l.state = 1 and l.parked_on = s.id and l.queue_id = q.id and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
            order by l.rank, l.due_at, l.id limit greatest(s.room, 0)
        ) p where s.kind = 0 and s.room > 0;
    return query select c.* from unnest(behind) as q (id) cross join lateral (
            select l.id, l.rank, l.due_at, l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate, l.alone_gate, null::bigint, false, false, false from live l
            where l.state = 0 and l.queue_id = q.id and l.rescue is null and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
            order by l.rank, l.due_at, l.id limit most
        ) c order by c.rank, c.due_at, c.id limit most;
    if cardinality(others) > 0 then
        return query select l.id, l.rank, l.due_at, l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate, l.alone_gate, null::bigint, false, false, false
            from live l where l.id = any(others) and l.state + 0 = 0;
    end if;
    -- Read again: a run that came back before the gates were locked keeps its place, too.
    return query select l.* from unnest(behind) as q (id) cross join lateral (
            select l.id, l.rank, l.due_at, l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate, l.alone_gate, null::bigint, true,
                l.suspicions > 0, false from live l
            where l.state = 0 and l.rescue is not null and l.queue_id = q.id and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
        ) l;
    if slots > 0 then
        return query select c.* from queues q cross join lateral (
                select l.id, l.rank, l.due_at, null::bigint, null::bigint, null::bigint, null::bigint,
                    null::bigint, null::bigint, false, false, false from live l
                where l.state = 0 and l.queue_id = q.id and l.rescue is null and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
                order by l.rank, l.due_at, l.id limit slots for update skip locked
            ) c where q.lane = served and not q.gated and q.needs <@ labels
            order by c.rank, c.due_at, c.id limit slots;
        if may_rescue then
            return query select c.* from queues q cross join lateral (
                    select l.id, l.rank, l.due_at, null::bigint, null::bigint, null::bigint, null::bigint,
                    null::bigint, null::bigint, true, l.suspicions > 0, false from live l
                    where l.state = 0 and l.rescue is not null and l.queue_id = q.id and l.due_at <= claimed_at and l.not_before <= claimed_at and not l.schedule_id = any(unread)
                        and (may_suspect or l.suspicions <= 0)
                    order by l.rank, l.due_at, l.id limit 1 for update skip locked
                ) c where q.lane = served and not q.gated and q.needs <@ labels
                order by c.rank, c.due_at, c.id limit 1;
        end if;
    end if;
end $$;

-- Ends runs, or returns those to pending that have no end in `ends`, and says of each place whether and how. A run is
-- left alone whose epoch is another, or which is not running although `running`, or the other way round. Whoever is to
-- be cancelled does not return. With `unbooked` nothing is done and nothing answered where an agent of these runs keeps
-- books, which are to be locked first. Without `hold` the gates are left to the caller.
create function settle(
    settled_at timestamptz, unbooked boolean, running boolean, hold boolean, runs uuid[], epochs integer[],
    ends smallint[], reasons smallint[], exit_codes integer[], errors text[], words text[], summaries text[],
    arm_kinds smallint[], arm_ticks timestamptz[], arm_dues timestamptz[], not_befores timestamptz[], counted boolean[],
    out places integer[], out states smallint[], out held bigint[]
) language plpgsql as $$
declare
    number bigint;
    turns bigint[];
    armed bigint[];
    waited integer[];
    retires bigint[];
begin
    if unbooked and (exists (select 1 from agents where policies) or exists (select 1 from budgets)) then
        perform 1 from agents a where a.id = any(array(select distinct l.agent_id from live l where l.id = any(runs)))
            and (a.policies or exists (select 1 from budgets b where b.agent_id = a.id));
        if found then
            return;
        end if;
    end if;
    -- Runs of sessions leave a line, whose lock comes first.
    if unbooked and exists (select 1 from sessions) then
        perform 1 from live l where l.id = any(runs) and l.trigger = 4;
        if found then
            return;
        end if;
    end if;
    if array_position(ends, null) is not null then
        with back as (
            update live l set state = 3, node_id = null, parked_on = null,
                -- As core::ending::back_at says.
                not_before = greatest(not_befores[f.place] + greatest(l.due_at - settled_at, interval '0'), l.due_at),
                put_off_at = greatest(settled_at, l.due_at), attempt = greatest(l.attempt - case when counted[f.place] then 0 else 1 end, 0),
                -- An edit may have lowered it while the attempt ran.
                max_attempts = greatest(l.max_attempts, l.attempt + case when counted[f.place] then 1 else 0 end),
                -- An attempt that counts has left its node alive; one that does not count may never have started.
                rescue = case when l.rescue is not null and not counted[f.place] then 0 end,
                exit_code = exit_codes[f.place], error = errors[f.place]
            from (
                select u.place from generate_series(1, cardinality(runs)) as u (place) order by runs[u.place]
            ) f where l.id = runs[f.place] and l.epoch = epochs[f.place] and (l.state + 0 = 2) = running
                and ends[f.place] is null and l.cancel_reason is null
            returning f.place, array_remove(array[l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate], null) as gates
        ) select array_agg(b.place), array_agg(0::smallint), (select array_agg(x.gate) from back c, unnest(c.gates) as x (gate))
            into places, states, held from back b;
    end if;
    number := nextval('numbers') << 20;
    with gone as materialized (
        delete from live l using (
            select u.place from generate_series(1, cardinality(runs)) as u (place) order by runs[u.place]
        ) f where l.id = runs[f.place] and l.epoch = epochs[f.place] and (l.state + 0 = 2) = running
            and (ends[f.place] is not null or l.cancel_reason is not null)
        returning f.place, l.id as run, coalesce(ends[f.place], 4::smallint) as state,
            ends[f.place] is not distinct from 3 as failed,
            case when ends[f.place] is null then l.cancel_reason else reasons[f.place] end as reason,
            exit_codes[f.place] as exit_code, errors[f.place] as error, summaries[f.place] as summary,
            l.schedule_id, l.agent_id, l.command, l.trigger, l.tick_at, l.not_before, nullif(l.due_at, l.not_before) as due_at, l.lane, l.attempt,
            l.max_attempts, l.epoch, l.node_id, l.session, l.prompt, l.payload, l.trace_id, l.created_at, l.started_at, l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate
    ), twice as materialized (
        select count(distinct g.schedule_id) < count(*) as any from gone g
    ), told as materialized (
        -- Each end beside those of the same schedule in this batch. Mostly there are none, and nothing is to be seen.
        select g.*, null::integer as follows, case when g.failed then g.place end as failed_last,
            case when not g.failed then g.place end as other_last, case when g.state = 2 then g.place end as done_last,
            g.tick_at as fired_at, case when g.failed then 1::bigint else 0 end as fails,
            case when g.state = 2 then 1::bigint else 0 end as dones, 1::bigint as nth, g.place as first_place,
            true as is_last
        from gone g where not (select t.any from twice t)
        union all
        select g.*,
            case when g.failed then max(g.place) filter (where g.failed) over before
                else max(g.place) filter (where not g.failed) over before end as follows,
            max(g.place) filter (where g.failed) over up_to as failed_last,
            max(g.place) filter (where not g.failed) over up_to as other_last,
            max(g.place) filter (where g.state = 2) over up_to as done_last,
            max(g.tick_at) over up_to as fired_at,
            count(*) filter (where g.failed) over up_to as fails,
            count(*) filter (where g.state = 2) over up_to as dones,
            count(*) over up_to as nth,
            first_value(g.place) over up_to as first_place,
            lead(g.place) over up_to is null as is_last
        from gone g where (select t.any from twice t) window
            up_to as (partition by g.schedule_id order by g.place rows between unbounded preceding and current row),
            before as (partition by g.schedule_id order by g.place rows between unbounded preceding and 1 preceding)
    ), changed as (
        update schedule_state s set last_run = t.run, last_state = t.state, last_tick_at = t.tick_at,
            last_finished_at = settled_at, fired_at = greatest(s.fired_at, t.fired_at),
            ended_failed = s.ended_failed + t.fails, ended_other = s.ended_other + t.nth - t.fails,
            last_success_at = case when t.done_last is null then s.last_success_at else settled_at end,
            last_success_run = coalesce(runs[t.done_last], s.last_success_run),
            last_failed = coalesce(runs[t.failed_last], s.last_failed), prior_failed = s.last_failed,
            last_other = coalesce(runs[t.other_last], s.last_other), prior_other = s.last_other,
            last_error = case
                when t.failed_last > coalesce(t.done_last, 0) then words[t.failed_last]
                when t.done_last is null then s.last_error end,
            -- So many ends of one kind in a row, failures below zero; who was cancelled does not count.
            streak = case
                when t.done_last is null then case when t.fails > 0 then least(s.streak, 0) - t.fails else s.streak end
                when t.failed_last is null then greatest(s.streak, 0) + t.dones
                when t.done_last > t.failed_last then (select count(*) from told o
                    where o.schedule_id = t.schedule_id and o.state = 2 and o.place > t.failed_last)
                else -(select count(*) from told o
                    where o.schedule_id = t.schedule_id and o.failed and o.place > t.done_last) end,
            prior_waits_for = s.waits_for,
            waits_for = case
                when s.waits_for is null or s.waits_for = t.run then null
                when t.nth > 1 and exists (select 1 from told o
                    where o.schedule_id = t.schedule_id and o.run = s.waits_for) then null
                else s.waits_for end,
            -- The clock of a schedule that is paused meanwhile starts here.
            cursor_at = case when s.status <> 0 and not s.retired and exists (select 1 from told o
                where o.schedule_id = t.schedule_id and o.run = s.waits_for)
                then greatest(s.cursor_at, settled_at) else s.cursor_at end,
            -- A one-shot that asked for it goes with the run of its tick.
            retired = s.retired or (s.status = 4 and s.delete_after_run and exists (select 1 from told o
                where o.schedule_id = t.schedule_id and o.tick_at is not null and o.run is distinct from s.waits_for))
        from (select * from told where told.is_last order by told.schedule_id) t
        where s.schedule_id = t.schedule_id
        returning t.schedule_id, t.run, t.place, t.first_place, s.prior_failed, s.prior_other,
            s.ended_failed - t.fails as failed_before, s.ended_other - t.nth + t.fails as other_before,
            s.status = 4 and s.retired as retires,
            case when s.waits_for is null and s.status = 0 and not s.retired then s.prior_waits_for end as waited_for
    ), prior as materialized (
        -- Their schedules as they were, by the places of their first ends, because a join of two such lists takes the
        -- product of their lengths. Without nulls, because only then an array is read at a place without going there.
        select array_agg(coalesce(p.failed, '00000000-0000-0000-0000-000000000000')) as failed,
            array_agg(coalesce(p.other, '00000000-0000-0000-0000-000000000000')) as other,
            array_agg(p.failed_before) as failed_before, array_agg(p.other_before) as other_before
        from (
            select c.first_place as place, c.prior_failed as failed, c.prior_other as other, c.failed_before, c.other_before
            from changed c
            union all
            select t.place, null, null, 0, 0 from told t where t.nth > 1
            union all
            select u.place, null, null, 0, 0 from generate_series(1, cardinality(runs)) as u (place)
            where (select count(*) from told) < cardinality(runs)
                and not exists (select 1 from told t where t.place = u.place)
            order by place
        ) p
    ), kept as (
        insert into history (seq, finished_at, id, failed, prev_run, ordinal, schedule_id, agent_id, command, trigger,
            tick_at, not_before, due_at, state, reason, lane, attempt, max_attempts, epoch, node_id, exit_code, error,
            summary, session, prompt, payload, trace_id, created_at, started_at)
        select number + t.place, settled_at, t.run, t.failed,
            case when t.follows is not null then runs[t.follows]
                else nullif(case when t.failed then b.failed[t.first_place] else b.other[t.first_place] end,
                    '00000000-0000-0000-0000-000000000000') end,
            -- A schedule that is gone has counted none.
            case when t.failed then coalesce(b.failed_before[t.first_place], 0) + t.fails
                else coalesce(b.other_before[t.first_place], 0) + t.nth - t.fails end,
            t.schedule_id, t.agent_id, t.command, t.trigger, t.tick_at, t.not_before, t.due_at, t.state, t.reason, t.lane,
            t.attempt, t.max_attempts, t.epoch, t.node_id, t.exit_code, t.error, t.summary, t.session, t.prompt, t.payload,
            t.trace_id, t.created_at, t.started_at
        from prior b cross join told t
    )
    select places || array_agg(g.place), states || array_agg(g.state),
        held || array_agg(g.agent_gate) filter (where g.agent_gate is not null),
        array_agg(g.turn_gate) filter (where g.turn_gate is not null)
            || array_agg(g.command_gate) filter (where g.command_gate is not null)
            || array_agg(g.whole_gate) filter (where g.whole_gate is not null),
        (select array_agg(c.schedule_id) from changed c where c.waited_for is not null),
        (select array_agg(case when c.waited_for = c.run then c.place
            else (select t.place from told t where t.run = c.waited_for) end) from changed c where c.waited_for is not null),
        (select array_agg(c.schedule_id) from changed c where c.retires)
        into places, states, held, turns, armed, waited, retires from gone g;
    places := coalesce(places, '{}');
    states := coalesce(states, '{}');
    held := held || turns;
    if retires is not null then
        -- Their files may name them for long.
        insert into spent (source, name, definition, format) select c.source, c.name, c.definition, c.format
            from schedules c where c.id = any(retires) and c.source <> 'api' and c.retired_at is null
            on conflict (source, name) do update set definition = excluded.definition, format = excluded.format;
        update schedules set retired_at = settled_at where id = any(retires) and retired_at is null;
    end if;
    if armed is not null then
        insert into timers (due_at, schedule_id, kind, tick_at, version)
            select coalesce(arm_dues[u.place], settled_at), u.schedule_id, coalesce(arm_kinds[u.place], 2::smallint),
                coalesce(arm_ticks[u.place], settled_at), nextval('numbers') from unnest(armed, waited) as u (schedule_id, place)
            on conflict (schedule_id) do update set due_at = excluded.due_at, kind = excluded.kind,
                tick_at = excluded.tick_at, version = excluded.version;
    end if;
    if hold and held is not null then
        perform release(held);
    end if;
end $$;

-- Removes live runs that have ended, as damage may leave them: their end in history holds. Whatever ends runs would
-- fail for each of them, and with it for all others that it ends at once.
create function drop_doubles() returns void language plpgsql as $$
declare
    doubles uuid[] := array(select l.id from live l where exists (select 1 from history h where h.id = l.id));
    held bigint[];
begin
    delete from session_runs r where r.run_id = any(doubles);
    with gone as (
        delete from live l where l.id = any(doubles) returning l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate
    ) select array_agg(g.gate) into held from gone cross join lateral (
        values (gone.agent_gate), (gone.turn_gate), (gone.command_gate), (gone.whole_gate)
    ) g (gate) where g.gate is not null;
    with freed as (
        update schedule_state s set waits_for = null where s.waits_for = any(doubles)
        returning s.schedule_id, s.status, s.retired
    ) insert into timers (due_at, schedule_id, kind, tick_at, version)
        select now(), f.schedule_id, 2, now(), nextval('numbers') from freed f where f.status = 0 and not f.retired
        on conflict (schedule_id) do nothing;
    if held is not null then
        perform release(held);
    end if;
end $$;

-- How many runs take a place of a lane's queue_limit, as core::gate::queued_in says. Trigger 2 is by hand, 4 a message.
create function queued_in(which text) returns bigint language plpgsql as $$
declare
    unserved bigint[] := array(select q.id from queues q where q.needs <> '{}' and not exists (
        select 1 from nodes n where not n.fenced and not n.draining and q.needs <@ n.labels));
    own bigint[] := array(select q.id from queues q where q.lane = which and not q.id = any(unserved));
begin
    return (
        with waiting as materialized (
            select l.turn_gate, l.rank, l.due_at, l.id, l.not_before, l.trigger, l.created_at
                from live l where l.state = 0 and l.queue_id = any(own)
            union all
            select l.turn_gate, l.rank, l.due_at, l.id, l.not_before, l.trigger, l.created_at
                from live l where l.state = 1 and l.queue_id = any(own)
            union all
            select l.turn_gate, l.rank, l.due_at, l.id, l.not_before, l.trigger, l.created_at
                from live l where l.state = 3 and l.queue_id = any(own)
        ), held as materialized (
            -- Of each turn the first run that may wait for long.
            select distinct on (l.turn_gate) l.turn_gate, l.rank, l.due_at, l.id from live l
                where l.state <> 2 and l.turn_gate = any(array(
                    select distinct w.turn_gate from waiting w where w.turn_gate is not null))
                and (l.not_before > l.due_at or (l.trigger = 2 and l.due_at > l.created_at)
                    or l.queue_id = any(unserved))
                order by l.turn_gate, l.rank, l.due_at, l.id
        ) select count(*) from waiting w left join held h on h.turn_gate = w.turn_gate
            where not (w.not_before > w.due_at or (w.trigger = 2 and w.due_at > w.created_at)) and w.trigger <> 4
            and (h.id is null or (w.rank, w.due_at, w.id) < (h.rank, h.due_at, h.id)));
end $$;

-- Arms schedules that were deferred in lanes, in each the oldest first, as many as there is room for, and says how many.
-- The locks come first, and what is counted afterwards is as it is under them. Whoever is at work on one of them takes it
-- away; it is left alone.
create function arm_deferred(wanted text[]) returns bigint language plpgsql as $$
declare
    lane record;
    taken bigint;
    oldest bigint[];
    total bigint := 0;
begin
    perform 1 from gates g where g.kind = 4 and g.key = 0 and g.command = any(wanted) order by g.id for no key update;
    for lane in select g.command as name, g.queue_limit as most from gates g
        where g.kind = 4 and g.key = 0 and g.command = any(wanted)
        and exists (select 1 from deferred d where d.lane = g.command and not d.armed) order by g.id
    loop
        taken := case when lane.most is null then 0 else queued_in(lane.name)
            + (select count(*) from deferred d where d.lane = lane.name and d.armed) end;
        oldest := array(
            select d.schedule_id from deferred d where d.lane = lane.name and not d.armed
            order by d.since, d.tick_at, d.schedule_id limit case when lane.most is not null then greatest(lane.most - taken, 0) end
            for update skip locked);
        update deferred d set armed = true where d.schedule_id = any(oldest);
        insert into timers (due_at, schedule_id, kind, tick_at, version)
            select d.since, d.schedule_id, 4, d.tick_at, nextval('numbers') from deferred d
            where d.schedule_id = any(oldest);
        total := total + cardinality(oldest);
    end loop;
    return total;
end $$;
