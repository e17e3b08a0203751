//! Counters of the engine and of the object store, as dicts.

use forebay::engine::{EngineStats, StagingStats};
use forebay::objects::{KindStats, ObjectStats};
use pyo3::prelude::*;
use pyo3::types::PyDict;

fn dict<'py>(py: Python<'py>, values: &[(&str, u64)]) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    values.iter().try_for_each(|(name, value)| all.set_item(name, value))?;
    Ok(all)
}

/// The engine's.
pub(crate) fn engine<'py>(py: Python<'py>, s: &EngineStats) -> PyResult<Bound<'py, PyDict>> {
    let all = dict(
        py,
        &[
            ("lookups", s.lookups),
            ("looked_up_tokens", s.looked_up_tokens),
            ("matched_tokens", s.matched_tokens),
            ("loads", s.loads),
            ("active_loads", s.active_loads as u64),
            ("loaded_tokens", s.loaded_tokens),
            ("loaded_bytes", s.loaded_bytes),
            ("read_bytes", s.read_bytes),
            ("stores", s.stores),
            ("active_stores", s.active_stores as u64),
            ("stored_chunks", s.stored_chunks),
            ("stored_tokens", s.stored_tokens),
            ("stored_bytes", s.stored_bytes),
            ("present_chunks", s.present_chunks),
            ("quarantined", s.quarantined as u64),
        ],
    )?;
    all.set_item("up", s.up)?;
    all.set_item("paths", &s.paths)?;
    all.set_item("device_paths", &s.device_paths)?;
    all.set_item("write_amplification", s.write_amplification())?;
    let misses = PyDict::new(py);
    s.misses.iter().filter(|(_, n)| *n > 0).try_for_each(|(cause, n)| misses.set_item(cause.as_str(), n))?;
    all.set_item("misses", misses)?;
    let sheds = PyDict::new(py);
    s.sheds.iter().filter(|(_, n)| *n > 0).try_for_each(|(cause, n)| sheds.set_item(cause.as_str(), n))?;
    all.set_item("sheds", sheds)?;
    all.set_item("load_staging", staging(py, s.load_staging)?)?;
    all.set_item("store_staging", staging(py, s.store_staging)?)?;
    let of = &s.memory;
    let memory = [
        ("bytes", of.bytes),
        ("used_bytes", of.used_bytes),
        ("hits", of.hits),
        ("misses", of.misses),
        ("loaded_bytes", of.loaded_bytes),
        ("filled", of.filled),
        ("evicted", of.evicted),
        ("damaged", of.damaged),
    ];
    all.set_item("memory", dict(py, &memory)?)?;
    let of = &s.prefetch;
    let prefetch = [
        ("requests", of.requests),
        ("active", of.active as u64),
        ("held_bytes", of.held_bytes),
        ("in_memory", of.in_memory),
        ("read", of.read),
        ("failed", of.failed),
        ("no_room", of.no_room),
        ("cancelled", of.cancelled),
        ("read_bytes", of.read_bytes),
        ("used", of.used),
        ("wasted", of.wasted),
    ];
    all.set_item("prefetch", dict(py, &prefetch)?)?;
    let log = &s.log;
    let figures = [
        ("disk_bytes", log.disk_bytes),
        ("live_bytes", log.live_bytes),
        ("chunks", log.chunks),
        ("segments", log.segments),
        ("codec_misfits", log.codec_misfits),
        ("evicted", log.evicted),
        ("quota_evicted", log.quota_evicted),
        ("removed", log.removed),
        ("bad_chunks", log.bad_chunks),
        ("write_errors", log.write_errors),
        ("recovered_records", log.recovered_records),
        ("damaged_records", log.damaged_records),
        ("leases_refused", log.leases_refused),
        ("policy_refused_bytes", log.policy_refused_bytes),
        ("budget_refused_bytes", log.budget_refused_bytes),
        ("admission_names", log.admission_names),
    ];
    all.set_item("log", dict(py, &figures)?)?;
    let wear = log.drives.iter().map(|drive| {
        let wear = PyDict::new(py);
        wear.set_item("written_bytes", drive.wear.written_bytes)?;
        wear.set_item("drive_bytes", drive.wear.drive_bytes)?;
        wear.set_item("dwpd_hour", drive.wear.dwpd_hour)?;
        wear.set_item("dwpd_day", drive.wear.dwpd_day)?;
        wear.set_item("dwpd_life", drive.wear.dwpd_life)?;
        Ok(wear)
    });
    all.set_item("wear", wear.collect::<PyResult<Vec<_>>>()?)?;
    Ok(all)
}

fn staging(py: Python<'_>, s: StagingStats) -> PyResult<Bound<'_, PyDict>> {
    dict(py, &[("slot_bytes", s.slot_bytes as u64), ("slots", s.slots as u64), ("free", s.free as u64)])
}

/// The object store's.
pub(crate) fn objects<'py>(py: Python<'py>, s: &ObjectStats) -> PyResult<Bound<'py, PyDict>> {
    let (pending, there) = (s.pending_keys as u64, s.already_there);
    let figures =
        [("parts", s.parts), ("already_there", there), ("pending_keys", pending), ("direct_bytes", s.direct_bytes)];
    let all = dict(py, &figures)?;
    all.set_item("up", s.log.is_some())?;
    for (name, of) in [("put", &s.puts), ("get", &s.gets), ("exists", &s.exists), ("delete", &s.deletes)] {
        all.set_item(name, kind(py, of)?)?;
    }
    let (disk, live) = s.log.as_ref().map_or((0, 0), |log| (log.disk_bytes, log.live_bytes));
    all.set_item("disk_bytes", disk)?;
    all.set_item("live_bytes", live)?;
    Ok(all)
}

fn kind<'py>(py: Python<'py>, s: &KindStats) -> PyResult<Bound<'py, PyDict>> {
    let all = dict(py, &[("batches", s.batches), ("ok", s.ok), ("bytes", s.bytes)])?;
    let no = PyDict::new(py);
    s.no.iter().try_for_each(|(cause, n)| no.set_item(cause.as_str(), n))?;
    all.set_item("no", no)?;
    Ok(all)
}
