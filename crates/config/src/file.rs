//! Reading files that anybody may have written: nothing here blocks, grows without bound or follows a link out of the
//! folder of the main file.

use std::fs::{File, Metadata, OpenOptions};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// A file may be so large.
pub(crate) const BYTES_MAX: u64 = 8 << 20;

/// What was read.
pub(crate) struct Text {
    pub text: String,
    pub danger: Option<Danger>,
}

/// How another user can decide what a file says, and with it what runs here.
pub(crate) struct Danger {
    /// The start of a sentence that the file's name ends, and what follows the name.
    pub message: (String, String),
    /// The way out.
    pub help: String,
    /// Whether the file is refused for that; if not, there is a warning.
    pub refused: bool,
}

/// Reads a regular file of UTF-8.
pub(crate) fn read(path: &Path) -> Result<Text, String> {
    let file = open(path).map_err(|error| cause(&error))?;
    let metadata = file.metadata().map_err(|error| cause(&error))?;
    if metadata.is_dir() {
        return Err("it is a directory".into());
    }
    if !metadata.is_file() {
        return Err("it is not a regular file".into());
    }
    let too_large = || format!("it is larger than {} MiB", BYTES_MAX >> 20);
    if metadata.len() > BYTES_MAX {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| cause(&error))?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(too_large());
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = good.iter().filter(|byte| **byte == b'\n').count() + 1;
        format!("line {line} is not UTF-8")
    })?;
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    Ok(Text { text, danger: danger(path, &metadata) })
}

/// Without waiting: a FIFO without a writer would block for ever.
#[cfg(unix)]
fn open(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

#[cfg(not(unix))]
fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).open(path)
}

/// What is wrong with the owner or the mode of a file, or of a folder above it. What the file says does not matter:
/// also an `include`, a `PATH` or the address of a store decides what runs. Root trusts no other user and no group but
/// its own; others trust whom the modes trust, but not every user of the host.
#[cfg(unix)]
fn danger(path: &Path, file: &Metadata) -> Option<Danger> {
    use std::os::unix::fs::MetadataExt;
    let root = is_root();
    let shown = path.display();
    let danger = |before: String, after: String, help: String| {
        Some(Danger { message: (before, after), help, refused: true })
    };
    let others_write = |data: &Metadata| match data.mode() {
        mode if mode & 0o002 != 0 => Some(("every user of this host".to_owned(), "o-w")),
        mode if root && mode & 0o020 != 0 && data.gid() != 0 => {
            Some((format!("group {}", data.gid()), "g-w"))
        }
        _ => None,
    };
    let owner = file.uid();
    if root && owner != 0 {
        let help = format!("run as user {owner}, or take the file over: chown root {shown}");
        return danger(format!("user {owner} owns"), ", and root would run what it says".into(), help);
    }
    if let Some((who, right)) = others_write(file) {
        let help = format!("take the right away: chmod {right} {shown}");
        return danger(format!("{who} can write"), ", which decides what runs".into(), help);
    }
    let folders = folders_above(path);
    // The owner of a folder can replace what is in it, also if it has a sticky bit.
    if let Some((folder, data)) = folders.iter().find(|(_, data)| root && data.uid() != 0) {
        let (owner, folder) = (data.uid(), folder.display());
        let help = format!("run as user {owner}, or take the folder over: chown root {folder}");
        let before = format!("user {owner} owns {folder} and can replace");
        return danger(before, ", and root would run what it says".into(), help);
    }
    if let Some((link, data)) = links_on(path).iter().find(|(_, data)| root && data.uid() != 0) {
        let (owner, link) = (data.uid(), link.display());
        let help = format!("name the file itself, or remove the link: rm {link}");
        let before = format!("user {owner} owns the link {link} and can replace");
        return danger(before, ", and root would run what it says".into(), help);
    }
    // With a sticky bit others cannot.
    let open = folders.iter().filter(|(_, data)| data.mode() & 0o1000 == 0);
    let (folder, (who, right)) = open
        .map(|(folder, data)| (folder.display(), others_write(data)))
        .find_map(|(folder, others)| Some((folder, others?)))?;
    Some(Danger {
        message: (
            format!("{who} can replace"),
            format!(", which decides what runs: {who} can write to {folder}"),
        ),
        help: format!("take the right away: chmod {right} {folder}"),
        refused: root,
    })
}

#[cfg(not(unix))]
fn danger(_: &Path, _: &Metadata) -> Option<Danger> {
    None
}

/// Every folder above a file, the nearest first: above the path as it was given, then above the one that links lead to.
#[cfg(unix)]
fn folders_above(path: &Path) -> Vec<(PathBuf, Metadata)> {
    let paths = [std::path::absolute(path).ok(), path.canonicalize().ok()];
    let folders = paths.iter().flatten().flat_map(|path| path.ancestors().skip(1).map(Path::to_owned));
    folders.filter_map(|folder| folder.metadata().ok().map(|data| (folder, data))).collect()
}

