"""Reuse of a segment's KV at any position of a prompt, in an unmodified vLLM; docs/blend.md is the guide.

`Blend` asks vLLM's workers, which run `forebay.vllm.blend.worker.BlendWorker` beside their own class. Importing this package imports neither
vLLM nor torch.
"""

from __future__ import annotations

from forebay.vllm.blend.client import Blend, Blended, BlendError, SegmentState

__all__ = ["Blend", "BlendError", "Blended", "SegmentState"]
