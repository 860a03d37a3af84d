//! Envoy's C ABI for dynamic modules (v0.2.0, Envoy 1.40): declarations and safe wrappers.
