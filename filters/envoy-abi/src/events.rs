//! Receives events of a worker's sockets in place of Envoy.
//!
//! A worker of Envoy waits on one epoll descriptor, the *outer* one, of its event library, libevent. [`Events`] has an
//! *inner* epoll descriptor, which the outer one watches. When a socket of the inner one has an event, the worker wakes
//! up, and Envoy calls the read hook of one connection, the *anchor*, which takes the events from here. The data of an
//! epoll entry can be chosen freely, and libevent uses the descriptor. So the entry of the inner descriptor has the
//! anchor's descriptor as data, and libevent takes its events for the anchor's.
//!
//! libevent does not know of this, but works with it: removing a missing entry is no error, and when Envoy changes the
//! events of a connection, libevent adds the entry again (`epoll.c`). But there must be no event for an anchor that
//! Envoy does not want to read: libevent would drop it, and no other event would follow. So a connection must be
//! returned to Envoy before Envoy can have a reason to stop reading it.
//!
//! Source of the fdinfo format: proc(5) and Linux' `fs/eventpoll.c` (`ep_show_fdinfo`).

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

/// Maximum events that are taken at once.
const BATCH: usize = 64;
/// Maximum batches in a row, so that the worker can do other work.
const MAX_BATCHES: usize = 8;
/// The events of offloaded connections.
const MASK: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
/// The events of descriptors that Envoy does not know.
const AUX_MASK: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;

/// An event of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The key under which the socket is watched.
    pub key: u64,
    /// The peer will send no more, or the connection is broken.
    pub is_end: bool,
}

/// The result of [`Events::swap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapResult {
    /// The descriptor refers to the new connection, and its events are received here.
    Watched,
    /// The descriptor refers to the new connection, but the kernel lacks memory or watches: its events are not received
    /// yet.
    Unwatched,
    /// The descriptor still refers to the old connection.
    Failed,
}

/// The epoll descriptor of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OuterEpoll {
    epoll: c_int,
    /// The mask with which libevent watches a socket for reading and writing.
    mask: u32,
}

/// The sockets of a worker whose events are received here. For the worker's thread only.
pub struct Events {
    inner: OwnedFd,
    outer: OuterEpoll,
    /// The descriptor in the inner descriptor's entry; -1: the outer epoll does not watch the inner one.
    anchor: Cell<c_int>,
    look_again: Cell<LookAgain>,
}

impl Events {
    /// For the worker that watches `socket` for reading and writing. None if its epoll descriptor is not found, or is
    /// not used as libevent does; then Envoy keeps all events.
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

