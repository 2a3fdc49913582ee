//! Files that nobody means well with, read again while a server runs: each is refused in plain words and at once, by the
//! server and by `belfry check`; nothing of what runs changes, and memory does not grow.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

/// Files are refused far sooner, also on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);
/// What a refusal may cost for good.
const GROWTH_MAX: u64 = 64 << 20;

/// Memory of a process, in bytes.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
}

/// Aliases of aliases: nine lines that would be a billion.
fn bomb() -> String {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..10 {
        let aliases = vec![format!("*a{}", n - 1); 10].join(", ");
        text.push_str(&format!("a{n}: &a{n} [{aliases}]\n"));
    }
    text + "agents: {a: {run: *a9}}\n"
}

fn schedule(keys: &str) -> String {
    format!("agents:\n  hello:\n    shell: 'true'\n    schedules:\n      quiet: {{{keys}}}\n")
}

/// What lies where a file should.
enum Kind {
    Text(Vec<u8>),
    Folder,
    Pipe,
    Circle,
    Long,
}

/// Puts something in the place of a file, in one go.
fn place(path: &Path, kind: &Kind) {
    let fresh = path.with_extension("fresh");
    match kind {
        Kind::Text(text) => std::fs::write(&fresh, text).unwrap(),
        Kind::Folder => std::fs::create_dir(&fresh).unwrap(),
        Kind::Pipe => nix::unistd::mkfifo(&fresh, nix::sys::stat::Mode::S_IRUSR).unwrap(),
        Kind::Circle => symlink(path, &fresh).unwrap(),
        // No byte of it is on the disk.
        Kind::Long => std::fs::File::create(&fresh).unwrap().set_len(1 << 30).unwrap(),
    }
    if fresh.is_dir() {
        let _ = std::fs::remove_file(path);
    }
    std::fs::rename(&fresh, path).unwrap();
}

#[test]
fn files_that_are_none() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("      often: {every: 200ms}\n", ""));
    let api = Api::start(&site);
    let pid = api.up.lock().unwrap().pid();
    let file = site.path("belfry.yaml");
    let schedules = || api.get("/api/v1/schedules?limit=1000").is(200);
    let (known, before) = (schedules(), memory(pid));
    let texts: [(&str, Vec<u8>); 10] = [
        ("anchors", bomb().into()),
        ("tabs", b"agents:\n\thello:\n\t\tshell: 'true'\n".to_vec()),
        ("a tag", b"agents:\n  hello:\n    shell: !!python/object:os.system date\n".to_vec()),
        ("no is no truth value", schedule("every: 5m, enabled: no").into()),
        ("on is no truth value", schedule("every: 5m, delete_after_run: on").into()),
        ("a number with underscores", schedule("every: 5m, max_pending: 1_000").into()),
        ("not UTF-8", b"agents: {a: {shell: '\xff\xfe'}}\n".to_vec()),
        ("deep", format!("agents: {}{}\n", "[".repeat(100_000), "]".repeat(100_000)).into()),
        ("NUL", b"agents: {a: {shell: 'x\0y'}}\n".to_vec()),
        ("two documents", b"agents: {}\n---\nagents: {}\n".to_vec()),
    ];
    let mut all: Vec<(&str, Kind)> = texts.into_iter().map(|(what, text)| (what, Kind::Text(text))).collect();
    all.extend([
        ("a folder", Kind::Folder),
        ("a pipe", Kind::Pipe),
        ("a circle", Kind::Circle),
        ("a gigabyte", Kind::Long),
    ]);
    for (what, kind) in all {
        if file.is_dir() {
            std::fs::remove_dir(&file).unwrap();
        }
        place(&file, &kind);
        let began = Instant::now();
        let problem = api.send("POST", "/api/v1/reload", &[], b"").refused(409, "config_rejected");
        assert!(problem["detail"].as_str().unwrap().contains("belfry.yaml"), "{what}: {problem}");
        let checked = site.belfry(&["check"]);
        let words = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(2), "{what}: {words}");
        assert!(words.contains("belfry.yaml") && !words.contains("panicked"), "{what}: {words}");
        assert!(words.len() < 20_000, "{what}: {} bytes of words", words.len());
        assert!(began.elapsed() < AT_ONCE, "{what} took {:?}", began.elapsed());
        assert_eq!(schedules(), known, "{what}: nothing has changed");
        api.get("/readyz").is(200);
    }
    // What was freed is given back every few seconds.
    eventually("the memory of before", || (memory(pid).saturating_sub(before) < GROWTH_MAX).then_some(()));
    if file.is_dir() {
        std::fs::remove_dir(&file).unwrap();
    }
    site.config(&CONFIG.replace("      often: {every: 200ms}\n", "      more: {cron: \"0 0 1 1 *\"}\n"));
    let healed = api.send("POST", "/api/v1/reload", &[], b"").is(200);
    assert!(healed["digest"].is_string(), "{healed}");
    let names: Value = schedules();
    let is_more = |item: &Value| item["schedule"] == "more";
    assert!(names["items"].as_array().unwrap().iter().any(is_more), "what is right again is taken");
}
