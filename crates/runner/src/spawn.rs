//! Starts a plan: through the trampoline where there is a keeper, so that a child is registered before its program is
//! executed; directly otherwise.
//!
//! A trampoline makes a session of its own, so the program has no controlling terminal. A child that is started directly
//! has only a process group of its own: it can reach the terminal of this process as `/dev/tty`.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use belfry_core::text::on_node;
use nix::errno::Errno;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::cgroup;
use crate::error::Error;
use crate::keeper::KeeperHandle;
use crate::node_process;
use crate::plan::{Plan, place_of, show};
use crate::processes::{CHILD_ID, ChildRecord};
use crate::trampoline;

/// How long a trampoline may take to make its session.
const SESSION_WITHIN: Duration = Duration::from_secs(30);

/// A child that leads a process group of its own.
pub(crate) struct Started {
    pub child: Child,
    pub record: ChildRecord,
    /// The socket to the trampoline, until it has become the program.
    pub control: Option<UnixStream>,
}

/// Starts a child. With a keeper it is a trampoline that waits for [`go`]. Blocks until the child leads its group.
pub(crate) fn start(
    plan: &Plan,
    keeper: Option<&KeeperHandle>,
    parent: Option<&Path>,
) -> Result<Started, Error> {
    match keeper {
        Some(keeper) => start_trampoline(plan, keeper, parent),
        None => start_directly(plan),
    }
}

fn start_directly(plan: &Plan) -> Result<Started, Error> {
    let stdin = match &plan.stdin {
        Some(path) => File::open(path).map_err(|cause| Error::File { path: path.clone(), cause })?.into(),
        None => Stdio::null(),
    };
    let mut command = Command::new(&plan.program);
    command.arg0(&plan.name).args(&plan.arguments).env_clear().envs(&plan.variables).stdin(stdin);
    if let Some(cwd) = &plan.cwd {
        command.current_dir(cwd);
    }
    let child = spawn(command.process_group(0)).map_err(|error| match is_shortage(&error) {
        true => Error::Shortage { program: show(&plan.name), source: error },
        false => explain(plan, &error),
    })?;
    let record = ChildRecord::of(pid(&child), &plan.child_id, None);
    Ok(Started { child, record, control: None })
}

fn start_trampoline(plan: &Plan, keeper: &KeeperHandle, parent: Option<&Path>) -> Result<Started, Error> {
    let cannot = |error: io::Error| {
        let program = show(&plan.name);
        match is_shortage(&error) {
            true => Error::Shortage { program, source: error },
            false => Error::Spawn { program, message: error.to_string(), retryable: true },
        }
    };
    let (mut control, theirs) = BlockingStream::pair().map_err(cannot)?;
    let mut command = keeper.trampoline();
    command.env_clear().env(CHILD_ID, &plan.child_id).stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)));
    // Not in a group of its own yet: the leader of a group cannot make a session.
    let mut child = spawn(&mut command).map_err(cannot)?;
    // With the command goes our copy of its end of the socket.
    drop(command);
    if let Err(source) = wait_for_session(&mut control) {
        // Until here it belongs to our group, and a Ctrl-C at the terminal ends it with others. It has done nothing.
        let _ = child.start_kill();
        return Err(Error::Shortage { program: show(&plan.name), source });
    }
    control.set_nonblocking(true).map_err(cannot)?;
    let control = UnixStream::from_std(control).map_err(cannot)?;
    let pid = pid(&child);
    // A group that cannot be made is no reason not to run: the child id finds who leaves.
    let group =
        parent.and_then(|parent| cgroup::enter(parent, &format!("belfry-{}", plan.child_id), pid).ok());
    let record = ChildRecord::of(pid, &plan.child_id, group);
    Ok(Started { child, record, control: Some(control) })
}

fn spawn(command: &mut Command) -> io::Result<Child> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
}

/// Returns when the trampoline leads a session, and so a group, of its own.
fn wait_for_session(control: &mut BlockingStream) -> io::Result<()> {
    control.set_read_timeout(Some(SESSION_WITHIN))?;
    let mut said = [0];
    match control.read_exact(&mut said) {
        Ok(()) if said == [trampoline::SESSION] => Ok(()),
        Ok(()) => Err(io::ErrorKind::InvalidData.into()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(io::Error::other("the process ended before it had a session"))
        }
        Err(error) => Err(error),
    }
}

fn pid(child: &Child) -> i32 {
    child.id().and_then(|id| i32::try_from(id).ok()).expect("a child that was not waited for has a pid")
}

