//! Files and folders that are their owner's alone: made so whatever the umask is, and checked before they are used.
//!
//! Others must neither read them (outputs, payloads), nor hold the lock, nor put a store of their own in the place of ours:
//! its commands would run as us.

use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

use crate::error::Error;

/// The folder that is Belfry's by its name: everything in it is private.
pub const STATE_FOLDER: &str = ".belfry";

/// As many links as a path may lead through.
const LINKS_MAX: usize = 40;

/// Makes a folder where there is none, for its owner alone; checks one that is there. A folder named `.belfry` and what lies
/// directly in it are made private; any other folder stays as it is, and is refused if others can write to it. Gives a
/// sentence for each thing that others could reach before. Refuses what another user owns or could replace.
pub fn secure_folder(folder: &Path) -> Result<Vec<String>, Error> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let unavailable = |error: io::Error| unavailable(folder, &error);
    refuse_open_folders_above(folder)?;
    match DirBuilder::new().mode(0o700).recursive(true).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(refused(folder, "it is not a folder", "move it away"));
        }
        made => made.map_err(unavailable)?,
    }
    own(folder, &folder.symlink_metadata().map_err(unavailable)?)?;
    let metadata = folder.metadata().map_err(unavailable)?;
    own(folder, &metadata)?;
    if folder.file_name().is_none_or(|name| name != STATE_FOLDER) {
        refuse_shared_folder(folder, &metadata)?;
        return Ok(Vec::new());
    }
    let mut told: Vec<String> = tighten(folder, &metadata)?.into_iter().collect();
    for entry in folder.read_dir().map_err(unavailable)? {
        told.extend(secure(&entry.map_err(unavailable)?.path())?);
    }
    Ok(told)
}

/// Makes something that is there private. Refuses what another user owns. Says so where others could reach it before.
pub fn secure(path: &Path) -> Result<Option<String>, Error> {
    match path.symlink_metadata() {
        // A link's own mode says nothing; what it leads to is judged where it is opened.
        Ok(metadata) if metadata.is_symlink() => own(path, &metadata).map(|()| None),
        Ok(metadata) => {
            own(path, &metadata)?;
            tighten(path, &metadata)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unavailable(path, &error)),
    }
}

/// Opens a file for reading and writing, making it where there is none, for its owner alone. A link is not followed.
pub(crate) fn open(path: &Path) -> Result<File, Error> {
    let unavailable = |error: io::Error| unavailable(path, &error);
    secure(path)?;
    if path.is_symlink() {
        let way_out = format!("rm {}", path.display());
        return Err(refused(path, "it is a symbolic link, and Belfry makes this file itself", &way_out));
    }
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(path)
        .map_err(unavailable)?;
    // It may have been made, or put there, since it was looked at.
    own(path, &file.metadata().map_err(unavailable)?)?;
    file.set_permissions(Permissions::from_mode(0o600)).map_err(unavailable)?;
    Ok(file)
}

/// Looks at every folder above, by the path as it was given and by the one that links lead to: the folder can be
/// replaced with any of them.
fn refuse_open_folders_above(folder: &Path) -> Result<(), Error> {
    let given = std::path::absolute(folder).map_err(|error| unavailable(folder, &error))?;
    let own = given.ancestors().find_map(|above| above.canonicalize().ok());
    let above_own = own.iter().flat_map(|own| own.ancestors().skip(usize::from(given.exists())));
    for above in given.ancestors().skip(1).chain(above_own).filter(|above| above.is_dir()) {
        refuse_open_folder(above)?;
    }
    Ok(())
}

/// Follows the links of a path, and refuses one that another user owns: that user decides where it leads. Links of root
/// are part of the system.
pub(crate) fn refuse_links_of_others(path: &Path) -> Result<(), Error> {
    let mut path = std::path::absolute(path).map_err(|error| unavailable(path, &error))?;
    for _ in 0..LINKS_MAX {
        let above: Vec<&Path> = path.ancestors().collect();
        let Some(link) = above.into_iter().rev().find(|part| part.is_symlink()) else { return Ok(()) };
        let metadata = link.symlink_metadata().map_err(|error| unavailable(link, &error))?;
        if metadata.uid() != 0 {
            own(link, &metadata)?;
        }
        let mut next = link.parent().unwrap_or(Path::new("/")).to_owned();
        next.push(link.read_link().map_err(|error| unavailable(link, &error))?);
        next.extend(path.strip_prefix(link).unwrap_or(Path::new("")));
        path = next;
    }
    Err(refused(&path, "its links lead in a circle", "name the file itself"))
}

