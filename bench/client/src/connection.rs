//! One connection of a client: its socket, TLS, login, and outstanding answers.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::rc::Rc;
use std::time::Duration;

use mysql_proto::command::Command;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};
use rustls::ClientConnection;

use crate::failure::Failure;
use crate::login::{Login, Step};
use crate::options::TlsMode;
use crate::packets::packet;
use crate::poller::{Interest, Poller, Ready};
use crate::response::{Answer, Response, Rows};
use crate::target::Target;

/// The size of the read buffer. All connections share one buffer, since none of them keeps what it has read.
pub(crate) const SCRATCH: usize = 64 * 1024;

/// The result of handling one event of a connection.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) logged_in: bool,
    /// Answers that were completed.
    pub(crate) answers: u32,
    /// The last completed answer, or the first error.
    pub(crate) answer: Option<Answer>,
    /// Bytes of answers, complete or not.
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Connection {
    socket: TcpStream,
    poller: Rc<Poller>,
    token: usize,
    tls: Option<Box<ClientConnection>>,
    /// None: logged in.
    login: Option<Box<Login>>,
    response: Response,
    /// Answers that are not complete yet.
    outstanding: u32,
    /// Bytes for which the socket had no room yet.
    unsent: Vec<u8>,
    reading: bool,
    interest: Interest,
}

impl Connection {
    /// Begins to connect and to log in. `poller` reports the connection's events with `token`.
    pub(crate) fn open(target: &Rc<Target>, poller: &Rc<Poller>, token: usize) -> Result<Self, Failure> {
        Self::open_with(target, poller, token, None)
    }

    /// Like [`Self::open`], with a receive buffer of `buffer` bytes.
    pub(crate) fn open_with(
        target: &Rc<Target>,
        poller: &Rc<Poller>,
        token: usize,
        buffer: Option<usize>,
    ) -> Result<Self, Failure> {
        let family = if target.address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
        if let Some(bytes) = buffer {
            sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
        }
        match connect(&socket, &target.address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true)?;
        let tls = match target.tls {
            TlsMode::First => Some(Box::new(target.session()?)),
            TlsMode::None | TlsMode::Mysql => None,
        };
        // In MySQL the server sends first, but in TLS the client does, as soon as the connection is established.
        let interest = Interest { read: true, write: tls.is_some() };
        poller.watch(&socket, token, interest)?;
        Ok(Self {
            socket,
            poller: Rc::clone(poller),
            token,
            tls,
            login: Some(Box::new(Login::new(Rc::clone(target)))),
            response: Response::new(),
            outstanding: 0,
            unsent: Vec::new(),
            reading: true,
            interest,
        })
    }

    /// Answers that are not complete yet.
    pub(crate) fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Sends commands, or a piece of a command. `answers`: how many more answers become outstanding.
    pub(crate) fn send_commands(&mut self, commands: &[u8], answers: u32) -> Result<(), Failure> {
        self.outstanding += answers;
        self.send(commands)
    }

    /// Sends COM_QUIT.
    pub(crate) fn quit(&mut self) -> Result<(), Failure> {
        self.send(&packet(0, &[Command::Quit as u8]))
    }

    /// Sends FIN.
    pub(crate) fn finish(&mut self) -> Result<(), Failure> {
        Ok(self.socket.shutdown(Shutdown::Write)?)
    }

