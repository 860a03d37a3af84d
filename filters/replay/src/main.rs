//! `tidevoy-replay` replays captured traffic on a server, and compares results.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage.

#![forbid(unsafe_code)]

mod budget;
mod checkpoint;
mod compare;
mod connection;
mod context;
mod dry_run;
mod files;
mod input;
mod login;
mod lost_transaction;
mod options;
mod prepared;
mod reads;
mod recorder;
mod replay;
mod response;
mod running;
mod selection;
mod session;
mod session_state;
mod sessions;
mod skip;
mod slow_log;
mod stop;
mod target;
#[cfg(test)]
mod test_records;
mod totals;

use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::options::{Cli, Command, RunOptions};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(options) => run(&options),
        Command::Compare(options) => compare::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidevoy-replay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &RunOptions) -> Result<(), String> {
    if options.dry_run {
        let found = dry_run::run(options).map_err(|error| error.to_string())?;
        return print(&found, || found.text(), options.json);
    }
    allow_many_files();
    let directory = options.output.as_deref().ok_or("--output is missing")?;
    let summary = replay::run(options, directory).map_err(|error| error.to_string())?;
    print(&summary, || summary.totals.text(), options.json)?;
    summary.error.map_or(Ok(()), Err)
}

fn print(value: &impl Serialize, text: impl FnOnce() -> String, is_json: bool) -> Result<(), String> {
    let output = if is_json { serde_json::to_string(value).map_err(|error| error.to_string())? } else { text() };
    println!("{output}");
    Ok(())
}

/// Raises the limit of open files to the hard limit. If that is not enough, connections fail.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
