//! The keeper itself: one thread reads what the node says, one acts when it is time, one writes answers to the node.
//!
//! The thread that acts never waits for the node: a frozen node does not read, and its pipe may be full.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

use super::protocol::{FromKeeper, Margins, ToKeeper, now_ms};
use crate::cgroup;
use crate::node_process;
use crate::processes::{Family, Scope, Snapshot};

/// The longest sleep: the clock goes on while the machine sleeps, and we notice within this.
const LONGEST_SLEEP_MS: u64 = 1_000;
/// How often a KILL is repeated, and we look who is left.
const LOOK_AGAIN_MS: u64 = 50;
/// How long we try to end what is left after the node, before we give up.
const GIVE_UP_MS: u64 = 10_000;

/// Watches until the node is gone, ends what it left, and returns.
pub(super) fn main() -> ExitCode {
    node_process::close_inherited_descriptors();
    // A keeper that cannot hide is still better than none.
    node_process::hide_memory();
    // Neither the node's terminal nor whoever signals its group may take us with it. The signals are blocked rather than
    // ignored: it comes to the same, since nothing is executed from here.
    let _ = nix::unistd::setsid();
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGTSTP]
        .into_iter()
        .collect();
    let _ = signals.thread_block();
    // A few: a node waits for the answer before it goes on.
    let (sender, messages) = sync_channel(64);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Some(message) = line.ok().and_then(|line| serde_json::from_str(&line).ok()) else { return };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    let mut keeper = Keeper::new(answering());
    keeper.watch(&messages);
    keeper.end_all();
    ExitCode::SUCCESS
}

struct Keeper {
    margins: Margins,
    children: HashMap<String, Child>,
    lease_until_ms: Option<u64>,
    /// Answers that the node has not read yet: at most one for each message from the node, and
    /// one for each child that is ended.
    answers: Sender<FromKeeper>,
}

struct Child {
    family: Family,
    asked: bool,
    /// How often in a row nobody was found.
    empty_looks: u8,
}

#[derive(PartialEq, PartialOrd)]
enum Lease {
    Good { for_ms: u64 },
    Ending { kill_in_ms: u64 },
    Over,
}

impl Keeper {
    fn new(answers: Sender<FromKeeper>) -> Keeper {
        let margins = Margins { term_before_ms: 0, kill_before_ms: 0, gone_grace_ms: 0 };
        Keeper { margins, children: HashMap::new(), lease_until_ms: None, answers }
    }

    /// Tells the node, without waiting until it reads.
    fn say(&self, answer: FromKeeper) {
        // The writer ends only when the node's end of the pipe is closed: then nobody reads.
        let _ = self.answers.send(answer);
    }

