//! Sequences of integers and booleans: from lists, or straight from buffers.
#![expect(unsafe_code, reason = "reads the elements of a caller's buffer")]

use forebay::device::MemorySpace;
use pyo3::prelude::*;

use crate::buffer::{Described, describe};
use crate::error::{invalid, to_py};

/// How an element is read.
#[derive(Clone, Copy)]
enum Element {
    I32,
    U32,
    I64,
    U64,
    Byte,
}

impl Element {
    /// From struct's letters, numpy's or torch's names, and the size.
    fn of(buffer: &Described) -> Option<Self> {
        let name = buffer.format.trim_start_matches(['<', '=', '@', '|']);
        let unsigned = ["I", "L", "Q", "u4", "u8"].contains(&name) || name.contains("uint");
        let signed = ["i", "l", "q", "i4", "i8"].contains(&name) || name.starts_with("torch.int");
        match (buffer.itemsize, unsigned, signed) {
            (4, false, true) => Some(Self::I32),
            (4, true, _) => Some(Self::U32),
            (8, false, true) => Some(Self::I64),
            (8, true, _) => Some(Self::U64),
            (1, _, _) if ["?", "B", "b1", "torch.bool", "torch.uint8"].contains(&name) => Some(Self::Byte),
            _ => None,
        }
    }
}

fn is_buffer(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(object.hasattr("data_ptr")? || pyo3::types::PyMemoryView::from(object).is_ok())
}

fn elements(object: &Bound<'_, PyAny>) -> PyResult<(Described, Element)> {
    let buffer = describe(object)?;
    let fits = buffer.shape.len() == 1 && buffer.place == MemorySpace::Host;
    match Element::of(&buffer).filter(|_| fits) {
        Some(element) => Ok((buffer, element)),
        None => {
            let (shape, format, place) = (&buffer.shape, &buffer.format, buffer.place);
            let e = invalid(format!("integers in a buffer of shape {shape:?} and type {format:?} in {place:?}"));
            Err(to_py(&e.advice("use one dimension of 32- or 64-bit integers in host memory")))
        }
    }
}

fn read(buffer: &Described, element: Element) -> PyResult<Vec<i64>> {
    let (count, step) = (*buffer.shape.first().unwrap_or(&0), *buffer.strides.first().unwrap_or(&0));
    // Its reach does not overflow.
    buffer.bytes()?;
    let start: *const u8 = std::ptr::with_exposed_provenance(buffer.address);
    let mut all = Vec::with_capacity(count);
    for i in 0..count {
        // SAFETY: element `i` of the buffer, which its object keeps valid, with the GIL held.
        let at = unsafe { start.add(i * step) };
        // SAFETY: as above; the element's size is the buffer's, alignment is not assumed.
        let value = unsafe {
            match element {
                Element::I32 => i64::from(at.cast::<i32>().read_unaligned()),
                Element::U32 => i64::from(at.cast::<u32>().read_unaligned()),
                Element::I64 => at.cast::<i64>().read_unaligned(),
                Element::U64 => i64::try_from(at.cast::<u64>().read_unaligned()).unwrap_or(i64::MAX),
                Element::Byte => i64::from(at.read()),
            }
        };
        all.push(value);
    }
    Ok(all)
}

/// Integers, from a sequence or a one-dimensional buffer.
pub(crate) fn ints(object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if object.is_instance_of::<pyo3::types::PyList>() || !is_buffer(object)? {
        return object.try_iter()?.map(|item| item?.extract()).collect();
    }
    let (buffer, element) = elements(object)?;
    if matches!(element, Element::Byte) {
        return Err(to_py(&invalid("a buffer of bytes where integers are needed")));
    }
    read(&buffer, element)
}

/// Booleans, likewise.
pub(crate) fn bools(object: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    if object.is_instance_of::<pyo3::types::PyList>() || !is_buffer(object)? {
        return object.try_iter()?.map(|item| item?.is_truthy()).collect();
    }
    let (buffer, element) = elements(object)?;
    Ok(read(&buffer, element)?.into_iter().map(|v| v != 0).collect())
}
