//! What exactly is started: program, arguments, environment, directory and input, with every template rendered and every
//! reference resolved. Touches only the attempt's private directory.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use belfry_core::input::Prompt;
use belfry_core::template::{self, Budget, Template, Values};
use belfry_core::text::on_node;
use belfry_core::work::{Action, Stdin};
use belfry_time::Zone;
use nix::unistd::{AccessFlags, access};
use serde_json::Value;
use uuid::Uuid;

use crate::attempt::Attempt;
use crate::environment::{self, Resolved, Variables};
use crate::error::Error;
use crate::files::Files;
use crate::mask::Secrets;
use crate::processes::CHILD_ID;
use crate::runner::RunnerOptions;

/// The shell of `shell:`. By its path, so that an agent's `PATH` does not choose it.
const SHELL: &str = "/bin/sh";

/// An attempt, ready to be started.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The first argument as it was written; shown in messages.
    pub name: String,
    /// Where that was found.
    pub program: PathBuf,
    /// Without the first.
    pub arguments: Vec<String>,
    pub variables: Variables,
    pub cwd: Option<PathBuf>,
    /// A file, so that a child that never reads can hold up nobody.
    pub stdin: Option<PathBuf>,
    pub secrets: Secrets,
    pub child_id: String,
    pub files: Files,
}

/// What an attempt is given, as text.
#[derive(Debug)]
pub(crate) struct Texts {
    prompt: String,
    payload: String,
    argv: Vec<String>,
    environment: Resolved,
}

/// Reads what an attempt is given and fills in every template. Works with memory alone, and may take much of it for a moment.
pub(crate) fn render(attempt: &Attempt, node: &Variables) -> Result<Texts, Error> {
    let (given, work) = (attempt.given()?, attempt.work());
    let (run, zone) = (attempt.run.to_string(), zone(attempt));
    let values = values(attempt, &given.payload, &run, &zone);
    let mut budget = Budget::default();
    let prompt = prompt(&given.prompt, &values, &mut budget)?;
    let values = Values { prompt: Some(&prompt), ..values };
    let argv = argv(work.action_of(&attempt.command), &attempt.agent, &values, &mut budget)?;
    let environment = environment::resolve(work, node, &values, &mut budget)?;
    Ok(Texts { argv, environment, payload: given.payload.to_string(), prompt })
}

/// Makes the plan of an attempt.
pub(crate) fn plan(attempt: &Attempt, texts: Texts, options: &RunnerOptions) -> Result<Plan, Error> {
    let (work, state) = (attempt.work(), &options.state_dir);
    let Texts { prompt, payload, argv, environment: resolved } = texts;
    let child_id = Uuid::new_v4().simple().to_string();
    let mut secrets = resolved.secrets;
    secrets.push(child_id.clone().into_bytes());
    let secrets = Secrets::new(secrets);

    let mut argv = argv.into_iter();
    let name = argv.next().unwrap_or_default();
    let arguments: Vec<String> = argv.collect();
    let cwd = check_cwd(&name, work.cwd.as_deref())?;
    check_arguments(&name, &arguments)?;
    let path = resolved.variables.get(OsStr::new("PATH")).map(OsString::as_os_str).unwrap_or_default();
    let program = find_program(&name, path, cwd.as_deref(), &secrets)?;

    let files = Files::create(state, attempt)?;
    let payload_file = files.write("payload.json", payload.as_bytes())?;
    let stdin = match work.stdin {
        Stdin::None => None,
        Stdin::Prompt => Some(files.write("stdin", prompt.as_bytes())?),
        Stdin::Payload => Some(payload_file.clone()),
    };
    let mut variables = resolved.variables;
    variables.extend(own(attempt, &child_id, &payload_file, &files.path("result.json")));
    variables.extend(options.config.iter().map(|path| ("BELFRY_CONFIG".into(), path.into())));
    Ok(Plan { name, program, arguments, variables, cwd, stdin, secrets, child_id, files })
}

/// The prompt of an attempt with everything filled in, and its payload, as its program gets them.
pub fn build_input(attempt: &Attempt) -> Result<(String, Value), Error> {
    let given = attempt.given()?;
    let (run, zone) = (attempt.run.to_string(), zone(attempt));
    let values = values(attempt, &given.payload, &run, &zone);
    let prompt = prompt(&given.prompt, &values, &mut Budget::default())?;
    Ok((prompt, given.payload))
}

fn zone(attempt: &Attempt) -> Zone {
    let timezone = attempt.schedule_definition.options.timezone.as_deref();
    timezone.and_then(|name| Zone::get(name).ok()).unwrap_or_else(Zone::utc)
}

fn values<'a>(attempt: &'a Attempt, payload: &'a Value, run: &'a str, zone: &'a Zone) -> Values<'a> {
    Values {
        prompt: None,
        payload,
        command: &attempt.command,
        agent: &attempt.agent,
        schedule: &attempt.schedule,
        session: attempt.session.as_deref(),
        run,
        attempt: attempt.attempt,
        tick_at: attempt.tick_at,
        last_success_at: attempt.last_success_at,
        zone,
    }
}

fn prompt(prompt: &Prompt, values: &Values<'_>, budget: &mut Budget) -> Result<String, Error> {
    match prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Template(source) => {
            let template = Template::parse_prompt(source).map_err(|error| wrong("prompt", &error))?;
            template.render(values, budget).map_err(|error| wrong("prompt", &error))
        }
    }
}

/// An error of the template in one place of the definition.
pub(crate) fn wrong(place: &str, error: &dyn std::error::Error) -> Error {
    Error::Template { name: place.to_owned(), message: error.to_string() }
}

