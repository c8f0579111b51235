"""Files that fsspec opens (s3://, gs://, https://, hf://, memory://, ...): found, told from others, read."""

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from lmtrain.errors import ReadError, UserError, first_line

Found = Literal["file", "folder", "glob"]  # what was named

# What file systems call that which changes with a file's bytes, the surest first.
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "Content-MD5", "content_md5", "Digest", "CRC", "checksum",
             "LastModified", "Last-Modified", "last_modified", "updated", "modified", "mtime", "created")  # fmt: skip
_BLOCK = 1 << 20  # bytes
_AT_ONCE = 16  # questions to a server about files of a folder


@dataclass(frozen=True)
class Address:
    """A file of another file system, with as much of a Path as readers ask for; its string is its whole address."""

    fs: Any
    path: str  # as `fs` takes it
    whole: str
    size: int | None  # in bytes; None where a server doesn't say
    version: str | None  # of its bytes; None where a server says nothing of it

    def __str__(self) -> str:
        return self.whole

    @property
    def name(self) -> str:
        return PurePosixPath(self.path.partition("?")[0] if is_web(self.path) else self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    def identity(self) -> list[Any]:
        """What tells its bytes from others without reading them; they are read only where nothing else is known."""
        return [self.whole, self.size, self.version or self._sha256()]

    def _sha256(self) -> str:
        with opened(self) as file:
            try:
                return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            except OSError as error:
                raise ReadError(f"{self} can't be read: {error}") from None


File = Path | Address


def is_address(text: str) -> bool:
    return "://" in text


def is_web(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def size_of(file: File) -> int | None:
    """Bytes as they are stored; None where a server doesn't say."""
    return file.size if isinstance(file, Address) else file.stat().st_size


def find(text: str, key: str) -> tuple[Found, list[Address]]:
    """The files of an address, folder or glob, in the order that local ones would have, and which of these it is.

    Raises:
        UserError: there is no such file, the protocol is unknown, or its package is missing.
        ReadError: the server can't be asked.
    """
    where = f"{key}={text}"
    with _explained(where):
        fs, path = _file_system(text, where)
        fs.invalidate_cache()  # what an earlier look found
        kind, infos = _look_up(fs, path)
        rest = "".join(text.partition("::")[1:])  # of an address inside another, zip://a.csv::s3://bucket/b.zip
        found = [_address(fs, info, rest) for info in infos]
    if not found:
        raise UserError(f"{where}: no such file or folder, and as a glob it matches nothing")
    return kind, sorted(found, key=lambda one: one.path.split("/"))


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
        return "folder", _told(fs, {p: i for p, i in found.items() if _is_data(str(p), folder)})
    matches = {p: i for p, i in fs.glob(path, detail=True).items() if i["type"] != "directory"}
    fixed = re.split(r"[*?\[]", path)[0].rpartition("/")[0] + "/"
    return "glob", _told(fs, {p: i for p, i in matches.items() if "/." in path or _is_data(str(p), fixed)})


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    """What is known of the file or folder; None where there is none of that name."""
    try:
        return dict(fs.info(path))
    except FileNotFoundError as error:
        if not _is_absent(error):
            raise
        return None


def _is_absent(error: BaseException) -> bool:
    """HTTP's file system says the same of a file that isn't there and of a server that isn't."""
    cause = error.__cause__
    return cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in (404, 410)


def _is_folder(info: dict[str, Any]) -> bool:
    """Pages that list a folder are files to HTTP; servers give them a name with a slash at the end."""
    page = is_web(str(info["name"])) and "url" in info
    return info["type"] == "directory" or (page and (urlsplit(str(info["url"])).path or "/").endswith("/"))


def _is_data(path: str, folder: str) -> bool:
    """Hidden files and folders, and a server's links that sort a folder's page, are no data."""
    inside = path.removeprefix(folder)
    return bool(inside) and not any(part.startswith((".", "?")) for part in inside.split("/"))


def _told(fs: Any, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What is known of each file; asked for where listing a folder didn't tell."""
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
    """What the many libraries behind fsspec raise as one message."""
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
    """The file from its beginning, as it is stored; it can be sought in.

    Raises:
        OSError: it can't be opened, here or in reading.
    """
    return io.BufferedReader(_Reading(address), _BLOCK)


class _Reading(io.RawIOBase):
    """Bytes of an address. What any library raises is an OSError, as of a local file.

    A server that sends whole files only is read forward; to go back is to ask for the file again.
    """

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address, self._at = address, 0
        self._forward = is_web(address.path) and address.size is None
        with self._as_os_error():
            self._file = self._open()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self.address.size is None:
            raise OSError("its server doesn't say how long it is: download it first")
        self._at = offset + (0, self._at, self.address.size or 0)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        with self._as_os_error():
            part = self._read(len(buffer))
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()

    def _open(self) -> Any:
        options: dict[str, Any] = {}
        if is_web(self.address.path):
            options["size"] = self.address.size or 1  # else the server is asked for it
        if self._forward:
            import aiohttp

            # All of the file in one answer, for however long that takes as long as something comes.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options |= {"block_size": 0, "timeout": timeout}
        return self.address.fs.open(self.address.path, "rb", **options)

    def _read(self, size: int) -> bytes:
        if not self._forward:
            try:
                self._file.seek(self._at)
                return bytes(self._file.read(size))
            except ValueError:
                if not is_web(self.address.path):
                    raise
                self._forward = True  # the server knows no ranges
                self._reopen()
        if self._file.tell() > self._at:
            self._reopen()
        while self._file.tell() < self._at:
            if not self._file.read(min(_BLOCK, self._at - self._file.tell())):
                return b""
        return bytes(self._file.read(size))

    def _reopen(self) -> None:
        self._file.close()
        self._file = self._open()

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            says_why = isinstance(error, OSError) and error.__cause__ is None
            if says_why or isinstance(error, MemoryError):
                raise
            raise OSError(_why(error)) from error
