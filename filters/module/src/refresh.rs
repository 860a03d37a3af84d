//! A thread that looks at files now and then, for as long as a configuration lives.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tls::TlsError;

/// A path that was given; the empty one was not.
pub(crate) fn non_empty_path(path: &Path) -> Option<&Path> {
    (!path.as_os_str().is_empty()).then_some(path)
}

/// Time between two looks: a few `stat` calls each.
const INTERVAL: Duration = Duration::from_millis(250);

pub(crate) struct Refresher {
    /// Dropped to end the thread.
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Refresher {
    /// Calls `look` every [`INTERVAL`], from a thread of its own: reading files would hold up a worker. It returns
    /// whether the certificates for `whom` are new ones, which is logged.
    pub(crate) fn new(whom: &'static str, look: impl Fn() -> Result<bool, TlsError> + Send + 'static) -> Self {
        if envoy_abi::module::validating() {
            return Self { stop: None, thread: None };
        }
        let (stop, stopped) = sync_channel(0);
        let work = move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                match look() {
                    Ok(true) => envoy_abi::log!(Info, "{whom} get the new certificates"),
                    Ok(false) => {}
                    Err(error) => envoy_abi::log!(Warn, "{whom} get the old certificates: {error}"),
                }
            }
        };
        let thread = std::thread::Builder::new().name("tidevoy-files".to_owned()).spawn(work);
        if let Err(error) = &thread {
            envoy_abi::log!(Error, "changed certificates will not be noticed: {error}");
        }
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for Refresher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
