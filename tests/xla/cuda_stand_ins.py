"""Let PyPI's torch 2.9 be imported without CUDA: make an empty library for each of CUDA's that it is linked to.

torch_xla 2.9 needs torch 2.9, whose Linux wheels on PyPI are for CUDA alone; CUDA's own wheels are 3.7 GB that nothing
here runs. Each stand-in has the name, the symbols and the versions that torch's libraries ask for, and every function
returns 100, `cudaErrorNoDevice`: torch finds no device, and the processor works. Needs `cc` and `readelf`.

    python tests/xla/cuda_stand_ins.py      writes beside the libraries of the torch that this Python imports
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

OF_CUDA = re.compile(r"lib(cu|nccl|nvshmem)\w*\.so\.\d+")
FUNCTION = re.compile(r"(cu[A-Za-z]|nccl|nvshmem)\w*")


def main() -> None:
    """Make what is missing; what is there stays."""
    folder = Path(sysconfig.get_paths()["purelib"], "torch", "lib")
    libraries = [path for path in sorted(folder.glob("*.so*")) if not OF_CUDA.fullmatch(path.name)]
    needed = {name for path in libraries for name in needs(path) if OF_CUDA.fullmatch(name)}
    homes = {version: name for path in libraries for version, name in versions(path).items()}
    symbols: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in sorted(needed)}
    anywhere = min(needed)  # a reference without a version is met by any library
    for path in libraries:
        for function, version in undefined(path):
            if version in homes and homes[version] in symbols:
                symbols[homes[version]][version].add(function)
            elif not version and FUNCTION.fullmatch(function):
                symbols[anywhere][""].add(function)
    for name, by_version in symbols.items():
        if not (folder / name).exists():
            build(folder / name, by_version, [version for version, home in homes.items() if home == name])


def needs(library: Path) -> list[str]:
    """The names of the libraries that it is linked to."""
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", read("-d", library))


def versions(library: Path) -> dict[str, str]:
    """Each version of symbols that it asks for, with the library that it asks for it."""
    found, home = {}, ""
    for line in read("-V", library).splitlines():
        if of := re.search(r"File: (\S+)", line):
            home = of[1]
        elif (name := re.search(r"Name: (\S+)\s+Flags", line)) and OF_CUDA.fullmatch(home):
            found[name[1]] = home
    return found


def undefined(library: Path) -> list[tuple[str, str]]:
    """The functions that it expects of others, each with its version or an empty word."""
    rows = (line.split() for line in read("--dyn-syms", library).splitlines())
    names = [row[7] for row in rows if len(row) > 7 and row[6] == "UND" and row[4] == "GLOBAL"]
    return [(name.partition("@")[0], name.partition("@")[2].lstrip("@")) for name in names]


def build(path: Path, by_version: dict[str, set[str]], all_versions: list[str]) -> None:
    """Compile a library of functions that do nothing."""
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for names in by_version.values() for name in sorted(names))
    script = ""
    for version in all_versions:
        names = "".join(f" {name};" for name in sorted(by_version.get(version, ())))
        script += f"{version} {{ {'global:' if names else ''}{names} }};\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stand_in.c").write_text(source)
        Path(folder, "stand_in.map").write_text(script)
        map_option = [f"-Wl,--version-script={folder}/stand_in.map"] if script else []
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}", *map_option]
        subprocess.run(["cc", *options, "-o", str(path), f"{folder}/stand_in.c"], check=True)


def read(option: str, library: Path) -> str:
    """What `readelf` says of a library."""
    return subprocess.run(["readelf", "-W", option, str(library)], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
