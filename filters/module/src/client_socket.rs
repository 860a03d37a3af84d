//! The socket to a client: answers the SSLRequest, relays the login, and then forwards requests ([`requests`]).

mod requests;

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use envoy_abi::socket::{Closed, Io, IoOutcome, Socket, SocketFactory, TransportSocket};
use mysql_proto::login::{ClientTls, Compression, NodeTls, Output, Progress, Rules};
use mysql_proto::secret::{self, SecretBytes};
use tls::{RsaPasswordKey, TlsAcceptor};

use crate::config;
use crate::conn::{Conn, ReadError, ReadStep};
use crate::live_settings;
use crate::offload::{self, OffloadedConn};
use crate::old_conn::QUIT;
use crate::rules;
use crate::session::{Event, REJECTION_TIMEOUT, Session, SessionPhase};
use crate::tls_options::ClientTlsOptions;
use crate::worker::WorkerContext;

pub(crate) struct ClientSocketFactory {
    /// The options until the control plane has sent others ([`live_settings`]).
    tls: Arc<ClientTlsOptions>,
    compression: Compression,
}

impl ClientSocketFactory {
    pub(crate) fn new(config: &config::ClientSocketConfig) -> Result<Self, String> {
        let live = live_settings::current().and_then(|live| live.client_tls.clone());
        let tls = live.map_or_else(|| ClientTlsOptions::load(config), Ok)?;
        Ok(Self { tls, compression: config.compression })
    }
}

impl SocketFactory for ClientSocketFactory {
    fn create(&self, socket: Socket) -> Option<Box<dyn TransportSocket>> {
        let live = live_settings::current();
        let tls = live.as_ref().and_then(|live| live.client_tls.as_ref()).unwrap_or(&self.tls);
        let conn = Conn::new(WorkerContext::current(), socket);
        conn.allow_direct();
        Some(Box::new(ClientSocket(Rc::new(ClientConn {
            conn,
            tls_mode: tls.mode,
            certificate: tls.certificate.clone(),
            password_key: Arc::clone(&tls.password_key),
            compression: match &live {
                _ if rules::must_enforce() => Compression::Off, // the rules have to see all statements
                Some(live) => live.compression,
                None => self.compression,
            },
            session: OnceCell::new(),
            is_rejected: Cell::new(false),
            held_input: RefCell::default(),
        }))))
    }
}

struct ClientSocket(Rc<ClientConn>);

struct ClientConn {
    conn: Rc<Conn>,
    tls_mode: ClientTls,
    certificate: Option<Arc<TlsAcceptor>>,
    password_key: Arc<RsaPasswordKey>,
    compression: Compression,
    session: OnceCell<Rc<Session>>,
    /// The module has sent an error to the client, which is expected to close.
    is_rejected: Cell<bool>,
    /// Bytes that were read from a held client: a held request with what follows it, or what the client has sent before it
    /// closed its connection. They are processed when the client is no longer held.
    held_input: RefCell<SecretBytes>,
}

impl ClientConn {
    fn receive(&self, bytes: &[u8], passed: &mut usize) -> ReadStep {
        let Some(session) = self.session.get() else {
            return ReadStep::Close;
        };
        if session.phase() == SessionPhase::Established && !self.conn.has_tls() {
            return self.pass_to_node(session, bytes, passed);
        }
        if !self.conn.has_tls() {
            return match self.advance_login(session, bytes, passed) {
                // The bytes after an SSLRequest are TLS.
                (taken, ReadStep::Continue) if self.conn.has_tls() => {
                    self.receive_tls(session, &bytes[taken..], passed)
                }
                (_, step) => step,
            };
        }
        self.receive_tls(session, bytes, passed)
    }

