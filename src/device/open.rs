//! Devices by name: `host` or `cpu`, `cuda` or `cuda:N`.

use std::sync::Arc;

use super::cuda::{CudaDevice, CudaOptions};
use super::{Device, HostDevice, HostOptions};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Host,
    Cuda(u32),
}

fn parse(name: &str) -> Result<Named> {
    let bad = || {
        Error::new(ErrorKind::Config, format!("no device is called {name:?}"))
            .advice("use host, cuda, or cuda:N with N from 0 on, as PyTorch counts")
    };
    match name.split_once(':') {
        None if name == "host" || name == "cpu" => Ok(Named::Host),
        None if name == "cuda" => Ok(Named::Cuda(0)),
        Some(("cuda", n)) if n.bytes().all(|b| b.is_ascii_digit()) => n.parse().map(Named::Cuda).map_err(|_| bad()),
        _ => Err(bad()),
    }
}

/// The device that `name` stands for: `host` (or `cpu`), `cuda` (GPU 0) or `cuda:N`.
///
/// # Errors
/// [`ErrorKind::Config`] for another name; as [`CudaDevice::open`] and [`HostDevice::new`].
pub fn open_device(name: &str, settings: &Settings) -> Result<Arc<dyn Device>> {
    match parse(name)? {
        Named::Host => Ok(HostDevice::new(&HostOptions::default())?),
        Named::Cuda(ordinal) => {
            let (max_ctas, numa) = (settings.kernel_ctas, settings.numa);
            Ok(CudaDevice::open(&CudaOptions { ordinal, max_ctas, numa, ..CudaOptions::default() })?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_pytorch_and_others_are_refused() {
        for (name, named) in
            [("host", Named::Host), ("cpu", Named::Host), ("cuda", Named::Cuda(0)), ("cuda:7", Named::Cuda(7))]
        {
            assert_eq!(parse(name).unwrap(), named);
        }
        for name in
            ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "cuda:99999999999", "host:0", "CUDA", "cuda:0:1"]
        {
            let e = parse(name).unwrap_err();
            assert!(e.kind() == ErrorKind::Config && e.to_string().contains("cuda:N"), "{e}");
        }
        assert!(open_device("host", &Settings::default()).is_ok());
    }
}