/// Refuses a folder if another user can replace what lies in it: its owner always, others who may write to it unless it has
/// a sticky bit. Root trusts no group but its own; others trust theirs, as for the configuration.
fn refuse_open_folder(folder: &Path) -> Result<(), Error> {
    let metadata = folder.metadata().map_err(|error| unavailable(folder, &error))?;
    let (mode, shown) = (metadata.mode(), folder.display());
    let could = "could replace what Belfry keeps in it";
    let owner = metadata.uid();
    if owner != geteuid().as_raw() && !is_of_system(owner) {
        let detail = format!("user {owner} owns it, and {could}");
        return Err(refused(folder, &detail, "Name a store in a folder of your own"));
    }
    if mode & 0o1000 != 0 {
        return Ok(());
    }
    if mode & 0o002 != 0 {
        let detail = format!("every user of this host can write to it, and {could}");
        return Err(refused(folder, &detail, &format!("chmod o-w {shown}")));
    }
    if mode & 0o020 != 0 && geteuid().is_root() && metadata.gid() != 0 {
        let detail = format!("every user of group {} can write to it, and {could}", metadata.gid());
        return Err(refused(folder, &detail, &format!("chmod g-w {shown}")));
    }
    Ok(())
}

/// Whether this is root. Where not all users of the host are known here, root of the host may be shown as the user who stands
/// for all unknown ones.
fn is_of_system(user: u32) -> bool {
    const UNKNOWN: u32 = 65_534;
    let knows_all = || {
        std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| map.trim_end().ends_with("4294967295"))
    };
    user == 0 || user == UNKNOWN && !knows_all()
}

/// A user who can write to a folder can add a log (`…-wal`, `…-journal`) beside a store, which SQLite takes for the store's
/// own. A sticky bit does not prevent that. Root's group is part of the system.
fn refuse_shared_folder(folder: &Path, metadata: &Metadata) -> Result<(), Error> {
    let (who, right) = match metadata.mode() {
        mode if mode & 0o002 != 0 => ("every user of this host".to_owned(), "go-w"),
        mode if mode & 0o020 != 0 && metadata.gid() != 0 => {
            (format!("every user of group {}", metadata.gid()), "g-w")
        }
        _ => return Ok(()),
    };
    let detail = format!("{who} can write to it, and could change the store that Belfry keeps in it");
    // One with a sticky bit, such as `/tmp`, is meant for everybody.
    let way_out = match metadata.mode() & 0o1000 {
        0 => format!("chmod {right} {}, or name a store in a folder of its own", folder.display()),
        _ => "Name a store in a folder of its own".into(),
    };
    Err(refused(folder, &detail, &way_out))
}

fn own(path: &Path, metadata: &Metadata) -> Result<(), Error> {
    let (owner, ours) = (metadata.uid(), geteuid().as_raw());
    if owner == ours {
        return Ok(());
    }
    Err(Error::OtherUser { place: path.display().to_string(), owner, ours })
}

fn tighten(path: &Path, metadata: &Metadata) -> Result<Option<String>, Error> {
    let mode = metadata.mode() & 0o7777;
    let private = if metadata.is_dir() { 0o700 } else { 0o600 };
    if mode & !private == 0 {
        return Ok(None);
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode & private))
        .map_err(|error| unavailable(path, &error))?;
    Ok(Some(format!("{} was open to others (mode {mode:03o}); it is no longer", path.display())))
}

fn refused(path: &Path, detail: &str, way_out: &str) -> Error {
    Error::Unsafe { place: path.display().to_string(), detail: detail.into(), way_out: way_out.into() }
}

