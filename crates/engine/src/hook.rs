//! Webhooks: a request from outside makes a run as a tick does, within the rules of its schedule.

use belfry_core::Trigger;
use belfry_store::{Given, Hooks, Key, Knock, Knocked, NewRun, Store};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::engine::Engine;
use crate::error::Error;
use crate::event::Event;
use crate::requests::prepare;
use crate::runs::Requested;
use crate::session::Made;

/// A request from outside. Whether its sender may make it, the caller has judged.
#[derive(Debug, Clone, Default)]
pub struct Webhook {
    /// What it brings.
    pub payload: Map<String, Value>,
    /// A hash of what was signed: that makes one run, whatever keys the request carries. None where nothing is signed.
    pub signed: Option<String>,
    /// Keys that its sender chose, each with a hash of what it was used with. A repeat of any answers with the first run.
    pub keys: Vec<(String, Vec<u8>)>,
    /// Its trace, where the sender has one.
    pub trace_id: Option<Uuid>,
}

impl Engine {
    /// Makes a run of a webhook schedule if its rules allow one now. With `if_running: cancel` what lives in its overlap scope
    /// is cancelled with it.
    pub async fn webhook(&self, name: &str, webhook: Webhook) -> Result<Requested, Error> {
        self.refuse_while_draining()?;
        let now = self.store_now().await?;
        let (run, schedule) = prepare(&**self.store(), self.options(), now, name).await?;
        let Webhook { payload, signed, keys, trace_id } = webhook;
        let run = run.as_webhook().given(Given { prompt: None, payload, trace_id });
        let knock = Knock {
            run,
            signed: signed.map(|signed| Key::new(format!("signed {signed}"), Vec::new(), now)),
            keys: keys.into_iter().map(|(key, hash)| Key::new(key, hash, now)).collect(),
            options: schedule.options().clone(),
        };
        let run = knock.run.id;
        let made = match self.store().knock(now, &knock).await? {
            Knocked::Made { cancelled } => {
                self.tell_ends(&cancelled).await;
                self.tell_created(name, Made::by(Trigger::Webhook, run, trace_id));
                self.tell_probe(name, &knock.run).await;
                Requested { run, is_new: true }
            }
            Knocked::Repeat(run) => Requested { run, is_new: false },
            Knocked::KeyReused(run) => return Err(Error::KeyReused { name: name.to_owned(), run }),
            Knocked::Refused(reason) => return Err(Error::Skipped { name: name.to_owned(), reason }),
            Knocked::NotFound => return Err(Error::NotFound { name: name.to_owned() }),
        };
        self.hint().await;
        Ok(made)
    }

    /// Tells of a breaker that has become half-open, if the run is its probe.
    async fn tell_probe(&self, name: &str, run: &NewRun) {
        // Where the store does not answer now, the end of the probe is told all the same.
        let Ok(record) = self.store().breaker(run.agent, &run.command).await else { return };
        let agent = name.split('/').next().unwrap_or_default();
        for change in record.history.iter().filter(|change| change.run == Some(run.id)) {
            let trace_id = Some(run.id.trace(run.trace_id).simple().to_string());
            let event = Event::breaker(agent, &run.command, change);
            self.tell(Event { trace_id, ..event });
        }
    }
}
