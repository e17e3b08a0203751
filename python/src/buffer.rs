//! What a Python object says about its memory: address, shape, strides and device, without a copy
//! and without importing torch or numpy.
//!
//! In this order: tensors by their methods (`data_ptr`), raw descriptions `(address, shape,
//! strides, itemsize, device)`, the buffer protocol, `__array_interface__`, DLPack. The object that
//! keeps the memory alive is kept with it, and freed with the GIL held: what a thread of the engine
//! drops is freed by the thread that logs.
#![expect(unsafe_code, reason = "asks Python for the addresses of buffers")]

use std::any::Any;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use forebay::device::MemorySpace;
use forebay::device::cuda::CudaMemory;
use forebay::device::{HostMemory, KvMemory};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PyString, PyTuple};

use crate::dlpack;
use crate::error::{IntoPy, invalid, to_py};

/// A piece of memory as its object describes it.
pub(crate) struct Described {
    /// Address of the first element.
    pub(crate) address: usize,
    /// Elements of each dimension.
    pub(crate) shape: Vec<usize>,
    /// Bytes from one element of a dimension to the next.
    pub(crate) strides: Vec<usize>,
    /// Bytes of one element.
    pub(crate) itemsize: usize,
    /// Where it lies.
    pub(crate) place: MemorySpace,
    /// Whether it must not be written.
    pub(crate) readonly: bool,
    /// The element's type as the object names it.
    pub(crate) format: String,
    owner: Arc<dyn Any + Send + Sync>,
}

/// What keeps memory alive.
struct Owner(Option<Py<PyAny>>);

impl Drop for Owner {
    fn drop(&mut self) {
        drop(self.0.take());
        // SAFETY: may be called by any thread at any time. None of the engine's has a state of
        // Python's, and there PyO3 only notes what was dropped, until some thread takes the GIL.
        if unsafe { ffi::PyGILState_GetThisThreadState() }.is_null() {
            crate::logging::release();
        }
    }
}

/// Sizes, strides (bytes) and so on before they are checked.
pub(crate) struct Raw {
    pub(crate) address: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) itemsize: usize,
    pub(crate) place: MemorySpace,
    pub(crate) readonly: bool,
    pub(crate) format: String,
}

impl Raw {
    pub(crate) fn with_owner(self, owner: Py<PyAny>) -> PyResult<Described> {
        let strides = match self.strides {
            Some(strides) => strides
                .iter()
                .map(|&s| usize::try_from(s).map_err(|_| to_py(&invalid("a buffer with a negative stride"))))
                .collect::<PyResult<Vec<_>>>()?,
            None => dense(&self.shape, self.itemsize),
        };
        if strides.len() != self.shape.len() || self.itemsize == 0 {
            let (shape, n) = (&self.shape, strides.len());
            return Err(to_py(&invalid(format!("a buffer of shape {shape:?} with {n} strides"))));
        }
        Ok(Described {
            address: self.address,
            shape: self.shape,
            strides,
            itemsize: self.itemsize,
            place: self.place,
            readonly: self.readonly,
            format: self.format,
            owner: Arc::new(Owner(Some(owner))),
        })
    }
}

fn dense(shape: &[usize], itemsize: usize) -> Vec<usize> {
    let mut strides = Vec::with_capacity(shape.len());
    let mut step = itemsize;
    for &n in shape.iter().rev() {
        strides.push(step);
        step = step.saturating_mul(n);
    }
    strides.reverse();
    strides
}

impl Described {
    /// Bytes from the first to the end of the last element; 0 where there is none.
    pub(crate) fn bytes(&self) -> PyResult<usize> {
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let steps = self.shape.iter().zip(&self.strides);
        steps
            .map(|(&n, &stride)| (n - 1).checked_mul(stride))
            .try_fold(self.itemsize, |sum, step| sum.checked_add(step?))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or_else(|| to_py(&invalid(format!("a buffer of shape {:?} that overflows", self.shape))))
    }

    /// Whether its elements lie one after the other.
    pub(crate) fn is_dense(&self) -> bool {
        let wanted = dense(&self.shape, self.itemsize);
        self.shape.iter().zip(&self.strides).zip(&wanted).all(|((&n, have), want)| n == 1 || have == want)
    }

    /// The memory, for paged KV.
    pub(crate) fn memory(&self) -> PyResult<Arc<dyn KvMemory>> {
        let (bytes, owner) = (self.bytes()?, Some(Arc::clone(&self.owner)));
        match self.place {
            MemorySpace::Device(ordinal) => {
                // SAFETY: the object described its memory so, and is kept by the owner. That no two
                // loads and stores use the same slots at once is the caller's duty
                // (docs/python.md).
                let memory = unsafe { CudaMemory::from_raw(ordinal, self.address as u64, bytes, owner) };
                Ok(memory.py()?)
            }
            _ => Ok(self.host()?),
        }
    }

    /// The memory, where it is the host's.
    pub(crate) fn host(&self) -> PyResult<Arc<HostMemory>> {
        if self.place != MemorySpace::Host {
            return Err(to_py(&invalid("memory of a GPU where host memory is needed").advice("copy it to the host")));
        }
        let ptr = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: as in `memory`.
        unsafe { HostMemory::from_raw(ptr, self.bytes()?, Some(Arc::clone(&self.owner))) }.py()
    }
}

