//! The tracker against conversations that are built by hand and generated ([`properties`]).

mod build;
mod errors;
#[path = "../events/mod.rs"]
mod events;
mod irregular;
mod play;
mod properties;
mod responses;
mod statements;
