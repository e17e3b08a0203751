//! cuFile's error integers and their names.
//!
//! Errors stay plain `i32`: the library may be newer than this table, and a Rust enum with an
//! unknown value would be undefined behaviour. The numbers and names are those of `cufile.h`, 1.20.

use std::{fmt, io};

/// Errors of cuFile start above this number.
const BASE_ERR: i32 = 5000;

/// cuFile's `CU_FILE_SUCCESS`.
const SUCCESS: i32 = 0;

/// What most cuFile calls return: 8 bytes, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CuFileError {
    /// cuFile's error (`CUfileOpError`), 0 for success.
    pub err: i32,
    /// The CUDA driver's error (`CUresult`) where `err` is 5011, else of no meaning.
    pub cu_err: i32,
}

impl CuFileError {
    /// `Ok` where the call succeeded.
    ///
    /// # Errors
    /// The value itself where it did not.
    pub const fn check(self) -> Result<(), Self> {
        if self.err == SUCCESS { Ok(()) } else { Err(self) }
    }

    fn fmt_number(self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match name_of(self.err) {
            Some(name) => write!(f, "{name} ({})", self.err),
            None => write!(f, "cuFile error {}", self.err),
        }
    }
}

impl fmt::Display for CuFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_number(f)?;
        if self.err == CUDA_DRIVER_ERROR { write!(f, ", CUDA driver error {}", self.cu_err) } else { Ok(()) }
    }
}

impl std::error::Error for CuFileError {}

const CUDA_DRIVER_ERROR: i32 = 5011;

/// The name in `cufile.h` of an error of cuFile, given as it is or negated (as reads and writes
/// return it).
#[must_use]
pub const fn name_of(err: i32) -> Option<&'static str> {
    let at = err.unsigned_abs().wrapping_sub(BASE_ERR as u32) as usize;
    if err == SUCCESS {
        return Some("CU_FILE_SUCCESS");
    }
    if at < NAMES.len() && !NAMES[at].is_empty() { Some(NAMES[at]) } else { None }
}

/// Why a read or a write moved nothing.
#[derive(Debug)]
pub enum TransferError {
    /// The system's error: the call returned -1 and left it in `errno`.
    System(io::Error),
    /// cuFile's error, positive: the call returned it negated.
    CuFile(i32),
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(e) => e.fmt(f),
            Self::CuFile(err) => CuFileError { err: *err, cu_err: 0 }.fmt_number(f),
        }
    }
}

impl std::error::Error for TransferError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System(e) => Some(e),
            Self::CuFile(_) => None,
        }
    }
}

/// The bytes that a read or write moved, from what it returned. Call it at once on the same thread,
/// before anything else changes `errno`. Fewer bytes than asked for is a success here: compare.
///
/// # Errors
/// [`TransferError`] for a negative result.
pub fn transferred(result: isize) -> Result<usize, TransferError> {
    match usize::try_from(result) {
        Ok(bytes) => Ok(bytes),
        Err(_) if result == -1 => Err(TransferError::System(io::Error::last_os_error())),
        Err(_) => Err(TransferError::CuFile(i32::try_from(result).map_or(i32::MAX, i32::saturating_neg))),
    }
}

