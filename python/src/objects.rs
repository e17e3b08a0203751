//! The object store for Python: bytes under keys (`str` or `bytes`), in batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::device::HostMemory;
use forebay::objects::{
    BatchKind, KeyResult, ObjectCause, ObjectCompletion, ObjectGet, ObjectMemory, ObjectPut, ObjectRequest,
    ObjectStore, PutOptions,
};
use forebay::{Error, ErrorKind};
use pyo3::PyTypeInfo as _;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyInt, PyList, PyString, PyTuple, PyType};

use crate::buffer::describe;
use crate::convert;
use crate::error::{IntoPy, invalid, to_py};
use crate::wait::in_slices;

const CLOSE_TIMEOUT_MS: u64 = 30_000;
/// Keys of one batch of a call that waits: a quarter of what the queue has room for.
const KEYS_AT_ONCE: usize = 16_384;

/// What a batch came to, as a named tuple: `id` (what the submit returned), `kind` (`put`, `get`,
/// `exists` or `delete`), `results` (the answer for each key, in the order of the submit),
/// `lengths` (bytes of each object that was put or got, or for which a buffer had another length),
/// `causes` (why the answer is no, None where it is yes) and `error` (in words, the first failure;
/// that a key is not there is none).
const COMPLETION: [&str; 6] = ["id", "kind", "results", "lengths", "causes", "error"];

static COMPLETION_TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The class of completions, made once: a `collections.namedtuple`, which can be unpacked like a
/// tuple and costs no more.
pub(crate) fn completion_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let made = COMPLETION_TYPE.get_or_try_init(py, || {
        let arguments = [("module", "forebay")].into_py_dict(py)?;
        let made = py.import("collections")?.call_method("namedtuple", ("Completion", COMPLETION), Some(&arguments))?;
        made.setattr("__doc__", "What a batch of objects came to.")?;
        PyResult::Ok(made.cast_into::<PyType>()?.unbind())
    })?;
    Ok(made.bind(py))
}

fn completion<'py>(py: Python<'py>, done: &ObjectCompletion) -> PyResult<Bound<'py, PyAny>> {
    let results: Vec<bool> = done.results.iter().map(|r| r.ok).collect();
    let lengths: Vec<u64> = done.results.iter().map(|r| r.len).collect();
    let causes: Vec<Option<&str>> = done.results.iter().map(|r| r.cause.map(ObjectCause::as_str)).collect();
    completion_type(py)?.call1((done.id, done.kind.as_str(), results, lengths, causes, done.error.as_deref()))
}

/// The digest of a key, by which `drain_evicted` names objects: 32 bytes.
#[pyfunction]
pub(crate) fn object_digest<'py>(py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(py, &forebay::objects::object_digest(&convert::bytes(key)?)))
}

/// Objects beside the KV in the same cache directories: keys up to 1 KiB, values from 1 B to 1 GiB.
#[pyclass(frozen, name = "ObjectStore", module = "forebay", weakref)]
pub(crate) struct PyObjectStore {
    store: Option<Arc<ObjectStore>>,
    evicted_missed: AtomicU64,
}

impl PyObjectStore {
    /// The store, in whichever process.
    fn anywhere(&self) -> PyResult<&Arc<ObjectStore>> {
        self.store.as_ref().ok_or_else(|| crate::error::closed("object store"))
    }

    /// The store; an error in a forked child.
    pub(crate) fn get_store(&self) -> PyResult<&Arc<ObjectStore>> {
        let store = self.anywhere()?;
        store.check().py()?;
        Ok(store)
    }

    /// Submits what was asked for, or a batch in its place that says what is wrong with it. The GIL
    /// is held throughout, so that no other thread of Python sees the completion before the number
    /// is returned.
    fn submit<T>(
        &self,
        kind: BatchKind,
        asked: &Bound<'_, PyAny>,
        parse: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
        submit: impl FnOnce(&ObjectStore, T) -> forebay::Result<u64>,
    ) -> PyResult<u64> {
        let store = self.get_store()?;
        // Of what can be read only once, the number of keys would not be known afterwards.
        let is_iterator = asked.len().is_err() && asked.try_iter().is_ok();
        let listed = is_iterator.then(|| PyList::type_object(asked.py()).call1((asked,))).transpose();
        let (asked, parsed) = match &listed {
            Ok(Some(listed)) => (listed, parse(listed)),
            Ok(None) => (asked, parse(asked)),
            Err(why) => (asked, Err(why.clone_ref(asked.py()))),
        };
        match parsed {
            Ok(items) => submit(store, items).py(),
            // Ctrl-C and the like say nothing about what was asked.
            Err(why) if !why.is_instance_of::<PyException>(asked.py()) => Err(why),
            Err(why) => store.submit_invalid(kind, asked.len().unwrap_or(0), why.to_string()).py(),
        }
    }

