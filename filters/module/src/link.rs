//! One TCP connection's bytes in both directions, plain or TLS, below Envoy's buffers.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use abi::socket::{Io, Outcome, Socket};
use tls::{Stream, TlsError};

use crate::worker;

/// Plaintext that is sealed at once; what Envoy's write buffer holds beyond waits there.
const CHUNK: usize = 64 * 1024;

/// Reads in a row from one connection, before others have their turn.
const READS: usize = 16;

/// So many bytes that went past Envoy it is told of at once, and not for each packet.
const TOLD: usize = 64 * 1024;

/// What comes of one read.
pub(crate) enum Step {
    /// Bytes were taken; there may be more.
    On,
    /// There may be more, but others have their turn first.
    Later,
    /// Envoy calls when there is more.
    Again,
    EndOfStream,
    Close,
}

/// What a TLS link could not read.
pub(crate) enum Unread {
    /// The peer does not speak TLS as it must; it was told.
    Tls(TlsError),
    /// The connection broke.
    Broken,
}

pub(crate) struct Link {
    pub(crate) socket: Socket,
    /// The session's other side.
    other: RefCell<Weak<Link>>,
    tls: RefCell<Option<Box<Stream>>>,
    /// Bytes of our own, before TLS.
    outbox: RefCell<Vec<u8>>,
    /// Bytes at the front of Envoy's write buffer, or on their way there, that are sealed already. They leave it when
    /// they are sent: an empty write buffer tells Envoy that it may close.
    sealed: Cell<usize>,
    finished: Cell<bool>,
    /// The FIN was sent.
    shut: Cell<bool>,
    /// Bytes on their way here by Envoy's buffers.
    queued: Cell<usize>,
    /// Bytes that were read here and sent past Envoy, and that it was not told of yet.
    heard: Cell<usize>,
    /// Bytes that were sent from here past Envoy, and that it was not told of yet.
    untold: Cell<usize>,
    /// A write has found that the connection is broken.
    broken: Cell<bool>,
}

impl Link {
    pub(crate) fn new(socket: Socket) -> Rc<Self> {
        Rc::new(Self {
            socket,
            other: RefCell::default(),
            tls: RefCell::default(),
            outbox: RefCell::default(),
            sealed: Cell::new(0),
            finished: Cell::new(false),
            shut: Cell::new(false),
            queued: Cell::new(0),
            heard: Cell::new(0),
            untold: Cell::new(0),
            broken: Cell::new(false),
        })
    }

    /// What comes from the one goes to the other from now on.
    pub(crate) fn pair(self: &Rc<Self>, other: &Rc<Self>) {
        self.other.replace(Rc::downgrade(other));
        other.other.replace(Rc::downgrade(self));
    }

    pub(crate) fn start_tls(&self, stream: Stream) {
        self.tls.replace(Some(Box::new(stream)));
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// A write has found that there is nobody any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// All was said to the peer that ever will be.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.get()
    }

    pub(crate) fn is_handshaking(&self) -> bool {
        self.tls.borrow().as_ref().is_some_and(|stream| stream.is_handshaking())
    }

    /// Reads as long as there is something to read, and Envoy wants it: `step` does one read into the buffer that it
    /// gets, and adds up how many bytes it passed on by Envoy's buffers.
    pub(crate) fn read(&self, step: impl Fn(&mut [u8], &mut usize) -> Step) -> Outcome {
        let outcome = self.read_in_turn(step);
        let ends = outcome.close || outcome.end_of_stream;
        if ends && self.untold.get() > 0 {
            self.socket.set_writable(); // the last occasion to tell
        }
        if ends || outcome.bytes > 0 || self.heard.get() >= TOLD {
            return Outcome { bytes: outcome.bytes + self.heard.take(), ..outcome };
        }
        outcome
    }

