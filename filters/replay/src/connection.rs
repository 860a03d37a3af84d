//! A connection to the target: a blocking socket, perhaps with TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::packet::{HEADER, Header, packets};
use mysql_proto::secret::SecretBytes;
use tls::TlsError;

use crate::login::{Login, LoginError, LoginStep};
use crate::response::{CommandResponses, InvalidResponse, Response, ResponseStep};
use crate::stop::Stop;
use crate::target::Target;

/// How long a server may take to connect and to log in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a read that waits looks whether the replay is to end.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const READ_BYTES: usize = 32 * 1024;
/// A buffer above this size is freed when a response has ended.
const MAX_IDLE_BUFFER: usize = 256 * 1024;

/// Why a connection was not made, or was lost.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the server has closed the connection")]
    Closed,
    #[error("the server has not answered in time")]
    TimedOut,
    #[error("the replay ends")]
    Stopped,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Login(#[from] LoginError),
    #[error(transparent)]
    Invalid(#[from] InvalidResponse),
}

/// How the server has answered to a command.
pub(crate) struct Answer {
    pub(crate) response: Response,
    pub(crate) latency: Duration,
    /// How often the server has asked for a file.
    pub(crate) local_files: u64,
}

pub(crate) struct Connection<'a> {
    socket: TcpStream,
    tls: Option<Box<tls::Stream>>,
    /// Bytes of the server, decrypted, of which `taken` were handled.
    received: Vec<u8>,
    taken: usize,
    responses: CommandResponses,
    stop: &'a Stop,
}

impl<'a> Connection<'a> {
    /// Connects and logs in.
    pub(crate) fn open(target: &Target, database: &[u8], stop: &'a Stop) -> Result<Self, ConnectionError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut connection = Self {
            socket: connect(target)?,
            tls: None,
            received: Vec::new(),
            taken: 0,
            responses: CommandResponses::new(Capabilities::default()),
            stop,
        };
        connection.log_in(target, database, deadline)?;
        Ok(connection)
    }

    fn log_in(&mut self, target: &Target, database: &[u8], deadline: Instant) -> Result<(), ConnectionError> {
        let mut login = Login::new(target.user.as_bytes(), &target.password, database, target.tls.is_some());
        loop {
            let (header, payload) = self.read_packet(deadline)?;
            match login.receive(header.sequence, payload)? {
                LoginStep::Wait => {}
                LoginStep::Send(packet) => self.send(&packet)?,
                LoginStep::StartTls { request, response } => self.start_tls(target, &request, &response)?,
                LoginStep::Done => break,
            }
        }
        self.responses = CommandResponses::new(login.capabilities);
        Ok(())
    }

    fn start_tls(&mut self, target: &Target, request: &[u8], response: &SecretBytes) -> Result<(), ConnectionError> {
        // What came before TLS must not be taken for a part of it.
        if self.taken < self.received.len() {
            return Err(LoginError::Protocol.into());
        }
        self.send(request)?;
        if let Some(connector) = &target.tls {
            self.tls = Some(Box::new(connector.connect(&target.host)?));
        }
        // It is sent when the handshake is complete.
        self.send(response)
    }

    /// Sends a command and reads the response. `payload`: without the byte of the command.
    pub(crate) fn run(
        &mut self,
        command: Command,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Answer, ConnectionError> {
        let mut response = Response::default();
        let mut local_files = 0;
        let mut message = Vec::with_capacity(1 + payload.len());
        message.push(command as u8);
        message.extend_from_slice(payload);
        let request = packets(&message, 0);
        let start = Instant::now();
        let mut is_complete = !self.responses.on_request(&request, &mut response);
        self.send(&request)?;
        let deadline = start + timeout;
        while !is_complete {
            let header = self.read_packet(deadline)?.0;
            let packet = &self.received[self.taken - HEADER - header.length..self.taken];
            match self.responses.receive(header.sequence, packet, &mut response)? {
                ResponseStep::Read => {}
                ResponseStep::SendEmptyFile(file) => {
                    local_files += 1;
                    self.send(&file)?;
                }
                ResponseStep::Done => is_complete = true,
            }
        }
        let latency = start.elapsed();
        if self.taken == self.received.len() && self.received.capacity() > MAX_IDLE_BUFFER {
            (self.received, self.taken) = (Vec::new(), 0);
        }
        Ok(Answer { response, latency, local_files })
    }

    /// Says goodbye. Whether the server gets it does not matter.
    pub(crate) fn quit(mut self) {
        let _ = self.send(&packets(&[Command::Quit as u8], 0));
        if let Some(tls) = &mut self.tls {
            tls.finish();
            let _ = self.socket.write_all(tls.outgoing());
        }
    }

    fn read_packet(&mut self, deadline: Instant) -> Result<(Header, &[u8]), ConnectionError> {
        let header = loop {
            match Header::parse(&self.received[self.taken..]) {
                Some(header) if self.received.len() - self.taken >= HEADER + header.length => break header,
                Some(header) => self.read_more(HEADER + header.length, deadline)?,
                None => self.read_more(HEADER, deadline)?,
            }
        };
        let start = self.taken + HEADER;
        self.taken = start + header.length;
        Ok((header, &self.received[start..self.taken]))
    }

    /// Receives something. `needed`: bytes of the present packet.
    fn read_more(&mut self, needed: usize, deadline: Instant) -> Result<(), ConnectionError> {
        self.received.drain(..self.taken);
        self.taken = 0;
        self.received.reserve(needed.saturating_sub(self.received.len()).max(READ_BYTES));
        let mut buffer = [0; READ_BYTES];
        loop {
            if self.stop.is_overdue() {
                return Err(ConnectionError::Stopped);
            }
            if Instant::now() >= deadline {
                return Err(ConnectionError::TimedOut);
            }
            let length = match self.socket.read(&mut buffer) {
                Ok(0) => return Err(ConnectionError::Closed),
                Ok(length) => length,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let Some(tls) = &mut self.tls else {
                self.received.extend_from_slice(&buffer[..length]);
                return Ok(());
            };
            let received = &mut self.received;
            let before = received.len();
            let result = tls.receive(&buffer[..length], &mut |plain| received.extend_from_slice(plain));
            flush(tls, &mut self.socket)?;
            let is_closed = result? == tls::ReceiveResult::Closed;
            if received.len() > before {
                return Ok(());
            }
            if is_closed {
                return Err(ConnectionError::Closed);
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), ConnectionError> {
        match &mut self.tls {
            None => self.socket.write_all(bytes)?,
            Some(tls) => {
                tls.send(bytes);
                flush(tls, &mut self.socket)?;
            }
        }
        Ok(())
    }
}

fn flush(tls: &mut tls::Stream, socket: &mut TcpStream) -> io::Result<()> {
    let length = tls.outgoing().len();
    socket.write_all(tls.outgoing())?;
    tls.sent(length);
    Ok(())
}

fn connect(target: &Target) -> io::Result<TcpStream> {
    let mut last_error = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in &target.addresses {
        match TcpStream::connect_timeout(address, CONNECT_TIMEOUT) {
            Ok(socket) => {
                socket.set_nodelay(true)?;
                socket.set_read_timeout(Some(POLL_INTERVAL))?;
                socket.set_write_timeout(Some(CONNECT_TIMEOUT))?;
                return Ok(socket);
            }
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}
