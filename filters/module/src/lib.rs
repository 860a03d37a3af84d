//! The dynamic module: Envoy's hooks wired to the MySQL protocol.
//!
//! Each client connection is a [`session::Session`]. Four extensions of Envoy serve it, all on one worker thread:
//!
//! * [`client_socket`], the client's transport socket: TLS, the login, then the tracking of commands;
//! * [`node_socket`], the node's transport socket: the PROXY header, the greeting, TLS, then the tracking of responses;
//! * [`filter`], a network filter: starts, limits and ends the session; no byte passes through this filter;
//! * [`policy`], the load-balancing policy: chooses a node that the session has not tried yet.
//!
//! [`worker`] has the state of one worker, and the work of a turn.
//! [`readiness`] tells load balancers whether this Envoy is ready for new clients.
//! [`live_config`] applies the configuration that the control plane changes while Envoy runs: the nodes, and
//! [`live_settings`].
//! [`rules`] has the rules that block, limit, rewrite or log statements.
//! [`login_log`] writes a line for each login, and [`statement_log`] one for each slow statement.
//! [`statements`] reports statistics of statements, and [`capture`] writes the traffic to files.
//! [`fleet_commands`] runs commands of the control plane about sessions, and asks which session a KILL means.
//! [`telemetry`] reports all counts as Envoy's metrics once a second.

#![deny(unsafe_code)]

mod address_table;
mod capture;
mod client_socket;
mod clock;
mod commands;
mod config;
mod conn;
mod connection_limits;
mod deadlines;
mod delay_queue;
mod ejection;
mod envoy_drain;
mod filter;
mod fleet_commands;
mod grpc;
mod held_memory;
mod hosts;
mod line_log;
mod live_config;
mod live_settings;
mod login_failover;
mod login_limits;
mod login_log;
mod migration_driver;
mod migration_scheduler;
mod migration_state;
mod no_node_log;
mod node;
mod node_socket;
mod nonblocking;
mod offload;
mod old_conn;
mod panics;
mod policy;
mod port_probe;
mod proxy_header;
mod reachability;
mod readiness;
mod refresh;
mod rules;
mod secrets;
mod sentinels;
mod session;
mod slot;
mod statement_log;
mod statements;
mod states_memory;
mod switches;
mod target_conn;
mod telemetry;
mod tls_options;
mod trusted_proxies;
mod unread;
mod waiting_logins;
mod wakers;
mod watched_target_conn;
mod worker;

use envoy_abi::extension::{Extension, Metrics};
use envoy_abi::filter::FilterFactory;
use envoy_abi::http_filter::Responder;
use envoy_abi::listener_filter::ListenerFilter;
use envoy_abi::policy::PolicyFactory;
use envoy_abi::socket::SocketFactory;

struct Tidevoy;

envoy_abi::export!(Tidevoy);

impl envoy_abi::Module for Tidevoy {
    fn downstream_socket(&self, name: &str, text: &[u8]) -> Result<Box<dyn SocketFactory>, String> {
        config::check_name("client", name)?;
        Ok(Box::new(client_socket::ClientSocketFactory::new(&config::parse(text)?)?))
    }

    fn upstream_socket(&self, name: &str, text: &[u8]) -> Result<Box<dyn SocketFactory>, String> {
        config::check_name("node", name)?;
        Ok(Box::new(node_socket::NodeSocketFactory::new(&config::parse(text)?)?))
    }

    fn filter(&self, name: &str, text: &[u8]) -> Result<Box<dyn FilterFactory>, String> {
        config::check_name("session", name)?;
        Ok(Box::new(filter::SessionFilterFactory::new(&config::parse(text)?)))
    }

    fn listener_filter(&self, name: &str, text: &[u8]) -> Result<Box<dyn ListenerFilter>, String> {
        if name == "trusted_proxies" {
            let config::TrustedProxiesConfig { networks } = config::parse(text)?;
            return Ok(Box::new(trusted_proxies::TrustedProxies::fixed(networks)));
        }
        if name == "proxy_protocol" {
            return Ok(Box::new(trusted_proxies::TrustedProxies::live(&config::parse(text)?)));
        }
        config::check_name("live_config", name)?;
        live_config::on_received(config::LiveConfig::read(text)?);
        Ok(Box::new(live_config::LiveConfigFilter))
    }

    fn http_filter(&self, name: &str, text: &[u8]) -> Result<Box<dyn Responder>, String> {
        config::check_name("readiness", name)?;
        let config::ReadinessConfig {} = config::parse(text)?;
        Ok(Box::new(readiness::ReadinessResponder))
    }

    fn policy(&self, name: &str, text: &[u8]) -> Result<Box<dyn PolicyFactory>, String> {
        config::check_name("least_sessions", name)?;
        let config: config::PolicyConfig = config::parse(text)?;
        if live_settings::current().is_none() {
            live_settings::set_migration_limits(&config.migration_limits());
        }
        Ok(Box::new(policy::LeastSessionsFactory::new(config)))
    }

    fn extension(&self, name: &str, text: &[u8], metrics: &mut Metrics) -> Result<Box<dyn Extension>, String> {
        config::check_name("telemetry", name)?;
        let config::TelemetryConfig {} = config::parse(text)?;
        Ok(Box::new(telemetry::Reporter::new(metrics)?))
    }
}
