//! Buffers for bytes in flight, shared by all connections of a thread.
//!
//! A worker of Envoy handles one event at a time, and after nearly every event no bytes are in flight. So an idle
//! connection owns no buffer, and a busy one usually reuses a buffer instead of calling the allocator.

use std::cell::RefCell;
use std::mem;

/// Maximum buffers that a thread keeps: two are in use while bytes pass from one connection to another, and others wait
/// for slow sockets.
const SPARES: usize = 4;
/// Larger buffers are freed, so that one huge result does not occupy memory for good.
const LARGEST_SPARE: usize = 256 * 1024;
/// The minimum allocation: one TLS record (16 KiB of payload) with its header and tag.
const SMALLEST: usize = 17 * 1024;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A byte queue: bytes are appended at the end, and consumed from the front.
///
/// All of `memory` is initialized; `start..end` is filled. Memory is not cleared between uses, so that its reuse costs
/// nothing.
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

    /// At least `wanted` writable bytes after the filled ones. [`Self::commit`] sets how many were written.
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

    /// Drops bytes at the front. An empty buffer releases its memory.
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.start = self.end.min(self.start.saturating_add(bytes));
        if self.is_empty() {
            self.release();
        }
    }

    /// Moves a small rest to memory of its own size, because an incomplete record may wait for long.
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
        // `settle` allocates small memory, which the next user would have to grow.
        if (SMALLEST..=LARGEST_SPARE).contains(&memory.len()) {
            // While the thread ends, there is no list, and the memory is freed.
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
    fn buffer_keeps_the_order_of_bytes() {
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
    fn empty_buffer_owns_no_memory_and_spare_buffers_are_limited() {
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
    fn settle_moves_a_small_rest_to_small_memory() {
        let mut buffer = TlsBuffer::default();
        buffer.append(&vec![1; 100_000]);
        buffer.append(b"rest");
        buffer.consume(100_000);
        buffer.settle();
        assert_eq!(buffer.filled(), b"rest");
        assert_eq!(buffer.memory(), 4);
    }
}
