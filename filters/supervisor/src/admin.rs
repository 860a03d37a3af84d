//! Envoy's admin port. Its calls: envoyproxy.io/docs/envoy/v1.40.0/operations/admin

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::drain::Gauges;

/// Longer than a main thread that is not overloaded takes to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    #[error("Envoy has not written the address of its admin port to {0}; does its bootstrap have one?")]
    NoAddress(PathBuf),
    #[error("Envoy's admin port {0} does not do {1}: {2}")]
    Failed(SocketAddr, &'static str, ureq::Error),
}

/// The admin port whose address Envoy writes to a file (`--admin-address-path`).
pub(crate) struct AdminPort {
    address_file: PathBuf,
    /// None: Envoy has not written it yet. It is kept in memory, since other programs may clean up the directory.
    address: Option<SocketAddr>,
    agent: ureq::Agent,
}

impl AdminPort {
    pub(crate) fn new(address_file: PathBuf) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).proxy(None);
        Self { address_file, address: None, agent: config.build().into() }
    }

    pub(crate) fn address_file(&self) -> &Path {
        &self.address_file
    }

    /// The address. Reads the file if the address was not known yet.
    ///
    /// # Errors
    /// Envoy has not written it yet.
    pub(crate) fn find_address(&mut self) -> Result<SocketAddr, AdminError> {
        if self.address.is_none() {
            let text = std::fs::read_to_string(&self.address_file).unwrap_or_default();
            self.address = text.trim().parse().ok();
        }
        self.address.ok_or_else(|| AdminError::NoAddress(self.address_file.clone()))
    }

    /// Makes the module drain this Envoy.
    ///
    /// # Errors
    /// Envoy does not do it.
    pub(crate) fn request_drain(&mut self) -> Result<(), AdminError> {
        self.post("/runtime_modify?tidevoy.drain=true")
    }

    /// Closes the ports for clients. Connections continue.
    ///
    /// # Errors
    /// Envoy does not do it.
    pub(crate) fn close_listeners(&mut self) -> Result<(), AdminError> {
        self.post("/drain_listeners")
    }

    /// Reads how far the drain is.
    ///
    /// # Errors
    /// Envoy does not answer.
    pub(crate) fn gauges(&mut self) -> Result<Gauges, AdminError> {
        const PATH: &str = "/stats?type=Gauges&filter=%5Etidevoy%5C.(drain_phase%7Cclients)$";
        let address = self.find_address()?;
        let response = self.agent.get(format!("http://{address}{PATH}")).call();
        let text = response.and_then(|mut response| response.body_mut().read_to_string());
        text.map(|text| Gauges::parse(&text)).map_err(|error| AdminError::Failed(address, PATH, error))
    }

    fn post(&mut self, path: &'static str) -> Result<(), AdminError> {
        let address = self.find_address()?;
        let response = self.agent.post(format!("http://{address}{path}")).send_empty();
        response.map(drop).map_err(|error| AdminError::Failed(address, path, error))
    }
}
