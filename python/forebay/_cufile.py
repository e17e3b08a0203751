"""The libcufile that PyTorch's wheels bring along, which lies in `site-packages` where no loader looks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

VARIABLE = "FOREBAY_CUFILE_PATH"
#: Of the wheels for CUDA 13 and 12.
PLACES = ("cu13/lib/libcufile.so.0", "cufile/lib/libcufile.so.0")


def use_wheel() -> None:
    """Names the wheel's library, where there is one and the user has named none.

    It goes before a library of the system: PyTorch links to it, so a process that has imported torch gets it under this name in any case, and
    the program in which cuFile is tried first must try the same.
    """
    if os.environ.get(VARIABLE):
        return
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for file in (Path(folder) / place for place in PLACES for folder in folders):
        if file.is_file():
            os.environ[VARIABLE] = str(file)
            return
