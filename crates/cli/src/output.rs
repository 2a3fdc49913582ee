//! The global options on output, and what they mean.

use clap::{Args, ValueEnum};

use crate::failure::{Failure, InOption};

/// How results are printed. Data goes to standard output, everything else to standard error.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Output {
    /// How to print results
    #[arg(short = 'o', long = "output", value_name = "FORMAT", value_enum, default_value_t, global = true)]
    pub format: Format,

    /// Time zone, an IANA name such as Europe/London [default: the host's]
    #[arg(long, value_name = "ZONE", global = true)]
    pub tz: Option<String>,

    /// Never use colours; they are used on terminals only, and not where NO_COLOR is set
    #[arg(long, global = true)]
    pub no_color: bool,
}

/// Formats for results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// A table for people
    #[default]
    Table,
    /// One JSON document
    Json,
    /// One JSON document a line
    Jsonl,
}

impl Output {
    /// Applies `--no-color` to everything that is printed from here on.
    pub fn set_colours(&self) {
        if self.no_color {
            anstream::ColorChoice::Never.write_global();
        }
    }

    /// The zone that was asked for, or the host's; UTC where the host names none.
    pub fn zone(&self) -> Result<belfry_time::Zone, Failure> {
        match &self.tz {
            Some(name) => belfry_time::Zone::get(name).in_option("--tz"),
            None => Ok(host_zone()),
        }
    }
}

/// The host's time zone; UTC where it names none.
pub fn host_zone() -> belfry_time::Zone {
    jiff::tz::TimeZone::try_system().map_or_else(|_| belfry_time::Zone::utc(), belfry_time::Zone::from_jiff)
}

/// A table without lines that fits the terminal.
pub fn table(header: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
    table.set_header(header.to_vec());
    for (column, name) in table.column_iter_mut().zip(header) {
        column.set_padding((0, 2));
        // In a narrow terminal names and notes are broken, times are not.
        if !["ZONE", "NOTE"].contains(name) {
            column.set_constraint(comfy_table::ColumnConstraint::ContentWidth);
        }
    }
    table
}
