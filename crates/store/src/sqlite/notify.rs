//! Hints: from this process at once, from others that write to the same file within a second.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::timeout;

use super::Sqlite;

/// So often the file is asked whether others have written, while somebody waits.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Sqlite {
    pub(super) async fn hinted(&self) {
        while timeout(LOOK_EVERY, self.shared.hint.given()).await.is_err() {
            // The writer's connection counts what others have committed, and not what it has itself.
            let version =
                self.write(|verb| verb.row("pragma data_version", [], |row| row.get::<_, i64>(0))).await;
            let Ok(Some(version)) = version else { return };
            if self.shared.seen_version.swap(version, Ordering::SeqCst) != version {
                return;
            }
        }
    }
}
