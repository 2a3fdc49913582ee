//! Gates: what decides how many runs are running at once. An agent's `max_concurrent`, the turn of a schedule that queues
//! or cancels, and what such a schedule shares with others: a command, or the whole agent.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;

use belfry_time::Timestamp;

use crate::broken::{self, Broken};
use crate::definition::{AgentDefinition, IfRunning, Options, Scope};
use crate::model::{AgentId, ScheduleId, Trigger};
use crate::rescue::Rescues;

/// The lane of messages, unless their schedule or their sender names another; and of runs whose own lane nobody made.
pub const MAIN_LANE: &str = "main";

/// What the definitions say about where a run waits. Of what came with the run only the lane goes before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The pool it takes a slot from.
    pub lane: String,
    /// Labels that a node must have.
    pub needs: Vec<String>,
    /// Its gates.
    pub gates: Gates,
    /// How many attempts it may have.
    pub max_attempts: u32,
}

/// The gates that a run has to pass by its own definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gates {
    /// The agent's `max_concurrent`.
    pub agent: bool,
    /// Its schedule queues or cancels, and looks at this.
    pub turn: Option<Scope>,
}

impl Place {
    /// The place of a run of a schedule.
    pub fn of(agent: &AgentDefinition, options: &Options, is_message: bool) -> Place {
        let is_limited = agent.max_concurrent.is_some() && (!is_message || agent.limits_sessions);
        let turn = if is_message { None } else { turn(options) };
        Place {
            lane: lane(agent, options, is_message).to_owned(),
            needs: agent.needs.clone(),
            gates: Gates { agent: is_limited, turn },
            max_attempts: agent.retry.max.saturating_add(1),
        }
    }

    /// How many attempts a run may have that has used some: what it waits for or is doing is not taken from it.
    pub fn attempts(&self, used: u32, is_running: bool) -> u32 {
        self.max_attempts.max(used.saturating_add(u32::from(!is_running)))
    }
}

/// The lane of a schedule's runs, where they name none.
pub fn lane<'a>(agent: &'a AgentDefinition, options: &'a Options, is_message: bool) -> &'a str {
    let default = if is_message { MAIN_LANE } else { &agent.lane };
    options.lane.as_deref().unwrap_or(default)
}

/// A run that waits, as the `queue_limit` of a lane sees it.
#[derive(Debug, Clone, Copy)]
pub struct Waiting<'a, K> {
    /// Its lane.
    pub lane: &'a str,
    /// What made it.
    pub trigger: Trigger,
    /// When it was made.
    pub created_at: Timestamp,
    /// When its first attempt was to start.
    pub due_at: Timestamp,
    /// When it may start.
    pub not_before: Timestamp,
    /// A node has the labels that it needs.
    pub is_served: bool,
    /// Its schedule, if runs of that start in turn.
    pub turn: Option<ScheduleId>,
    /// Its place in the order of waiting runs.
    pub order: K,
}

impl<K> Waiting<'_, K> {
    /// Whether it may wait for a long time while its lane is idle: no node has its labels, or it was put off. That is: it came
    /// back (retry, rescue, shutdown), a failure budget holds it, or somebody asked for it with a delay.
    fn may_wait_long(&self) -> bool {
        let has_delay = self.trigger == Trigger::Manual && self.due_at > self.created_at;
        self.not_before > self.due_at || has_delay || !self.is_served
    }
}

/// How many of the waiting runs of all lanes take a place of a lane's `queue_limit`. Those that may wait for a long time do
/// not, nor do those that wait for their turn behind such a run, nor messages: those wait in their sessions, which have a
/// `cap` of their own.
pub fn queued_in<K: Ord>(lane: &str, waiting: &[Waiting<'_, K>]) -> usize {
    let own = waiting.iter().filter(|run| run.lane == lane);
    if broken::is(Broken::QueueLimitCountsAll) {
        return own.count();
    }
    let mut held_from: HashMap<ScheduleId, &K> = HashMap::new();
    for run in waiting.iter().filter(|run| run.may_wait_long()) {
        if let Some(schedule) = run.turn {
            let first = held_from.entry(schedule).or_insert(&run.order);
            *first = (*first).min(&run.order);
        }
    }
    let is_behind = |run: &Waiting<'_, K>| {
        let held_from = run.turn.and_then(|schedule| held_from.get(&schedule));
        held_from.is_some_and(|first| **first < run.order) && !broken::is(Broken::QueueLimitCountsTurns)
    };
    own.filter(|run| run.trigger != Trigger::Message && !run.may_wait_long() && !is_behind(run)).count()
}

