//! What goes to the peer: bytes of the other side's, and a few words of our own.

use abi::socket::{Io, Outcome};
use tls::Stream;

use super::{Link, TOLD};
use crate::worker;

/// Plaintext that is sealed at once; what Envoy's write buffer holds beyond waits there.
const CHUNK: usize = 64 * 1024;

impl Link {
    /// Writes to the descriptor. Should there be no room, Envoy is to hear when there is.
    fn send(&self, bytes: &[u8]) -> Io {
        let sent = self.socket.send(bytes);
        if sent == Io::Again {
            self.give_back();
        }
        sent
    }

    /// Sends bytes past Envoy, unless others are before them. Returns how many were taken; the others must go to
    /// Envoy's write buffer, even when TLS has them.
    pub(super) fn send_straight(&self, bytes: &[u8]) -> usize {
        if !self.open.get() || self.queued.get() > 0 || self.finished.get() || !self.outbox.borrow().is_empty() {
            return 0;
        }
        let sent = match &mut *self.tls.borrow_mut() {
            None => self.send(bytes),
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
            Io::Done(sent) => sent,
            Io::Again => 0,
            Io::Broken => {
                // Its own hooks have to end it, and may have seen all of its events already.
                self.broken.set(true);
                self.give_back();
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

    /// Sends bytes of our own. What does not fit now goes before anything else.
    pub(crate) fn say(&self, bytes: &[u8]) -> Io {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => stream.send(bytes),
            None => self.outbox.borrow_mut().extend_from_slice(bytes),
        }
        self.flush()
    }

    /// Sends the last words on a connection that is given up. What does not fit now is dropped.
    pub(crate) fn say_last(&self, words: &[u8]) {
        match &mut *self.tls.borrow_mut() {
            Some(stream) => {
                stream.send(words);
                stream.finish();
                let _ = self.socket.send(stream.outgoing());
            }
            None => drop(self.socket.send(words)),
        }
    }

    /// Sends what waits here. `Done` when nothing is left, `Again` when something is.
    pub(crate) fn flush(&self) -> Io {
        let mut outbox = self.outbox.borrow_mut();
        while !outbox.is_empty() {
            match self.send(&outbox) {
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
            match self.send(stream.outgoing()) {
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
