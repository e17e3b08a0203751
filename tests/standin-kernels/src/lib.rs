//! The CUDA kernels, compiled as C++ and run on the CPU: what a launch would do on a GPU, for tests
//! without one.
//!
//! Addresses in the kernels' descriptors are host addresses here.
#![expect(unsafe_code, reason = "calls the kernels, which work on raw addresses")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Threads of a CTA in every launch.
pub const THREADS: u32 = 256;

// SAFETY: as the shim declares it.
unsafe extern "C" {
    fn forebay_shim_launch(
        name: *const c_char,
        grid: *const c_uint,
        block: *const c_uint,
        args: *mut *mut c_void,
    ) -> c_int;
}

/// Launches `name` over `ctas` CTAs with (descriptors' address, descriptors, tiles, address of the
/// tile CRCs), and returns when it is over.
///
/// # Errors
/// The shim's code: 1 for an unknown name, 2 where threads of a CTA disagree about a barrier, 3 for
/// no CTAs.
///
/// # Safety
/// What the descriptors describe must be valid host memory that nobody else uses meanwhile, and
/// there must be room for a CRC per tile.
pub unsafe fn launch(name: &CStr, ctas: u32, args: (u64, u32, u32, u64)) -> Result<(), i32> {
    let (mut descriptors, mut count, mut tiles, mut crcs) = args;
    let mut pointers: [*mut c_void; 4] =
        [(&raw mut descriptors).cast(), (&raw mut count).cast(), (&raw mut tiles).cast(), (&raw mut crcs).cast()];
    let (grid, block) = ([ctas, 1, 1], [THREADS, 1, 1]);
    // SAFETY: name and dimensions live through the call, the arguments have the kernels' types; the
    // rest is the caller's promise.
    let code = unsafe { forebay_shim_launch(name.as_ptr(), grid.as_ptr(), block.as_ptr(), pointers.as_mut_ptr()) };
    if code == 0 { Ok(()) } else { Err(code) }
}