/// Whether a node with these labels takes runs that need those.
pub fn serves(labels: &[String], needs: &[String]) -> bool {
    needs.iter().all(|label| labels.contains(label)) || broken::is(Broken::LabelsIgnored)
}

/// The scope in which runs of a schedule start one at a time, if they do.
pub fn turn(options: &Options) -> Option<Scope> {
    matches!(options.if_running, IfRunning::Queue | IfRunning::Cancel).then_some(options.overlap)
}

/// Scopes beyond a schedule in which runs of some schedule of an agent start only when nothing else is running there. All
/// runs of the agent that belong to such a scope count there, but for those of sessions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scopes {
    /// The whole agent.
    pub agent: bool,
    /// Commands.
    pub commands: BTreeSet<String>,
}

impl Scopes {
    /// By the schedules of an agent.
    pub fn of<'a>(schedules: impl IntoIterator<Item = &'a Options>) -> Scopes {
        let mut scopes = Scopes::default();
        for options in schedules {
            scopes.add(options, &options.command);
        }
        scopes
    }

    /// What runs of a schedule with this command want for themselves. A live run may have a command that its schedule had
    /// before, by which it goes on to wait.
    pub fn add(&mut self, options: &Options, command: &str) {
        match turn(options) {
            Some(Scope::Agent) => self.agent = true,
            Some(Scope::Command) if !self.commands.contains(command) => {
                self.commands.insert(command.to_owned());
            }
            Some(Scope::Command | Scope::Schedule) | None => {}
        }
    }
}

/// What a gate is to a run that has to pass it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// A limit: it starts while there is room.
    Limit,
    /// The turn of its own schedule, which queues or cancels: one at a time, each after every earlier one.
    Turn,
    /// The scope of its schedule, which queues or cancels: it starts if nothing there is running.
    Alone,
    /// The scope of another schedule that queues or cancels: it counts there, and does not overtake a run that waits to be
    /// alone.
    Beside,
}

/// A gate whose lock is held, as it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing<O> {
    /// How many more may run there: the cap less those that are running, whatever made them.
    pub room: i64,
    /// The place of the first that waits: of a turn the first of its schedule that is due, of a scope the first that waits to
    /// be alone and that no earlier run of its own schedule holds back. None for limits.
    pub first: Option<O>,
}

impl<O: Copy + Ord> Standing<O> {
    /// Whether a run at this place in the order has to wait.
    pub fn holds(&self, pass: Pass, order: O) -> bool {
        let is_full = self.room <= 0 && pass != Pass::Beside;
        is_full || pass != Pass::Limit && self.first.is_some_and(|first| first < order)
    }
}

/// A gate, by what it limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gate<'a> {
    /// An agent's `max_concurrent`.
    Agent(AgentId),
    /// The turn of a schedule.
    Schedule(ScheduleId),
    /// The scope of a command.
    Command(AgentId, &'a str),
    /// The scope of a whole agent.
    WholeAgent(AgentId),
}

/// A live run, as gates see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Live<'a, O> {
    /// Its place in the order of starting.
    pub order: O,
    /// Its agent.
    pub agent: AgentId,
    /// Its schedule.
    pub schedule: ScheduleId,
    /// Its command.
    pub command: &'a str,
    /// It belongs to a session.
    pub is_message: bool,
    /// Its gates by its definitions.
    pub gates: Gates,
    /// It is running.
    pub is_running: bool,
    /// Its first attempt was due.
    pub is_due: bool,
    /// Its next attempt is due.
    pub is_ready: bool,
}

