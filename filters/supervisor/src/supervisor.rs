//! Runs Envoy as a child: forwards signals, reaps processes, and drains Envoy when it is to stop.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::process::{self, Pid, Resource, Signal, WaitOptions, WaitStatus};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::admin::{AdminError, AdminPort};
use crate::drain::{Action, Drain, StopReason};

const ADMIN_OPTION: &str = "--admin-address-path";
/// Time between two polls of an Envoy that starts or stops.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A running Envoy is not polled once the address of its admin port is known.
const NO_POLL_INTERVAL: Duration = Duration::from_secs(3600);
/// How long Envoy may take to exit after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub(crate) enum SupervisorError {
    #[error("cannot run {}: {}", .0.display(), .1)]
    CannotRun(OsString, io::Error),
    #[error("cannot handle signals: {0}")]
    NoSignals(io::Error),
    #[error(
        "cannot create a directory for the address of Envoy's admin port: {0} (TMPDIR names another place, or give \
         Envoy --admin-address-path)"
    )]
    NoDirectory(io::Error),
    #[error("cannot remove {}, which has the address of another Envoy's admin port: {}", .0.display(), .1)]
    StaleAddress(PathBuf, io::Error),
    #[error("cannot wait for Envoy: {0}")]
    NoWait(rustix::io::Errno),
}

/// What the supervisor is doing.
enum Stage {
    Running,
    Draining { drain: Drain, since: Instant },
    Stopping { since: Instant },
}

/// Runs `command` until it ends. Returns its exit code.
///
/// # Errors
/// The command could not be started.
pub(crate) fn run(command: &[OsString]) -> Result<u8, SupervisorError> {
    raise_file_limit();
    let signals = receive_signals().map_err(SupervisorError::NoSignals)?;
    let mut child = Command::new(&command[0]);
    child.args(&command[1..]);
    let (admin, _directory) = prepare_admin_port(command, &mut child)?;
    // In its own process group, because Ctrl-C in a terminal signals the whole group, and Envoy would not drain.
    child.process_group(0);
    stop_with_parent(&mut child);
    let child = child.spawn();
    let child = child.map_err(|error| SupervisorError::CannotRun(command[0].clone(), error))?;
    Supervisor { envoy: Pid::from_child(&child), admin, stage: Stage::Running }.supervise(&signals)
}

struct Supervisor {
    envoy: Pid,
    admin: AdminPort,
    stage: Stage,
}

impl Supervisor {
    fn supervise(mut self, signals: &Receiver<i32>) -> Result<u8, SupervisorError> {
        let mut next_poll = Instant::now();
        loop {
            // Absolute, so that many signals do not postpone it.
            match signals.recv_timeout(next_poll.saturating_duration_since(Instant::now())) {
                Ok(SIGCHLD) => {
                    if let Some(code) = self.reap().map_err(SupervisorError::NoWait)? {
                        return Ok(code);
                    }
                }
                Ok(signal @ (SIGTERM | SIGINT)) => {
                    self.on_stop_signal(signal);
                    next_poll = Instant::now();
                }
                Ok(signal) => self.signal_envoy(signal),
                Err(_) => {
                    self.advance();
                    next_poll = Instant::now() + self.poll_interval();
                }
            }
        }
    }

    /// Also reads the address of the admin port early, while its file is certainly there.
    fn poll_interval(&mut self) -> Duration {
        match self.stage {
            Stage::Running if self.admin.find_address().is_ok() => NO_POLL_INTERVAL,
            Stage::Running | Stage::Draining { .. } | Stage::Stopping { .. } => POLL_INTERVAL,
        }
    }

    /// Reaps all processes that have ended. As the first process of a container, the supervisor inherits orphans.
    /// Returns the exit code of Envoy, if it has ended.
    fn reap(&self) -> rustix::io::Result<Option<u8>> {
        while let Some((pid, status)) = process::wait(WaitOptions::NOHANG)? {
            if pid == self.envoy && (status.exited() || status.signaled()) {
                return Ok(Some(exit_code(status)));
            }
        }
        Ok(None)
    }

    fn on_stop_signal(&mut self, signal: i32) {
        if let Stage::Running = self.stage {
            log(&format!("signal {signal}: draining Envoy; a second signal stops it at once"));
            self.stage = Stage::Draining { drain: Drain::default(), since: Instant::now() };
        } else {
            self.stop(&StopReason::Forced);
        }
    }

    /// Does what is due in a drain.
    fn advance(&mut self) {
        match &mut self.stage {
            Stage::Running => {}
            Stage::Draining { drain, since } => {
                if let Some(reason) = advance_drain(drain, &mut self.admin, since.elapsed()) {
                    self.stop(&reason);
                }
            }
            Stage::Stopping { since } => {
                if since.elapsed() >= EXIT_TIMEOUT {
                    log("Envoy has not stopped; killing it");
                    self.stage = Stage::Stopping { since: Instant::now() };
                    self.signal_envoy(Signal::KILL.as_raw());
                }
            }
        }
    }

