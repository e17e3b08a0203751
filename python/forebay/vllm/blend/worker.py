"""What runs in vLLM's workers: methods beside vLLM's own, called between steps by `collective_rpc`;
and how the connector finds the model.

vLLM gives a connector its KV caches and not the model that computes them. The worker has both, and
vLLM makes it a child of this module's class.

Every answer is `{"result": …}` or `{"error": text}`: an exception in a worker would end the
engine's process in some set-ups, and loses its text in others.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from forebay.vllm.geometry import Unsupported

logger = logging.getLogger("vllm.forebay")


#: The workers of this process.
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def runner_of(config: Any) -> Any:
    """The model runner of the worker with this configuration; `Unsupported` where no `BlendWorker` has it."""
    found = [worker for worker in _made if getattr(worker, "vllm_config", None) is config]
    if not found:
        # MultiConnector gives each connector a configuration of its own.
        raise Unsupported(
            "blending does not work with a connector that cannot find its worker's model, such as one inside MultiConnector; start with "
            "ForebayConnector alone"
        )
    return found[0].model_runner


class BlendWorker:
    """Given to vLLM as `worker_extension_cls`; `self` is vLLM's worker."""

    model_runner: Any
    forebay_blender: Any

    def __new__(cls, *_: Any, **__: Any) -> BlendWorker:
        """Remembers the worker: an extension's own methods are called by nobody when vLLM
        starts."""
        made = super().__new__(cls)
        _made.add(made)
        return made

    def forebay_blend_open(self) -> dict[str, Any]:
        """Makes the blender; once it is there, another call does nothing."""

        def opened() -> None:
            from forebay.vllm.blend.blender import Blender, running_connector
            from forebay.vllm.blend.ranks import Ranks

            if getattr(self, "forebay_blender", None) is not None:
                return
            made, why = _made_or_why(lambda: Blender(self.model_runner, running_connector()))
            # All of them or none: what they do next they do together.
            if Ranks().all([made is not None]) == [False]:
                if made is not None:
                    made.close()
                raise why or ValueError("another worker cannot blend; its log says why")
            self.forebay_blender = made

        return _answer(opened)

    def _blending(self, call: Callable[[], Any]) -> dict[str, Any]:
        def together() -> Any:
            try:
                return call()
            except Exception as error:
                self.forebay_blender.ranks.leave(error)
                raise

        return _answer(together)

    def forebay_blend_store(self, anchor: list[int], segment: list[int]) -> dict[str, Any]:
        """`Blend.store`."""
        return self._blending(lambda: self.forebay_blender.store(anchor, segment))

    def forebay_blend_has(self, anchor: list[int], segment: list[int]) -> dict[str, Any]:
        """`Blend.has`."""
        return self._blending(lambda: self.forebay_blender.has(self.forebay_blender.chains(anchor, [segment]))[0])

    def forebay_blend_prompt(
        self,
        anchor: list[int],
        tokens: list[int],
        segments: list[tuple[int, int]],
        select: str | list[int],
        ratios: list[float],
        check_layers: list[int],
        thresholds: list[float],
        salt: str,
    ) -> dict[str, Any]:
        """`Blend.blend`."""

        def blended() -> dict[str, Any]:
            from forebay.vllm.blend.blender import Asked

            places = [(start, end) for start, end in segments]
            asked = Asked(tokens, places, select, ratios, check_layers, anchor, thresholds)
            return self.forebay_blender.blend_and_store(asked, salt)  # type: ignore[no-any-return]

        return self._blending(blended)


def _made_or_why(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - raised by the caller
        logger.warning("blending cannot be opened: %s", error)
        return None, error


def _answer(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": call()}
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it and the server goes on
        logger.exception("blending failed")
        return {"error": f"{type(error).__name__}: {error}"}
