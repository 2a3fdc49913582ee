//! The keys of a schedule that say when it runs, as command-line options of the same names.

use belfry_time::{
    Anchor, Cron, Dst, Every, Fold, Gap, Jitter, SignedDuration, Timing, Window, Zone, parse_duration,
    parse_instant,
};
use clap::{Args, ValueEnum};

use crate::failure::Failure;

/// When something runs. Exactly one of `--cron`, `--every`, `--at`, `--after`.
#[derive(Debug, Default, Args)]
pub struct TimingArgs {
    /// Wall-clock times: five fields, or @hourly @daily @weekly @monthly @yearly
    #[arg(long, value_name = "EXPR", group = "kind", allow_hyphen_values = true)]
    pub cron: Option<String>,

    /// A distance: 90s, 1.5h, 1h30m; or hourly, daily, weekly, monthly
    #[arg(long, value_name = "DURATION", group = "kind", allow_hyphen_values = true)]
    pub every: Option<String>,

    /// One instant: RFC 3339, or a local date and time
    #[arg(long, value_name = "TIME", group = "kind", allow_hyphen_values = true)]
    pub at: Option<String>,

    /// One delay
    #[arg(long, value_name = "DURATION", group = "kind", allow_hyphen_values = true)]
    pub after: Option<String>,

    /// From where --every counts: the last run's end or start, or a grid since 1970
    #[arg(long, value_name = "ANCHOR", value_enum, requires = "every")]
    pub anchor: Option<AnchorArg>,

    /// Moves the grid of --anchor slot forward
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true)]
    pub phase: Option<String>,

    /// Only at these local times, for example 08:00-18:00 or 22:00-06:00
    #[arg(long, value_name = "HH:MM-HH:MM", allow_hyphen_values = true)]
    pub only_between: Option<String>,

    /// Not on these days, for example sat,sun
    #[arg(long, value_name = "DAYS", value_delimiter = ',', allow_hyphen_values = true)]
    pub not_on: Vec<String>,

    /// Delay each tick by up to this long, or by a share of the distance to the next (10%)
    #[arg(long, value_name = "DURATION|N%", allow_hyphen_values = true)]
    pub jitter: Option<String>,

    /// The schedule's name, which seeds its jitter
    #[arg(long, value_name = "AGENT/SCHEDULE", requires = "jitter")]
    pub name: Option<String>,

    /// What a fixed time of --cron does that the clocks skip
    #[arg(long, value_enum, default_value_t, requires = "cron")]
    pub dst_gap: GapArg,

    /// What a fixed time of --cron does that happens twice
    #[arg(long, value_enum, default_value_t, requires = "cron")]
    pub dst_fold: FoldArg,
}

/// `anchor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AnchorArg {
    /// The end of the last run
    Completion,
    /// The last tick
    Start,
    /// A grid since 1970-01-01T00:00Z
    Slot,
}

/// `dst_gap`.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum GapArg {
    /// It runs at the end of the gap
    #[default]
    Run,
    /// It does not run
    Skip,
}

/// `dst_fold`.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum FoldArg {
    /// It runs the first time
    #[default]
    First,
    /// It runs both times
    Both,
}

impl TimingArgs {
    /// Joins the options into a timing.
    pub fn timing(&self, zone: Zone) -> Result<Timing, Failure> {
        let builder = match (&self.cron, &self.every, &self.at, &self.after) {
            (Some(cron), None, None, None) => Timing::cron(Cron::parse(cron)?.with_dst(self.dst()), zone),
            (None, Some(every), None, None) => Timing::every(Every::parse(every)?, self.anchor()?, zone),
            (None, None, Some(at), None) => Timing::at(parse_instant(at, Some(&zone))?, zone),
            (None, None, None, Some(delay)) => Timing::after(parse_duration(delay)?, zone),
            _ => {
                return Err(Failure::Usage(
                    "exactly one of --cron, --every, --at, --after is needed".into(),
                ));
            }
        };
        let builder = match &self.jitter {
            Some(jitter) => builder.jitter(Jitter::parse(jitter)?, self.name.as_deref().unwrap_or_default()),
            None => builder,
        };
        Ok(builder.window(self.window()?).build()?)
    }

    fn anchor(&self) -> Result<Anchor, Failure> {
        match (self.anchor, &self.phase) {
            (None | Some(AnchorArg::Completion), None) => Ok(Anchor::Completion),
            (Some(AnchorArg::Start), None) => Ok(Anchor::Start),
            (Some(AnchorArg::Slot), None) => Ok(Anchor::Slot {
                phase: SignedDuration::ZERO,
            }),
            (Some(AnchorArg::Slot), Some(phase)) => Ok(Anchor::Slot {
                phase: parse_duration(phase)?,
            }),
            (_, Some(_)) => Err(Failure::Usage(
                "--phase moves a grid: it needs --anchor slot".into(),
            )),
        }
    }

    fn window(&self) -> Result<Window, Failure> {
        let window = Window::ALWAYS.not_on(&self.not_on)?;
        Ok(match &self.only_between {
            Some(between) => window.only_between(between)?,
            None => window,
        })
    }

    fn dst(&self) -> Dst {
        Dst {
            gap: match self.dst_gap {
                GapArg::Run => Gap::Run,
                GapArg::Skip => Gap::Skip,
            },
            fold: match self.dst_fold {
                FoldArg::First => Fold::First,
                FoldArg::Both => Fold::Both,
            },
        }
    }
}
