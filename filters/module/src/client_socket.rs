//! The socket to a client: answers its SSLRequest, relays its login, then passes on what the tracker has seen.

use std::cell::{Cell, OnceCell};
use std::rc::{Rc, Weak};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use abi::socket::{Closed, Io, Outcome, Socket, SocketFactory, TransportSocket};
use tls::{ClientSide, PasswordKey};
use wire::login::{ClientTls, Compression, NodeTls, Output, Progress, Rules};

use crate::events::{self, Member};
use crate::link::{Link, Step, Unread};
use crate::refresh::{Refresher, given};
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
    certificate: Option<Arc<ClientSide>>,
    password_key: Arc<PasswordKey>,
}

pub(crate) struct Factory {
    shared: Arc<Shared>,
    _refresher: Option<Refresher>,
}

impl Factory {
    pub(crate) fn new(config: config::Client) -> Result<Self, String> {
        let certificate = if config.tls == ClientTls::Disabled {
            None
        } else {
            let loaded = ClientSide::load(&config.cert, &config.key, given(&config.client_ca));
            Some(Arc::new(loaded.map_err(|error| error.to_string())?))
        };
        let password_key = match given(&config.rsa_key) {
            Some(path) => Arc::new(PasswordKey::load(path).map_err(|error| error.to_string())?),
            None => Arc::clone(PASSWORD_KEY.get_or_init(|| Arc::new(PasswordKey::generate()))),
        };
        let shared = Arc::new(Shared {
            client_tls: config.tls,
            compression: config.compression,
            certificate: certificate.clone(),
            password_key,
        });
        let _refresher = certificate.map(|side| Refresher::new("new clients", move || side.refresh()));
        Ok(Self { shared, _refresher })
    }
}

impl SocketFactory for Factory {
    fn socket(&self, socket: Socket) -> Option<Box<dyn TransportSocket>> {
        let link = Link::new(socket);
        link.open();
        Some(Box::new(ClientSocket(Rc::new(Client {
            link,
            shared: Arc::clone(&self.shared),
            session: OnceCell::new(),
            refused: Cell::new(false),
        }))))
    }
}

struct ClientSocket(Rc<Client>);

struct Client {
    link: Rc<Link>,
    shared: Arc<Shared>,
    session: OnceCell<Rc<Session>>,
    /// The client was told why, and is waited for to close.
    refused: Cell<bool>,
}

impl Client {
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

    fn take_tls(&self, session: &Rc<Session>, ciphertext: &[u8], passed: &mut usize) -> Step {
        worker::with_scratch(|plain| {
            let closed = match self.link.decrypt(ciphertext, plain) {
                Ok(closed) => closed,
                Err(Unread::Tls(error)) => {
                    abi::log!(Debug, "TLS with a client failed: {error}");
                    return Step::Close;
                }
                Err(Unread::Broken) => return Step::Close,
            };
            let step = if plain.is_empty() {
                Step::On
            } else if session.phase() == Phase::Established {
                self.pass(session, plain, passed)
            } else {
                self.login(session, plain, passed).1
            };
            match step {
                Step::On if closed => self.end_of_stream(),
                step => step,
            }
        })
    }

    /// The client will send no more. In the middle of its login it has gone.
    fn end_of_stream(&self) -> Step {
        let over = self.session.get().is_none_or(|session| session.client_finished());
        if over { Step::Close } else { Step::EndOfStream }
    }

    fn pass(&self, session: &Rc<Session>, bytes: &[u8], passed: &mut usize) -> Step {
        session.watch_transactions(bytes);
        let bytes = session.assembled(bytes);
        if !session.client_sent(&bytes) {
            return Step::Close;
        }
        self.link.forward(&bytes, passed);
        Step::On
    }

    /// Returns how many bytes were taken; the rest matters behind an SSLRequest only.
    fn login(&self, session: &Session, bytes: &[u8], passed: &mut usize) -> (usize, Step) {
        let mut output = Output::default();
        let (taken, progress) = session.login_from_client(bytes, &*self.shared.password_key, &mut output);
        if !output.onward.is_empty() {
            self.link.forward(&output.onward, passed);
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
        if let Some(id) = self.0.link.socket.connection_id() {
            let rules = Rules {
                client_tls: self.0.shared.client_tls,
                compression: self.0.shared.compression,
                // The socket to the node knows these two.
                node_tls: NodeTls::Disabled,
                allow_cleartext_backend: false,
            };
            let session = self.0.session.get_or_init(|| Session::begin(id, Rc::clone(&self.0.link), rules));
            let client: Weak<dyn Member> = Rc::downgrade(&(Rc::clone(&self.0) as Rc<dyn Member>));
            let _ = session.travel.client.set(client);
            worker::add(session);
        }
    }

    fn connected(&self) {
        self.0.link.socket.raise_connected();
    }

    fn read(&self) -> Outcome {
        events::read(&self.0)
    }

    fn write(&self, end: bool) -> Outcome {
        if self.0.link.is_broken() {
            return Outcome::close(0); // Envoy may not be reading it
        }
        let outcome = self.0.link.write(end);
        if outcome.bytes > 0
            && let Some(session) = self.0.session.get()
        {
            session.client_takes();
            session.rests();
        }
        outcome
    }

    fn closed(&self, by: Closed) {
        events::give_back(&self.0.link, true);
        let Some(session) = self.0.session.get() else {
            return;
        };
        let by_client = by == Closed::ByPeer;
        if by_client {
            self.0.link.finish();
        } else {
            self.0.link.say_farewell(&session.take_last_words());
        }
        session.ended(by_client);
        worker::remove(session);
    }
}

impl Member for Client {
    fn link(&self) -> &Link {
        &self.link
    }

    fn is_established(&self) -> bool {
        self.session.get().is_some_and(|session| session.phase() == Phase::Established)
    }

    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> Step {
        if self.session.get().is_some_and(|session| session.travel.holds()) {
            return Step::Again; // it is roused when its session is where it is to be
        }
        let received = self.link.receive(buffer);
        let step = match received.io {
            Io::Done(0) => self.end_of_stream(),
            Io::Done(_) if self.refused.get() => Step::Later,
            Io::Done(length) => self.take(&buffer[..length], passed),
            Io::Again => Step::Again,
            Io::Broken => Step::Close,
        };
        match step {
            // Should the client have reset its connection right behind this, the response will find out.
            Step::On
                if !received.more
                    && (self.link.is_past_envoy()
                        || self.session.get().is_some_and(|session| session.awaits_node())) =>
            {
                Step::Again
            }
            step => step,
        }
    }

    fn rests(&self) {
        if let Some(session) = self.session.get() {
            session.rests();
        }
    }
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        events::give_back(&self.0.link, true);
        if let Some(session) = self.0.session.get() {
            session.ended(false); // should Envoy ever destroy a socket that it did not close
            worker::remove(session);
        }
    }
}
