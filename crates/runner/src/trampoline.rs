//! What a child is before it is its program: this binary, which waits until it has been registered with the keeper, and
//! then executes the program in its own place. If its node dies first, it ends without having done anything.
//!
//! Its standard input is a socket to the node. Out: `SESSION` when it has left the node's session and terminal. In: the
//! plan, which is the word to go. Out: `READY` just before the program is executed; then either the end of the stream,
//! because the socket closes on exec, or a message that says why not.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use nix::sys::stat::Mode;

use crate::node_process::{self, Inherited};
use crate::plan::Plan;

/// Said first: the process leads a session and a process group of its own, and has no controlling terminal.
pub(crate) const SESSION: u8 = b'S';
/// Said once, before the program is executed.
pub(crate) const READY: u8 = b'R';
/// The program could not be executed; an errno follows, in decimal.
pub(crate) const FAILED: u8 = b'E';
/// The directory could not be entered; as above.
pub(crate) const NO_CWD: u8 = b'D';

/// Becomes the program. Returns only if that did not work.
pub(crate) fn main() -> ExitCode {
    match run() {
        Ok(never) => match never {},
        Err(_) => ExitCode::from(127),
    }
}

enum Never {}

fn run() -> io::Result<Never> {
    node_process::close_inherited_descriptors();
    // A copy that closes on exec; standard input itself is replaced by the program's.
    let mut node = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    nix::unistd::setsid()?;
    node.write_all(&[SESSION])?;
    let mut length = [0; 8];
    node.read_exact(&mut length)?;
    let mut bytes = Vec::new();
    let length = u64::from_le_bytes(length);
    (&node).take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut fields = Fields(bytes.into_iter());
    let inherited = fields.inherited()?;
    let program = fields.text()?;
    let name = fields.text()?;
    let cwd = fields.text()?;
    let stdin = fields.text()?;
    let arguments = fields.list()?;
    let variables = fields.list()?;

    if !cwd.is_empty()
        && let Err(error) = std::env::set_current_dir(&cwd)
    {
        return Err(tell(&mut node, NO_CWD, error));
    }
    let mut command = Command::new(program);
    command.arg0(name).args(arguments).env_clear();
    command.envs(variables.chunks(2).filter_map(|pair| Some((pair.first()?, pair.get(1)?))));
    command.stdin(if stdin.is_empty() { Stdio::null() } else { File::open(stdin)?.into() });
    if let Some(inherited) = inherited {
        node_process::give_back(inherited)?;
    }
    node.write_all(&[READY])?;
    let error = command.exec();
    Err(tell(&mut node, FAILED, error))
}

fn tell(node: &mut UnixStream, what: u8, error: io::Error) -> io::Error {
    let errno = error.raw_os_error().unwrap_or(0).to_string();
    let _ = node.write_all(&[&[what], errno.as_bytes()].concat());
    error
}

/// A plan on the wire: its length, then fields that end with a NUL byte. No field can have one inside. First comes what the
/// node was started with, as two numbers, or two empty fields.
pub(crate) fn encode(plan: &Plan, inherited: Option<Inherited>) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    let mut text = |field: &[u8]| {
        bytes.extend_from_slice(field);
        bytes.push(0);
    };
    text(inherited.map(|it| it.open_files.to_string()).unwrap_or_default().as_bytes());
    text(inherited.map(|it| it.umask.bits().to_string()).unwrap_or_default().as_bytes());
    text(plan.program.as_os_str().as_bytes());
    text(plan.name.as_bytes());
    text(plan.cwd.as_ref().map_or(b"", |path| path.as_os_str().as_bytes()));
    text(plan.stdin.as_ref().map_or(b"", |path| path.as_os_str().as_bytes()));
    text(plan.arguments.len().to_string().as_bytes());
    plan.arguments.iter().for_each(|argument| text(argument.as_bytes()));
    text((plan.variables.len() * 2).to_string().as_bytes());
    for (name, value) in &plan.variables {
        text(name.as_bytes());
        text(value.as_bytes());
    }
    let length = (bytes.len() - 8) as u64;
    bytes[..8].copy_from_slice(&length.to_le_bytes());
    bytes
}

struct Fields(std::vec::IntoIter<u8>);

impl Fields {
    fn text(&mut self) -> io::Result<OsString> {
        let bytes = self.0.as_slice();
        let end = bytes.iter().position(|byte| *byte == 0).ok_or(io::ErrorKind::InvalidData)?;
        let text = OsString::from_vec(bytes[..end].to_vec());
        self.0.nth(end);
        Ok(text)
    }

    /// A number, or none where the field is empty.
    fn number(&mut self) -> io::Result<Option<u64>> {
        let text = self.text()?;
        let text = text.to_str().ok_or(io::ErrorKind::InvalidData)?;
        match text.is_empty() {
            true => Ok(None),
            false => text.parse().map(Some).map_err(|_| io::ErrorKind::InvalidData.into()),
        }
    }

    fn inherited(&mut self) -> io::Result<Option<Inherited>> {
        let (open_files, umask) = (self.number()?, self.number()?);
        let umask = umask.and_then(|umask| umask.try_into().ok()).and_then(Mode::from_bits);
        Ok(open_files.zip(umask).map(|(open_files, umask)| Inherited { open_files, umask }))
    }

    fn list(&mut self) -> io::Result<Vec<OsString>> {
        let count = self.number()?.ok_or(io::ErrorKind::InvalidData)?;
        (0..count).map(|_| self.text()).collect()
    }
}
