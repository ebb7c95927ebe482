"""Name -> function or class: where a name in a recipe is looked up.

A bare name is a place in this package: `algorithm.loss: ppo_clip` is the function `ppo_clip` of
`srtrl/algorithms/losses.py`, `task.name: math` is the class `Task` of `srtrl/tasks/math.py`. A name with a colon,
`package.module:attribute`, is the user's own. There is no registry to edit. All look-ups raise `ValueError` for an
unknown name, listing what exists.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PARTS = {
    "algorithm.advantage": ("srtrl.algorithms.advantages", ("rewards", "token_rewards")),
    "algorithm.loss": ("srtrl.algorithms.losses", ("logprobs",)),
    "critic.value_loss": ("srtrl.algorithms.losses", ("values",)),
    "algorithm.reduction": ("srtrl.algorithms.reductions", ("token_loss",)),
    "algorithm.kl.estimator": ("srtrl.algorithms.reductions", ("logprobs",)),
    "algorithm.filters": ("srtrl.algorithms.reductions", ("rewards",)),
    "rewards": ("srtrl.tasks.rewards", ()),
}
"""Option -> where its functions are, and the first argument by which they are known there, where that is needed."""


def resolve_part(option: str, name: str) -> Callable[..., Any]:
    """Return the function that the recipe's `option` (a key of `PARTS`) calls `name`."""
    module_name, first_arguments = PARTS[option]
    return resolve_function(module_name, name, first_arguments)


def list_parts(option: str) -> list[str]:
    """Our own names for `option`, a key of `PARTS`."""
    module_name, first_arguments = PARTS[option]
    return list_functions(importlib.import_module(module_name), first_arguments)


def resolve_function(module_name: str, name: str, first_arguments: Collection[str] = ()) -> Callable[..., Any]:
    """Return the public function `name` of one of our modules, or the user's `package.module:function`.

    Of our modules only functions with one of `first_arguments` count, where any are given.
    """
    if ":" in name:
        return _resolve_own(name)
    module = importlib.import_module(module_name)
    functions = list_functions(module, first_arguments)
    if name not in functions:
        raise ValueError(_unknown(name, functions, _path_of(module_name, ".py"), "package.module:function"))
    function: Callable[..., Any] = getattr(module, name)
    return function


def resolve_class(package_name: str, name: str, attribute: str) -> Any:
    """Return the class (or function) `attribute` of a package's module `name`, or the user's `package.module:Class`."""
    if ":" in name:
        return _resolve_own(name)
    modules = list_modules(package_name, attribute)
    if name not in modules:
        raise ValueError(_unknown(name, modules, _path_of(package_name, "/"), "package.module:Class"))
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
    package = importlib.import_module(package_name)
    names = []
    for info in pkgutil.iter_modules(package.__path__):
        spec = importlib.util.find_spec(f"{package_name}.{info.name}")
        if info.name == "base" or spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        if any(isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == attribute for node in tree.body):
            names.append(info.name)
    return names


class UnknownOptionError(ValueError):
    """A function has no such option."""

    def __init__(self, option: str, message: str) -> None:
        self.option = option
        super().__init__(message)


def check_options(
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, object],
    *,
    num_positional: int,
    reserved: Collection[str] = (),
) -> None:
    """Refuse options that are no keyword arguments of a function, and the lack of those that it needs.

    Args:
        name: The function's, as the recipe has it.
        function: What `options` shall be given to.
        options: The recipe's options of that function.
        num_positional: How many arguments the caller gives by position.
        reserved: Keyword arguments that the caller gives itself.

    Raises:
        UnknownOptionError: naming the option and the known ones.
        ValueError: an option that the function needs is not given.
    """
    parameters = inspect.signature(function).parameters.values()
    by_position = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    given = {one.name for one in by_position[:num_positional]}.union(reserved)
    known = {
        one.name: one.default is one.empty
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in given
    }
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for option in options:
        if option in given or (option not in known and not takes_any):
            near = suggestion(option, known) or ";"
            message = f"`{name}` has no option `{option}`{near} known: {', '.join(known) or 'none'}"
            raise UnknownOptionError(option, message)
    if missing := [option for option, is_needed in known.items() if is_needed and option not in options]:
        raise ValueError(f"`{name}` needs the option `{missing[0]}`, which is not given")


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence part naming the nearest known name (", did you mean `x`?"), or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean `{near[0]}`?" if near else ""


def _resolve_own(name: str) -> Callable[..., Any]:
    """Import `package.module:attribute`, with the current folder on the import path, after installed packages."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ValueError(f"`{name}` is not a name of the form package.module:attribute")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"`{name}`: cannot import {module_name} ({error}); looked in {folder} and sys.path") from error
    value: Callable[..., Any] | None = getattr(module, attribute, None)
    if value is None or not callable(value):
        what = "has no" if value is None else "has a value that cannot be called:"
        known = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        raise ValueError(f"`{name}`: {module_name} {what} `{attribute}`{suggestion(attribute, known)}")
    return value


def _unknown(name: str, known: list[str], place: str, own_form: str) -> str:
    return (
        f"`{name}` is not in {place}{suggestion(name, known) or ';'} "
        f"known: {', '.join(known) or 'none'}; or one of your own as {own_form}"
    )


def _path_of(module_name: str, ending: str) -> str:
    return module_name.replace(".", "/") + ending
