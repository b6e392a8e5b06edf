"""Compiles the kernels once per source and instruction set, and finds them again.

The library lies beside these sources (an image that was built with them), else in the `kernels`
folder of BATON_HOME. Two processes may build at once: each writes a file of its own and
renames it. A machine without a compiler goes on with torch.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"
_COMMON = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-mprefer-vector-width=512")
# GCC calls the undefined lanes of its own intrinsics uninitialised.
_WARNINGS = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
_TIMEOUT_S = 300

VARIANTS = {
    "amx": ("amx_tile", "amx_bf16", "avx512_bf16", "avx512_vbmi2"),
    "avx512": ("avx512_bf16", "avx512bw", "avx512vl", "avx512dq"),
}
"""Best first: name → the CPU flags (as /proc/cpuinfo spells them) that it needs."""

_TARGETS = {
    "amx": ("-march=sapphirerapids",),
    "avx512": ("-march=x86-64-v4", "-mavx512bf16"),
}


class BuildError(RuntimeError):
    """A sentence that says why there are no kernels."""


def supported(flags: frozenset[str]) -> list[str]:
    """Variants that a CPU with these flags runs, best first."""
    return [name for name, needed in VARIANTS.items() if flags.issuperset(needed)]


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def library(variant: str) -> Path:
    """The compiled variant, built now if it is not there. BuildError if it cannot be."""
    name = _file_name(variant)
    for folder in _folders():
        if (folder / name).is_file():
            return folder / name
    return _compile(variant, _folders()[-1] / name)


def bundle(folder: Path | None = None) -> list[Path]:
    """Every variant, whatever this CPU is, in the package's own folder: what an image or a wheel
    carries, so that its users need no compiler. BuildError if one cannot be built."""
    folder = folder or _folders()[0]
    return [_compile(variant, folder / _file_name(variant)) for variant in VARIANTS]


def _file_name(variant: str) -> str:
    return f"baton-kernels-{variant}-{_fingerprint(variant)}.so"


def _folders() -> list[Path]:
    home = Path(os.environ.get("BATON_HOME") or "~/.cache/baton").expanduser()
    return [Path(__file__).parent / "lib", home / "kernels"]


def _sources() -> list[Path]:
    return sorted(_SOURCES.glob("*.cpp"))


def _fingerprint(variant: str) -> str:
    digest = hashlib.sha256(" ".join((*_COMMON, *_TARGETS[variant])).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(variant: str, target: Path) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) was found")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            options = (*_COMMON, *_WARNINGS, *_TARGETS[variant])
            subprocess.run(
                [compiler, *options, *map(str, _sources()), "-o", str(built)],
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
            built.replace(target)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[:300]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the kernels could not be built: {error}") from error
    return target


def main(arguments: list[str]) -> int:
    """`python -m baton.engine.ops.cpu.build`: builds what this machine can run; with `--bundle`
    all variants into the package, and their absence is an error."""
    if arguments == ["--bundle"]:
        return _bundle()
    if arguments:
        print("usage: python -m baton.engine.ops.cpu.build [--bundle]", file=sys.stderr)
        return 2
    variants = supported(cpu_flags())
    if not variants:
        print("This CPU has no AVX512-BF16: Baton uses torch's own kernels.")
    for variant in variants:
        try:
            print(f"CPU kernels ({variant}): {library(variant)}")
        except BuildError as error:
            print(f"No CPU kernels ({variant}), torch's own are used: {error}")
    return 0


def _bundle() -> int:
    try:
        print(*bundle(), sep="\n")
    except BuildError as error:
        print(f"No CPU kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
