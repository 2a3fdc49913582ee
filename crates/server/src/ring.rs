//! What happened lately, here and on other nodes, for those who listen. A bounded number of events is remembered, each with a number of its own; who
//! comes back with the number of the last one it saw goes on behind it, or is told of a gap.

use std::collections::VecDeque;
use std::sync::Arc;

use belfry::{Event, RunId};
use belfry_core::NodeId;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::watch;
use uuid::Uuid;

use crate::reduced::reduced;
use crate::stream::frame;

/// Events that are remembered: some seconds of a busy node, hours of a quiet one.
const REMEMBERED: usize = 8192;

/// An event as it is sent.
pub struct Told {
    pub number: u64,
    pub about: About,
    /// Written once for all who listen.
    pub frame: String,
}

/// What an event is about, for those who choose.
#[derive(Debug, Deserialize)]
pub struct About {
    pub event: String,
    #[serde(default)]
    pub agent: Option<String>,
    #[serde(default)]
    pub schedule: Option<String>,
    #[serde(default)]
    pub run_id: Option<RunId>,
}

impl About {
    fn of(event: &Event) -> About {
        About {
            event: event.event.as_str().to_owned(),
            agent: event.agent.clone(),
            schedule: event.schedule.clone(),
            run_id: event.run_id,
        }
    }
}

/// What happened lately.
pub struct Ring {
    /// Tells numbers of this process from those of others.
    life: String,
    inner: Mutex<Inner>,
    last: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    events: VecDeque<Arc<Told>>,
    last: u64,
    /// Numbers up to this one may be missing from the middle.
    lost: u64,
}

/// What is behind a number, as it is at one moment.
pub struct Behind {
    pub events: Vec<Arc<Told>>,
    /// Where something between is no longer known: all behind this number is.
    pub gap: Option<u64>,
}

impl Behind {
    /// Where to go on, for who has come to `number` and takes these.
    pub fn end(&self, number: u64) -> u64 {
        self.events.last().map_or(self.gap.unwrap_or(number), |told| told.number)
    }
}

impl Ring {
    pub fn new() -> Ring {
        let life = crate::page::hex(&Uuid::new_v4().as_bytes()[..6]);
        Ring { life, inner: Mutex::default(), last: watch::Sender::new(0) }
    }

    /// An event of this node.
    pub fn put(&self, event: &Event, node: NodeId) {
        self.add(About::of(event), &event.to_json(node));
    }

    /// An event of another node, as JSON. What cannot be read is of a version that we know nothing of.
    pub fn put_line(&self, json: String) {
        let is_plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let Ok(about) = serde_json::from_str::<About>(&json) else { return };
        if is_plain(&about.event) && !json.contains(['\r', '\n']) {
            self.add(about, &json);
        }
    }

    /// Remembers an event. Whoever listens, it is the one that scope read may see.
    fn add(&self, about: About, json: &str) {
        let reduced = reduced(json);
        let json = reduced.as_deref().unwrap_or(json);
        let mut inner = self.inner.lock();
        inner.last += 1;
        let number = inner.last;
        if inner.events.len() == REMEMBERED {
            inner.events.pop_front();
        }
        let frame = frame(Some(&self.id(number)), &about.event, json);
        inner.events.push_back(Arc::new(Told { number, about, frame }));
        drop(inner);
        self.last.send_replace(number);
    }

    /// Some events were never heard of.
    pub fn lost(&self, count: u64) {
        let mut inner = self.inner.lock();
        inner.last += count;
        inner.lost = inner.last;
        inner.events.clear();
        let last = inner.last;
        drop(inner);
        // Whoever waits is told that something is missing.
        self.last.send_replace(last);
    }

    /// The number of the last event.
    pub fn last(&self) -> u64 {
        self.inner.lock().last
    }

