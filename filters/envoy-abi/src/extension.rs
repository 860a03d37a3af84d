//! The bootstrap extension: metrics with labels, a timer on Envoy's main thread, and HTTP requests to Envoy's clusters.

use core::cell::Cell;

use crate::guard::{guarded, unused_hooks};
use crate::http_callout::{HttpClient, HttpResponse};
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Done, Envoy, HttpHeader, Ours};

/// Lives as long as Envoy. All hooks run on the main thread.
pub trait Extension {
    /// Called about every [`Extension::interval`] milliseconds.
    fn tick(&self, metrics: &Metrics, http: &HttpClient);
    /// Milliseconds between two ticks.
    fn interval(&self) -> u64;
    /// Envoy is ready to run. The waker makes Envoy call [`Extension::on_woken`].
    fn on_initialized(&self, _: MainWaker) {}
    /// A [`MainWaker`] has woken the main thread.
    fn on_woken(&self, _: &HttpClient) {}
    /// The response to a request of [`HttpClient::post`], with the tag of the request; None: it has failed. It may be
    /// called during `post`.
    fn on_response(&self, _tag: u64, _: Option<HttpResponse>) {}
    /// Envoy has begun to close the ports of its listeners (`POST /drain_listeners`).
    fn on_drain_started(&self) {}
    /// Envoy stops: end all background work.
    fn shutdown(&self) {}
}

/// Defines and sets metrics with labels.
pub struct Metrics {
    config: Envoy,
    open: bool,
    /// Envoy's extension. Null until Envoy has created it.
    extension: Cell<Envoy>,
}

/// A counter with labels.
#[derive(Debug, Clone, Copy)]
pub struct Counter(usize);

/// A gauge with labels.
#[derive(Debug, Clone, Copy)]
pub struct Gauge(usize);

type Define = unsafe extern "C" fn(Envoy, Buffer, *const Buffer, usize, *mut usize) -> u32;
type Set = unsafe extern "C" fn(Envoy, usize, *const Buffer, usize, u64) -> u32;

impl Metrics {
    /// Defines a counter; only during [`crate::Module::extension`].
    pub fn counter(&mut self, name: &str, labels: &[&str]) -> Result<Counter, String> {
        self.define(sys::extension_define_counter, name, labels).map(Counter)
    }

    /// Defines a gauge; only during [`crate::Module::extension`].
    pub fn gauge(&mut self, name: &str, labels: &[&str]) -> Result<Gauge, String> {
        self.define(sys::extension_define_gauge, name, labels).map(Gauge)
    }

    fn define(&self, define: Define, name: &str, labels: &[&str]) -> Result<usize, String> {
        let labels: Vec<Buffer> = labels.iter().map(|label| Buffer::of(label.as_bytes())).collect();
        let mut id = 0;
        // SAFETY: the configuration lives, Envoy copies the names.
        let result =
            unsafe { define(self.config, Buffer::of(name.as_bytes()), labels.as_ptr(), labels.len(), &mut id) };
        if self.open && result == sys::METRIC_SUCCESS { Ok(id) } else { Err(format!("no metric {name} ({result})")) }
    }

    /// The value of a gauge of Envoy, by its full name; 0 if there is no such gauge. Envoy searches all gauges for it.
    #[must_use]
    pub fn gauge_value(&self, name: &str) -> u64 {
        let mut value = 0;
        if !self.extension.get().is_null() {
            // SAFETY: the extension lives as long as its configuration; called on the main thread.
            unsafe { sys::extension_gauge_value(self.extension.get(), Buffer::of(name.as_bytes()), &raw mut value) };
        }
        value
    }

    /// Adds to a counter. `labels`: a value for each of its labels.
    pub fn add(&self, counter: Counter, labels: &[&str], by: u64) {
        self.set(sys::extension_increment_counter, counter.0, labels, by);
    }

    /// Sets a gauge. `labels`: a value for each of its labels.
    pub fn put(&self, gauge: Gauge, labels: &[&str], value: u64) {
        self.set(sys::extension_set_gauge, gauge.0, labels, value);
    }

    fn set(&self, set: Set, id: usize, labels: &[&str], value: u64) {
        let mut values = [Buffer::EMPTY; 4];
        for (slot, label) in values.iter_mut().zip(labels) {
            *slot = Buffer::of(label.as_bytes());
        }
        // SAFETY: the configuration lives, Envoy copies the values; it rejects a wrong number of values.
        let result = unsafe { set(self.config, id, values.as_ptr(), labels.len().min(values.len()), value) };
        debug_assert_eq!(result, sys::METRIC_SUCCESS);
    }
}

/// Wakes Envoy's main thread from any thread. Does nothing if Envoy has destroyed the extension.
pub struct MainWaker(Envoy);

// SAFETY: Envoy lets any thread commit to a scheduler and delete it.
unsafe impl Send for MainWaker {}
// SAFETY: as above; commits from several threads are serialised by the dispatcher's own lock.
unsafe impl Sync for MainWaker {}

impl MainWaker {
    pub fn wake(&self) {
        // SAFETY: deleted only by drop.
        unsafe { sys::extension_scheduler_commit(self.0, 0) }
    }
}

impl Drop for MainWaker {
    fn drop(&mut self) {
        // SAFETY: created by Envoy, deleted once.
        unsafe { sys::extension_scheduler_delete(self.0) }
    }
}

struct HeldExtension {
    extension: Box<dyn Extension>,
    metrics: Metrics,
    http: HttpClient,
    timer: Cell<Envoy>,
}

