//! The parts of `cargo xtask test --full` beyond `cargo xtask test`: the same tests for longer, and those that need a tool
//! which does not come with Rust.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{cargo, succeeds};

/// One more part.
pub struct Part {
    /// As it is printed.
    pub name: &'static str,
    run: fn(&dyn Fn(Command) -> Command) -> Ended,
}

/// How a part ended.
pub enum Ended {
    Passed,
    Failed,
    /// It was not run; with the way out.
    ToolMissing(&'static str),
}

/// In order: the longest last.
pub const PARTS: [Part; 10] = [
    Part {
        name: "more simulated lives",
        run: |prepare| {
            tests(prepare, &[("BELFRY_FROM", "501"), ("BELFRY_SEEDS", "2000")], "-p belfry-sim --test seeds")
        },
    },
    Part {
        name: "what is broken on purpose",
        run: |prepare| tests(prepare, &[], "-p belfry-sim --test broken -- --ignored"),
    },
    Part { name: "a program of its own", run: |_| ended(own_program().unwrap_or(false)) },
    Part { name: "wall clock set", run: clock },
    Part { name: "full disks", run: full_disks },
    Part { name: "random requests", run: schemathesis },
    Part { name: "torture", run: torture },
    Part { name: "200 killed servers", run: |prepare| tests(prepare, &[("BELFRY_KILLS", "200")], CRASH) },
    Part {
        name: "a crowd of sessions",
        run: |prepare| {
            let numbers = [("BELFRY_SESSIONS", "200"), ("BELFRY_MESSAGES", "50"), ("BELFRY_KILLS", "10")];
            tests(prepare, &numbers, "-p belfry-cli --test talk a_crowd")
        },
    },
    Part {
        name: "stores for longer",
        run: |prepare| {
            let numbers = [("BELFRY_ROUNDS", "20"), ("BELFRY_MANY_SECONDS", "60"), ("BELFRY_KILLS", "100")];
            tests(prepare, &[&numbers[..], &[("BELFRY_PAIRS", "all")]].concat(), STORE)
        },
    },
];

const CRASH: &str = "-p belfry-cli --test crash";
const STORE: &str = "-p belfry-store --features testing --test memory --test sqlite --test postgres \
                     --test sqlite_files";

impl Part {
    /// Runs it; `prepare` adds what every command needs.
    pub fn run(&self, prepare: &dyn Fn(Command) -> Command) -> Ended {
        println!("== {}", self.name);
        (self.run)(prepare)
    }
}

fn tests(prepare: &dyn Fn(Command) -> Command, numbers: &[(&str, &str)], which: &str) -> Ended {
    let arguments: Vec<&str> = ["test", "--locked"].into_iter().chain(which.split_whitespace()).collect();
    let mut command = prepare(cargo(&arguments));
    command.envs(numbers.iter().copied());
    ended(succeeds(&mut command))
}

fn ended(passed: bool) -> Ended {
    if passed { Ended::Passed } else { Ended::Failed }
}

/// Ten minutes on SQLite; on PostgreSQL with the command that docs/cli.md shows.
fn torture(prepare: &dyn Fn(Command) -> Command) -> Ended {
    let arguments =
        ["run", "--locked", "--release", "-p", "belfry-cli", "--", "doctor", "--torture", "--minutes", "10"];
    ended(succeeds(&mut prepare(cargo(&arguments))))
}

/// A program outside of this workspace that depends on the library alone.
fn own_program() -> std::io::Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize()?;
    let folder = std::env::temp_dir().join(format!("belfry-xtask-program-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("src"))?;
    let manifest = format!(
        "[package]\nname = \"program\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         belfry = {{ path = {:?} }}\ntokio = {{ version = \"1\", features = [\"full\"] }}\n",
        root.join("crates/engine")
    );
    std::fs::write(folder.join("Cargo.toml"), manifest)?;
    std::fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    std::fs::copy(root.join("crates/engine/examples/schedules.rs"), folder.join("src/main.rs"))?;
    let mut command = cargo(&["run", "--quiet"]);
    command.current_dir(&folder).env("CARGO_TARGET_DIR", root.join("target/program"));
    let passed = succeeds(&mut command);
    std::fs::remove_dir_all(&folder)?;
    Ok(passed)
}

fn clock(prepare: &dyn Fn(Command) -> Command) -> Ended {
    let mut folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    if !folders.any(|folder| folder.path().join("faketime/libfaketime.so.1").exists()) {
        return Ended::ToolMissing("install libfaketime (Debian: faketime)");
    }
    tests(prepare, &[("BELFRY_FAKETIME", "1")], "-p belfry-cli --test up clock")
}

/// Small disks of their own, which the tests fill.
fn full_disks(prepare: &dyn Fn(Command) -> Command) -> Ended {
    const TESTS: [(&str, &str); 3] = [
        ("8m", "-p belfry-cli --test up disk"),
        ("8m", "-p belfry-store --features testing --test sqlite_files disk"),
        ("50m", "-p belfry-store --features testing --test postgres full_disk"),
    ];
    for (size, which) in TESTS {
        let Some(disk) = SmallDisk::mount(size) else {
            return Ended::ToolMissing("run it as root, who may mount a tmpfs");
        };
        let place = disk.folder.to_string_lossy().into_owned();
        if let Ended::Failed = tests(prepare, &[("BELFRY_SMALL_DISK", &place)], which) {
            return Ended::Failed;
        }
    }
    Ended::Passed
}

/// A file system in memory that goes with this value.
struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    fn mount(size: &str) -> Option<SmallDisk> {
        let folder = std::env::temp_dir().join(format!("belfry-xtask-disk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).ok()?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size},mode=1777"), "none"]).arg(&folder);
        let is_mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        if !is_mounted {
            let _ = std::fs::remove_dir(&folder);
            return None;
        }
        Some(SmallDisk { folder })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.folder).status();
        let _ = std::fs::remove_dir(&self.folder);
    }
}