    fn receive_tls(&self, session: &Rc<Session>, ciphertext: &[u8], passed: &mut usize) -> ReadStep {
        self.conn.worker.buffers.with_scratch(|plain| {
            let is_closed = match self.conn.decrypt(ciphertext, |piece| plain.extend_from_slice(piece)) {
                Ok(is_closed) => is_closed,
                Err(ReadError::Tls(error)) => {
                    envoy_abi::log!(Debug, "TLS with a client failed: {error}");
                    return ReadStep::Close;
                }
                Err(ReadError::Broken) => return ReadStep::Close,
            };
            let step = if plain.is_empty() {
                ReadStep::Continue
            } else if session.phase() == SessionPhase::Established {
                self.pass_to_node(session, plain, passed)
            } else {
                let (_, step) = self.advance_login(session, plain, passed);
                secret::wipe(plain); // the shared buffer may contain a password
                step
            };
            match step {
                ReadStep::Continue if is_closed => self.on_end_of_stream(),
                step => step,
            }
        })
    }

    fn is_ended_by_drain(&self) -> bool {
        self.session.get().is_some_and(|session| session.is_ended_by_drain())
    }

    /// The client will send no more bytes. If its login is not complete, the session ends.
    fn on_end_of_stream(&self) -> ReadStep {
        let is_over = self.session.get().is_none_or(|session| {
            session.handle(Event::ClientFinished);
            session.phase().is_over()
        });
        if is_over { ReadStep::Close } else { ReadStep::EndOfStream }
    }

    /// A held client has closed or reset its connection. If it has sent nothing or only COM_QUIT before, the session
    /// ends at once, since the node that the module waits for may never answer. Other bytes may be a statement, which
    /// runs after the migration.
    fn on_end_while_held(&self, buffer: &mut [u8]) -> ReadStep {
        let mut input = self.held_input.borrow_mut();
        while input.len() <= QUIT.len() {
            let is_at_end = match self.conn.receive(buffer).io {
                Io::Done(0) | Io::Broken => true,
                Io::WouldBlock => return ReadStep::Wait,
                Io::Done(length) if self.conn.has_tls() => {
                    match self.conn.decrypt(&buffer[..length], |piece| input.extend_from_slice(piece)) {
                        Ok(is_closed) => is_closed,
                        Err(_) => return ReadStep::Close,
                    }
                }
                Io::Done(length) => {
                    input.extend_from_slice(&buffer[..length]);
                    false
                }
            };
            if is_at_end {
                let has_quit = input.is_empty() || *input == QUIT;
                return if has_quit { ReadStep::Close } else { ReadStep::Wait };
            }
        }
        ReadStep::Wait
    }

    /// Relays bytes of the login. Returns how many bytes were taken. The rest matters only after an SSLRequest.
    fn advance_login(&self, session: &Rc<Session>, bytes: &[u8], passed: &mut usize) -> (usize, ReadStep) {
        let mut output = Output::default();
        let (taken, progress) = session.login_from_client(bytes, &*self.password_key, &mut output);
        if !output.onward.is_empty() {
            self.conn.forward(&output.onward, passed);
        }
        let mut sent = Io::Done(0);
        if !output.back.is_empty() {
            sent = self.conn.write_or_queue(&output.back);
        }
        let step = match progress {
            Progress::StartClientTls => match &self.certificate {
                Some(certificate) => {
                    self.conn.start_tls(certificate.accept());
                    ReadStep::Continue
                }
                None => ReadStep::Close,
            },
            Progress::Rejected(_) => {
                self.is_rejected.set(true);
                self.conn.finish();
                session.extend_deadline(REJECTION_TIMEOUT);
                ReadStep::Yield
            }
            _ if sent == Io::Broken => ReadStep::Close,
            _ => ReadStep::Continue,
        };
        (taken, step)
    }
}

