//! The CUDA driver: whether it is there, and its answers as errors.
//!
//! cudarc panics where the library or a function is missing, so nothing of it may be called before
//! [`init`] has succeeded. [`init`] looks for the library and for every function that this module
//! calls.
#![expect(unsafe_code, reason = "looks for a library and calls its entry points")]

use std::ffi::CStr;
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, ErrorKind, Result};

/// The oldest driver that takes the kernels (PTX ISA 8.0), as the driver counts: 1000 × major + 10
/// × minor.
const OLDEST_DRIVER: i32 = 12_000;

/// Every function of the driver that this module calls.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetStreamPriorityRange",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuLaunchKernel",
    "cuGetErrorName",
];

/// A call of the driver that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CudaError {
    pub(super) call: &'static str,
    pub(super) code: CUresult,
}

pub(super) type CudaResult<T = ()> = std::result::Result<T, CudaError>;

/// The answer of `call`.
pub(super) fn check(call: &'static str, code: CUresult) -> CudaResult {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(CudaError { call, code }) }
}

impl CudaError {
    /// Whether the context is lost, for Forebay and for the server.
    pub(super) fn is_sticky(self) -> bool {
        use CUresult as C;
        matches!(
            self.code,
            C::CUDA_ERROR_DEINITIALIZED
                | C::CUDA_ERROR_ECC_UNCORRECTABLE
                | C::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | C::CUDA_ERROR_ILLEGAL_ADDRESS
                | C::CUDA_ERROR_LAUNCH_TIMEOUT
                | C::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | C::CUDA_ERROR_ASSERT
                | C::CUDA_ERROR_HARDWARE_STACK_ERROR
                | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | C::CUDA_ERROR_MISALIGNED_ADDRESS
                | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | C::CUDA_ERROR_INVALID_PC
                | C::CUDA_ERROR_LAUNCH_FAILED
                | C::CUDA_ERROR_CONTAINED
                | C::CUDA_ERROR_EXTERNAL_DEVICE
        )
    }

    pub(super) fn is_out_of_memory(self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    fn kind(self) -> ErrorKind {
        use CUresult as C;
        match self.code {
            C::CUDA_ERROR_OUT_OF_MEMORY | C::CUDA_ERROR_DEVICE_UNAVAILABLE => ErrorKind::Busy,
            C::CUDA_ERROR_NO_DEVICE
            | C::CUDA_ERROR_INVALID_DEVICE
            | C::CUDA_ERROR_NOT_SUPPORTED
            | C::CUDA_ERROR_NO_BINARY_FOR_GPU
            | C::CUDA_ERROR_INVALID_PTX
            | C::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | C::CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | C::CUDA_ERROR_JIT_COMPILATION_DISABLED
            | C::CUDA_ERROR_STUB_LIBRARY
            | C::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
            | C::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => ErrorKind::Unsupported,
            C::CUDA_ERROR_INVALID_HANDLE | C::CUDA_ERROR_INVALID_CONTEXT => ErrorKind::InvalidInput,
            _ => ErrorKind::Io,
        }
    }

    fn advice(self) -> Option<&'static str> {
        use CUresult as C;
        Some(match self.code {
            C::CUDA_ERROR_NO_DEVICE => "check nvidia-smi, CUDA_VISIBLE_DEVICES, and that the container was given a GPU",
            C::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                "another process has the GPU, or its compute mode prohibits it: nvidia-smi -c DEFAULT"
            }
            C::CUDA_ERROR_OUT_OF_MEMORY if self.call.starts_with("cuMemHost") => {
                "lower max_local_cpu_size or pinned_staging, or free host memory"
            }
            C::CUDA_ERROR_OUT_OF_MEMORY => "lower gpu_staging, or leave the server less of the GPU's memory",
            C::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                "libcuda and the kernel module differ: restart after the driver update"
            }
            C::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | C::CUDA_ERROR_INVALID_PTX => {
                "install a driver of CUDA 12.0 or later"
            }
            C::CUDA_ERROR_JIT_COMPILER_NOT_FOUND => {
                "give the container the driver's libnvidia-ptxjitcompiler.so.1 (NVIDIA_DRIVER_CAPABILITIES=compute)"
            }
            C::CUDA_ERROR_JIT_COMPILATION_DISABLED => {
                "unset CUDA_DISABLE_PTX_JIT: the kernels are compiled at the start"
            }
            C::CUDA_ERROR_STUB_LIBRARY => "take the CUDA toolkit's directory `stubs` out of LD_LIBRARY_PATH",
            C::CUDA_ERROR_INVALID_HANDLE => "pass a stream of the GPU that the KV memory lies on",
            _ if self.is_sticky() => {
                "the GPU's context is lost: restart the process, and look into dmesg for Xid messages"
            }
            _ => return None,
        })
    }

    /// The driver's name for the code.
    fn name(self) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the library was found (nothing else makes a `CudaError`); it writes the address
        // of a static string.
        let code = unsafe { sys::cuGetErrorName(self.code, &raw mut name) };
        if code != CUresult::CUDA_SUCCESS || name.is_null() {
            return format!("CUDA error {}", self.code as u32);
        }
        // SAFETY: the driver's static string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.name())
    }
}

impl From<CudaError> for Error {
    fn from(e: CudaError) -> Self {
        let error = Self::new(e.kind(), e.to_string());
        match e.advice() {
            Some(advice) => error.advice(advice),
            None => error,
        }
    }
}

fn unsupported(message: String, advice: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, message).advice(advice)
}

/// Finds the library once; what is missing stays missing for the life of the process.
fn find() -> std::result::Result<(), String> {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            // SAFETY: opening NVIDIA's library runs its initialisers, which any CUDA program runs.
            if !unsafe { sys::is_culib_present() } {
                return Err("no CUDA driver: libcuda.so.1 was not found".to_owned());
            }
            // SAFETY: it can be opened, so this does not panic.
            let library = unsafe { sys::culib() };
            for name in NEEDED {
                // SAFETY: only asks for the address; nothing is called by this type.
                if unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err() {
                    return Err(format!("the CUDA driver has no {name}"));
                }
            }
            Ok(())
        })
        .clone()
}

/// Makes the driver usable, or says why it is not.
///
/// # Errors
/// [`ErrorKind::Unsupported`] without a driver, with one that is too old, and without a GPU.
pub(super) fn init() -> Result<()> {
    find().map_err(|e| {
        let advice = "install NVIDIA's driver (CUDA 12.0 or later), or run the container with --gpus";
        unsupported(e, advice)
    })?;
    let mut version = 0;
    // SAFETY: the library has these functions; the version is written to a live integer.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
    }
    if version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(unsupported(
            format!("the CUDA driver is of version {major}.{minor}, too old for Forebay's kernels"),
            "install a driver of CUDA 12.0 or later",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_for_the_memory_that_ran_out_and_a_gpu_that_others_have_is_not_lost() {
        let of = |call, code| CudaError { call, code };
        for call in ["cuMemHostRegister", "cuMemHostAlloc"] {
            let advice = of(call, CUresult::CUDA_ERROR_OUT_OF_MEMORY).advice().unwrap();
            assert!(advice.contains("pinned_staging") && !advice.contains("gpu_staging"), "{advice}");
        }
        assert!(of("cuMemAlloc", CUresult::CUDA_ERROR_OUT_OF_MEMORY).advice().unwrap().contains("gpu_staging"));
        let taken = of("cuDevicePrimaryCtxRetain", CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE);
        assert!(!taken.is_sticky() && taken.kind() == ErrorKind::Busy);
        assert!(taken.advice().unwrap().contains("nvidia-smi -c DEFAULT"));
    }
}
