//! C declarations. Names and layouts are those of `abi.h` of Envoy 1.40 (github.com/envoyproxy/envoy,
//! `source/extensions/dynamic_modules/abi/abi.h`).
//!
//! Only used callbacks are declared: Envoy binds all symbols when it loads a module, and rejects a module that uses a
//! callback which this Envoy lacks.

use core::ffi::{c_char, c_int, c_void};

/// An object of Envoy.
pub(crate) type Envoy = *mut c_void;
/// An object of the module that Envoy holds.
pub(crate) type Ours = *const c_void;

/// Bytes of Envoy or of the module, whichever passes them.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) data: *const u8,
    pub(crate) length: usize,
}

/// The result of a socket's read and write hooks.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IoResult {
    pub(crate) action: u32,
    pub(crate) bytes: u64,
    pub(crate) end_of_stream: bool,
}

/// A header of an HTTP message.
#[repr(C)]
pub(crate) struct HttpHeader {
    pub(crate) name: Buffer,
    pub(crate) value: Buffer,
}

pub(crate) type Done = extern "C" fn(*mut c_void);

const _: () = {
    assert!(size_of::<Buffer>() == 16 && align_of::<Buffer>() == 8);
    assert!(core::mem::offset_of!(Buffer, data) == 0 && core::mem::offset_of!(Buffer, length) == 8);
    assert!(size_of::<IoResult>() == 24 && align_of::<IoResult>() == 8);
    assert!(core::mem::offset_of!(IoResult, action) == 0);
    assert!(core::mem::offset_of!(IoResult, bytes) == 8);
    assert!(core::mem::offset_of!(IoResult, end_of_stream) == 16);
    assert!(size_of::<HttpHeader>() == 32 && core::mem::offset_of!(HttpHeader, value) == 16);
    assert!(size_of::<bool>() == 1 && size_of::<c_int>() == 4 && size_of::<usize>() == 8);
};

pub(crate) const CONTINUE: u32 = 0;
pub(crate) const STOP_ITERATION: u32 = 1;
pub(crate) const KEEP_OPEN: u32 = 0;
pub(crate) const CLOSE: u32 = 1;
pub(crate) const IO_SUCCESS: u32 = 0;
pub(crate) const IO_AGAIN: u32 = 1;
pub(crate) const METRIC_SUCCESS: u32 = 0;
/// Both that a callout was sent, and that it has a response.
pub(crate) const CALLOUT_SUCCESS: u32 = 0;
pub(crate) const EVENT_CONNECTED: u32 = 2;

macro_rules! callbacks {
    ($prefix:literal { $( $name:ident = $symbol:literal ( $($arg:ident : $ty:ty),* ) $(-> $ret:ty)?; )* }) => {
        unsafe extern "C" {
            $(
                #[link_name = concat!("envoy_dynamic_module_callback_", $prefix, $symbol)]
                pub(crate) fn $name($($arg: $ty),*) $(-> $ret)?;
            )*
        }
    };
}

callbacks! { "" {
    log = "log_v2"(level: u32, text: Buffer, file: Buffer, line: u32);
    log_enabled = "log_enabled"(level: u32) -> bool;
    is_validation_mode = "is_validation_mode"() -> bool;
    runtime_boolean = "get_runtime_bool"(key: Buffer, default: bool) -> bool;
}}

callbacks! { "transport_socket_" {
    socket_flush = "io_write_from_write_buffer"(socket: Envoy, done: *mut usize) -> u32;
    socket_shutdown_write = "io_shutdown_write"(socket: Envoy);
    socket_fd = "get_fd"(socket: Envoy) -> c_int;
    socket_read_buffer_add = "read_buffer_add"(socket: Envoy, data: *const c_char, length: usize);
    socket_write_buffer_drain = "write_buffer_drain"(socket: Envoy, length: usize);
    socket_write_buffer_slices = "write_buffer_get_slices"(socket: Envoy, out: *mut Buffer, count: *mut usize);
    socket_write_buffer_length = "write_buffer_length"(socket: Envoy) -> usize;
    socket_raise_event = "raise_event"(socket: Envoy, event: u32);
    socket_should_drain = "should_drain_read_buffer"(socket: Envoy) -> bool;
    socket_set_readable = "set_is_readable"(socket: Envoy);
    socket_set_writable = "set_is_writable"(socket: Envoy);
    socket_connection_id = "get_connection_id"(socket: Envoy, id: *mut u64) -> bool;
}}