    /// Asks for something of all keys, and waits: in batches that leave the queue room for others.
    fn ask(
        &self,
        py: Python<'_>,
        keys: Vec<Vec<u8>>,
        request: fn(Vec<Vec<u8>>) -> ObjectRequest,
    ) -> PyResult<Vec<bool>> {
        let mut answers = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_AT_ONCE) {
            let request = request(some.to_vec());
            let is_question = matches!(request, ObjectRequest::Exists(_));
            let results = self.results(py, request)?;
            let is_full = results.iter().any(|r| r.cause == Some(ObjectCause::QueueFull));
            if is_full && is_question {
                // False would say that the object is not there.
                let full = Error::new(ErrorKind::Busy, "too many keys of other batches wait");
                return Err(to_py(&full.advice("try again when some of them have completed")));
            }
            answers.extend(results.iter().map(|r| r.ok));
        }
        Ok(answers)
    }

    fn run(&self, py: Python<'_>, request: ObjectRequest) -> PyResult<Vec<bool>> {
        Ok(self.results(py, request)?.iter().map(|r| r.ok).collect())
    }

    /// Does what was asked for, and waits. Its completion is not among those that
    /// `drain_completions` takes.
    fn results(&self, py: Python<'_>, request: ObjectRequest) -> PyResult<Vec<KeyResult>> {
        let store = self.get_store()?;
        let id = store.begin(request).py()?;
        let wait = |slice| match store.wait(id, slice) {
            Err(e) if e.kind() == ErrorKind::TimedOut => None,
            other => Some(other),
        };
        let done = match in_slices(py, None, wait) {
            Ok(Some(done)) => done.py()?,
            Ok(None) => return Err(to_py(&Error::new(ErrorKind::Internal, "a wait without an end ended"))),
            Err(interrupted) => {
                // The buffers are the caller's again when the completion has come: the drive may
                // still be reading into registered memory. A second signal ends this wait too.
                py.detach(|| store.cancel(id));
                drop(in_slices(py, None, wait));
                return Err(interrupted);
            }
        };
        Ok(done.results)
    }
}

/// The host memory of a buffer, dense, and writable where it is written.
fn buffer(object: &Bound<'_, PyAny>, write: bool) -> PyResult<Option<Arc<HostMemory>>> {
    let buffer = describe(object)?;
    if !buffer.is_dense() {
        return Err(to_py(&invalid("a buffer with gaps").advice("give contiguous memory")));
    }
    if write && buffer.readonly {
        return Err(to_py(&invalid("a read-only buffer to read an object into")));
    }
    Ok(if buffer.bytes()? == 0 { None } else { Some(buffer.host()?) })
}

/// Whether a tuple describes one buffer: it begins with its address.
fn is_raw_tuple(object: &Bound<'_, PyAny>) -> bool {
    object.cast::<PyTuple>().is_ok_and(|tuple| tuple.get_item(0).is_ok_and(|first| first.is_instance_of::<PyInt>()))
}

/// The memory of a value: one buffer, or a list or tuple of several.
fn memory(object: &Bound<'_, PyAny>, write: bool) -> PyResult<ObjectMemory> {
    let is_many = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
    if !is_many || is_raw_tuple(object) {
        let pieces = buffer(object, write)?.map(|memory| ObjectMemory::whole(&memory));
        return Ok(ObjectMemory::of_pieces(pieces));
    }
    let pieces = object.try_iter()?.map(|piece| buffer(&piece?, write)).collect::<PyResult<Vec<_>>>()?;
    Ok(ObjectMemory::of_pieces(pieces.iter().flatten().map(ObjectMemory::whole)))
}

/// Keys with their memory: of a dict, or of (key, value) pairs, in which a key may come twice.
fn pairs(items: &Bound<'_, PyAny>, write: bool) -> PyResult<Vec<(Vec<u8>, ObjectMemory)>> {
    if let Ok(items) = items.cast::<PyDict>() {
        return items.iter().map(|(key, value)| Ok((convert::bytes(&key)?, memory(&value, write)?))).collect();
    }
    let pair = |item: PyResult<Bound<'_, PyAny>>| {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
        Ok((convert::bytes(&key)?, memory(&value, write)?))
    };
    items.try_iter()?.map(pair).collect()
}

fn puts(
    items: &Bound<'_, PyAny>,
    ttl_s: Option<f64>,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Vec<ObjectPut>, PutOptions)> {
    let puts = pairs(items, false)?.into_iter().map(|(key, value)| ObjectPut { key, value }).collect();
    let ttl = ttl_s.map(|s| seconds("ttl_s", s)).transpose()?;
    let dtype = dtype.map(|dtype| dtype.str()?.to_cow().map(|name| name.into_owned())).transpose()?;
    let bfloat16 = dtype.is_some_and(|name| name.strip_prefix("torch.").unwrap_or(&name) == "bfloat16");
    Ok((puts, PutOptions { ttl, bfloat16 }))
}

