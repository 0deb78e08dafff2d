"""The files of one checkpoint, in a folder on a disk, or in any file system of fsspec.

After `write` or `commit` has returned, the file survives a crash of the process; on a local disk, which is flushed,
also a crash of the machine. In an object store, that depends on the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, final

import torch
from torch import Tensor

Buffer: TypeAlias = "bytes | memoryview"


class Storage(ABC):
    """The files of one checkpoint, by their names."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path that the user wrote."""

    @abstractmethod
    def write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True) -> None:
        """Write a new file. `is_flushed=False`: it is needed only during the save, so it is not flushed to disk."""

    @abstractmethod
    def commit(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically: a reader finds the old content or the new, never a part."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The contents of a small file. Raises: FileNotFoundError."""

    @abstractmethod
    def open(self, name: str, num_bytes: int) -> Tensor:
        """The bytes of a file of this length, mapped if possible, even if the file is deleted meanwhile.

        Raises: ValueError: the file has another length.
        """

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of all files; none if the folder does not exist."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""

    @abstractmethod
    def folders(self) -> Sequence[str]:
        """The names of the folders in this one; none if it does not exist."""

    @abstractmethod
    def inside(self, folder: str) -> Storage:
        """A folder in this one."""

    @abstractmethod
    def lock(self) -> Callable[[], None]:
        """Lock the folder against other jobs that save to it, where the file system can. Returns a function to unlock.

        A process that ends unlocks. Raises: OSError: another job holds the lock.
        """

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

    def write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self._folder / name).open("xb") as file:
                file.writelines(blocks)
                if is_flushed:
                    _flush(file)
        except BaseException:
            self.remove(name)
            raise
        if is_flushed:
            _flush_folder(self._folder)

    def commit(self, name: str, content: bytes) -> None:
        with replacing(self._folder / name) as file:
            file.write(content)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def open(self, name: str, num_bytes: int) -> Tensor:
        path = self._folder / name
        _check_length(name, path.stat().st_size, num_bytes)
        # Mapped copy-on-write, so that whoever writes to the tensor changes no file.
        return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)

    def names(self) -> Sequence[str]:
        try:
            return [each.name for each in os.scandir(self._folder) if each.is_file()]
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / name).unlink()

    def folders(self) -> Sequence[str]:
        try:
            return [each.name for each in os.scandir(self._folder) if each.is_dir()]
        except FileNotFoundError:
            return []

    def inside(self, folder: str) -> Folder:
        return Folder(self._folder / folder)

    def lock(self) -> Callable[[], None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":
            return _nothing
        import fcntl

        handle = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise OSError(error.errno, "Another process is saving to this folder. Save to another one") from error
            return _nothing  # some network file systems lock no folders

        def unlock() -> None:
            fcntl.flock(handle, fcntl.LOCK_UN)  # processes that were forked meanwhile hold the handle as well
            os.close(handle)

        return unlock

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

    def write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        with self._system.open(self._at(name), "wb") as file:
            for block in blocks:
                file.write(block)

    def commit(self, name: str, content: bytes) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(self._at(name), content)

    def read(self, name: str) -> bytes:
        return bytes(self._system.cat_file(self._at(name)))

    def open(self, name: str, num_bytes: int) -> Tensor:
        content = bytearray(self._system.cat_file(self._at(name)))
        _check_length(name, len(content), num_bytes)
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def names(self) -> Sequence[str]:
        self._system.invalidate_cache(self._root)
        if not self._system.isdir(self._root):
            return []
        return self._listed("file")

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def folders(self) -> Sequence[str]:
        self._system.invalidate_cache(self._root)
        return self._listed("directory") if self._system.isdir(self._root) else []

    def inside(self, folder: str) -> Remote:
        return Remote(f"{self._address}/{folder}")

    def lock(self) -> Callable[[], None]:
        return _nothing

    def discard(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._root, recursive=True)

    def _listed(self, kind: str) -> list[str]:
        found = self._system.ls(self._root, detail=True)
        return [str(each["name"]).rstrip("/").rsplit("/", 1)[-1] for each in found if each["type"] == kind]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


def _check_length(name: str, found: int, num_bytes: int) -> None:
    if found != num_bytes:
        raise ValueError(f"`{name}` has {found} bytes, but {num_bytes} were written.")


def _nothing() -> None:
    pass


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context with a new file, which replaces the one at `path` atomically once it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("wb") as file:
            yield file
            _flush(file)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: without that, a power cut may undo a rename."""
    if os.name == "posix":
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
