//! What tests can see and hold of verbs from outside: points inside them at which they can be held, so that another verb comes
//! in between, and how the database goes about their statements. Nothing is ever held or asked unless a test says so.

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A point inside a verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// Its first statement was answered: it may hold locks, and has not seen all it will look at.
    Begun,
    /// All is done but the commit: it holds every lock it takes.
    Ready,
}

/// The pauses of one store.
#[derive(Debug, Default)]
pub struct Pauses(Mutex<Option<Armed>>);

#[derive(Debug)]
struct Armed {
    point: Point,
    reached: oneshot::Sender<()>,
    go: oneshot::Receiver<()>,
}

/// A verb that is held, or will be.
#[derive(Debug)]
pub struct Hold {
    /// Told when the verb is there.
    pub reached: oneshot::Receiver<()>,
    /// Lets it go on; so does dropping it.
    pub go: oneshot::Sender<()>,
}

impl Pauses {
    /// Holds the next verb that comes to a point.
    #[cfg(feature = "testing")]
    pub fn hold(&self, point: Point) -> Hold {
        let ((reached, told), (go, wait)) = (oneshot::channel(), oneshot::channel());
        *self.0.lock() = Some(Armed { point, reached, go: wait });
        Hold { reached: told, go }
    }

    /// Whether somebody will be held; never without the feature.
    pub(crate) fn is_armed(&self) -> bool {
        cfg!(feature = "testing") && self.0.lock().is_some()
    }

    /// Waits here, if it is this verb's turn to.
    pub(crate) async fn at(&self, point: Point) {
        if !cfg!(feature = "testing") {
            return;
        }
        let armed = self.0.lock().take_if(|armed| armed.point == point);
        if let Some(armed) = armed {
            // A test that has given up holds nobody.
            let _ = armed.reached.send(());
            let _ = armed.go.await;
        }
    }
}

/// How the database would go about each statement, in its own words.
#[derive(Debug, Default)]
pub struct Explained(Mutex<Option<Vec<(&'static str, String)>>>);

impl Explained {
    /// Asks from now on, and gives what was heard so far: each statement and its plan.
    #[cfg(feature = "testing")]
    pub fn take(&self) -> Vec<(&'static str, String)> {
        self.0.lock().replace(Vec::new()).unwrap_or_default()
    }

    /// Whether somebody wants to know; never without the feature.
    pub(crate) fn is_wanted(&self) -> bool {
        cfg!(feature = "testing") && self.0.lock().is_some()
    }

    pub(crate) fn keep(&self, sql: &'static str, plan: String) {
        if let Some(plans) = &mut *self.0.lock() {
            plans.push((sql, plan));
        }
    }
}
