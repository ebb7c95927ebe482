"""Files and folders that are complete or absent, whenever the process is killed; and checks before one is replaced."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def shown_path(path: Path) -> Path:
    """The path as people read it: from the current folder if it is in there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def temporary_beside(path: Path) -> Path:
    """A new name beside `path` for what is being written or deleted; see `is_temporary`."""
    return path.with_name(f".srtrl_{secrets.token_hex(8)}")  # `tempfile` would make it readable for its owner only


def is_temporary(path: Path) -> bool:
    """Whether a name is one of `temporary_beside`: a resume deletes what a killed run has left."""
    return re.fullmatch(r"\.srtrl_[0-9a-f]{16}", path.name) is not None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file beside `path`, then rename it: a reader, or a kill at any time, sees the old file or the new one."""
    temporary = temporary_beside(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with named_in_errors(path):
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_output(option: str, path: Path | None, mark: str | None, *, force: bool | None = None) -> None:
    """Refuse, before anything is measured, to write over a file that srtrl did not write for the same purpose.

    Args:
        option: Named in the message.
        path: What will be written; None: nothing.
        mark: A text in the first 4,096 bytes of each file of this purpose; None: replace no file.
        force: Of `--force`: replace any file. None: the command has no such option.

    Raises:
        ValueError: a folder is there, the folder around it is missing, or a file is there without the mark.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{option}: {problem}; expected the name of a file")
    if force or not os.path.lexists(path):
        return
    if path.is_file() and mark is not None:
        with path.open("rb") as file:
            if mark.encode() in file.read(4096):
                return
    other = "rename it" if force is None else "rename it, name another file, or replace it with --force"
    raise ValueError(f"{option}: {path} exists, and is {'kept' if mark is None else 'not from this command'}: {other}")


def is_free(path: Path) -> bool:
    """Whether `new_folder` can take this name: there is nothing, or an empty folder."""
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which is durable and has the name `final` when the block succeeds, and is gone if not.

    It has a name of its own until then, beside `final` (see `is_free`).
    """
    temporary = temporary_beside(final)
    with named_in_errors(final):
        temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_folder(path)  # files as well
        temporary.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """An OSError of a write (a full disk, say) names no file, or the temporary one: let it name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
