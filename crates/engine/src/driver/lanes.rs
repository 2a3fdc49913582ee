//! How many slots this node has.

use belfry_core::gate::MAIN_LANE;

use super::*;

/// After a hint, the settings of lanes are read this much later: hints come by the thousand.
const LANES_SOON: Duration = Duration::from_millis(500);
/// How often rows are looked for of which a part cannot be read.
const ROWS_EVERY: Duration = Duration::from_secs(600);

/// `limit` and `queue_limit` by lane.
pub(super) type Limits = BTreeMap<String, (Option<u32>, Option<u32>)>;

impl Driver {
    pub(super) fn lanes_maybe(&mut self, now: Now) {
        if self.lanes.is_due(now) {
            self.lanes.busy = true;
            self.ask(Ask::Lanes(self.node));
            if self.unreadable_rows.1 <= now.mono {
                self.unreadable_rows.1 = now.mono + ROWS_EVERY;
                self.ask(Ask::UnreadableRows);
            }
        }
    }

    /// There may be other lanes: hints come by the thousand, so it looks a little later.
    pub(super) fn lanes_soon(&mut self, now: Now) {
        self.lanes.again |= self.lanes.busy;
        self.lanes.at = self.lanes.at.min(now.mono + LANES_SOON);
    }

    /// Runs of this node that an edit has moved to other lanes take slots there.
    pub(super) fn moved(&mut self, own: Vec<(RunId, String)>) {
        for (run, lane) in own {
            if let Some(task) = self.tasks.get_mut(&run).filter(|task| task.lane != lane) {
                task.lane = lane;
                self.claim_wanted = true;
            }
        }
    }

    pub(super) fn lanes(&mut self, now: Now, lanes: Result<Vec<LaneRecord>, Error>) {
        self.lanes.rest(now, now.mono + self.options.lanes_every);
        let Some(lanes) = self.read(now, Call::Lanes, lanes) else {
            self.lanes.at = now.mono + self.backoff(Call::Lanes);
            return;
        };
        let mut slots = self.options.lanes.clone();
        slots.extend(lanes.iter().filter_map(|lane| Some((lane.name.clone(), lane.file?.slots))));
        slots.extend(self.options.own_lanes.clone());
        slots.extend(lanes.iter().filter_map(|lane| Some((lane.name.clone(), lane.set?.slots))));
        let left: Vec<(String, u32)> = self
            .slots
            .iter()
            .filter(|(lane, _)| !slots.contains_key(*lane) && !self.stray_lanes.contains(*lane))
            .map(|(l, n)| (l.clone(), *n))
            .collect();
        self.removed_lanes.retain(|lane| !slots.contains_key(lane));
        self.stray_lanes.retain(|lane| !slots.contains_key(lane));
        for (lane, count) in left {
            if self.removed_lanes.insert(lane.clone()) {
                let event = Event::new(now.wall, Level::Info, Name::LaneChanged);
                let detail = format!("the lane {lane} was removed; runs that wait there still start");
                self.note(Event { node: Some(self.node), detail: Some(detail), ..event });
            }
            slots.insert(lane, count);
        }
        // Runs that an edit has left in a lane that nobody made start as those of `main` do.
        let unmade = lanes.iter().filter(|lane| lane.settings().is_none()).map(|lane| &lane.name);
        self.stray_lanes.extend(unmade.filter(|lane| !slots.contains_key(*lane)).cloned());
        let main = slots.get(MAIN_LANE).copied().unwrap_or(1);
        slots.extend(self.stray_lanes.iter().map(|lane| (lane.clone(), main)));
        let limits: Limits = lanes
            .iter()
            .filter_map(|lane| Some((lane.name.clone(), lane.settings()?)))
            .map(|(name, settings)| (name, (settings.limit, settings.queue_limit)))
            .collect();
        // At first they are what they were when the node started.
        let before = self.limits.replace(limits.clone()).unwrap_or_else(|| limits.clone());
        if slots == self.slots && limits == before {
            return;
        }
        let none = (None, None);
        for (lane, count) in &slots {
            let limit = limits.get(lane).unwrap_or(&none);
            if self.slots.get(lane) != Some(count) || before.get(lane).unwrap_or(&none) != limit {
                let event = Event::new(now.wall, Level::Info, Name::LaneChanged);
                let word = |limit: Option<u32>| limit.map_or("none".to_owned(), |limit| limit.to_string());
                let detail = format!(
                    "the lane {lane} has {} on this node, limit {}, queue_limit {}",
                    belfry_core::text::count(*count as usize, "slot"),
                    word(limit.0),
                    word(limit.1)
                );
                self.note(Event { node: Some(self.node), detail: Some(detail), ..event });
            }
        }
        self.slots = slots;
        self.claim_wanted = true;
    }

    /// Tells once of each schedule that this version cannot read.
    pub(super) fn unreadable(&mut self, now: Now, found: Result<Vec<UnreadableSchedule>, Error>) {
        let Some(found) = self.read(now, Call::Unreadable, found) else { return };
        self.unreadable.retain(|known| found.iter().any(|found| found.schedule == *known));
        for UnreadableSchedule { schedule, name, why } in found {
            if self.unreadable.insert(schedule) {
                let event = Event::new(now.wall, Level::Warn, Name::ScheduleUnreadable).of(&name);
                self.note(Event { node: Some(self.node), detail: Some(why.to_string()), ..event });
            }
        }
    }

    /// Tells once of each row of which a part cannot be read.
    pub(super) fn unreadable_rows(&mut self, now: Now, found: Result<Vec<String>, Error>) {
        let Some(found) = self.read(now, Call::Lease, found) else { return };
        self.unreadable_rows.0.retain(|known| found.contains(known));
        for row in found {
            if self.unreadable_rows.0.insert(row.clone()) {
                let event = Event::new(now.wall, Level::Warn, Name::RowUnreadable);
                self.note(Event { node: Some(self.node), detail: Some(row), ..event });
            }
        }
    }

    /// Runs of a lane that nobody made go to `main`, and stay there.
    pub(super) fn to_known_lane(&self, run: &mut belfry_store::NewRun) {
        let is_gone = self.removed_lanes.contains(&run.lane) || self.stray_lanes.contains(&run.lane);
        if is_gone || !self.slots.contains_key(&run.lane) {
            run.move_to_main();
        }
    }
}
