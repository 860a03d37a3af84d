//! The `proxy_protocol` listener filter: reads the PROXY header that trusted proxies send. It lets all other clients
//! pass, or disconnects them, as the control plane says. The filter `trusted_proxies` does the same with networks that
//! do not change.
//!
//! Envoy's own listener filter reads a header from any client, and waits for the first bytes of a client that sends
//! none. A MySQL client sends nothing before the server's greeting, so this filter decides by the client's address
//! whether to wait. A header from any other client reaches the session, where it is a protocol error.

use std::net::{IpAddr, SocketAddr};

use envoy_abi::listener_filter::{Accept, Addresses, ListenerFilter, Verdict};
use ipnet::IpNet;
use ppp::{HeaderResult, PartialResult, v1, v2};

use crate::config::ProxyRulesConfig;
use crate::live_settings;

/// Longest header, with its additional fields (TLVs). The specification asks receivers to accept 536 bytes at least.
const MAX_HEADER_BYTES: usize = 4096;
/// Longest header of version 1, with its line break (haproxy.org, `proxy-protocol.txt`, section 2.1).
const MAX_LINE_BYTES: usize = 107;

/// Which clients send a PROXY header.
#[derive(Debug)]
pub(crate) struct ProxyRules {
    networks: Vec<IpNet>,
    /// Other clients are disconnected.
    is_required: bool,
}

impl ProxyRules {
    fn accept(&self, peer: &dyn Fn() -> Option<SocketAddr>) -> Accept {
        if self.networks.is_empty() {
            return Accept::Continue;
        }
        // A dual-stack listener reports IPv4 clients as IPv6 clients.
        let is_trusted = |ip: IpAddr| self.networks.iter().any(|network| network.contains(&ip));
        if peer().is_some_and(|peer| is_trusted(peer.ip().to_canonical())) {
            Accept::Inspect(MAX_HEADER_BYTES)
        } else if self.is_required {
            Accept::Close("the client is no trusted proxy")
        } else {
            Accept::Continue
        }
    }
}

impl From<&ProxyRulesConfig> for ProxyRules {
    fn from(config: &ProxyRulesConfig) -> Self {
        Self { networks: config.networks.clone(), is_required: config.required }
    }
}

pub(crate) struct TrustedProxies {
    /// The rules until the control plane has sent others ([`live_settings`]).
    rules: ProxyRules,
    /// The control plane may change the rules.
    is_live: bool,
}

impl TrustedProxies {
    /// With rules that do not change.
    pub(crate) fn fixed(networks: Vec<IpNet>) -> Self {
        Self { rules: ProxyRules { networks, is_required: false }, is_live: false }
    }

    pub(crate) fn live(config: &ProxyRulesConfig) -> Self {
        Self { rules: config.into(), is_live: true }
    }
}

impl ListenerFilter for TrustedProxies {
    fn accept(&self, peer: &dyn Fn() -> Option<SocketAddr>) -> Accept {
        match live_settings::current() {
            Some(live) if self.is_live => live.proxy_rules.accept(peer),
            _ => self.rules.accept(peer),
        }
    }

    fn inspect(&self, received: &[u8]) -> Verdict {
        if is_part_of_line(received) {
            return Verdict::Incomplete;
        }
        match HeaderResult::parse(received) {
            header if header.is_incomplete() => Verdict::Incomplete,
            HeaderResult::V1(Ok(header)) => {
                Verdict::Continue { length: header.header.len(), addresses: of_v1(&header.addresses) }
            }
            HeaderResult::V2(Ok(header)) => {
                let addresses = if header.command == v2::Command::Proxy { of_v2(&header.addresses) } else { None };
                Verdict::Continue { length: header.len(), addresses }
            }
            HeaderResult::V1(Err(_)) | HeaderResult::V2(Err(_)) => {
                Verdict::Close("a trusted proxy sent no valid PROXY header")
            }
        }
    }
}

/// Whether `received` is an incomplete header of version 1. The parser would reject some incomplete lines, such as one
/// without ports.
fn is_part_of_line(received: &[u8]) -> bool {
    let is_text = b"PROXY ".iter().zip(received).all(|(expected, byte)| expected == byte);
    is_text && received.len() < MAX_LINE_BYTES && !received.contains(&b'\n')
}

/// The addresses in a text header. None: the proxy does not know them, and the connection keeps its own.
fn of_v1(addresses: &v1::Addresses) -> Option<Addresses> {
    match *addresses {
        v1::Addresses::Tcp4(ipv4) => Some(from_ipv4(ipv4)),
        v1::Addresses::Tcp6(ipv6) => Some(from_ipv6(ipv6)),
        v1::Addresses::Unknown => None,
    }
}

