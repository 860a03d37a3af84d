//! The clients that wait for the result of a probe.

use std::rc::{Rc, Weak};

use crate::panics::{CloseAfterPanic, run_guarded};

/// A client that requests a probe.
pub(crate) trait ProbeClient: CloseAfterPanic {
    fn on_probe_result(self: Rc<Self>, is_there: bool);
}

/// The clients that wait for one probe.
#[derive(Default)]
pub(super) struct ProbeRequests {
    /// Clients whose connection was idle, and was reset.
    resets: Vec<Weak<dyn ProbeClient>>,
    others: Vec<Weak<dyn ProbeClient>>,
}

impl ProbeRequests {
    pub(super) fn add(&mut self, client: Weak<dyn ProbeClient>, is_reset: bool) {
        if is_reset { &mut self.resets } else { &mut self.others }.push(client);
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.resets.append(&mut other.resets);
        self.others.append(&mut other.others);
    }

    pub(super) fn has_resets(&self) -> bool {
        !self.resets.is_empty()
    }

    /// Takes the clients whose connection was reset.
    pub(super) fn take_resets(&mut self) -> Self {
        Self { resets: std::mem::take(&mut self.resets), others: Vec::new() }
    }

    /// Whether no client waits any more. Removes clients that are gone until one is found that still waits, so that
    /// thousands of calls, one for each client, take at most twice as many steps in total as there are clients.
    pub(super) fn is_abandoned(&mut self) -> bool {
        [&mut self.resets, &mut self.others].into_iter().all(|clients| {
            while clients.last().is_some_and(|client| client.strong_count() == 0) {
                clients.pop();
            }
            clients.is_empty()
        })
    }

    /// Tells all clients the result, even if one of them panics.
    pub(super) fn answer(self, is_there: bool) {
        for client in self.resets.into_iter().chain(self.others) {
            if let Some(client) = client.upgrade() {
                run_guarded("the result of a probe", &*client, || Rc::clone(&client).on_probe_result(is_there));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct TestClient;

    impl ProbeClient for TestClient {
        fn on_probe_result(self: Rc<Self>, _: bool) {}
    }

    impl CloseAfterPanic for TestClient {
        fn close_after_panic(&self) {}
    }

    #[test]
    fn clients_that_are_gone_are_removed_at_the_next_check() {
        let mut clients: Vec<Rc<TestClient>> = (0..1000).map(|_| Rc::new(TestClient)).collect();
        let mut requests = ProbeRequests::default();
        for client in &clients {
            requests.add(Rc::downgrade(&(Rc::clone(client) as Rc<dyn ProbeClient>)), false);
        }
        assert!(!requests.is_abandoned());
        clients.truncate(1);
        assert!(!requests.is_abandoned());
        assert_eq!(requests.others.len(), 1);
        clients.clear();
        assert!(requests.is_abandoned());
    }
}