impl TransportSocket for ClientSocket {
    fn on_attached(&self) {
        if let Some(live) = live_settings::current() {
            self.0.conn.set_keepalive(&live.client_keepalive);
        }
        if let Some(id) = self.0.conn.socket.connection_id() {
            let rules = Rules {
                client_tls: self.0.tls_mode,
                compression: self.0.compression,
                // The socket to the node sets these two.
                node_tls: NodeTls::Disabled,
                allow_cleartext_backend: false,
            };
            let session = self.0.session.get_or_init(|| Session::new(id, Rc::clone(&self.0.conn), rules));
            session.set_client_socket(Rc::downgrade(&(Rc::clone(&self.0) as Rc<dyn OffloadedConn>)));
            session.worker.sessions.add(session);
        }
    }

    fn on_connected(&self) {
        self.0.conn.socket.raise_connected();
    }

    fn read(&self) -> IoOutcome {
        offload::read(&self.0)
    }

    fn write(&self, end: bool) -> IoOutcome {
        if self.0.conn.is_broken() {
            return IoOutcome::close(0); // Envoy may not call the read hook
        }
        let outcome = self.0.conn.write(end);
        if outcome.bytes > 0
            && let Some(session) = self.0.session.get()
        {
            session.handle(Event::ClientProgress);
            session.on_quiescent();
        }
        outcome
    }

    fn on_closed(&self, by: Closed) {
        offload::onload(&self.0.conn, true);
        let Some(session) = self.0.session.get() else {
            return;
        };
        let by_client = by == Closed::ByPeer;
        if by_client {
            self.0.conn.finish();
        } else {
            self.0.conn.close_gracefully(&session.take_final_error());
        }
        session.handle(Event::ClientClosed { by_client });
        session.worker.sessions.remove(session);
    }
}

impl OffloadedConn for ClientConn {
    fn conn(&self) -> &Conn {
        &self.conn
    }

    fn is_established(&self) -> bool {
        self.session.get().is_some_and(|session| session.phase() == SessionPhase::Established)
    }

    fn step(&self, buffer: &mut [u8], passed: &mut usize) -> ReadStep {
        let is_held = |session: &Rc<Session>| session.migration.is_client_held() || session.is_request_waiting();
        if self.session.get().is_some_and(is_held) {
            if self.session.get().is_some_and(|session| session.waits_for_decision() && !session.is_exporting_states())
                && self.conn.has_ended()
            {
                return ReadStep::Close; // nothing of its statement has reached a node
            }
            // The connection is read again when the client is no longer held.
            return if self.conn.has_end_event() { self.on_end_while_held(buffer) } else { ReadStep::Wait };
        }
        let held_input = self.held_input.take();
        if let Some(session) = self.session.get().filter(|_| !held_input.is_empty()) {
            return self.pass_to_node(session, &held_input, passed);
        }
        let received = self.conn.receive(buffer);
        let is_login = !self.is_established();
        let step = match received.io {
            Io::Done(0) => self.on_end_of_stream(),
            Io::Done(_) if self.is_rejected.get() || self.is_ended_by_drain() => ReadStep::Yield,
            Io::Done(length) => self.receive(&buffer[..length], passed),
            Io::WouldBlock => ReadStep::Wait,
            Io::Broken => ReadStep::Close,
        };
        if let (true, Io::Done(length)) = (is_login, received.io) {
            secret::wipe(&mut buffer[..length]); // it may contain a password
        }
        match step {
            // If the client has reset its connection after these bytes, sending the response fails.
            ReadStep::Continue
                if !received.more
                    && (self.conn.is_offloaded()
                        || self.session.get().is_some_and(|session| session.awaits_node())) =>
            {
                ReadStep::Wait
            }
            step => step,
        }
    }

    fn on_quiescent(&self) {
        if let Some(session) = self.session.get() {
            session.on_quiescent();
        }
    }
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        offload::onload(&self.0.conn, true);
        if let Some(session) = self.0.session.get() {
            // In case Envoy destroys a socket without closing it.
            session.handle(Event::ClientClosed { by_client: false });
            session.worker.sessions.remove(session);
        }
    }
}
