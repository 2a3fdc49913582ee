//! The line of a session: messages, turns, stops.

#![allow(clippy::unwrap_used)]

use belfry_core::session::{
    Change, DropPolicy, Message, Mode, Place, Policy, Session, Stage, Took, Usage, moved, reset, send, stop,
    stop_all, turns,
};
use belfry_core::{Reason, RunId};
use belfry_time::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::json;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(1_800_000_000_000 + ms).unwrap()
}

fn run(n: u128) -> RunId {
    RunId(uuid::Uuid::from_u128(n))
}

/// A session and its line, as a store would keep them.
#[derive(Debug, Clone)]
struct House {
    session: Session,
    policy: Policy,
    line: Vec<Place>,
    made: u128,
    ended: Vec<(RunId, Reason)>,
}

impl House {
    fn new(policy: Policy) -> House {
        House { session: Session::default(), policy, line: Vec::new(), made: 0, ended: Vec::new() }
    }

    fn without_debounce() -> House {
        House::new(Policy { debounce: SignedDuration::ZERO, ..Policy::default() })
    }

    fn say(&mut self, ms: i64) -> Took {
        self.say_with(ms, &Message::default())
    }

    fn say_each(&mut self, times: impl IntoIterator<Item = i64>) {
        for ms in times {
            self.say(ms);
        }
    }

    fn say_with(&mut self, ms: i64, message: &Message) -> Took {
        let (took, change) = send(&self.session, &self.line, &self.policy, message, at(ms));
        self.change(change);
        match took {
            Took::Opened { seq, not_before, alone } => {
                self.made += 1;
                let run = run(self.made);
                let stage = Stage::Waiting;
                self.line.push(Place {
                    run,
                    seq,
                    stage,
                    opened_at: at(ms),
                    not_before,
                    alone,
                    bytes: message.bytes,
                    turn: false,
                });
            }
            Took::Joined { run, not_before, alone, .. } => {
                let place = self.place(run).unwrap();
                (place.not_before, place.bytes) = (not_before, place.bytes + message.bytes);
                place.alone = alone;
            }
            Took::Stale { .. } | Took::Full => {}
        }
        self.settle();
        took
    }

    fn change(&mut self, change: Change) {
        self.session = change.session;
        for (run, reason) in change.end {
            assert!(matches!(self.place(run).unwrap().stage, Stage::Waiting | Stage::Retrying));
            self.leave(run, reason);
        }
        for (run, _) in change.cancel {
            assert_eq!(self.place(run).unwrap().stage, Stage::Running);
            self.place(run).unwrap().stage = Stage::Ending;
        }
    }

    fn place(&mut self, run: RunId) -> Option<&mut Place> {
        self.line.iter_mut().find(|place| place.run == run)
    }

    fn leave(&mut self, run: RunId, reason: Reason) {
        self.line.retain(|place| place.run != run);
        self.ended.push((run, reason));
    }

    fn settle(&mut self) {
        for (run, turn) in moved(&self.session, &self.line, &self.policy) {
            self.place(run).unwrap().turn = turn;
        }
    }

    /// Starts whoever has its turn and is due, as a lane with room would; gives their numbers.
    fn start(&mut self, ms: i64) -> Vec<u128> {
        let ready = |place: &&mut Place| {
            matches!(place.stage, Stage::Waiting | Stage::Retrying)
                && place.turn
                && place.not_before <= at(ms)
        };
        let start = |place: &mut Place| {
            place.stage = Stage::Running;
            place.run.0.as_u128()
        };
        self.line.iter_mut().filter(ready).map(start).collect()
    }

    /// The end of a run that was running.
    fn end(&mut self, n: u128) {
        self.line.retain(|place| place.run != run(n));
        self.settle();
    }

    fn retry(&mut self, n: u128, ms: i64) {
        let place = self.place(run(n)).unwrap();
        (place.stage, place.not_before) = (Stage::Retrying, at(ms));
        self.settle();
    }
}

#[test]
fn runs_of_a_session_go_one_by_one_in_order() {
    let mut house = House::without_debounce();
    house.say_each(0..3);
    assert_eq!(house.start(10), [1]);
    assert_eq!(house.start(10), []);
    house.end(1);
    assert_eq!(house.start(10), [2]);
    house.end(2);
    assert_eq!(house.start(10), [3]);
}

