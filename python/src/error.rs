//! The engine's errors as exceptions: `ForebayError` with `kind` and `advice`, and a subclass for
//! each kind.
//!
//! The classes are made once, in Rust, because errors are raised here; `kind` is the engine's word
//! for it, the same as in metrics and logs.

use forebay::{Error, ErrorKind};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    forebay,
    ForebayError,
    PyException,
    "An error of Forebay. `kind` says which (one word, stable), `advice` what to do about it, or None."
);
macro_rules! kinds {
    ($($name:ident, $kind:ident, $doc:literal;)*) => {
        $(create_exception!(forebay, $name, ForebayError, $doc);)*

        /// The exceptions' names, for the module.
        fn add_all(module: &Bound<'_, PyModule>) -> PyResult<()> {
            $(module.add(stringify!($name), module.py().get_type::<$name>())?;)*
            Ok(())
        }

        fn raise(kind: ErrorKind, text: String) -> PyErr {
            match kind {
                $(ErrorKind::$kind => $name::new_err(text),)*
                _ => ForebayError::new_err(text),
            }
        }
    };
}

kinds! {
    ConfigError, Config, "A setting is missing, malformed or contradicts another.";
    InvalidInput, InvalidInput, "An argument is out of range or of the wrong shape.";
    Unsupported, Unsupported, "The machine, kernel or file system cannot do what was asked.";
    PermissionDenied, Permission, "The operating system refused access.";
    NotFound, NotFound, "A file, namespace or key is not there.";
    Locked, Locked, "Another process holds the lock.";
    Incompatible, Incompatible, "A file was written by an incompatible version or for another geometry.";
    Corrupt, Corrupt, "Bytes on disk fail their check.";
    IoError, Io, "The operating system reported an I/O error.";
    ShortIo, ShortIo, "A transfer moved fewer bytes than asked.";
    TimedOut, TimedOut, "A deadline passed.";
    NoSpace, NoSpace, "Drive, capacity or min_free leave no room.";
    Busy, Busy, "A bounded queue or pool is full; the work was not taken.";
    Cancelled, Cancelled, "The caller cancelled the operation.";
    Closed, Closed, "The engine or handle has been closed.";
    Forked, Forked, "The process was forked after the engine was opened; start the child with spawn instead.";
    InternalError, Internal, "An invariant of Forebay itself does not hold.";
}

/// Adds the exceptions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let base = module.py().get_type::<ForebayError>();
    // Defaults, for instances that are made in Python.
    base.setattr("kind", "internal")?;
    base.setattr("advice", module.py().None())?;
    module.add("ForebayError", base)?;
    add_all(module)
}

/// The exception for an error.
pub(crate) fn to_py(error: &Error) -> PyErr {
    let raised = raise(error.kind(), error.to_string());
    Python::attach(|py| {
        let value = raised.value(py);
        let set = value
            .setattr("kind", error.kind().as_str())
            .and_then(|()| value.setattr("advice", error.advice_text()))
            .and_then(|()| value.setattr("path", error.path()));
        if let Err(e) = set {
            return e;
        }
        raised
    })
}

/// An argument that is not what it should be.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message.into())
}

/// Turns the engine's results into Python's.
pub(crate) trait IntoPy<T> {
    /// The value, or the exception.
    fn py(self) -> PyResult<T>;
}

impl<T> IntoPy<T> for forebay::Result<T> {
    fn py(self) -> PyResult<T> {
        self.map_err(|e| to_py(&e))
    }
}

/// A handle that was used after `close`.
pub(crate) fn closed(what: &str) -> PyErr {
    to_py(&Error::new(ErrorKind::Closed, format!("the {what} is closed")))
}