fn gets(items: &Bound<'_, PyAny>) -> PyResult<Vec<ObjectGet>> {
    Ok(pairs(items, true)?.into_iter().map(|(key, target)| ObjectGet { key, target }).collect())
}

pub(crate) fn keys(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    if keys.is_instance_of::<PyString>() || keys.is_instance_of::<PyBytes>() {
        return Err(to_py(&invalid("one key where a list of keys is needed")));
    }
    keys.try_iter()?.map(|key| convert::bytes(&key?)).collect()
}

fn seconds(name: &str, s: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(s).map_err(|e| to_py(&invalid(format!("{name}: {e}"))))
}

#[pymethods]
impl PyObjectStore {
    /// Opens the store in the cache directories that `config` names. Stores with another
    /// `namespace` do not see these objects.
    #[new]
    #[pyo3(signature = (config=None, namespace="default"))]
    fn new(py: Python<'_>, config: Option<&Bound<'_, PyAny>>, namespace: &str) -> PyResult<Self> {
        crate::logging::install(py)?;
        let settings = convert::store_settings(config)?;
        let store = py.detach(|| ObjectStore::open(&settings, namespace)).py()?;
        Ok(Self { store: Some(Arc::new(store)), evicted_missed: AtomicU64::new(0) })
    }

    /// Whether the store is open: neither disabled nor closed.
    #[getter]
    fn is_up(&self, py: Python<'_>) -> PyResult<bool> {
        let store = self.anywhere()?;
        Ok(py.detach(|| store.is_up()))
    }

    /// Why the store is disabled, in words; None while it is open.
    #[getter]
    fn why_disabled(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let store = self.anywhere()?;
        Ok(py.detach(|| store.why_disabled()))
    }

    /// Stores values under keys: a dict, or (key, value) pairs. A value is a buffer, or a list of
    /// buffers that together hold it. An object that is there already stays as it is, and counts as
    /// stored. One answer for each key, in order. `dtype` is that of the values, as text or torch's
    /// own: the setting `codec` may code bfloat16.
    #[pyo3(signature = (items, ttl_s=None, dtype=None))]
    fn put(
        &self,
        py: Python<'_>,
        items: &Bound<'_, PyAny>,
        ttl_s: Option<f64>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<bool>> {
        let (puts, options) = puts(items, ttl_s, dtype)?;
        self.run(py, ObjectRequest::Put(puts, options))
    }

    /// Reads objects into buffers: a dict, or (key, value) pairs, as for `put`. The buffers of a
    /// value must have the object's length together. An answer for each key, in order.
    fn get(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        self.run(py, ObjectRequest::Get(gets(items)?))
    }

    /// Which of the keys are stored.
    fn exists(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        self.ask(py, self::keys(keys)?, ObjectRequest::Exists)
    }

    /// Removes objects; which of them were there and are removed.
    fn delete(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        self.ask(py, self::keys(keys)?, ObjectRequest::Delete)
    }

    /// Begins a put and returns its number. The buffers must not change until its completion is
    /// there. As all submits, it neither waits nor raises: what cannot be done is a completion that
    /// says so. Only in a forked child there is none, and it raises.
    #[pyo3(signature = (items, ttl_s=None, dtype=None))]
    fn submit_put(
        &self,
        items: &Bound<'_, PyAny>,
        ttl_s: Option<f64>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        self.submit(
            BatchKind::Put,
            items,
            |items| puts(items, ttl_s, dtype),
            |store, (puts, options)| store.submit_put(puts, options),
        )
    }

    /// Begins a get and returns its number.
    fn submit_get(&self, items: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.submit(BatchKind::Get, items, gets, ObjectStore::submit_get)
    }

    /// Begins a question and returns its number.
    fn submit_exists(&self, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.submit(BatchKind::Exists, keys, self::keys, ObjectStore::submit_exists)
    }

    /// Begins a removal and returns its number.
    fn submit_delete(&self, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.submit(BatchKind::Delete, keys, self::keys, ObjectStore::submit_delete)
    }

    /// Takes the completions that are there, as tuples with names. Never waits.
    fn drain_completions<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let store = self.get_store()?;
        let done = py.detach(|| store.drain_completions());
        done.iter().map(|done| completion(py, done)).collect()
    }

