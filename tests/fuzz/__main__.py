"""Coverage-guided fuzzing: the daemon's readers by atheris (libFuzzer for Python), the shim by libFuzzer itself.

    python -m pip install atheris
    python -m tests.fuzz TARGET [--seconds N] [--work DIR]   # one of `targets`, shim (gcc), largest, ports
    python -m tests.fuzz TARGET --keep N [--work DIR]        # N of what it found into the corpus
    python -m tests.fuzz TARGET --add FILE...                # each file as an input into the corpus

Begins from `tests/data/corpus/TARGET.txt` and the seeds in `targets`. A fault, one input taking more than a second of
processor time, or more memory than `MEMORY_MIB`, ends the run; the input is then in `DIR/TARGET-crash-*`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from multus_shim import build
from tests.fuzz import corpus
from tests.programs import needed

SECONDS_OF_ONE_INPUT = 10.0
LARGEST = "largest"
"""The target for which a whole daemon runs; as root."""
LONGEST = 64 * 1024
KEPT_MAX = 2048
MEMORY_MIB = 1024
_HEAD = b"\0HTTP/1.1 200 OK\r\nContent-Type: application/vnd.multus.cni-stdout\r\n"
SHIM_SEEDS = (
    # The first byte chooses the reader.
    _HEAD + b"Content-Length: 2\r\n\r\n{}",
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nX: y\r\n\r\n",
    b"\0HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 400 Bad\r\nContent-Length: 0\r\n\r\n",
    b'\1{"name":"n","cniVersion":"1.1.0","daemonSocketDir":"/run/\\ud83d\\ude00","cniDir":"/a",'
    b'"logToStderr":false,"logOptions":{"maxSize":1.5e1,"y":0.25E-2},"x":[null,true,-1e9,{"y":[]}]}',
)


def fuzz(name: str, seconds: int, work: Path) -> None:
    """Does not return: libFuzzer ends the process, with 77 where it found a fault."""
    import atheris

    with atheris.instrument_imports(include=["multus_daemon"]):
        from tests.fuzz import largest, targets

    logging.disable()
    if name == LARGEST:
        atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", f"-artifact_prefix={work}/{name}-"], largest.run)
        atheris.Fuzz()

    def one(data: bytes) -> None:
        started = time.process_time()
        targets.run(name, data)
        if (took := time.process_time() - started) > SECONDS_OF_ONE_INPUT:
            raise AssertionError(f"{len(data)} bytes took {took:.1f} s")

    found = _folder(work / name, targets.seeds(name))
    options = [
        f"-max_total_time={seconds}", f"-max_len={LONGEST}", f"-rss_limit_mb={MEMORY_MIB}", "-timeout=60",
        f"-artifact_prefix={work}/{name}-", "-print_final_stats=1", "-verbosity=1",
    ]  # fmt: skip
    known = _folder(work / f"{name}-corpus", corpus.read(name))
    atheris.Setup([sys.argv[0], *options, str(found), str(known)], one)
    atheris.Fuzz()


def fuzz_shim(seconds: int, work: Path) -> int:
    """The exit status: 0, or libFuzzer's where it found a fault."""
    import atheris

    folders = [_folder(work / "shim", SHIM_SEEDS), _folder(work / "shim-corpus", corpus.read("shim"))]
    program = _build_shim(work, Path(atheris.path()) / "libclang_rt.fuzzer_no_main.a")
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 1:
        # The shim gives no memory back: it lives for one call. So a new process after some of them.
        options = [
            "-runs=20000", f"-max_total_time={left:.0f}", f"-max_len={LONGEST}", f"-rss_limit_mb={2 * MEMORY_MIB}",
            "-timeout=20", "-use_value_profile=1", f"-artifact_prefix={work}/shim-", "-print_final_stats=1",
        ]  # fmt: skip
        if status := subprocess.run([str(program), *options, *map(str, folders)]).returncode:
            return status
    return 0


def _folder(path: Path, inputs: Iterable[bytes]) -> Path:
    """Write each input to a file, as libFuzzer reads them."""
    path.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (path / hashlib.sha1(data).hexdigest()).write_bytes(data)
    return path


def compile_shim(work: Path, *, check_only: bool = False) -> Path:
    """The object file of the shim's parsers and libFuzzer's entry into them, made in `work`; or only a look for errors.

    Raises CalledProcessError.
    """
    here = Path(__file__).parent
    sources, made = work / "shim-sources", work / "shim.o"
    sources.mkdir(parents=True, exist_ok=True)
    for path in [*(here.parent.parent / "multus_shim").glob("*.zig"), here / "shim.zig"]:
        shutil.copyfile(path, sources / ("fuzz.zig" if path.parent == here else path.name))
    options = work / "build_options.zig"
    options.write_text(build.options(), "utf-8")
    zig = [sys.executable, "-m", "ziglang", "build-obj", "-O", "safe", "-ffuzz", "-fcompiler-rt", "-fPIC"]
    emit = "-fno-emit-bin" if check_only else f"-femit-bin={made}"
    modules = ["--dep", "build_options", f"-Mroot={sources / 'fuzz.zig'}", f"-Mbuild_options={options}"]
    subprocess.run([*zig, emit, *modules], check=True)
    return made


def _build_shim(work: Path, library: Path) -> Path:
    """The same with libFuzzer around it, a program."""
    program, parsers = work / "shim-fuzzer", compile_shim(work)
    subprocess.run(
        [needed("gcc"), "-c", str(Path(__file__).parent / "shim.c"), "-o", f"{work}/shim-main.o"], check=True
    )
    objects = [f"{work}/shim-main.o", str(parsers), str(library), "-lpthread", "-ldl", "-lm"]
    subprocess.run([needed("g++"), "-o", str(program), *objects], check=True)
    return program


def keep(name: str, count: int, work: Path) -> None:
    """Copy `count` of the inputs that were found into the corpus, from the shortest to the longest of `KEPT_MAX` bytes.

    libFuzzer kept each of them for something that no other reaches.
    """
    found = sorted((path.read_bytes() for path in (work / name).iterdir()), key=lambda data: (len(data), data))
    small = [data for data in found if len(data) <= KEPT_MAX]
    corpus.add(name, {small[number * len(small) // count] for number in range(count)})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--add", type=Path, nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "multus-fuzz")
    given = parser.parse_args()
    if given.add:
        corpus.add(given.target, [path.read_bytes() for path in given.add])
    elif given.keep:
        keep(given.target, given.keep, given.work)
    elif given.target == "shim":
        sys.exit(fuzz_shim(given.seconds, given.work))
    elif given.target == "ports":
        from tests.fuzz import ports

        logging.disable()
        sys.exit(ports.main(given.seconds))
    else:
        fuzz(given.target, given.seconds, given.work)


if __name__ == "__main__":
    main()
