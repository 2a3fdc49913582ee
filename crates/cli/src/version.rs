//! `belfry version` and `belfry completions`: about the binary itself.

use clap::{Args, CommandFactory};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::reading;

/// Show the version
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry version
  belfry version -o json")]
pub struct Version {}

#[derive(Serialize)]
struct About {
    version: &'static str,
    os: &'static str,
    arch: &'static str,
}

impl Version {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let about = About {
            version: env!("CARGO_PKG_VERSION"),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
        };
        match output.format {
            Format::Table => {
                reading::print_text(&format!("belfry {} ({} {})\n", about.version, about.os, about.arch))
            }
            format => reading::print_item(format, &about),
        }
    }
}

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry completions bash > ~/.local/share/bash-completion/completions/belfry
  belfry completions zsh > ~/.zfunc/_belfry
  belfry completions fish > ~/.config/fish/completions/belfry.fish")]
pub struct Completions {
    /// Which shell
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

impl Completions {
    pub fn run(&self) -> Result<(), Failure> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut crate::Cli::command(), "belfry", &mut text);
        reading::print_text(&String::from_utf8_lossy(&text))
    }
}
