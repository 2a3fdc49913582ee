//! Gates: limits on how many runs are running at once. An agent's `max_concurrent`, the turn of a schedule that queues
//! or cancels, a lane's cluster-wide limit, a session.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

/// The most gates a run can have to pass.
pub const GATES_MAX: usize = 4;

/// A run that could start now, and the gates it has to pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<R, G> {
    /// The run.
    pub run: R,
    /// Its gates.
    pub gates: Vec<G>,
    /// It came back from a node that died, see [`crate::rescue`].
    pub rescued: bool,
}

/// What becomes of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission<G> {
    /// It starts.
    Start,
    /// It waits until this gate has room.
    Park(G),
    /// Somebody else holds one of its gates, or it is rescued and another rescued run goes first; ask again.
    Later,
    /// There are no slots left.
    NoSlot,
}

/// Admits candidates in the order given, as far as slots and gates allow. `free` has the room of each gate whose lock we
/// hold; a gate that is not in it is somebody else's.
///
/// At most `rescues` rescued runs start; that number goes down with each.
///
/// First come, first served: nobody overtakes at a gate where somebody waits for a slot or for another gate's lock. Such
/// a one is not parked, because nobody would release it: only a gate that is full is certain to be freed.
pub fn admit<R, G: Copy + Eq + Hash>(
    candidates: &[Candidate<R, G>],
    free: &mut HashMap<G, i64>,
    mut slots: usize,
    rescues: &mut usize,
) -> Vec<Admission<G>> {
    let mut blocked: HashSet<G> = HashSet::new();
    let mut admissions = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let gates = &candidate.gates;
        let held_back = candidate.rescued && *rescues == 0;
        let later = held_back || gates.iter().any(|gate| !free.contains_key(gate) || blocked.contains(gate));
        let full = gates.iter().find(|gate| free.get(gate).is_some_and(|room| *room <= 0));
        let admission = match full {
            Some(gate) => Admission::Park(*gate),
            None if later => Admission::Later,
            None if slots == 0 => Admission::NoSlot,
            None => Admission::Start,
        };
        match admission {
            Admission::Start => {
                slots -= 1;
                *rescues -= usize::from(candidate.rescued);
                for gate in gates {
                    free.entry(*gate).and_modify(|room| *room -= 1);
                }
            }
            Admission::Later | Admission::NoSlot => blocked.extend(gates),
            Admission::Park(_) => {}
        }
        admissions.push(admission);
    }
    admissions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(gates: &[u8]) -> Candidate<(), u8> {
        Candidate { run: (), gates: gates.to_vec(), rescued: false }
    }

    fn rescued(gates: &[u8]) -> Candidate<(), u8> {
        Candidate { rescued: true, ..run(gates) }
    }

    #[test]
    fn candidates_start_in_order_until_a_gate_is_full() {
        let mut free = HashMap::from([(1, 2), (2, 1)]);
        let admissions =
            admit(&[run(&[1]), run(&[1, 2]), run(&[1]), run(&[2]), run(&[])], &mut free, 10, &mut 0);
        use Admission::{Park, Start};
        assert_eq!(admissions, [Start, Start, Park(1), Park(2), Start]);
    }

    #[test]
    fn nobody_overtakes_one_that_waits_for_a_lock_and_nobody_is_parked_behind_it() {
        let mut free = HashMap::from([(1, 5)]);
        let admissions = admit(&[run(&[1, 9]), run(&[1]), run(&[])], &mut free, 10, &mut 0);
        assert_eq!(admissions, [Admission::Later, Admission::Later, Admission::Start]);
    }

    #[test]
    fn without_slots_nobody_is_parked_at_a_gate_that_has_room() {
        let mut free = HashMap::from([(1, 5)]);
        let admissions = admit(&[run(&[1]), run(&[1]), run(&[1])], &mut free, 1, &mut 0);
        assert_eq!(admissions, [Admission::Start, Admission::NoSlot, Admission::Later]);
    }

    #[test]
    fn rescued_runs_start_one_at_a_time_and_nobody_overtakes_one_at_its_gate() {
        let mut free = HashMap::from([(1, 5), (2, 5)]);
        let candidates = [rescued(&[]), rescued(&[1]), run(&[1]), run(&[2]), run(&[])];
        let mut rescues = 1;
        use Admission::{Later, Start};
        assert_eq!(admit(&candidates, &mut free, 10, &mut rescues), [Start, Later, Later, Start, Start]);
        assert_eq!(rescues, 0);
        assert_eq!(admit(&candidates, &mut free, 10, &mut rescues), [Later, Later, Later, Start, Start]);
    }

    #[test]
    fn a_rescued_run_at_a_full_gate_leaves_its_turn_to_the_next() {
        let mut free = HashMap::from([(1, 0)]);
        let admissions = admit(&[rescued(&[1]), rescued(&[])], &mut free, 10, &mut 1);
        assert_eq!(admissions, [Admission::Park(1), Admission::Start]);
    }
}