    /// Returns when the node's end of the pipe is closed: it is gone, or no longer needs us.
    fn watch(&mut self, messages: &Receiver<ToKeeper>) {
        loop {
            match messages.recv_timeout(Duration::from_millis(self.act())) {
                Ok(message) => self.hear(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn hear(&mut self, message: ToKeeper) {
        match message {
            ToKeeper::Hello(margins) => {
                self.margins = margins;
                self.say(FromKeeper::Ready);
            }
            ToKeeper::Lease { until_ms } => {
                self.lease_until_ms = Some(until_ms);
                self.children.values_mut().for_each(|child| child.asked = false);
            }
            // Known in any case, so that even a child that is refused is ended; it has not been told to go.
            ToKeeper::Add { number, record } => {
                let good = matches!(self.lease(), Lease::Good { .. });
                let child = Child { family: Family::new(record.clone()), asked: false, empty_looks: 0 };
                self.children.insert(record.child_id, child);
                self.say(if good { FromKeeper::Added { number } } else { FromKeeper::Refused { number } });
            }
            ToKeeper::Remove { child_id } => {
                self.children.remove(&child_id);
            }
            ToKeeper::Ping { number } => self.say(FromKeeper::Added { number }),
        }
    }

    fn lease(&self) -> Lease {
        let Some(until_ms) = self.lease_until_ms else { return Lease::Good { for_ms: LONGEST_SLEEP_MS } };
        let left_ms = until_ms.saturating_sub(now_ms());
        if left_ms > self.margins.term_before_ms {
            Lease::Good { for_ms: left_ms - self.margins.term_before_ms }
        } else if left_ms > self.margins.kill_before_ms {
            Lease::Ending { kill_in_ms: left_ms - self.margins.kill_before_ms }
        } else {
            Lease::Over
        }
    }

    /// Does what is due, and says how long nothing else will be.
    fn act(&mut self) -> u64 {
        match self.lease() {
            Lease::Good { for_ms } => for_ms.min(LONGEST_SLEEP_MS),
            Lease::Ending { kill_in_ms } => {
                self.ask_all();
                kill_in_ms.min(LONGEST_SLEEP_MS)
            }
            Lease::Over if self.kill_all() => LOOK_AGAIN_MS,
            Lease::Over => LONGEST_SLEEP_MS,
        }
    }

    /// TERM, once each. The node is told before the signal is sent, so that it knows why a child has ended.
    fn ask_all(&mut self) {
        let mut snapshot = None;
        let answers = &self.answers;
        for (child_id, child) in self.children.iter_mut().filter(|(_, child)| !child.asked) {
            child.asked = true;
            let _ = answers.send(FromKeeper::Ending { child_id: child_id.clone() });
            let snapshot = snapshot.get_or_insert_with(Snapshot::take);
            child.family.signal_in(snapshot, Signal::SIGTERM, Scope::Everyone);
        }
    }

    /// KILL. Says whether anyone may be left.
    fn kill_all(&mut self) -> bool {
        // A machine that was asleep can wake up after the time for asking.
        self.ask_all();
        if self.children.values().all(Child::is_gone) {
            return false;
        }
        let snapshot = Snapshot::take();
        for child in self.children.values_mut().filter(|child| !child.is_gone()) {
            if let Some(group) = &child.family.record().cgroup {
                cgroup::kill(group);
            }
            child.family.signal_in(&snapshot, Signal::SIGKILL, Scope::Everyone);
        }
        let snapshot = Snapshot::take();
        for child in self.children.values_mut().filter(|child| !child.is_gone()) {
            child.look(&snapshot);
        }
        !self.children.values().all(Child::is_gone)
    }

    /// The node is gone.
    fn end_all(&mut self) {
        let started_ms = now_ms();
        self.children.values_mut().for_each(|child| child.asked = false);
        self.ask_all();
        loop {
            let snapshot = Snapshot::take();
            self.children.values_mut().for_each(|child| child.look(&snapshot));
            self.children.retain(|_, child| {
                if let (true, Some(group)) = (child.is_gone(), &child.family.record().cgroup) {
                    cgroup::remove(group);
                }
                !child.is_gone()
            });
            let for_ms = now_ms().saturating_sub(started_ms);
            if self.children.is_empty() || for_ms > GIVE_UP_MS {
                return;
            }
            if for_ms >= self.margins.gone_grace_ms {
                self.kill_all();
            }
            std::thread::sleep(Duration::from_millis(LOOK_AGAIN_MS / 2));
        }
    }
}

impl Child {
    fn look(&mut self, snapshot: &Snapshot) {
        let lives = self.family.lives_in(snapshot, Scope::Everyone)
            || self.family.record().cgroup.as_deref().is_some_and(cgroup::lives);
        self.empty_looks = if lives { 0 } else { self.empty_looks.saturating_add(1) };
    }

    /// Looking takes time, in which one who forks could slip past; not twice.
    fn is_gone(&self) -> bool {
        self.empty_looks >= 2
    }
}

/// Starts the thread that writes answers to the node. It alone waits for a node that does not read.
fn answering() -> Sender<FromKeeper> {
    let (sender, answers) = channel::<FromKeeper>();
    std::thread::spawn(move || {
        for answer in answers {
            let Ok(mut line) = serde_json::to_vec(&answer) else { continue };
            line.push(b'\n');
            let mut out = io::stdout().lock();
            if out.write_all(&line).and_then(|()| out.flush()).is_err() {
                return;
            }
        }
    });
    sender
}
