//! Memory for bytes in flight, shared by all connections of a thread.
//!
//! A worker of Envoy serves one event at a time, and after nearly every one of them nothing is left in flight. So
//! an idle connection owns no buffer, and a busy one mostly finds a warm one instead of asking the allocator.

use std::cell::RefCell;
use std::mem;

/// What a thread keeps at most: while one connection's bytes pass to another, two are in use at once, plus those
/// that wait for a slow socket.
const SPARES: usize = 4;
/// A larger buffer is not kept: one huge result must not pin memory for good.
const LARGEST_SPARE: usize = 256 * 1024;
/// The least that is allocated: one record of TLS (16 KiB of payload) with its header and tag.
const SMALLEST: usize = 17 * 1024;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A queue of bytes: added at the end, taken from the front.
///
/// All of `memory` is initialised; the part `start..end` is filled. It is not cleared between uses, so that growing
/// within what was used before costs nothing.
#[derive(Default)]
pub(crate) struct TlsBuffer {
    memory: Vec<u8>,
    start: usize,
    end: usize,
}

impl TlsBuffer {
    pub(crate) fn filled(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    pub(crate) fn filled_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.end]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.room(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.commit(bytes.len());
    }

    /// At least `wanted` bytes behind the filled ones, to be written to; `commit` says how many were.
    pub(crate) fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.memory.is_empty() && wanted > 0 {
            self.memory = SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten().unwrap_or_default();
        }
        if self.memory.len() - self.end < wanted && self.start > 0 {
            self.memory.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let needed = self.end + wanted;
        if self.memory.len() < needed {
            self.memory.resize(needed.max(self.memory.len() * 2).max(SMALLEST), 0);
        }
        &mut self.memory[self.end..]
    }

    pub(crate) fn commit(&mut self, written: usize) {
        self.end += written;
        debug_assert!(self.end <= self.memory.len());
    }

    /// Drops bytes at the front. The memory is given back with the last of them.
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.start = self.end.min(self.start.saturating_add(bytes));
        if self.is_empty() {
            self.release();
        }
    }

    /// Keeps a small rest in memory of its own size: what waits for the other half of a record may wait for long.
    pub(crate) fn settle(&mut self) {
        let rest = self.end - self.start;
        if rest == 0 {
            self.release();
        } else if rest <= self.memory.len() / 4 {
            let own = self.filled().to_vec();
            self.release();
            *self = Self { memory: own, start: 0, end: rest };
        }
    }

    fn release(&mut self) {
        let memory = mem::take(self).memory;
        // A small one was cut to a rest's size by `settle`; the next user would have to grow it.
        if (SMALLEST..=LARGEST_SPARE).contains(&memory.len()) {
            // While the thread ends there is no list left; the memory is then simply freed.
            let _ = SPARE.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < SPARES {
                    spare.push(memory);
                }
            });
        }
    }

    #[cfg(test)]
    fn memory(&self) -> usize {
        self.memory.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_the_order_they_went_in() {
        let mut buffer = TlsBuffer::default();
        let mut expected = Vec::new();
        for round in 0..200_usize {
            let bytes: Vec<u8> = (0..round * 37 % 5000).map(|i| (i + round) as u8).collect();
            buffer.append(&bytes);
            expected.extend(bytes);
            assert_eq!(buffer.filled(), expected);
            let taken = expected.len() * (round % 4) / 3;
            buffer.consume(taken);
            expected.drain(..taken.min(expected.len()));
            if round % 5 == 0 {
                buffer.settle();
            }
            assert_eq!(buffer.filled(), expected);
        }
    }

    #[test]
    fn a_drained_buffer_owns_nothing_and_the_thread_keeps_little() {
        for size in [1, SMALLEST, LARGEST_SPARE + 1, 10 << 20] {
            let mut buffers: Vec<TlsBuffer> = (0..SPARES + 3).map(|_| TlsBuffer::default()).collect();
            for buffer in &mut buffers {
                buffer.append(&vec![7; size]);
                buffer.consume(size);
                assert_eq!(buffer.memory(), 0);
            }
        }
        SPARE.with(|spare| {
            let spare = spare.borrow();
            assert!(spare.len() <= SPARES);
            assert!(spare.iter().all(|memory| memory.len() <= LARGEST_SPARE));
        });
    }

    #[test]
    fn the_rest_of_a_large_read_is_kept_small() {
        let mut buffer = TlsBuffer::default();
        buffer.append(&vec![1; 100_000]);
        buffer.append(b"rest");
        buffer.consume(100_000);
        buffer.settle();
        assert_eq!(buffer.filled(), b"rest");
        assert_eq!(buffer.memory(), 4);
    }
}
