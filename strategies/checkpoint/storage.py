"""The files of one checkpoint, in a folder on a disk, or in any file system of fsspec.

After `write` or `commit` has returned, the file survives a crash of the process; on a local disk, which is flushed,
also a crash of the machine. In an object store, that depends on the store.
"""

import contextlib
import ctypes
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, final

import torch
from torch import Tensor

Buffer: TypeAlias = bytes | memoryview


class Storage(ABC):
    """The files of one checkpoint, by their names."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path that the user wrote."""

    @abstractmethod
    def write(self, name: str, blocks: Iterable[Buffer]) -> None:
        """Write a new file."""

    @abstractmethod
    def commit(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically: a reader finds the old content or the new, never a part."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The contents of a small file. Raises: FileNotFoundError."""

    @abstractmethod
    def open(self, name: str) -> Tensor:
        """The bytes of a file, mapped if possible, even if the file is deleted meanwhile."""

    @abstractmethod
    def entries(self) -> Mapping[str, bool]:
        """What is in the folder, by name, each with whether it is a folder. Nothing if the folder does not exist."""

    def names(self) -> Sequence[str]:
        """The names of all files; none if the folder does not exist."""
        return [name for name, is_folder in self.entries().items() if not is_folder]

    def folders(self) -> Sequence[str]:
        """The names of the folders in this one; none if it does not exist."""
        return [name for name, is_folder in self.entries().items() if is_folder]

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""

    def inside(self, folder: str) -> "Storage":
        """A folder in this one."""
        return storage_of(f"{self.path}/{folder}")

    @abstractmethod
    def discard(self) -> None:
        """Delete the folder with its contents. Raises: OSError: it could not be deleted."""


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """The storage at a path; an address with `://` is opened by fsspec. Raises: TypeError, ValueError: not a path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"The path of a checkpoint is {path!r}, a `{type(path).__name__}`. Pass a string or a `Path`.")
    if not text:
        raise ValueError("The path of a checkpoint is empty. Pass the path of a folder, such as 'runs/1/last'.")
    return Remote(text) if "://" in text else Folder(local_path(text))


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path on a disk, with `~` replaced by the user's folder."""
    return Path(path).expanduser()


@final
class Folder(Storage):
    """A folder in a file system that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def path(self) -> str:
        return str(self._folder)

    def write(self, name: str, blocks: Iterable[Buffer]) -> None:
        with replacing(self._folder / name) as file:
            file.writelines(blocks)

    def commit(self, name: str, content: bytes) -> None:
        self.write(name, [content])

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def open(self, name: str) -> Tensor:
        path = self._folder / name
        # Mapped copy-on-write, so that whoever writes to the tensor changes no file.
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def entries(self) -> Mapping[str, bool]:
        try:
            return {each.name: each.is_dir() for each in os.scandir(self._folder)}
        except FileNotFoundError:
            return {}

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / name).unlink()

    def discard(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder)


@final
class Remote(Storage):
    """An address of fsspec: `s3://bucket/run/step-100`, `memory://checkpoint`."""

    def __init__(self, address: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._address = address.rstrip("/")
        self._system: Any
        self._system, self._root = fsspec.core.url_to_fs(self._address)

    @property
    def path(self) -> str:
        return self._address

    def write(self, name: str, blocks: Iterable[Buffer]) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        with self._system.open(self._at(name), "wb") as file:
            for block in blocks:
                file.write(block)

    def commit(self, name: str, content: bytes) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(self._at(name), content)

    def read(self, name: str) -> bytes:
        return bytes(self._system.cat_file(self._at(name)))

    def open(self, name: str) -> Tensor:
        content = bytearray(self._system.cat_file(self._at(name)))
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def entries(self) -> Mapping[str, bool]:
        self._system.invalidate_cache(self._root)
        found = self._system.ls(self._root, detail=True) if self._system.isdir(self._root) else []
        return {str(each["name"]).rstrip("/").rsplit("/", 1)[-1]: each["type"] == "directory" for each in found}

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def discard(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._root, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context with a new file, which replaces the one at `path` atomically once it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where the system can: without that, a power cut may undo a rename."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def buffer_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes that can be written to. It keeps the tensor alive.

    Not by `Tensor.numpy()`: torch installs without NumPy.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(bytearray())
    content: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    content.tensor = tensor
    return memoryview(content).cast("B")
