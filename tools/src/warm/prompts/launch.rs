//! A vLLM of our own for the time of one warming, where none is running.
//!
//! It is started with the connector (which also loads: a prefix that is stored is not computed
//! again), waited for until it answers, and asked to stop (SIGTERM) so that it flushes; one that
//! does not is killed. Its output goes to this program's standard error.
//!
//! It does not outlive this program: it stays in the terminal's foreground group, so that Ctrl-C
//! reaches it too, and the kernel sends it SIGTERM where this program ends in another way.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forebay::{Error, ErrorKind, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::server::Server;

/// How long a server that was asked to stop may flush.
const STOP_PATIENCE: Duration = Duration::from_secs(60);
/// Of these, the seconds that vLLM gives its engine to shut down.
const SHUTDOWN_S: u64 = 30;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Becomes vLLM's server in a Python that gets SIGTERM when the process of the first argument ends.
/// It asks for that itself: between fork and exec that could only be done by unsafe code here.
const SERVER: &str = "\
import ctypes, os, runpy, signal, sys
parent = int(sys.argv.pop(1))
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != parent:
    sys.exit('forebay has ended')
runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__', alter_sys=True)
";

/// What to start.
pub(crate) struct Launch<'a> {
    /// Python with vLLM and forebay.
    pub(crate) python: &'a Path,
    /// Model, as vLLM's command line has it.
    pub(crate) model: &'a str,
    /// Cache directory to fill.
    pub(crate) cache_dir: &'a Path,
    /// Further arguments of the server.
    pub(crate) args: &'a [String],
    /// How long it may take to come up.
    pub(crate) patience: Duration,
}

/// A running server, stopped when dropped.
pub(crate) struct Running {
    child: Child,
    /// Its address.
    pub(crate) address: String,
}

impl Launch<'_> {
    /// Starts the server and waits until it answers.
    pub(crate) fn start(&self) -> Result<Running> {
        let port = free_port()?;
        let address = format!("http://127.0.0.1:{port}");
        let cache_dir = self.cache_dir.to_str().ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "the cache directory's name is not UTF-8")
                .at(self.cache_dir)
                .advice("vLLM's options are JSON: give the directory another name, or bind-mount it under one")
        })?;
        let connector = json!({
            "kv_connector": "ForebayConnector",
            "kv_role": "kv_both",
            // As a list: in a text a comma separates drives.
            "kv_connector_extra_config": {"cache_dir": [cache_dir]},
        });
        let mut command = Command::new(self.python);
        command.args(["-c", SERVER, &std::process::id().to_string()]);
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--model", self.model, "--enable-prompt-tokens-details"]);
        // Without it vLLM kills its engine at once when it is stopped, and what it stored last is
        // lost.
        command.args(["--shutdown-timeout", &SHUTDOWN_S.to_string()]);
        command.args(["--kv-transfer-config", &connector.to_string()]).args(self.args);
        command.stdin(Stdio::null()).stdout(std::io::stderr());
        let child = command.spawn().map_err(|e| {
            Error::io("cannot start vLLM", e)
                .at(self.python)
                .advice("name the Python that vllm and forebay are installed in with --python")
        })?;
        let mut running = Running { child, address };
        let server = Server::new(&running.address, None, (Duration::from_secs(2), 0))?;
        let deadline = Instant::now() + self.patience;
        loop {
            if let Ok(Some(status)) = running.child.try_wait() {
                let message = format!("vLLM ended while it started ({status})");
                return Err(Error::new(ErrorKind::Io, message).advice("its own messages are above"));
            }
            if server.is_up() {
                return Ok(running);
            }
            if Instant::now() > deadline {
                let message = format!("vLLM did not come up in {} s", self.patience.as_secs());
                return Err(Error::new(ErrorKind::TimedOut, message).advice("give it longer with --start-timeout"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

fn free_port() -> Result<u16> {
    TcpListener::bind(("127.0.0.1", 0))
        .and_then(|l| l.local_addr())
        .map(|a| a.port())
        .map_err(|e| Error::io("no free port", e))
}

impl Drop for Running {
    fn drop(&mut self) {
        let deadline = Instant::now() + STOP_PATIENCE;
        let mut asked = false;
        // One that has ended may have given its number to another process.
        while let Ok(None) = self.child.try_wait() {
            if !asked {
                let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
                asked = true;
            }
            if Instant::now() >= deadline {
                let pid = Pid::from_child(&self.child);
                tracing::warn!(pid = pid.as_raw_nonzero(), "vLLM did not stop and is killed");
                let started = descendants(pid);
                let _ = self.child.kill();
                for process in started {
                    let _ = kill_process(process, Signal::KILL);
                }
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// The processes that process `pid` has started, and those that they have.
fn descendants(pid: Pid) -> Vec<Pid> {
    let pid = pid.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| Pid::from_raw(child.parse().ok()?));
    children.flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}
