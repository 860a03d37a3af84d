//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Clients of a MySQL server, thousands in one thread; prints one JSON object.
#[derive(Debug, Parser)]
#[command(name = "tidevoy-load", disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Each connection asks the same again and again
    Select(Select),
    /// Connections that do nothing until standard input ends; then each asks once
    Idle(Idle),
    /// New connections at a fixed rate: login, one statement, end
    Churn(Churn),
    /// Short sessions that know what each byte of their answers must be
    Nonce(Nonce),
    /// Small packets in pieces, with tiny pauses between them
    Gaps(Gaps),
    /// Large results for clients that read slowly
    Slow(Slow),
}

/// Who is asked, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct Server {
    /// HOST:PORT
    #[arg(long)]
    pub(crate) address: String,
    #[arg(long, default_value = "root")]
    pub(crate) user: String,
    /// For accounts of mysql_native_password
    #[arg(long, default_value = "")]
    pub(crate) password: String,
    #[arg(long, value_enum, default_value_t = TlsMode::None)]
    pub(crate) tls: TlsMode,
    /// Check the server's certificate by these authorities (PEM); without it, any will do
    #[arg(long)]
    pub(crate) ca: Option<PathBuf>,
}

/// Where TLS begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TlsMode {
    /// Nowhere
    None,
    /// Within MySQL's handshake
    Mysql,
    /// With the first byte, and MySQL inside
    First,
}

#[derive(Debug, Args)]
pub(crate) struct Select {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) connections: u32,
    #[arg(long, value_parser = positive)]
    pub(crate) seconds: f64,
    /// Statements per second of all together; latency counts from when each was due
    #[arg(long, value_parser = positive)]
    pub(crate) rate: Option<f64>,
    #[arg(long, default_value = "select 1")]
    pub(crate) statement: String,
}

#[derive(Debug, Args)]
pub(crate) struct Idle {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) connections: u32,
    /// New ones per second at most
    #[arg(long, value_parser = positive)]
    pub(crate) ramp: Option<f64>,
}

#[derive(Debug, Args)]
pub(crate) struct Churn {
    #[command(flatten)]
    pub(crate) server: Server,
    /// New connections per second
    #[arg(long, value_parser = positive)]
    pub(crate) rate: f64,
    #[arg(long, value_parser = positive)]
    pub(crate) seconds: f64,
    #[arg(long, default_value = "select 1")]
    pub(crate) statement: String,
}

#[derive(Debug, Args)]
pub(crate) struct Nonce {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) sessions: u32,
    /// Sessions at a time
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) parallel: u32,
    /// The share of the sessions that end by a reset, most of them within an answer
    #[arg(long, default_value_t = 0.3, value_parser = share)]
    pub(crate) kill: f64,
    /// The same dice again
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Gaps {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) statements: u64,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) connections: u32,
    /// The same dice again
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Slow {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) connections: u32,
    /// Of each result, in rows of 1 KiB
    #[arg(long, value_parser = clap::value_parser!(u64).range(1024..))]
    pub(crate) bytes: u64,
    /// Seconds without reading
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub(crate) pause: f64,
    /// Seconds of reading little behind that
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub(crate) dribble: f64,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e9 => Ok(number),
        _ => Err("must be a number above 0".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("must be a number from 0 to 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        for text in ["0", "-1", "nan", "inf", "much"] {
            assert!(positive(text).is_err(), "{text}");
        }
        for text in ["-0.1", "1.1", "nan"] {
            assert!(share(text).is_err(), "{text}");
        }
        assert_eq!(positive("0.5"), Ok(0.5));
        assert_eq!(share("1"), Ok(1.0));
    }
}
