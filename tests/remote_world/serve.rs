//! The S3 server of the tests as a program, for tests that are not Rust: `s3-server DIR` serves
//! DIR, prints the variables that a client needs and an empty line, and ends with its standard
//! input.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test's program")]

#[path = "mod.rs"]
mod remote_world;

use std::io::Read;

fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let server = remote_world::Server::start(dir.as_ref());
    for (name, value) in server.env() {
        println!("{name}={value}");
    }
    println!();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
