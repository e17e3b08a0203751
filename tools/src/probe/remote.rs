//! Whether the remote store of the settings works, and how fast.

use std::time::Duration;

use forebay::ErrorKind;
use forebay::config::{Mode, Settings};
use forebay::remote::{RemoteOptions, RemoteStore, RemoteTrial};
use serde::Serialize;

use super::PROGRESS_INTERVAL;
use super::checks::Finding;
use crate::out::Context;
use crate::progress::{self, Unit};
use crate::size::show_bytes;

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct RemoteFound {
    /// The median time of a ranged read of 64 KiB, in seconds.
    round_trip_s: Option<f64>,
    /// Bytes per second of one put and of one ranged read of 8 MiB.
    put_bytes_per_s: Option<f64>,
    get_bytes_per_s: Option<f64>,
}

/// Tries the store; `None` where the settings name none. A cache works without it, so what is wrong
/// with it is a warning.
pub(super) fn probe(settings: &Settings, context: &Context) -> Option<(RemoteFound, Vec<Finding>)> {
    let options = RemoteOptions::of_settings(settings)?;
    let writes = settings.mode == Mode::Rw;
    let bar = progress::bar(context, "trying the remote store", 0, Unit::Time);
    bar.enable_steady_tick(PROGRESS_INTERVAL);
    let trial = RemoteStore::open(&options).map(|store| store.trial(writes));
    bar.finish_and_clear();
    let trial = match trial {
        Ok(trial) => trial,
        Err(e) => {
            let finding = Finding::of_error("remote", &e);
            // With a wrong address no cache opens.
            let finding = if e.kind() == ErrorKind::Config { finding } else { finding.only_warns() };
            return Some((found(&RemoteTrial::default()), vec![finding]));
        }
    };
    let mut findings: Vec<Finding> =
        trial.faults.iter().map(|(_, e)| Finding::of_error("remote", e).only_warns()).collect();
    match (trial.round_trip, trial.write_and_read) {
        (Some(round_trip), Some((put, get))) => findings.push(Finding::ok(
            "remote",
            format!(
                "{}: a read takes {round_trip:.1?}; one connection puts {}/s and gets {}/s",
                options.url,
                show_bytes(put),
                show_bytes(get)
            ),
        )),
        _ if findings.is_empty() => {
            findings.push(Finding::ok("remote", format!("{} can be listed (mode: ro, nothing was put)", options.url)));
        }
        _ => {}
    }
    Some((found(&trial), findings))
}

fn found(trial: &RemoteTrial) -> RemoteFound {
    RemoteFound {
        round_trip_s: trial.round_trip.as_ref().map(Duration::as_secs_f64),
        put_bytes_per_s: trial.write_and_read.map(|(put, _)| put),
        get_bytes_per_s: trial.write_and_read.map(|(_, get)| get),
    }
}
