//! What a GPU is: for `forebay probe`, and for choosing sizes.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CStr, c_char};
use std::path::Path;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute_enum as Attribute};

use super::driver::{CudaResult, check, init};
use crate::error::{Error, ErrorKind, Result};

/// The GPUs that the kernels are for, and all later ones.
const LEAST_CAPABILITY: (u32, u32) = (8, 0);
/// Where the system lists PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";
/// The first lines of a `resource` file, which are the device's own windows. Its ROM and the
/// windows of its virtual functions follow.
const BARS: usize = 6;
/// `IORESOURCE_MEM | IORESOURCE_PREFETCH` in the flags of a line.
const PREFETCHABLE_MEMORY: u64 = 0x2200;

/// One GPU as this process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// The N of `cuda:N`: its number among the GPUs that the process may use.
    pub ordinal: u32,
    /// NVIDIA's name of the model.
    pub name: String,
    /// Compute capability: major, minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Version of CUDA that the driver has: major, minor.
    pub driver_version: (u32, u32),
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Address on the PCI bus, as in `/sys/bus/pci/devices`.
    pub pci_bus_id: String,
    /// NUMA node of its PCI slot; `None` where the machine has only one or does not tell.
    pub numa_node: Option<u32>,
    /// Bytes of the window through which other devices reach its memory; `None` where the system
    /// does not tell.
    pub bar1_bytes: Option<u64>,
}

/// The GPUs that this process may use.
///
/// # Errors
/// [`crate::ErrorKind::Unsupported`] without a driver, with one that is too old, and without a GPU;
/// what the driver says otherwise.
pub fn devices() -> Result<Vec<GpuInfo>> {
    init()?;
    let mut count = 0;
    // SAFETY: the driver is initialised; the count is written to a live variable.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    let ordinals = 0..u32::try_from(count).unwrap_or(0);
    ordinals.map(|ordinal| Ok(describe(ordinal, Path::new(PCI_DEVICES))?)).collect()
}

/// What GPU `ordinal` is; the driver must be initialised.
pub(super) fn gpu(ordinal: u32) -> CudaResult<GpuInfo> {
    describe(ordinal, Path::new(PCI_DEVICES))
}

impl GpuInfo {
    /// Whether the kernels run on it.
    pub(super) fn check_kernels(&self) -> Result<()> {
        let (major, minor) = self.compute_capability;
        if (major, minor) >= LEAST_CAPABILITY {
            return Ok(());
        }
        let what =
            format!("GPU {} ({}) is of sm_{major}{minor}; the kernels need sm_80 (Ampere)", self.ordinal, self.name);
        Err(Error::new(ErrorKind::Unsupported, what).advice("use a newer GPU, or give KV in host memory"))
    }
}

fn describe(ordinal: u32, pci_devices: &Path) -> CudaResult<GpuInfo> {
    let (mut device, mut version, mut memory) = (0, 0, 0usize);
    // SAFETY: the driver is initialised and writes to live variables; buffers are given with their
    // lengths.
    let (name, bus) = unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory, device))?;
        let name = text(|out, len| check("cuDeviceGetName", sys::cuDeviceGetName(out, len, device)))?;
        let bus = text(|out, len| check("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(out, len, device)))?;
        (name, bus.to_lowercase())
    };
    let attribute = |a| attribute(device, a);
    let pci = pci_devices.join(&bus);
    Ok(GpuInfo {
        ordinal,
        name,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        driver_version: (version as u32 / 1000, version as u32 % 1000 / 10),
        memory_bytes: memory as u64,
        numa_node: numa_node(&pci),
        bar1_bytes: bar1_bytes(&pci),
        pci_bus_id: bus,
    })
}

fn attribute(device: CUdevice, attribute: Attribute) -> CudaResult<u32> {
    let mut value = 0;
    // SAFETY: writes to a live variable.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
    Ok(value.try_into().unwrap_or(0))
}

fn text(get: impl FnOnce(*mut c_char, i32) -> CudaResult) -> CudaResult<String> {
    let mut bytes = [0u8; 256];
    get(bytes.as_mut_ptr().cast(), bytes.len() as i32)?;
    Ok(CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default())
}

fn numa_node(pci: &Path) -> Option<u32> {
    // -1, which is no u32, on machines with one node.
    std::fs::read_to_string(pci.join("numa_node")).ok()?.trim().parse().ok()
}

/// The largest prefetchable window onto memory: BAR1 up to Ampere, BAR2 from Hopper on.
fn bar1_bytes(pci: &Path) -> Option<u64> {
    let resources = std::fs::read_to_string(pci.join("resource")).ok()?;
    resources.lines().take(BARS).filter_map(window_bytes).max()
}

/// Bytes of a line `start end flags`, where it is prefetchable memory.
fn window_bytes(line: &str) -> Option<u64> {
    let mut numbers = line.split_whitespace().map(|n| u64::from_str_radix(n.trim_start_matches("0x"), 16).ok());
    let (start, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let is_window = flags & PREFETCHABLE_MEMORY == PREFETCHABLE_MEMORY && end > start;
    is_window.then(|| (end - start).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pci_folder_tells_node_and_window() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!((numa_node(dir.path()), bar1_bytes(dir.path())), (None, None));
        let lines = "0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n\
                     0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n";
        std::fs::write(dir.path().join("resource"), lines).unwrap();
        std::fs::write(dir.path().join("numa_node"), "1\n").unwrap();
        assert_eq!((numa_node(dir.path()), bar1_bytes(dir.path())), (Some(1), Some(128 << 30)));
        let unset = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        let hopper = format!(
            "0x0000044040000000 0x0000044040ffffff 0x000000000014220c\n{unset}\
             0x0000042000000000 0x0000043fffffffff 0x000000000014220c\n{unset}\
             0x0000044042000000 0x0000044043ffffff 0x000000000014220c\n{unset}{unset}\
             0x0000045000000000 0x000004cfffffffff 0x000000000014220c\n"
        );
        std::fs::write(dir.path().join("resource"), hopper).unwrap();
        assert_eq!(bar1_bytes(dir.path()), Some(128 << 30), "the virtual functions' windows are not the GPU's");
        let not_prefetchable = "0x0000000080000000 0x00000000ffffffff 0x0000000000040200\n\
                                0x000000000000e000 0x000000000000e07f 0x0000000000040101\nhalf a line\n";
        std::fs::write(dir.path().join("resource"), not_prefetchable).unwrap();
        assert_eq!(bar1_bytes(dir.path()), None);
        let none = "0x0 0x0 0x0\n0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        std::fs::write(dir.path().join("resource"), none).unwrap();
        std::fs::write(dir.path().join("numa_node"), "-1\n").unwrap();
        assert_eq!((numa_node(dir.path()), bar1_bytes(dir.path())), (None, None));
    }
}