    /// How many of the keys, from the first on, are stored. No I/O.
    fn count_prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (store, keys) = (self.get_store()?, self::keys(keys)?);
        Ok(py.detach(|| store.count_prefix(&keys)))
    }

    /// Keeps objects from eviction for `ttl_s` seconds, or until each pin is taken back by an
    /// `unpin`. Says for each key whether it is pinned: not where it is not stored, or where leases
    /// would exceed `lease_share`.
    fn pin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, ttl_s: f64) -> PyResult<Vec<bool>> {
        let (store, keys, time) = (self.get_store()?, self::keys(keys)?, seconds("ttl_s", ttl_s)?);
        Ok(py.detach(|| store.pin(&keys, time)))
    }

    /// Takes back one pin of each key.
    fn unpin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, keys) = (self.get_store()?, self::keys(keys)?);
        py.detach(|| store.unpin(&keys));
        Ok(())
    }

    /// Up to `limit` objects whose keys begin with `prefix`: (key, length in bytes) pairs, in the
    /// order of their digests. To go on, give the last key of the previous list as `after`. Reads a
    /// page of the drive for each object that it looks at.
    #[pyo3(signature = (prefix=None, limit=1000, after=None))]
    fn list<'py>(
        &self,
        py: Python<'py>,
        prefix: Option<&Bound<'py, PyAny>>,
        limit: usize,
        after: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, u64)>> {
        let store = self.get_store()?;
        let prefix = prefix.map(convert::bytes).transpose()?.unwrap_or_default();
        let after = after.map(convert::bytes).transpose()?;
        let found = py.detach(|| store.list(&prefix, limit, after.as_deref())).py()?;
        Ok(found.iter().map(|(key, length)| (PyBytes::new(py, key), *length)).collect())
    }

    /// Removes everything in this namespace, durably.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.get_store()?;
        py.detach(|| store.clear()).py()
    }

    /// The digests (`object_digest`) of objects that this process has evicted, or found damaged,
    /// since the last call. Nothing is recorded before the first call. `evicted_missed` says how
    /// many more there were that nobody took in time.
    fn drain_evicted<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let store = self.get_store()?;
        let gone = py.detach(|| store.drain_evicted());
        self.evicted_missed.fetch_max(gone.missed, Ordering::Relaxed);
        Ok(gone.digests.iter().map(|digest| PyBytes::new(py, digest)).collect())
    }

    /// Evicted or damaged objects that `drain_evicted` had no room to keep, as of its last call:
    /// when this grows, a list of stored objects has to be made anew.
    #[getter]
    fn evicted_missed(&self) -> u64 {
        self.evicted_missed.load(Ordering::Relaxed)
    }

    /// Which of these digests (`object_digest`) are of objects that are not stored, whichever
    /// process has removed them. No I/O, and no use of them.
    fn gone(&self, py: Python<'_>, digests: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let store = self.get_store()?;
        let digest = |given: PyResult<Bound<'_, PyAny>>| {
            let wrong = |_| to_py(&invalid("a digest has 32 bytes"));
            <[u8; 32]>::try_from(given?.cast::<PyBytes>()?.as_bytes()).map_err(wrong)
        };
        let digests = digests.try_iter()?.map(digest).collect::<PyResult<Vec<_>>>()?;
        Ok(py.detach(|| store.gone(&digests)))
    }

    /// Declares memory into which objects are read, and from which they are written, without a copy
    /// where it is aligned to 4 KiB. It is kept until the store is closed and gone.
    fn register_memory(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, memory) = (self.get_store()?, self::buffer(buffer, true)?);
        let Some(memory) = memory else { return Ok(()) };
        py.detach(|| store.register_memory(&memory)).py()
    }

    /// A descriptor that is readable exactly while there are completions to take. Only to be
    /// polled.
    fn event_fd(&self) -> PyResult<i32> {
        Ok(self.get_store()?.event_fd())
    }

    /// Ends a batch now. Its buffers are the caller's when this returns; registered memory that the
    /// kernel still uses is only when the batch's completion comes. False where it has ended
    /// already.
    fn cancel(&self, py: Python<'_>, id: u64) -> PyResult<bool> {
        let store = self.get_store()?;
        Ok(py.detach(|| store.cancel(id)))
    }

    /// Makes every put durable that has been answered.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.get_store()?;
        py.detach(|| store.flush()).py()
    }

    /// Counters and state, as plain numbers.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let store = self.get_store()?;
        let stats = py.detach(|| store.stats()).py()?;
        crate::stats::objects(py, &stats)
    }

    /// All metrics as Prometheus text.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.get_store()?;
        py.detach(|| store.metrics()).py()
    }

    /// Waits for batches under way, for `timeout_ms` at most, flushes and closes.
    #[pyo3(signature = (timeout_ms=CLOSE_TIMEOUT_MS))]
    fn close(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        let store = self.get_store()?;
        let now = Instant::now();
        let deadline = now.checked_add(Duration::from_millis(timeout_ms)).unwrap_or(now);
        py.detach(|| store.close(deadline)).py()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, CLOSE_TIMEOUT_MS)
    }
}

impl Drop for PyObjectStore {
    fn drop(&mut self) {
        let store = self.store.take();
        Python::attach(|py| py.detach(|| drop(store)));
    }
}
