"""KV-cache offload on local NVMe for LLM servers.

`Engine` stores and loads the paged KV of prompts, `ObjectStore` keeps bytes under string keys; see docs/python.md.
"""

from forebay import _forebay
from forebay._forebay import *  # noqa: F403

__version__ = _forebay.__version__
__all__ = list(_forebay.__all__)
