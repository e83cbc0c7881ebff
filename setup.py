"""Builds the record path with Cython: every module that has a `.pxd` beside its `.py`.

ASYNCPRODUCER_BUILD
    auto      compiled if that works; if not, one message, and the same sources run as Python
    compiled  compiled, or the build fails (our tests, and wheels but for Linux)
    profiled  compiled twice by GCC (10 or later), or the build fails: the second time it is known
              which branches asyncproducer/bench/training.py has taken, and the others are laid
              elsewhere. Takes three times as long (benchmarks, and wheels for Linux)
    pure      not compiled

An editable install is not compiled unless `compiled` or `profiled` is asked for: Python would go on
to import the compiled module after its source was edited. So what an earlier one that was compiled
has left beside the sources goes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("ASYNCPRODUCER_BUILD") or "auto"
if MODE not in {"auto", "compiled", "profiled", "pure"}:
    raise SystemExit(f"ASYNCPRODUCER_BUILD={MODE}: it must be auto, compiled, profiled or pure")
MUST_COMPILE = MODE in {"compiled", "profiled"}

DIRECTIVES = {
    "language_level": "3",
    # Types come from the .pxd files alone. Otherwise an annotation such as `data: bytes` would
    # make the compiled function refuse what the Python one takes.
    "annotation_typing": False,
    # What is compiled belongs to one event loop: a copy of it, or one in another process, is none.
    "auto_pickle": False,
    # A producer is used on the thread of its event loop alone: other threads at most make what is
    # to be awaited there. And modules share no state that changes but a counter (core/bulk.py),
    # which is safe from 3.14 on, and, where there is a GIL, an exception object (intake.pxd). So a
    # Python without it need not switch it on for us.
    "freethreading_compatible": sys.version_info >= (3, 14),
}
#: The directives are written into the C sources. Cython makes none again for other directives.
C_SOURCES = "build/c" if DIRECTIVES["freethreading_compatible"] else "build/c-before-3.14"

#: What is newer than its source is not compiled again, however it was: so it lies apart.
BUILD = Path("build/profiled" if MODE == "profiled" else "build")

#: Each takes up to 350 MB.
MOST_COMPILERS = 4

COMPILED = shutil.ignore_patterns("*.so", "__pycache__")
#: It takes less than a minute.
TRAINING_SECONDS = 900

#: What no training has executed is compiled as ever. The switches are recorded in the module, so
#: that it tells how it was made.
USE_PROFILE = [
    "-fprofile-use",
    "-fprofile-partial-training",
    "-fprofile-correction",
    "-Wno-missing-profile",
    "-frecord-gcc-switches",
]


def modules_to_compile() -> list[Path]:
    return sorted(p.with_suffix(".py") for p in Path("asyncproducer").rglob("*.pxd"))


def extensions() -> list[Extension]:
    """The C sources are written into build/, so that the tree stays as it is."""
    from Cython.Build import cythonize

    found: list[Extension] = cythonize(  # type: ignore[no-untyped-call]  # Cython has no types
        [
            Extension(
                ".".join(source.with_suffix("").parts),
                [str(source)],
                # Many Pythons pass -g on to us, which makes a wheel ten times as large.
                extra_compile_args=[] if sys.platform == "win32" else ["-g0"],
            )
            for source in modules_to_compile()
        ],
        compiler_directives=DIRECTIVES,
        build_dir=C_SOURCES,
    )
    return found


def not_compiled(reason: Exception) -> None:
    """The one message. Not a failure: the wheel then holds only Python."""
    print(
        "asyncproducer: the compiled record path could not be built, the same code runs as plain"
        f" Python, slower ({type(reason).__name__}: {reason})."
        " ASYNCPRODUCER_BUILD=compiled makes this an error.",
        file=sys.stderr,
    )


def usable_processors() -> int:
    """Those of the machine that this process may use, where the system tells."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class BuildAllOrNone(build_ext):  # type: ignore[misc]  # setuptools has no types
    """One extension that fails takes the others with it: half of them would not fit together."""

    extensions: list[Extension]
    compiler: object
    build_lib: str
    build_temp: str
    inplace: bool
    force: bool

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel: int | None = self.parallel or min(MOST_COMPILERS, usable_processors())

    def train(self) -> None:
        """Compile what counts its branches, run it, and have the rest compiled by the counts."""
        # Not where what is packed lies, nor in the tree: nothing else is to find it.
        trained = BUILD / "training"
        shutil.rmtree(trained, ignore_errors=True)
        shutil.copytree("asyncproducer", trained / "asyncproducer", ignore=COMPILED)
        for extension in self.extensions:
            self._counts(extension).unlink(missing_ok=True)
        kept = self.compiler, self.build_lib, self.inplace
        self.build_lib, self.inplace, self.force = str(trained), False, True
        for extension in self.extensions:
            # GCC before 10 and other compilers know no partial training: here they say so at once.
            extension.extra_compile_args += ["-fprofile-generate", "-fprofile-partial-training"]
            extension.extra_link_args.append("-fprofile-generate")
        super().run()
        # run() has made an object of the compiler's name.
        self.compiler, self.build_lib, self.inplace = kept
        path = [str(trained.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        subprocess.run(
            [sys.executable, "-P", "-m", "asyncproducer.bench.training"],
            env={
                **os.environ,
                "ASYNCPRODUCER_IMPL": "compiled",
                "PYTHONPATH": os.pathsep.join(path),
            },
            check=True,
            timeout=TRAINING_SECONDS,
        )
        left_out = [e.name for e in self.extensions if not self._counts(e).exists()]
        if left_out:
            raise SystemExit(
                "ASYNCPRODUCER_BUILD=profiled: the training (asyncproducer/bench/training.py) has"
                f" left no counts of {', '.join(left_out)}."
            )
        for extension in self.extensions:
            extension.extra_compile_args[-2:] = USE_PROFILE
            extension.extra_link_args.pop()

    def copy_extensions_to_source(self) -> None:
        force, self.force = self.force, True  # else what is newer in the tree would stay
        super().copy_extensions_to_source()
        self.force = force

    def _counts(self, extension: Extension) -> Path:
        """Where GCC's code leaves them: beside the object file."""
        return Path(self.build_temp, extension.sources[0]).with_suffix(".gcda")

    def run(self) -> None:
        try:
            if MODE == "profiled":
                self.train()
            super().run()
        except Exception as error:
            if MUST_COMPILE:
                raise
            not_compiled(error)
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions = []
            # Any interpreter can run what is left. setuptools has counted on extensions so far,
            # and would name this platform in the wheel.
            self.distribution.ext_modules = []
            if "bdist_wheel" in self.distribution.have_run:
                self.get_finalized_command("bdist_wheel").root_is_pure = True


def delete_compiled() -> None:
    """What this interpreter would import instead of the sources; another one's may be wanted."""
    for source in modules_to_compile():
        for suffix in EXTENSION_SUFFIXES:
            source.with_suffix(suffix).unlink(missing_ok=True)


def only_tells() -> bool:
    """Whether nothing is asked for but names and files, or the sources as they are."""
    words = sys.argv[1:]
    builds = any(word.startswith(("bdist", "build", "install")) for word in words)
    return not builds and not {"dist_info", "egg_info", "sdist"}.isdisjoint(words)


def wanted() -> list[Extension]:
    """What this command compiles."""
    if "editable_wheel" in sys.argv and not MUST_COMPILE:
        delete_compiled()
        return []
    if MODE == "pure" or only_tells():
        return []
    try:
        return extensions()
    except Exception as error:
        if MUST_COMPILE:
            raise
        not_compiled(error)
        return []


# setuptools packs whatever lies in build/lib, also modules that have since been removed.
packed = (p.relative_to(BUILD) for p in BUILD.glob("lib*/asyncproducer/**/*.p[yx]*"))
if any(not Path(*p.parts[1:]).exists() for p in packed):
    shutil.rmtree(BUILD)


def needed_to_build() -> list[str]:
    """Beside what pyproject.toml says. `egg_info` is how pip asks for it."""
    if MODE != "profiled" or "egg_info" not in sys.argv:
        return []
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed: list[str] = project["dependencies"]  # what is trained must run
    return needed


setup(
    ext_modules=wanted(),
    cmdclass={"build_ext": BuildAllOrNone},
    options={"build": {"build_base": str(BUILD)}},
    setup_requires=needed_to_build(),
)
