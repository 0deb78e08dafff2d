"""Build the pretended CUDA runtime into this Python's environment, for the CUDA build of torch that is installed there.

    python tests/device/runtime/build.py

What comes to be is a package `pretended_cuda` and a `.pth` file that imports it: from then on, every program that this
Python runs has devices. NVIDIA's headers are downloaded into a folder that is removed; nothing else of NVIDIA is used.
Each library has the name that torch's libraries ask for; what is not written here is a function that returns an error.
Needs g++ and readelf, and half a minute.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
TORCH = SITE / "torch"
PACKAGE = SITE / "pretended_cuda"

OF_NVIDIA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)\w*\.so\.\d+")
FUNCTION = re.compile(r"(cu[A-Za-z]|__cuda|nccl|nvrtc|nvshmem)\w*")
VALUES = {"cudnnGetVersion": 92000, "cudnnGetCudartVersion": 13000}
"""What functions return that torch asks at its import. All others return 801, which is CUDA's `not supported`."""
FOLDERS = {
    "libcudart": "cuda",
    "libnccl": "nccl",
    "libcuda": "driver",
    "libnvidia-ml": "management",
    "libcupti": "profiling",
}
"""Where the sources of a library are, by the beginning of its name."""
MANAGEMENT = "libnvidia-ml.so.1"
OPENED = {"libcuda.so.1", MANAGEMENT}
"""Which torch opens by name, and is not linked to."""
ANY_OTHER = "libpretended_others.so"
"""Has the functions that may be in any library, because torch asks for no version of them."""
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-Wall")


def main() -> None:
    """Build everything anew."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    libraries = PACKAGE / "lib"
    libraries.mkdir(parents=True)
    needed = Needed()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        objects = compiled(work, nvidia_headers(work))
        refused = needed.functions.difference(*map(defined, objects.values()))
        # The runtime first: others are linked to it.
        for name in sorted(needed.libraries | OPENED, key=lambda name: not name.startswith("libcudart")):
            written = [made for folder, made in objects.items() if folder == FOLDERS.get(name.split(".")[0])]
            link(libraries / name, written, needed.versions.get(name, {}) | asked_of(name), work, libraries)
        link(libraries / ANY_OTHER, [], dict.fromkeys(refused, ""), work, libraries)
        torch = [f"-L{TORCH / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        run("g++", "-shared", objects["kernels"], *libraries.glob("libcudart.*"), *torch, "-o", PACKAGE / "kernels.so")
    shutil.copy(HERE / "boot.py", PACKAGE / "__init__.py")
    shutil.copy(HERE / "cuda_only.py", PACKAGE)
    (SITE / "pretended_cuda.pth").write_text("import pretended_cuda\n")


def nvidia_headers(work: Path) -> Path:
    """The headers of the CUDA version that torch was built for."""
    version = re.search(r"^cuda: .* = '([\d.]+)'", (TORCH / "version.py").read_text(), re.MULTILINE)
    if version is None:
        raise SystemExit(f"{TORCH} is not a CUDA build of torch.")
    wanted = [f"nvidia-cuda-runtime=={version[1]}.*", f"nvidia-cuda-crt=={version[1]}.*"]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, *wanted]
    subprocess.run(download, check=True)
    for wheel in work.glob("nvidia_cuda_*.whl"):
        with ZipFile(wheel) as files:
            files.extractall(work / "nvidia", [name for name in files.namelist() if "/include/" in name])
    return next((work / "nvidia").rglob("cuda_runtime_api.h")).parent


class Needed:
    """What torch's libraries need of NVIDIA's: their names, and functions with the version of each, if it has one."""

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self.versions: dict[str, dict[str, str]] = {}
        """Of a library: the version of a function."""
        self.functions: set[str] = set()
        """Those without a version, which may be in any library."""
        for path in sorted((TORCH / "lib").glob("*.so*")):
            self.libraries.update(filter(OF_NVIDIA.fullmatch, re.findall(r"\(NEEDED\).*\[(.+?)\]", read("-d", path))))
            homes = self._homes(path)
            for row in map(str.split, read("--dyn-syms", path).splitlines()):
                if len(row) < 8 or row[6] != "UND":
                    continue
                name, _, version = row[7].partition("@")
                if version in homes:
                    self.versions.setdefault(homes[version], {})[name] = version
                elif not version and FUNCTION.fullmatch(name):
                    self.functions.add(name)

    @staticmethod
    def _homes(path: Path) -> dict[str, str]:
        """Each version that a library needs, with the library that has it."""
        homes, home = {}, ""
        for line in read("-V", path).splitlines():
            if of := re.search(r"File: (\S+)", line):
                home = of[1]
            elif (version := re.search(r"Name: (\S+)\s+Flags", line)) and OF_NVIDIA.fullmatch(home):
                homes[version[1]] = home
        return homes


def asked_of(name: str) -> dict[str, str]:
    """The functions that torch looks up in the management library; it ends where one is missing."""
    if name != MANAGEMENT:
        return {}
    found = re.findall(rb"\0(nvml[A-Z]\w+)(?=\0)", (TORCH / "lib/libc10_cuda.so").read_bytes())
    return {function.decode(): "" for function in found}


def compiled(work: Path, nvidia: Path) -> dict[str, Path]:
    """The object file of each folder, whose sources are compiled as one: torch's headers take most of the time."""
    python = sysconfig.get_paths()["include"]
    includes = [f"-I{path}" for path in (nvidia, TORCH / "include", TORCH / "include/torch/csrc/api/include", python)]
    objects = {folder.name: work / f"{folder.name}.o" for folder in {path.parent for path in HERE.glob("*/*.cpp")}}

    def compile_one(folder: str) -> None:
        every = work / f"{folder}.cpp"
        every.write_text("".join(f'#include "{path}"\n' for path in sorted((HERE / folder).glob("*.cpp"))))
        run("g++", *OPTIONS, *includes, "-c", every, "-o", objects[folder])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sorted(objects, key="kernels".__ne__)))  # they take longest
    return objects


def link(path: Path, objects: list[Path], versions: dict[str, str], work: Path, libraries: Path) -> None:
    """Make a library of what is written of it, and of functions that return an error. `versions`: what it must have."""
    refused = work / f"{path.name}.c"
    missing = sorted(set(versions).difference(*map(defined, objects)))
    refused.write_text("".join(f"int {name}(void) {{ return {VALUES.get(name, 801)}; }}\n" for name in missing))
    script = work / f"{path.name}.map"
    names: dict[str, list[str]] = {}
    for name, version in versions.items():
        names.setdefault(version, []).append(name)
    script.write_text("".join(f"{of} {{ global: {'; '.join(names[of])}; }};\n" for of in names if of))
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    if any(names):
        options.append(f"-Wl,--version-script={script}")
    runtime = [] if path.name.startswith("libcudart") else libraries.glob("libcudart.*")
    run("g++", *options, "-x", "c", refused, "-x", "none", *objects, *runtime, "-lpthread", "-o", path)


def defined(library: Path) -> set[str]:
    """The functions that an object file defines."""
    rows = (line.split() for line in read("--syms", library).splitlines())
    return {row[7] for row in rows if len(row) > 7 and row[4] == "GLOBAL" and row[6] != "UND"}


def read(option: str, library: Path) -> str:
    """The output of `readelf` for a file."""
    return subprocess.run(["readelf", "-W", option, str(library)], check=True, capture_output=True, text=True).stdout


def run(*words: str | Path) -> None:
    """Run a command, which prints what is wrong."""
    subprocess.run(list(map(str, words)), check=True)


if __name__ == "__main__":
    main()
