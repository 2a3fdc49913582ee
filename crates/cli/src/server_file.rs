//! `server.json`: how commands find the server of a store. It lies beside the store's file and holds what lets its owner in,
//! so it is believed only where nobody else can have written or read it.

use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use belfry_config::StoreUrl;
use belfry_runner::{ProcessState, boot_id, pid_ns};
use nix::fcntl::OFlag;
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::link::Link;
use crate::place;

const NAME: &str = "server.json";
/// It is far shorter.
const BYTES_MAX: u64 = 16 << 10;

/// What other commands need to talk to a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    /// Where it listens.
    pub url: String,
    /// Its process.
    pub pid: u32,
    /// When the process started, in clock ticks since boot: a pid alone may soon be that of another process.
    pub start_time: u64,
    /// In which boot that was.
    pub boot_id: String,
    /// In which pid namespace the pid is valid.
    pub pid_ns: String,
    /// What it lets commands of its owner in with, while it lives.
    pub token: String,
    /// The store that it serves, without a password.
    pub store: String,
}

impl ServerFile {
    /// What this process tells of its server.
    pub fn of_this_process(url: String, token: String, store: String) -> ServerFile {
        let pid = std::process::id();
        let start_time = match ProcessState::of(pid) {
            ProcessState::Found { start_time, .. } => start_time,
            ProcessState::Gone | ProcessState::Unknown => 0,
        };
        ServerFile { url, pid, start_time, boot_id: boot_id(), pid_ns: pid_ns(), token, store }
    }

    /// Where the file of a store's server is.
    pub fn path(address: &str, config: &Path) -> PathBuf {
        let folder = place::state_dir(address, config);
        folder.parent().unwrap_or(&folder).join(NAME)
    }

    /// How a store is known: by what cannot be written in two ways, and without a password.
    pub fn store_of(address: &str) -> String {
        let path = address.strip_prefix("sqlite:").and_then(|path| std::fs::canonicalize(path).ok());
        match path {
            Some(path) => format!("sqlite:{}", path.display()),
            None => StoreUrl::new(address).to_string(),
        }
    }

    /// The server of a store, where there is one that answers. What is left of another is passed over.
    pub async fn find(address: &str, config: &Path) -> Option<Link> {
        ServerFile::living(address, config)?.link().await
    }

    /// What the server of a store has told, if its process still runs, whether it answers or not.
    pub fn living(address: &str, config: &Path) -> Option<ServerFile> {
        let told = ServerFile::read(&ServerFile::path(address, config))?;
        (told.store == ServerFile::store_of(address) && told.lives()).then_some(told)
    }

    /// The server whose file lies where it does unless a configuration says otherwise, for who cannot read what it says.
    pub async fn beside(config: &Path) -> Option<Link> {
        let folder = config.parent().unwrap_or(Path::new(""));
        ServerFile::read(&folder.join(".belfry").join(NAME))?.link().await
    }

    /// The file of a server that was named by its address, if it is the server of this store or of this folder.
    pub fn of_named(named: &Link, address: Option<&str>, config: &Path) -> Option<ServerFile> {
        let beside = config.parent().unwrap_or(Path::new("")).join(".belfry").join(NAME);
        let paths = address.map(|address| ServerFile::path(address, config)).into_iter().chain([beside]);
        let mut files = paths.filter_map(|path| ServerFile::read(&path));
        files.find(|told| told.lives() && told.is_at(&named.authority))
    }

    /// Whether this server listens at an authority; `localhost` is the loopback address.
    fn is_at(&self, authority: &str) -> bool {
        let Some(own) = self.url.strip_prefix("http://") else { return false };
        let is_loopback = own.parse().is_ok_and(|address: SocketAddr| address.ip().is_loopback());
        let by_name = authority.strip_prefix("localhost:").filter(|_| is_loopback);
        own == authority || by_name.is_some_and(|port| own.rsplit(':').next() == Some(port))
    }

    /// Tells a link which process it leads to, and under which address: a name such as `localhost` may have several, and
    /// another user may listen at one of them.
    pub fn introduce(&self, link: &mut Link) {
        if let Some(own) = self.url.strip_prefix("http://") {
            link.authority = own.to_owned();
        }
        link.pid = Some(self.pid);
        // A database may have any number of nodes.
        link.process = self.store.starts_with("sqlite:").then_some(self.pid);
    }

    async fn link(&self) -> Option<Link> {
        let mut link = Link::new(&self.url, Some(self.token.clone())).ok()?;
        self.introduce(&mut link);
        (self.lives() && link.is_there().await).then_some(link)
    }

    /// Whether the process that wrote the file still runs. Its token goes to no other one.
    fn lives(&self) -> bool {
        let is_pid = i32::try_from(self.pid).is_ok_and(|pid| pid > 0);
        if !is_pid || self.boot_id != boot_id() || self.pid_ns != pid_ns() {
            return false;
        }
        match ProcessState::of(self.pid) {
            ProcessState::Found { start_time, lives } => lives && start_time == self.start_time,
            // The system does not say, or not to this user.
            ProcessState::Unknown => true,
            ProcessState::Gone => false,
        }
    }

