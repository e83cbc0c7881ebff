"""The same targets under atheris (libFuzzer): inputs that reach new code are broken further.

    python -m pip install atheris
    python -m tests.fuzz.guided answers --seconds 300

atheris watches time and memory itself, and ends at the first finding, which is kept in
the corpus as those of `python -m tests.fuzz` are. It has wheels for Linux alone, so
nothing else here needs it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
from pathlib import Path

#: Inputs to begin with.
_FIRST = 300


def main() -> int:
    """1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided")
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        _fuzz(options.target, options.seconds, options.inside)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "corpus").mkdir()
        # libFuzzer ends its process, however it ends.
        command = [sys.executable, "-m", "tests.fuzz.guided", *sys.argv[1:], "--inside", directory]
        subprocess.run(command, check=False)
        return _keep(options.target, Path(directory))


def _keep(target: str, directory: Path) -> int:
    found = [path for path in directory.iterdir() if path.is_file()]
    for path in found:
        kind = path.name.partition("-")[0]
        data = path.read_bytes()
        kept = Path(__file__).parent / "corpus" / target
        kept.mkdir(parents=True, exist_ok=True)
        name = kept / f"{kind}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
        name.write_bytes(data)
        sys.stdout.write(f"{name}\n")
    return min(len(found), 1)


def _fuzz(name: str, seconds: int, directory: Path) -> None:
    import atheris

    # Before anything else loads it: what is loaded already is not watched.
    with atheris.instrument_imports(include=["asyncproducer"]):
        from .runner import make
        from .targets import TARGETS
    from .mutator import mutate

    target = TARGETS[name]
    for number in range(_FIRST):
        (directory / "corpus" / str(number)).write_bytes(make(target, "guided", number))

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            changed: bytes = atheris.Mutate(data, most)
            return changed
        # Where this kind of message begins differs: one more of it is a good source.
        return mutate(rng, data, (), make(target, "other", seed))[:most]

    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-timeout={int(target.seconds * 20)}",
            f"-rss_limit_mb={1024 + target.memory}",
            f"-artifact_prefix={directory}/",
            "-max_len=65536",
            "-print_final_stats=1",
            str(directory / "corpus"),
        ],
        target.run,
        custom_mutator=change,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
