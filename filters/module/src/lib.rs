//! The dynamic module: Envoy's hooks wired to the MySQL protocol.
//!
//! One client connection is a [`session::Session`]. Four parts of Envoy work on it, all on one worker:
//!
//! * [`client_socket`] has the client's bytes: plain or TLS, the login, then what the tracker is to see;
//! * [`node_socket`] has the node's: the PROXY header, the greeting, TLS, then the same;
//! * [`filter`] begins the session, limits and ends it; no byte passes through it;
//! * [`policy`] chooses the node, and never one that this session has tried.
//!
//! [`live_config`] is how workers hear of what the control plane changes while Envoy runs.
//! [`telemetry`] counts what they do, and tells Envoy's metrics once a second.

#![deny(unsafe_code)]

mod client_socket;
mod clock;
mod commands;
mod config;
mod deadlines;
mod departures;
mod ejection;
mod events;
mod filter;
mod hosts;
mod link;
mod live_config;
mod login_elsewhere;
mod moving;
mod node;
mod node_socket;
mod nonblocking;
mod old_connection;
mod policy;
mod port_probe;
mod proxy_header;
mod queue;
mod reachability;
mod refresh;
mod sentinels;
mod session;
mod states_memory;
mod target;
mod telemetry;
mod travel;
mod unread;
mod wakers;
mod watched_target;
mod worker;

use abi::extension::{Extension, Metrics};
use abi::filter::FilterFactory;
use abi::policy::PolicyFactory;
use abi::socket::SocketFactory;

struct Tidevoy;

abi::export!(Tidevoy);

impl abi::Module for Tidevoy {
    fn downstream_socket(&self, name: &str, text: &[u8]) -> Result<Box<dyn SocketFactory>, String> {
        config::named("client", name)?;
        Ok(Box::new(client_socket::Factory::new(config::read(text)?)?))
    }

    fn upstream_socket(&self, name: &str, text: &[u8]) -> Result<Box<dyn SocketFactory>, String> {
        config::named("node", name)?;
        Ok(Box::new(node_socket::Factory::new(config::read(text)?)?))
    }

    fn filter(&self, name: &str, text: &[u8]) -> Result<Box<dyn FilterFactory>, String> {
        config::named("session", name)?;
        Ok(Box::new(filter::Factory::new(&config::read(text)?)))
    }

    fn listener_filter(&self, name: &str, text: &[u8]) -> Result<(), String> {
        config::named("live_config", name)?;
        live_config::received(config::LiveConfig::read(text)?);
        Ok(())
    }

    fn policy(&self, name: &str, text: &[u8]) -> Result<Box<dyn PolicyFactory>, String> {
        config::named("least_sessions", name)?;
        let config: config::Policy = config::read(text)?;
        departures::begin(config.pace());
        states_memory::set_limits(config.states_max_bytes as usize, config.states_budget_bytes as usize);
        Ok(Box::new(policy::Factory::new(config)))
    }

    fn extension(&self, name: &str, text: &[u8], metrics: &mut Metrics) -> Result<Box<dyn Extension>, String> {
        config::named("telemetry", name)?;
        let config::Telemetry {} = config::read(text)?;
        Ok(Box::new(telemetry::Reporter::new(metrics)?))
    }
}
