//! `tidevoy-envoy ENVOY [ARGUMENT...]` runs an Envoy as its child, and drains it before it stops: the main process of a
//! container or of a systemd unit. Envoy itself closes all connections at once when it gets SIGTERM.

mod admin;
mod drain;
mod supervisor;

use std::ffi::OsString;
use std::process::ExitCode;

const USAGE: &str = "\
Usage: tidevoy-envoy ENVOY [ARGUMENT...]

Runs the Envoy with these arguments. SIGTERM and SIGINT drain it: first it is not ready for new clients (end.wait), then
it accepts no more, and sessions end when they are idle; those that are left after end.timeout are closed. A second
signal stops it at once. All other signals are forwarded. The exit code is that of the Envoy, or 128 + the signal that
ended it.";

/// The exit code if the Envoy could not be started, as that of `env` and `nice`.
const CANNOT_RUN: u8 = 125;

fn main() -> ExitCode {
    let command: Vec<OsString> = std::env::args_os().skip(1).collect();
    match command.first() {
        None => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
        Some(first) if first == "--help" || first == "-h" => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Some(_) => {}
    }
    match supervisor::run(&command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("tidevoy-envoy: {error}");
            ExitCode::from(CANNOT_RUN)
        }
    }
}
