//! A thread that looks at files now and then, for as long as a configuration lives.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tls::TlsError;

/// A path that was given; the empty one was not.
pub(crate) fn non_empty_path(path: &Path) -> Option<&Path> {
    (!path.as_os_str().is_empty()).then_some(path)
}

/// Time between two looks: a few `stat` calls each.
const INTERVAL: Duration = Duration::from_millis(250);

/// The threads that may still run. Only Envoy's main thread uses it.
static THREADS: Mutex<Vec<(Arc<StopSignal>, JoinHandle<()>)>> = Mutex::new(Vec::new());

fn threads() -> MutexGuard<'static, Vec<(Arc<StopSignal>, JoinHandle<()>)>> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends all threads, and waits for them: they must not log any more when Envoy has stopped.
pub(crate) fn stop_all() {
    let threads = std::mem::take(&mut *threads());
    threads.iter().for_each(|(stop, _)| stop.set());
    for (_, thread) in threads {
        let _ = thread.join();
    }
}

/// Tells a thread to end.
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

    /// Waits for the signal. False: `at_most` has passed.
    fn wait(&self, at_most: Duration) -> bool {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(is_set, at_most, |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Its thread ends soon after it was dropped. Nobody waits for that, since a worker may drop it.
pub(crate) struct Refresher {
    stop: Arc<StopSignal>,
}

impl Refresher {
    /// Calls `look` every [`INTERVAL`], from a thread of its own: reading files would hold up a worker. It returns
    /// whether the certificates for `whom` are new ones, which is logged.
    pub(crate) fn new(whom: &'static str, look: impl Fn() -> Result<bool, TlsError> + Send + 'static) -> Self {
        let stop = Arc::<StopSignal>::default();
        if envoy_abi::module::validating() {
            return Self { stop };
        }
        let work = move || match look() {
            Ok(true) => envoy_abi::log!(Info, "{whom} get the new certificates"),
            Ok(false) => {}
            Err(error) => envoy_abi::log!(Warn, "{whom} get the old certificates: {error}"),
        };
        if let Err(error) = start(Arc::clone(&stop), work) {
            envoy_abi::log!(Error, "changed certificates will not be noticed: {error}");
        }
        Self { stop }
    }
}

impl Drop for Refresher {
    fn drop(&mut self) {
        self.stop.set();
    }
}

/// Starts a thread that does `work` every [`INTERVAL`].
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

    /// A refresher whose work reports that it has begun, and ends when the returned sender is dropped.
    fn blocked() -> (Refresher, Receiver<()>, std::sync::mpsc::Sender<()>) {
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
    fn who_drops_it_does_not_wait_for_its_thread_and_who_stops_all_does() {
        let (refresher, has_begun, end) = blocked();
        has_begun.recv().expect("it has begun");
        drop(refresher); // its work goes on
        let (stays, also_begun, also_end) = blocked();
        also_begun.recv().expect("it has begun");
        drop((end, also_end));
        stop_all();
        assert!(has_begun.recv().is_err() && also_begun.iter().count() <= 1, "the threads have ended");
        drop(stays);
        assert!(threads().is_empty());
    }
}