/// Tells a trampoline to become its program, and waits until it has.
pub(crate) async fn go(plan: &Plan, control: &mut Option<UnixStream>) -> Result<(), Error> {
    let Some(mut control) = control.take() else { return Ok(()) };
    // If it cannot be written, the answer says why.
    let _ = control.write_all(&trampoline::encode(plan, node_process::inherited())).await;
    let mut answer = Vec::new();
    let _ = control.read_to_end(&mut answer).await;
    let ended = || Error::Spawn {
        program: show(&plan.name),
        message: "the process ended before the program could be executed".into(),
        retryable: true,
    };
    let errno = |rest: &[u8]| {
        let text = std::str::from_utf8(rest).ok();
        io::Error::from_raw_os_error(text.and_then(|text| text.parse().ok()).unwrap_or(0))
    };
    match answer.as_slice() {
        [trampoline::READY] => Ok(()),
        [trampoline::READY, trampoline::FAILED, rest @ ..] => Err(explain(plan, &errno(rest))),
        [trampoline::NO_CWD, rest @ ..] => Err(Error::Spawn {
            program: show(&plan.name),
            message: format!("its directory (cwd) cannot be entered: {}{}", errno(rest), directory(plan)),
            retryable: false,
        }),
        _ => Err(ended()),
    }
}

/// Whether the system has no descriptor, process, memory or room on the disk left for now. A disk with errors becomes
/// read-only until somebody repairs it, which is no fault of the attempt either.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(
            Errno::EMFILE
                | Errno::ENFILE
                | Errno::EAGAIN
                | Errno::ENOMEM
                | Errno::ENOSPC
                | Errno::EDQUOT
                | Errno::EROFS
        )
    )
}

/// Names the directory of an attempt at the end of an error.
fn directory(plan: &Plan) -> String {
    on_node(&show(&plan.cwd.as_deref().unwrap_or(Path::new("")).to_string_lossy()))
}

/// Says why a program could not be executed, as exactly as can be found out.
fn explain(plan: &Plan, error: &io::Error) -> Error {
    let errno = error.raw_os_error().map(Errno::from_raw);
    let program = show(&plan.name);
    let message = match errno {
        Some(Errno::E2BIG) => {
            let arguments: usize = plan.arguments.iter().map(|argument| argument.len() + 1).sum();
            let variables: usize =
                plan.variables.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
            format!(
                "arguments ({arguments} bytes) and environment ({variables} bytes) are longer than the system takes; \
                 hand long texts over by stdin or by the payload file"
            )
        }
        Some(Errno::ENOENT) if plan.program.exists() => match interpreter(&plan.program) {
            Some(interpreter) => format!("the interpreter of {program} does not exist{interpreter}"),
            None => format!("the loader that {program} needs does not exist{}", place(plan)),
        },
        Some(Errno::EACCES) => match interpreter(&plan.program) {
            Some(interpreter) => format!("{program} or its interpreter may not be executed{interpreter}"),
            None => format!("{program} may not be executed{}", place(plan)),
        },
        Some(Errno::ENOEXEC) => {
            let place = place(plan);
            format!("{program} is neither a program for this machine nor a script with a `#!` line{place}")
        }
        _ if plan.cwd.as_ref().is_some_and(|cwd| !cwd.is_dir()) => {
            format!("its directory (cwd) is gone{}", directory(plan))
        }
        _ => error.to_string(),
    };
    let retryable = matches!(
        errno,
        Some(
            Errno::EAGAIN
                | Errno::ENOMEM
                | Errno::EMFILE
                | Errno::ENFILE
                | Errno::ETXTBSY
                | Errno::EINTR
                | Errno::EIO
        )
    );
    Error::Spawn { program, message, retryable }
}

/// Names the program that was found, at the end of an error.
fn place(plan: &Plan) -> String {
    place_of(&plan.name, &plan.program, &plan.secrets)
}

/// Names the program of a script's `#!` line, at the end of an error.
fn interpreter(program: &Path) -> Option<String> {
    let metadata = fs::metadata(program).ok()?;
    if !metadata.is_file() {
        return None;
    }
    let mut line = Vec::new();
    BufReader::new(File::open(program).ok()?.take(256)).read_until(b'\n', &mut line).ok()?;
    let line = line.strip_prefix(b"#!")?;
    let line = String::from_utf8_lossy(line);
    line.split_ascii_whitespace().next().map(|interpreter| on_node(&show(interpreter)))
}
