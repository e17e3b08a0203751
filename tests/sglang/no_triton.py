"""Stands in for Triton (a GB), which a machine without a GPU never calls: its names can be imported, and nothing is compiled."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.6.0"


class _Name:
    """Whatever a module is asked for: a decorator, a type, a value."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *given, **_):
        return given[0] if len(given) == 1 and callable(given[0]) else _Name()

    def __getattr__(self, name):
        # There is no driver: SGLang asks it which device there is, and takes its absence as the answer.
        if name.startswith("__") or name in ("driver", "active"):
            raise AttributeError(name)
        return _Name()

    def __getitem__(self, _):
        return _Name()


def __getattr__(name):
    if name.startswith("__") or name == "driver":
        raise AttributeError(name)
    return type(name, (_Name,), {}) if name[0].isupper() else _Name()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("triton.") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
