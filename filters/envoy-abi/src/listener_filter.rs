//! The listener filter: runs before the filter chain of a connection is chosen, and may inspect its first bytes.
//!
//! A new configuration can arrive at any time (ECDS), as for the network filter. But a network filter's connections
//! keep the configuration with which they began (`filter_config_` in Envoy's
//! `source/extensions/filters/network/dynamic_modules/filter_config.h`), while a listener filter is destroyed when its
//! connection is accepted.

use core::cell::Cell;
use std::net::SocketAddr;

use crate::buffer;
use crate::guard::guarded;
use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, Ours};

/// The filters of one listener. Called on all workers, concurrently.
pub trait ListenerFilter: Send + Sync {
    /// Called for each new connection; `peer` returns the other end of the TCP connection. `peer` calls Envoy and
    /// parses a text, so a filter should call it only if it needs the address.
    fn accept(&self, peer: &dyn Fn() -> Option<SocketAddr>) -> Accept;
    /// Called with all bytes received so far, if `accept` asked for them.
    fn inspect(&self, received: &[u8]) -> Verdict;
}

/// What happens to a new connection.
pub enum Accept {
    /// The filter lets it pass.
    Continue,
    /// The filter inspects its first bytes, at most this many.
    Inspect(usize),
    /// It is closed; the text goes to Envoy's access log.
    Close(&'static str),
}

/// What the first bytes of a connection mean.
pub enum Verdict {
    /// More bytes are needed.
    Incomplete,
    /// The filter removes the first `length` bytes, and lets the connection pass.
    Continue { length: usize, addresses: Option<Addresses> },
    /// The connection is closed; the text goes to Envoy's access log.
    Close(&'static str),
}

/// The addresses of the connection for all later filters.
pub struct Addresses {
    pub client: SocketAddr,
    pub listener: SocketAddr,
}

type Config = Box<dyn ListenerFilter>;

/// One connection.
struct InspectedConnection {
    config: *const Config,
    /// Bytes that Envoy reads ahead; 0: none.
    read_limit: Cell<usize>,
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_config_new(_: Envoy, name: Buffer, config: Buffer) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, config) = unsafe { (name.text(), config.bytes()) };
    configured("listener filter", &name, || module()?.listener_filter(&name, config))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_listener_filter_config_destroy(config: Ours) {
    // SAFETY: made by the hook above; Envoy destroys it once.
    unsafe { destroyed::<Config>("listener filter", config) }
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_new(config: Ours, _: Envoy) -> Ours {
    Box::into_raw(Box::new(InspectedConnection { config: config.cast(), read_limit: Cell::new(0) })).cast_const().cast()
}

/// # Safety
/// `ours` is from `new`, and Envoy has not destroyed it.
unsafe fn parts<'a>(ours: Ours) -> (&'a InspectedConnection, &'a dyn ListenerFilter) {
    // SAFETY: the caller's promise; the configuration outlives its connections.
    unsafe {
        let connection = &*ours.cast::<InspectedConnection>();
        (connection, &**connection.config)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_listener_filter_on_accept(envoy: Envoy, ours: Ours) -> u32 {
    // SAFETY: Envoy passes what `new` returned.
    let (connection, filter) = unsafe { parts(ours) };
    // SAFETY: Envoy's own filter; the getter fills its arguments or returns false.
    let peer = || unsafe { buffer::address(|ip, port| sys::listener_filter_direct_remote_address(envoy, ip, port)) };
    match guarded("listener_filter_on_accept", None, || Some(filter.accept(&peer))) {
        Some(Accept::Continue) => sys::CONTINUE,
        Some(Accept::Inspect(limit)) => {
            connection.read_limit.set(limit);
            sys::STOP_ITERATION
        }
        Some(Accept::Close(reason)) => close(envoy, reason),
        None => close(envoy, PANIC),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_listener_filter_on_data(envoy: Envoy, ours: Ours, _: usize) -> u32 {
    // SAFETY: Envoy passes what `new` returned.
    let (connection, filter) = unsafe { parts(ours) };
    let mut chunk = Buffer::EMPTY;
    // SAFETY: called in `on_data`, where Envoy has the bytes; they are used before anything drains them.
    let received = unsafe {
        sys::listener_filter_get_buffer_chunk(envoy, &raw mut chunk);
        chunk.bytes()
    };
    match guarded("listener_filter_on_data", Verdict::Close(PANIC), || filter.inspect(received)) {
        // At the read limit Envoy does not call again.
        Verdict::Incomplete if received.len() >= connection.read_limit.get() => {
            close(envoy, "too many bytes to inspect")
        }
        Verdict::Incomplete => sys::STOP_ITERATION,
        Verdict::Continue { length, addresses } => {
            // SAFETY: called in `on_data`; the texts are copied.
            unsafe {
                sys::listener_filter_drain_buffer(envoy, length);
                if let Some(Addresses { client, listener }) = addresses {
                    let (ip, local_ip) = (client.ip().to_string(), listener.ip().to_string());
                    let (ip, local_ip) = (Buffer::of(ip.as_bytes()), Buffer::of(local_ip.as_bytes()));
                    sys::listener_filter_set_remote_address(envoy, ip, client.port().into(), client.is_ipv6());
                    sys::listener_filter_restore_local_address(
                        envoy,
                        local_ip,
                        listener.port().into(),
                        listener.is_ipv6(),
                    );
                }
            }
            sys::CONTINUE
        }
        Verdict::Close(reason) => close(envoy, reason),
    }
}

const PANIC: &str = "a panic";

fn close(envoy: Envoy, reason: &str) -> u32 {
    // SAFETY: Envoy's own filter, in one of its hooks; the text is copied.
    unsafe { sys::listener_filter_close_socket(envoy, Buffer::of(reason.as_bytes())) }
    sys::STOP_ITERATION
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_listener_filter_get_max_read_bytes(_: Envoy, ours: Ours) -> usize {
    // SAFETY: Envoy passes what `new` returned.
    unsafe { parts(ours) }.0.read_limit.get()
}

// Envoy rejects a module without this hook.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_on_close(_: Envoy, _: Ours) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_listener_filter_destroy(ours: Ours) {
    // SAFETY: created by `new`; Envoy destroys it once.
    unsafe { destroyed::<InspectedConnection>("listener filter", ours) }
}

// Envoy rejects a module without this hook.
#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_scheduled(_: Envoy, _: Ours, _: u64) {}
