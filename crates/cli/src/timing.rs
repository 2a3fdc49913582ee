//! The keys of a schedule that say when it runs, as command-line options of the same names.

use belfry_time::{
    Anchor, Cron, Dst, ErrorKind, Every, Fold, Gap, Jitter, SignedDuration, Timing, Window, Zone,
    parse_duration,
};
use clap::{Args, ValueEnum};

use crate::failure::{Failure, InOption};
use crate::reading;

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
    #[arg(long, value_name = "ANCHOR", value_enum)]
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
    #[arg(long, value_name = "AGENT/SCHEDULE")]
    pub name: Option<String>,

    /// What a fixed time of --cron does that the clocks skip [default: run]
    #[arg(long, value_enum)]
    pub dst_gap: Option<GapArg>,

    /// What a fixed time of --cron does that happens twice [default: first]
    #[arg(long, value_enum)]
    pub dst_fold: Option<FoldArg>,
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
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum GapArg {
    /// It runs at the end of the gap
    Run,
    /// It does not run
    Skip,
}

/// `dst_fold`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FoldArg {
    /// It runs the first time
    First,
    /// It runs both times
    Both,
}

impl TimingArgs {
    /// Joins the options into a timing.
    pub fn timing(&self, zone: Zone) -> Result<Timing, Failure> {
        self.check_companions()?;
        let builder = match (&self.cron, &self.every, &self.at, &self.after) {
            (Some(cron), None, None, None) => {
                Timing::cron(Cron::parse(cron).in_option("--cron")?.with_dst(self.dst()), zone)
            }
            (None, Some(every), None, None) => {
                Timing::every(Every::parse(every).in_option("--every")?, self.anchor()?, zone)
            }
            (None, None, Some(at), None) => Timing::at(reading::local(at, "--at", &zone)?, zone),
            (None, None, None, Some(delay)) => {
                Timing::after(parse_duration(delay).in_option("--after")?, zone)
            }
            _ => {
                return Err(Failure::Usage("exactly one of --cron, --every, --at, --after is needed".into()));
            }
        };
        let builder = match &self.jitter {
            Some(jitter) => {
                let jitter = Jitter::parse(jitter).in_option("--jitter")?;
                builder.jitter(jitter, self.name.as_deref().unwrap_or_default())
            }
            None => builder,
        };
        builder.window(self.window()?).build().map_err(|error| {
            let option = match error.kind() {
                ErrorKind::Phase => "--phase",
                ErrorKind::Jitter => "--jitter",
                _ if self.only_between.is_some() => "--only-between",
                _ if self.not_on.is_empty() => "--cron",
                _ => "--not-on",
            };
            Failure::Time(option, error)
        })
    }

    /// Refuses options that would do nothing.
    fn check_companions(&self) -> Result<(), Failure> {
        let slot = self.anchor == Some(AnchorArg::Slot);
        let idle = [
            (self.anchor.is_some() && self.every.is_none(), "--anchor needs --every"),
            (self.phase.is_some() && !slot, "--phase moves a grid: it needs --anchor slot"),
            (self.dst_gap.is_some() && self.cron.is_none(), "--dst-gap needs --cron"),
            (self.dst_fold.is_some() && self.cron.is_none(), "--dst-fold needs --cron"),
            (self.name.is_some() && self.jitter.is_none(), "--name seeds the jitter: it needs --jitter"),
        ];
        match idle.iter().find(|(idle, _)| *idle) {
            Some((_, message)) => Err(Failure::Usage((*message).into())),
            None => Ok(()),
        }
    }

    fn anchor(&self) -> Result<Anchor, Failure> {
        Ok(match (self.anchor, &self.phase) {
            (None | Some(AnchorArg::Completion), _) => Anchor::Completion,
            (Some(AnchorArg::Start), _) => Anchor::Start,
            (Some(AnchorArg::Slot), None) => Anchor::Slot { phase: SignedDuration::ZERO },
            (Some(AnchorArg::Slot), Some(phase)) => {
                Anchor::Slot { phase: parse_duration(phase).in_option("--phase")? }
            }
        })
    }

    fn window(&self) -> Result<Window, Failure> {
        let window = Window::ALWAYS.not_on(&self.not_on).in_option("--not-on")?;
        match &self.only_between {
            Some(between) => window.only_between(between).in_option("--only-between"),
            None => Ok(window),
        }
    }

    fn dst(&self) -> Dst {
        Dst {
            gap: match self.dst_gap {
                None | Some(GapArg::Run) => Gap::Run,
                Some(GapArg::Skip) => Gap::Skip,
            },
            fold: match self.dst_fold {
                None | Some(FoldArg::First) => Fold::First,
                Some(FoldArg::Both) => Fold::Both,
            },
        }
    }
}
