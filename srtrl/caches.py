"""Where compiled kernels are kept on a machine that has nothing writable but temporary files, such as a container."""

import os
import tempfile
from pathlib import Path


def cache_folders() -> dict[str, str]:
    """Environment variables for Numba and Triton, where neither they nor the user have a folder for compiled kernels.

    Numba keeps them beside the package or in the user's folder and else fails at import; Triton in the user's folder.
    What the user has set stays. The folder is the user's own: what is in it is executed.
    """
    home = is_writable(Path(os.path.expanduser("~")))  # noqa: PTH111  `Path.home` fails where there is none
    is_there = {"NUMBA_CACHE_DIR": home or is_writable(Path(__file__).parent), "TRITON_CACHE_DIR": home}
    missing = [name for name, found in is_there.items() if not found and name not in os.environ]
    if not missing:
        return {}
    folder = Path(tempfile.gettempdir()) / f"srtrl-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="srtrl-kernels-"))
    return {name: str(folder / name.partition("_")[0].lower()) for name in missing}


def is_writable(folder: Path) -> bool:
    """Whether files can be made there, also where the folder itself is not there yet."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)
