//! Events of a worker's sockets that come to the module instead of Envoy.
//!
//! A worker of Envoy waits on one epoll descriptor, that of its event library, libevent. This is another one, inside that:
//! when one of its sockets has something, the worker wakes, and Envoy calls the read hook of some connection, the
//! *anchor*, who takes the events from here. For libevent the inner descriptor is the anchor's: an entry of epoll has
//! the data that it was given, and libevent's entries have the descriptor as their data.
//!
//! libevent is not told of any of that, and does not mind: to take out what is not there is no error to it, and whenever
//! Envoy wants other events of a connection, it puts it in again (`epoll.c`). What it must never be given is an event of a
//! anchor for whose reading Envoy does not wait: that would be dropped, and the next one would not come. So a connection
//! must be given back before Envoy can have a reason to stop reading it.
//!
//! Source of what is read: proc(5) and Linux' `fs/eventpoll.c` (`ep_show_fdinfo`).

mod look_again;
mod self_test;

use core::cell::Cell;
use core::ffi::c_int;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use self::look_again::LookAgain;
use crate::socket::Socket;
use crate::{descriptor, socket_options};

/// Events that are taken at once.
const BATCH: usize = 64;
/// How often events are taken in a row, before the worker has other turns.
const MAX_BATCHES: usize = 8;
/// What an established connection is watched for here.
const MASK: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
/// What a descriptor is watched for that is not Envoy's.
const AUX_MASK: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;

/// What came of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The key that it was given.
    pub key: u64,
    /// The peer will send no more, or the connection is broken.
    pub is_end: bool,
}

/// What came of [`Events::swap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapResult {
    /// It is the new one, whose events come here.
    Watched,
    /// It is the new one, but the kernel has run out of memory or of watches: its events are not received yet.
    Unwatched,
    /// It is the old one.
    Failed,
}

/// Where a worker waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OuterEpoll {
    epoll: c_int,
    /// What a socket is watched for when Envoy wants all of it.
    mask: u32,
}

/// A worker's sockets whose events come here. On the worker's thread only.
pub struct Events {
    inner: OwnedFd,
    outer: OuterEpoll,
    /// For libevent, the inner descriptor is this one; -1: the worker does not wait for it.
    anchor: Cell<c_int>,
    look_again: Cell<LookAgain>,
}

impl Events {
    /// For the worker that watches `socket` for everything. None when its epoll descriptor is not found, or does not look
    /// as libevent's do: then all stays with Envoy.
    #[must_use]
    pub fn new(socket: &Socket) -> Option<Self> {
        let outer = find_worker_epoll(Path::new("/proc/self"), socket.descriptor()?)?;
        // SAFETY: no pointer is given; the descriptor has no other owner.
        let inner = unsafe {
            match libc::epoll_create1(libc::EPOLL_CLOEXEC) {
                -1 => return None,
                inner => OwnedFd::from_raw_fd(inner),
            }
        };
        Some(Self::with_descriptors(inner, outer))
    }

    fn with_descriptors(inner: OwnedFd, outer: OuterEpoll) -> Self {
        Self { inner, outer, anchor: Cell::new(-1), look_again: Cell::new(LookAgain::new()) }
    }

