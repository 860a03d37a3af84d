//! The socket to a client: answers its SSLRequest, relays its login, then passes on what the tracker has seen.

use std::cell::{Cell, OnceCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use abi::socket::{Closed, Io, Outcome, Socket, SocketFactory, TransportSocket};
use tls::{ClientSide, PasswordKey};
use wire::login::{ClientTls, Compression, NodeTls, Output, Progress, Rules};

use crate::link::Link;
use crate::session::{Phase, Session};
use crate::{config, worker};

/// Time that a refused client has to read why. What it still sends is thrown away meanwhile: closing with bytes
/// unread would reset the connection, and a client that is busy sending would never read the error.
const FAREWELL: Duration = Duration::from_secs(1);

/// The key of all listeners that were given none. Making one takes a while, and a new listener must not surprise
/// clients that remember the old one.
static PASSWORD_KEY: OnceLock<Arc<PasswordKey>> = OnceLock::new();

/// What all client sockets of a listener share.
struct Shared {
    client_tls: ClientTls,
    compression: Compression,
    certificate: Option<ClientSide>,
    password_key: Arc<PasswordKey>,
}

pub(crate) struct Factory {
    shared: Arc<Shared>,
    _refresher: Option<crate::refresh::Refresher>,
}

impl Factory {
    pub(crate) fn new(config: config::Client) -> Result<Self, String> {
        let client_tls = match config.tls {
            config::ClientTls::Disabled => ClientTls::Disabled,
            config::ClientTls::Optional => ClientTls::Optional,
            config::ClientTls::Required => ClientTls::Required,
        };
        let certificate = if client_tls == ClientTls::Disabled {
            None
        } else {
            let loaded = ClientSide::load(&config.cert, &config.key, crate::refresh::given(&config.client_ca));
            Some(loaded.map_err(|error| error.to_string())?)
        };
        let password_key = match crate::refresh::given(&config.rsa_key) {
            Some(path) => Arc::new(PasswordKey::load(path).map_err(|error| error.to_string())?),
            None => Arc::clone(PASSWORD_KEY.get_or_init(|| Arc::new(PasswordKey::generate()))),
        };
        let compression = match config.compression {
            config::Compression::Off => Compression::Off,
            config::Compression::Passthrough => Compression::Passthrough,
        };
        let shared = Arc::new(Shared { client_tls, compression, certificate, password_key });
        let _refresher = shared.certificate.is_some().then(|| {
            let shared = Arc::clone(&shared);
            let path = config.cert;
            crate::refresh::Refresher::new(move || refresh(&shared, &path))
        });
        Ok(Self { shared, _refresher })
    }
}

fn refresh(shared: &Shared, path: &Path) {
    let Some(certificate) = &shared.certificate else {
        return;
    };
    match certificate.refresh() {
        Ok(true) => abi::log!(Info, "new clients get the new certificate in {}", path.display()),
        Ok(false) => {}
        Err(error) => abi::log!(Warn, "the certificate for clients stays the old one: {error}"),
    }
}

impl SocketFactory for Factory {
    fn socket(&self, socket: Socket) -> Option<Box<dyn TransportSocket>> {
        Some(Box::new(ClientSocket {
            link: Link::new(socket),
            shared: Arc::clone(&self.shared),
            session: OnceCell::new(),
            refused: Cell::new(false),
        }))
    }
}

struct ClientSocket {
    link: Link,
    shared: Arc<Shared>,
    session: OnceCell<Rc<Session>>,
    /// The client was told why, and is waited for to close.
    refused: Cell<bool>,
}

/// What comes of one read.
enum Step {
    /// Bytes were taken; there may be more.
    On,
    /// There may be more, but others have their turn first.
    Later,
    Again,
    EndOfStream,
    Close,
}

impl ClientSocket {
    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> Step {
        match self.link.socket.receive(buffer) {
            Io::Done(0) => Step::EndOfStream,
            Io::Done(_) if self.refused.get() => Step::Later,
            Io::Done(length) => self.take(&buffer[..length], passed),
            Io::Again => Step::Again,
            Io::Broken => Step::Close,
        }
    }

    fn take(&self, bytes: &[u8], passed: &mut usize) -> Step {
        let Some(session) = self.session.get() else {
            return Step::Close;
        };
        if session.phase() == Phase::Established && !self.link.has_tls() {
            return self.pass(session, bytes, passed);
        }
        if !self.link.has_tls() {
            return match self.login(session, bytes, passed) {
                // What stands behind an SSLRequest is TLS already.
                (taken, Step::On) if self.link.has_tls() => self.take_tls(session, &bytes[taken..], passed),
                (_, step) => step,
            };
        }
        self.take_tls(session, bytes, passed)
    }

    fn take_tls(&self, session: &Session, ciphertext: &[u8], passed: &mut usize) -> Step {
        let handshaking = self.link.is_handshaking();
        worker::with_scratch(|plain| {
            let decrypted = self.link.decrypt(ciphertext, plain);
            // Handshake messages, or the alert that says what was wrong.
            let flushed = self.link.flush();
            let closed = match decrypted {
                Ok(closed) => closed,
                Err(error) => {
                    abi::log!(Debug, "TLS with a client failed: {error}");
                    return Step::Close;
                }
            };
            if flushed == Io::Broken {
                return Step::Close;
            }
            if handshaking && !self.link.is_handshaking() {
                self.link.socket.set_writable(); // what the node has said meanwhile
            }
            let step = if plain.is_empty() {
                Step::On
            } else if session.phase() == Phase::Established {
                self.pass(session, plain, passed)
            } else {
                self.login(session, plain, passed).1
            };
            match step {
                Step::On if closed => Step::EndOfStream,
                step => step,
            }
        })
    }

    fn pass(&self, session: &Session, bytes: &[u8], passed: &mut usize) -> Step {
        if !session.client_sent(bytes) {
            return Step::Close;
        }
        self.link.socket.pass_on(bytes);
        *passed += bytes.len();
        Step::On
    }

    /// Returns how many bytes were taken; the rest matters behind an SSLRequest only.
    fn login(&self, session: &Session, bytes: &[u8], passed: &mut usize) -> (usize, Step) {
        let mut output = Output::default();
        let (taken, progress) = session.login_from_client(bytes, &*self.shared.password_key, &mut output);
        if !output.onward.is_empty() {
            self.link.socket.pass_on(&output.onward);
            *passed += output.onward.len();
        }
        let mut sent = Io::Done(0);
        if !output.back.is_empty() {
            sent = self.link.say(&output.back);
        }
        let step = match progress {
            Progress::StartClientTls => match &self.shared.certificate {
                Some(certificate) => {
                    self.link.start_tls(certificate.accept());
                    Step::On
                }
                None => Step::Close,
            },
            Progress::Refused(_) => {
                self.refused.set(true);
                self.link.finish();
                session.close_after(FAREWELL);
                Step::Later
            }
            _ if sent == Io::Broken => Step::Close,
            _ => Step::On,
        };
        (taken, step)
    }
}

impl TransportSocket for ClientSocket {
    fn attached(&self) {
        if let Some(id) = self.link.socket.connection_id() {
            let rules = Rules {
                client_tls: self.shared.client_tls,
                compression: self.shared.compression,
                // The socket to the node knows these two.
                node_tls: NodeTls::Disabled,
                allow_cleartext_backend: false,
            };
            worker::add(self.session.get_or_init(|| Session::begin(id, rules)));
        }
    }

    fn connected(&self) {
        self.link.socket.raise_connected();
    }

    fn read(&self) -> Outcome {
        let mut passed = 0;
        loop {
            match worker::with_buffer(|buffer| self.step(buffer, &mut passed)) {
                Step::On => {}
                Step::Later => {
                    self.link.socket.set_readable();
                    return Outcome::open(passed);
                }
                Step::Again => return Outcome::open(passed),
                Step::EndOfStream => {
                    if self.session.get().is_none_or(|session| session.client_finished()) {
                        return Outcome::close(passed);
                    }
                    return Outcome { close: false, bytes: passed, end_of_stream: true };
                }
                Step::Close => return Outcome::close(passed),
            }
            if self.link.socket.should_stop_reading() {
                self.link.socket.set_readable();
                return Outcome::open(passed);
            }
        }
    }

    fn write(&self, end: bool) -> Outcome {
        self.link.write(end)
    }

    fn closed(&self, by: Closed) {
        let Some(session) = self.session.get() else {
            return;
        };
        let by_client = by == Closed::ByPeer;
        if by_client {
            self.link.finish();
        } else {
            self.link.say_farewell(&session.take_last_words());
        }
        session.ended(by_client);
        worker::remove(session);
    }
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        if let Some(session) = self.session.get() {
            session.ended(false); // should Envoy ever destroy a socket that it did not close
            worker::remove(session);
        }
    }
}
