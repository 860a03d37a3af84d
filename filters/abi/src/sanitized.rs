//! For a build with AddressSanitizer, which `tests/sanitized.py` makes: Envoy exports an allocator of its own, to which
//! Rust's would be bound, and the sanitizer would know of nothing that the module allocates.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;

unsafe extern "C" {
    fn __interceptor_posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> i32;
    fn __interceptor_free(data: *mut c_void);
}

struct Sanitized;

#[global_allocator]
static ALLOCATOR: Sanitized = Sanitized;

// SAFETY: as C's functions of these names, which are at hand where the sanitizer is.
unsafe impl GlobalAlloc for Sanitized {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let mut out = core::ptr::null_mut();
        let alignment = layout.align().max(size_of::<*const c_void>());
        // SAFETY: the alignment is a power of two, and a multiple of a pointer's size.
        match unsafe { __interceptor_posix_memalign(&raw mut out, alignment, layout.size()) } {
            0 => out.cast(),
            _ => core::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, data: *mut u8, _: Layout) {
        // SAFETY: from `alloc`, and freed once.
        unsafe { __interceptor_free(data.cast()) }
    }
}