    /// Does all of it once with connections of its own. Err: what this kernel does otherwise.
    pub fn self_test() -> Result<(), &'static str> {
        self_test::run()
    }

    /// Offloads a connection: its events come here. If it is readable now, an event follows. False: it stays with Envoy.
    #[must_use]
    pub fn offload(&self, socket: &Socket, key: u64) -> bool {
        let Some(fd) = socket.descriptor() else { return false };
        if !epoll_ctl(self.inner(), libc::EPOLL_CTL_ADD, fd, MASK, key) {
            return false;
        }
        if self.anchor.get() == -1 && !self.set_anchor(libc::EPOLL_CTL_ADD, fd) {
            epoll_ctl(self.inner(), libc::EPOLL_CTL_DEL, fd, 0, 0);
            return false;
        }
        // If it stays in both, Envoy reads once more in vain, which is harmless.
        epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_DEL, fd, 0, 0);
        true
    }

    /// Removes an offloaded connection. `another`: one that is still offloaded, in case this one was the anchor.
    pub fn remove(&self, socket: &Socket, another: impl FnOnce() -> Option<Socket>) {
        let Some(fd) = socket.descriptor() else { return };
        epoll_ctl(self.inner(), libc::EPOLL_CTL_DEL, fd, 0, 0);
        if self.anchor.get() != fd {
            return;
        }
        let other = another().and_then(|other| other.descriptor());
        if !other.is_some_and(|other| self.set_anchor(libc::EPOLL_CTL_MOD, other)) {
            epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_DEL, self.inner(), 0, 0);
            self.anchor.set(-1);
        }
    }

    /// Gives a connection back to Envoy. If it is readable now, Envoy gets an event.
    pub fn return_to_envoy(&self, socket: &Socket) {
        let Some(fd) = socket.descriptor() else { return };
        let data = data_of(fd);
        let _ = epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_ADD, fd, self.outer.mask, data)
            || epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_MOD, fd, self.outer.mask, data);
    }

    /// Watches a descriptor that is not Envoy's, for reading and writing.
    #[must_use]
    pub fn watch(&self, other: BorrowedFd<'_>, key: u64) -> bool {
        epoll_ctl(self.inner(), libc::EPOLL_CTL_ADD, other.as_raw_fd(), AUX_MASK, key)
    }

    /// Has its events reported again, if there are some.
    pub fn rearm_aux(&self, other: BorrowedFd<'_>, key: u64) {
        epoll_ctl(self.inner(), libc::EPOLL_CTL_MOD, other.as_raw_fd(), AUX_MASK, key);
    }

    /// Stops watching a descriptor.
    pub fn unwatch(&self, other: BorrowedFd<'_>) {
        epoll_ctl(self.inner(), libc::EPOLL_CTL_DEL, other.as_raw_fd(), 0, 0);
    }

    /// Makes Envoy's descriptor, whose events come here, that of `new`: a connection that was watched here under a key of
    /// its own. The old connection is closed, unless another descriptor names it.
    #[must_use]
    pub fn swap(&self, socket: &Socket, key: u64, new: OwnedFd) -> SwapResult {
        let Some(fd) = socket.descriptor() else { return SwapResult::Failed };
        // They were copied before it was connected. Since then a keepalive probe may have changed the keepalive time.
        let _ = socket.with_descriptor(|old| socket_options::copy(old, new.as_fd()));
        descriptor::announce_rest(new.as_raw_fd());
        // First, while the descriptor still names the old connection: an entry belongs to both of them together.
        if !epoll_ctl(self.inner(), libc::EPOLL_CTL_DEL, fd, 0, 0) {
            return SwapResult::Failed;
        }
        self.unwatch(new.as_fd());
        // SAFETY: both are open; Envoy's stays Envoy's.
        let done = unsafe { libc::dup3(new.as_raw_fd(), fd, libc::O_CLOEXEC) } == fd;
        let there = epoll_ctl(self.inner(), libc::EPOLL_CTL_ADD, fd, MASK, key);
        match (done, there) {
            (true, true) => SwapResult::Watched,
            (true, false) => SwapResult::Unwatched,
            (false, _) => SwapResult::Failed,
        }
    }

    /// Has the events of an offloaded connection reported again, if it is readable.
    pub fn rearm(&self, socket: &Socket, key: u64) {
        if let Some(fd) = socket.descriptor() {
            epoll_ctl(self.inner(), libc::EPOLL_CTL_MOD, fd, MASK, key);
        }
    }

    /// Calls `each` for what has come, and looks again if something has probably come meanwhile: that is cheaper than to be
    /// woken for it. A few times only, since the worker has other things to do. `each` may offload connections and give them
    /// back.
    ///
    /// What is left is not lost: the worker waits for the inner descriptor without EPOLLET, and so is woken as long as that
    /// one has events.
    pub fn dispatch(&self, mut each: impl FnMut(Event)) {
        let mut batch = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let mut has_asked_again = false;
        for _ in 0..MAX_BATCHES {
            // SAFETY: the kernel writes at most so many events.
            let count = unsafe { libc::epoll_wait(self.inner(), batch.as_mut_ptr(), BATCH as c_int, 0) };
            let came = &batch[..usize::try_from(count).unwrap_or(0)];
            let mut look_again = self.look_again.get();
            if has_asked_again {
                look_again.record(!came.is_empty());
            }
            for event in came {
                const ENDS: u32 = (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32;
                each(Event { key: event.u64, is_end: event.events & ENDS != 0 });
            }
            // If the batch is full, more events are probably there already. Otherwise there were none.
            let is_full = came.len() == BATCH;
            has_asked_again = !is_full && !came.is_empty() && look_again.decide();
            self.look_again.set(look_again);
            if !is_full && !has_asked_again {
                return;
            }
        }
    }

    fn inner(&self) -> c_int {
        self.inner.as_raw_fd()
    }

    /// Makes `fd` the anchor.
    fn set_anchor(&self, how: c_int, fd: c_int) -> bool {
        let done = epoll_ctl(self.outer.epoll, how, self.inner(), libc::EPOLLIN as u32, data_of(fd));
        if done {
            self.anchor.set(fd);
        }
        done
    }
}

/// libevent's data for a descriptor.
fn data_of(fd: c_int) -> u64 {
    u64::try_from(fd).unwrap_or_default()
}

