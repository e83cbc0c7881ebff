"""The build, with the real setup.py, pyproject.toml and MANIFEST.in around one small module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

pytest.importorskip("Cython")
pytest.importorskip("setuptools")

PROJECT = Path(__file__).parents[1]
NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here"
)
#: setuptools finds Microsoft's compiler without being told of one, unless it is told that somebody
#: has set all up for it; then it looks for it in PATH.
NO_COMPILER = {"CC": "no-such-compiler", "DISTUTILS_USE_SDK": "1", "PATH": ""}
#: How the file of a compiled module ends: `so`, or `pyd` on Windows.
COMPILED = EXTENSION_SUFFIXES[0].rpartition(".")[2]
NEEDS_GCC = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="no GCC here"
)
TELL = (
    "import asyncproducer._implementation as i; from asyncproducer import small;"
    "print(i.IMPLEMENTATION, small.twice(21), small.__file__.rpartition('.')[2])"
)


class Build:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        package = directory / "asyncproducer"
        package.mkdir()
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
            shutil.copy(PROJECT / name, directory)
        for name in ("README.md", "LICENSE", "asyncproducer/__init__.py"):
            (directory / name).touch()
        shutil.copy(PROJECT / "asyncproducer/_implementation.py", package)
        (package / "small.py").write_text("def twice(x):\n    return 2 * x\n")
        (package / "small.pxd").write_text("cpdef long twice(long x)\n")

    def train(self, training: str) -> None:
        """What is run between the two compilations."""
        bench = self.directory / "asyncproducer/bench"
        bench.mkdir()
        (bench / "__init__.py").touch()
        (bench / "training.py").write_text(training)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._python("setup.py", "--quiet", "build", "--build-lib", "built", **environment)

    def build_in_place(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._python("setup.py", "--quiet", "build_ext", "--inplace", **environment)

    def install_editable(self, **environment: str) -> None:
        done = self._python("setup.py", "--quiet", "editable_wheel", **environment)
        assert done.returncode == 0, done.stderr

    def wheel(self, *before: str, **environment: str) -> tuple[str, dict[str, bytes]]:
        """What it fits, `py3-none-any` or a platform, and its files. The package is at its root.

        `before` are commands of the same call.
        """
        done = self._python("setup.py", "--quiet", *before, "bdist_wheel", **environment)
        assert done.returncode == 0, done.stderr
        (wheel,) = (self.directory / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        assert "asyncproducer/small.py" in files
        wheel.unlink()
        return wheel.stem.split("-", 2)[2], files

    def sdist(self, **environment: str) -> list[str]:
        """Its files."""
        done = self._python("setup.py", "--quiet", "sdist", **environment)
        assert done.returncode == 0, done.stderr
        (sdist,) = (self.directory / "dist").iterdir()
        with tarfile.open(sdist) as archive:
            return [name.partition("/")[2] for name in archive.getnames()]

    def tell(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._python("-c", TELL, PYTHONPATH=str(self.directory / "built"), **environment)

    def needed(self, **environment: str) -> set[str]:
        """What must be installed to build it, beside what pyproject.toml says."""
        ask = "from setuptools.build_meta import get_requires_for_build_wheel as needed;"
        # Not by its output: setuptools says something there, too.
        tell = "open('needed', 'w').write('\\n'.join(needed()))"
        told = self._python("-c", ask + tell, **environment)
        assert told.returncode == 0, told.stderr
        return set((self.directory / "needed").read_text().split())

    def told_to_cython(self, version: tuple[int, int]) -> tuple[bool, str]:
        """Under this version of Python: whether modules need no GIL, and where the C sources go."""
        ask = (
            "import sys, setuptools, Cython.Build, distutils.core as core\n"
            "def cythonize(sources, compiler_directives, build_dir):\n"
            "    needs_none = compiler_directives['freethreading_compatible']\n"
            "    open('told', 'w').write(f'{needs_none} {build_dir}')\n"
            "    return []\n"
            "Cython.Build.cythonize = cythonize\n"
            f"sys.version_info = {version}\n"
            "core.run_setup('setup.py', ['build_ext'], stop_after='init')"
        )
        told = self._python("-c", ask, ASYNCPRODUCER_BUILD="compiled")
        assert told.returncode == 0, told.stderr
        needs_none, sources = (self.directory / "told").read_text().split()
        return needs_none == "True", sources

    def compilers(self, processors: int) -> int:
        """How many run at once, if this process may use so many processors of a large machine."""
        ask = (
            "import os, setuptools, distutils.core as core;"
            f"os.cpu_count = lambda: 64; os.sched_getaffinity = lambda _: range({processors});"
            "setup = core.run_setup('setup.py', ['build_ext'], stop_after='commandline');"
            "command = setup.get_command_obj('build_ext'); command.ensure_finalized();"
            "print(command.parallel)"
        )
        told = self._python("-c", ask, ASYNCPRODUCER_BUILD="pure")
        assert told.returncode == 0, told.stderr
        return int(told.stdout.split()[-1])

    def _python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        ours = ("ASYNCPRODUCER", "COV", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env={**kept, "PYTHONSAFEPATH": "1", **environment},
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


@NEEDS_COMPILER
def test_a_module_with_a_pxd_is_compiled_and_can_still_run_as_python(build: Build) -> None:
    assert build.run(ASYNCPRODUCER_BUILD="compiled").returncode == 0
    compiled, python = f"compiled 42 {COMPILED}\n", "python 42 py\n"
    assert build.tell().stdout == compiled
    assert build.tell(ASYNCPRODUCER_IMPL="compiled").stdout == compiled
    assert build.tell(ASYNCPRODUCER_IMPL="python").stdout == python


@NEEDS_COMPILER
def test_a_compiled_module_is_known_without_its_source(build: Build) -> None:
    """As PyInstaller and slim images pack it."""
    assert build.run(ASYNCPRODUCER_BUILD="compiled").returncode == 0
    for name in ("small.pxd", "small.py"):
        (build.directory / "built/asyncproducer" / name).unlink()
    assert build.tell().stdout == f"compiled 42 {COMPILED}\n"
    assert "1 of 1 modules are compiled" in build.tell(ASYNCPRODUCER_IMPL="python").stderr


def test_pure_compiles_nothing(build: Build) -> None:
    assert build.run(ASYNCPRODUCER_BUILD="pure").returncode == 0
    assert build.tell().stdout == "python 42 py\n"
    assert "1 of 1 modules are not compiled" in build.tell(ASYNCPRODUCER_IMPL="compiled").stderr


@pytest.mark.parametrize("mode", ["pure", "auto"])
def test_a_wheel_without_compiled_modules_fits_every_platform(build: Build, mode: str) -> None:
    assert build.wheel(ASYNCPRODUCER_BUILD=mode, **NO_COMPILER)[0] == "py3-none-any"


@NEEDS_COMPILER
def test_a_wheel_with_compiled_modules_is_for_one_platform(build: Build) -> None:
    interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}"
    python, _, platform = build.wheel(ASYNCPRODUCER_BUILD="auto")[0].split("-")
    assert python == interpreter
    assert platform != "any"


@NEEDS_COMPILER
def test_a_wheel_is_compiled_that_is_made_with_an_sdist(build: Build) -> None:
    assert build.wheel("sdist", ASYNCPRODUCER_BUILD="compiled")[0] != "py3-none-any"


def test_an_sdist_compiles_nothing(build: Build) -> None:
    (build.directory / "asyncproducer/small.pxd").write_text("no Cython")
    build.sdist(ASYNCPRODUCER_BUILD="compiled")


def test_modules_say_from_python_3_14_on_that_they_need_no_gil(build: Build) -> None:
    before, earlier_sources = build.told_to_cython((3, 13))
    now, sources = build.told_to_cython((3, 14))
    assert (before, now) == (False, True)
    assert earlier_sources != sources, "what one interpreter has made, another one takes"


def test_an_sdist_has_the_tests_and_what_they_read(build: Build) -> None:
    read = {"CHANGELOG.md", "CONTRIBUTING.md", "tox.ini"}
    for directory in ("benchmarks", "docs", "examples", "tests"):
        (build.directory / directory / "deeper").mkdir(parents=True)
        (build.directory / directory / "deeper/of.pyc").touch()
        read.add(f"{directory}/deeper/corpus.json")
    for name in read:
        (build.directory / name).touch()
    packed = build.sdist(ASYNCPRODUCER_BUILD="auto")
    assert read <= set(packed)
    assert "asyncproducer/small.pxd" in packed
    assert not [name for name in packed if name.endswith(".pyc")]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process may use all of them")
@pytest.mark.parametrize(("processors", "compilers"), [(1, 1), (2, 2), (48, 4)])
def test_no_more_compilers_run_than_memory_and_processors_are_for(
    build: Build, processors: int, compilers: int
) -> None:
    assert build.compilers(processors) == compilers


@pytest.mark.parametrize("mode", ["pure", "auto"])
def test_an_editable_install_that_is_not_compiled_leaves_no_compiled_module(
    build: Build, mode: str
) -> None:
    """Edits would be ignored: Python imports it rather than the source."""
    package = build.directory / "asyncproducer"
    ours = package / f"small{EXTENSION_SUFFIXES[0]}"
    of_another_interpreter = package / "small.cpython-27-pdp11.so"
    for module in (ours, of_another_interpreter):
        module.touch()
    build.install_editable(ASYNCPRODUCER_BUILD=mode)
    assert not ours.exists()
    assert of_another_interpreter.exists()


@NEEDS_COMPILER
def test_an_editable_install_is_compiled_if_that_is_asked_for(build: Build) -> None:
    build.install_editable(ASYNCPRODUCER_BUILD="compiled")
    assert (build.directory / f"asyncproducer/small{EXTENSION_SUFFIXES[0]}").exists()


@pytest.mark.parametrize("mode", ["", "auto"])
def test_a_missing_compiler_costs_one_message_and_speed(build: Build, mode: str) -> None:
    told = build.run(ASYNCPRODUCER_BUILD=mode, **NO_COMPILER)
    assert told.returncode == 0
    assert told.stderr.count("the same code runs as plain Python") == 1
    assert build.tell().stdout == "python 42 py\n"


def test_compiled_fails_without_a_compiler(build: Build) -> None:
    assert build.run(ASYNCPRODUCER_BUILD="compiled", **NO_COMPILER).returncode != 0


TRAINING = (
    "from asyncproducer import small\nassert small.__file__.endswith('.so')\nsmall.twice(1)\n"
)


def modules(directory: Path) -> list[Path]:
    return [*directory.rglob("small.*.so")]


@NEEDS_GCC
def test_a_profiled_module_knows_what_the_training_did(build: Build) -> None:
    build.train(TRAINING)
    told = build.run(ASYNCPRODUCER_BUILD="profiled", CC="gcc")
    assert told.returncode == 0, told.stderr
    assert build.tell().stdout == "compiled 42 so\n"
    (module,) = modules(build.directory / "built")
    assert b"-fprofile-use" in module.read_bytes()  # and tells so
    assert b"gcov" not in module.read_bytes()  # and counts no more


@NEEDS_GCC
def test_builds_of_one_checkout_do_not_mix(build: Build) -> None:
    """A module that is newer than its source is not compiled again."""
    build.train(TRAINING)
    before, profiled, after = (
        build.wheel(ASYNCPRODUCER_BUILD=mode, CC="gcc")[1]
        for mode in ("compiled", "profiled", "compiled")
    )
    assert before.keys() == profiled.keys() == after.keys(), "nothing of the training is packed"
    (module,) = (name for name in before if name.endswith(".so"))
    told = [b"-fprofile-use" in files[module] for files in (before, profiled, after)]
    assert told == [False, True, False]


@NEEDS_GCC
@pytest.mark.parametrize(
    ("training", "reason"),
    [("", "has left no counts of asyncproducer.small"), ("raise KeyError('no topic')", "no topic")],
    ids=["no counts", "an error"],
)
def test_a_training_that_fails_is_a_build_that_fails(
    build: Build, training: str, reason: str
) -> None:
    build.train(training)
    told = build.build_in_place(ASYNCPRODUCER_BUILD="profiled", CC="gcc")
    assert told.returncode != 0
    assert reason in told.stderr
    assert not modules(build.directory / "asyncproducer"), "none that counts is found later"
    files = build.wheel(ASYNCPRODUCER_BUILD="compiled", CC="gcc")[1]
    assert not any(b"gcov" in data for name, data in files.items() if name.endswith(".so"))


@NEEDS_GCC
def test_the_last_build_in_place_is_what_is_there(build: Build) -> None:
    build.train(TRAINING)
    for mode in ("compiled", "profiled", "compiled"):
        told = build.build_in_place(ASYNCPRODUCER_BUILD=mode, CC="gcc")
        assert told.returncode == 0, told.stderr
        (module,) = modules(build.directory / "asyncproducer")
        assert (b"-fprofile-use" in module.read_bytes()) == (mode == "profiled")


@NEEDS_COMPILER
@pytest.mark.skipif(sys.platform == "win32", reason="there CC is not what compiles")
def test_a_compiler_that_knows_no_partial_training_is_told_at_once(build: Build) -> None:
    """As GCC before 10, and others."""
    build.train("raise AssertionError('not so far')")
    compiler = build.directory / "cc"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-fprofile-partial-training*) echo "unknown option" >&2; exit 1; esac\n'
        'exec cc "$@"\n'
    )
    compiler.chmod(0o755)
    told = build.run(ASYNCPRODUCER_BUILD="profiled", CC=str(compiler))
    assert told.returncode != 0
    assert "unknown option" in told.stderr
    assert "not so far" not in told.stderr


@pytest.mark.parametrize(("mode", "needed"), [("profiled", True), ("compiled", False)])
def test_a_profiled_build_asks_for_what_the_package_needs_to_run(
    build: Build, mode: str, needed: bool
) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = build.needed(ASYNCPRODUCER_BUILD=mode)
    assert set(project["dependencies"]) <= told if needed else not told


def test_every_directory_with_python_is_checked_by_mypy() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {"setup.py"} | {
        entry.name
        for entry in PROJECT.iterdir()
        if entry.is_dir() and not entry.name.startswith((".", "build", "dist", "venv"))
        if any(entry.rglob("*.py"))
    }
    assert set(project["tool"]["mypy"]["files"]) == found


def test_another_word_is_refused(build: Build) -> None:
    told = build.run(ASYNCPRODUCER_BUILD="native")
    assert told.returncode != 0
    assert "it must be auto, compiled, profiled or pure" in told.stderr