fn unavailable(path: &Path, error: &io::Error) -> Error {
    Error::Unavailable { detail: format!("{}: {error}", path.display()), ambiguous: false }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, create_dir_all, set_permissions};

    use super::*;

    #[test]
    fn a_link_of_another_user_is_not_followed() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        create_dir(path("folder")).unwrap();
        File::create(path("folder/b.db")).unwrap();
        std::os::unix::fs::symlink("folder/b.db", path("file")).unwrap();
        std::os::unix::fs::symlink("folder", path("way")).unwrap();
        std::os::unix::fs::symlink(path("file"), path("chain")).unwrap();
        std::os::unix::fs::symlink("circle", path("circle")).unwrap();
        for name in ["folder/b.db", "file", "way/b.db", "chain", "way/none"] {
            refuse_links_of_others(&path(name)).unwrap();
        }
        assert!(refuse_links_of_others(&path("circle")).is_err());
        // Only root can give a link away.
        if !geteuid().is_root() {
            return;
        }
        for (name, link) in [("file", "file"), ("way/b.db", "way"), ("chain", "file")] {
            std::os::unix::fs::lchown(path(link), Some(12_345), None).unwrap();
            let error = refuse_links_of_others(&path(name)).unwrap_err().to_string();
            assert!(error.contains("belongs to user 12345"), "{name}: {error}");
            let error = crate::sqlite::Sqlite::serve(&path(name)).err().unwrap().to_string();
            assert!(error.contains("belongs to user 12345"), "{name}: {error}");
            std::os::unix::fs::lchown(path(link), Some(0), None).unwrap();
        }
    }

    #[test]
    fn a_link_in_the_place_of_a_file_of_ours_is_refused_with_the_way_out() {
        let top = tempfile::tempdir().unwrap();
        let (file, link) = (top.path().join("b.db"), top.path().join("b.db.lock"));
        std::os::unix::fs::symlink(top.path().join("elsewhere"), &link).unwrap();
        let error = crate::sqlite::Sqlite::serve(&file).err().unwrap().to_string();
        assert!(error.contains("it is a symbolic link") && error.contains("rm "), "{error}");
        assert!(!top.path().join("elsewhere").exists());
    }

    #[test]
    fn no_folder_above_may_be_open_to_all() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        create_dir_all(path("open/x/y")).unwrap();
        create_dir(path("closed")).unwrap();
        std::os::unix::fs::symlink(path("open/x/y"), path("closed/link")).unwrap();
        let names = ["open/x/y/.belfry", "open/x/y/new/.belfry", "closed/link/.belfry", "closed/link"];
        let mode = |mode| set_permissions(path("open"), Permissions::from_mode(mode)).unwrap();
        mode(0o777);
        for name in names {
            let error = secure_folder(&path(name)).unwrap_err().to_string();
            assert!(error.contains(&format!("chmod o-w {}", path("open").display())), "{name}: {error}");
            assert!(!path(name).ends_with(".belfry") || !path(name).exists(), "{name} was made");
        }
        // With the sticky bit nobody else can replace what is there.
        mode(0o1777);
        for name in names {
            secure_folder(&path(name)).unwrap();
        }
        // Only root can give a folder away.
        if !geteuid().is_root() {
            return;
        }
        let give = |user, group| std::os::unix::fs::chown(path("open"), user, group).unwrap();
        give(None, Some(12_345));
        mode(0o775);
        for name in names {
            let error = secure_folder(&path(name)).unwrap_err().to_string();
            assert!(error.contains("every user of group 12345 can write"), "{name}: {error}");
        }
        // Its owner can replace everything, whatever the mode is.
        give(Some(12_345), Some(0));
        for modes in [0o755, 0o1777] {
            mode(modes);
            for name in names {
                let error = secure_folder(&path(name)).unwrap_err().to_string();
                assert!(error.contains("user 12345 owns it"), "{name}: {error}");
            }
        }
    }

    #[test]
    fn a_store_is_opened_only_in_a_folder_that_nobody_else_can_write_to() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        for folder in ["shared", ".belfry"] {
            create_dir(path(folder)).unwrap();
            drop(crate::sqlite::Sqlite::open(&path(folder).join("b.db")).unwrap());
        }
        let own = "Name a store in a folder of its own";
        for (mode, way_out) in [(0o1777, own), (0o777, "chmod go-w"), (0o2775, "chmod g-w")] {
            for folder in ["shared", ".belfry"] {
                // Only root can give it to another group; the own one of others is not root's.
                let _ = std::os::unix::fs::chown(path(folder), None, Some(12_345));
                set_permissions(path(folder), Permissions::from_mode(mode)).unwrap();
            }
            let file = path("shared/b.db");
            let opened = [crate::sqlite::Sqlite::open(&file), crate::sqlite::Sqlite::serve(&file)];
            for error in opened.map(|opened| opened.err().unwrap().to_string()) {
                assert!(error.contains(way_out), "{mode:o}: {error}");
            }
            drop(crate::sqlite::Sqlite::open(&path(".belfry/b.db")).unwrap());
            let now = path(".belfry").metadata().unwrap().mode() & 0o777;
            assert_eq!(now, 0o700, "{mode:o}");
        }
    }

    #[test]
    fn a_log_that_another_user_has_put_beside_a_store_is_not_read() {
        // Only root can give a file away.
        if !geteuid().is_root() {
            return;
        }
        for opens in [crate::sqlite::Sqlite::open, crate::sqlite::Sqlite::serve] {
            let top = tempfile::tempdir().unwrap();
            let file = top.path().join("b.db");
            drop(opens(&file).unwrap());
            for name in ["b.db-wal", "b.db-journal", "b.db"] {
                let planted = top.path().join(name);
                File::options().create(true).append(true).open(&planted).unwrap();
                std::os::unix::fs::lchown(&planted, Some(12_345), None).unwrap();
                let error = opens(&file).err().unwrap().to_string();
                assert!(error.contains("belongs to user 12345"), "{name}: {error}");
                std::os::unix::fs::lchown(&planted, Some(0), None).unwrap();
            }
        }
    }
}