impl HeldExtension {
    fn stop_timer(&self) {
        let timer = self.timer.replace(core::ptr::null_mut());
        if !timer.is_null() {
            // SAFETY: created in `server_initialized`, on this thread, and deleted once.
            unsafe { sys::extension_timer_delete(timer) };
        }
    }
}

/// # Safety
/// `ours` is a `HeldExtension` that Envoy got from `config_new` and has not destroyed.
unsafe fn held<'a>(ours: Ours) -> &'a HeldExtension {
    // SAFETY: the caller's promise; only shared references to it exist.
    unsafe { &*ours.cast::<HeldExtension>() }
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_new(
    config: Envoy,
    name: Buffer,
    text: Buffer,
) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, text) = unsafe { (name.text(), text.bytes()) };
    let extension = configured("bootstrap extension", &name, || {
        let mut metrics = Metrics { config, open: true, extension: Cell::new(core::ptr::null_mut()) };
        let extension = module()?.extension(&name, text, &mut metrics)?;
        metrics.open = false;
        Ok(HeldExtension { extension, metrics, http: HttpClient::new(config), timer: Cell::new(core::ptr::null_mut()) })
    });
    // SAFETY: Envoy's own configuration. Without this call Envoy would never become ready.
    unsafe { sys::extension_ready(config) };
    extension
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_destroy(ours: Ours) {
    // SAFETY: Envoy destroys it once.
    unsafe { destroyed::<HeldExtension>("bootstrap extension", ours) }
}

/// Envoy requires a second object in addition to the configuration. The module uses the same object.
#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_new(ours: Ours, extension: Envoy) -> Ours {
    // SAFETY: Envoy passes what `config_new` returned.
    unsafe { held(ours) }.metrics.extension.set(extension);
    ours
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_server_initialized(_: Envoy, ours: Ours) {
    // SAFETY: Envoy passes what `new` returned.
    let held = unsafe { held(ours) };
    guarded("bootstrap_extension_server_initialized", (), || {
        // SAFETY: the configuration lives, and this is the main thread.
        let timer = unsafe { sys::extension_timer_new(held.metrics.config) };
        held.timer.set(timer);
        // SAFETY: just created.
        unsafe { sys::extension_timer_enable(timer, held.extension.interval()) };
        // SAFETY: as for the timer.
        let scheduler = unsafe { sys::extension_scheduler_new(held.metrics.config) };
        if !scheduler.is_null() {
            held.extension.on_initialized(MainWaker(scheduler));
        }
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_timer_fired(_: Envoy, ours: Ours, timer: Envoy) {
    // SAFETY: Envoy passes what `config_new` returned.
    let held = unsafe { held(ours) };
    guarded("bootstrap_extension_timer_fired", (), || {
        held.extension.tick(&held.metrics, &held.http);
    });
    if held.timer.get() == timer {
        // SAFETY: the timer was not deleted.
        unsafe { sys::extension_timer_enable(timer, held.extension.interval()) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_drain_started(_: Envoy, ours: Ours) {
    // SAFETY: Envoy passes what `new` returned.
    let held = unsafe { held(ours) };
    guarded("bootstrap_extension_drain_started", (), || held.extension.on_drain_started());
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_shutdown(
    _: Envoy,
    ours: Ours,
    done: Done,
    context: *mut core::ffi::c_void,
) {
    // SAFETY: Envoy passes what `new` returned.
    let held = unsafe { held(ours) };
    guarded("bootstrap_extension_shutdown", (), || {
        held.stop_timer();
        held.extension.shutdown();
    });
    done(context);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_http_callout_done(
    _: Envoy,
    ours: Ours,
    id: u64,
    result: u32,
    headers: *const HttpHeader,
    header_count: usize,
    chunks: *const Buffer,
    chunk_count: usize,
) {
    // SAFETY: Envoy passes what `config_new` returned.
    let held = unsafe { held(ours) };
    guarded("bootstrap_extension_http_callout_done", (), || {
        // SAFETY: Envoy's arguments, in Envoy's hook.
        let response = unsafe { HttpResponse::copy(result, (headers, header_count), (chunks, chunk_count)) };
        if let Some(tag) = held.http.take_tag(id) {
            held.extension.on_response(tag, response);
        }
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_bootstrap_extension_config_scheduled(_: Envoy, ours: Ours, _: u64) {
    // SAFETY: Envoy passes what `config_new` returned.
    let held = unsafe { held(ours) };
    guarded("bootstrap_extension_config_scheduled", (), || held.extension.on_woken(&held.http));
}

// Envoy rejects a module without these hooks, which have nothing to do.
unused_hooks! {
    envoy_dynamic_module_on_bootstrap_extension_worker_thread_initialized(Envoy, Ours);
    envoy_dynamic_module_on_bootstrap_extension_destroy(Ours);
    envoy_dynamic_module_on_bootstrap_extension_file_changed(Envoy, Ours, Buffer, u32);
    envoy_dynamic_module_on_bootstrap_extension_cluster_add_or_update(Envoy, Ours, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_cluster_removal(Envoy, Ours, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_listener_add_or_update(Envoy, Ours, Buffer);
    envoy_dynamic_module_on_bootstrap_extension_listener_removal(Envoy, Ours, Buffer);
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_bootstrap_extension_admin_request(
    _: Envoy,
    _: Ours,
    _: Buffer,
    _: Buffer,
    _: Buffer,
) -> u32 {
    404
}
