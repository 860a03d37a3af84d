//! One TLS connection.

use std::mem;

use mysql_proto::secret::SecretBytes;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic};
use rustls::{Error, ProtocolVersion};

use crate::buffer::TlsBuffer;
use crate::{Peer, TlsError};

/// Enough for most handshake messages; for a larger one, rustls returns the required size.
const HANDSHAKE_ROOM: usize = 4 * 1024;
/// Maximum payload of a record (RFC 8446, section 5.1), and the maximum that header, nonce, type and tag add.
const RECORD: usize = 16 * 1024;
const RECORD_EXTRA: usize = 64;

/// Whether more bytes may come from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum ReceiveResult {
    /// More may come.
    Open,
    /// The peer sent close_notify. Further bytes are ignored.
    Closed,
}

/// What the handshake of a connection has agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsDetails {
    pub version: &'static str,
    pub cipher: String,
    pub has_peer_certificate: bool,
}

/// One connection, to a client or to a node.
///
/// It has buffers only while they contain bytes: an incomplete record, and bytes to send.
pub struct Stream {
    connection: TlsConnection,
    /// Ciphertext of an incomplete record.
    incoming: TlsBuffer,
    outgoing: TlsBuffer,
    /// Plaintext sent before the end of the handshake.
    early: SecretBytes,
    end: Option<End>,
    /// Nothing may be sent any more: close_notify was sent, or the handshake was abandoned.
    finished: bool,
}

enum TlsConnection {
    Server(Box<UnbufferedServerConnection>),
    Client(Box<UnbufferedClientConnection>),
}

/// Why nothing more is received.
enum End {
    PeerClosed,
    Failed(Error),
}

/// The result of a step.
enum TlsStep {
    Again,
    /// The peer's bytes are used up, and all that can be sent was written to `outgoing`.
    Idle,
    PeerClosed,
}

/// What a step sends when it can.
enum Outbound<'a> {
    Nothing,
    Plaintext(&'a [u8]),
    CloseNotify,
}

impl Stream {
    pub(crate) fn server(connection: UnbufferedServerConnection) -> Self {
        Self::new(TlsConnection::Server(Box::new(connection)))
    }

    pub(crate) fn client(connection: UnbufferedClientConnection) -> Self {
        Self::new(TlsConnection::Client(Box::new(connection)))
    }

    fn new(connection: TlsConnection) -> Self {
        let mut stream = Self {
            connection,
            incoming: TlsBuffer::default(),
            outgoing: TlsBuffer::default(),
            early: SecretBytes::default(),
            end: None,
            finished: false,
        };
        // Writes the ClientHello of a client.
        stream.advance(&Outbound::Nothing, &mut |_| {});
        stream
    }

    /// Processes ciphertext, split anywhere, and passes the plaintext in pieces to `plain`. Answers are in `outgoing`,
    /// even after an error (the alert for the peer).
    ///
    /// # Errors
    /// [`TlsError::Connection`]: the connection has failed. Further calls return the same error.
    pub fn receive(&mut self, ciphertext: &[u8], plain: &mut dyn FnMut(&[u8])) -> Result<ReceiveResult, TlsError> {
        if self.end.is_none() {
            self.incoming.append(ciphertext);
            self.advance(&Outbound::Nothing, plain);
            if self.end.is_none() {
                self.incoming.settle();
            } else {
                self.incoming.consume(usize::MAX);
            }
        }
        match &self.end {
            None => Ok(ReceiveResult::Open),
            Some(End::PeerClosed) => Ok(ReceiveResult::Closed),
            Some(End::Failed(source)) => Err(TlsError::Connection { peer: self.peer(), source: source.clone() }),
        }
    }

    /// Encrypts `plaintext` to `outgoing`. During the handshake it is stored, without limit, and encrypted after the
    /// handshake. After `finish` or an error it is dropped.
    pub fn send(&mut self, plaintext: &[u8]) {
        match self.end {
            Some(End::Failed(_)) => {}
            _ if self.finished || plaintext.is_empty() => {}
            None | Some(End::PeerClosed) if self.is_handshaking() => {
                self.early.extend_from_slice(plaintext);
            }
            None | Some(End::PeerClosed) => {
                self.advance(&Outbound::Plaintext(plaintext), &mut |_| {});
            }
        }
    }

    /// Bytes to write to the socket.
    #[must_use]
    pub fn outgoing(&self) -> &[u8] {
        self.outgoing.filled()
    }

