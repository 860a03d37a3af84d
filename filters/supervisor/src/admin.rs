//! Envoy's admin port. Its calls: envoyproxy.io/docs/envoy/v1.40.0/operations/admin

use std::path::PathBuf;

use crate::drain::Gauges;

/// Longer than a busy main thread takes to answer. A whole number, as the HTTP library wants it.
const TIMEOUT_SECONDS: u64 = 2;

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    #[error("Envoy has not written the address of its admin port to {0}; does its bootstrap have one?")]
    NoAddress(PathBuf),
    #[error("Envoy's admin port {0} does not answer: {1}")]
    NoAnswer(String, minreq::Error),
    #[error("Envoy's admin port {0} answered {1} to {2}")]
    Refused(String, i32, &'static str),
}

/// The admin port whose address Envoy writes to a file (`--admin-address-path`).
pub(crate) struct AdminPort {
    pub(crate) address_file: PathBuf,
}

impl AdminPort {
    /// Makes the module drain this Envoy.
    ///
    /// # Errors
    /// Envoy does not do it.
    pub(crate) fn request_drain(&self) -> Result<(), AdminError> {
        self.call(minreq::Method::Post, "/runtime_modify?tidevoy.drain=true").map(drop)
    }

    /// Closes the ports for clients. Connections continue.
    ///
    /// # Errors
    /// Envoy does not do it.
    pub(crate) fn close_listeners(&self) -> Result<(), AdminError> {
        self.call(minreq::Method::Post, "/drain_listeners").map(drop)
    }

    /// Reads how far the drain is.
    ///
    /// # Errors
    /// Envoy does not answer.
    pub(crate) fn gauges(&self) -> Result<Gauges, AdminError> {
        const PATH: &str = "/stats?type=Gauges&filter=%5Etidevoy%5C.(drain_phase%7Cclients)$";
        self.call(minreq::Method::Get, PATH).map(|text| Gauges::parse(&text))
    }

    fn call(&self, method: minreq::Method, path: &'static str) -> Result<String, AdminError> {
        let address = std::fs::read_to_string(&self.address_file).unwrap_or_default();
        let address = address.trim();
        if address.is_empty() {
            return Err(AdminError::NoAddress(self.address_file.clone()));
        }
        let no_answer = |error| AdminError::NoAnswer(address.to_owned(), error);
        let request = minreq::Request::new(method, format!("http://{address}{path}")).with_timeout(TIMEOUT_SECONDS);
        let response = request.send().map_err(no_answer)?;
        if response.status_code != 200 {
            return Err(AdminError::Refused(address.to_owned(), response.status_code, path));
        }
        Ok(response.as_str().map_err(no_answer)?.to_owned())
    }
}
