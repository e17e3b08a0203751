//! Tests that run wherever KV lies: in the host's memory, and in a GPU's on the stand-in.

#![allow(unused_macros, unused_imports, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use forebay::config::Cufile;
use forebay::device::open_device;

use super::World;

/// Where KV lies.
pub(crate) type On = fn(World) -> World;

/// In the host's memory.
pub(crate) fn host(w: World) -> World {
    w
}

/// In a GPU's. Copies and kernels take no longer than they must: comparing bytes copies many
/// pieces.
pub(crate) fn gpu(mut w: World) -> World {
    standin_cuda::load().set_delays(0, 0);
    (w.settings.gpu_staging, w.settings.pinned_staging) = (2 << 20, 2 << 20);
    w.settings.block_size = 256 << 10;
    w.settings.cufile = Cufile::Never;
    w.device = open_device("cuda:0", &w.settings).unwrap();
    w
}

/// Makes two tests of each function named: one wherever KV may lie.
macro_rules! on_host_and_gpu {
    ($($test:ident)*) => {
        mod host {
            $(#[test]
            fn $test() {
                super::$test(super::engine_world::on::host);
            })*
        }
        mod gpu {
            $(#[test]
            fn $test() {
                super::$test(super::engine_world::on::gpu);
            })*
        }
    };
}

pub(crate) use on_host_and_gpu;
