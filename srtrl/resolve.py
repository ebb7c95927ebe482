"""Name -> function or class: where a name in a recipe is looked up.

A bare name is a place in this package: `algorithm.loss: ppo_clip` is the function `ppo_clip` of
`srtrl/algorithms/losses.py`, `task.name: math` is the class `Task` of `srtrl/tasks/math.py`. A name with a colon,
`package.module:attribute`, is user-defined. There is no registry to edit. All look-ups raise `ValueError` for an
unknown name, listing what exists.
"""

import difflib
import importlib
import inspect
import logging
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 200
"""Maximum length of a value in a message."""
MAX_LINES = 10
"""Maximum length of a list in a message."""
FROM_PYTHON = "from_python"
"""Begins the modules of functions that no file has by a name: those of a notebook, or made by other functions."""

LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, f"{Path(__file__).parent}/")
"""Folders of code that is not the user's."""

PARTS = {
    "algorithm.advantage": ("srtrl.algorithms.advantages", ("rewards", "token_rewards")),
    "algorithm.loss": ("srtrl.algorithms.losses", ("logprobs",)),
    "critic.value_loss": ("srtrl.algorithms.losses", ("values",)),
    "algorithm.reduction": ("srtrl.algorithms.reductions", ("token_loss",)),
    "algorithm.kl.estimator": ("srtrl.algorithms.reductions", ("logprobs",)),
    "algorithm.filters": ("srtrl.algorithms.reductions", ("rewards",)),
    "data.order": ("srtrl.features.data_order", ("seed",)),
}
"""Option -> the module of its functions, and the names of their first argument, which tell them from its others."""


def resolve_part(option: str, name: str) -> Callable[..., Any]:
    """Return the function that the recipe's `option` (a key of `PARTS`) calls `name`."""
    module_name, first_arguments = PARTS[option]
    return resolve_function(module_name, name, first_arguments)


def resolve_function(module_name: str, name: str, first_arguments: Collection[str] = ()) -> Callable[..., Any]:
    """Return the public function `name` of one of our modules, or the user-defined `package.module:function`.

    Of our modules only functions with one of `first_arguments` count, if any are given.
    """
    if ":" in name:
        return _resolve_user_defined(name)
    module = importlib.import_module(module_name)
    _check_known(name, list_functions(module, first_arguments), f"{module_name.replace('.', '/')}.py")
    function: Callable[..., Any] = getattr(module, name)
    return function


def resolve_class(package_name: str, name: str, attribute: str) -> Any:
    """Return the class (or function) `attribute` of the module `name` of a package, or a user-defined one."""
    if ":" in name:
        return _resolve_user_defined(name)
    _check_known(name, list_modules(package_name, attribute), f"{package_name.replace('.', '/')}/")
    return getattr(importlib.import_module(f"{package_name}.{name}"), attribute)


def list_functions(module: ModuleType, first_arguments: Collection[str] = ()) -> list[str]:
    """Names of the public functions that `module` itself defines (with such a first argument), in its order."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and (not first_arguments or next(iter(inspect.signature(value).parameters), None) in first_arguments)
    ]


def list_modules(package_name: str, attribute: str) -> list[str]:
    """Names of the modules in a package, `base` apart, that define `attribute`; none of them is imported."""
    folders = importlib.import_module(package_name).__path__
    definition = re.compile(rf"^(?:class|def) {attribute}\b", re.MULTILINE)
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.py")) if path.stem != "base"]
    return [path.stem for path in files if definition.search(path.read_text(encoding="utf-8"))]


class Caught(AbstractContextManager["Caught"]):
    """`with Caught() as caught:` keeps an exception of the user's code or files, which may be any, in `error`.

    Only for such calls; the caller reports the error as a mistake of the user, or as the outcome of a sample.
    `sys.exit` in such code is its error too, and does not end the run. Ctrl-C, of the main thread alone, is none.
    """

    error: BaseException | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        self.error = None if is_main and isinstance(error, KeyboardInterrupt) else error
        return self.error is not None


def check_call(name: str, function: Callable[..., Any], num_positional: int, keywords: Collection[str] = ()) -> None:
    """Refuse a function that cannot be called as the trainer will.

    Args:
        name: The function's, as the recipe has it.
        function: What it names.
        num_positional: The number of arguments given by position.
        keywords: The arguments given by name: the trainer's and the recipe's options.

    Raises:
        ValueError: it takes other arguments; the message lists them.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * num_positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([f"{num_positional} arguments", *(f"{keyword}=..." for keyword in keywords)])
        declared = ", ".join(str(item.replace(annotation=item.empty)) for item in signature.parameters.values())
        raise ValueError(f"`{name}` cannot be called with ({call}): {error}; it is {name}({declared})") from error


def declared_names(function: Callable[..., Any], num_positional: int) -> set[str]:
    """The arguments that a function declares beside `num_positional` others."""
    parameters = enumerate(inspect.signature(function).parameters.values())
    return {item.name for number, item in parameters if number >= num_positional or item.kind is item.KEYWORD_ONLY}


def declared(function: Callable[..., Any], num_positional: int, offered: Mapping[str, T]) -> dict[str, T]:
    """Those of the `offered` arguments that a function declares by name, beside `num_positional` others."""
    names = declared_names(function, num_positional)
    return {name: value for name, value in offered.items() if name in names}