    /// Reads it, where it is ours and nobody else's.
    fn read(path: &Path) -> Option<ServerFile> {
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(flags.bits()).open(path).ok()?;
        let data = file.metadata().ok()?;
        let is_private = data.mode() & 0o177 == 0 && data.uid() == Uid::effective().as_raw();
        if !data.is_file() || !is_private {
            return None;
        }
        let mut text = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes it: whole or not at all, and never readable by others.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let fresh = path.with_extension(format!("json.{}", self.pid));
        if let Some(folder) = fresh.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let _ = std::fs::remove_file(&fresh);
        let written = self.write_new(&fresh).and_then(|()| std::fs::rename(&fresh, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&fresh);
        }
        written
    }

    fn write_new(&self, path: &Path) -> std::io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        serde_json::to_writer(&mut file, self)?;
        file.write_all(b"\n")
    }

    /// Refuses what cannot be replaced by the file, before a server starts.
    pub fn check(path: &Path) -> Result<(), Failure> {
        match path.symlink_metadata() {
            Ok(data) if data.is_dir() => Err(Failure::Usage(format!(
                "cannot write {}, by which commands find the server: it is a folder; move it away",
                path.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Removes it, where this process has written it.
    pub fn remove(path: &Path) {
        if ServerFile::read(path).is_some_and(|told| told.pid == std::process::id()) {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn told() -> ServerFile {
        ServerFile::of_this_process("http://127.0.0.1:7400".into(), "bf_0".into(), "sqlite:/x".into())
    }

    #[test]
    fn a_file_that_others_may_read_or_have_written_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        told().write(&path).unwrap();
        assert_eq!(ServerFile::read(&path), Some(told()));
        for mode in [0o604, 0o640, 0o620, 0o700, 0o666] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(ServerFile::read(&path), None, "{mode:o}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("link.json");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(ServerFile::read(&link), None, "another file's");
        assert_eq!(ServerFile::read(folder.path()), None, "a folder");
        if Uid::effective().is_root() {
            nix::unistd::chown(&path, Some(Uid::from_raw(65_534)), None).unwrap();
            assert_eq!(ServerFile::read(&path), None, "somebody else's");
        }
    }

    #[test]
    fn a_process_that_got_the_pid_of_a_server_is_not_the_server() {
        assert!(told().lives());
        let later = told().start_time + 1;
        assert!(!ServerFile { start_time: later, ..told() }.lives(), "another process with its pid");
        assert!(!ServerFile { boot_id: "0".into(), ..told() }.lives(), "of an earlier boot");
        assert!(!ServerFile { pid_ns: "pid:[1]".into(), ..told() }.lives(), "of a container");
        for pid in [0, i32::MAX as u32, u32::MAX] {
            assert!(!ServerFile { pid, ..told() }.lives(), "nobody has the pid {pid}");
        }
    }

    #[test]
    fn a_folder_in_its_place_is_refused_and_nothing_is_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        assert!(ServerFile::check(&path).is_ok(), "nothing is there yet");
        std::fs::create_dir(&path).unwrap();
        let Err(Failure::Usage(words)) = ServerFile::check(&path) else { panic!("it was accepted") };
        assert!(words.contains("it is a folder; move it away"), "{words}");
        told().write(&path).unwrap_err();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::remove_dir(&path).unwrap();
        told().write(&path).unwrap();
        assert!(ServerFile::check(&path).is_ok(), "an older file is replaced");
    }

    #[test]
    fn a_server_is_known_by_its_address_and_by_localhost() {
        let at = |url: &str, authority: &str| ServerFile { url: url.into(), ..told() }.is_at(authority);
        assert!(
            at("http://127.0.0.1:7400", "127.0.0.1:7400") && at("http://127.0.0.1:7400", "localhost:7400")
        );
        assert!(at("http://[::1]:7400", "[::1]:7400") && at("http://[::1]:7400", "localhost:7400"));
        for other in
            ["127.0.0.1:740", "127.0.0.1:7401", "localhost:7401", "evil.example:7400", "localhost.evil:7400"]
        {
            assert!(!at("http://127.0.0.1:7400", other), "{other}");
        }
        assert!(!at("http://192.0.2.1:7400", "localhost:7400"));
        let mut named = Link::new("http://localhost:7400", None).unwrap();
        told().introduce(&mut named);
        assert_eq!(named.authority, "127.0.0.1:7400", "where it listens, whatever the name leads to");
    }

    #[test]
    fn a_store_is_known_by_its_file_and_never_by_a_password() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a.db"), "").unwrap();
        let place = folder.path().display();
        let (plain, turned) = (format!("sqlite:{place}/a.db"), format!("sqlite:{place}/a/../a.db"));
        assert_eq!(ServerFile::store_of(&plain), ServerFile::store_of(&turned));
        let (one, other) = ("postgres://ada:one@host/db", "postgres://ada:two@host/db");
        assert_eq!(ServerFile::store_of(one), ServerFile::store_of(other));
        assert!(!ServerFile::store_of(one).contains("one"));
        assert_ne!(ServerFile::store_of(one), ServerFile::store_of("postgres://ada:one@host/other"));
    }
}