    /// Closes the connection by RST.
    pub(crate) fn reset(self) -> Result<(), Failure> {
        Ok(sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO))?)
    }

    /// Sets whether the poller reports received bytes. If not, the kernel keeps them.
    pub(crate) fn set_reading(&mut self, reading: bool) -> Result<(), Failure> {
        self.reading = reading;
        Ok(self.update_interest()?)
    }

    /// Handles an event: sends unsent bytes, and reads once into `scratch`.
    pub(crate) fn handle(
        &mut self,
        ready: Ready,
        scratch: &mut [u8],
        rows: &mut impl Rows,
    ) -> Result<Progress, Failure> {
        let mut progress = Progress::default();
        if ready.writable {
            self.flush()?;
        }
        if ready.readable {
            match self.receive(scratch, &mut progress, rows) {
                Err(Failure::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
                other => other?,
            }
        }
        Ok(progress)
    }

    fn receive(&mut self, scratch: &mut [u8], progress: &mut Progress, rows: &mut impl Rows) -> Result<(), Failure> {
        if self.tls.is_none() {
            let length = retry_interrupted(|| self.socket.read(scratch))?;
            if length == 0 {
                return Err(Failure::Closed);
            }
            return self.on_received(&scratch[..length], progress, rows);
        }
        self.receive_tls(scratch, progress, rows)
    }

    fn receive_tls(
        &mut self,
        scratch: &mut [u8],
        progress: &mut Progress,
        rows: &mut impl Rows,
    ) -> Result<(), Failure> {
        // Reads many records at once. rustls itself would read little at a time.
        let (sealed, plain) = scratch.split_at_mut(scratch.len() / 2);
        let length = retry_interrupted(|| self.socket.read(sealed))?;
        if length == 0 {
            return Err(Failure::Closed);
        }
        let mut sealed = &sealed[..length];
        while let (Some(tls), false) = (&mut self.tls, sealed.is_empty()) {
            tls.read_tls(&mut sealed)?;
            if let Err(error) = tls.process_new_packets() {
                let _ = self.flush(); // the alert
                return Err(error.into());
            }
            self.open_records(plain, progress, rows)?;
        }
        Ok(self.flush()?)
    }

    /// Handles the plaintext of complete records.
    fn open_records(&mut self, plain: &mut [u8], progress: &mut Progress, rows: &mut impl Rows) -> Result<(), Failure> {
        while let Some(tls) = &mut self.tls {
            let length = match tls.reader().read(plain) {
                Ok(0) => return Err(Failure::Closed),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            };
            self.on_received(&plain[..length], progress, rows)?;
        }
        Ok(())
    }

    /// Handles bytes of the server after decryption.
    fn on_received(&mut self, mut bytes: &[u8], progress: &mut Progress, rows: &mut impl Rows) -> Result<(), Failure> {
        while !bytes.is_empty() {
            if let Some(login) = &mut self.login {
                match login.take(&mut bytes)? {
                    Step::More => {}
                    Step::Send(reply) => self.send(&reply)?,
                    Step::BeginTls(request, response) => {
                        if !bytes.is_empty() {
                            return Err(unrequested(bytes));
                        }
                        self.begin_tls(&request, &response)?;
                    }
                    Step::Done => {
                        self.login = None;
                        progress.logged_in = true;
                    }
                }
                continue;
            }
            if self.outstanding == 0 {
                return Err(unrequested(bytes));
            }
            let before = bytes.len();
            let answer = self.response.take(&mut bytes, rows)?;
            progress.bytes += before - bytes.len();
            if answer.is_some() {
                self.outstanding -= 1;
                progress.answers += 1;
                // A later answer does not replace an error.
                if !matches!(progress.answer, Some(Answer::Refused { .. })) {
                    progress.answer = answer;
                }
            }
        }
        Ok(())
    }

    fn begin_tls(&mut self, request: &[u8], response: &[u8]) -> Result<(), Failure> {
        self.send(request)?;
        if let Some(login) = &self.login {
            self.tls = Some(Box::new(login.session()?));
        }
        self.send(response)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if let Some(tls) = &mut self.tls {
            tls.writer().write_all(bytes)?;
            return Ok(self.flush()?);
        }
        let sent = if self.unsent.is_empty() { write_some(&mut self.socket, bytes)? } else { 0 };
        if sent < bytes.len() {
            self.unsent.extend_from_slice(&bytes[sent..]);
            self.update_interest()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.unsent.is_empty() {
            let sent = write_some(&mut self.socket, &self.unsent)?;
            self.unsent.drain(..sent);
        }
        if let (Some(tls), true) = (&mut self.tls, self.unsent.is_empty()) {
            while tls.wants_write() {
                match retry_interrupted(|| tls.write_tls(&mut self.socket)) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // If TLS begins first, the connection may not be established yet.
                    Err(error) if error.kind() == ErrorKind::NotConnected => break,
                    Err(error) => return Err(error),
                }
            }
        }
        self.update_interest()
    }

    /// Sets which events the poller reports.
    fn update_interest(&mut self) -> io::Result<()> {
        let write = !self.unsent.is_empty() || self.tls.as_ref().is_some_and(|tls| tls.wants_write());
        let interest = Interest { read: self.reading, write };
        if interest != self.interest {
            self.poller.change(&self.socket, self.token, interest)?;
            self.interest = interest;
        }
        Ok(())
    }
}

/// Writes as many bytes as the socket has room for.
fn write_some(socket: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    match retry_interrupted(|| socket.write(bytes)) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

/// Repeats a call that a signal has interrupted.
fn retry_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn unrequested(bytes: &[u8]) -> Failure {
    // The bytes may be an error packet that the server sent before it closed, so show its text.
    let shown = &bytes[..bytes.len().min(96)];
    Failure::Protocol(format!("{} bytes that nobody asked for: \"{}\"", bytes.len(), shown.escape_ascii()))
}
