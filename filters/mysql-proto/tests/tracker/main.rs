//! Tests the tracker with conversations that are written by hand or generated ([`properties`]).

mod build;
mod errors;
#[path = "../events/mod.rs"]
mod events;
mod irregular;
mod play;
mod properties;
mod responses;
mod statements;