#[test]
fn five_messages_within_the_window_are_one_run() {
    let mut house = House::new(Policy::default());
    assert_eq!(house.say(0), Took::Opened { seq: 1, not_before: at(800), alone: false });
    for n in 1..5 {
        let joined = Took::Joined { run: run(1), seq: n + 1, not_before: at(n * 100 + 800), alone: false };
        assert_eq!(house.say(n * 100), joined);
    }
    assert_eq!(house.start(1199), []);
    assert_eq!(house.start(1200), [1]);
    // Claiming closes it.
    assert_eq!(house.say(1201), Took::Opened { seq: 6, not_before: at(2001), alone: false });
}

#[test]
fn messages_do_not_keep_a_run_from_starting_for_ever() {
    let mut house = House::new(Policy::default());
    house.say(0);
    for n in 1..8 {
        let not_before = at((n * 500 + 800).min(4000));
        assert_eq!(house.say(n * 500), Took::Joined { run: run(1), seq: n + 1, not_before, alone: false });
    }
    // Due, though nobody has claimed it: closed all the same.
    assert_eq!(house.say(4000), Took::Opened { seq: 9, not_before: at(4800), alone: false });
}

#[test]
fn a_full_queue_refuses_the_new_or_drops_the_oldest() {
    // One runs, two wait, a fourth comes.
    for (drop, expected, victims) in [
        (DropPolicy::New, Took::Full, vec![]),
        (
            DropPolicy::Old,
            Took::Opened { seq: 4, not_before: at(4), alone: false },
            vec![(run(2), Reason::QueueDropped)],
        ),
    ] {
        let mut house =
            House::new(Policy { cap: 2, drop, debounce: SignedDuration::ZERO, ..Policy::default() });
        house.say(1);
        house.start(1);
        house.say(2);
        house.say(3);
        assert_eq!(house.say(4), expected, "{drop:?}");
        assert_eq!(house.ended, victims, "{drop:?}");
    }
}

#[test]
fn eleven_with_a_cap_of_ten_lose_the_first_that_waits() {
    let mut house = House::new(Policy::default());
    // Nothing has started: all of them wait.
    house.say_each((0..11).map(|n| n * 1000));
    assert_eq!(house.ended, [(run(1), Reason::QueueDropped)]);
    assert_eq!(house.line.len(), 10);
}

#[test]
fn a_message_that_joins_drops_nobody() {
    let mut house = House::new(Policy { cap: 1, ..Policy::default() });
    house.say(0);
    house.say(1);
    assert_eq!((house.line.len(), house.ended.len()), (1, 0));
}

#[test]
fn concurrency_falls_to_one_at_60_percent_of_the_window() {
    let policy = Policy { max_concurrent: 5, ..Policy::default() };
    let with = |usage| Session { usage, ..Session::default() }.concurrency(&policy);
    let used = |tokens| Some(Usage { tokens, context_window: 100_000 });
    assert_eq!([None, used(50_000), used(59_999), used(60_000), used(80_000)].map(with), [5, 5, 5, 1, 1]);
    assert_eq!(with(Some(Usage { tokens: 9, context_window: 0 })), 5, "no window, no limit");
    assert_eq!(with(Some(Usage { tokens: u64::MAX, context_window: u64::MAX })), 1);
}

#[test]
fn a_throttle_touches_nothing_that_runs_and_holds_what_does_not() {
    let mut house =
        House::new(Policy { max_concurrent: 3, debounce: SignedDuration::ZERO, ..Policy::default() });
    house.say_each(0..5);
    assert_eq!(house.start(10), [1, 2, 3]);
    house.session.usage = Some(Usage { tokens: 7, context_window: 10 });
    house.settle();
    house.end(1);
    house.end(2);
    assert_eq!(house.start(10), [], "3 still runs");
    house.end(3);
    assert_eq!(house.start(10), [4]);
}

#[test]
fn a_retry_waits_for_those_that_run_behind_it_where_fewer_are_allowed_by_now() {
    let mut house =
        House::new(Policy { max_concurrent: 2, debounce: SignedDuration::ZERO, ..Policy::default() });
    house.say_each(0..3);
    assert_eq!(house.start(10), [1, 2]);
    house.session.usage = Some(Usage { tokens: 6, context_window: 10 });
    house.retry(1, 20);
    assert_eq!(house.start(30), [], "2 still runs");
    house.end(2);
    assert_eq!(house.start(30), [1]);
    house.end(1);
    assert_eq!(house.start(30), [3]);
}

