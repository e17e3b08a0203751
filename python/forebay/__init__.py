"""KV-cache offload on local NVMe for LLM servers.

`Engine` stores and loads the paged KV of prompts, `ObjectStore` keeps bytes under string keys; docs/python.md is the reference.
"""

import sys

from forebay import _forebay
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
    Prompt,
    Result,
    ShortIo,
    Store,
    StoreResult,
    TimedOut,
    Unsupported,
    __version__,
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
    "Prompt",
    "Result",
    "ShortIo",
    "Store",
    "StoreResult",
    "TimedOut",
    "Unsupported",
    "__version__",
]

if sys.executable:
    # The engine tries cuFile in a program of its own, which is this package's.
    _forebay._set_program([sys.executable, "-m", "forebay"])