    /// Tells when there is more.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// At most so many events behind a number.
    pub fn behind(&self, number: u64, most: usize) -> Behind {
        let inner = self.inner.lock();
        let first = inner.events.front().map_or(inner.last + 1, |told| told.number);
        let gap = (number + 1 < first || number < inner.lost).then_some(first - 1);
        let skip = usize::try_from((number + 1).saturating_sub(first)).unwrap_or(usize::MAX);
        Behind { events: inner.events.iter().skip(skip).take(most).cloned().collect(), gap }
    }

    /// An event's id for a reader.
    pub fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.life)
    }

    /// The number in an id; none where it is of another process, or nothing of ours.
    pub fn number(&self, id: &str) -> Option<u64> {
        let (life, number) = id.split_once('-')?;
        let number = number.parse().ok()?;
        (life == self.life && number <= self.last()).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use belfry::Timestamp;
    use belfry::event::{Level, Name};

    use super::*;

    fn ring(count: u64) -> Ring {
        let ring = Ring::new();
        (0..count).for_each(|_| put(&ring));
        ring
    }

    fn put(ring: &Ring) {
        let event = Event::new(Timestamp::UNIX_EPOCH, Level::Info, Name::RunStarted);
        ring.put(&event, NodeId(Uuid::from_u128(7)));
    }

    fn numbers(behind: &Behind) -> Vec<u64> {
        behind.events.iter().map(|told| told.number).collect()
    }

    #[test]
    fn who_comes_back_goes_on_behind_what_it_saw() {
        let ring = ring(5);
        let behind = ring.behind(3, 10);
        assert_eq!((numbers(&behind), behind.gap, behind.end(3)), (vec![4, 5], None, 5));
        assert_eq!(ring.behind(5, 10).end(5), 5);
        assert_eq!(numbers(&ring.behind(5, 10)), [0; 0]);
        assert_eq!(numbers(&ring.behind(0, 2)), [1, 2]);
        assert_eq!(ring.number(&ring.id(3)), Some(3));
    }

    #[test]
    fn what_is_no_longer_known_is_a_gap() {
        let ring = ring(REMEMBERED as u64 + 5);
        assert_eq!(ring.behind(4, 10).gap, Some(5));
        let behind = ring.behind(5, 10);
        assert_eq!((behind.gap, numbers(&behind)[0]), (None, 6));
        ring.lost(7);
        assert!(ring.behind(REMEMBERED as u64 + 5, 10).gap.is_some(), "what was never heard of, too");
        assert_eq!(ring.behind(ring.last(), 10).gap, None);
    }

    #[test]
    fn what_happens_while_a_reader_is_told_of_a_gap_is_not_lost() {
        let ring = ring(3);
        ring.lost(2);
        let behind = ring.behind(3, 10);
        assert_eq!((numbers(&behind), behind.gap), (vec![], Some(5)));
        put(&ring);
        let next = ring.behind(behind.end(3), 10);
        assert_eq!((numbers(&next), next.gap), (vec![6], None));
    }

    #[test]
    fn what_others_tell_is_passed_on_as_it_is() {
        let ring = ring(1);
        let line = r#"{"event":"run_finished","agent":"a","node":"b","more":1}"#;
        ring.put_line(line.to_owned());
        for odd in ["", "{}", "[]", r#"{"event":"a\nb"}"#, "{\"event\":\"a\",\n\"agent\":\"b\"}"] {
            ring.put_line(odd.to_owned());
        }
        let behind = ring.behind(0, 10);
        assert_eq!(numbers(&behind), [1, 2]);
        assert!(behind.events[0].frame.contains(r#""node":"00000000-"#), "{}", behind.events[0].frame);
        assert!(behind.events[1].frame.ends_with(&format!("event: run_finished\ndata: {line}\n\n")));
        assert_eq!(behind.events[1].about.agent.as_deref(), Some("a"));
    }

    #[test]
    fn an_id_of_another_life_means_nothing() {
        let (one, other) = (ring(5), ring(5));
        for id in [
            other.id(3),
            one.id(6),
            "garbage".into(),
            String::new(),
            "-3".into(),
            "zz-99999999999999999999".into(),
        ] {
            assert_eq!(one.number(&id), None, "{id}");
        }
    }
}
