"""Folders of compiled kernels: one for each state of their source, as Numba watches only one file of it.

Numba compiles a kernel again if the kernel's own file has changed, not if a function that is inlined from another
file has. So the folder's name has a digest of all these files.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path

IMPORTS = (b"import numba", b"from numba", b"srtrl.model.kernels import")
"""Lines of files with kernels, or with functions for them."""
OWN_FOLDER = re.compile(r"/srtrl-[0-9a-f]{16}/?$")
"""Folder that a process of this or another checkout has added to the variable that this one inherits."""


def cache_folders() -> dict[str, str]:
    """Environment variables that name the folders of compiled kernels, for Numba before it is imported.

    Numba's is inside the one that the user has set, else in the user's folder of caches, else in a temporary one: the
    first that is writable. Triton watches all functions that a kernel calls, and has a folder in the user's home; it
    gets another one only if there is no home and the user has set none.
    """
    environment, home = os.environ, Path(os.path.expanduser("~"))  # noqa: PTH111  `Path.home` fails if there is none
    parents = [Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "srtrl"]
    if given := environment.get("NUMBA_CACHE_DIR"):
        parents.insert(0, Path(OWN_FOLDER.sub("", given)).absolute())
    parent = next(filter(is_writable, parents), None) or temporary_folder() / "numba"
    folders = {"NUMBA_CACHE_DIR": str(parent / f"srtrl-{digest()}")}
    if "TRITON_CACHE_DIR" not in environment and not is_writable(home):
        folders["TRITON_CACHE_DIR"] = str(temporary_folder() / "triton")
    return folders


def digest() -> str:
    """16 hexadecimal digits, of the names and bytes of all files of this package with functions for Numba."""
    package, hashed = Path(__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        if any(line in content for line in IMPORTS):
            hashed.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return hashed.hexdigest()[:16]


def temporary_folder() -> Path:
    """The user's own, as what is in it is executed; the same in the next process unless its name belongs to another."""
    folder = Path(tempfile.gettempdir()) / f"srtrl-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="srtrl-kernels-"))
    return folder


def is_writable(folder: Path) -> bool:
    """Whether files can be made there, also if the folder itself is not there yet; not in `~` without a home."""
    while not folder.exists():
        folder = folder.parent
    return folder.is_absolute() and os.access(folder, os.W_OK)
