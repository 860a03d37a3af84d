//! Threads that check certificate files for changes, as long as a configuration is in use.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tls::TlsError;

/// None: the path is empty, so it is not configured.
pub(crate) fn non_empty_path(path: &Path) -> Option<&Path> {
    (!path.as_os_str().is_empty()).then_some(path)
}

/// Time between two checks, each of which takes a few `stat` calls.
const INTERVAL: Duration = Duration::from_millis(250);

/// The threads that may still run. Only Envoy's main thread uses this list.
static THREADS: Mutex<Vec<(Arc<StopSignal>, JoinHandle<()>)>> = Mutex::new(Vec::new());

fn threads() -> MutexGuard<'static, Vec<(Arc<StopSignal>, JoinHandle<()>)>> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stops all threads, and waits until they have ended: they must not log after Envoy has stopped.
pub(crate) fn stop_all() {
    let threads = std::mem::take(&mut *threads());
    threads.iter().for_each(|(stop, _)| stop.set());
    for (_, thread) in threads {
        let _ = thread.join();
    }
}

/// The signal that stops a thread.
#[derive(Default)]
struct StopSignal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl StopSignal {
    fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for the signal. False: the timeout has passed.
    fn wait(&self, timeout: Duration) -> bool {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(is_set, timeout, |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Checks files from a thread. A drop stops the thread but does not wait for its end, since a worker may drop the
/// value.
pub(crate) struct Refresher {
    stop: Arc<StopSignal>,
}

impl Refresher {
    /// Calls `check` every [`INTERVAL`] from a separate thread, since reading files would block a worker. `check`
    /// returns whether the certificates for `peers` have changed, which is logged.
    pub(crate) fn new(peers: &'static str, check: impl Fn() -> Result<bool, TlsError> + Send + 'static) -> Self {
        let stop = Arc::<StopSignal>::default();
        if envoy_abi::module::validating() {
            return Self { stop };
        }
        let work = move || match check() {
            Ok(true) => envoy_abi::log!(Info, "{peers} get the new certificates"),
            Ok(false) => {}
            Err(error) => envoy_abi::log!(Warn, "{peers} get the old certificates: {error}"),
        };
        if let Err(error) = start(Arc::clone(&stop), work) {
            envoy_abi::log!(Error, "changes of certificate files cannot be detected: {error}");
        }
        Self { stop }
    }

    /// Stops the thread for good.
    pub(crate) fn stop(&self) {
        self.stop.set();
    }
}

impl Drop for Refresher {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts a thread that calls `work` every [`INTERVAL`].
fn start(stop: Arc<StopSignal>, work: impl Fn() + Send + 'static) -> io::Result<()> {
    let signal = Arc::clone(&stop);
    let run = move || {
        while !signal.wait(INTERVAL) {
            work();
        }
    };
    let thread = std::thread::Builder::new().name("tidevoy-files".to_owned()).spawn(run)?;
    let mut threads = threads();
    threads.retain(|(_, thread)| !thread.is_finished());
    threads.push((stop, thread));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel, sync_channel};

    use super::*;

    /// A refresher whose work sends to the returned receiver when it begins, and ends when the returned sender is
    /// dropped.
    fn blocked_refresher() -> (Refresher, Receiver<()>, std::sync::mpsc::Sender<()>) {
        let (begun, has_begun) = sync_channel(1);
        let (end, may_end) = channel::<()>();
        let refresher = Refresher { stop: Arc::default() };
        let work = move || {
            let _ = begun.send(());
            let _ = may_end.recv();
        };
        start(Arc::clone(&refresher.stop), work).expect("a thread");
        (refresher, has_begun, end)
    }

    #[test]
    fn drop_does_not_wait_for_the_thread_and_stop_all_does() {
        let (refresher, has_begun, end) = blocked_refresher();
        has_begun.recv().expect("it has begun");
        drop(refresher); // the work of its thread goes on
        let (stays, also_begun, also_end) = blocked_refresher();
        also_begun.recv().expect("it has begun");
        drop((end, also_end));
        stop_all();
        assert!(has_begun.recv().is_err() && also_begun.iter().count() <= 1, "the threads have ended");
        drop(stays);
        assert!(threads().is_empty());
    }
}
