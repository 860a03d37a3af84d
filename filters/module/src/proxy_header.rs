//! The PROXY protocol's header, versions 1 and 2 (haproxy.org, `proxy-protocol.txt`).

use std::net::SocketAddr;

/// The first bytes of a header of version 2.
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The binary header of a TCP connection from `client` to `listener`. Mixed address families are written as IPv6.
pub(crate) fn v2(client: SocketAddr, listener: SocketAddr) -> Vec<u8> {
    const VERSION_2_PROXY: u8 = 0x21;
    let mut header = SIGNATURE.to_vec();
    header.push(VERSION_2_PROXY);
    match (client, listener) {
        (SocketAddr::V4(from), SocketAddr::V4(to)) => {
            header.extend([0x11, 0, 12]);
            header.extend(from.ip().octets());
            header.extend(to.ip().octets());
        }
        (from, to) => {
            header.extend([0x21, 0, 36]);
            header.extend(to_ipv6(from));
            header.extend(to_ipv6(to));
        }
    }
    header.extend(client.port().to_be_bytes());
    header.extend(listener.port().to_be_bytes());
    header
}

/// The binary header of a connection whose client is not known: the receiver uses the addresses of the connection.
pub(crate) fn v2_local() -> Vec<u8> {
    const VERSION_2_LOCAL: u8 = 0x20;
    [SIGNATURE, &[VERSION_2_LOCAL, 0, 0, 0]].concat()
}

/// The text header of a connection whose client is not known.
pub(crate) fn v1_unknown() -> Vec<u8> {
    b"PROXY UNKNOWN\r\n".to_vec()
}

/// The text header of a TCP connection from `client` to `listener`.
pub(crate) fn v1(client: SocketAddr, listener: SocketAddr) -> Vec<u8> {
    let (ports, addresses) = ((client.port(), listener.port()), (client.ip(), listener.ip()));
    match addresses {
        (std::net::IpAddr::V4(from), std::net::IpAddr::V4(to)) => {
            format!("PROXY TCP4 {from} {to} {} {}\r\n", ports.0, ports.1)
        }
        _ => {
            let wide = |address| std::net::Ipv6Addr::from(to_ipv6(address));
            format!("PROXY TCP6 {} {} {} {}\r\n", wide(client), wide(listener), ports.0, ports.1)
        }
    }
    .into_bytes()
}

fn to_ipv6(address: SocketAddr) -> [u8; 16] {
    match address {
        SocketAddr::V4(address) => address.ip().to_ipv6_mapped().octets(),
        SocketAddr::V6(address) => address.ip().octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn v2_header_of_ipv4_addresses() {
        let header = v2(address("10.1.2.3:1000"), address("10.9.8.7:6000"));
        assert_eq!(header, b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c\x0a\x01\x02\x03\x0a\x09\x08\x07\x03\xe8\x17\x70");
    }

    #[test]
    fn v2_header_of_mixed_families_has_ipv6_addresses() {
        let header = v2(address("10.1.2.3:1000"), address("[fd00::1]:6000"));
        assert_eq!(header.len(), 16 + 36);
        assert_eq!(&header[12..16], b"\x21\x21\x00\x24");
        assert_eq!(&header[16..32], b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\x02\x03");
    }

    #[test]
    fn v1_header_of_ipv4_ipv6_and_mixed_families() {
        assert_eq!(v1(address("10.1.2.3:1"), address("10.9.8.7:2")), b"PROXY TCP4 10.1.2.3 10.9.8.7 1 2\r\n");
        assert_eq!(v1(address("[fd00::2]:1"), address("[fd00::1]:2")), b"PROXY TCP6 fd00::2 fd00::1 1 2\r\n");
        assert_eq!(v1(address("10.1.2.3:1"), address("[fd00::1]:2")), b"PROXY TCP6 ::ffff:10.1.2.3 fd00::1 1 2\r\n");
    }
}