    /// Removes the first `bytes` of `outgoing`, which were written. An empty buffer releases its memory.
    pub fn sent(&mut self, bytes: usize) {
        self.outgoing.consume(bytes);
    }

    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        match &self.connection {
            TlsConnection::Server(connection) => connection.is_handshaking(),
            TlsConnection::Client(connection) => connection.is_handshaking(),
        }
    }

    /// The protocol, such as `TLSv1.3`, the cipher suite by its name at IANA, and whether the peer has a certificate.
    /// None: the handshake is not complete.
    #[must_use]
    pub fn details(&self) -> Option<TlsDetails> {
        let common: &rustls::CommonState = match &self.connection {
            TlsConnection::Server(connection) => connection,
            TlsConnection::Client(connection) => connection,
        };
        let version = match common.protocol_version().filter(|_| !self.is_handshaking())? {
            ProtocolVersion::TLSv1_2 => "TLSv1.2",
            ProtocolVersion::TLSv1_3 => "TLSv1.3",
            _ => return None,
        };
        // rustls calls the suites of TLS 1.3 `TLS13_...`.
        let cipher = common.negotiated_cipher_suite()?.suite().as_str()?.replacen("TLS13_", "TLS_", 1);
        Some(TlsDetails { version, cipher, has_peer_certificate: common.peer_certificates().is_some() })
    }

    /// Ends the sending direction with close_notify; the peer can still send. During the handshake nothing is sent: the
    /// caller closes the socket.
    pub fn finish(&mut self) {
        if self.finished || matches!(self.end, Some(End::Failed(_))) {
            return;
        }
        if !self.is_handshaking() {
            self.advance(&Outbound::CloseNotify, &mut |_| {});
        }
        self.finished = true;
        self.early = SecretBytes::default();
    }

    fn peer(&self) -> Peer {
        match self.connection {
            TlsConnection::Server(_) => Peer::Client,
            TlsConnection::Client(_) => Peer::Node,
        }
    }

    /// Processes `incoming` as far as possible, then sends.
    fn advance(&mut self, send: &Outbound<'_>, plain: &mut dyn FnMut(&[u8])) {
        loop {
            // Passes `incoming` even if there is only something to send: rustls remembers positions in it, so it must
            // get all bytes that are not discarded yet.
            let (discard, step) = self.step(send, plain);
            self.incoming.consume(discard);
            match step {
                Ok(TlsStep::Again) => {}
                Ok(TlsStep::Idle) => return,
                Ok(TlsStep::PeerClosed) => self.end = Some(End::PeerClosed),
                Err(error) => {
                    self.end = Some(End::Failed(error));
                    self.early = SecretBytes::default();
                    self.flush_alert(plain);
                    return;
                }
            }
        }
    }

    fn step(&mut self, send: &Outbound<'_>, plain: &mut dyn FnMut(&[u8])) -> (usize, Result<TlsStep, Error>) {
        let incoming = self.incoming.filled_mut();
        let (outgoing, early) = (&mut self.outgoing, &mut self.early);
        match &mut self.connection {
            TlsConnection::Server(connection) => {
                step(connection.process_tls_records(incoming), outgoing, early, send, plain)
            }
            TlsConnection::Client(connection) => {
                step(connection.process_tls_records(incoming), outgoing, early, send, plain)
            }
        }
    }

    /// After an error rustls may only be asked for its remaining bytes to write.
    fn flush_alert(&mut self, plain: &mut dyn FnMut(&[u8])) {
        while match &self.connection {
            TlsConnection::Server(connection) => connection.wants_write(),
            TlsConnection::Client(connection) => connection.wants_write(),
        } {
            let (discard, step) = self.step(&Outbound::Nothing, plain);
            self.incoming.consume(discard);
            if step.is_err() {
                return;
            }
        }
    }
}

fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut TlsBuffer,
    early: &mut SecretBytes,
    send: &Outbound<'_>,
    plain: &mut dyn FnMut(&[u8]),
) -> (usize, Result<TlsStep, Error>) {
    let mut discard = status.discard;
    let state = match status.state {
        Ok(state) => state,
        Err(error) => return (discard, Err(error)),
    };
    let step = match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        discard += record.discard;
                        plain(record.payload);
                    }
                    Err(error) => return (discard, Err(error)),
                }
            }
            TlsStep::Again
        }
        ConnectionState::EncodeTlsData(mut data) => match encode(&mut data, outgoing) {
            Ok(()) => TlsStep::Again,
            Err(error) => return (discard, Err(error)),
        },
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            TlsStep::Again
        }
        ConnectionState::WriteTraffic(mut traffic) => {
            let kept = mem::take(early);
            let sent = encrypt(&mut traffic, &kept, outgoing).and_then(|()| match send {
                Outbound::Nothing => Ok(TlsStep::Idle),
                Outbound::Plaintext(plaintext) => encrypt(&mut traffic, plaintext, outgoing).map(|()| TlsStep::Idle),
                Outbound::CloseNotify => Ok(close_notify(&mut traffic, outgoing)),
            });
            match sent {
                Ok(step) => step,
                Err(error) => return (discard, Err(error)),
            }
        }
        ConnectionState::PeerClosed => TlsStep::PeerClosed,
        // `BlockedHandshake`: more bytes of the peer are needed. `Closed`: both ends have sent close_notify. Early data
        // is never accepted, so its states do not occur.
        _ => TlsStep::Idle,
    };
    (discard, Ok(step))
}

fn encode<Data>(data: &mut EncodeTlsData<'_, Data>, outgoing: &mut TlsBuffer) -> Result<(), Error> {
    let mut room = HANDSHAKE_ROOM;
    loop {
        match data.encode(outgoing.room(room)) {
            Ok(written) => {
                outgoing.commit(written);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(short)) => room = short.required_size,
            Err(EncodeError::AlreadyEncoded) => return Ok(()),
        }
    }
}

fn encrypt<Data>(
    traffic: &mut WriteTraffic<'_, Data>,
    plaintext: &[u8],
    outgoing: &mut TlsBuffer,
) -> Result<(), Error> {
    if plaintext.is_empty() {
        return Ok(());
    }
    let mut room = plaintext.len() + (plaintext.len() / RECORD + 1) * RECORD_EXTRA;
    loop {
        match traffic.encrypt(plaintext, outgoing.room(room)) {
            Ok(written) => {
                outgoing.commit(written);
                return Ok(());
            }
            Err(EncryptError::InsufficientSize(short)) => room = short.required_size,
            // The key of TLS 1.2 has reached its limit of records; close_notify is queued.
            Err(EncryptError::EncryptExhausted) => return Err(Error::EncryptError),
        }
    }
}

fn close_notify<Data>(traffic: &mut WriteTraffic<'_, Data>, outgoing: &mut TlsBuffer) -> TlsStep {
    match traffic.queue_close_notify(outgoing.room(RECORD_EXTRA)) {
        Ok(written) => {
            outgoing.commit(written);
            TlsStep::Idle
        }
        // close_notify did not fit and is queued; the next step writes it.
        Err(_) => TlsStep::Again,
    }
}
