//! What a module offers, and the hook that Envoy calls first.

use core::ffi::c_char;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::extension::{Extension, Metrics};
use crate::filter::FilterFactory;
use crate::listener_filter::ListenerFilter;
use crate::policy::PolicyFactory;
use crate::socket::SocketFactory;

/// Makes extensions from their configuration. An error refuses the configuration (its text goes to Envoy's log);
/// Envoy then keeps what it had, and tells the control plane.
///
/// Each runs on Envoy's main thread. `name` is that of the configuration; `config` is what stands there: JSON when it was a
/// Struct.
pub trait Module: Sync {
    /// A transport socket of listeners.
    fn downstream_socket(&self, name: &str, config: &[u8]) -> Result<Box<dyn SocketFactory>, String>;
    /// A transport socket of clusters.
    fn upstream_socket(&self, name: &str, config: &[u8]) -> Result<Box<dyn SocketFactory>, String>;
    /// A network filter.
    fn filter(&self, name: &str, config: &[u8]) -> Result<Box<dyn FilterFactory>, String>;
    /// A listener filter. Envoy calls this again with each configuration that it receives while it runs.
    fn listener_filter(&self, name: &str, config: &[u8]) -> Result<Box<dyn ListenerFilter>, String>;
    /// A load-balancing policy.
    fn policy(&self, name: &str, config: &[u8]) -> Result<Box<dyn PolicyFactory>, String>;
    /// A bootstrap extension; `metrics` can be defined now and never later.
    fn extension(&self, name: &str, config: &[u8], metrics: &mut Metrics) -> Result<Box<dyn Extension>, String>;
}

static MODULE: OnceLock<&'static dyn Module> = OnceLock::new();

/// The module that [`export!`] named. Before Envoy has called that hook there is none, and it calls no other.
pub(crate) fn module() -> Result<&'static dyn Module, String> {
    MODULE.get().copied().ok_or_else(|| "Envoy has not initialised the module".to_owned())
}

/// What [`export!`] calls.
#[doc(hidden)]
pub fn initialise(module: &'static dyn Module) -> *const c_char {
    let _ = MODULE.set(module);
    VERSION.as_ptr()
}

/// The ABI that this module was written for; Envoy compares it with its own.
const VERSION: &core::ffi::CStr = c"v0.2.0";

/// Names the module, once, in the crate that becomes the shared object: defines the hook that Envoy calls first.
#[macro_export]
macro_rules! export {
    ($module:expr) => {
        #[allow(unsafe_code, reason = "a symbol by which Envoy finds the module")]
        #[unsafe(no_mangle)]
        extern "C" fn envoy_dynamic_module_on_program_init() -> *const core::ffi::c_char {
            $crate::module::initialise(&$module)
        }
    };
}

/// Whether Envoy only checks a configuration (`--mode validate`).
#[must_use]
pub fn validating() -> bool {
    // SAFETY: no arguments; called on the main thread.
    unsafe { crate::sys::is_validation_mode() }
}

/// A configuration that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedConfig {
    /// The name that it was configured by.
    pub name: String,
    /// What the log says of it.
    pub reason: String,
}

/// Refusals that are kept for whoever takes them.
const MOST_REFUSED: usize = 16;

/// Those that were not taken yet. Envoy's own answer to the control plane does not carry their text.
static REFUSED: Mutex<Vec<RejectedConfig>> = Mutex::new(Vec::new());

fn rejected_configs() -> MutexGuard<'static, Vec<RejectedConfig>> {
    REFUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The refusals since the last call.
#[must_use]
pub fn take_rejected_configs() -> Vec<RejectedConfig> {
    std::mem::take(&mut *rejected_configs())
}

/// Runs a constructor and hands its product to Envoy; null refuses the configuration.
pub(crate) fn configured<T>(
    what: &str,
    name: &str,
    make: impl FnOnce() -> Result<T, String>,
) -> *const core::ffi::c_void {
    match crate::guard::guarded(what, Err("a panic".to_owned()), make) {
        Ok(product) => Box::into_raw(Box::new(product)).cast_const().cast(),
        Err(reason) => {
            crate::log!(Error, "the configuration of the {what} {name:?} is refused: {reason}");
            let mut refused = rejected_configs();
            refused.truncate(MOST_REFUSED - 1); // if they are never taken
            refused.push(RejectedConfig { name: name.to_owned(), reason });
            core::ptr::null()
        }
    }
}

/// Takes back what [`configured`] handed out.
///
/// # Safety
/// `product` is from `configured::<T>` or `Box::into_raw`, and this is the last use.
pub(crate) unsafe fn destroyed<T>(what: &str, product: *const core::ffi::c_void) {
    if !product.is_null() {
        // SAFETY: the caller's promise.
        let product = unsafe { Box::from_raw(product.cast_mut().cast::<T>()) };
        crate::guard::guarded(what, (), move || drop(product));
    }
}