/// The addresses in a binary header. None: as for [`of_v1`].
fn of_v2(addresses: &v2::Addresses) -> Option<Addresses> {
    match *addresses {
        v2::Addresses::IPv4(ipv4) => Some(from_ipv4(ipv4)),
        v2::Addresses::IPv6(ipv6) => Some(from_ipv6(ipv6)),
        v2::Addresses::Unspecified | v2::Addresses::Unix(_) => None,
    }
}

fn from_ipv4(header: v2::IPv4) -> Addresses {
    Addresses {
        client: (header.source_address, header.source_port).into(),
        listener: (header.destination_address, header.destination_port).into(),
    }
}

fn from_ipv6(header: v2::IPv6) -> Addresses {
    Addresses {
        client: (header.source_address, header.source_port).into(),
        listener: (header.destination_address, header.destination_port).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy_header;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn networks() -> Vec<IpNet> {
        ["10.1.0.0/16", "fd00::/8"].map(|network| network.parse().expect("a network")).to_vec()
    }

    fn filter() -> TrustedProxies {
        TrustedProxies::fixed(networks())
    }

    /// The length of the header, and the client and listener that it names.
    fn passed(received: &[u8]) -> (usize, Option<(SocketAddr, SocketAddr)>) {
        match filter().inspect(received) {
            Verdict::Continue { length, addresses } => {
                (length, addresses.map(|addresses| (addresses.client, addresses.listener)))
            }
            _ => panic!("it does not pass"),
        }
    }

    #[test]
    fn header_is_awaited_only_from_trusted_proxies() {
        let waits = |peer| matches!(filter().accept(&|| peer), Accept::Inspect(_));
        for trusted in ["10.1.255.255:1", "[::ffff:10.1.0.1]:1", "[fd01::1]:1"] {
            assert!(waits(Some(address(trusted))), "{trusted}");
        }
        for other in ["10.2.0.1:1", "[::ffff:10.2.0.1]:1", "[fe80::1]:1"] {
            assert!(!waits(Some(address(other))), "{other}");
        }
        assert!(!waits(None));
    }

    #[test]
    fn other_clients_are_disconnected_if_a_header_is_required() {
        let required = TrustedProxies::live(&ProxyRulesConfig { networks: networks(), required: true });
        assert!(matches!(required.accept(&|| Some(address("10.1.0.1:1"))), Accept::Inspect(_)));
        assert!(matches!(required.accept(&|| Some(address("10.2.0.1:1"))), Accept::Close(_)));
        assert!(matches!(required.accept(&|| None), Accept::Close(_)));
    }

    #[test]
    fn headers_of_both_versions_and_families_are_parsed() {
        for (client, listener) in [("10.1.2.3:1000", "10.9.8.7:6000"), ("[fd00::2]:1000", "[fd00::1]:6000")] {
            let addresses = (address(client), address(listener));
            for mut header in [proxy_header::v1(addresses.0, addresses.1), proxy_header::v2(addresses.0, addresses.1)] {
                let length = header.len();
                header.extend(b"data behind it");
                assert_eq!(passed(&header), (length, Some(addresses)));
            }
        }
    }

    #[test]
    fn filter_waits_for_the_rest_of_an_incomplete_header() {
        let (client, listener) = (address("10.1.2.3:1000"), address("10.9.8.7:6000"));
        for header in [proxy_header::v1(client, listener), proxy_header::v2(client, listener)] {
            for length in 0..header.len() {
                assert!(matches!(filter().inspect(&header[..length]), Verdict::Incomplete), "{length}");
            }
        }
    }

    #[test]
    fn header_without_addresses_leaves_those_of_the_connection() {
        for header in [proxy_header::v1_unknown(), proxy_header::v2_local()] {
            assert_eq!(passed(&header), (header.len(), None));
        }
    }

    #[test]
    fn additional_fields_are_part_of_the_header() {
        let mut header = proxy_header::v2(address("10.1.2.3:1000"), address("10.9.8.7:6000"));
        header[15] += 5;
        header.extend(b"\x04\x00\x02ab");
        assert_eq!(passed(&header).0, header.len());
    }

    #[test]
    fn connection_without_a_valid_header_is_closed() {
        for received in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"PROXY TCP4 10.1.2.3 10.9.8.7 1 x\r\n",
            b"\r\n\r\n\0\r\nQUIT\n\x11\x11\0\x0c0123456789ab",
        ] {
            assert!(matches!(filter().inspect(received), Verdict::Close(_)));
        }
    }
}