    fn read_in_turn(&self, step: impl Fn(&mut [u8], &mut usize) -> Step) -> Outcome {
        let mut passed = 0;
        for _ in 0..READS {
            match worker::with_buffer(|buffer| step(buffer, &mut passed)) {
                Step::On if self.socket.should_stop_reading() => break,
                Step::On => {}
                Step::Later => break,
                Step::Close => return Outcome::close(passed),
                Step::Again | Step::EndOfStream if self.broken.get() => return Outcome::close(passed),
                Step::Again => return Outcome::open(passed),
                Step::EndOfStream => return Outcome { close: false, bytes: passed, end_of_stream: true },
            }
        }
        self.socket.set_readable();
        Outcome::open(passed)
    }

    /// Gives bytes to the other side by Envoy's buffers, which tell both to pause when they hold too much.
    pub(crate) fn pass_on(&self, bytes: &[u8], passed: &mut usize) {
        self.socket.pass_on(bytes);
        *passed += bytes.len();
        if let Some(other) = self.other.borrow().upgrade() {
            other.queued.set(other.queued.get() + bytes.len());
        }
    }

    /// Gives bytes to the other side, straight if possible. What there is no room for goes by Envoy's buffers, and so
    /// does what comes behind it, until they are empty: that keeps the order.
    pub(crate) fn forward(&self, bytes: &[u8], passed: &mut usize) {
        let sent = self.other.borrow().upgrade().map_or(0, |other| other.send_straight(bytes));
        self.heard.set(self.heard.get() + sent);
        if sent < bytes.len() {
            self.pass_on(&bytes[sent..], passed);
        }
    }

    /// Sends bytes past Envoy, unless others are before them. Returns how many were taken; the others must go to
    /// Envoy's write buffer, even when TLS has them.
    fn send_straight(&self, bytes: &[u8]) -> usize {
        if self.queued.get() > 0 || self.finished.get() || !self.outbox.borrow().is_empty() {
            return 0;
        }
        let sent = match &mut *self.tls.borrow_mut() {
            None => self.socket.send(bytes),
            Some(stream) if stream.is_handshaking() || !stream.outgoing().is_empty() => Io::Again,
            Some(stream) => {
                stream.send(bytes);
                match self.send_outgoing(stream) {
                    Io::Done(_) => Io::Done(bytes.len()),
                    Io::Again => {
                        self.sealed.set(bytes.len());
                        Io::Again
                    }
                    Io::Broken => Io::Broken,
                }
            }
        };
        let taken = match sent {
            Io::Done(sent) => {
                self.socket.ignore_room();
                sent
            }
            Io::Again => 0,
            Io::Broken => {
                // Its own hooks have to end it, and may have seen all of its events already.
                self.broken.set(true);
                self.socket.set_readable();
                self.socket.set_writable();
                bytes.len()
            }
        };
        let untold = self.untold.get() + taken;
        self.untold.set(untold);
        if untold >= TOLD {
            self.socket.set_writable();
        }
        taken
    }

