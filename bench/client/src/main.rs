//! Simulates thousands of MySQL clients in one thread, to generate load and to check that every byte arrives.
//!
//! Prints JSON objects, one per line. An error is one sentence on standard error, with exit code 1 (2: wrong usage).

#![forbid(unsafe_code)]

mod connection;
mod crowd;
mod failure;
mod gaps;
mod idle;
mod login;
mod new_connections;
mod nonce;
mod options;
mod packets;
mod poller;
mod question;
mod record;
mod response;
mod schedule;
mod slice;
mod slice_request;
mod slices;
mod slow;
mod splits;
mod statements;
mod target;

use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use crate::failure::Failure;
use crate::options::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.command) {
        Ok(result) => {
            if let Some(result) = result {
                println!("{result}");
            }
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the JSON to print at the end. None: it is already printed.
fn run(command: &Command) -> Result<Option<Value>, Failure> {
    allow_many_files();
    // Otherwise a pause takes up to 50 µs too long (prctl(2), PR_SET_TIMERSLACK).
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    match command {
        Command::Slices(options) => slices::run(options).map(|()| None),
        Command::Idle(options) => idle::run(options).map(Some),
        Command::Nonce(options) => nonce::run(options).map(Some),
        Command::Gaps(options) => gaps::run(options).map(Some),
        Command::Slow(options) => slow::run(options).map(Some),
    }
}

/// Raises the limit of open files to the hard limit. If this is not enough, opening a socket fails.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