#[test]
fn a_run_that_is_full_is_closed_and_the_next_message_opens_another() {
    let mut house = House::new(Policy { max_bytes: 1_000, cap: 2, ..Policy::default() });
    let say = |house: &mut House, ms, bytes| house.say_with(ms, &Message { bytes, ..Message::default() });
    assert!(matches!(say(&mut house, 0, 400), Took::Opened { .. }));
    assert!(matches!(say(&mut house, 1, 600), Took::Joined { .. }), "as much as may be");
    assert!(matches!(say(&mut house, 2, 1), Took::Opened { .. }), "no more");
    // One that is larger than all that may be has a run of its own, and nothing joins it. The cap counts as ever.
    assert!(matches!(say(&mut house, 3, 5_000), Took::Opened { .. }));
    assert_eq!(house.ended, [(run(1), Reason::QueueDropped)]);
    assert!(matches!(say(&mut house, 4, 0), Took::Opened { .. }));
}

#[test]
fn the_size_of_a_run_is_read_as_sizes_are() {
    use serde_json::json;
    let read = |value: serde_json::Value| Policy::parse(&value).map(|policy| policy.max_bytes);
    assert_eq!(read(json!({})), Ok(1 << 20));
    assert_eq!(read(json!({"max_bytes": "64KiB"})), Ok(65_536));
    assert_eq!(read(json!({"max_bytes": 4096})), Ok(4_096));
    for wrong in [json!(10), json!("1TiB"), json!(null), json!([])] {
        let error = read(json!({"max_bytes": wrong})).unwrap_err();
        assert!(error.contains("from 1KiB to 1GiB"), "{error}");
    }
}

#[test]
fn a_message_may_ask_for_more_at_once() {
    let mut house = House::without_debounce();
    house.say(0);
    house.say_with(1, &Message { max_concurrent: Some(2), ..Message::default() });
    house.say(2);
    assert_eq!(house.start(10), [1, 2], "and so it stays for those that do not say");
}

#[test]
fn a_retry_keeps_its_place() {
    let mut house = House::new(Policy { cap: 1, debounce: SignedDuration::ZERO, ..Policy::default() });
    house.say(0);
    house.start(0);
    house.say(1);
    house.retry(1, 100);
    assert_eq!(house.start(50), [], "2 does not overtake");
    // It is not one of those that wait: 2 is dropped for 3, not 1.
    house.say(60);
    assert_eq!(house.ended, [(run(2), Reason::QueueDropped)]);
    assert_eq!(house.start(100), [1]);
}

#[test]
fn an_interrupt_takes_the_place_of_all_and_waits_for_the_last_of_them() {
    let mut house =
        House::new(Policy { max_concurrent: 3, debounce: SignedDuration::ZERO, ..Policy::default() });
    house.say_each(0..4);
    assert_eq!(house.start(10), [1, 2, 3]);
    let interrupt = Message { mode: Some(Mode::Interrupt), ..Message::default() };
    let took = house.say_with(20, &interrupt);
    assert_eq!(took, Took::Opened { seq: 5, not_before: at(20), alone: true });
    assert_eq!(house.ended, [(run(4), Reason::Interrupted)]);
    assert_eq!(house.line.iter().filter(|place| place.stage == Stage::Ending).count(), 3);
    house.say(21);
    house.end(1);
    house.end(2);
    assert_eq!(house.start(30), [], "nobody passes the interrupt by, either");
    house.end(3);
    assert_eq!(house.start(30), [5, 6]);
}

#[test]
fn interrupts_within_the_window_are_one_run() {
    let mut house = House::new(Policy { mode: Mode::Interrupt, ..Policy::default() });
    house.say(0);
    house.start(800);
    house.say(1000);
    assert_eq!(house.say(1100), Took::Joined { run: run(2), seq: 3, not_before: at(1900), alone: true });
    assert_eq!((house.line.len(), house.ended.len()), (2, 0));
    assert_eq!(house.place(run(1)).unwrap().stage, Stage::Ending);
}

