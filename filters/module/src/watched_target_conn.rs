//! A [`TargetConn`] whose events the module watches as long as the connection is used.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use crate::conn::Conn;
use crate::migration_driver::UpstreamSocket;
use crate::offload::{AuxFd, EventKey};
use crate::target_conn::{TargetConn, TargetFault, TargetLost};

/// The connection, if there is one. Dropping this value closes it.
#[derive(Default)]
pub(crate) struct WatchedTargetConn(RefCell<Option<(TargetConn, EventKey)>>);

impl WatchedTargetConn {
    /// Begins to connect to a node, and replaces the previous connection. The new connection gets the socket options
    /// and the PROXY header of `upstream`. None: the connection cannot be made or watched.
    pub(crate) fn connect(
        &self,
        upstream: &dyn UpstreamSocket,
        address: SocketAddr,
        aux_fd: Weak<dyn AuxFd>,
    ) -> Option<()> {
        let Conn { worker, socket, .. } = upstream.conn();
        let target = socket.with_descriptor(|like| TargetConn::connect(Rc::clone(worker), address, like))?.ok()?;
        target.send(&upstream.proxy_header()).ok()?;
        self.watch(target, aux_fd)
    }

    /// Watches an existing connection. None: the connection cannot be watched.
    pub(crate) fn watch(&self, target: TargetConn, aux_fd: Weak<dyn AuxFd>) -> Option<()> {
        self.close();
        let key = target.worker.events.watch(target.descriptor(), aux_fd)?;
        self.0.replace(Some((target, key)));
        Some(())
    }

    /// Sends the SSLRequest, and begins TLS with the node `name`.
    pub(crate) fn start_tls(
        &self,
        upstream: &dyn UpstreamSocket,
        name: &str,
        request: &[u8],
    ) -> Result<(), TargetFault> {
        let stream = match upstream.create_tls(name) {
            Some(Ok(stream)) => stream,
            Some(Err(error)) => {
                envoy_abi::log!(Warn, "no session goes to {name}: TLS cannot begin: {error}");
                return Err(TargetFault::Lost);
            }
            None => return Err(TargetFault::Lost),
        };
        let result = self.with(|target| target.start_tls(request, stream));
        if result == Err(TargetFault::Invalid) {
            envoy_abi::log!(Warn, "no session goes to {name}: it sent data behind its greeting, before TLS");
        }
        result
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Whether the TCP connection is established.
    pub(crate) fn is_connected(&self) -> bool {
        self.0.borrow().as_ref().is_some_and(|(target, _)| target.is_connected())
    }

    /// Runs `run` with the connection. Err: the connection was closed.
    pub(crate) fn with<T, E: From<TargetLost>>(&self, run: impl FnOnce(&TargetConn) -> Result<T, E>) -> Result<T, E> {
        self.0.borrow().as_ref().map_or(Err(TargetLost.into()), |(target, _)| run(target))
    }

    /// Makes the kernel report the connection's events again if there is more to send.
    pub(crate) fn rearm(&self) {
        if let Some((target, key)) = &*self.0.borrow()
            && target.take_has_more()
        {
            target.worker.events.rearm_aux(target.descriptor(), *key);
        }
    }

    /// Takes the connection, which is still watched under the returned key.
    pub(crate) fn take(&self) -> Option<(TargetConn, EventKey)> {
        self.0.take()
    }

    pub(crate) fn close(&self) {
        if let Some((target, key)) = self.0.take() {
            target.worker.events.unwatch(target.descriptor(), key);
        }
    }
}

impl Drop for WatchedTargetConn {
    fn drop(&mut self) {
        self.close();
    }
}
