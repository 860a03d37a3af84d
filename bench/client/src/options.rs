//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Simulates thousands of MySQL clients in one thread; prints JSON objects, one per line.
#[derive(Debug, Parser)]
#[command(name = "tidevoy-load", disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run timed slices of load: each line of standard input (JSON) requests one slice on one target
    Slices(Slices),
    /// Hold idle connections until standard input ends, then send one ping on each
    Idle(Idle),
    /// Run short sessions that check each byte of their answers
    Nonce(Nonce),
    /// Send small packets in pieces, with tiny pauses between them
    Gaps(Gaps),
    /// Read large results slowly
    Slow(Slow),
}

/// The server, and how to log in.
#[derive(Debug, Clone, Args)]
pub(crate) struct Server {
    /// HOST:PORT
    #[arg(long)]
    pub(crate) address: String,
    #[arg(long, value_enum, default_value_t = TlsMode::None)]
    pub(crate) tls: TlsMode,
    #[command(flatten)]
    pub(crate) account: Account,
}

/// The account, and the CA that checks servers.
#[derive(Debug, Clone, Args)]
pub(crate) struct Account {
    #[arg(long, default_value = "root")]
    pub(crate) user: String,
    /// For accounts of mysql_native_password
    #[arg(long, default_value = "")]
    pub(crate) password: String,
    /// Verify the server's certificate with these CAs (PEM file); without it, any certificate is accepted
    #[arg(long)]
    pub(crate) ca: Option<PathBuf>,
}

/// Where TLS begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TlsMode {
    /// No TLS
    None,
    /// Within MySQL's handshake
    Mysql,
    /// From the first byte on, before MySQL's handshake
    First,
}

/// One of several servers, and where TLS begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TargetAddress {
    pub(crate) address: String,
    pub(crate) tls: TlsMode,
}

impl TargetAddress {
    pub(crate) fn server(&self, account: &Account) -> Server {
        Server { address: self.address.clone(), tls: self.tls, account: account.clone() }
    }
}

impl FromStr for TargetAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, tls) = match text.split_once(',') {
            None => (text, TlsMode::None),
            Some((address, option)) => {
                let tls = option.strip_prefix("tls=").and_then(|mode| TlsMode::from_str(mode, false).ok());
                (address, tls.ok_or("HOST:PORT may be followed by ,tls=none, ,tls=mysql or ,tls=first")?)
            }
        };
        Ok(Self { address: address.into(), tls })
    }
}

#[derive(Debug, Args)]
pub(crate) struct Slices {
    /// HOST:PORT, or HOST:PORT,tls=none|mysql|first; requests name targets by their index in this list, from 0 on
    #[arg(long = "target", required = true)]
    pub(crate) targets: Vec<TargetAddress>,
    #[command(flatten)]
    pub(crate) account: Account,
    /// Connections to each target, logged in before the first slice
    #[arg(long)]
    pub(crate) connections: u32,
    /// Each {} becomes a random number, the same for all {} of one statement
    #[arg(long, default_value = "select 1")]
    pub(crate) statement: String,
    /// Random numbers range from 1 to this
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_number: u64,
    /// Seconds to wait for outstanding answers when a slice's time is over
    #[arg(long, default_value_t = 10.0, value_parser = positive)]
    pub(crate) patience: f64,
}

#[derive(Debug, Args)]
pub(crate) struct Idle {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) connections: u32,
    /// The highest number of new connections per second
    #[arg(long, value_parser = positive)]
    pub(crate) ramp: Option<f64>,
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
    /// The share of the sessions that end by a reset, most of them in the middle of an answer
    #[arg(long, default_value_t = 0.3, value_parser = share)]
    pub(crate) kill: f64,
    /// Seed for the random numbers, to repeat a run
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
    /// Seed for the random numbers, to repeat a run
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Slow {
    #[command(flatten)]
    pub(crate) server: Server,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) connections: u32,
    /// Bytes of each result, in rows of 1 KiB
    #[arg(long, value_parser = clap::value_parser!(u64).range(1024..))]
    pub(crate) bytes: u64,
    /// Seconds without reading
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub(crate) pause: f64,
    /// Seconds of slow reading after the pause
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub(crate) dribble: f64,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e9 => Ok(number),
        _ => Err("must be above 0 and at most 1e9".into()),
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
    fn numbers_out_of_range_are_rejected() {
        for text in ["0", "-1", "nan", "inf", "much"] {
            assert!(positive(text).is_err(), "{text}");
        }
        for text in ["-0.1", "1.1", "nan"] {
            assert!(share(text).is_err(), "{text}");
        }
        assert_eq!(positive("0.5"), Ok(0.5));
        assert_eq!(share("1"), Ok(1.0));
    }

    #[test]
    fn target_address_may_name_the_tls_mode() {
        let target = |tls| Ok(TargetAddress { address: "127.0.0.1:5001".into(), tls });
        assert_eq!("127.0.0.1:5001".parse(), target(TlsMode::None));
        assert_eq!("127.0.0.1:5001,tls=none".parse(), target(TlsMode::None));
        assert_eq!("127.0.0.1:5001,tls=mysql".parse(), target(TlsMode::Mysql));
        assert_eq!("127.0.0.1:5001,tls=first".parse(), target(TlsMode::First));
        for text in ["127.0.0.1:5001,", "127.0.0.1:5001,tls", "127.0.0.1:5001,tls=last", "127.0.0.1:5001,first"] {
            let message = text.parse::<TargetAddress>().expect_err(text);
            assert!(message.contains("tls=mysql"), "{message}");
        }
    }
}