    /// Tests [`Self::swap`] on this kernel, with connections of its own. Err: how the kernel differs.
    pub fn self_test() -> Result<(), &'static str> {
        self_test::run()
    }

    /// Offloads a connection: its events are received here. If it is readable now, an event follows. False: Envoy keeps
    /// its events.
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
        // If Envoy's entry stays, Envoy reads once without result, which is harmless.
        epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_DEL, fd, 0, 0);
        true
    }

    /// Removes an offloaded connection. `another`: returns one that is still offloaded, to replace an anchor.
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

    /// Returns a connection's events to Envoy. If it is readable now, Envoy gets an event.
    pub fn return_to_envoy(&self, socket: &Socket) {
        let Some(fd) = socket.descriptor() else { return };
        let data = data_of(fd);
        let _ = epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_ADD, fd, self.outer.mask, data)
            || epoll_ctl(self.outer.epoll, libc::EPOLL_CTL_MOD, fd, self.outer.mask, data);
    }

    /// Watches a descriptor that Envoy does not know, for reading and writing.
    #[must_use]
    pub fn watch(&self, other: BorrowedFd<'_>, key: u64) -> bool {
        epoll_ctl(self.inner(), libc::EPOLL_CTL_ADD, other.as_raw_fd(), AUX_MASK, key)
    }

    /// Makes the kernel report the descriptor's events again, if there are any.
    pub fn rearm_aux(&self, other: BorrowedFd<'_>, key: u64) {
        epoll_ctl(self.inner(), libc::EPOLL_CTL_MOD, other.as_raw_fd(), AUX_MASK, key);
    }

    /// Stops watching a descriptor.
    pub fn unwatch(&self, other: BorrowedFd<'_>) {
        epoll_ctl(self.inner(), libc::EPOLL_CTL_DEL, other.as_raw_fd(), 0, 0);
    }

    /// Makes the descriptor of `socket`, which is offloaded, refer to `new`, a connection that is watched here. Its
    /// events then have `key`. The old connection is closed, unless another descriptor refers to it.
    #[must_use]
    pub fn swap(&self, socket: &Socket, key: u64, new: OwnedFd) -> SwapResult {
        let Some(fd) = socket.descriptor() else { return SwapResult::Failed };
        // The options were copied before `new` connected. Since then a keepalive probe may have changed the keepalive
        // time.
        let _ = socket.with_descriptor(|old| socket_options::copy(old, new.as_fd()));
        descriptor::announce_rest(new.as_raw_fd());
        // Removed first: an epoll entry belongs to the descriptor together with its old connection.
        if !epoll_ctl(self.inner(), libc::EPOLL_CTL_DEL, fd, 0, 0) {
            return SwapResult::Failed;
        }
        self.unwatch(new.as_fd());
        // SAFETY: both are open; Envoy's stays Envoy's.
        let is_replaced = unsafe { libc::dup3(new.as_raw_fd(), fd, libc::O_CLOEXEC) } == fd;
        let is_watched = epoll_ctl(self.inner(), libc::EPOLL_CTL_ADD, fd, MASK, key);
        match (is_replaced, is_watched) {
            (true, true) => SwapResult::Watched,
            (true, false) => SwapResult::Unwatched,
            (false, _) => SwapResult::Failed,
        }
    }

    /// Makes the kernel report the events of an offloaded connection again, if it is readable.
    pub fn rearm(&self, socket: &Socket, key: u64) {
        if let Some(fd) = socket.descriptor() {
            epoll_ctl(self.inner(), libc::EPOLL_CTL_MOD, fd, MASK, key);
        }
    }

    /// Calls `each` for each event. Asks again for events that have probably arrived meanwhile, because that is cheaper
    /// than another wake-up, but only a few times, so that the worker can do other work. `each` may offload connections
    /// and return them.
    ///
    /// No event is lost: the worker watches the inner descriptor without EPOLLET, so it wakes up as long as there are
    /// events.
    pub fn dispatch(&self, mut each: impl FnMut(Event)) {
        let mut batch = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let mut has_asked_again = false;
        for _ in 0..MAX_BATCHES {
            // SAFETY: the kernel writes at most `BATCH` events.
            let count = unsafe { libc::epoll_wait(self.inner(), batch.as_mut_ptr(), BATCH as c_int, 0) };
            let ready = &batch[..usize::try_from(count).unwrap_or(0)];
            let mut look_again = self.look_again.get();
            if has_asked_again {
                look_again.record(!ready.is_empty());
            }
            for event in ready {
                const ENDS: u32 = (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32;
                each(Event { key: event.u64, is_end: event.events & ENDS != 0 });
            }
            // If the batch is full, more events are probably there. Otherwise there were none.
            let is_full = ready.len() == BATCH;
            has_asked_again = !is_full && !ready.is_empty() && look_again.decide();
            self.look_again.set(look_again);
            if !is_full && !has_asked_again {
                return;
            }
        }
    }

    fn inner(&self) -> c_int {
        self.inner.as_raw_fd()
    }

    fn set_anchor(&self, how: c_int, fd: c_int) -> bool {
        let done = epoll_ctl(self.outer.epoll, how, self.inner(), libc::EPOLLIN as u32, data_of(fd));
        if done {
            self.anchor.set(fd);
        }
        done
    }
}

/// The data that libevent uses for a descriptor.
fn data_of(fd: c_int) -> u64 {
    u64::try_from(fd).unwrap_or_default()
}

