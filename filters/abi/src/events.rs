//! Which events of its sockets a worker is woken for.
//!
//! Envoy waits for room to write on every connection, all the time: the kernel tells of it with each packet that comes,
//! and Envoy looks for something to write each time. Who writes past Envoy knows when there was no room, and need not hear
//! of it before. The mask is changed behind the back of Envoy's event library, libevent, which does no harm: it has a
//! mask of its own, drops what it did not ask for, and sets the kernel's anew when Envoy wants something else (`epoll.c`).
//!
//! Source: proc(5) and Linux' `fs/eventpoll.c` (`ep_show_fdinfo`).

use core::cell::Cell;
use core::ffi::c_int;
use std::fs;
use std::path::Path;

/// Where a worker waits for events of its sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiting {
    epoll: c_int,
    /// What a socket is watched for when Envoy wants all of it.
    mask: u32,
}

#[derive(Debug, Clone, Copy)]
enum Known {
    NotYet,
    /// None: it was not found, or is not as expected.
    Found(Option<Waiting>),
}

thread_local! {
    static WAITING: Cell<Known> = const { Cell::new(Known::NotYet) };
}

const ROOM: u32 = libc::EPOLLOUT as u32;

/// Has this worker woken for room to write on `fd`, a connection of its own, or not any more. If there is room, that is
/// told at once. False: nothing was changed, and it is woken as Envoy has asked for.
pub(crate) fn notice_room(fd: c_int, notice: bool) -> bool {
    let Some(waiting) = here(fd) else { return false };
    let mask = if notice { waiting.mask } else { waiting.mask & !ROOM };
    watch(waiting.epoll, fd, mask)
}

/// Where this thread waits. Looked up once, with the first descriptor that it is asked about: it takes a while.
fn here(fd: c_int) -> Option<Waiting> {
    WAITING.with(|known| {
        if let Known::Found(found) = known.get() {
            return found;
        }
        let found = find(Path::new("/proc/self"), fd);
        known.set(Known::Found(found));
        found
    })
}

/// The epoll descriptor of this process that watches `fd`, when it does so as libevent does.
fn find(process: &Path, fd: c_int) -> Option<Waiting> {
    let mut all = fs::read_dir(process.join("fd")).ok()?.flatten().filter_map(|entry| {
        let polls = fs::read_link(entry.path()).ok()?.as_os_str() == "anon_inode:[eventpoll]";
        let epoll = entry.file_name().to_str()?.parse().ok()?;
        let about = polls.then(|| fs::read_to_string(process.join("fdinfo").join(entry.file_name())).ok())??;
        Some(Waiting { epoll, mask: about.lines().find_map(|line| mask_of(line, fd))? })
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

fn watch(epoll: c_int, fd: c_int, mask: u32) -> bool {
    let mut event = libc::epoll_event { events: mask, u64: u64::try_from(fd).unwrap_or_default() };
    // SAFETY: the kernel reads `event`.
    unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_MOD, fd, &raw mut event) == 0 }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    const ALL: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32;

    /// An epoll descriptor that watches `fd` as libevent does; closed by nobody.
    fn watching(fd: c_int) -> c_int {
        // SAFETY: no pointer is given.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let mut event = libc::epoll_event { events: ALL, u64: u64::try_from(fd).expect("a descriptor") };
        // SAFETY: the kernel reads `event`.
        assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) }, 0);
        epoll
    }

    /// The next events of `epoll`; 0 when there is none within so many milliseconds.
    fn next(epoll: c_int, milliseconds: c_int) -> u32 {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for one event.
        match unsafe { libc::epoll_wait(epoll, &raw mut event, 1, milliseconds) } {
            1 => event.events,
            _ => 0,
        }
    }

    #[test]
    fn room_is_told_with_each_event_until_nobody_wants_to_know() {
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let fd = far.as_raw_fd();
        let epoll = watching(fd);
        assert_eq!(next(epoll, 1000), ROOM);
        assert!(notice_room(fd, false));
        near.write_all(b"1").expect("sent");
        assert_eq!(next(epoll, 1000), libc::EPOLLIN as u32);
        // Telling that it is wanted tells of what there is.
        assert!(notice_room(fd, true));
        assert_eq!(next(epoll, 1000), ROOM | libc::EPOLLIN as u32);
        assert_eq!(next(epoll, 0), 0);
    }

    #[test]
    fn a_descriptor_that_nobody_watches_is_left_alone() {
        let (_near, far) = UnixStream::pair().expect("a pair");
        assert_eq!(find(Path::new("/proc/self"), far.as_raw_fd()), None);
        assert!(!notice_room(far.as_raw_fd(), false));
    }

    #[test]
    fn a_descriptor_that_two_watch_is_left_alone() {
        let (_near, far) = UnixStream::pair().expect("a pair");
        let (_one, _other) = (watching(far.as_raw_fd()), watching(far.as_raw_fd()));
        assert_eq!(find(Path::new("/proc/self"), far.as_raw_fd()), None);
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