impl<'a, O: Copy + Ord> Live<'a, O> {
    /// The gates that it has to pass, given the scopes of its agent.
    pub fn passes(&self, scopes: &Scopes) -> impl Iterator<Item = (Gate<'a>, Pass)> + use<'a, O> {
        let (agent, command) = (self.agent, self.command);
        let limit = self.gates.agent.then_some((Gate::Agent(agent), Pass::Limit));
        let turn = self.gates.turn.map(|_| (Gate::Schedule(self.schedule), Pass::Turn));
        let pass = |own| if self.gates.turn == Some(own) { Pass::Alone } else { Pass::Beside };
        let in_command = !self.is_message && scopes.commands.contains(command);
        let in_command = in_command.then(|| (Gate::Command(agent, command), pass(Scope::Command)));
        let in_agent = !self.is_message && scopes.agent;
        let in_agent = in_agent.then(|| (Gate::WholeAgent(agent), pass(Scope::Agent)));
        [limit, turn, in_command, in_agent].into_iter().flatten()
    }

    fn passes_gate(&self, scopes: &Scopes, gate: Gate<'_>) -> Option<Pass> {
        self.passes(scopes).find(|(own, _)| *own == gate).map(|(_, pass)| pass)
    }

    fn is_waiting(&self) -> bool {
        !self.is_running && self.is_due
    }
}

impl<O: Copy + Ord> Standing<O> {
    /// How a gate with room for `cap` stands among the live runs of its agent.
    pub fn of(gate: Gate<'_>, cap: i64, live: &[Live<'_, O>], scopes: &Scopes) -> Standing<O> {
        let is_behind = |run: &&Live<'_, O>| run.is_running && run.passes_gate(scopes, gate).is_some();
        // By its own turn: what waits for that could not start anyway, and holds nobody else.
        let is_held_back = |run: &Live<'_, O>| {
            let own =
                live.iter().filter(|other| other.schedule == run.schedule && other.gates.turn.is_some());
            own.into_iter().any(|other| other.is_running || other.is_waiting() && other.order < run.order)
        };
        let is_first = |run: &&Live<'_, O>| {
            run.is_waiting()
                && match run.passes_gate(scopes, gate) {
                    Some(Pass::Turn) => true,
                    Some(Pass::Alone) => run.is_ready && !is_held_back(run),
                    Some(Pass::Limit | Pass::Beside) | None => false,
                }
        };
        Standing {
            room: cap.saturating_sub(live.iter().filter(is_behind).count() as i64),
            first: live.iter().filter(is_first).map(|run| run.order).min(),
        }
    }
}

/// The gate that holds a run which could start but for that, and the run that stands in its way: one that is running
/// there, or the first that waits. `cap` is how many may run at a gate. A limit is named if nothing else holds the run.
pub fn holds<'a, O: Copy + Ord>(
    run: &Live<'a, O>,
    live: &[Live<'a, O>],
    scopes: &Scopes,
    cap: impl Fn(Gate<'_>) -> i64,
) -> Option<(Gate<'a>, Pass, Option<O>)> {
    let (limits, others): (Vec<_>, Vec<_>) = run.passes(scopes).partition(|(_, pass)| *pass == Pass::Limit);
    others.into_iter().chain(limits).find_map(|(gate, pass)| {
        let standing = Standing::of(gate, cap(gate), live, scopes);
        let running =
            live.iter().filter(|other| other.is_running && other.passes_gate(scopes, gate).is_some());
        let running = running.map(|other| other.order).min().filter(|_| pass != Pass::Beside);
        standing.holds(pass, run.order).then(|| (gate, pass, running.or(standing.first)))
    })
}

/// A run that could start now, and the gates it has to pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<G, O> {
    /// Its place in the order of starting.
    pub order: O,
    /// Its gates.
    pub gates: Vec<(G, Pass)>,
    /// It came back from a node that died, see [`crate::rescue`].
    pub rescued: bool,
    /// It may have killed that node.
    pub suspect: bool,
}

impl<G, O> Candidate<G, O> {
    /// Whether it starts only where nothing else of its scope is running.
    pub fn is_alone(&self) -> bool {
        self.gates.iter().any(|(_, pass)| *pass == Pass::Alone)
    }
}

/// What becomes of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission<G> {
    /// It starts.
    Start,
    /// It waits at this gate until somebody leaves or passes it.
    Park(G),
    /// Somebody else holds one of its gates, it is rescued and must not start yet, or a run before it has started alone in its
    /// scope, so that the gates stand differently; ask again.
    Later,
    /// There are no slots left.
    NoSlot,
}