    /// Decrypts what came from the socket to the end of `plain`, and answers what the TLS handshake asks for.
    /// Ok(true): the peer has closed its side.
    pub(crate) fn decrypt(&self, ciphertext: &[u8], plain: &mut Vec<u8>) -> Result<bool, Unread> {
        let handshaking = self.is_handshaking();
        let received = match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.receive(ciphertext, &mut |piece| plain.extend_from_slice(piece)),
            None => return Ok(false),
        };
        // Also the alert that says what was wrong.
        let flushed = self.flush();
        let received = received.map_err(Unread::Tls)?;
        if flushed == Io::Broken {
            return Err(Unread::Broken);
        }
        if handshaking && !self.is_handshaking() {
            self.socket.set_writable(); // what the other side has said meanwhile has waited for this
        }
        Ok(received == tls::Received::Closed)
    }

    /// Sends bytes of our own. What does not fit now goes before anything else.
    pub(crate) fn say(&self, bytes: &[u8]) -> Io {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.send(bytes),
            None => self.outbox.borrow_mut().extend_from_slice(bytes),
        }
        self.flush()
    }

    /// Sends what waits here. `Done` when nothing is left, `Again` when something is.
    pub(crate) fn flush(&self) -> Io {
        let mut outbox = self.outbox.borrow_mut();
        while !outbox.is_empty() {
            match self.socket.send(&outbox) {
                Io::Done(sent) => drop(outbox.drain(..sent)),
                other => return other,
            }
        }
        drop(outbox);
        let mut tls = self.tls.borrow_mut();
        let Some(stream) = tls.as_mut() else {
            return Io::Done(0);
        };
        self.send_outgoing(stream)
    }

    fn send_outgoing(&self, stream: &mut Stream) -> Io {
        while !stream.outgoing().is_empty() {
            match self.socket.send(stream.outgoing()) {
                Io::Done(sent) => stream.sent(sent),
                other => return other,
            }
        }
        Io::Done(0)
    }

    /// Writes Envoy's buffer; with `end`, a FIN behind it. What lies there during the TLS handshake waits.
    ///
    /// Envoy hears on this occasion of what was sent past it, for its counters.
    pub(crate) fn write(&self, end: bool) -> Outcome {
        let written = self.write_buffer(end);
        self.queued.set(self.queued.get().saturating_sub(written.bytes));
        Outcome { bytes: written.bytes + self.untold.take(), ..written }
    }

    fn write_buffer(&self, end: bool) -> Outcome {
        let mut written = 0;
        match self.flush() {
            Io::Done(_) => written += self.release(),
            Io::Again => return Outcome::open(0),
            Io::Broken => return Outcome::close(0),
        }
        if self.is_handshaking() {
            return Outcome::open(written);
        }
        while self.socket.write_buffer_length() > 0 {
            let sent = if self.has_tls() { self.seal_and_send() } else { self.socket.flush() };
            match sent {
                Io::Done(bytes) => written += bytes,
                Io::Again => return Outcome::open(written),
                Io::Broken => return Outcome::close(written),
            }
        }
        if end {
            self.say_end();
            match self.flush() {
                Io::Done(_) => self.shut(),
                Io::Again => {} // Envoy calls again
                Io::Broken => return Outcome::close(written),
            }
        }
        Outcome::open(written)
    }

    /// Takes what was sealed out of Envoy's buffer, now that it is sent.
    fn release(&self) -> usize {
        let there = self.sealed.get().min(self.socket.write_buffer_length());
        self.sealed.set(self.sealed.get() - there);
        if there > 0 { self.socket.take_from_write_buffer(|_| there) } else { 0 }
    }

    fn seal_and_send(&self) -> Io {
        let mut sealed = 0;
        self.socket.take_from_write_buffer(|slices| {
            if let Some(stream) = self.tls.borrow_mut().as_mut() {
                for slice in slices {
                    let piece = &slice[..slice.len().min(CHUNK - sealed)];
                    stream.send(piece);
                    sealed += piece.len();
                    if sealed == CHUNK {
                        break;
                    }
                }
            }
            0
        });
        self.sealed.set(sealed);
        match self.flush() {
            Io::Done(_) => Io::Done(self.release()),
            other => other,
        }
    }

    /// No more will be written: says so to TLS and TCP, once, whatever finds no room.
    pub(crate) fn finish(&self) {
        self.say_end();
        let _ = self.flush();
        self.shut();
    }

    fn say_end(&self) {
        if !self.finished.replace(true)
            && let Some(stream) = self.tls.borrow_mut().as_mut()
        {
            stream.finish();
        }
    }

    fn shut(&self) {
        if !self.shut.replace(true) {
            self.socket.shutdown_write();
        }
    }

    /// We are about to close the connection: says `words`, and leaves nothing unread, or the kernel would send a
    /// reset, which may overtake them and what Envoy has written.
    pub(crate) fn say_farewell(&self, words: &[u8]) {
        if !words.is_empty() && !self.finished.get() {
            let _ = self.say(words);
        }
        self.finish();
        worker::with_buffer(|buffer| {
            for _ in 0..16 {
                if !matches!(self.socket.receive(buffer).io, Io::Done(1..)) {
                    break;
                }
            }
        });
    }
}
