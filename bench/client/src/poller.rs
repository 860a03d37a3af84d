//! Waits for events of descriptors by level-triggered epoll(7): an event is reported until it is handled.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

#[derive(Debug)]
pub(crate) struct Poller(OwnedFd);

/// The events to wait for. Errors and the end of the stream are always reported, as readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// A descriptor that can be read or written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ready {
    pub(crate) token: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// Memory for the events that are reported at once.
pub(crate) struct Events(Vec<epoll::Event>);

impl Events {
    pub(crate) fn new() -> Self {
        Self(Vec::with_capacity(512))
    }
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Reports events of `fd` with `token`, until `fd` is closed.
    pub(crate) fn watch(&self, fd: impl AsFd, token: usize, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, EventData::new_u64(token as u64), flags(interest))?)
    }

    pub(crate) fn change(&self, fd: impl AsFd, token: usize, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, EventData::new_u64(token as u64), flags(interest))?)
    }

    /// Waits until a descriptor is ready, but not longer than `timeout`. A signal ends the wait early.
    pub(crate) fn wait<'a>(
        &self,
        events: &'a mut Events,
        timeout: Duration,
    ) -> io::Result<impl Iterator<Item = Ready> + use<'a>> {
        events.0.clear();
        let timeout = Timespec { tv_sec: timeout.as_secs().min(3600) as i64, tv_nsec: timeout.subsec_nanos().into() };
        match epoll::wait(&self.0, spare_capacity(&mut events.0), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(events.0.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            Ready {
                token: data.u64() as usize,
                readable: flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR),
                writable: flags.contains(EventFlags::OUT),
            }
        }))
    }
}

fn flags(interest: Interest) -> EventFlags {
    let mut flags = EventFlags::empty();
    flags.set(EventFlags::IN, interest.read);
    flags.set(EventFlags::OUT, interest.write);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn only_ready_descriptors_are_reported() {
        let (poller, mut events) = (Poller::new().expect("epoll"), Events::new());
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        poller.watch(&ours, 7, Interest { read: true, write: false }).expect("watched");
        assert_eq!(poller.wait(&mut events, Duration::ZERO).expect("waited").count(), 0);
        theirs.write_all(b"x").expect("written");
        let ready: Vec<_> = poller.wait(&mut events, Duration::from_secs(5)).expect("waited").collect();
        assert_eq!(ready.len(), 1);
        assert!(ready[0].token == 7 && ready[0].readable && !ready[0].writable);
        poller.change(&ours, 8, Interest { read: false, write: true }).expect("changed");
        let ready: Vec<_> = poller.wait(&mut events, Duration::from_secs(5)).expect("waited").collect();
        assert!(ready[0].token == 8 && !ready[0].readable && ready[0].writable);
    }
}
