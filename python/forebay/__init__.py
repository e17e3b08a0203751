"""KV-cache offload on local NVMe for LLM servers.

`Engine` stores and loads the paged KV of prompts, `ObjectStore` keeps bytes under keys; docs/python.md is the reference.
"""

from forebay import _forebay
from forebay._cli import program_path as _program_path
from forebay._cufile import use_wheel as _use_wheel
from forebay._forebay import (
    Busy,
    Cancelled,
    Closed,
    Completion,
    ConfigError,
    Corrupt,
    Engine,
    ForebayError,
    Forked,
    Geometry,
    Incompatible,
    InternalError,
    InvalidInput,
    IoError,
    LayerReady,
    Load,
    Locked,
    Lookup,
    NoSpace,
    NotFound,
    ObjectStore,
    PagedKv,
    PermissionDenied,
    Prefetch,
    Prompt,
    Result,
    ShortIo,
    Store,
    StoreResult,
    TimedOut,
    Unsupported,
    __version__,
    object_digest,
)

__all__ = [
    "Busy",
    "Cancelled",
    "Closed",
    "Completion",
    "ConfigError",
    "Corrupt",
    "Engine",
    "ForebayError",
    "Forked",
    "Geometry",
    "Incompatible",
    "InternalError",
    "InvalidInput",
    "IoError",
    "LayerReady",
    "Load",
    "Locked",
    "Lookup",
    "NoSpace",
    "NotFound",
    "ObjectStore",
    "PagedKv",
    "PermissionDenied",
    "Prefetch",
    "Prompt",
    "Result",
    "ShortIo",
    "Store",
    "StoreResult",
    "TimedOut",
    "Unsupported",
    "__version__",
    "object_digest",
]

# The engine tries cuFile in a process of its own, which is this package's program.
if (_program := _program_path()) is not None:
    _forebay._set_program(_program)
_use_wheel()
