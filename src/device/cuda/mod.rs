//! KV in GPU memory.
#![allow(dead_code, reason = "the parts below are called by the device that launches the kernels")]

mod batch;
mod crc;
mod plane;
mod rope;
mod tables;

#[cfg(test)]
mod tests;
