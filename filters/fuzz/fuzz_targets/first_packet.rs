//! The first packet of a node, as sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{ClientTls, Compression, FirstPacket, Login, NodeTls, Output, Progress, Rules, first_packet};
use mysql_proto::packet::{HEADER, Header};

const RULES: Rules = Rules {
    client_tls: ClientTls::Optional,
    node_tls: NodeTls::Preferred,
    compression: Compression::Off,
    allow_cleartext_backend: false,
};

fuzz_target!(|bytes: &[u8]| {
    let last = first_packet(bytes);
    for end in 0..bytes.len() {
        let earlier = first_packet(&bytes[..end]);
        assert!(earlier == FirstPacket::Incomplete || earlier == last, "{earlier:?} at {end}, then {last:?}");
    }
    // A login must agree.
    let mut out = Output::default();
    let (taken, progress) = Login::new(RULES).on_node_bytes(bytes, &mut out);
    match last {
        FirstPacket::Incomplete => assert_eq!((taken, progress), (bytes.len(), Progress::More)),
        FirstPacket::Error(code) => assert_eq!(progress, Progress::Denied(code)),
        FirstPacket::Greeting => {
            // More packets may follow the greeting, which a login rejects.
            let greeting = Header::parse(bytes).map_or(0, |header| HEADER + header.length);
            let mut out = Output::default();
            let result = Login::new(RULES).on_node_bytes(&bytes[..greeting], &mut out);
            assert_eq!(result, (greeting, Progress::More));
            assert_eq!((out.onward.len(), out.back.len()), (greeting, 0));
        }
        FirstPacket::Invalid => {
            assert!(matches!(progress, Progress::More | Progress::Rejected(ProxyError::NodeProtocol)), "{progress:?}");
        }
    }
});
