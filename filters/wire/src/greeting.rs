//! The server's first packet (protocol 10): parsed, and edited in place where the proxy must.