#[test]
fn an_interrupt_that_joins_an_open_run_waits_for_those_that_it_interrupts() {
    let mut house = House::new(Policy { max_concurrent: 2, ..Policy::default() });
    house.say(0);
    assert_eq!(house.start(800), [1]);
    house.say(1000);
    assert!(house.place(run(2)).unwrap().turn, "two may run at once");
    let interrupt = Message { mode: Some(Mode::Interrupt), ..Message::default() };
    let joined = Took::Joined { run: run(2), seq: 3, not_before: at(1900), alone: true };
    assert_eq!(house.say_with(1100, &interrupt), joined);
    assert_eq!(house.start(2000), [], "the interrupted run is still there");
    house.end(1);
    assert_eq!(house.start(2000), [2]);
}

#[test]
fn a_stop_ends_the_oldest_that_has_its_turn() {
    let mut house =
        House::new(Policy { max_concurrent: 2, debounce: SignedDuration::ZERO, ..Policy::default() });
    assert_eq!(stop(&house.session, &house.line, &house.policy).0, None);
    house.say_each(0..3);
    house.start(10);
    let (stopped, change) = stop(&house.session, &house.line, &house.policy);
    assert_eq!((stopped, change.cancel.clone()), (Some(run(1)), vec![(run(1), Reason::Stopped)]));
    house.change(change);
    let (stopped, change) = stop(&house.session, &house.line, &house.policy);
    assert_eq!(stopped, Some(run(2)), "1 is being ended already");
    house.change(change);
    assert_eq!(stop(&house.session, &house.line, &house.policy).0, None, "3 has not got its turn");
}

#[test]
fn a_stop_ends_one_that_waits_for_its_lane() {
    let mut house = House::without_debounce();
    house.say(0);
    let (stopped, change) = stop(&house.session, &house.line, &house.policy);
    assert_eq!((stopped, change.end), (Some(run(1)), vec![(run(1), Reason::Stopped)]));
}

#[test]
fn a_stop_of_all_leaves_nothing_and_makes_what_was_sent_before_stale() {
    let mut house = House::without_debounce();
    house.say_each(0..10);
    house.start(10);
    let change = stop_all(&house.session, &house.line, at(50));
    assert_eq!(change.cancel, [(run(1), Reason::Stopped)]);
    assert_eq!(change.end.len(), 9);
    assert!(change.end.iter().all(|(_, reason)| *reason == Reason::Stopped), "cancelled, not stale");
    house.change(change);
    assert_eq!((house.session.cutoff_seq, house.session.cutoff_at), (10, Some(at(50))));
    let sent = |ms| Message { sent_at: Some(at(ms)), ..Message::default() };
    assert_eq!(house.say_with(60, &sent(49)), Took::Stale { seq: 11 });
    assert!(matches!(house.say_with(60, &sent(50)), Took::Opened { seq: 12, .. }));
    assert!(matches!(house.say(60), Took::Opened { seq: 13, .. }), "without a time it counts as sent now");
}

#[test]
fn a_reset_begins_anew_and_leaves_what_runs_alone() {
    let mut house = House::without_debounce();
    house.say_with(0, &Message { max_concurrent: Some(4), ..Message::default() });
    house.say_each(1..7);
    house.start(10);
    house.session.usage = Some(Usage { tokens: 9, context_window: 10 });
    let change = reset(&house.session, &house.line);
    assert_eq!(change.end.iter().map(|(run, _)| run.0.as_u128()).collect::<Vec<_>>(), [5, 6, 7]);
    assert!(change.end.iter().all(|(_, reason)| *reason == Reason::Stale) && change.cancel.is_empty());
    assert_eq!(
        (change.session.generation, change.session.usage, change.session.max_concurrent),
        (2, None, None)
    );
    // What runs is of another generation: it is in nobody's way.
    house.session = change.session;
    house.line.clear();
    house.say(20);
    assert_eq!(house.start(20), [8]);
    let old = Message { generation: Some(1), ..Message::default() };
    assert_eq!(house.say_with(21, &old), Took::Stale { seq: 9 });
}

