//! The kernels: one module per context, from the PTX that is compiled in.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute_enum as Attribute, CUmodule};

use super::context::Context;
use super::driver::{CudaResult, check};
use super::plane::THREADS;
use super::streams::OwnStream;

/// Made by `make kernels` from `kernels/*.cu`; ends in a zero, as the driver wants it.
const PTX: &str = concat!(include_str!("../../../kernels/ptx/forebay.ptx"), "\0");

/// The loaded kernels of one context.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<Context>,
    module: CUmodule,
    functions: [CUfunction; Kernel::ALL.len()],
    checked: bool,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as for Send; the driver locks its own state.
unsafe impl Sync for Kernels {}

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Takes checksums, unless the device was opened without.
    Scatter,
    /// Takes checksums, unless the device was opened without.
    Gather,
    /// Takes no checksums.
    ScatterOnly,
    /// Takes no checksums.
    GatherOnly,
    /// Coded extents to values.
    Decode,
    /// Values to coded extents without their lists of escapes.
    Encode,
    /// The lists of escapes; writes for each extent whether it fits.
    List,
    RopeShift,
    /// Copies descriptors from host memory to the GPU's. For its [`Launch`], `num_planes` is the
    /// number of groups of [`UPLOAD_BYTES`], a tile is [`THREADS`] groups, and `tile_crcs` is the
    /// target.
    Upload,
}

/// Bytes that a thread of [`Kernel::Upload`] copies at once.
pub(super) const UPLOAD_BYTES: usize = 16;

impl Kernel {
    const ALL: [Self; 9] = [
        Self::Scatter,
        Self::Gather,
        Self::ScatterOnly,
        Self::GatherOnly,
        Self::Decode,
        Self::Encode,
        Self::List,
        Self::RopeShift,
        Self::Upload,
    ];

    /// Its name in the PTX.
    pub(super) fn name(self, checked: bool) -> &'static CStr {
        match self {
            Self::Scatter if checked => c"forebay_scatter_crc",
            Self::Gather if checked => c"forebay_gather_crc",
            Self::Scatter | Self::ScatterOnly => c"forebay_scatter",
            Self::Gather | Self::GatherOnly => c"forebay_gather",
            Self::Decode => c"forebay_decode_exp4",
            Self::Encode => c"forebay_encode_exp4",
            Self::List => c"forebay_list_exp4",
            Self::RopeShift => c"forebay_rope_shift",
            Self::Upload => c"forebay_upload",
        }
    }
}

/// One launch over the descriptors of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    /// Address of the descriptors.
    pub(super) planes: u64,
    pub(super) num_planes: u32,
    pub(super) num_tiles: u32,
    /// Address of the words that the kernel writes: a checksum for each tile, or for each coded
    /// extent whether it fits.
    pub(super) tile_crcs: u64,
    /// CTAs at most; 0 stands for one per tile.
    pub(super) max_ctas: u32,
}

impl Kernels {
    /// Loads the module; the context must be current. Without `checked`, kernels take no checksums.
    pub(super) fn load(context: &Arc<Context>, checked: bool) -> CudaResult<Arc<Self>> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends in a zero; the handle is written to a live variable.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()) })?;
        let functions = [std::ptr::null_mut(); Kernel::ALL.len()];
        let mut kernels = Self { context: Arc::clone(context), module, functions, checked };
        for kernel in Kernel::ALL {
            let function = kernels.function(kernel.name(checked))?;
            if let Some(of) = kernels.functions.get_mut(kernel as usize) {
                *of = function;
            }
        }
        Ok(Arc::new(kernels))
    }

    /// Whether the kernels take checksums.
    pub(super) fn are_checked(&self) -> bool {
        self.checked
    }

    fn function(&self, name: &CStr) -> CudaResult<CUfunction> {
        let mut function = std::ptr::null_mut();
        // SAFETY: a loaded module and a name that ends in a zero.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        let (mut registers, what) = (0, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
        // This query makes a lazy driver load the code now. At the first launch, loading might wait
        // for the whole context. SAFETY: a function of a loaded module; the answer is written to a
        // live variable.
        check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&raw mut registers, what, function) })?;
        tracing::debug!(?name, registers, "kernel loaded");
        Ok(function)
    }

    /// Enqueues a launch; the context must be current.
    ///
    /// # Safety
    /// When the stream comes to the launch, the planes must be at their address, and everything
    /// that they name must be valid until the stream has passed it.
    pub(super) unsafe fn launch(&self, stream: &OwnStream, mut launch: Launch) -> CudaResult {
        let function = self.functions.get(launch.kernel as usize).copied().unwrap_or(std::ptr::null_mut());
        let ctas = match launch.max_ctas {
            0 => launch.num_tiles,
            cap => launch.num_tiles.min(cap),
        };
        let mut params: [*mut c_void; 4] = [
            (&raw mut launch.planes).cast(),
            (&raw mut launch.num_planes).cast(),
            (&raw mut launch.num_tiles).cast(),
            (&raw mut launch.tile_crcs).cast(),
        ];
        // SAFETY: a function of a loaded module; the parameters are those of its declaration,
        // copied by the call. What they name is valid by the contract.
        let code = unsafe {
            sys::cuLaunchKernel(
                function,
                ctas,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream.raw(),
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", code).map_err(|e| self.context.seen(e))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`; no launch is under way when the last owner is dropped.
        self.context.give_back("cuModuleUnload", || unsafe { sys::cuModuleUnload(self.module) });
    }
}
