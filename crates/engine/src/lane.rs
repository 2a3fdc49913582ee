//! Commands on lanes, and what they do.

use belfry_core::RunId;
use belfry_store::{AnyStore, LaneRecord, LaneSettings, Store};
use belfry_time::Timestamp;

use crate::driver::Options;
use crate::engine::Engine;
use crate::error::Error;
use crate::event::{Event, Level, Name};

impl Engine {
    /// All lanes, with what they do.
    pub async fn lanes(&self) -> Result<Vec<LaneRecord>, Error> {
        lanes(self.store(), self.options(), self.store_now().await?).await
    }

    /// Makes a lane, or makes it hold something else than the files say, on all nodes; `None` undoes that.
    pub async fn set_lane(&self, lane: &str, settings: Option<LaneSettings>) -> Result<(), Error> {
        self.store().set_lane(self.store_now().await?, lane, settings).await?;
        self.hint().await;
        Ok(())
    }

    /// Ends all that waits in a lane; gives the runs.
    pub async fn clear_lane(&self, lane: &str) -> Result<Vec<RunId>, Error> {
        let now = self.store_now().await?;
        let ended = self.store().clear_lane(now, lane).await?;
        self.tell_ends(&ended).await;
        let event = Event::new(now, Level::Info, Name::LaneChanged);
        let detail = format!("the lane {lane} was cleared");
        self.tell(Event { count: Some(ended.len() as u64), detail: Some(detail), ..event });
        self.hint().await;
        Ok(ended)
    }

    /// Makes the lanes of the files what they are here; others of the files are gone.
    pub async fn put_lanes(&self, lanes: &[(String, LaneSettings)]) -> Result<(), Error> {
        self.store().put_lanes(self.store_now().await?, lanes).await?;
        self.hint().await;
        Ok(())
    }
}

/// All lanes, with what they do: those of the store, and those that are there without anybody's word.
async fn lanes(store: &AnyStore, options: &Options, now: Timestamp) -> Result<Vec<LaneRecord>, Error> {
    let mut lanes = store.lanes(now).await?;
    for (name, slots) in &options.lanes {
        let file = Some(LaneSettings { slots: *slots, limit: None, queue_limit: None });
        match lanes.iter_mut().find(|lane| lane.name == *name) {
            Some(lane) => lane.file = lane.file.or(file),
            None => lanes.push(LaneRecord {
                name: name.clone(),
                file,
                set: None,
                active: 0,
                pending: 0,
                oldest_pending: None,
                queued: None,
            }),
        }
    }
    lanes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(lanes)
}

/// Whether a text may be the name of a lane.
pub fn is_lane_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 64 && name.chars().all(fits)
}