callbacks! { "network_filter_" {
    filter_close = "close_with_details"(filter: Envoy, kind: u32, details: Buffer);
    filter_connection_id = "get_connection_id"(filter: Envoy) -> u64;
    filter_upstream_connection_id = "get_upstream_connection_id"(filter: Envoy) -> u64;
    filter_remote_address = "get_remote_address"(filter: Envoy, ip: *mut Buffer, port: *mut u32) -> bool;
    filter_local_address = "get_local_address"(filter: Envoy, ip: *mut Buffer, port: *mut u32) -> bool;
    filter_continue_reading = "continue_reading"(filter: Envoy);
    filter_scheduler_new = "scheduler_new"(filter: Envoy) -> Envoy;
    filter_scheduler_commit = "scheduler_commit"(scheduler: Envoy, event: u64);
    filter_scheduler_delete = "scheduler_delete"(scheduler: Envoy);
}}

callbacks! { "network_" {
    filter_set_state = "set_filter_state_typed"(filter: Envoy, key: Buffer, value: Buffer) -> bool;
    filter_set_metadata_number =
        "set_dynamic_metadata_number"(filter: Envoy, namespace: Buffer, key: Buffer, value: f64);
    filter_set_metadata = "set_dynamic_metadata_string"(filter: Envoy, namespace: Buffer, key: Buffer, value: Buffer);
}}

callbacks! { "listener_filter_" {
    listener_filter_get_buffer_chunk = "get_buffer_chunk"(filter: Envoy, out: *mut Buffer) -> bool;
    listener_filter_drain_buffer = "drain_buffer"(filter: Envoy, length: usize) -> bool;
    listener_filter_close_socket = "close_socket"(filter: Envoy, details: Buffer);
    listener_filter_direct_remote_address = "get_direct_remote_address"(filter: Envoy, ip: *mut Buffer, port: *mut u32) -> bool;
    listener_filter_set_remote_address = "set_remote_address"(filter: Envoy, ip: Buffer, port: u32, is_ipv6: bool) -> bool;
    listener_filter_restore_local_address =
        "restore_local_address"(filter: Envoy, ip: Buffer, port: u32, is_ipv6: bool) -> bool;
}}

callbacks! { "http_" {
    http_send_response = "send_response"(
        filter: Envoy, status: u32, headers: *mut HttpHeader, count: usize, body: Buffer, details: Buffer
    );
}}

callbacks! { "lb_" {
    lb_priorities = "get_priority_set_size"(lb: Envoy) -> usize;
    lb_hosts = "get_hosts_count"(lb: Envoy, priority: u32) -> usize;
    lb_healthy_hosts = "get_healthy_hosts_count"(lb: Envoy, priority: u32) -> usize;
    lb_healthy_address = "get_healthy_host_address"(lb: Envoy, priority: u32, index: usize, out: *mut Buffer) -> bool;
    lb_healthy_weight = "get_healthy_host_weight"(lb: Envoy, priority: u32, index: usize) -> u32;
    lb_address = "get_host_address"(lb: Envoy, priority: u32, index: usize, out: *mut Buffer) -> bool;
    lb_context_hash = "context_compute_hash_key"(context: Envoy, out: *mut u64) -> bool;
}}

callbacks! { "bootstrap_extension_" {
    extension_gauge_value = "get_gauge_value"(extension: Envoy, name: Buffer, value: *mut u64) -> bool;
    extension_ready = "config_signal_init_complete"(config: Envoy);
    extension_timer_new = "timer_new"(config: Envoy) -> Envoy;
    extension_timer_enable = "timer_enable"(timer: Envoy, milliseconds: u64);
    extension_timer_delete = "timer_delete"(timer: Envoy);
    extension_scheduler_new = "config_scheduler_new"(config: Envoy) -> Envoy;
    extension_scheduler_commit = "config_scheduler_commit"(scheduler: Envoy, event: u64);
    extension_scheduler_delete = "config_scheduler_delete"(scheduler: Envoy);
    extension_http_callout = "http_callout"(
        config: Envoy, id: *mut u64, cluster: Buffer, headers: *const HttpHeader, count: usize, body: Buffer,
        timeout_milliseconds: u64
    ) -> u32;
    extension_define_counter = "config_define_counter"(
        config: Envoy, name: Buffer, labels: *const Buffer, count: usize, id: *mut usize
    ) -> u32;
    extension_define_gauge = "config_define_gauge"(
        config: Envoy, name: Buffer, labels: *const Buffer, count: usize, id: *mut usize
    ) -> u32;
    extension_increment_counter = "config_increment_counter"(
        config: Envoy, id: usize, values: *const Buffer, count: usize, by: u64
    ) -> u32;
    extension_set_gauge = "config_set_gauge"(
        config: Envoy, id: usize, values: *const Buffer, count: usize, to: u64
    ) -> u32;
}}
