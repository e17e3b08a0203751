//! Without a driver, with one that lacks functions, without a GPU: errors with advice, never a
//! panic. Each in a process of its own, since the library is looked for once in a process.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::process::Command;

use forebay::ErrorKind;
use forebay::config::Settings;
use forebay::device::cuda::{CudaDevice, CudaOptions, devices};
use forebay::device::open_device;

const WANTED: &str = "FOREBAY_TEST_CUDA_MISSING";

/// Runs `child` with these variables; the words must be in the error.
fn child(variables: &[(&str, &str)], words: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_process_of_the_other_tests", "--nocapture"]).env(WANTED, words);
    command.env_remove("LD_LIBRARY_PATH").envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("panicked"), "{words}: {text}");
}

/// Does nothing by itself: the other tests start it in a process of its own.
#[test]
fn the_process_of_the_other_tests() {
    let Ok(words) = std::env::var(WANTED) else { return };
    let of_list = devices().map(drop);
    // An old GPU is listed, and not opened.
    assert_eq!(of_list.is_ok(), words.contains("sm_"));
    let of_opening =
        [CudaDevice::open(&CudaOptions::default()).map(drop), open_device("cuda:0", &Settings::default()).map(drop)];
    for error in of_opening.into_iter().map(|opened| opened.unwrap_err()).chain(of_list.err()) {
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Unsupported && text.contains(&words), "{error:?} has not {words:?}");
        assert!(error.advice_text().is_some(), "{error:?}");
    }
}

#[test]
fn without_a_driver() {
    // Skipped on a machine with a driver, which would be found.
    if ["/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"]
        .iter()
        .all(|d| !std::path::Path::new(d).join("libcuda.so.1").exists())
    {
        child(&[], "libcuda.so.1 was not found; install");
    }
}

#[test]
fn with_a_driver_that_lacks_functions() {
    child(&[("LD_LIBRARY_PATH", standin_cuda::EMPTY_DIR)], "the CUDA driver has no cuInit; install");
}

#[test]
fn without_a_gpu() {
    let variables = [("LD_LIBRARY_PATH", standin_cuda::DIR), ("STANDIN_CUDA_DEVICES", "0")];
    child(&variables, "cuInit: CUDA_ERROR_NO_DEVICE; check nvidia-smi");
}

#[test]
fn with_a_gpu_that_is_too_old() {
    let variables = [("LD_LIBRARY_PATH", standin_cuda::DIR), ("STANDIN_CUDA_SM", "7")];
    child(&variables, "is of sm_70; the kernels need sm_80");
}

#[test]
fn with_a_driver_that_is_too_old() {
    let variables = [("LD_LIBRARY_PATH", standin_cuda::DIR), ("STANDIN_CUDA_DRIVER", "11080")];
    child(&variables, "of version 11.8, too old");
}
