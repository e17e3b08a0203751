//! The C interface: one optional function per symbol, as versions of the library differ in what they have.
//!
//! To add a call: its name, the version that brought it, and its type, in the table below. Nothing here is safe to call
//! without reading NVIDIA's documentation; `cuFileDriverOpen` in particular never returns where `/proc/modules` is missing.

use std::ffi::c_int;

use libloading::Library;

use crate::error::CuFileError;

macro_rules! symbols {
    ($($(#[$doc:meta])* $field:ident = $name:literal : $type:ty;)*) => {
        /// The functions that the opened library has.
        #[derive(Clone, Copy, Debug)]
        pub struct Symbols {
            $($(#[$doc])* pub $field: Option<$type>,)*
        }

        impl Symbols {
            /// Looks every symbol up.
            ///
            /// # Safety
            /// The library must be libcufile, and the result must not be used after it is closed.
            pub(crate) unsafe fn load(library: &Library) -> Self {
                Self {
                    $($field: {
                        // SAFETY: the caller vouches for the library; the type is that of `cufile.h`.
                        unsafe { library.get::<$type>(concat!($name, "\0").as_bytes()) }.ok().map(|s| *s)
                    },)*
                }
            }
        }
    };
}

symbols! {
    /// `cuFileGetVersion`, since 1.8: writes 1000·major + 10·minor.
    get_version = "cuFileGetVersion": unsafe extern "C" fn(version: *mut c_int) -> CuFileError;
}
