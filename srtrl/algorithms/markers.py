"""How an advantage function says what it is called with.

A plain function is *sequence-level*: rewards [G, S] in, advantages [G, S] out, and all tokens of a sample share one. A
function with the mark `@token_level` is *token-level*: rewards, values and advantages are one number a token.
`@token_level(needs_critic=True)` says in addition that the values are used, so that the recipe must have a critic. The
mark only sets two attributes of the function; `advantages.py` documents both signatures.
"""

from collections.abc import Callable
from typing import Any, overload

AdvantageFunction = Callable[..., Any]


@overload
def token_level(function: AdvantageFunction) -> AdvantageFunction: ...
@overload
def token_level(*, needs_critic: bool = False) -> Callable[[AdvantageFunction], AdvantageFunction]: ...
def token_level(
    function: AdvantageFunction | None = None, *, needs_critic: bool = False
) -> AdvantageFunction | Callable[[AdvantageFunction], AdvantageFunction]:
    """Mark an advantage function as token-level: `@token_level` or `@token_level(needs_critic=True)`.

    Returns:
        The same function, with the attributes `token_level` (True) and `needs_critic`.
    """

    def mark(marked: AdvantageFunction) -> AdvantageFunction:
        marked.token_level = True  # type: ignore[attr-defined]
        marked.needs_critic = needs_critic  # type: ignore[attr-defined]
        return marked

    return mark if function is None else mark(function)


def is_token_level(function: AdvantageFunction) -> bool:
    """Whether an advantage function bears the mark `@token_level`."""
    return bool(getattr(function, "token_level", False))


def needs_critic(function: AdvantageFunction) -> bool:
    """Whether an advantage function bears the mark `@token_level(needs_critic=True)`."""
    return bool(getattr(function, "needs_critic", False))
