"""The files of one checkpoint, in a folder on a disk, or in any file system of fsspec.

After `write` or `commit` has returned, the file survives a crash of the process; on a local disk, which is flushed,
also a crash of the machine. In an object store, that depends on the store.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import shutil
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from fabric.strategies.checkpoint.memory import buffer_of
from fabric.strategies.checkpoint.pace import Pace

Buffer: TypeAlias = "bytes | memoryview"
MAPPED = "is_mapped_checkpoint"
"""An attribute of a storage that is mapped from a checkpoint, and belongs to one tensor."""


class Storage(ABC):
    """The files of one checkpoint, by their names."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path that the user wrote."""

    @abstractmethod
    def write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True, pace: Pace | None = None) -> None:
        """Write a new file. `is_flushed=False`: it is needed only during the save, so it is not flushed to disk.

        `pace`: rests after each write, so that the rest of the machine is slowed down little.
        """

    @abstractmethod
    def commit(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically: a reader finds the old content or the new, never a part."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The contents of a small file. Raises: FileNotFoundError."""

    @abstractmethod
    def open(self, name: str, num_bytes: int) -> Contents:
        """A file of this length, to be read. Raises: ValueError: the file has another length."""

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


@final
class Contents:
    """The bytes of one file, as long as this object exists, even if the file is deleted meanwhile."""

    def __init__(self, tensor: Tensor, handle: int | None = None) -> None:
        self.tensor = tensor
        """All bytes, mapped if possible. Writing to the tensor changes no file."""
        self._handle = handle
        self._mapping: mmap.mmap | None = None
        self._mapped = set[int]()
        if handle is not None:
            weakref.finalize(self, os.close, handle)

    def map(self) -> None:
        """Map the file, if it has any bytes. Pages that are written to are copied: no file changes."""
        assert self._handle is not None
        if os.fstat(self._handle).st_size:
            self._mapping = mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)
            self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def mapped(self, offset_bytes: int, dtype: torch.dtype, shape: Sequence[int], *, within: int) -> Tensor | None:
        """A tensor to be kept, whose memory is mapped from the file, and is not part of a larger storage.

        `within`: where the piece with these bytes begins. Of each piece one tensor is mapped, because two would share
        memory: None for the second one, and if the file is not mapped.
        """
        if self._mapping is None or within in self._mapped:
            return None
        self._mapped.add(within)
        num_bytes = math.prod(shape) * dtype.itemsize
        content = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=offset_bytes)
        setattr(content.untyped_storage(), MAPPED, True)
        return content.view(dtype).view(shape).data  # no view, of which a base would be kept as well

    def copy_to(self, target: Tensor, offset_bytes: int) -> None:
        """Fill `target`, which is contiguous and on the CPU, with the bytes from `offset_bytes` on.

        A system call copies from the page cache in four fifths of the time that a copy from mapped pages takes.
        """
        content = target.detach().reshape(-1).view(torch.uint8)
        if self._handle is None or sys.platform == "win32":
            content.copy_(self.tensor[offset_bytes : offset_bytes + content.numel()])
            return
        left = buffer_of(content)
        while left.nbytes:
            num_read = os.preadv(self._handle, [left], offset_bytes)
            if num_read == 0:
                raise OSError(errno.EIO, "A file of the checkpoint became shorter while it was read")
            offset_bytes += num_read
            left = left[num_read:]


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

    def write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True, pace: Pace | None = None) -> None:
        self._write(name, blocks, is_flushed=is_flushed, pace=pace)
        if is_flushed:
            flush_folder(self._folder)

    def _write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True, pace: Pace | None = None) -> None:
        self._make()
        try:
            with (self._folder / name).open("xb", buffering=0) as file:
                for block in blocks:
                    _write_all(file.fileno(), memoryview(block), pace)
                if is_flushed:
                    os.fsync(file.fileno())
        except BaseException as error:
            self.remove(name)
            if isinstance(error, OSError) and error.errno is not None and error.errno in _FULL:
                raise OSError(error.errno, f"{os.strerror(error.errno)}: {self._space()}") from error
            raise

    def _make(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            taken = next((each for each in (self._folder, *self._folder.parents) if each.is_file()), self._folder)
            raise NotADirectoryError(
                errno.ENOTDIR, f"A checkpoint is a folder, but {str(taken)!r} is a file. Pass another path"
            ) from error

    def _space(self) -> str:
        """The limits of the disk, after the incomplete file was removed."""
        disk = shutil.disk_usage(self._folder)
        sentence = f"{self.path!r} is on a disk of {disk.total / 1e6:.1f} MB with {disk.free / 1e6:.1f} MB free"
        if sys.platform != "win32":
            import resource

            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            if limit != resource.RLIM_INFINITY:
                sentence += f", and no more than {limit / 1e6:.1f} MB may be written to one file (`ulimit -f`)"
        return sentence

    def commit(self, name: str, content: bytes) -> None:
        beside = f"{name}.new"
        self.remove(beside)
        self._write(beside, [content])
        (self._folder / beside).replace(self._folder / name)
        flush_folder(self._folder)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def open(self, name: str, num_bytes: int) -> Contents:
        handle = os.open(self._folder / name, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        contents = Contents(torch.empty(0, dtype=torch.uint8), handle)  # closes it
        found = os.fstat(handle).st_size
        if found != num_bytes:
            raise ValueError(f"`{name}` has {found} bytes, but {num_bytes} were written.")
        contents.map()
        return contents

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
        self._make()
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

    def write(self, name: str, blocks: Iterable[Buffer], *, is_flushed: bool = True, pace: Pace | None = None) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        with self._system.open(self._at(name), "wb") as file:
            for block in blocks:
                file.write(block)

    def commit(self, name: str, content: bytes) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(self._at(name), content)

    def read(self, name: str) -> bytes:
        return bytes(self._system.cat_file(self._at(name)))

    def open(self, name: str, num_bytes: int) -> Contents:
        content = bytearray(self._system.cat_file(self._at(name)))
        if len(content) != num_bytes:
            raise ValueError(f"`{name}` has {len(content)} bytes, but {num_bytes} were written.")
        return Contents(torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8))

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


def _write_all(handle: int, block: memoryview, pace: Pace | None) -> None:
    """Write the next bytes of a file, of which the system may take a part at a time."""
    while block.nbytes:
        begun = time.monotonic()
        block = block[os.write(handle, block) :]
        if pace is not None:
            pace.rest(time.monotonic() - begun)


_FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if name in dir(errno)}


def _nothing() -> None:
    pass


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: without that, a power cut may undo a rename."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
