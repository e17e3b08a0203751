//! DLPack: memory of objects that have neither the buffer protocol nor a tensor's methods.
//!
//! The capsule's tensor is taken over, as the protocol asks, and its deleter is called when the
//! object that holds it is freed by Python, hence with the GIL held.
#![expect(unsafe_code, reason = "reads the struct in a DLPack capsule")]

use std::ffi::c_void;

use forebay::device::MemorySpace;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::{Described, Raw};
use crate::error::{invalid, to_py};

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

const HOSTS: [i32; 2] = [1, 3];
const CUDA: i32 = 2;
const MAX_DIMENSIONS: i32 = 32;
const NAME: &std::ffi::CStr = c"dltensor";
const TAKEN: &std::ffi::CStr = c"used_dltensor";

/// Holds a taken tensor.
#[pyclass(frozen)]
struct DlOwner(*mut DlManagedTensor);

// SAFETY: the pointer is only used in `drop`, once, by the thread that has the GIL.
unsafe impl Send for DlOwner {}
// SAFETY: as for Send.
unsafe impl Sync for DlOwner {}

impl Drop for DlOwner {
    fn drop(&mut self) {
        // SAFETY: taken over from its capsule in `describe`, and not freed by anybody else.
        if let Some(delete) = unsafe { (*self.0).deleter } {
            // SAFETY: as above; this is the only call.
            unsafe { delete(self.0) };
        }
    }
}

/// Describes the memory of an object with `__dlpack__`.
pub(crate) fn describe(object: &Bound<'_, PyAny>) -> PyResult<Described> {
    let py = object.py();
    let (kind, _id): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let arguments = PyDict::new(py);
    if kind == CUDA {
        // No stream is to wait: the caller names its stream in the calls.
        arguments.set_item("stream", -1)?;
    }
    let capsule = object.call_method("__dlpack__", (), Some(&arguments))?;
    // SAFETY: a live object; a capsule of another name gives null and an exception.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) }.cast::<DlManagedTensor>();
    if managed.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a live capsule; the name is static. From now on its tensor is ours to delete.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), TAKEN.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let owner = Py::new(py, DlOwner(managed))?;
    // SAFETY: the protocol's struct, alive as long as `owner`.
    let tensor = unsafe { &(*managed).tensor };
    let place = match (tensor.device_type, u32::try_from(tensor.device_id)) {
        (kind, _) if HOSTS.contains(&kind) => MemorySpace::Host,
        (CUDA, Ok(ordinal)) => MemorySpace::Device(ordinal),
        (kind, _) => return Err(to_py(&invalid(format!("DLPack memory on a device of kind {kind}")))),
    };
    let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
    if !(0..=MAX_DIMENSIONS).contains(&tensor.ndim) || !bits.is_multiple_of(8) {
        return Err(to_py(&invalid(format!("a DLPack tensor of {} dimensions and {bits}-bit elements", tensor.ndim))));
    }
    let (ndim, itemsize) = (tensor.ndim as usize, bits / 8);
    // SAFETY: `shape` has `ndim` entries by the protocol; none where there is no dimension.
    let shape = if ndim == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(tensor.shape, ndim) } };
    let strides = if tensor.strides.is_null() || ndim == 0 {
        None
    } else {
        // SAFETY: as for `shape`.
        let strides = unsafe { std::slice::from_raw_parts(tensor.strides, ndim) };
        Some(strides.iter().map(|s| s.saturating_mul(itemsize as i64)).collect())
    };
    let shape: Option<Vec<usize>> = shape.iter().map(|&n| usize::try_from(n).ok()).collect();
    let raw = Raw {
        address: (tensor.data as usize).saturating_add(tensor.byte_offset as usize),
        shape: shape.ok_or_else(|| to_py(&invalid("a DLPack tensor of negative size")))?,
        strides,
        itemsize,
        place,
        readonly: false,
        format: element_type(tensor.code, bits),
    };
    raw.with_owner(owner.into_any())
}

/// The element type of DLPack's code, as numpy's array interface has it, and `bfloat16`; nothing
/// for other codes.
fn element_type(code: u8, bits: usize) -> String {
    match code {
        0 => format!("i{}", bits / 8),
        1 => format!("u{}", bits / 8),
        2 => format!("f{}", bits / 8),
        4 => format!("bfloat{bits}"),
        _ => String::new(),
    }
}