/// Admits candidates in the order given, as far as slots and gates allow. `standings` has the gates whose locks we hold; a
/// gate that is not in it is somebody else's.
///
/// Of rescued runs at most one starts, as `rescues` allows; that becomes `None` then. With [`Rescues::Soon`] one slot stays free
/// for the first that would.
///
/// First come, first served: nobody overtakes at a gate where somebody waits for a slot or for another gate's lock. Such
/// a one is not parked, because nobody would release it: only a gate that holds it is certain to be freed.
pub fn admit<G: Copy + Eq + Hash, O: Copy + Ord>(
    candidates: &[Candidate<G, O>],
    standings: &mut HashMap<G, Standing<O>>,
    mut slots: usize,
    rescues: &mut Rescues,
) -> Vec<Admission<G>> {
    let mut blocked: HashSet<G> = HashSet::new();
    let mut admissions = Vec::with_capacity(candidates.len());
    let mut keeps_slot = *rescues == Rescues::Soon;
    for candidate in candidates {
        let gates = &candidate.gates;
        let held_back = candidate.rescued && !rescues.allow(candidate.suspect);
        let later = held_back
            || gates.iter().any(|(gate, _)| !standings.contains_key(gate))
            || gates.iter().any(|(gate, pass)| *pass != Pass::Beside && blocked.contains(gate));
        let holds = |(gate, pass): &&(G, Pass)| {
            standings.get(gate).is_some_and(|standing| standing.holds(*pass, candidate.order))
        };
        let admission = match gates.iter().find(holds) {
            Some((gate, _)) => Admission::Park(*gate),
            None if later => {
                if candidate.rescued && !candidate.suspect && std::mem::take(&mut keeps_slot) {
                    slots = slots.saturating_sub(1);
                }
                Admission::Later
            }
            None if slots == 0 => Admission::NoSlot,
            None => Admission::Start,
        };
        admissions.push(admission);
        match admission {
            Admission::Start => {
                slots -= 1;
                if candidate.rescued {
                    *rescues = Rescues::None;
                }
                for (gate, _) in gates {
                    standings.entry(*gate).and_modify(|standing| standing.room -= 1);
                }
                if candidate.is_alone() {
                    break;
                }
            }
            Admission::Later | Admission::NoSlot => {
                let waits = gates.iter().filter(|(_, pass)| *pass != Pass::Beside);
                blocked.extend(waits.map(|(gate, _)| *gate));
            }
            Admission::Park(_) => {}
        }
    }
    admissions.resize(candidates.len(), Admission::Later);
    admissions
}

/// Parked runs that a claim has to look at before it starts anybody at a limit with this room: of all that wait there and are
/// due by its clock, ready or parked, the first as many as there is room for.
///
/// Who makes room releases as many as may start then. Such a run is ready, and yet not due for a claim whose instant was read
/// before: without this a ready run behind it would start before those that are still parked.
pub fn passed_over<O: Copy + Ord>(room: i64, ready: &[O], parked: &[O]) -> Vec<O> {
    let ready = ready.iter().map(|order| (*order, false));
    let mut waiting: Vec<(O, bool)> = ready.chain(parked.iter().map(|order| (*order, true))).collect();
    waiting.sort_unstable();
    waiting.truncate(usize::try_from(room).unwrap_or(0));
    waiting.into_iter().filter(|(_, is_parked)| *is_parked).map(|(order, _)| order).collect()
}

/// Deals free slots out to lanes in turn, one each, while the total lasts. A lane that starts fewer runs than it was asked
/// for leaves the rest to the others. Whole shares are asked for at once, which comes to the same.
#[derive(Debug)]
pub struct Deal {
    /// Free slots by lane.
    slots: Vec<u32>,
    /// Which lanes may have more to start.
    open: Vec<bool>,
    /// How many may still start in all lanes together.
    total: u32,
    /// What each lane gets in this turn.
    share: u32,
    /// The lane after the one that was asked last, and what that was asked for.
    after: usize,
    asked: u32,
}

impl Deal {
    /// Nothing is dealt out yet.
    pub fn new(slots: impl IntoIterator<Item = u32>, total: u32) -> Deal {
        let slots: Vec<u32> = slots.into_iter().collect();
        let (open, after) = (vec![true; slots.len()], slots.len());
        Deal { slots, open, total, share: 0, after, asked: 0 }
    }

