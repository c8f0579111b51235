"""Files that fsspec opens (s3://, gs://, https://, hf://, memory://, ...): finding, identifying and reading them."""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from lmtrain.errors import ReadError, UserError, first_line

Found = Literal["file", "folder", "glob"]  # what an address or path names

# Names under which file systems report what changes with a file's bytes, the most reliable first.
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "Content-MD5", "content_md5", "Digest", "CRC", "checksum",
             "LastModified", "Last-Modified", "last_modified", "updated", "modified", "mtime", "created")  # fmt: skip
_BLOCK = 1 << 20  # bytes
_DOWNLOAD = "download the file and give its path"
_AT_ONCE = 16  # concurrent requests to a server about the files of a folder


@dataclass(frozen=True)
class Address:
    """A file of another file system, with the parts of Path's interface that readers use; str() is its full address."""

    fs: Any
    path: str  # in the form that `fs` expects
    whole: str
    size: int | None  # in bytes; None if the server doesn't report it
    version: str | None  # changes with the bytes; None if the server reports none

    def __str__(self) -> str:
        return self.whole

    @property
    def name(self) -> str:
        return PurePosixPath(self.path.partition("?")[0] if is_web(self.path) else self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def identity(self) -> list[Any]:
        """Returns values that identify the file's bytes; they are read and hashed only if no version is known."""
        return [self.whole, self.size, self.version or self._sha256()]

    def _sha256(self) -> str:
        try:
            with opened(self) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except OSError as error:
            raise ReadError(f"{self} can't be read: {error}") from None


File = Path | Address


def is_address(text: str) -> bool:
    return "://" in text


def is_web(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def size_of(file: File) -> int | None:
    """Returns the number of bytes as stored; None if a server doesn't report it."""
    return file.size if isinstance(file, Address) else file.stat().st_size


def find(text: str, key: str) -> tuple[Found, list[Address]]:
    """Returns what an address names (file, folder or glob) and its files, in the order that local ones would have.

    Raises:
        UserError: there is no such file, the protocol is unknown, or its package is missing.
        ReadError: the server can't be reached or returns an error.
    """
    where = f"{key}={text}"
    with _explained(where):
        fs, path = _file_system(text, where)
        fs.invalidate_cache()  # results of earlier listings
        kind, infos = _look_up(fs, path)
        rest = "".join(text.partition("::")[1:])  # the container of a nested address, zip://a.csv::s3://bucket/b.zip
        found = [_address(fs, info, rest) for info in infos]
    if not found:
        raise UserError(f"{where}: no such file or folder, and as a glob it matches nothing")
    return kind, sorted(found, key=lambda one: one.path.split("/"))


def refuse_changed(files: list[Address]) -> None:
    """Raises ReadError if their file system reports another size or version of a file now."""
    for file in files:
        with _explained(str(file)):
            file.fs.invalidate_cache()
            now = _address(file.fs, dict(file.fs.info(file.path)), "")
        if (now.size, now.version) != (file.size, file.version):
            raise ReadError(f"{file} was changed while it was read: start again once it is complete")


def download(files: list[Address], folder: Path) -> None:
    """Copies files into a folder, at their places relative to one another.

    Raises:
        ReadError: the server can't be reached or returns an error, or sent another number of bytes than it reports.
    """
    top = os.path.commonpath([PurePosixPath(file.path).parent for file in files])
    for file in files:
        target = folder / os.path.relpath(file.path, top)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _explained(str(file)):
            file.fs.get_file(file.path, str(target))
        if file.size is not None and target.stat().st_size != file.size:
            raise ReadError(f"{file}: {target.stat().st_size:,} of {file.size:,} bytes came: start again")


def _file_system(text: str, where: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    protocol = text.partition("://")[0].rpartition("::")[2]
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(text))
    except ImportError as error:
        known = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        missing = getattr(error.__cause__, "name", None) if known in ("", "fsspec") else known
        install = f"pip install {missing} fsspec=={fsspec.__version__}" if missing else first_line(error)
        raise UserError(f"{where}: {protocol}:// needs a package that is not installed: {install}") from None
    except ValueError as error:
        raise UserError(f"{where}: {first_line(error)}; fsspec opens s3://, gs://, https://, hf://, ...") from None


def _look_up(fs: Any, path: str) -> tuple[Found, list[dict[str, Any]]]:
    info = _info(fs, path)
    if info is not None and not _is_folder(info):
        return "file", [info]
    if info is not None:
        folder = str(info["name"]).rstrip("/") + "/"
        found = fs.find(folder, detail=True)
        return "folder", _with_sizes(fs, {p: i for p, i in found.items() if _is_data(str(p), folder)})
    matches = {p: i for p, i in fs.glob(path, detail=True).items() if i["type"] != "directory"}
    fixed = re.split(r"[*?\[]", path)[0].rpartition("/")[0] + "/"
    return "glob", _with_sizes(fs, {p: i for p, i in matches.items() if "/." in path or _is_data(str(p), fixed)})


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    """Returns the file system's information on the file or folder; None if it doesn't exist."""
    try:
        return dict(fs.info(path))
    except FileNotFoundError as error:  # HTTP's file system raises it for an unreachable server too
        cause = error.__cause__
        if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in (404, 410):
            return None
        raise


def _is_folder(info: dict[str, Any]) -> bool:
    """Returns whether a folder is named. HTTP treats pages that list a folder as files; their URLs end with a slash."""
    page = is_web(str(info["name"])) and "url" in info
    return info["type"] == "directory" or (page and (urlsplit(str(info["url"])).path or "/").endswith("/"))


def _is_data(path: str, folder: str) -> bool:
    """Returns False for hidden files and folders and for links that sort a server's listing of a folder."""
    inside = path.removeprefix(folder)
    return bool(inside) and not any(part.startswith((".", "?")) for part in inside.split("/"))


def _with_sizes(fs: Any, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the information on each file, requesting it for those whose size the listing of the folder lacks."""
    silent = [path for path, info in found.items() if info.get("size") is None]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found |= dict(zip(silent, pool.map(fs.info, silent), strict=True))
    return list(found.values())


def _address(fs: Any, info: dict[str, Any], rest: str) -> Address:
    path = str(info["name"])
    name = next((name for name in _VERSIONS if info.get(name) not in (None, "")), None)
    value = None if name is None else info[name]
    version = None if name is None else f"{name}={value.timestamp() if isinstance(value, datetime) else value}"
    return Address(fs, path, fs.unstrip_protocol(path) + rest, info.get("size"), version)


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turns the exceptions of the many libraries behind fsspec into one ReadError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise ReadError(f"{where} can't be read: {_why(error)}") from None


def _why(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error) or type(error).__name__


def opened(address: Address) -> IO[bytes]:
    """Opens the file at its beginning, as stored (not decompressed); it is seekable.

    Raises:
        OSError: it can't be opened or read; raised here or while reading.
    """
    return io.BufferedReader(_Reading(address), _BLOCK)


class _Reading(io.RawIOBase):
    """The bytes of an address as a raw stream. Exceptions of any library become OSErrors, as for a local file."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address, self._at = address, 0
        web = is_web(address.path)
        if web and address.size is None:
            raise OSError(f"its server doesn't say how long it is: {_DOWNLOAD}")
        options = {"size": address.size or 1} if web else {}  # otherwise the server would be asked for the size
        with self._as_os_error():
            self._file = address.fs.open(address.path, "rb", **options)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.address.size or 0)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        with self._as_os_error():
            self._file.seek(self._at)
            part = bytes(self._file.read(len(buffer)))
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            says_why = isinstance(error, OSError) and error.__cause__ is None
            if says_why or isinstance(error, MemoryError):
                raise
            if isinstance(error, ValueError) and is_web(self.address.path):
                raise OSError(f"its server sends only whole files (no range requests): {_DOWNLOAD}") from error
            raise OSError(_why(error)) from error
