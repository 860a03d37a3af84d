//! The listener filter: a configuration that Envoy may be sent again at any time (ECDS), and nothing else.
//!
//! Why not that of the network filter, which can be sent at any time as well: each connection keeps the text of the
//! configuration that it began with (`filter_config_` in Envoy's
//! `source/extensions/filters/network/dynamic_modules/filter_config.h`), as long as it lives. A listener filter lives only
//! until its connection is accepted.

use crate::module::{configured, destroyed, module};
use crate::sys::{self, Buffer, Envoy, Ours};

/// Stands for the filter of any connection: Envoy closes connections for which it gets null.
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

// Envoy refuses a module without them; there is nothing to do in them.

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_on_close(_: Envoy, _: Ours) {}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_destroy(_: Ours) {}

#[unsafe(no_mangle)]
extern "C" fn envoy_dynamic_module_on_listener_filter_scheduled(_: Envoy, _: Ours, _: u64) {}