/// Describes `object`'s memory.
pub(crate) fn describe(object: &Bound<'_, PyAny>) -> PyResult<Described> {
    if let Some(found) = tensor(object)? {
        return Ok(found);
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return raw_tuple(tuple);
    }
    if let Ok(view) = PyMemoryView::from(object) {
        return buffer(&view);
    }
    if object.hasattr("__array_interface__")? {
        return array_interface(object);
    }
    if object.hasattr("__dlpack__")? {
        return dlpack::describe(object);
    }
    let what = object.get_type().name()?;
    Err(to_py(&invalid(format!("a {what} is no memory")).advice(
        "give a tensor, an array, anything with the buffer protocol or DLPack, or (address, shape, strides, itemsize, device)",
    )))
}

/// A tensor, as PyTorch has them.
fn tensor(object: &Bound<'_, PyAny>) -> PyResult<Option<Described>> {
    if !object.hasattr("data_ptr")? || !object.hasattr("element_size")? {
        return Ok(None);
    }
    let itemsize: usize = object.call_method0("element_size")?.extract()?;
    let strides: Vec<i64> = object.call_method0("stride")?.extract()?;
    let raw = Raw {
        address: object.call_method0("data_ptr")?.extract()?,
        shape: object.getattr("shape")?.extract()?,
        strides: Some(strides.iter().map(|s| s.saturating_mul(itemsize as i64)).collect()),
        itemsize,
        place: place_of(&object.getattr("device")?)?,
        readonly: false,
        format: object.getattr("dtype")?.str()?.to_string(),
    };
    raw.with_owner(object.clone().unbind()).map(Some)
}

/// `cpu`, `cuda:1`, as a string or as whatever prints so.
fn place_of(device: &Bound<'_, PyAny>) -> PyResult<MemorySpace> {
    let name = device.str()?.to_string();
    match name.split_once(':').unwrap_or((&name, "0")) {
        ("cpu" | "host", _) => Ok(MemorySpace::Host),
        ("cuda", ordinal) if ordinal.parse::<u32>().is_ok() => Ok(MemorySpace::Device(ordinal.parse().unwrap_or(0))),
        _ => Err(to_py(&invalid(format!("memory on {name}")).advice("KV may be on cpu or cuda:N"))),
    }
}

fn raw_tuple(tuple: &Bound<'_, PyTuple>) -> PyResult<Described> {
    type Fields<'py> = (usize, Vec<usize>, Option<Vec<i64>>, usize, Bound<'py, PyAny>);
    let Ok((address, shape, strides, itemsize, device)) = tuple.extract::<Fields<'_>>() else {
        let message = "a tuple that is not (address, shape, strides in bytes or None, itemsize, device)";
        return Err(to_py(&invalid(message)));
    };
    let place = place_of(&device)?;
    let raw = Raw { address, shape, strides, itemsize, place, readonly: false, format: String::new() };
    raw.with_owner(tuple.clone().into_any().unbind())
}

/// CPython's struct. Its fields have been the same since 3.0 and are part of the stable ABI from
/// 3.11 on; 3.10 has it as it is.
#[repr(C)]
struct PyBufferFields {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

const STRIDED_WITH_FORMAT: c_int = 0x0010 | 0x0008 | 0x0004;

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut PyBufferFields, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBufferFields);
}

/// The buffer that `view` holds open; it keeps the memory where it is as long as it lives.
fn buffer(view: &Bound<'_, PyMemoryView>) -> PyResult<Described> {
    let mut fields = std::mem::MaybeUninit::<PyBufferFields>::zeroed();
    // SAFETY: a live object, and a struct of the right layout to fill in, with the GIL held.
    if unsafe { PyObject_GetBuffer(view.as_ptr(), fields.as_mut_ptr(), STRIDED_WITH_FORMAT) } != 0 {
        return Err(PyErr::fetch(view.py()));
    }
    // SAFETY: filled in by the call; all bit patterns of its fields are valid in any case.
    let mut fields = unsafe { fields.assume_init() };
    let (address, readonly) = (fields.buf as usize, fields.readonly != 0);
    let indirect = !fields.suboffsets.is_null();
    // SAFETY: got above and not released yet. The memory stays: `view` itself holds it open.
    unsafe { PyBuffer_Release(&raw mut fields) };
    if indirect {
        return Err(to_py(&invalid("a buffer of pointers to rows")));
    }
    let raw = Raw {
        address,
        shape: view.getattr("shape")?.extract()?,
        strides: Some(view.getattr("strides")?.extract()?),
        itemsize: view.getattr("itemsize")?.extract()?,
        place: MemorySpace::Host,
        readonly,
        format: view.getattr("format")?.extract()?,
    };
    raw.with_owner(view.clone().into_any().unbind())
}

/// Arrays whose element type the buffer protocol has no letter for, such as bfloat16.
fn array_interface(object: &Bound<'_, PyAny>) -> PyResult<Described> {
    let interface = object.getattr("__array_interface__")?;
    let interface = interface.cast::<PyDict>()?;
    let get = |name: &str| -> PyResult<Bound<'_, PyAny>> {
        interface.get_item(name)?.ok_or_else(|| to_py(&invalid(format!("an __array_interface__ without {name}"))))
    };
    let (address, readonly): (usize, bool) = get("data")?.extract()?;
    let typestr: String = get("typestr")?.cast::<PyString>()?.extract()?;
    let digits = typestr.trim_start_matches(|c: char| !c.is_ascii_digit());
    let raw = Raw {
        address,
        shape: get("shape")?.extract()?,
        strides: interface.get_item("strides")?.map(|s| s.extract()).transpose()?.flatten(),
        itemsize: digits.parse().map_err(|_| to_py(&invalid(format!("an array of type {typestr:?}"))))?,
        place: MemorySpace::Host,
        readonly,
        format: typestr.clone(),
    };
    raw.with_owner(object.clone().unbind())
}
