//! A module for tests. The hook after which its configuration is named panics at every second call, or on every second
//! connection if it belongs to a filter or a socket; `configuration` always panics. The other hooks do little.
//! `tests/integration/module/test_panics.py` builds it and loads it into a real Envoy.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use envoy_abi::extension::{Extension, Metrics};
use envoy_abi::filter::{Filter, FilterFactory, NetworkFilter};
use envoy_abi::http_callout::HttpClient;
use envoy_abi::http_filter::{Responder, Response};
use envoy_abi::listener_filter::{Accept, ListenerFilter, Verdict};
use envoy_abi::policy::{Context, Hosts, Policy, PolicyFactory, Position};
use envoy_abi::socket::{Closed, Io, IoOutcome, Socket, SocketFactory, TransportSocket};

struct Panics;

envoy_abi::export!(Panics);

impl envoy_abi::Module for Panics {
    fn downstream_socket(&self, name: &str, _: &[u8]) -> Result<Box<dyn SocketFactory>, String> {
        Ok(Box::new(Part::named(name)))
    }

    fn upstream_socket(&self, name: &str, _: &[u8]) -> Result<Box<dyn SocketFactory>, String> {
        Ok(Box::new(Part::named(name)))
    }

    fn filter(&self, name: &str, _: &[u8]) -> Result<Box<dyn FilterFactory>, String> {
        assert_ne!(name, "configuration", "on purpose");
        Ok(Box::new(Part::named(name)))
    }

    fn listener_filter(&self, name: &str, _: &[u8]) -> Result<Box<dyn ListenerFilter>, String> {
        Ok(Box::new(Part::named(name)))
    }

    fn http_filter(&self, name: &str, _: &[u8]) -> Result<Box<dyn Responder>, String> {
        Ok(Box::new(Part::named(name)))
    }

    fn policy(&self, name: &str, _: &[u8]) -> Result<Box<dyn PolicyFactory>, String> {
        Ok(Box::new(Part::named(name)))
    }

    fn extension(&self, name: &str, _: &[u8], _: &mut Metrics) -> Result<Box<dyn Extension>, String> {
        Ok(Box::new(Part::named(name)))
    }
}

/// Any extension of the module.
struct Part {
    panicking: String,
    turn: AtomicBool,
}

impl Part {
    fn named(name: &str) -> Self {
        Self { panicking: name.to_owned(), turn: AtomicBool::new(false) }
    }

    /// The hook that panics this time. Empty: none.
    fn next(&self) -> String {
        if self.turn.fetch_xor(true, Ordering::Relaxed) { self.panicking.clone() } else { String::new() }
    }
}

fn reach(hook: &str, panicking: &str) {
    assert_ne!(hook, panicking, "on purpose");
}

impl ListenerFilter for Part {
    fn accept(&self, _: &dyn Fn() -> Option<SocketAddr>) -> Accept {
        if self.panicking == "inspect" {
            return Accept::Inspect(16);
        }
        reach("accept", &self.next());
        Accept::Continue
    }

    fn inspect(&self, _: &[u8]) -> Verdict {
        reach("inspect", &self.next());
        Verdict::Continue { length: 0, addresses: None }
    }
}

impl FilterFactory for Part {
    fn filter(&self, _: Filter) -> Option<Box<dyn NetworkFilter>> {
        let panicking = self.next();
        reach("new", &panicking);
        Some(Box::new(Plain { socket: None, panicking }))
    }
}

impl SocketFactory for Part {
    fn create(&self, socket: Socket) -> Option<Box<dyn TransportSocket>> {
        let panicking = self.next();
        reach("new", &panicking);
        Some(Box::new(Plain { socket: Some(socket), panicking }))
    }
}

impl PolicyFactory for Part {
    fn policy(&self) -> Box<dyn Policy> {
        Box::new(Self::named(&self.panicking))
    }
}

impl Policy for Part {
    fn hosts_changed(&self, _: &Hosts<'_>) {}

    fn choose(&self, _: &Hosts<'_>, _: Context<'_>) -> Option<Position> {
        reach("choose", &self.next());
        Some(Position { priority: 0, index: 0 })
    }
}

impl Responder for Part {
    fn respond(&self) -> Response {
        reach("respond", &self.next());
        Response { status: 200, body: "responded".to_owned() }
    }
}

impl Extension for Part {
    fn tick(&self, _: &Metrics, _: &HttpClient) {
        reach("tick", &self.next());
    }

    fn interval(&self) -> u64 {
        10
    }
}

/// The filter or the socket of one connection.
struct Plain {
    socket: Option<Socket>,
    panicking: String,
}

impl NetworkFilter for Plain {
    fn on_new_connection(&self) -> bool {
        reach("begun", &self.panicking);
        true
    }

    fn on_wake(&self) {}
}

impl TransportSocket for Plain {
    fn on_attached(&self) {
        reach("attached", &self.panicking);
    }

    fn on_connected(&self) {
        reach("connected", &self.panicking);
        if let Some(socket) = &self.socket {
            socket.raise_connected();
        }
    }

    fn read(&self) -> IoOutcome {
        reach("read", &self.panicking);
        let (Some(socket), mut buffer) = (&self.socket, [0; 1024]) else { return IoOutcome::close(0) };
        let mut passed = 0;
        loop {
            match socket.receive(&mut buffer).io {
                Io::Done(0) => return IoOutcome { close: false, bytes: passed, end_of_stream: true },
                Io::Done(length) => {
                    socket.pass_on(&buffer[..length]);
                    passed += length;
                }
                Io::WouldBlock => return IoOutcome::open(passed),
                Io::Broken => return IoOutcome::close(passed),
            }
        }
    }

    fn write(&self, end: bool) -> IoOutcome {
        reach("write", &self.panicking);
        let Some(socket) = &self.socket else { return IoOutcome::close(0) };
        let mut written = 0;
        while socket.write_buffer_length() > 0 {
            match socket.flush() {
                Io::Done(bytes) => written += bytes,
                Io::WouldBlock => break,
                Io::Broken => return IoOutcome::close(written),
            }
        }
        if end {
            socket.shutdown_write();
        }
        IoOutcome::open(written)
    }

    fn on_closed(&self, _: Closed) {
        reach("closed", &self.panicking);
    }
}
