//! The network filter: sees a client connection begin and end, but not its bytes.

use core::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;

use crate::buffer;
use crate::guard::guarded;
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, Ours};

/// Creates the filters of one listener. Called on all workers, concurrently.
pub trait FilterFactory: Send + Sync {
    /// Creates the filter of a new connection, before the filters after it exist.
    fn filter(&self, filter: Filter) -> Option<Box<dyn NetworkFilter>>;
}

/// One client connection.
pub trait NetworkFilter {
    /// All filters exist. Filters after this one see the connection when this returns; false withholds it from them.
    fn on_new_connection(&self) -> bool;
    /// A [`Waker`] of this connection was used.
    fn on_wake(&self);
}

/// Envoy's side of a filter. Its methods do nothing after Envoy has destroyed the filter.
#[derive(Clone)]
pub struct Filter(Rc<Cell<Envoy>>);

impl Filter {
    fn with<T>(&self, gone: T, call: impl FnOnce(Envoy) -> T) -> T {
        let envoy = self.0.get();
        if envoy.is_null() { gone } else { call(envoy) }
    }

    /// The id of the connection, unique in the process; 0 if the connection is gone.
    #[must_use]
    pub fn connection_id(&self) -> u64 {
        // SAFETY: the filter lives.
        self.with(0, |filter| unsafe { sys::filter_connection_id(filter) })
    }

    /// The id of the upstream connection that Envoy has assigned to this connection, if any.
    #[must_use]
    pub fn upstream_connection_id(&self) -> Option<u64> {
        // SAFETY: the filter lives.
        match self.with(0, |filter| unsafe { sys::filter_upstream_connection_id(filter) }) {
            0 => None,
            id => Some(id),
        }
    }

    /// The client's address; after a PROXY header, the address in it.
    #[must_use]
    pub fn remote_address(&self) -> Option<SocketAddr> {
        self.with(None, |filter| {
            // SAFETY: the filter lives, and the getter fills its arguments or returns false.
            unsafe { buffer::address(|ip, port| sys::filter_remote_address(filter, ip, port)) }
        })
    }

    /// The address that the client connected to.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.with(None, |filter| {
            // SAFETY: the filter lives, and the getter fills its arguments or returns false.
            unsafe { buffer::address(|ip, port| sys::filter_local_address(filter, ip, port)) }
        })
    }

    /// Closes the connection without flushing its write buffer. `why` goes to the access log.
    pub fn close(&self, why: &str) {
        const NO_FLUSH: u32 = 1;
        // SAFETY: the filter lives; the text is copied.
        self.with((), |filter| unsafe {
            sys::filter_close(filter, NO_FLUSH, Buffer::of(why.as_bytes()));
        });
    }

    /// Sets filter state of the type that Envoy registers under `key`. Returns false if there is none.
    pub fn set_state(&self, key: &str, value: &str) -> bool {
        // SAFETY: the filter lives; both are copied.
        self.with(false, |filter| unsafe {
            sys::filter_set_state(filter, Buffer::of(key.as_bytes()), Buffer::of(value.as_bytes()))
        })
    }

    /// Sets dynamic metadata of the connection, for its access log.
    pub fn set_metadata(&self, namespace: &str, key: &str, value: &str) {
        let [namespace, key, value] = [namespace, key, value].map(|text| Buffer::of(text.as_bytes()));
        // SAFETY: the filter lives; all three are copied.
        self.with((), |filter| unsafe { sys::filter_set_metadata(filter, namespace, key, value) });
    }

    /// Like [`Self::set_metadata`], for a number.
    pub fn set_metadata_number(&self, namespace: &str, key: &str, value: f64) {
        let [namespace, key] = [namespace, key].map(|text| Buffer::of(text.as_bytes()));
        // SAFETY: the filter lives; both are copied.
        self.with((), |filter| unsafe { sys::filter_set_metadata_number(filter, namespace, key, value) });
    }

    /// Lets the later filters see the connection that [`NetworkFilter::on_new_connection`] has withheld from them.
    pub fn continue_connection(&self) {
        // SAFETY: the filter lives.
        self.with((), |filter| unsafe { sys::filter_continue_reading(filter) });
    }

    /// A handle that wakes this connection from other threads.
    #[must_use]
    pub fn waker(&self) -> Option<Waker> {
        // SAFETY: the filter lives, and this is its worker.
        let scheduler = self.with(core::ptr::null_mut(), |filter| unsafe { sys::filter_scheduler_new(filter) });
        (!scheduler.is_null()).then_some(Waker(scheduler))
    }
}