    /// The lane to ask next, by its place, and for how many runs. Tell what came of it before asking again.
    pub fn next_lane(&mut self) -> Option<(usize, u32)> {
        for _ in 0..2 {
            let next = (self.after..self.slots.len()).find(|at| self.is_open(*at));
            if let Some(at) = next.filter(|_| self.total > 0) {
                self.after = at + 1;
                self.asked = self.share.min(self.slots[at]).min(self.total);
                return Some((at, self.asked));
            }
            let open = (0..self.slots.len()).filter(|at| self.is_open(*at)).count() as u32;
            (self.after, self.share) = (0, (self.total / open.max(1)).max(1));
        }
        None
    }

    /// Whether no lane is asked after this one, whatever comes of it.
    pub fn is_last(&self) -> bool {
        let at = self.after.saturating_sub(1);
        let is_whole = self.slots.get(at).is_some_and(|slots| self.asked == (*slots).min(self.total));
        is_whole && (0..self.slots.len()).all(|other| other == at || !self.is_open(other))
    }

    /// How many runs the lane that was asked has started.
    pub fn started(&mut self, started: u32) {
        let at = self.after.saturating_sub(1);
        self.total = self.total.saturating_sub(started);
        if let (Some(slots), Some(open)) = (self.slots.get_mut(at), self.open.get_mut(at)) {
            *slots = slots.saturating_sub(started);
            *open = started >= self.asked;
        }
    }

    /// Any lane may have more to start.
    pub fn ask_all_again(&mut self) {
        self.open.fill(true);
    }

