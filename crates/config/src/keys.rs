//! Every key there is, with its shape, default and meaning. The check of a file, the JSON Schema and the tests that
//! every default can be written out all read these tables.

use belfry_core::definition::LATE_AFTER_MIN;

/// One key of a map.
#[derive(Debug)]
pub(crate) struct Key {
    pub name: &'static str,
    pub shape: Shape,
    /// As it would be written; empty where there is none.
    pub default: &'static str,
    pub required: bool,
    pub doc: &'static str,
}

/// What a value may look like. Whether a text of the right shape means anything is asked later, for timings.
#[derive(Debug)]
pub(crate) enum Shape {
    /// Any text.
    Text,
    /// A text that is judged together with the rest of the schedule; the word says what it is.
    Timing(&'static str),
    /// One of some words.
    Words(&'static [&'static str]),
    Flag,
    /// A whole number.
    Count {
        min: i64,
        max: i64,
    },
    /// At least so many milliseconds.
    Duration {
        min_ms: u64,
    },
    /// A duration, for which years are allowed.
    Age,
    Size,
    /// `100/s`
    Rate,
    Address,
    /// An IP address or a range of them, `10.0.0.0/8`.
    Network,
    Zone,
    /// The URL of a store.
    Store,
    /// A directory or file; made absolute.
    Path,
    /// A name of ours: of a lane, a command, a label.
    Name,
    EnvName,
    /// Secrets of a webhook: text that may hold references, or a list. Whether they are text is judged by
    /// `core::hook::proof`, together with the rest of the webhook.
    Secrets,
    /// Text that must not hold references. A template.
    Prompt,
    /// A line for the shell.
    Shell,
    Argv,
    /// This word, or the shape.
    Or(&'static str, &'static Shape),
    /// A map, or otherwise the second.
    MapOr(&'static Shape, &'static Shape),
    List(&'static Shape),
    /// A list, or one item without the brackets.
    OneOrMore(&'static Shape),
    Map(&'static [Key]),
    /// Names of our own choice; the word says of what.
    Named(&'static str, &'static Shape),
    /// Names of environment variables.
    Env,
    /// Any JSON object.
    Object,
    /// A key whose feature is not available in this version: only its default may be written.
    NotYet,
}

use Shape::*;

const fn key(name: &'static str, shape: Shape, default: &'static str, doc: &'static str) -> Key {
    Key { name, shape, default, required: false, doc }
}

const fn required(name: &'static str, shape: Shape, doc: &'static str) -> Key {
    Key { name, shape, default: "", required: true, doc }
}

const NUMBER: Shape = Count { min: 0, max: u32::MAX as i64 };
const AT_LEAST_ONE: Shape = Count { min: 1, max: u32::MAX as i64 };
const SLOTS: Shape = Count { min: 0, max: 1_000_000 };
const CODE: Shape = Count { min: 0, max: 255 };
const POSITIVE: Shape = Duration { min_ms: 1 };
const TICKING: Shape = Duration { min_ms: 100 };
const LATE: Shape = Duration { min_ms: LATE_AFTER_MIN.as_millis() as u64 };

/// The main file.
pub(crate) static TOP: &[Key] = &[
    key(
        "store",
        Store,
        "sqlite:.belfry/belfry.db",
        "Where everything is kept: `sqlite:FILE`, relative to this file, or `postgres://user@host/db`. `BELFRY_STORE` overrides it.",
    ),
    key(
        "timezone",
        Zone,
        "",
        "The time zone of every schedule that names none, an IANA name such as Europe/London. By default the host's.",
    ),
    key("listen", Address, "127.0.0.1:7400", "Address and port of the HTTP API."),
    key(
        "lanes",
        Named("lane", &LANE),
        "{}",
        "Pools of slots by name; a number means slots. main 30, subagent 50, team 100 and cron 30 are always there. `BELFRY_LANE_<NAME>` overrides the slots.",
    ),
    key(
        "include",
        OneOrMore(&Text),
        "[]",
        "More files, relative to this one; `*` and `?` match inside a name.",
    ),
    key("engine", Map(ENGINE), "{}", "How a node works."),
    key("retention", Map(RETENTION), "{}", "How long history is kept; `none` is for ever."),
    key("log", Map(LOG), "{}", "What is logged, and how."),
    key("api", Map(API), "{}", "The HTTP API."),
    key("rate_limits", NotYet, "{}", "How many requests a host may get, by its name."),
    key(
        "defaults",
        Map(AGENT),
        "{}",
        "Keys of every agent that does not write them itself; maps are merged key by key.",
    ),
    key("agents", Named("agent", &Map(AGENT)), "{}", "What runs, by name."),
];

/// The keys that an included file may have.
pub(crate) const INCLUDED: &[&str] = &["include", "agents"];

static LANE: Shape = MapOr(&Map(LANE_KEYS), &SLOTS);
static LANE_KEYS: &[Key] = &[
    required("slots", SLOTS, "How many runs each node may have in it."),
    key("limit", Or("none", &SLOTS), "none", "How many runs all nodes together may have in it."),
    key(
        "queue_limit",
        Or("none", &AT_LEAST_ONE),
        "none",
        "How many runs may wait for it; further ticks are deferred.",
    ),
];

static ENGINE: &[Key] = &[
    key("check_interval", TICKING, "1s", "The longest sleep of the planner without a listener."),
    key(
        "poll_interval",
        TICKING,
        "30s",
        "The longest sleep of the planner while the PostgreSQL listener is healthy.",
    ),
    key("heartbeat", TICKING, "60s", "How often nodes and runs say that they live."),
    key("orphan_check", TICKING, "5m", "How often runs without a node are looked for."),
    key("dead_after", AT_LEAST_ONE, "2", "How many missed heartbeats make a node dead."),
    key(
        "lease",
        Duration { min_ms: 3_000 },
        "30s",
        "For how long a node has the right to its runs without renewing it.",
    ),
    key(
        "late_after",
        Or("auto", &LATE),
        "auto",
        "How long after it was due a tick counts as missed, at least 1s, for schedules that do not say. `auto`: the smaller of 10 minutes and half the distance to the next tick, at least 1s.",
    ),
    key("jitter_threshold", NUMBER, "3", "More catch-up runs than this at once are spread."),
    key(
        "max_catch_up_jitter",
        Duration { min_ms: 0 },
        "30s",
        "Over how long they are spread at most: never over more than a tenth of the time to the schedule's next tick, nor beyond its window, and not at all if that time is under a minute.",
    ),
    key(
        "shutdown_timeout",
        Duration { min_ms: 0 },
        "30s",
        "How long a node waits for its runs when it is asked to end.",
    ),
    key(
        "max_concurrent",
        Or("none", &AT_LEAST_ONE),
        "none",
        "How many runs a node may have over all lanes. `BELFRY_MAX_CONCURRENT` overrides it.",
    ),
    key("labels", List(&Name), "[]", "What this node offers to agents that `needs` it."),
];

static RETENTION: &[Key] = &[
    key("runs", Or("none", &Age), "30d", "Completed and cancelled runs."),
    key("runs_per_schedule", Or("none", &AT_LEAST_ONE), "200", "How many runs of one schedule are kept."),
    key("failures", Or("none", &Age), "90d", "Failed runs."),
    key("output", Or("none", &Age), "7d", "The output of runs."),
    key("skips", Or("none", &Age), "30d", "Skipped and missed ticks."),
    key("keys", NotYet, "24h", "Idempotency keys."),
    key("heartbeats", Or("none", &Age), "7d", "Heartbeats."),
    key("snapshots", Or("none", &Age), "30d", "Snapshots of nodes."),
    key(
        "retired",
        Or("none", &Age),
        "90d",
        "Schedules and agents that are gone, with their revisions, limits and breakers; at least until their runs and skips are.",
    ),
    key("audit", Or("none", &Age), "1y", "Who changed what."),
];

static LOG: &[Key] = &[
    key(
        "format",
        Words(&["auto", "text", "json"]),
        "auto",
        "`auto` is text on a terminal, JSON lines otherwise.",
    ),
    key(
        "level",
        Words(&["error", "warn", "info", "debug", "trace"]),
        "info",
        "The least important lines that are written.",
    ),
    key("file", NotYet, "none", "A file instead of standard output."),
];

static API: &[Key] = &[
    key("allow_agents", Flag, "false", "Whether agents may be created over the API, with scope admin."),
    key("open", Flag, "false", "Whether anyone on this host may use the API without a token. Loopback only."),
    key("open_metrics", Flag, "false", "Whether `/metrics` is served without a token."),
    key(
        "trusted_proxies",
        List(&Network),
        "[]",
        "Addresses or ranges of reverse proxies. Only their `X-Forwarded-For`, `-Proto` and `-Host` headers count.",
    ),
    key(
        "allowed_hosts",
        List(&Text),
        "[]",
        "Host names under which the API may be addressed, beside the loopback's.",
    ),
    key("rate", Rate, "100/s", "How many requests a client may send: a number per `s`, `m` or `h`."),
    key("max_body", Size, "1MiB", "The largest request body."),
];

/// What says which program an attempt starts. Exactly one.
pub(crate) const ACTIONS: &[&str] = &["run", "shell", "http", "fetch"];

/// An agent, and `defaults`.
pub(crate) static AGENT: &[Key] = &[
    key(
        "run",
        Argv,
        "",
        "A program and its arguments, as a list; no shell. Each is a template: `{{ prompt }}`.",
    ),
    key("shell", Shell, "", "A line for `sh -c`, which gets it as written. Values come by `env`."),
    key("http", NotYet, "", "A request."),
    key("fetch", NotYet, "", "A fetch of data into a table."),
    key(
        "commands",
        Named("command", &COMMAND),
        "{}",
        "What is started instead, for schedules that name one of these: a list as for `run`, or a map with `run` or `shell`.",
    ),
    key("cwd", Path, "", "Where it starts, relative to this file."),
    key(
        "env",
        Env,
        "{}",
        "Environment variables. Each is a template; `${NAME}` and `${NAME:-default}` are filled in on the node when an attempt starts, `$$` is a dollar.",
    ),
    key("env_pass", List(&EnvName), "[]", "Variables that are passed on from the node."),
    key("prompt", Or("none", &Prompt), "null", "The prompt, where the schedule has none. A template."),
    key("payload", Object, "{}", "The payload, under the schedule's, key by key."),
    key("stdin", Words(&["none", "prompt", "payload"]), "none", "What it reads from standard input."),
    key("timeout", Or("none", &POSITIVE), "1h", "How long an attempt may take."),
    key("grace", Duration { min_ms: 0 }, "5s", "The time between asking it to end and making it."),
    key("output", Size, "1MiB", "How much of its output is kept: half from the start, half from the end."),
    key(
        "max_concurrent",
        Or("none", &AT_LEAST_ONE),
        "1",
        "How many of its runs may be running at once, over all nodes.",
    ),
    key("retry", Map(RETRY), "{}", "What follows a failed attempt."),
    key("breaker", Or("none", &Map(BREAKER)), "none", "When failures stop its schedules."),
    key("lane", Name, "cron", "The pool of slots its runs take one from."),
    key("needs", List(&Name), "[]", "Labels that a node must have."),
    key("preset", NotYet, "none", "A known agent program."),
    key("terminal", NotYet, "none", "A terminal for the program."),
    key("resume_session", NotYet, "false", "Going on with the session of the last run."),
    key("hooks", NotYet, "{}", "What runs before and after."),
    key("spend", NotYet, "none", "A limit on money."),
    key("schedules", Named("schedule", &Map(SCHEDULE)), "{}", "When it runs, by name."),
];

static COMMAND: Shape = MapOr(&Map(COMMAND_KEYS), &Argv);
pub(crate) static COMMAND_KEYS: &[Key] =
    &[key("run", Argv, "", "A program and its arguments."), key("shell", Shell, "", "A line for `sh -c`.")];

static RETRY: &[Key] = &[
    key("max", Count { min: 0, max: 1_000_000 }, "3", "How many attempts may follow the first."),
    key("base", Duration { min_ms: 0 }, "2s", "The delay before the first retry; each one doubles it."),
    key("max_delay", Duration { min_ms: 0 }, "30s", "The longest delay."),
    key("no_retry_codes", List(&CODE), "[78]", "Exit codes after which another attempt is of no use."),
    key("ok_codes", List(&CODE), "[0]", "Exit codes that mean success."),
    key(
        "budget",
        Or("none", &Map(BUDGET)),
        "none",
        "How many attempts may fail in a period before its schedules wait for the period to end.",
    ),
];

static BUDGET: &[Key] = &[
    required("max", AT_LEAST_ONE, "Failed attempts per period."),
    required("period", POSITIVE, "The period, which starts with the first failure."),
];

static BREAKER: &[Key] = &[
    required("threshold", AT_LEAST_ONE, "Consecutive failed runs that open it."),
    required("reset_after", POSITIVE, "How long it stays open before one run may probe."),
];

/// What makes a schedule tick. Exactly one.
pub(crate) const KINDS: &[&str] = &["every", "cron", "at", "after", "webhook", "chat"];

/// A schedule.
pub(crate) static SCHEDULE: &[Key] = &[
    key(
        "every",
        Timing("an interval such as `20m`, `1h30m` or `daily`"),
        "",
        "A distance: `20m`, `1h30m`, `hourly`, `daily`, `weekly`, `monthly`.",
    ),
    key(
        "cron",
        Timing("five fields such as \"0 9 * * 1-5\""),
        "",
        "Wall-clock times: five fields, or `@daily` and the like.",
    ),
    key(
        "at",
        Timing("a time such as `2027-02-03T09:00:00+01:00`"),
        "",
        "Once, at an RFC 3339 time; without an offset only where a `timezone` is named.",
    ),
    key("after", Timing("a delay such as `90s`"), "", "Once, so long after it was first seen."),
    key("webhook", Map(WEBHOOK), "", "Requests to /hooks/AGENT/SCHEDULE."),
    key("chat", Map(CHAT), "", "Messages, in a queue per session."),
    key("enabled", Flag, "true", "Whether it runs at all."),
    key(
        "timezone",
        Or("inherited", &Timing("an IANA name such as Europe/London")),
        "inherited",
        "Its time zone; else the file's, else the host's.",
    ),
    key(
        "anchor",
        Words(&["completion", "start", "slot"]),
        "completion",
        "From where `every` counts: the end of the last run, the last tick, or a grid.",
    ),
    key("phase", Timing("a duration such as `30s`"), "0s", "Moves the grid of `anchor: slot`."),
    key(
        "jitter",
        Or("none", &Timing("a duration such as `30s` or a percentage such as `10%`")),
        "none",
        "Delays each tick by up to so much, always the same for the same tick.",
    ),
    key(
        "only_between",
        Or("none", &Timing("a window such as \"08:00-18:00\"")),
        "none",
        "Local times at which it may tick; the end is out.",
    ),
    key(
        "not_on",
        OneOrMore(&Timing("a day such as `sat`, or 0-7")),
        "[]",
        "Days on which it does not tick: names, or 0-7 where 0 and 7 are Sunday.",
    ),
    key("dst_gap", Words(&["run", "skip"]), "run", "What becomes of a fixed time that the clocks skip."),
    key("dst_fold", Words(&["first", "both"]), "first", "When a fixed time fires that happens twice."),
    key(
        "catch_up",
        Words(&["skip", "run_once", "run_all"]),
        "",
        "What becomes of ticks missed in downtime. By default `run_once`, for `cron` `skip`.",
    ),
    key("catch_up_limit", NUMBER, "100", "How many `run_all` makes at most; the newest are kept."),
    key(
        "late_after",
        Or("auto", &LATE),
        "auto",
        "How long after it was due a tick counts as missed, at least 1s.",
    ),
    key(
        "if_running",
        Words(&["skip", "queue", "cancel", "allow"]),
        "skip",
        "What a tick does while a run lives.",
    ),
    key("overlap", Words(&["schedule", "command", "agent"]), "schedule", "Which runs `if_running` looks at."),
    key(
        "max_pending",
        NUMBER,
        "10",
        "How many runs `if_running: queue` lets wait; missed ticks that are caught up do not count.",
    ),
    key("command", Name, "poll", "Which of the agent's `commands`; a template value otherwise."),
    key("prompt", Or("inherited", &Prompt), "null", "The prompt. A template."),
    key("payload", Object, "{}", "Merged over the agent's payload, key by key."),
    key("lane", Or("inherited", &Name), "inherited", "The pool of slots, where it is not the agent's."),
    key("priority", Count { min: i16::MIN as i64, max: i16::MAX as i64 }, "0", "Higher goes first."),
    key("work_source", NotYet, "none", "Where work is asked for before a run is made."),
    key(
        "delete_after_run",
        Flag,
        "false",
        "A one-shot removes itself when its run has ended; the run stays.",
    ),
];

static WEBHOOK: &[Key] = &[
    key(
        "secret",
        Secrets,
        "",
        "The secret that requests are signed with, as `${NAME}`; a list while it changes; or `none`: then a request needs a token.",
    ),
    key("secrets", Secrets, "[]", "More secrets, as a list."),
    key("github", Flag, "false", "Also accepts requests that GitHub has signed (`X-Hub-Signature-256`)."),
];

static CHAT: &[Key] = &[
    key(
        "mode",
        Words(&["queue", "followup", "interrupt"]),
        "queue",
        "What a message does while a run lives.",
    ),
    key("drop", Words(&["old", "new"]), "old", "Which one goes when the queue is full."),
    key("cap", AT_LEAST_ONE, "10", "How many runs may wait."),
    key("debounce", Duration { min_ms: 0 }, "800ms", "Messages closer together than this are one run."),
    key("max_concurrent", AT_LEAST_ONE, "1", "How many runs of a session may be running at once."),
    key("max_bytes", Size, "1MiB", "Messages that would make a run larger than this open another."),
];
