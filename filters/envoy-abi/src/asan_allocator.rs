//! The allocator of a build with AddressSanitizer (`tests/support/module/address_sanitizer.py`). Rust's allocator would
//! use the one that Envoy exports, and the sanitizer would not see the module's allocations.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;

unsafe extern "C" {
    fn __interceptor_posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> i32;
    fn __interceptor_free(data: *mut c_void);
}

struct AsanAllocator;

#[global_allocator]
static ALLOCATOR: AsanAllocator = AsanAllocator;

// SAFETY: the sanitizer's versions of posix_memalign and free, which have the same contracts.
unsafe impl GlobalAlloc for AsanAllocator {
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
