//! The `forebay` program; all of it is in the library of this package.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(forebay_tools::run(std::env::args_os()))
}