fn epoll_ctl(epoll: c_int, how: c_int, fd: c_int, mask: u32, data: u64) -> bool {
    let mut event = libc::epoll_event { events: mask, u64: data };
    // SAFETY: the kernel reads `event`.
    unsafe { libc::epoll_ctl(epoll, how, fd, &raw mut event) == 0 }
}

/// The epoll descriptor of this process that watches `fd`, when it does so as libevent does.
fn find_worker_epoll(process: &Path, fd: c_int) -> Option<OuterEpoll> {
    let mut all = fs::read_dir(process.join("fd")).ok()?.flatten().filter_map(|entry| {
        let polls = fs::read_link(entry.path()).ok()?.as_os_str() == "anon_inode:[eventpoll]";
        let epoll = entry.file_name().to_str()?.parse().ok()?;
        let about = polls.then(|| fs::read_to_string(process.join("fdinfo").join(entry.file_name())).ok())??;
        Some(OuterEpoll { epoll, mask: about.lines().find_map(|line| mask_of(line, fd))? })
    });
    let found = all.next()?;
    // Two of them could not be told apart.
    all.next().is_none().then_some(found)
}

/// The mask in a line of an epoll descriptor's fdinfo, when it is about `fd`, has `fd` as its data, and is edge-triggered
/// for both reading and writing.
fn mask_of(line: &str, fd: c_int) -> Option<u32> {
    let mut words = line.split_whitespace();
    let mut value = |name: &str| if words.next()? == name { words.next() } else { None };
    let target: c_int = value("tfd:")?.parse().ok()?;
    let mask = u32::from_str_radix(value("events:")?, 16).ok()?;
    let data = u64::from_str_radix(value("data:")?, 16).ok()?;
    let all = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32;
    (target == fd && data == u64::try_from(fd).ok()? && mask & all == all).then_some(mask)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    const ALL: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32;

    /// A worker's epoll descriptor, with the events that libevent would hear of.
    struct Worker(OwnedFd);

    impl Worker {
        fn new() -> Self {
            // SAFETY: no pointer is given.
            Self(unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) })
        }

        /// A connection as Envoy watches it, and its peer.
        fn connection(&self) -> (UnixStream, UnixStream, Socket) {
            let (near, far) = UnixStream::pair().expect("a pair");
            far.set_nonblocking(true).expect("nonblocking");
            let fd = far.as_raw_fd();
            assert!(epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, ALL, data_of(fd)));
            (near, far, Socket::of_descriptor(fd))
        }

        /// The descriptors of which libevent hears now.
        fn hears(&self) -> Vec<c_int> {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            // SAFETY: there is room for so many.
            let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 8, 0) };
            let mut heard: Vec<_> = events[..usize::try_from(count).expect("no error")]
                .iter()
                .map(|event| c_int::try_from(event.u64).expect("a descriptor"))
                .collect();
            heard.sort_unstable();
            heard
        }
    }

    fn taken(events: &Events) -> Vec<Event> {
        let mut all = Vec::new();
        events.dispatch(|event| all.push(event));
        all
    }

    fn read(far: &mut UnixStream) -> usize {
        far.read(&mut [0; 16]).expect("bytes")
    }

    #[test]
    fn events_come_here_by_the_carrier() {
        let worker = Worker::new();
        let (mut near, mut far, socket) = worker.connection();
        let events = Events::new(&socket).expect("it is found");
        assert!(events.offload(&socket, 7));
        worker.hears(); // the room that there was
        assert_eq!((worker.hears(), taken(&events)), (vec![], vec![]));
        near.write_all(b"1").expect("sent");
        assert_eq!(worker.hears(), [far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 7, is_end: false }]);
        assert_eq!(read(&mut far), 1);
        assert_eq!((worker.hears(), taken(&events)), (vec![], vec![]));
        near.shutdown(Shutdown::Write).expect("a FIN");
        assert_eq!(taken(&events), [Event { key: 7, is_end: true }]);
    }

    #[test]
    fn what_comes_meanwhile_is_told_sooner_or_later() {
        let worker = Worker::new();
        let (mut near, mut far, socket) = worker.connection();
        let (mut other_near, _other_far, other) = worker.connection();
        let events = Events::new(&socket).expect("it is found");
        assert!(events.offload(&socket, 1) && events.offload(&other, 2));
        worker.hears(); // the room that there was
        for _ in 0..8 {
            near.write_all(b"1").expect("sent");
            taken(&events);
            read(&mut far);
        }
        near.write_all(b"1").expect("sent");
        let mut came = Vec::new();
        events.dispatch(|event| {
            came.push(event.key);
            if event.key == 1 {
                other_near.write_all(b"1").expect("sent");
            }
        });
        assert_eq!(came, [1], "nothing has come meanwhile of late, so it does not look again");
        assert_eq!(worker.hears(), [far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 2, is_end: false }]);
        assert_eq!(worker.hears(), []);
    }

    #[test]
    fn what_was_there_before_is_told() {
        let worker = Worker::new();
        let (mut near, _far, socket) = worker.connection();
        let events = Events::new(&socket).expect("it is found");
        near.write_all(b"1").expect("sent");
        assert!(events.offload(&socket, 1));
        assert_eq!(taken(&events), [Event { key: 1, is_end: false }]);
    }

    #[test]
    fn another_carries_when_the_carrier_goes() {
        let worker = Worker::new();
        let (_near, far, socket) = worker.connection();
        let (mut other_near, other_far, other) = worker.connection();
        let events = Events::new(&socket).expect("it is found");
        assert!(events.offload(&socket, 1) && events.offload(&other, 2));
        worker.hears();
        events.remove(&socket, || Some(other.clone()));
        events.return_to_envoy(&socket);
        assert_eq!(worker.hears(), [far.as_raw_fd()], "Envoy hears of the room again");
        other_near.write_all(b"1").expect("sent");
        assert_eq!(worker.hears(), [other_far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 2, is_end: false }]);
        events.remove(&other, || None);
        events.return_to_envoy(&other);
        assert_eq!(worker.hears(), [other_far.as_raw_fd()]);
        other_near.write_all(b"1").expect("sent");
        assert_eq!(worker.hears(), [other_far.as_raw_fd()]);
        assert_eq!(taken(&events), []);
        assert!(events.offload(&socket, 3), "from the start");
    }

    #[test]
    fn a_connection_may_become_another_under_the_same_descriptor() {
        let worker = Worker::new();
        let (mut near, mut far, socket) = worker.connection();
        let events = Events::new(&socket).expect("it is found");
        assert!(events.offload(&socket, 1));
        let (mut new_near, new_far) = UnixStream::pair().expect("a pair");
        assert!(events.watch(new_far.as_fd(), 2));
        taken(&events);
        assert_eq!(events.swap(&socket, 3, OwnedFd::from(new_far)), SwapResult::Watched);
        worker.hears();
        assert_eq!(near.read(&mut [0; 1]).expect("an end"), 0, "the old one is closed");
        new_near.write_all(b"12").expect("sent");
        assert_eq!(worker.hears(), [far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 3, is_end: false }]);
        assert_eq!(read(&mut far), 2);
        far.write_all(b"3").expect("sent");
        assert_eq!(new_near.read(&mut [0; 8]).expect("bytes"), 1);
        drop(far);
        assert_eq!(new_near.read(&mut [0; 1]).expect("an end"), 0, "no descriptor is left");
    }

    #[test]
    fn the_new_connection_has_the_options_of_the_old_one() {
        let worker = Worker::new();
        let (_near, far, socket) = worker.connection();
        let events = Events::new(&socket).expect("it is found");
        assert!(events.offload(&socket, 1));
        let (_new_near, new_far) = UnixStream::pair().expect("a pair");
        assert!(events.watch(new_far.as_fd(), 2));
        socket_options::set(far.as_fd(), libc::SOL_SOCKET, libc::SO_PRIORITY, &5_i32.to_ne_bytes()).expect("set");
        assert_eq!(events.swap(&socket, 3, OwnedFd::from(new_far)), SwapResult::Watched);
        assert_eq!(socket_options::integer(far.as_fd(), libc::SOL_SOCKET, libc::SO_PRIORITY), Some(5));
    }

    #[test]
    fn a_descriptor_that_nobody_or_two_watch_is_left_alone() {
        let (_near, far) = UnixStream::pair().expect("a pair");
        assert!(Events::new(&Socket::of_descriptor(far.as_raw_fd())).is_none());
        let (one, other) = (Worker::new(), Worker::new());
        let (_near, far, socket) = one.connection();
        assert!(Events::new(&socket).is_some());
        let fd = far.as_raw_fd();
        assert!(epoll_ctl(other.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, ALL, data_of(fd)));
        assert!(Events::new(&socket).is_none());
    }

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let line = "tfd:       12 events: 8000001d data:                c  pos:0 ino:1f3a sdev:9";
        assert_eq!(mask_of(line, 12), Some(0x8000_001d));
        assert_eq!(mask_of(line, 13), None);
        assert_eq!(mask_of(&line.replace("   c", " 10c"), 12), None, "other data");
        assert_eq!(mask_of(&line.replace("8000001d", "80000019"), 12), None, "no writing");
        assert_eq!(mask_of(&line.replace("8000001d", "1d"), 12), None, "not edge-triggered");
        for other in ["pos:\t0", "", "tfd: 12", "tfd: 12 events: zz data: c"] {
            assert_eq!(mask_of(other, 12), None);
        }
    }
}
