//! Little-endian fields at byte offsets. Reads beyond the end give zero and writes beyond it are
//! dropped: callers check the size of a structure once, and a wrong offset cannot panic on bytes
//! from a drive.

macro_rules! field {
    ($get:ident, $put:ident, $ty:ty) => {
        pub(crate) fn $get(bytes: &[u8], at: usize) -> $ty {
            let end = at.saturating_add(size_of::<$ty>());
            bytes.get(at..end).and_then(|b| b.try_into().ok()).map_or(0, <$ty>::from_le_bytes)
        }

        pub(crate) fn $put(bytes: &mut [u8], at: usize, value: $ty) {
            let end = at.saturating_add(size_of::<$ty>());
            if let Some(to) = bytes.get_mut(at..end) {
                to.copy_from_slice(&value.to_le_bytes());
            }
        }
    };
}

field!(get_u16, put_u16, u16);
field!(get_u32, put_u32, u32);
field!(get_u64, put_u64, u64);

pub(crate) fn get_bytes<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|b| b.first_chunk::<N>()).copied().unwrap_or([0; N])
}

pub(crate) fn put_bytes(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at.saturating_add(value.len())) {
        to.copy_from_slice(value);
    }
}