/// Makes Envoy call [`NetworkFilter::on_wake`] on the connection's worker. Does nothing if the connection is gone.
pub struct Waker(Envoy);

// SAFETY: Envoy lets any thread commit to a scheduler and delete it.
unsafe impl Send for Waker {}
// SAFETY: as above; commits from several threads are serialised by the dispatcher's own lock.
unsafe impl Sync for Waker {}

impl Waker {
    pub fn wake(&self) {
        // SAFETY: deleted only by drop.
        unsafe { sys::filter_scheduler_commit(self.0, 0) }
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        // SAFETY: created by `waker`, deleted once.
        unsafe { sys::filter_scheduler_delete(self.0) }
    }
}

struct HeldFilter {
    envoy: Rc<Cell<Envoy>>,
    filter: Box<dyn NetworkFilter>,
}

/// # Safety
/// `ours` is a `HeldFilter` that Envoy got from `new` and has not destroyed.
unsafe fn filter<'a>(ours: Ours) -> &'a dyn NetworkFilter {
    // SAFETY: the caller's promise; only shared references to it exist.
    unsafe { &*(*ours.cast::<HeldFilter>()).filter }
}

type FilterFactoryHandle = Box<dyn FilterFactory>;

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_network_filter_config_new(_: Envoy, name: Buffer, config: Buffer) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, config) = unsafe { (name.text(), config.bytes()) };
    configured("network filter", &name, || module()?.filter(&name, config))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_config_destroy(factory: Ours) {
    // SAFETY: created by the hook above; Envoy destroys it once.
    unsafe { destroyed::<FilterFactoryHandle>("network filter", factory) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_new(factory: Ours, envoy: Envoy) -> Ours {
    // SAFETY: the factory lives as long as its connections.
    let factory = unsafe { &*factory.cast::<FilterFactoryHandle>() };
    guarded("network_filter_new", core::ptr::null(), || {
        let envoy = Rc::new(Cell::new(envoy));
        match factory.filter(Filter(Rc::clone(&envoy))) {
            Some(filter) => Box::into_raw(Box::new(HeldFilter { envoy, filter })).cast_const().cast(),
            None => core::ptr::null(),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_new_connection(envoy: Envoy, ours: Ours) -> u32 {
    // SAFETY: Envoy passes what `new` returned.
    let filter = unsafe { filter(ours) };
    let result = guarded("network_filter_new_connection", None, || Some(filter.on_new_connection()));
    match result {
        Some(true) => sys::CONTINUE,
        Some(false) => sys::STOP_ITERATION,
        None => {
            close_after_panic(envoy);
            sys::STOP_ITERATION
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_network_filter_read(_: Envoy, _: Ours, _: usize, _: bool) -> u32 {
    sys::CONTINUE // the sockets process the bytes
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_network_filter_write(_: Envoy, _: Ours, _: usize, _: bool) -> u32 {
    sys::CONTINUE
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_network_filter_event(_: Envoy, _: Ours, _: u32) {
    // The transport socket gets the close event first.
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_scheduled(envoy: Envoy, ours: Ours, _: u64) {
    // SAFETY: Envoy passes what `new` returned.
    let filter = unsafe { filter(ours) };
    let is_complete = guarded("network_filter_scheduled", false, || {
        filter.on_wake();
        true
    });
    if !is_complete {
        close_after_panic(envoy);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_destroy(ours: Ours) {
    if !ours.is_null() {
        // SAFETY: created by `new`, and alive until the next line but one.
        unsafe { (*ours.cast::<HeldFilter>()).envoy.set(core::ptr::null_mut()) };
        // SAFETY: Envoy destroys it once.
        unsafe { destroyed::<HeldFilter>("network filter", ours) }
    }
}

fn close_after_panic(envoy: Envoy) {
    // SAFETY: Envoy's own filter, in one of its hooks.
    unsafe { sys::filter_close(envoy, 1, Buffer::of(b"tidevoy_bug")) }
}
