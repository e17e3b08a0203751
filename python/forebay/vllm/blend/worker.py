"""What runs in vLLM's workers: methods beside vLLM's own, called between steps by `collective_rpc`.

Every answer is `{"result": …}` or `{"error": text}`: an exception in a worker would end the engine's process in some set-ups, and loses its text in others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.forebay")


class BlendWorker:
    """Given to vLLM as `worker_extension_cls`; `self` is vLLM's worker."""

    model_runner: Any
    forebay_blender: Any

    def forebay_blend_open(self, anchor: list[int]) -> dict[str, Any]:
        """Makes the blender; a second call replaces it."""

        def opened() -> None:
            from forebay.vllm.blend.blender import Blender

            if (before := getattr(self, "forebay_blender", None)) is not None:
                self.forebay_blender = None
                before.close()
            self.forebay_blender = Blender(self.model_runner, anchor)

        return _answer(opened)

    def forebay_blend_store(self, segment: list[int]) -> dict[str, Any]:
        """`Blend.store`."""
        return _answer(lambda: self.forebay_blender.store(segment))

    def forebay_blend_has(self, segment: list[int]) -> dict[str, Any]:
        """`Blend.has`."""
        return _answer(lambda: self.forebay_blender.has(segment))

    def forebay_blend_prompt(
        self,
        tokens: list[int],
        segments: list[tuple[int, int]],
        select: str | list[int],
        ratio: float,
        check_layer: int,
        salt: str,
    ) -> dict[str, Any]:
        """`Blend.blend`."""

        def blended() -> dict[str, Any]:
            from forebay.vllm.blend.blender import Asked

            asked = Asked(tokens, [(start, end) for start, end in segments], select, ratio, check_layer)
            return self.forebay_blender.blend_and_store(asked, salt)  # type: ignore[no-any-return]

        return _answer(blended)


def _answer(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": call()}
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it and the server goes on
        logger.exception("blending failed")
        return {"error": f"{type(error).__name__}: {error}"}
