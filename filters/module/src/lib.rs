//! The dynamic module.