fn argv(
    action: &Action,
    agent: &str,
    values: &Values<'_>,
    budget: &mut Budget,
) -> Result<Vec<String>, Error> {
    match action {
        Action::Run(argv) if argv.is_empty() => Err(Error::Action("run has no program".into())),
        Action::Run(argv) => {
            let rendered = argv.iter().enumerate().map(|(i, source)| {
                let place = format!("run[{i}]");
                let template = Template::parse(source).map_err(|error| wrong(&place, &error))?;
                template.render(values, budget).map_err(|error| wrong(&place, &error))
            });
            rendered.collect()
        }
        Action::Shell(line) => {
            template::check_line(line).map_err(|error| wrong("shell", &error))?;
            Ok(vec![SHELL.into(), "-c".into(), line.clone()])
        }
        Action::Handler => Err(Error::Action(format!(
            "agent {agent} has no program to start: it is a handler of another program"
        ))),
    }
}

fn own(
    attempt: &Attempt,
    child_id: &str,
    payload: &Path,
    result: &Path,
) -> impl Iterator<Item = (OsString, OsString)> {
    let trace_id = attempt.trace_id.simple();
    let span_id = &Uuid::new_v4().simple().to_string()[..16];
    [
        ("BELFRY_RUN_ID", attempt.run.to_string().into()),
        ("BELFRY_ATTEMPT", attempt.attempt.to_string().into()),
        ("BELFRY_AGENT", attempt.agent.to_string().into()),
        ("BELFRY_SCHEDULE", attempt.schedule.to_string().into()),
        ("BELFRY_COMMAND", attempt.command.clone().into()),
        ("BELFRY_EPOCH", attempt.epoch.to_string().into()),
        ("BELFRY_TRACE_ID", trace_id.to_string().into()),
        ("TRACEPARENT", format!("00-{trace_id}-{span_id}-01").into()),
        ("BELFRY_PAYLOAD_FILE", payload.into()),
        ("BELFRY_RESULT_FILE", result.into()),
        (CHILD_ID, OsString::from(child_id)),
    ]
    .into_iter()
    .chain(attempt.session.as_ref().map(|session| ("BELFRY_SESSION", session.into())))
    .chain(attempt.tick_at.map(|at| ("BELFRY_TICK_AT", at.to_string().into())))
    .map(|(name, value)| (name.into(), value))
}

fn refused(program: &str, message: String) -> Error {
    Error::Spawn { program: show(program), message, retryable: false }
}

/// A program's name, fit for one line.
pub(crate) fn show(program: &str) -> String {
    belfry_core::text::bounded(&program.escape_debug().to_string(), 200).into_owned()
}

fn check_cwd(program: &str, cwd: Option<&str>) -> Result<Option<PathBuf>, Error> {
    let Some(cwd) = cwd else { return Ok(None) };
    let path = PathBuf::from(cwd);
    let problem = if !path.is_absolute() {
        "is not absolute".to_owned()
    } else {
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => return Ok(Some(path)),
            Ok(_) => "is not a directory".to_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => "does not exist".to_owned(),
            Err(error) => format!("cannot be used: {error}"),
        }
    };
    Err(refused(program, format!("its directory (cwd) {problem}{}", on_node(&show(cwd)))))
}

fn check_arguments(program: &str, arguments: &[String]) -> Result<(), Error> {
    if program.is_empty() {
        return Err(refused(program, "the program's name is empty".into()));
    }
    if program.contains('\0') {
        return Err(refused(program, "the program's name has a NUL byte in it".into()));
    }
    match arguments.iter().position(|argument| argument.contains('\0')) {
        Some(i) => Err(refused(program, format!("argument {} has a NUL byte in it", i + 1))),
        None => Ok(()),
    }
}

/// Looks a program up as the child would: a name without a slash in its `PATH`, any other from its directory.
fn find_program(name: &str, path: &OsStr, cwd: Option<&Path>, secrets: &Secrets) -> Result<PathBuf, Error> {
    let base = cwd.unwrap_or(Path::new(""));
    if name.contains('/') {
        let program = base.join(name);
        let checked = check_program(&program, &show(name));
        let place = place_of(name, &program, secrets);
        return checked.map(|()| program).map_err(|problem| refused(name, format!("{problem}{place}")));
    }
    let mut best = None;
    // An empty entry would mean the current directory; nobody wants that.
    for entry in path.as_bytes().split(|byte| *byte == b':').filter(|entry| !entry.is_empty()) {
        let program = base.join(OsStr::from_bytes(entry)).join(name);
        match check_program(&program, &show(name)) {
            Ok(()) => return Ok(program),
            Err(problem) if program.exists() => {
                best = best.or_else(|| Some(format!("{problem}{}", place_of(name, &program, secrets))));
            }
            Err(_) => {}
        }
    }
    let shown = || show(&secrets.mask_text(&path.to_string_lossy()));
    let problem = best.unwrap_or_else(|| format!("not found in PATH{}", on_node(&shown())));
    Err(refused(name, problem))
}

/// Names the place of a program at the end of an error, unless its configured name is that place. It may have been found in
/// a `PATH` that holds a secret.
pub(crate) fn place_of(name: &str, program: &Path, secrets: &Secrets) -> String {
    match name.starts_with('/') {
        true => String::new(),
        false => on_node(&show(&secrets.mask_text(&program.to_string_lossy()))),
    }
}

/// Whether a program, which an error calls by the name `shown`, can be executed.
fn check_program(program: &Path, shown: &str) -> Result<(), String> {
    match fs::metadata(program) {
        Ok(metadata) if metadata.is_dir() => Err(format!("{shown} is a directory")),
        Ok(_) if access(program, AccessFlags::X_OK).is_err() => {
            Err(format!("{shown} is not executable; chmod +x would make it so"))
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(format!("{shown} does not exist")),
        Err(error) => Err(format!("{shown} cannot be used: {error}")),
    }
}
