//! How a command ends when it does not end well: one message on standard error, and an exit code.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use belfry_store as store;

use crate::terminal;
use crate::words::harmless;

/// How long the message may take.
const TOLD_WITHIN: Duration = Duration::from_secs(2);

/// Why a command stopped.
#[derive(Debug)]
pub enum Failure {
    /// What the user wrote is wrong. Exit code 2.
    Usage(String),
    /// A time, an interval, a zone … is wrong, in the option named. Exit code 2.
    Time(&'static str, belfry_time::Error),
    /// The files are wrong, as it was told already. Exit code 2.
    Config(belfry_config::Errors),
    /// What was written is wrong, as it was told with its places. Exit code 2.
    Report(String),
    /// What was asked for is not there. Exit code 3.
    NotFound(String),
    /// The server, or the owner of the store, does not allow it. Exit code 4.
    Denied(String),
    /// The store failed. Exit code 5.
    Store(belfry_store::Error),
    /// There is nobody to talk to. Exit code 5.
    Unreachable(String),
    /// A run that was waited for has failed. Exit code 1.
    Run(String),
    /// It took too long. Exit code 6.
    Timeout(String),
    /// Reading or writing failed.
    Io(io::Error),
}

impl Failure {
    /// Says it once and gives the exit code.
    pub fn report(&self) -> ExitCode {
        let (message, code) = match self {
            Failure::Usage(message) => (message.clone(), 2),
            Failure::Time(option, error) => {
                let underlined =
                    error.underline().map(|text| format!("\n\n  {}\n", text.replace('\n', "\n  ")));
                // The errors of the two most common ones say what they are about.
                let option = if ["--cron", "--every"].contains(option) {
                    String::new()
                } else {
                    format!("{option}: ")
                };
                (format!("{option}{error}{}", underlined.unwrap_or_default()), 2)
            }
            Failure::Config(errors) => {
                let _ = writeln!(terminal::stderr(), "{}", errors.render(true));
                return ExitCode::from(2);
            }
            Failure::Report(report) => {
                let style = anstyle::AnsiColor::Red.on_default().bold();
                for line in harmless(report).lines() {
                    let _ = match line.strip_prefix("error") {
                        Some(rest) => writeln!(terminal::stderr(), "{style}error{style:#}{rest}"),
                        None => writeln!(terminal::stderr(), "{line}"),
                    };
                }
                return ExitCode::from(2);
            }
            Failure::NotFound(message) => (message.clone(), 3),
            Failure::Denied(message) => (message.clone(), 4),
            // Two servers on one file are a mistake, not an outage.
            Failure::Store(error @ (store::Error::InUse { .. } | store::Error::Held { .. })) => {
                (error.to_string(), 2)
            }
            Failure::Store(error @ store::Error::Unsafe { .. }) => (error.to_string(), 2),
            Failure::Store(error @ store::Error::OtherUser { .. }) => (error.to_string(), 4),
            Failure::Store(error) => (error.to_string(), 5),
            Failure::Unreachable(message) => (message.clone(), 5),
            Failure::Run(message) => (message.clone(), 1),
            Failure::Timeout(message) => (message.clone(), 6),
            // The reader has seen enough, as `head` does: that is no failure.
            Failure::Io(error) if error.kind() == io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
            Failure::Io(error) => (format!("cannot read or write: {error}"), 5),
        };
        let style = anstyle::AnsiColor::Red.on_default().bold();
        let words = format!("{style}error:{style:#} {}", harmless(&message));
        // Where standard error is closed there is nobody left to tell, and where nobody reads it, nobody is waited for.
        let (told, heard) = mpsc::channel::<()>();
        let spawned = std::thread::Builder::new().spawn(move || {
            let _ = writeln!(terminal::stderr(), "{words}");
            drop(told);
        });
        if spawned.is_ok() {
            let _ = heard.recv_timeout(TOLD_WITHIN);
        }
        ExitCode::from(code)
    }
}

/// Names the option that a wrong time came from.
pub trait InOption<T> {
    /// `--from`, say.
    fn in_option(self, option: &'static str) -> Result<T, Failure>;
}

impl<T> InOption<T> for Result<T, belfry_time::Error> {
    fn in_option(self, option: &'static str) -> Result<T, Failure> {
        self.map_err(|error| Failure::Time(option, error))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Io(error)
    }
}

impl From<belfry_store::Error> for Failure {
    fn from(error: belfry_store::Error) -> Failure {
        Failure::Store(error)
    }
}

impl From<belfry_config::Errors> for Failure {
    fn from(errors: belfry_config::Errors) -> Failure {
        Failure::Config(errors)
    }
}

impl From<belfry::Error> for Failure {
    fn from(error: belfry::Error) -> Failure {
        match error {
            belfry::Error::Store(error) => Failure::Store(error),
            belfry::Error::NotFound { .. }
            | belfry::Error::NoChat { .. }
            | belfry::Error::NoNode { .. }
            | belfry::Error::NoSession { .. } => Failure::NotFound(error.to_string()),
            belfry::Error::QueueFull { .. } | belfry::Error::Stale { .. } => Failure::Run(error.to_string()),
            belfry::Error::Draining => Failure::Unreachable(error.to_string()),
            belfry::Error::Shutdown { .. } => Failure::Timeout(error.to_string()),
            other => Failure::Usage(other.to_string()),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::Io(error.into())
    }
}