    fn is_open(&self, at: usize) -> bool {
        self.open.get(at) == Some(&true) && self.slots.get(at) > Some(&0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(gates: &[u8]) -> Candidate<u8, u8> {
        let gates = gates.iter().map(|gate| (*gate, Pass::Limit)).collect();
        Candidate { order: 0, gates, rescued: false, suspect: false }
    }

    fn rescued(gates: &[u8]) -> Candidate<u8, u8> {
        Candidate { rescued: true, ..run(gates) }
    }

    fn at(order: u8, gates: &[(u8, Pass)]) -> Candidate<u8, u8> {
        Candidate { order, gates: gates.to_vec(), rescued: false, suspect: false }
    }

    fn limits<const N: usize>(rooms: [(u8, i64); N]) -> HashMap<u8, Standing<u8>> {
        rooms.into_iter().map(|(gate, room)| (gate, Standing { room, first: None })).collect()
    }

    fn one<const N: usize>(gates: [(u8, i64, Option<u8>); N]) -> HashMap<u8, Standing<u8>> {
        gates.into_iter().map(|(gate, room, first)| (gate, Standing { room, first })).collect()
    }

    #[test]
    fn parked_runs_are_passed_over_only_by_ready_ones_that_would_take_their_places() {
        let cases: [(i64, [&[u8]; 3]); 7] = [
            (0, [&[9], &[1], &[]]),
            (-1, [&[9], &[1], &[]]),
            (1, [&[1, 9], &[2], &[]]),
            (1, [&[9], &[2, 3], &[2]]),
            (2, [&[1, 9], &[2, 3], &[2]]),
            (2, [&[9], &[2, 3], &[2, 3]]),
            (3, [&[9], &[2], &[2]]),
        ];
        for (room, [ready, parked, expected]) in cases {
            assert_eq!(passed_over(room, ready, parked), expected, "{room} {ready:?} {parked:?}");
        }
    }

    #[test]
    fn a_run_that_is_to_be_alone_waits_while_anything_of_its_scope_runs_and_nobody_younger_overtakes_it() {
        use Admission::{Later, Park, Start};
        use Pass::{Alone, Beside, Limit};
        let runs = [
            at(1, &[(9, Beside)]),
            at(2, &[(9, Alone)]),
            at(3, &[(9, Beside)]),
            at(4, &[(9, Alone)]),
            at(5, &[(7, Limit)]),
        ];
        // Something of the scope is running.
        let mut standings = one([(9, 0, Some(2)), (7, 1, None)]);
        assert_eq!(
            admit(&runs, &mut standings, 9, &mut Rescues::None),
            [Start, Park(9), Park(9), Park(9), Start]
        );
        // Nothing is: the older run starts, and then something is.
        let mut standings = one([(9, 1, Some(2)), (7, 1, None)]);
        assert_eq!(
            admit(&runs, &mut standings, 9, &mut Rescues::None),
            [Start, Park(9), Park(9), Park(9), Start]
        );
        // With one that started alone all others are asked again.
        let mut standings = one([(9, 1, Some(2)), (7, 1, None)]);
        assert_eq!(admit(&runs[1..], &mut standings, 9, &mut Rescues::None), [Start, Later, Later, Later]);
    }

    fn live(order: u8, schedule: ScheduleId, turn: Option<Scope>) -> Live<'static, u8> {
        let (agent, command, gates) = (1, "poll", Gates { agent: false, turn });
        let (is_message, is_running, is_due, is_ready) = (false, false, true, true);
        Live { order, agent, schedule, command, is_message, gates, is_running, is_due, is_ready }
    }

    #[test]
    fn the_gate_that_holds_a_run_names_the_run_in_its_way() {
        let whole = Scopes { agent: true, ..Scopes::default() };
        let none = Scopes::default();
        let (queue, alone, free) = (Some(Scope::Schedule), Some(Scope::Agent), None);
        let running = |run| Live { is_running: true, ..run };
        let limited = |run: Live<'static, u8>| Live { gates: Gates { agent: true, ..run.gates }, ..run };
        let (turn, agent, scope) = (Gate::Schedule(7), Gate::Agent(1), Gate::WholeAgent(1));
        // The last is asked about: an earlier one of its schedule holds it, by its place and not by its age.
        let table = [
            (none.clone(), vec![live(1, 7, queue), live(2, 7, queue)], Some((turn, Pass::Turn, Some(1)))),
            (none.clone(), vec![live(3, 7, queue), live(2, 7, queue)], None),
            (
                none.clone(),
                vec![running(live(3, 7, queue)), live(2, 7, queue)],
                Some((turn, Pass::Turn, Some(3))),
            ),
            (none.clone(), vec![live(1, 7, free), live(2, 7, free)], None),
            // It waits to be alone while anything of its scope runs; what only waits there does not hold it.
            (
                whole.clone(),
                vec![running(live(1, 8, free)), live(2, 7, alone)],
                Some((scope, Pass::Alone, Some(1))),
            ),
            (whole.clone(), vec![live(1, 8, free), live(2, 7, alone)], None),
            // It stands behind one that waits to be alone.
            (
                whole.clone(),
                vec![running(live(9, 8, free)), live(1, 8, alone), live(2, 7, free)],
                Some((scope, Pass::Beside, Some(1))),
            ),
            (
                none.clone(),
                vec![running(limited(live(1, 8, free))), limited(live(2, 7, free))],
                Some((agent, Pass::Limit, Some(1))),
            ),
            // Runs that the limit does not bind do not count for it.
            (none, vec![running(live(1, 8, free)), limited(live(2, 7, free))], None),
        ];
        for (scopes, runs, expected) in table {
            let held = holds(&runs[runs.len() - 1], &runs, &scopes, |_| 1);
            assert_eq!(held, expected, "{runs:?}");
        }
    }

    #[test]
    fn slots_are_dealt_out_one_each_and_what_one_lane_leaves_goes_to_the_others() {
        // Free slots and waiting runs by lane, the total, and what each lane starts.
        let cases = [
            ([10, 10, 0], [3, 9, 0], u32::MAX, [3, 9, 0]),
            ([10, 10, 0], [9, 9, 0], 5, [3, 2, 0]),
            ([10, 10, 10], [0, 9, 9], 4, [0, 2, 2]),
            ([2, 10, 0], [9, 9, 0], 8, [2, 6, 0]),
            ([10, 0, 10], [1, 9, 9], 2, [1, 0, 1]),
            ([4, 4, 0], [4, 4, 0], 0, [0, 0, 0]),
        ];
        for (slots, waiting, total, expected) in cases {
            let mut deal = Deal::new(slots, total);
            let (mut started, mut is_over) = ([0; 3], false);
            while let Some((at, asked)) = deal.next_lane() {
                assert!(!is_over, "asked after the last: {slots:?} {waiting:?} {total}");
                is_over = deal.is_last();
                let now = asked.min(waiting[at] - started[at]);
                started[at] += now;
                deal.started(now);
            }
            assert_eq!(started, expected, "{slots:?} {waiting:?} {total}");
        }
    }

    #[test]
    fn a_run_waits_for_every_earlier_one_of_its_schedule_also_while_that_only_waits() {
        let mut standings = one([(1, 1, Some(3))]);
        let runs = [at(4, &[(1, Pass::Turn)]), at(3, &[(1, Pass::Turn)])];
        assert_eq!(
            admit(&runs, &mut standings, 9, &mut Rescues::None),
            [Admission::Park(1), Admission::Start]
        );
        let mut standings = one([(1, 0, Some(3))]);
        assert_eq!(
            admit(&runs, &mut standings, 9, &mut Rescues::None),
            [Admission::Park(1), Admission::Park(1)]
        );
    }

    #[test]
    fn candidates_start_in_order_until_a_gate_is_full() {
        let mut free = limits([(1, 2), (2, 1)]);
        let admissions = admit(
            &[run(&[1]), run(&[1, 2]), run(&[1]), run(&[2]), run(&[])],
            &mut free,
            10,
            &mut Rescues::None,
        );
        use Admission::{Park, Start};
        assert_eq!(admissions, [Start, Start, Park(1), Park(2), Start]);
    }

    #[test]
    fn nobody_overtakes_one_that_waits_for_a_lock_and_nobody_is_parked_behind_it() {
        let mut free = limits([(1, 5)]);
        let admissions = admit(&[run(&[1, 9]), run(&[1]), run(&[])], &mut free, 10, &mut Rescues::None);
        assert_eq!(admissions, [Admission::Later, Admission::Later, Admission::Start]);
    }

    #[test]
    fn without_slots_nobody_is_parked_at_a_gate_that_has_room() {
        let mut free = limits([(1, 5)]);
        let admissions = admit(&[run(&[1]), run(&[1]), run(&[1])], &mut free, 1, &mut Rescues::None);
        assert_eq!(admissions, [Admission::Start, Admission::NoSlot, Admission::Later]);
    }

    #[test]
    fn rescued_runs_start_one_at_a_time_and_nobody_overtakes_one_at_its_gate() {
        let mut free = limits([(1, 5), (2, 5)]);
        let candidates = [rescued(&[]), rescued(&[1]), run(&[1]), run(&[2]), run(&[])];
        let mut rescues = Rescues::Any;
        use Admission::{Later, Start};
        assert_eq!(admit(&candidates, &mut free, 10, &mut rescues), [Start, Later, Later, Start, Start]);
        assert_eq!(rescues, Rescues::None);
        assert_eq!(admit(&candidates, &mut free, 10, &mut rescues), [Later, Later, Later, Start, Start]);
    }

    #[test]
    fn a_slot_is_kept_for_a_rescued_run_that_starts_in_a_moment() {
        let mut free = limits([(1, 5)]);
        let suspect = Candidate { suspect: true, ..rescued(&[]) };
        let candidates = [suspect, rescued(&[]), rescued(&[]), run(&[]), run(&[1])];
        use Admission::{Later, NoSlot, Start};
        for (slots, expected) in [
            (1, [Later, Later, Later, NoSlot, NoSlot]),
            (2, [Later, Later, Later, Start, NoSlot]),
            (3, [Later, Later, Later, Start, Start]),
        ] {
            let mut rescues = Rescues::Soon;
            assert_eq!(admit(&candidates, &mut free, slots, &mut rescues), expected);
            assert_eq!(rescues, Rescues::Soon);
        }
    }

    #[test]
    fn a_rescued_run_at_a_full_gate_leaves_its_turn_to_the_next() {
        let mut free = limits([(1, 0)]);
        let admissions = admit(&[rescued(&[1]), rescued(&[])], &mut free, 10, &mut Rescues::Any);
        assert_eq!(admissions, [Admission::Park(1), Admission::Start]);
    }

    #[test]
    fn a_suspect_waits_until_suspects_may_start_and_keeps_its_place_meanwhile() {
        let mut free = limits([(1, 5)]);
        let suspect = |gates: &[u8]| Candidate { suspect: true, ..rescued(gates) };
        let candidates = [suspect(&[1]), rescued(&[]), suspect(&[]), run(&[1])];
        use Admission::{Later, Start};
        let mut rescues = Rescues::Unsuspected;
        assert_eq!(admit(&candidates, &mut free, 10, &mut rescues), [Later, Start, Later, Later]);
        assert_eq!(rescues, Rescues::None);
        let mut rescues = Rescues::Any;
        assert_eq!(admit(&candidates, &mut free, 10, &mut rescues), [Start, Later, Later, Start]);
    }
}
