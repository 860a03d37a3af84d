//! The network filter: the life of one client connection, without its bytes.

use core::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;

use crate::buffer;
use crate::guard::guarded;
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, Ours};

/// Makes the filters of one listener; called on workers, at the same time.
pub trait FilterFactory: Send + Sync {
    /// A filter for a new connection; before the filters behind it exist.
    fn filter(&self, filter: Filter) -> Option<Box<dyn NetworkFilter>>;
}

/// One client connection.
pub trait NetworkFilter {
    /// All filters exist; those behind this one are told when it returns. False keeps it from them.
    fn on_new_connection(&self) -> bool;
    /// A [`Waker`] of this connection was used.
    fn on_wake(&self);
}

/// Envoy's side of a filter. Calls do nothing once Envoy has destroyed it.
#[derive(Clone)]
pub struct Filter(Rc<Cell<Envoy>>);

impl Filter {
    fn with<T>(&self, gone: T, call: impl FnOnce(Envoy) -> T) -> T {
        let envoy = self.0.get();
        if envoy.is_null() { gone } else { call(envoy) }
    }

    /// The id of the connection, unique in the process; 0 when it is gone.
    #[must_use]
    pub fn connection_id(&self) -> u64 {
        // SAFETY: the filter lives.
        self.with(0, |filter| unsafe { sys::filter_connection_id(filter) })
    }

    /// The id of the upstream connection that Envoy has given to this one; None when there is none yet.
    #[must_use]
    pub fn upstream_connection_id(&self) -> Option<u64> {
        // SAFETY: the filter lives.
        match self.with(0, |filter| unsafe { sys::filter_upstream_connection_id(filter) }) {
            0 => None,
            id => Some(id),
        }
    }

    /// The client's address; after a PROXY header the one that it names.
    #[must_use]
    pub fn remote_address(&self) -> Option<SocketAddr> {
        self.with(None, |filter| {
            // SAFETY: the filter lives, and the getter fills what it is given or says no.
            unsafe { buffer::address(|ip, port| sys::filter_remote_address(filter, ip, port)) }
        })
    }

    /// The address that the client connected to.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.with(None, |filter| {
            // SAFETY: the filter lives, and the getter fills what it is given or says no.
            unsafe { buffer::address(|ip, port| sys::filter_local_address(filter, ip, port)) }
        })
    }

    /// Closes the connection without waiting for its write buffer. `why` goes to the access log.
    pub fn close(&self, why: &str) {
        const NO_FLUSH: u32 = 1;
        // SAFETY: the filter lives; the text is copied.
        self.with((), |filter| unsafe {
            sys::filter_close(filter, NO_FLUSH, Buffer::of(why.as_bytes()));
        });
    }

    /// Sets filter state of a kind that Envoy knows by `key`. False when it does not.
    pub fn set_state(&self, key: &str, value: &str) -> bool {
        // SAFETY: the filter lives; both are copied.
        self.with(false, |filter| unsafe {
            sys::filter_set_state(filter, Buffer::of(key.as_bytes()), Buffer::of(value.as_bytes()))
        })
    }

    /// Sets dynamic metadata of the connection, which its access log may show.
    pub fn set_metadata(&self, namespace: &str, key: &str, value: &str) {
        let [namespace, key, value] = [namespace, key, value].map(|text| Buffer::of(text.as_bytes()));
        // SAFETY: the filter lives; all three are copied.
        self.with((), |filter| unsafe { sys::filter_set_metadata(filter, namespace, key, value) });
    }

    /// The same for a number.
    pub fn set_metadata_number(&self, namespace: &str, key: &str, value: f64) {
        let [namespace, key] = [namespace, key].map(|text| Buffer::of(text.as_bytes()));
        // SAFETY: the filter lives; both are copied.
        self.with((), |filter| unsafe { sys::filter_set_metadata_number(filter, namespace, key, value) });
    }

    /// What wakes this connection from other threads.
    #[must_use]
    pub fn waker(&self) -> Option<Waker> {
        // SAFETY: the filter lives, and this is its worker.
        let scheduler = self.with(core::ptr::null_mut(), |filter| unsafe { sys::filter_scheduler_new(filter) });
        (!scheduler.is_null()).then_some(Waker(scheduler))
    }
}

/// Has [`NetworkFilter::on_wake`] called on the connection's worker; without effect when the connection is gone.
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
        // SAFETY: made by `waker`, deleted once.
        unsafe { sys::filter_scheduler_delete(self.0) }
    }
}

struct HeldFilter {
    envoy: Rc<Cell<Envoy>>,
    filter: Box<dyn NetworkFilter>,
}

/// # Safety
/// `ours` is a `Held` that Envoy got from `new` and has not destroyed.
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
    // SAFETY: made by the hook above; Envoy destroys it once.
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
    let begun = guarded("network_filter_new_connection", None, || Some(filter.on_new_connection()));
    match begun {
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
    sys::CONTINUE // bytes are seen in the sockets
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_network_filter_write(_: Envoy, _: Ours, _: usize, _: bool) -> u32 {
    sys::CONTINUE
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_network_filter_event(_: Envoy, _: Ours, _: u32) {
    // the socket hears first that a connection closes
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_scheduled(envoy: Envoy, ours: Ours, _: u64) {
    // SAFETY: Envoy passes what `new` returned.
    let filter = unsafe { filter(ours) };
    let whole = guarded("network_filter_scheduled", false, || {
        filter.on_wake();
        true
    });
    if !whole {
        close_after_panic(envoy);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_network_filter_destroy(ours: Ours) {
    if !ours.is_null() {
        // SAFETY: made by `new`, and alive until the next line but one.
        unsafe { (*ours.cast::<HeldFilter>()).envoy.set(core::ptr::null_mut()) };
        // SAFETY: Envoy destroys it once.
        unsafe { destroyed::<HeldFilter>("network filter", ours) }
    }
}

fn close_after_panic(envoy: Envoy) {
    // SAFETY: Envoy's own filter, in one of its hooks.
    unsafe { sys::filter_close(envoy, 1, Buffer::of(b"tidevoy_bug")) }
}