fn epoll_ctl(epoll: c_int, how: c_int, fd: c_int, mask: u32, data: u64) -> bool {
    let mut event = libc::epoll_event { events: mask, u64: data };
    // SAFETY: the kernel reads `event`.
    unsafe { libc::epoll_ctl(epoll, how, fd, &raw mut event) == 0 }
}

/// The only epoll descriptor of this process that watches `fd` as libevent does.
fn find_worker_epoll(process: &Path, fd: c_int) -> Option<OuterEpoll> {
    let mut all = fs::read_dir(process.join("fd")).ok()?.flatten().filter_map(|entry| {
        let polls = fs::read_link(entry.path()).ok()?.as_os_str() == "anon_inode:[eventpoll]";
        let epoll = entry.file_name().to_str()?.parse().ok()?;
        let about = polls.then(|| fs::read_to_string(process.join("fdinfo").join(entry.file_name())).ok())??;
        Some(OuterEpoll { epoll, mask: about.lines().find_map(|line| mask_of(line, fd))? })
    });
    let found = all.next()?;
    // With two such descriptors, the worker's is unknown.
    all.next().is_none().then_some(found)
}

/// The mask in a line of an epoll descriptor's fdinfo, if the line is for `fd`, has `fd` as data, and has
/// edge-triggered reading and writing.
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

    /// The epoll descriptor of a worker.
    struct Worker(OwnedFd);

    impl Worker {
        fn new() -> Self {
            // SAFETY: no pointer is given.
            Self(unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) })
        }

        /// A connection that Envoy watches, and its peer.
        fn connection(&self) -> (UnixStream, UnixStream, Socket) {
            let (near, far) = UnixStream::pair().expect("a pair");
            far.set_nonblocking(true).expect("nonblocking");
            let fd = far.as_raw_fd();
            assert!(epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, ALL, data_of(fd)));
            (near, far, Socket::of_descriptor(fd))
        }

        /// The descriptors for which libevent has events now.
        fn pending_fds(&self) -> Vec<c_int> {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            // SAFETY: there is room for 8 events.
            let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 8, 0) };
            let mut fds: Vec<_> = events[..usize::try_from(count).expect("no error")]
                .iter()
                .map(|event| c_int::try_from(event.u64).expect("a descriptor"))
                .collect();
            fds.sort_unstable();
            fds
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
    fn events_of_offloaded_connections_arrive_through_the_anchor() {
        let worker = Worker::new();
        let (mut near, mut far, socket) = worker.connection();
        let events = Events::new(&socket).expect("the epoll descriptor is found");
        assert!(events.offload(&socket, 7));
        worker.pending_fds(); // the initial write events
        assert_eq!((worker.pending_fds(), taken(&events)), (vec![], vec![]));
        near.write_all(b"1").expect("sent");
        assert_eq!(worker.pending_fds(), [far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 7, is_end: false }]);
        assert_eq!(read(&mut far), 1);
        assert_eq!((worker.pending_fds(), taken(&events)), (vec![], vec![]));
        near.shutdown(Shutdown::Write).expect("a FIN");
        assert_eq!(taken(&events), [Event { key: 7, is_end: true }]);
    }

    #[test]
    fn events_that_arrive_during_dispatch_are_not_lost() {
        let worker = Worker::new();
        let (mut near, mut far, socket) = worker.connection();
        let (mut other_near, _other_far, other) = worker.connection();
        let events = Events::new(&socket).expect("the epoll descriptor is found");
        assert!(events.offload(&socket, 1) && events.offload(&other, 2));
        worker.pending_fds(); // the initial write events
        for _ in 0..8 {
            near.write_all(b"1").expect("sent");
            taken(&events);
            read(&mut far);
        }
        near.write_all(b"1").expect("sent");
        let mut keys = Vec::new();
        events.dispatch(|event| {
            keys.push(event.key);
            if event.key == 1 {
                other_near.write_all(b"1").expect("sent");
            }
        });
        assert_eq!(keys, [1], "asking again found no events lately, so dispatch does not ask");
        assert_eq!(worker.pending_fds(), [far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 2, is_end: false }]);
        assert_eq!(worker.pending_fds(), []);
    }

    #[test]
    fn bytes_from_before_the_offload_cause_an_event() {
        let worker = Worker::new();
        let (mut near, _far, socket) = worker.connection();
        let events = Events::new(&socket).expect("the epoll descriptor is found");
        near.write_all(b"1").expect("sent");
        assert!(events.offload(&socket, 1));
        assert_eq!(taken(&events), [Event { key: 1, is_end: false }]);
    }

    #[test]
    fn another_connection_becomes_the_anchor() {
        let worker = Worker::new();
        let (_near, far, socket) = worker.connection();
        let (mut other_near, other_far, other) = worker.connection();
        let events = Events::new(&socket).expect("the epoll descriptor is found");
        assert!(events.offload(&socket, 1) && events.offload(&other, 2));
        worker.pending_fds();
        events.remove(&socket, || Some(other.clone()));
        events.return_to_envoy(&socket);
        assert_eq!(worker.pending_fds(), [far.as_raw_fd()], "Envoy gets the write event again");
        other_near.write_all(b"1").expect("sent");
        assert_eq!(worker.pending_fds(), [other_far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 2, is_end: false }]);
        events.remove(&other, || None);
        events.return_to_envoy(&other);
        assert_eq!(worker.pending_fds(), [other_far.as_raw_fd()]);
        other_near.write_all(b"1").expect("sent");
        assert_eq!(worker.pending_fds(), [other_far.as_raw_fd()]);
        assert_eq!(taken(&events), []);
        assert!(events.offload(&socket, 3), "a new anchor is set");
    }

    #[test]
    fn swap_replaces_the_connection_of_a_descriptor() {
        let worker = Worker::new();
        let (mut near, mut far, socket) = worker.connection();
        let events = Events::new(&socket).expect("the epoll descriptor is found");
        assert!(events.offload(&socket, 1));
        let (mut new_near, new_far) = UnixStream::pair().expect("a pair");
        assert!(events.watch(new_far.as_fd(), 2));
        taken(&events);
        assert_eq!(events.swap(&socket, 3, OwnedFd::from(new_far)), SwapResult::Watched);
        worker.pending_fds();
        assert_eq!(near.read(&mut [0; 1]).expect("an end"), 0, "the old connection is closed");
        new_near.write_all(b"12").expect("sent");
        assert_eq!(worker.pending_fds(), [far.as_raw_fd()]);
        assert_eq!(taken(&events), [Event { key: 3, is_end: false }]);
        assert_eq!(read(&mut far), 2);
        far.write_all(b"3").expect("sent");
        assert_eq!(new_near.read(&mut [0; 8]).expect("bytes"), 1);
        drop(far);
        assert_eq!(new_near.read(&mut [0; 1]).expect("an end"), 0, "no descriptor is left");
    }

    #[test]
    fn swap_copies_the_socket_options() {
        let worker = Worker::new();
        let (_near, far, socket) = worker.connection();
        let events = Events::new(&socket).expect("the epoll descriptor is found");
        assert!(events.offload(&socket, 1));
        let (_new_near, new_far) = UnixStream::pair().expect("a pair");
        assert!(events.watch(new_far.as_fd(), 2));
        socket_options::set(far.as_fd(), libc::SOL_SOCKET, libc::SO_PRIORITY, &5_i32.to_ne_bytes()).expect("set");
        assert_eq!(events.swap(&socket, 3, OwnedFd::from(new_far)), SwapResult::Watched);
        assert_eq!(socket_options::integer(far.as_fd(), libc::SOL_SOCKET, libc::SO_PRIORITY), Some(5));
    }

    #[test]
    fn socket_of_no_worker_or_of_two_is_rejected() {
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
    fn fdinfo_lines_are_parsed() {
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
