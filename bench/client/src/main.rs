//! Clients of a MySQL server, thousands in one thread: for load, and to see that every byte arrives.
//!
//! Prints JSON objects, one a line; what went wrong as one sentence on standard error, with exit code 1 (2: usage).

#![forbid(unsafe_code)]

mod connection;
mod crowd;
mod failure;
mod gaps;
mod idle;
mod login;
mod nonce;
mod options;
mod order;
mod packets;
mod poller;
mod question;
mod record;
mod response;
mod schedule;
mod slice;
mod slices;
mod slow;
mod splits;
mod statements;
mod target;
mod visits;

use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use crate::failure::Failure;
use crate::options::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.command) {
        Ok(found) => {
            if let Some(found) = found {
                println!("{found}");
            }
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// The JSON to print at the end; none if it was printed before.
fn run(command: &Command) -> Result<Option<Value>, Failure> {
    allow_many_files();
    // Else a pause takes 50 µs longer than asked for (prctl(2), PR_SET_TIMERSLACK).
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    match command {
        Command::Slices(options) => slices::run(options).map(|()| None),
        Command::Idle(options) => idle::run(options).map(Some),
        Command::Nonce(options) => nonce::run(options).map(Some),
        Command::Gaps(options) => gaps::run(options).map(Some),
        Command::Slow(options) => slow::run(options).map(Some),
    }
}

/// As many as the hard limit allows. Where that does not do, opening a socket says so.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
