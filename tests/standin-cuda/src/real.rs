//! The stand-in's controls on a real GPU, as far as a driver offers the means.
#![expect(unsafe_code, reason = "calls into a shared library")]
#![expect(clippy::expect_used, reason = "a helper of tests fails by panicking")]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::Standin;

/// What a held stream waits for.
#[derive(Debug, Default)]
struct Door {
    open: Mutex<bool>,
    opened: Condvar,
}

/// Streams that are held, by a function in them that waits.
#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<HashMap<u64, Arc<Door>>>);

unsafe extern "C" fn wait_at_door(door: *mut c_void) {
    // SAFETY: a reference that `set` gave to the stream, taken back here.
    let door = unsafe { Arc::from_raw(door.cast::<Door>()) };
    let mut open = door.open.lock().unwrap_or_else(PoisonError::into_inner);
    while !*open {
        open = door.opened.wait(open).unwrap_or_else(PoisonError::into_inner);
    }
}

impl Holds {
    pub(crate) fn set(&self, lib: &Standin, stream: u64, on: bool) {
        let mut held = self.0.lock().expect("no test panicked here");
        if let Some(door) = held.remove(&stream) {
            *door.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
            door.opened.notify_all();
        }
        if on {
            assert_ne!(stream, u64::MAX, "a real GPU's side streams cannot be held together");
            let door = Arc::new(Door::default());
            held.insert(stream, Arc::clone(&door));
            type Function = unsafe extern "C" fn(*mut c_void);
            let launch: unsafe extern "C" fn(u64, Function, *mut c_void) -> c_int = lib.function("cuLaunchHostFunc");
            let door = Arc::into_raw(door) as *mut c_void;
            // SAFETY: the types of the driver's function; the door is held by the reference given with it.
            let code = unsafe { launch(stream, wait_at_door, door) };
            assert_eq!(code, 0, "cuLaunchHostFunc");
        }
    }
}

/// Gives streams that are not held the time to do what they can.
pub(crate) fn settle(_: &Standin) {
    std::thread::sleep(Duration::from_millis(50));
}

pub(crate) fn peek(lib: &Standin, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let copy: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int = lib.function("cuMemcpyDtoH_v2");
    // SAFETY: the type of the driver's function; the buffer is as long as the copy.
    assert_eq!(unsafe { copy(bytes.as_mut_ptr().cast(), address, len) }, 0, "cuMemcpyDtoH");
    bytes
}

pub(crate) fn poke(lib: &Standin, address: u64, bytes: &[u8]) {
    let copy: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int = lib.function("cuMemcpyHtoD_v2");
    // SAFETY: the type of the driver's function; the buffer is as long as the copy.
    assert_eq!(unsafe { copy(address, bytes.as_ptr().cast(), bytes.len()) }, 0, "cuMemcpyHtoD");
}
