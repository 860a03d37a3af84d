//! The command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use serde::Serialize;

/// Replays captured traffic on a server, and compares results
#[derive(Debug, Parser)]
#[command(name = "tidevoy-replay", disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the statements of a capture or of a slow log on a server
    Run(Box<RunOptions>),
    /// Compare the results of two captures or replays of the same statements
    Compare(CompareOptions),
}

#[derive(Debug, Args)]
pub(crate) struct RunOptions {
    #[command(flatten)]
    pub(crate) input: InputOptions,
    #[command(flatten)]
    pub(crate) target: TargetOptions,
    /// Directory for the results; it is created
    #[arg(long, required_unless_present = "dry_run")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) pace: PaceOptions,
    #[command(flatten)]
    pub(crate) selection: SelectionOptions,
    /// Connections at the same time; at the limit, a new session ends the one that has been idle longest
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_connections: u32,
    /// Reads that run at the same time; without it, as many as connections
    #[arg(long, requires = "reads_only", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_running: Option<u32>,
    /// Seconds that a statement may take; then its connection is closed
    #[arg(long, default_value_t = 300.0, value_parser = seconds)]
    pub(crate) timeout: f64,
    /// Read the input and say what a replay would do, without connecting
    #[arg(long, conflicts_with = "resume")]
    pub(crate) dry_run: bool,
    /// Continue the replay whose output directory this is
    #[arg(long)]
    pub(crate) resume: bool,
    /// Print the summary as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InputOptions {
    /// Directories of captures, or directories above them
    #[arg(required_unless_present = "slow_log")]
    pub(crate) directories: Vec<PathBuf>,
    /// A slow log of TiDB instead of a capture; may be repeated
    #[arg(long, conflicts_with = "directories")]
    pub(crate) slow_log: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TargetOptions {
    /// HOST:PORT of the server
    #[arg(long, required_unless_present = "dry_run", default_value = "", hide_default_value = true)]
    pub(crate) target: String,
    #[arg(long, required_unless_present = "dry_run", default_value = "", hide_default_value = true)]
    pub(crate) user: String,
    /// File with the password; without it, there is none
    #[arg(long)]
    pub(crate) password_file: Option<PathBuf>,
    /// Use TLS, and verify the server's certificate and name with these CAs (PEM)
    #[arg(long)]
    pub(crate) ca_file: Option<PathBuf>,
    /// Use TLS, and accept any certificate
    #[arg(long, conflicts_with = "ca_file")]
    pub(crate) tls_insecure: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PaceOptions {
    /// How many times as fast as captured
    #[arg(long, default_value_t = 1.0, value_parser = speed)]
    pub(crate) speed: f64,
    /// As fast as possible; only the order within each session is kept
    #[arg(long, conflicts_with = "speed")]
    pub(crate) unbounded: bool,
    /// Do not record the results of the first records, so many or of so many seconds (as in 10s)
    #[arg(long, default_value = "0")]
    pub(crate) warm_up: WarmUp,
}

#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct SelectionOptions {
    /// Leave out all that may write
    #[arg(long)]
    pub(crate) reads_only: bool,
    /// Only sessions of these users, separated by commas; needs a capture with results
    #[arg(long, value_delimiter = ',')]
    pub(crate) users: Vec<String>,
    /// Only statements in these databases, separated by commas; needs a capture with results
    #[arg(long, value_delimiter = ',')]
    pub(crate) databases: Vec<String>,
    /// Only what began at this time or later (RFC 3339, as 2026-11-27T22:00:00Z)
    #[arg(long, value_parser = time)]
    #[serde(skip)]
    pub(crate) from: Option<i64>,
    /// Only what began before this time
    #[arg(long, value_parser = time)]
    #[serde(skip)]
    pub(crate) to: Option<i64>,
}

#[derive(Debug, Args)]
pub(crate) struct CompareOptions {
    /// The results that are taken as correct: a capture, or a replay on the old server
    pub(crate) old: PathBuf,
    /// The results of a replay on the new server
    pub(crate) new: PathBuf,
    /// Write the comparison to this file instead of standard output
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

/// The beginning of a replay, of which results are not recorded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum WarmUp {
    Statements(u64),
    /// By the times of the capture.
    Captured(Duration),
}

impl FromStr for WarmUp {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "must be a number of statements, or of seconds as in 10s";
        match text.strip_suffix('s') {
            Some(number) => match number.parse() {
                Ok(number) => Duration::try_from_secs_f64(number).map(Self::Captured).map_err(|_| wrong),
                Err(_) => Err(wrong),
            },
            None => text.parse().map(Self::Statements).map_err(|_| wrong),
        }
    }
}

fn speed(text: &str) -> Result<f64, &'static str> {
    let speed = text.parse::<f64>().ok().filter(|speed| (0.001..=1000.0).contains(speed));
    speed.ok_or("must be a number from 0.001 to 1000")
}

fn seconds(text: &str) -> Result<f64, &'static str> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds.ok_or("must be a number of seconds from 0.001 to 1000000")
}

fn time(text: &str) -> Result<i64, &'static str> {
    traffic_files::parse_rfc3339(text.as_bytes()).ok_or("must be a time as 2026-11-27T22:00:00Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    fn error(arguments: &str) -> Option<ErrorKind> {
        Cli::try_parse_from(arguments.split(' ')).err().map(|error| error.kind())
    }

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_is_needed_depends_on_the_kind_of_run() {
        let target = "--target localhost:4000 --user root --output out";
        assert_eq!(error(&format!("x run capture {target}")), None);
        assert_eq!(error(&format!("x run --slow-log slow.log {target} --unbounded --reads-only")), None);
        assert_eq!(error("x run capture --dry-run"), None);
        assert_eq!(error("x compare a b"), None);
        assert_eq!(error(&format!("x run {target}")), Some(ErrorKind::MissingRequiredArgument));
        assert_eq!(error("x run capture --target a:1 --user b"), Some(ErrorKind::MissingRequiredArgument));
        assert_eq!(error("x run capture --user root --output out"), Some(ErrorKind::MissingRequiredArgument));
        let conflicts = ["--slow-log slow.log", "--unbounded --speed 2", "--ca-file a --tls-insecure"];
        for conflict in conflicts {
            assert_eq!(error(&format!("x run capture {target} {conflict}")), Some(ErrorKind::ArgumentConflict));
        }
        for wrong in ["--speed 0", "--speed x", "--warm-up x", "--from yesterday", "--max-connections 0", "--timeout 0"]
        {
            assert_eq!(error(&format!("x run capture {target} {wrong}")), Some(ErrorKind::ValueValidation), "{wrong}");
        }
    }

    #[test]
    fn warm_up_is_a_number_of_statements_or_seconds() {
        assert_eq!("20".parse(), Ok(WarmUp::Statements(20)));
        assert_eq!("1.5s".parse(), Ok(WarmUp::Captured(Duration::from_millis(1500))));
        for wrong in ["", "s", "-1s", "1.5", "infs"] {
            assert!(wrong.parse::<WarmUp>().is_err(), "{wrong}");
        }
    }
}