def describe_value(value: object) -> str:
    """Describe an incorrect result of a function: `float 0.5`, `Tensor of shape (2,)`."""
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} {f'{value!r:.60}' if shape is None else f'of shape {tuple(shape)}'}"


def cut(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The beginning of a value that is longer than a message can show."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shorten(message: str) -> str:
    """A message in which each value (a path, a number, an override) is cut."""
    return re.sub(rf"\S{{{MAX_CHARACTERS},}}", lambda match: cut(match[0]), message)


def first_lines(lines: Sequence[str], limit: int = MAX_LINES) -> list[str]:
    """The first lines of a list, shortened, and the number of the others."""
    more = [f"... and {len(lines) - limit:,} more"] if len(lines) > limit else []
    return [*map(shorten, lines[:limit]), *more]


def describe_error(error: BaseException) -> str:
    """One line of at most some 300 characters: the exception, and the last place in the user's code before it."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    machinery = ("<frozen", importlib.__file__, __file__)  # of an import
    frames = [item for item in traceback.extract_tb(error.__traceback__) if not item.filename.startswith(machinery)]
    users = [item for item in frames if not item.filename.startswith(LIBRARIES)] or frames
    place = f" ({Path(users[-1].filename).name}:{users[-1].lineno}, {users[-1].name})" if users else ""
    return cut(text, 300) + place


def is_message(error: BaseException) -> bool:
    """Whether an error is for the user: of the system, or raised by our code. With SRTRL_TRACEBACK=1 none is."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1]
    is_known = isinstance(error, KeyboardInterrupt | OSError) or is_ours(raised_in)
    return is_known and os.environ.get("SRTRL_TRACEBACK") != "1"


def is_ours(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of our code."""
    return Path(frame.filename).is_relative_to(Path(__file__).parent)


@cache
def warn_once(text: str) -> None:
    """Log a text; nothing if it was logged before."""
    logger.warning("%s", text)


def restore_process(who: str, num_threads: int | None = None) -> int | None:
    """Put right what user code may change for the whole process, with a line that names `who` has run.

    These are gradients that are off, another default dtype, another number of torch's threads than `num_threads`, and
    a standard output that is closed.

    Returns:
        Torch's number of threads; None where nothing has imported torch.
    """
    changes, torch = [], sys.modules.get("torch")
    if getattr(sys.stdout, "closed", False):
        sys.stdout = os.fdopen(os.dup(2), "w", buffering=1)
        changes.append("closed standard output (lines go to standard error)")
    if torch and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        changes.append("turned gradients off")
    if torch and (dtype := torch.get_default_dtype()) != torch.float32:
        torch.set_default_dtype(torch.float32)
        changes.append(f"set the default dtype {dtype}")
    if torch and num_threads and (found := torch.get_num_threads()) != num_threads:
        torch.set_num_threads(num_threads)
        changes.append(f"set {found} threads in place of {num_threads}")
    if changes:
        warn_once(f"{who} has {', '.join(changes)}: put right")
    return torch.get_num_threads() if torch else None


def regular_file(path: Path) -> Path:
    """`path`; what opens it reports what is missing, or a folder.

    Raises:
        ValueError: it is a link to nothing, or something that may have no end.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path}: a link to {path.readlink()}, which is not there")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: a pipe, a socket or a device; expected a regular file")
    return path


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A sentence part naming the nearest known name (", did you mean `x`?"), or nothing if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean `{near[0]}`?" if near else ""


def _import_user_defined(name: str) -> ModuleType:
    """Import the module of `package.module:attribute`, from the current folder too, after installed packages.

    Raises:
        ValueError: it is no such name, or the module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ValueError(f"`{name}` is not a name of the form package.module:attribute")
    if module_name in sys.modules:
        return sys.modules[module_name]
    if (folder := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    with Caught() as caught:
        importlib.import_module(module_name)
    if caught.error is not None:
        reason = f"{describe_error(caught.error)}; looked in {folder} and sys.path"
        if module_name.partition(".")[0] == FROM_PYTHON:
            reason = "it was given to srtrl.train: continue from Python, or write it into a file and begin a new run"
        elif module_name.endswith(".py"):
            reason = f"write the name of the module, without .py: {module_name.removesuffix('.py')}:{attribute}"
        raise ValueError(f"`{name}`: cannot import {module_name}: {reason}") from caught.error
    restore_process(module_name)
    return sys.modules[module_name]


def _resolve_user_defined(name: str) -> Callable[..., Any]:
    """The callable `package.module:attribute`."""
    module, (module_name, _, attribute) = _import_user_defined(name), name.partition(":")
    value: Callable[..., Any] | None = None
    with Caught() as caught:  # a module may have a `__getattr__`
        value = getattr(module, attribute, None)
    if caught.error is not None:
        raise ValueError(f"`{name}`: {module_name} raised {describe_error(caught.error)}") from caught.error
    if value is None or not callable(value):
        what = "has no" if value is None else "has a value that cannot be called:"
        known = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        raise ValueError(f"`{name}`: {module_name} {what} `{attribute}`{suggestion(attribute, known)}")
    return value


def _check_known(name: str, known: list[str], place: str) -> None:
    if name not in known:
        names = f"known: {', '.join(known) or 'none'}; or a user-defined package.module:name"
        raise ValueError(f"`{name}` is not in {place}{suggestion(name, known) or ';'} {names}")
