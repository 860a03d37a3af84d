//! Envoy's C ABI for dynamic modules (v0.2.0, Envoy 1.40): declarations and safe wrappers.
//!
//! All unsafe code of the module is in this crate. Each extension point is a pair: a trait that the module implements
//! ([`socket::TransportSocket`], [`filter::NetworkFilter`], [`http_filter::Responder`], [`policy::Policy`],
//! [`extension::Extension`]) and a handle
//! with Envoy's side ([`socket::Socket`], ...). The exported hooks find the implementations through the [`Module`] that
//! [`export!`] names, and catch every panic.
//!
//! When Envoy destroys an object, its handles become no-ops, so a module may keep clones of them anywhere. Handles stay
//! on the thread of their worker.

#[cfg(tidevoy_sanitized)]
mod asan_allocator;
mod buffer;
mod descriptor;
pub mod events;
pub mod extension;
pub mod filter;
mod guard;
pub mod http_callout;
pub mod http_filter;
pub mod listener_filter;
pub mod log;
pub mod module;
pub mod policy;
pub mod runtime;
pub mod socket;
pub mod socket_options;
mod sys;
pub mod tcp;

pub use guard::guarded;
pub use module::Module;
