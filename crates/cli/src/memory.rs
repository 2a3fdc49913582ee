//! Gives memory back to the system that the process no longer uses.
//!
//! After a burst, such as a flood of requests, the C library keeps the pages that were freed between others still in use.
//! Only `up` does this: it is the process that lives long.

use std::time::Duration;

/// How often the size of the process is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Memory is given back when the process has grown by so much since the last time.
const GROWN_MIN_BYTES: u64 = 4 << 20;
/// After so many more looks it is given back once more: what was in use at the height of a burst is free by then.
const AGAIN_AFTER: u32 = 6;

/// Gives memory back whenever the process has grown.
pub async fn give_back_loop() {
    let mut size = Size::default();
    let mut look = tokio::time::interval(LOOK_EVERY);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        if size.is_to_shrink(resident())
            // It walks over everything that was freed, a millisecond or two for 50 MB.
            && tokio::task::spawn_blocking(give_back).await.is_ok()
        {
            size.is_now(resident());
        }
    }
}

/// The size of the process when memory was last given back, or when it was smaller since.
#[derive(Default)]
struct Size {
    bytes: Option<u64>,
    /// Looks until memory is given back once more; zero if it is not.
    again_after: u32,
}

impl Size {
    fn is_to_shrink(&mut self, bytes: Option<u64>) -> bool {
        let Some(bytes) = bytes else { return false };
        let smallest = self.bytes.map_or(bytes, |smallest| smallest.min(bytes));
        self.bytes = Some(smallest);
        if bytes - smallest >= GROWN_MIN_BYTES {
            self.again_after = AGAIN_AFTER;
            return true;
        }
        let is_last = self.again_after == 1;
        self.again_after = self.again_after.saturating_sub(1);
        is_last
    }

    fn is_now(&mut self, bytes: Option<u64>) {
        self.bytes = bytes;
    }
}

/// What the process has in memory, in bytes. None where the system does not say.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"))?;
    Some(kib.trim().parse::<u64>().ok()? << 10)
}

/// Gives back the pages that hold nothing. Other C libraries do so by themselves.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "glibc has no other way, and the standard library none at all")]
fn give_back() {
    // SAFETY: it may be called by any thread at any time, and changes nothing that is in use.
    unsafe { nix::libc::malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_back() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_twice_for_each_growth() {
        let mib = |mib: u64| Some(mib << 20);
        let mut size = Size::default();
        assert!(!size.is_to_shrink(mib(30)));
        assert!(!size.is_to_shrink(mib(33)));
        assert!(size.is_to_shrink(mib(34)));
        // What is still in use is no reason to try again.
        size.is_now(mib(34));
        assert!(!size.is_to_shrink(mib(37)));
        // It was freed by other means: growth counts from there.
        assert!(!size.is_to_shrink(mib(20)));
        assert!(size.is_to_shrink(mib(24)));
        size.is_now(mib(24));
        let again: Vec<bool> = (0..8).map(|_| size.is_to_shrink(mib(24))).collect();
        assert_eq!(again, [false, false, false, false, false, true, false, false]);
        // A system that does not say.
        assert!(!size.is_to_shrink(None));
        assert!(resident().is_none_or(|bytes| bytes > 1 << 20));
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn pages_between_others_in_use_are_given_back() {
        // Blocks that the C library does not map one by one, every other one freed.
        let mut blocks: Vec<Vec<u8>> = (0..4096).map(|_| vec![1; 16 << 10]).collect();
        let mut is_kept = false;
        blocks.retain(|_| {
            is_kept = !is_kept;
            is_kept
        });
        let before = resident().unwrap();
        give_back();
        let after = resident().unwrap();
        assert!(after + (16 << 20) < before, "{before} bytes before, {after} after");
        assert!(blocks.iter().all(|block| block.iter().all(|byte| *byte == 1)));
    }
}
