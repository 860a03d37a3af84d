//! The factory of a module's extensions, and the hook that Envoy calls first.

use core::ffi::c_char;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::extension::{Extension, Metrics};
use crate::filter::FilterFactory;
use crate::http_filter::Responder;
use crate::listener_filter::ListenerFilter;
use crate::policy::PolicyFactory;
use crate::socket::SocketFactory;

/// Creates extensions from their configuration. An error rejects the configuration, and its text goes to Envoy's log.
/// Envoy then keeps the previous configuration, and reports the rejection to the control plane.
///
/// All methods run on Envoy's main thread. `name` is the name of the configuration; `config` is its content, as JSON if
/// it is a Struct.
pub trait Module: Sync {
    /// A transport socket of listeners.
    fn downstream_socket(&self, name: &str, config: &[u8]) -> Result<Box<dyn SocketFactory>, String>;
    /// A transport socket of clusters.
    fn upstream_socket(&self, name: &str, config: &[u8]) -> Result<Box<dyn SocketFactory>, String>;
    /// A network filter.
    fn filter(&self, name: &str, config: &[u8]) -> Result<Box<dyn FilterFactory>, String>;
    /// A listener filter. Also called for each configuration that Envoy receives later.
    fn listener_filter(&self, name: &str, config: &[u8]) -> Result<Box<dyn ListenerFilter>, String>;
    /// An HTTP filter.
    fn http_filter(&self, name: &str, config: &[u8]) -> Result<Box<dyn Responder>, String>;
    /// A load-balancing policy.
    fn policy(&self, name: &str, config: &[u8]) -> Result<Box<dyn PolicyFactory>, String>;
    /// A bootstrap extension; `metrics` can only be defined during this call.
    fn extension(&self, name: &str, config: &[u8], metrics: &mut Metrics) -> Result<Box<dyn Extension>, String>;
}

static MODULE: OnceLock<&'static dyn Module> = OnceLock::new();

/// The module that [`crate::export!`] named. Envoy calls that hook before all others.
pub(crate) fn module() -> Result<&'static dyn Module, String> {
    MODULE.get().copied().ok_or_else(|| "Envoy has not initialised the module".to_owned())
}

/// Called by [`export!`].
#[doc(hidden)]
pub fn initialise(module: &'static dyn Module) -> *const c_char {
    let _ = MODULE.set(module);
    VERSION.as_ptr()
}

/// The version of the ABI that this module uses. Envoy compares it with its own.
const VERSION: &core::ffi::CStr = c"v0.2.0";

/// Names the module, once, in the crate of the shared object. Defines the hook that Envoy calls first.
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

/// A rejected configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedConfig {
    /// The name of the configuration.
    pub name: String,
    /// The reason in Envoy's log.
    pub reason: String,
}

/// Maximum rejected configurations that are kept for [`take_rejected_configs`].
const MAX_REJECTED: usize = 16;

/// The rejected configurations that were not taken yet. Envoy does not report their texts to the control plane.
static REJECTED: Mutex<Vec<RejectedConfig>> = Mutex::new(Vec::new());

fn rejected_configs() -> MutexGuard<'static, Vec<RejectedConfig>> {
    REJECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The configurations rejected since the last call.
#[must_use]
pub fn take_rejected_configs() -> Vec<RejectedConfig> {
    std::mem::take(&mut *rejected_configs())
}

/// Adds a rejected configuration to those of [`take_rejected_configs`]. The rejections that Envoy gets are added anyway.
pub fn report_rejected(name: &str, reason: String) {
    let mut rejected = rejected_configs();
    rejected.truncate(MAX_REJECTED - 1); // bounds the list if it is never taken
    rejected.push(RejectedConfig { name: name.to_owned(), reason });
}

/// Runs a constructor and gives its result to Envoy. A null pointer rejects the configuration.
pub(crate) fn configured<T>(
    what: &str,
    name: &str,
    make: impl FnOnce() -> Result<T, String>,
) -> *const core::ffi::c_void {
    match crate::guard::guarded(what, Err("a panic".to_owned()), make) {
        Ok(product) => Box::into_raw(Box::new(product)).cast_const().cast(),
        Err(reason) => {
            crate::log!(Error, "the configuration of the {what} {name:?} is refused: {reason}");
            report_rejected(name, reason);
            core::ptr::null()
        }
    }
}

/// Drops what [`configured`] gave to Envoy.
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
