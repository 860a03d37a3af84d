//! The listener filter. It only carries a configuration that Envoy can receive at any time (ECDS).
//!
//! The network filter's configuration can be received at any time, too. But each connection keeps the text of the one that it
//! began with (`filter_config_` in Envoy's `source/extensions/filters/network/dynamic_modules/filter_config.h`). A listener
//! filter is destroyed when its connection is accepted.

use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, Ours};

/// The filter of all connections: Envoy closes those for which it gets null.
static FILTER: u8 = 0;

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_config_new(_: Envoy, name: Buffer, config: Buffer) -> Ours {
    // SAFETY: both live until this hook returns.
    let (name, config) = unsafe { (name.text(), config.bytes()) };
    configured("listener filter", &name, || module()?.listener_filter(&name, config))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn envoy_dynamic_module_on_listener_filter_config_destroy(config: Ours) {
    // SAFETY: made by the hook above; Envoy destroys it once.
    unsafe { destroyed::<()>("listener filter", config) }
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_new(_: Ours, _: Envoy) -> Ours {
    (&raw const FILTER).cast()
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_on_accept(_: Envoy, _: Ours) -> u32 {
    sys::CONTINUE
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_on_data(_: Envoy, _: Ours, _: usize) -> u32 {
    sys::CONTINUE
}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_get_max_read_bytes(_: Envoy, _: Ours) -> usize {
    0
}

// Envoy refuses a module that lacks these.

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_on_close(_: Envoy, _: Ours) {}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_destroy(_: Ours) {}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_scheduled(_: Envoy, _: Ours, _: u64) {}
