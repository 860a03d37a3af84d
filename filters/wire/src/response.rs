//! The client's first packets: HandshakeResponse41 and SSLRequest.
