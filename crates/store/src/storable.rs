//! What goes into a store, as every store can keep it. Each verb that takes text cleans it here first, so that all stores
//! keep the same.

use std::borrow::Cow;

use belfry_core::text::{ERROR_CHARS, SUMMARY_CHARS, bounded, clean, clean_value, is_clean};

use crate::error::Error;
use crate::hook::Knock;
use crate::sessions::NewMessage;
use crate::shapes::{AgentSpec, Commit, Enqueue, Finish, Key, NewRun};

/// Maximum length of a name of an agent or schedule, in bytes; an index of PostgreSQL holds no longer key.
const NAME_BYTES: usize = 1_000;

/// Something that holds text.
pub(crate) trait Storable: Clone {
    /// Whether every store can keep it as it is.
    fn is_storable(&self) -> bool;
    /// Makes it so.
    fn make_storable(&mut self);
}

/// What is kept of parts of a batch.
pub(crate) fn all_storable<T: Storable>(parts: &[T]) -> Cow<'_, [T]> {
    if parts.iter().all(T::is_storable) {
        return Cow::Borrowed(parts);
    }
    let mut parts = parts.to_vec();
    parts.iter_mut().for_each(T::make_storable);
    Cow::Owned(parts)
}

/// What is kept of one thing.
pub(crate) fn storable<T: Storable>(part: &T) -> Cow<'_, T> {
    let mut part = Cow::Borrowed(part);
    if !part.is_storable() {
        part.to_mut().make_storable();
    }
    part
}

/// Refuses names that a store cannot keep.
pub(crate) fn check_names(agents: &[AgentSpec]) -> Result<(), Error> {
    for agent in agents {
        check_name("agent", &agent.name)?;
        for (schedule, _) in &agent.schedules {
            check_name(&format!("agent {}: schedule", agent.name), schedule)?;
        }
    }
    Ok(())
}

/// Refuses a name that a store cannot keep.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), Error> {
    let why = match name {
        _ if name.contains('\0') => "a name must not hold a NUL character",
        _ if name.len() > NAME_BYTES => "a name may have 1000 bytes at most",
        _ => return Ok(()),
    };
    let shown = bounded(name, 100);
    Err(Error::Refused {
        detail: format!("{what} {shown:?}: {why}. Choose another name; nothing was changed"),
    })
}

fn is_text(text: &str) -> bool {
    !text.contains('\0')
}

fn clean_text(text: &mut String) {
    if let Cow::Owned(clean) = clean(text) {
        *text = clean;
    }
}

fn is_bounded(text: Option<&String>, chars: usize) -> bool {
    text.is_none_or(|text| matches!(bounded(text, chars), Cow::Borrowed(_)))
}

fn bound(text: &mut Option<String>, chars: usize) {
    if let Some(text) = text
        && let Cow::Owned(kept) = bounded(text, chars)
    {
        *text = kept;
    }
}

impl Storable for Finish {
    fn is_storable(&self) -> bool {
        is_bounded(self.error.as_ref(), ERROR_CHARS) && is_bounded(self.summary.as_ref(), SUMMARY_CHARS)
    }

    fn make_storable(&mut self) {
        bound(&mut self.error, ERROR_CHARS);
        bound(&mut self.summary, SUMMARY_CHARS);
    }
}

impl Storable for NewRun {
    fn is_storable(&self) -> bool {
        let texts = [&self.command, &self.lane].into_iter().chain(&self.needs).chain(&self.prompt);
        texts.into_iter().all(|text| is_text(text)) && is_clean(&self.payload)
    }

    fn make_storable(&mut self) {
        let texts = [&mut self.command, &mut self.lane].into_iter();
        texts.chain(&mut self.needs).chain(&mut self.prompt).for_each(clean_text);
        clean_value(&mut self.payload);
    }
}

impl Storable for Commit {
    fn is_storable(&self) -> bool {
        is_text(&self.command)
            && is_bounded(self.invalid.as_ref(), ERROR_CHARS)
            && self.runs.iter().all(NewRun::is_storable)
    }

    fn make_storable(&mut self) {
        clean_text(&mut self.command);
        bound(&mut self.invalid, ERROR_CHARS);
        self.runs.iter_mut().for_each(NewRun::make_storable);
    }
}

impl Storable for Key {
    fn is_storable(&self) -> bool {
        is_text(&self.key)
    }

    fn make_storable(&mut self) {
        clean_text(&mut self.key);
    }
}

impl Storable for Enqueue {
    fn is_storable(&self) -> bool {
        self.run.is_storable() && self.key.as_ref().is_none_or(Key::is_storable)
    }

    fn make_storable(&mut self) {
        self.run.make_storable();
        self.key.iter_mut().for_each(Key::make_storable);
    }
}

impl Storable for Knock {
    fn is_storable(&self) -> bool {
        self.run.is_storable() && self.signed.iter().chain(&self.keys).all(Key::is_storable)
    }

    fn make_storable(&mut self) {
        self.run.make_storable();
        self.signed.iter_mut().chain(&mut self.keys).for_each(Key::make_storable);
    }
}

impl Storable for NewMessage {
    fn is_storable(&self) -> bool {
        is_text(&self.text)
            && is_text(&self.session)
            && self.run.is_storable()
            && self.key.as_ref().is_none_or(Key::is_storable)
    }

    fn make_storable(&mut self) {
        clean_text(&mut self.text);
        clean_text(&mut self.session);
        self.run.make_storable();
        self.key.iter_mut().for_each(Key::make_storable);
    }
}