const SERVED: &str = r#"
agents:
  hello:
    shell: echo hello
    schedules:
      quiet: {cron: "0 0 1 1 *"}
      pushed: {webhook: {secret: "a secret for these requests"}}
"#;

/// Random requests against a server, made from the document that describes its API.
fn schemathesis(_: &dyn Fn(Command) -> Command) -> Ended {
    let is_there = Command::new("st").arg("--version").stdout(Stdio::null()).status();
    if !is_there.is_ok_and(|status| status.success()) {
        return Ended::ToolMissing("install schemathesis (`pip install schemathesis`)");
    }
    if !succeeds(&mut cargo(&["build", "--locked", "-p", "belfry-cli"])) {
        return Ended::Failed;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = std::env::temp_dir().join(format!("belfry-xtask-{}", std::process::id()));
    let asked = std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(folder.join("belfry.yaml"), SERVED))
        .and_then(|()| Server::start(&root.join("target/debug/belfry"), &folder))
        .map(|server| {
            let url = format!("{}/api/openapi.json", server.url);
            let token = format!("Authorization: Bearer {}", server.token);
            let mut command = Command::new("st");
            command.arg("--config-file").arg(root.join("crates/server/schemathesis.toml"));
            command.args(["run", &url, "-H", &token, "--checks", "all", "-n", "25"]);
            command.args(["--exclude-operation-id", "events"]);
            succeeds(&mut command)
        });
    let removed = std::fs::remove_dir_all(&folder);
    match (asked, removed) {
        (Ok(passed), Ok(())) => ended(passed),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("== {error}");
            Ended::Failed
        }
    }
}

/// A server that ends with this value.
struct Server {
    child: Child,
    url: String,
    token: String,
}

impl Server {
    fn start(binary: &PathBuf, folder: &Path) -> std::io::Result<Server> {
        let mut child = Command::new(binary)
            .args(["up", "--listen", "127.0.0.1:0"])
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let give_up = Instant::now() + Duration::from_secs(30);
        while Instant::now() < give_up && child.try_wait()?.is_none() {
            let file = std::fs::read_to_string(folder.join(".belfry/server.json")).unwrap_or_default();
            if let (Some(url), Some(token)) = (text_of(&file, "url"), text_of(&file, "token")) {
                return Ok(Server { child, url, token });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        child.kill()?;
        child.wait()?;
        Err(std::io::Error::other("the server did not start"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A text in a flat JSON object; neither addresses nor tokens hold a quote.
fn text_of(json: &str, key: &str) -> Option<String> {
    let (_, rest) = json.split_once(&format!("\"{key}\""))?;
    let (_, rest) = rest.split_once('"')?;
    Some(rest.split_once('"')?.0.to_owned())
}