/// Symbolic links that a path leads through, one after the other.
#[cfg(unix)]
fn links_on(path: &Path) -> Vec<(PathBuf, Metadata)> {
    const LINKS_MAX: usize = 40;
    let mut links = Vec::new();
    let mut path = std::path::absolute(path).unwrap_or_default();
    while links.len() < LINKS_MAX {
        let first = path.ancestors().filter(|part| part.is_symlink()).last().map(Path::to_owned);
        let Some(link) = first else { break };
        let (Ok(data), Ok(target)) = (link.symlink_metadata(), link.read_link()) else { break };
        let rest = path.strip_prefix(&link).map(Path::to_owned).unwrap_or_default();
        path = link.parent().unwrap_or(Path::new("/")).join(target);
        path.extend(&rest);
        links.push((link, data));
    }
    links
}

/// Whether what runs here may do everything.
#[cfg(unix)]
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub(crate) const NO_SUCH_FILE: &str = "there is no such file";

/// An I/O error in plain words, without the number.
pub(crate) fn cause(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound => NO_SUCH_FILE.into(),
        ErrorKind::PermissionDenied => "permission denied".into(),
        ErrorKind::NotADirectory => "a part of its path is not a directory".into(),
        ErrorKind::IsADirectory => "it is a directory".into(),
        _ if error.to_string().contains("symbolic links") => "its symbolic links go in a circle".into(),
        _ => error.to_string(),
    }
}

/// An absolute path without `.` and `..`, by its letters alone: the file need not exist.
pub(crate) fn absolute(base: &Path, path: &Path) -> PathBuf {
    let joined = base.join(path);
    let joined = std::path::absolute(&joined).unwrap_or(joined);
    let mut clean = PathBuf::new();
    for part in joined.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            part => clean.push(part),
        }
    }
    clean
}

/// How many files a pattern may name.
const MATCHES_MAX: usize = 10_000;

/// What a pattern such as `agents/*.yaml` names under `base`, sorted; and the folders that were looked into.
/// `*` and `?` match inside a name, and never a leading dot.
pub(crate) fn matches(base: &Path, pattern: &str) -> std::io::Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let mut found = vec![PathBuf::new()];
    let mut folders = Vec::new();
    let parts: Vec<_> = pattern.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    for (i, part) in parts.iter().enumerate() {
        if !is_pattern(part) {
            found.iter_mut().for_each(|path| path.push(part));
            continue;
        }
        let mut next = Vec::new();
        for path in &found {
            let folder = base.join(path);
            let entries = match std::fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => continue,
                Err(error) => return Err(error),
            };
            folders.push(folder.clone());
            for entry in entries.take(MATCHES_MAX) {
                let name = entry?.file_name();
                let Some(name) = name.to_str() else { continue };
                let last = i + 1 == parts.len();
                if fits(name, part) && (last || folder.join(name).is_dir()) {
                    next.push(path.join(name));
                }
            }
        }
        if next.len() > MATCHES_MAX {
            return Err(std::io::Error::other(format!("more than {MATCHES_MAX} files fit")));
        }
        found = next;
    }
    found.retain(|path| base.join(path).exists());
    found.sort();
    Ok((found, folders))
}

pub(crate) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?'])
}

fn fits(name: &str, pattern: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let (name, pattern): (Vec<char>, Vec<char>) = (name.chars().collect(), pattern.chars().collect());
    // Greedy with one way back: linear in practice, quadratic at worst.
    let (mut n, mut p, mut back) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                back = Some((n, p));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => {
                n += 1;
                p += 1;
            }
            _ => match back {
                Some((from, star)) => {
                    back = Some((from + 1, star));
                    n = from + 1;
                    p = star + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_names() {
        for (pattern, name) in
            [("*", "a"), ("*.yaml", "a.yaml"), ("a*c*e", "abcde"), ("?.y", "a.y"), ("**", "x"), (".*", ".x")]
        {
            assert!(fits(name, pattern), "{pattern} {name}");
        }
        for (pattern, name) in [("*.yaml", "a.yml"), ("*", ".hidden"), ("?", "ab"), ("a*b", "ac"), ("?", "")]
        {
            assert!(!fits(name, pattern), "{pattern} {name}");
        }
    }

    #[test]
    fn paths_are_made_absolute_by_their_letters() {
        let base = Path::new("/a/b");
        assert_eq!(absolute(base, Path::new("./c/../d")), Path::new("/a/b/d"));
        assert_eq!(absolute(base, Path::new("../../../x")), Path::new("/x"));
        assert_eq!(absolute(base, Path::new("/y")), Path::new("/y"));
    }
}
