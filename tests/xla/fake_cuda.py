"""Build fake CUDA libraries, so that PyPI's torch 2.9 can be imported without CUDA.

torch_xla 2.9 needs torch 2.9, whose Linux wheels on PyPI require CUDA; CUDA's own wheels are 3.7 GB, and are not used
here. Each fake library has the name, symbols and symbol versions that torch's libraries need, and every function
returns 100, `cudaErrorNoDevice`: torch finds no device, and runs on the CPU. Needs `cc` and `readelf`.

    python tests/xla/fake_cuda.py      writes into the library folder of this Python's torch
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
    """Build the libraries that are missing."""
    folder = Path(sysconfig.get_paths()["purelib"], "torch", "lib")
    libraries = [path for path in sorted(folder.glob("*.so*")) if not OF_CUDA.fullmatch(path.name)]
    needed = {name for path in libraries for name in needs(path) if OF_CUDA.fullmatch(name)}
    homes = {version: name for path in libraries for version, name in versions(path).items()}
    symbols: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in sorted(needed)}
    anywhere = min(needed)  # symbols without a version may be in any library
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
    """The names of the libraries that a library is linked to."""
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", read("-d", library))


def versions(library: Path) -> dict[str, str]:
    """Each symbol version that a library needs, with the library that has it."""
    found, home = {}, ""
    for line in read("-V", library).splitlines():
        if of := re.search(r"File: (\S+)", line):
            home = of[1]
        elif (name := re.search(r"Name: (\S+)\s+Flags", line)) and OF_CUDA.fullmatch(home):
            found[name[1]] = home
    return found


def undefined(library: Path) -> list[tuple[str, str]]:
    """The undefined functions of a library, each with its symbol version or an empty string."""
    rows = (line.split() for line in read("--dyn-syms", library).splitlines())
    names = [row[7] for row in rows if len(row) > 7 and row[6] == "UND" and row[4] == "GLOBAL"]
    return [(name.partition("@")[0], name.partition("@")[2].lstrip("@")) for name in names]


def build(path: Path, by_version: dict[str, set[str]], all_versions: list[str]) -> None:
    """Compile a library of functions that return 100."""
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for names in by_version.values() for name in sorted(names))
    script = ""
    for version in all_versions:
        names = "".join(f" {name};" for name in sorted(by_version.get(version, ())))
        script += f"{version} {{ {'global:' if names else ''}{names} }};\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fake.c").write_text(source)
        Path(folder, "fake.map").write_text(script)
        map_option = [f"-Wl,--version-script={folder}/fake.map"] if script else []
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}", *map_option]
        subprocess.run(["cc", *options, "-o", str(path), f"{folder}/fake.c"], check=True)


def read(option: str, library: Path) -> str:
    """The output of `readelf` for a library."""
    return subprocess.run(["readelf", "-W", option, str(library)], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