    fn stop(&mut self, reason: &StopReason) {
        log(&reason.to_string());
        self.stage = Stage::Stopping { since: Instant::now() };
        self.signal_envoy(SIGTERM);
    }

    fn signal_envoy(&self, signal: i32) {
        // Envoy may just have ended. Then SIGCHLD follows.
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = process::kill_process(self.envoy, signal);
        }
    }
}

/// Does the next step of a drain. Some: Envoy must be stopped.
fn advance_drain(drain: &mut Drain, admin: &mut AdminPort, now: Duration) -> Option<StopReason> {
    let result = match drain.next(now) {
        Action::Stop(reason) => return Some(reason),
        Action::RequestDrain => admin.request_drain().map(|()| drain.on_requested(now)),
        Action::ReadGauges => admin.gauges().map(|gauges| drain.on_gauges(now, gauges)),
        Action::CloseListeners => admin.close_listeners().map(|()| {
            drain.on_listeners_closed();
            log(&format!("Envoy closes its ports; clients that are left: {}", drain.clients()));
        }),
    };
    match result {
        Ok(()) => None,
        // Envoy has no admin port, or is still starting, so that it has no clients.
        Err(error @ AdminError::NoAddress(_)) => Some(StopReason::AdminFails(error.to_string())),
        Err(error) => drain.on_failure(now, &error),
    }
}

fn log(text: &str) {
    eprintln!("tidevoy-envoy: {text}");
}

/// Makes Envoy get SIGTERM if the supervisor dies. Otherwise it would keep its ports, and share them with the Envoy of
/// the next supervisor.
fn stop_with_parent(child: &mut Command) {
    let parent = process::getpid();
    let set = move || {
        process::set_parent_process_death_signal(Some(Signal::TERM))?;
        // The supervisor may have died before this call.
        if process::getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: the closure only makes system calls. It allocates nothing.
    unsafe { child.pre_exec(set) };
}

/// Envoy needs two open files per session, so this raises the soft limit to the hard limit.
fn raise_file_limit() {
    let limit = process::getrlimit(Resource::Nofile);
    let _ = process::setrlimit(Resource::Nofile, process::Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Receives signals by handlers, since Envoy would inherit blocked signals. A thread passes them on.
fn receive_signals() -> io::Result<Receiver<i32>> {
    let mut signals = Signals::new([SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2])?;
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if sender.send(signal).is_err() {
                break;
            }
        }
    })?;
    Ok(receiver)
}

/// Makes Envoy write the address of its admin port to a file, in a new directory unless the command itself names a file.
/// The directory exists as long as the second value.
fn prepare_admin_port(
    command: &[OsString],
    child: &mut Command,
) -> Result<(AdminPort, Option<TempDir>), SupervisorError> {
    if let Some(file) = admin_address_path(command) {
        // The address in it may be that of another Envoy by now.
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(SupervisorError::StaleAddress(file, error));
            }
            _ => return Ok((AdminPort::new(file), None)),
        }
    }
    let directory = tempfile::Builder::new().prefix("tidevoy-envoy-").tempdir();
    let directory = directory.map_err(SupervisorError::NoDirectory)?;
    let admin = AdminPort::new(directory.path().join("admin"));
    child.arg(ADMIN_OPTION).arg(admin.address_file());
    Ok((admin, Some(directory)))
}

/// The file that the command itself names for the address of the admin port.
fn admin_address_path(command: &[OsString]) -> Option<PathBuf> {
    let mut arguments = command.iter().map(OsString::as_os_str);
    while let Some(argument) = arguments.next() {
        if argument == ADMIN_OPTION {
            return arguments.next().map(PathBuf::from);
        }
        let value = argument.to_str().and_then(|text| text.strip_prefix(ADMIN_OPTION)?.strip_prefix('='));
        if let Some(value) = value {
            return Some(PathBuf::from(OsStr::new(value)));
        }
    }
    None
}

/// The exit code as a shell reports it.
fn exit_code(status: WaitStatus) -> u8 {
    let signal = || status.terminating_signal().map(|signal| 128 + signal);
    let code = status.exit_status().or_else(signal).unwrap_or(1);
    u8::try_from(code).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admin_address_path_of_the_command_is_used() {
        let path = |command: &[&str]| {
            let command: Vec<OsString> = command.iter().map(OsString::from).collect();
            admin_address_path(&command)
        };
        assert_eq!(path(&["envoy", ADMIN_OPTION, "/run/a"]), Some(PathBuf::from("/run/a")));
        assert_eq!(path(&["envoy", "--admin-address-path=/run/a", "-l", "info"]), Some(PathBuf::from("/run/a")));
        assert_eq!(path(&["envoy", "--config-path", "/etc/a"]), None);
        assert_eq!(path(&["envoy", ADMIN_OPTION]), None);
    }
}