/// By number above [`BASE_ERR`]; empty where the header has a gap.
static NAMES: [&str; 51] = [
    "",
    "CU_FILE_DRIVER_NOT_INITIALIZED",
    "CU_FILE_DRIVER_INVALID_PROPS",
    "CU_FILE_DRIVER_UNSUPPORTED_LIMIT",
    "CU_FILE_DRIVER_VERSION_MISMATCH",
    "CU_FILE_DRIVER_VERSION_READ_ERROR",
    "CU_FILE_DRIVER_CLOSING",
    "CU_FILE_PLATFORM_NOT_SUPPORTED",
    "CU_FILE_IO_NOT_SUPPORTED",
    "CU_FILE_DEVICE_NOT_SUPPORTED",
    "CU_FILE_NVFS_DRIVER_ERROR",
    "CU_FILE_CUDA_DRIVER_ERROR",
    "CU_FILE_CUDA_POINTER_INVALID",
    "CU_FILE_CUDA_MEMORY_TYPE_INVALID",
    "CU_FILE_CUDA_POINTER_RANGE_ERROR",
    "CU_FILE_CUDA_CONTEXT_MISMATCH",
    "CU_FILE_INVALID_MAPPING_SIZE",
    "CU_FILE_INVALID_MAPPING_RANGE",
    "CU_FILE_INVALID_FILE_TYPE",
    "CU_FILE_INVALID_FILE_OPEN_FLAG",
    "CU_FILE_DIO_NOT_SET",
    "",
    "CU_FILE_INVALID_VALUE",
    "CU_FILE_MEMORY_ALREADY_REGISTERED",
    "CU_FILE_MEMORY_NOT_REGISTERED",
    "CU_FILE_PERMISSION_DENIED",
    "CU_FILE_DRIVER_ALREADY_OPEN",
    "CU_FILE_HANDLE_NOT_REGISTERED",
    "CU_FILE_HANDLE_ALREADY_REGISTERED",
    "CU_FILE_DEVICE_NOT_FOUND",
    "CU_FILE_INTERNAL_ERROR",
    "CU_FILE_GETNEWFD_FAILED",
    "",
    "CU_FILE_NVFS_SETUP_ERROR",
    "CU_FILE_IO_DISABLED",
    "CU_FILE_BATCH_SUBMIT_FAILED",
    "CU_FILE_GPU_MEMORY_PINNING_FAILED",
    "CU_FILE_BATCH_FULL",
    "CU_FILE_ASYNC_NOT_SUPPORTED",
    // Before 1.15 this number was the end mark of the list.
    "CU_FILE_INTERNAL_BATCH_SETUP_ERROR",
    "CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR",
    "CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR",
    "CU_FILE_INTERNAL_BATCH_CANCEL_ERROR",
    "CU_FILE_NOMEM_ERROR",
    "CU_FILE_IO_ERROR",
    "CU_FILE_INTERNAL_BUF_REGISTER_ERROR",
    "CU_FILE_HASH_OPR_ERROR",
    "CU_FILE_INVALID_CONTEXT_ERROR",
    "CU_FILE_NVFS_INTERNAL_DRIVER_ERROR",
    "CU_FILE_BATCH_NOCOMPAT_ERROR",
    "CU_FILE_IO_MAX_ERROR",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_names_of_the_header() {
        for (err, name) in [
            (0, "CU_FILE_SUCCESS"),
            (5001, "CU_FILE_DRIVER_NOT_INITIALIZED"),
            (5011, "CU_FILE_CUDA_DRIVER_ERROR"),
            (5022, "CU_FILE_INVALID_VALUE"),
            (5033, "CU_FILE_NVFS_SETUP_ERROR"),
            (5050, "CU_FILE_IO_MAX_ERROR"),
            (-5027, "CU_FILE_HANDLE_NOT_REGISTERED"),
        ] {
            assert_eq!(name_of(err), Some(name), "{err}");
        }
        for err in [1, -1, 5000, 5021, 5032, 5051, i32::MAX, i32::MIN] {
            assert_eq!(name_of(err), None, "{err}");
        }
    }

    #[test]
    fn an_error_names_itself_and_the_driver_error_behind_it() {
        assert_eq!(CuFileError { err: 0, cu_err: 7 }.check(), Ok(()));
        let e = CuFileError { err: 5011, cu_err: 100 }.check().unwrap_err();
        assert_eq!(e.to_string(), "CU_FILE_CUDA_DRIVER_ERROR (5011), CUDA driver error 100");
        assert_eq!(CuFileError { err: 5999, cu_err: 0 }.to_string(), "cuFile error 5999");
    }

    #[test]
    fn what_a_transfer_returns_is_bytes_or_errno_or_an_error_of_cufile() {
        assert_eq!((transferred(0).unwrap(), transferred(4096).unwrap()), (0, 4096));
        assert!(matches!(transferred(-5027), Err(TransferError::CuFile(5027))));
        assert_eq!(transferred(-5027).unwrap_err().to_string(), "CU_FILE_HANDLE_NOT_REGISTERED (5027)");
        assert!(matches!(transferred(isize::MIN), Err(TransferError::CuFile(i32::MAX))));
        std::fs::File::open("/nonexistent").unwrap_err();
        let TransferError::System(e) = transferred(-1).unwrap_err() else { panic!("-1 is the system's error") };
        assert_eq!(e.kind(), io::ErrorKind::NotFound);
    }
}
