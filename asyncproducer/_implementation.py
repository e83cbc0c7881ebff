"""Which record path runs: the compiled modules, or the same sources as plain Python.

A module with a `.pxd` beside it is meant to be compiled. Either all of them are, or none is used:
their C structures are built to fit each other, so a half-built set could not work together. Where
no `.pxd` is packed (PyInstaller, slim images), what is compiled counts alone.

ASYNCPRODUCER_IMPL
    auto      (the default) compiled if it was built
    compiled  compiled, or the import fails: for benchmarks and tests that mean it
    python    the sources, even where compiled modules lie beside them, or the import fails where
              they are not packed

Imported first by the package, before any module that may be compiled.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType

__all__ = ["IMPLEMENTATION", "tell"]

logger = logging.getLogger("asyncproducer")


class SourceFinder(MetaPathFinder):
    """Finds the `.py` of a module of ours where Python would take the extension beside it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The source of `fullname`, or None: then the other finders are asked."""
        if path is None or not fullname.startswith("asyncproducer."):
            return None
        for entry in path:
            spec = FileFinder(entry, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
        return None


def modules_of(package: Path) -> list[Path]:
    """The sources, there or not, of what is meant to be compiled in `package`, or is."""
    endings = {".pxd", *EXTENSION_SUFFIXES}
    found = set()
    for directory, _, files in os.walk(package):
        for name, dot, ending in (file.partition(".") for file in files):
            if dot + ending in endings:
                found.add(Path(directory, f"{name}.py"))
    return sorted(found)


def is_compiled(source: Path) -> bool:
    """Whether an extension that this interpreter would import lies beside `source`."""
    return any(source.with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)


def choose(asked: str, built: Sequence[bool], without_source: int = 0) -> str:
    """ "compiled" or "python", from ASYNCPRODUCER_IMPL, which of the modules are compiled, and how
    many of these have no source.

    Raises ImportError when what was asked, or can work, is not there, ValueError for other words.
    """
    if asked not in {"auto", "compiled", "python"}:
        raise ValueError(f"ASYNCPRODUCER_IMPL={asked}: it must be auto, compiled or python")
    complete = bool(built) and all(built)
    if asked == "compiled" and not complete:
        raise ImportError(
            f"ASYNCPRODUCER_IMPL=compiled, but {built.count(False)} of {len(built)} modules are not"
            f" compiled in {Path(__file__).parent}: install a wheel, or build with"
            " ASYNCPRODUCER_BUILD=compiled"
        )
    if complete and asked != "python":
        return "compiled"
    if without_source:
        advice = "unset ASYNCPRODUCER_IMPL" if complete else "it is half compiled: reinstall it"
        raise ImportError(
            f"asyncproducer cannot run as plain Python, {without_source} of {len(built)} modules"
            f" are compiled and have no .py in {Path(__file__).parent}: {advice}"
        )
    if any(built) and not complete:
        warnings.warn(
            "asyncproducer is half compiled and runs as plain Python: reinstall it",
            RuntimeWarning,
            stacklevel=2,
        )
    return "python"


_modules = modules_of(Path(__file__).parent)
_built = [is_compiled(source) for source in _modules]
_without_source = [
    source for source, built in zip(_modules, _built, strict=True) if built and not source.exists()
]

#: "compiled" or "python".
IMPLEMENTATION = choose(
    os.environ.get("ASYNCPRODUCER_IMPL") or "auto", _built, len(_without_source)
)
if IMPLEMENTATION == "python" and any(_built):
    sys.meta_path.insert(0, SourceFinder())


@functools.cache
def tell() -> None:
    """Say once in the log that this is the slow form, unless somebody has chosen it."""
    if IMPLEMENTATION == "compiled" or os.environ.get("ASYNCPRODUCER_IMPL") == "python":
        return
    from asyncproducer import __version__  # which imports this module first

    install = "pip install --no-cache-dir --no-deps --force-reinstall"
    if any(_built):
        advice = (
            f"only {sum(_built)} of its {len(_built)} modules are compiled, and they work as"
            f" a whole alone. Install it again ({install} asyncproducer=={__version__})"
        )
    else:
        advice = (
            "what is installed has no compiled modules. Install a C compiler and build it"
            f" ({install} --no-binary asyncproducer asyncproducer=={__version__})"
        )
    # Not info, which nobody sees who has not set up logging.
    logger.warning(
        "asyncproducer runs as plain Python, several times slower than compiled: %s, or set"
        " ASYNCPRODUCER_IMPL=python to be content with it",
        advice,
    )
