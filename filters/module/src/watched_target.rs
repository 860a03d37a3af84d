//! A connection to another node whose events come to the module, while somebody has a use for it.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Weak;

use crate::events::{self, Key, Visitor};
use crate::moving::Vehicle;
use crate::target::{Gone, Target, TargetFault};

/// None, or one. Closed with its owner.
#[derive(Default)]
pub(crate) struct WatchedTarget(RefCell<Option<(Target, Key)>>);

impl WatchedTarget {
    /// Begins to connect to a node, in place of the one before. The connection gets the options of `vehicle`, and its PROXY
    /// header. None: it cannot be made, or not be watched.
    pub(crate) fn connect(&self, vehicle: &dyn Vehicle, address: SocketAddr, visitor: Weak<dyn Visitor>) -> Option<()> {
        let target = vehicle.link().socket.with_descriptor(|like| Target::connect(address, like))?.ok()?;
        target.send(&vehicle.proxy_header()).ok()?;
        self.watch(target, visitor)
    }

    /// Takes a connection that exists. None: it cannot be watched.
    pub(crate) fn watch(&self, target: Target, visitor: Weak<dyn Visitor>) -> Option<()> {
        self.close();
        let key = events::watch(target.descriptor(), visitor)?;
        self.0.replace(Some((target, key)));
        Some(())
    }

    /// Sends the SSLRequest, and begins TLS with the node of that name.
    pub(crate) fn secure(&self, vehicle: &dyn Vehicle, name: &str, request: &[u8]) -> Result<(), TargetFault> {
        let stream = match vehicle.tls_with(name) {
            Some(Ok(stream)) => stream,
            Some(Err(error)) => {
                abi::log!(Warn, "no TLS with {name}, to which a session was to go: {error}");
                return Err(TargetFault::Gone);
            }
            None => return Err(TargetFault::Gone),
        };
        let secured = self.with(|target| target.secure(request, stream));
        if secured == Err(TargetFault::Invalid) {
            abi::log!(Warn, "no session goes to {name}: it sent data behind its greeting, before TLS");
        }
        secured
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Runs `run` for the connection, which is gone if it was closed.
    pub(crate) fn with<T, E: From<Gone>>(&self, run: impl FnOnce(&Target) -> Result<T, E>) -> Result<T, E> {
        self.0.borrow().as_ref().map_or(Err(Gone.into()), |(target, _)| run(target))
    }

    /// Has its events reported again, if it has more to send.
    pub(crate) fn give_turn(&self) {
        if let Some((target, key)) = &*self.0.borrow()
            && target.takes_another_turn()
        {
            events::watch_again(target.descriptor(), *key);
        }
    }

    /// The connection, which is still watched under that key.
    pub(crate) fn take(&self) -> Option<(Target, Key)> {
        self.0.take()
    }

    pub(crate) fn close(&self) {
        if let Some((target, key)) = self.0.take() {
            events::forget(target.descriptor(), key);
        }
    }
}

impl Drop for WatchedTarget {
    fn drop(&mut self) {
        self.close();
    }
}