#[test]
fn a_chat_is_read_with_its_defaults_and_mistakes_are_named() {
    assert_eq!(Policy::parse(&json!({})), Ok(Policy::default()));
    let all = json!({"mode": "interrupt", "drop": "new", "cap": 3, "debounce": "1.5s", "max_concurrent": 2});
    let expected = Policy {
        mode: Mode::Interrupt,
        drop: DropPolicy::New,
        cap: 3,
        debounce: SignedDuration::from_millis(1500),
        max_concurrent: 2,
        max_bytes: 1 << 20,
    };
    assert_eq!(Policy::parse(&all), Ok(expected));
    for (wrong, place) in [
        (json!({"mode": "loud"}), "chat.mode"),
        (json!({"drop": 3}), "chat.drop"),
        (json!({"cap": 0}), "chat.cap"),
        (json!({"cap": -1}), "chat.cap"),
        (json!({"debounce": "x"}), "chat.debounce"),
        (json!({"debounce": 8}), "chat.debounce"),
        (json!({"max_concurrent": 1e20}), "chat.max_concurrent"),
    ] {
        let error = Policy::parse(&wrong).unwrap_err();
        assert!(error.starts_with(place), "{wrong}: {error}");
    }
}

#[derive(Debug, Clone)]
enum Step {
    Say { after: i64, interrupt: bool, max: Option<u32> },
    Start { after: i64 },
    End(usize),
    Retry(usize),
    Stop,
    StopAll,
    Use(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..1500_i64, proptest::bool::weighted(0.1), proptest::option::weighted(0.2, 1..4_u32))
            .prop_map(|(after, interrupt, max)| Step::Say { after, interrupt, max }),
        6 => (0..1500_i64).prop_map(|after| Step::Start { after }),
        4 => (0..8_usize).prop_map(Step::End),
        1 => (0..8_usize).prop_map(Step::Retry),
        1 => Just(Step::Stop),
        1 => Just(Step::StopAll),
        1 => (0..100_u64).prop_map(Step::Use),
    ]
}

proptest! {
    /// Whatever happens: never more than allowed, never out of order, never more waiting than the cap, nobody forgotten.
    #[test]
    fn a_line_keeps_its_order_and_its_limits(steps in proptest::collection::vec(step(), 1..120), cap in 1..5_u32) {
        let mut house = House::new(Policy { cap, ..Policy::default() });
        let (mut now, mut started) = (0, Vec::new());
        for step in steps {
            let running = |house: &House| {
                let runs = house.line.iter().filter(|place| matches!(place.stage, Stage::Running | Stage::Ending));
                runs.map(|place| place.run.0.as_u128()).collect::<Vec<_>>()
            };
            match step {
                Step::Say { after, interrupt, max } => {
                    now += after;
                    let mode = interrupt.then_some(Mode::Interrupt);
                    house.say_with(now, &Message { mode, max_concurrent: max, ..Message::default() });
                }
                Step::Start { after } => {
                    now += after;
                    let before = running(&house).len();
                    let limit = house.session.concurrency(&house.policy) as usize;
                    let new = house.start(now);
                    prop_assert!(new.is_empty() || before + new.len() <= limit, "{before} + {} > {limit}", new.len());
                    started.extend(new.into_iter().filter(|run| !started.contains(run)).collect::<Vec<_>>());
                }
                Step::End(nth) => {
                    if let Some(run) = running(&house).get(nth).copied() {
                        house.end(run);
                    }
                }
                Step::Retry(nth) => {
                    if let Some(run) = running(&house).get(nth).copied() {
                        let ending = house.line.iter().any(|p| p.run.0.as_u128() == run && p.stage == Stage::Ending);
                        if ending { house.end(run) } else { house.retry(run, now + 500) }
                    }
                }
                Step::Stop => {
                    let (_, change) = stop(&house.session, &house.line, &house.policy);
                    house.change(change);
                    house.settle();
                }
                Step::StopAll => {
                    let change = stop_all(&house.session, &house.line, at(now));
                    house.change(change);
                    house.settle();
                }
                Step::Use(tokens) => {
                    house.session.usage = Some(Usage { tokens, context_window: 100 });
                    house.settle();
                }
            }
            let waiting = house.line.iter().filter(|place| place.stage == Stage::Waiting).count();
            prop_assert!(waiting <= cap as usize);
            let first = turns(&house.session, &house.line, &house.policy).first().copied();
            prop_assert!(first != Some(false) || !running(&house).is_empty(), "somebody always has its turn");
        }
        prop_assert!(started.is_sorted(), "first started in order: {started:?}");
    }
}
