//! What a machine says of itself: read without a shell and within a bounded time. Where there is no `/proc` the numbers are
//! not known.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;

/// tmux answers sooner, or not at all.
const TMUX_WITHIN: Duration = Duration::from_secs(2);
/// More of its list is not read.
const TMUX_BYTES_MAX: u64 = 16 << 10;

/// Time of all processors since boot, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticks {
    busy: u64,
    total: u64,
}

/// What is known of a machine at an instant.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    pub ticks: Option<Ticks>,
    pub memory_total: Option<u64>,
    pub memory_used: Option<u64>,
    pub load: Option<[f64; 3]>,
    pub tmux: Option<Vec<String>>,
}

impl Machine {
    pub(crate) async fn read() -> Machine {
        // These are no files of a disk: reading them does not wait.
        let file = |path: &str| std::fs::read_to_string(path).ok();
        let memory = file("/proc/meminfo").and_then(|text| memory(&text));
        Machine {
            ticks: file("/proc/stat").and_then(|text| ticks(&text)),
            memory_total: memory.map(|(total, _)| total),
            memory_used: memory.map(|(_, used)| used),
            load: file("/proc/loadavg").and_then(|text| load(&text)),
            tmux: tmux("tmux").await,
        }
    }

    /// How busy its processors were since an earlier reading, in percent with one decimal.
    pub(crate) fn cpu_percent(&self, before: Option<Ticks>) -> Option<f64> {
        let (now, before) = (self.ticks?, before?);
        let total = now.total.checked_sub(before.total).filter(|total| *total > 0)?;
        let busy = now.busy.saturating_sub(before.busy).min(total);
        Some((busy as f64 * 1000.0 / total as f64).round() / 10.0)
    }
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
fn ticks(text: &str) -> Option<Ticks> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let all: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
    let (total, idle) = (all.iter().sum(), all.get(3)? + all.get(4).copied().unwrap_or(0));
    Some(Ticks { busy: u64::saturating_sub(total, idle), total })
}

/// All of it, and what is used and could not be given to others, in bytes.
fn memory(text: &str) -> Option<(u64, u64)> {
    let kibibytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let (total, available) = (kibibytes("MemTotal")?, kibibytes("MemAvailable")?);
    Some((total * 1024, total.saturating_sub(available) * 1024))
}

fn load(text: &str) -> Option<[f64; 3]> {
    let mut words = text.split_whitespace().map_while(|word| word.parse().ok());
    Some([words.next()?, words.next()?, words.next()?])
}

/// The names of tmux's sessions; none where there is no tmux, or it does not answer.
async fn tmux(program: &str) -> Option<Vec<String>> {
    let mut command = Command::new(program);
    command.args(["ls", "-F", "#{session_name}"]).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let listing = async {
        let mut child = command.spawn().ok()?;
        let mut bytes = Vec::new();
        child.stdout.take()?.take(TMUX_BYTES_MAX).read_to_end(&mut bytes).await.ok()?;
        // Without a server of its own it fails: then there are no sessions.
        child.wait().await.ok()?;
        Some(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect())
    };
    tokio::time::timeout(TMUX_WITHIN, listing).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn with(ticks: Option<Ticks>) -> Machine {
        Machine { ticks, memory_total: None, memory_used: None, load: None, tmux: None }
    }

    #[test]
    fn the_share_of_busy_time_is_taken_between_two_readings() {
        let first = ticks("cpu  100 0 50 800 50 0 0 0 9 9\ncpu0 1 2 3\n").unwrap();
        let second = ticks("cpu  160 0 65 900 75 0 0 0 9 9\n").unwrap();
        assert_eq!((first, second), (Ticks { busy: 150, total: 1000 }, Ticks { busy: 225, total: 1200 }));
        assert_eq!(with(Some(second)).cpu_percent(Some(first)), Some(37.5));
        assert_eq!(with(Some(second)).cpu_percent(None), None, "the first one has nothing before it");
        assert_eq!(with(Some(second)).cpu_percent(Some(second)), None, "no time has passed");
        assert_eq!(with(Some(first)).cpu_percent(Some(second)), None, "nor does it go back");
    }

    #[test]
    fn what_is_not_written_as_it_should_be_is_not_known() {
        for text in ["", "cpu", "cpu  1 2", "cpu  a b c d", "intr 5"] {
            assert_eq!(ticks(text), None, "{text}");
        }
        for text in ["", "MemTotal: 5 kB", "MemTotal: x kB\nMemAvailable: 1 kB"] {
            assert_eq!(memory(text), None, "{text}");
        }
        assert_eq!(
            memory("MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:  40 kB\n"),
            Some((102_400, 61_440))
        );
        assert_eq!(load("0.50 1.25 12.00 3/1100 77\n"), Some([0.5, 1.25, 12.0]));
        assert_eq!(load("0.50 high 1"), None);
    }

    #[tokio::test]
    async fn a_tmux_that_is_not_there_or_hangs_is_none() {
        assert_eq!(tmux("/nowhere/tmux").await, None);
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            use std::os::unix::fs::PermissionsExt;
            let path = folder.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path.display().to_string()
        };
        let two = script("two", "[ \"$1 $2 $3\" = 'ls -F #{session_name}' ] && printf 'work\\nat home\\n'");
        assert_eq!(tmux(&two).await.unwrap(), ["work", "at home"]);
        assert!(tmux(&script("none", "exit 1")).await.unwrap().is_empty(), "no server, no sessions");
        let began = std::time::Instant::now();
        assert_eq!(tmux(&script("hangs", "exec sleep 1000")).await, None);
        assert!(began.elapsed() < 5 * TMUX_WITHIN);
    }
}
