//! Devices by name, as users write them: `host`, `cuda`, `cuda:1`.

use std::sync::Arc;

use super::cuda::{CudaDevice, CudaOptions};
use super::{CodecKernels, Device, HostDevice};
use crate::config::{Codec, Cufile, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotCodec;

/// A device's name, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceName {
    Host,
    Cuda(u32),
}

impl DeviceName {
    fn of(name: &str) -> Result<Self> {
        let bad = || {
            Error::new(ErrorKind::Config, format!("{name:?} is not a device"))
                .advice("use host, cuda, or cuda:N with the number of a GPU")
        };
        let lower = name.trim().to_ascii_lowercase();
        match lower.split_once(':').unwrap_or((&lower, "")) {
            ("host" | "cpu", "") => Ok(Self::Host),
            ("cuda" | "gpu", "") if !lower.contains(':') => Ok(Self::Cuda(0)),
            ("cuda" | "gpu", number) => number.parse().map(Self::Cuda).map_err(|_| bad()),
            _ => Err(bad()),
        }
    }
}

/// The device called `name`, with the settings' workers and limits.
///
/// # Errors
/// [`ErrorKind::Config`] for a name that is none, and what keeps the device from being used.
pub fn open_device(name: &str, settings: &Settings) -> Result<Arc<dyn Device>> {
    match DeviceName::of(name)? {
        DeviceName::Host => Ok(HostDevice::new(settings.worker_threads())?),
        DeviceName::Cuda(ordinal) => {
            let (max_ctas, numa) = (settings.kernel_ctas, settings.numa);
            let cufile = settings.cufile != Cufile::Never;
            Ok(CudaDevice::open(&CudaOptions { ordinal, max_ctas, numa, cufile, ..CudaOptions::default() })?)
        }
    }
}

/// The codec that the settings choose. `auto` codes only on a host whose processor has vectors:
/// without them coding costs more time than the drive saves.
pub(crate) fn codec_of(settings: &Settings, host: bool) -> SlotCodec {
    match settings.codec {
        Codec::None => SlotCodec::None,
        Codec::Exp4 => SlotCodec::Exp4,
        Codec::Auto if host && CodecKernels::best().has_vectors() => SlotCodec::Exp4,
        Codec::Auto => SlotCodec::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_or_refused_with_what_to_write() {
        for (name, meant) in [
            ("host", DeviceName::Host),
            ("CPU", DeviceName::Host),
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
            (" gpu:1 ", DeviceName::Cuda(1)),
        ] {
            assert_eq!(DeviceName::of(name).unwrap(), meant, "{name}");
        }
        for name in ["", "cuda:", "cuda:x", "cuda:-1", "host:1", "tpu", "cuda:99999999999"] {
            let e = DeviceName::of(name).unwrap_err();
            assert!(e.kind() == ErrorKind::Config && e.to_string().contains("is not a device"), "{name}: {e}");
        }
    }
}
