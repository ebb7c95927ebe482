"""Attention of other libraries for the decoder on a CUDA device, in steps that need no tree: one row a sequence.

Such a row sees all keys of its sequence, so any kernel for paged caches will do: `varlen_attn`, which torch carries,
or `flash_attn_with_kvcache` of the package flash-attn (extra `flash`; flash_attn_interface, FlashAttention 3, where it
is installed). Both read our pages as they lie. Everything else stays with `triton_attention.attend_tree`: trees, chunks
of prompts, deterministic mode, float32. Here is how they are called; whether one runs, agrees and is faster is found
out when an engine starts (`srtrl.engine.attention_probe`).

N rows, padding included; H query heads, K key-value heads, E head width; P pages of a page table.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from srtrl.model.device_rows import DeviceRows
from srtrl.model.varlen_attention import first_line, too_old, unsupported

OURS = "triton"
"""Name of our own kernel among the backends."""

NAMES = ("varlen", "flash")
"""The others, as `rollout.attention` calls them."""


class PlainAttention(Protocol):
    """Attends in steps in which row i is the only row of the sequence of page table i."""

    @property
    def name(self) -> str:
        """One of `NAMES`."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        """Attend from each row to the `context_lengths` first positions of its pages, with scale E**-0.5.

        It waits for nothing and takes no number from the device, so it can be captured in a graph.

        Args:
            q: [N, H, E], rotated; the last two dimensions adjacent in memory, rows any number of elements apart.
            keys: [num_pages, page_size, K, E], contiguous; the rows' own keys are in it already.
            values: Likewise.
            rows: N page tables; the context of a padding row is 0.

        Returns:
            [N, H, E]; anything finite for padding rows.
        """


@dataclass(kw_only=True, slots=True, frozen=True)
class BackendChoice:
    """Which backend attends in steps of one row a sequence, by how many rows there are."""

    classes: tuple[tuple[int, PlainAttention | None], ...] = ()
    """(most rows, backend), ascending; None: our kernel, as for more rows than the last."""

    def backend_for(self, num_rows: int) -> PlainAttention | None:
        """The backend of a step of so many rows, padding included; None: our kernel."""
        return next((backend for most_rows, backend in self.classes if num_rows <= most_rows), None)


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn` with a block table."""

    name = "varlen"

    def __init__(
        self,
        varlen_attn: Callable[..., Any],
        *,
        takes_starts_of_keys: bool,
        most_rows: int,
        device: torch.device,
    ) -> None:
        """Keep the function and the numbers it needs at fixed addresses.

        Args:
            varlen_attn: The function; it must know block tables (`find_varlen`).
            takes_starts_of_keys: FlashAttention 2 is behind it, which asks for starts of keys although it does not
                read them beside a block table. Versions 3 and 4 refuse them.
            most_rows: N at most.
            device: Where the steps are computed.
        """
        parameters = inspect.signature(varlen_attn).parameters
        self._varlen_attn = varlen_attn
        self._takes_starts_of_keys = takes_starts_of_keys
        self._knows_gqa = "enable_gqa" in parameters
        # Its own choice of splits gave wrong rows with pages: github.com/pytorch/pytorch/issues/194167.
        self._options = {"num_splits": 1} if takes_starts_of_keys and "num_splits" in parameters else {}
        self._starts = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        self._starts_of_keys: dict[int, Tensor] = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        """See `PlainAttention`."""
        num_rows, most_keys = len(q), rows.page_tables.shape[1] * keys.shape[1]
        starts = self._starts[: num_rows + 1]
        options: dict[str, Any] = dict(self._options)
        if self._knows_gqa:
            options["enable_gqa"] = q.shape[1] > keys.shape[2]
        out: Tensor = self._varlen_attn(
            q,
            keys,
            values,
            starts,
            self._key_starts(most_keys)[: num_rows + 1] if self._takes_starts_of_keys else None,
            1,
            most_keys,
            seqused_k=rows.context_lengths,
            block_table=rows.page_tables,
            **options,
        )
        return out

    def _key_starts(self, most_keys: int) -> Tensor:
        """[most rows + 1]: as if every sequence had `most_keys` keys. Kept, so that a graph finds them again."""
        if most_keys not in self._starts_of_keys:
            self._starts_of_keys[most_keys] = self._starts * most_keys
        return self._starts_of_keys[most_keys]


class FlashAttention:
    """`flash_attn_with_kvcache` of flash-attn or flash_attn_interface."""

    name = "flash"

    def __init__(self, flash_attn_with_kvcache: Callable[..., Any], *, table_name: str) -> None:
        self._function = flash_attn_with_kvcache
        self._table_name = table_name
        """What it calls a page table."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
        """See `PlainAttention`."""
        tables = {self._table_name: rows.page_tables}
        out: Tensor = self._function(q[:, None], keys, values, cache_seqlens=rows.context_lengths, **tables)
        return out[:, 0]  # [N, 1, H, E] -> [N, H, E]


def find_backends(
    names: Iterable[str], *, device: torch.device, dtype: torch.dtype, head_dim: int, most_rows: int
) -> dict[str, PlainAttention | str]:
    """Each named backend, ready to be tried, or as a clause why there is none for such values.

    Args:
        names: Of `NAMES`.
        device: Where it must run.
        dtype: Of queries, keys and values.
        head_dim: E.
        most_rows: N at most.
    """
    reason = unsupported(device, dtype, head_dim)
    reason = too_old(device) if reason is None else reason
    found: dict[str, PlainAttention | str] = {}
    for name in names:
        if reason is not None:
            found[name] = reason
        else:
            found[name] = find_varlen(device, most_rows) if name == "varlen" else find_flash(device)
    return found


def find_varlen(device: torch.device, most_rows: int) -> VarlenAttention | str:
    """The attention that this torch carries, if it knows block tables."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
        varlen_attn: Callable[..., Any] = module.varlen_attn
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no varlen_attn ({first_line(error)})"
    missing = sorted({"block_table", "seqused_k"} - set(inspect.signature(varlen_attn).parameters))
    if missing:
        return f"varlen_attn of torch {torch.__version__} does not know {' and '.join(missing)}"
    # Whoever has activated another version (`activate_flash_attention_impl`) has it here, too.
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    is_version_2 = current is None or current() in (None, "FA2")
    return VarlenAttention(varlen_attn, takes_starts_of_keys=is_version_2, most_rows=most_rows, device=device)


def find_flash(device: torch.device) -> FlashAttention | str:
    """The attention of an installed package; of two, that of FlashAttention 3 on Hopper, where it is the faster."""
    packages = ["flash_attn_interface", "flash_attn"]
    if torch.cuda.get_device_capability(device)[0] != 9:
        packages.reverse()
    reasons = []
    for package in packages:
        try:
            function: Callable[..., Any] = importlib.import_module(package).flash_attn_with_kvcache
        except (ImportError, AttributeError, OSError) as error:  # OSError: a library that it needs is missing
            reasons.append(f"{package}: {first_line(error)}")
            continue
        parameters = inspect.signature(function).parameters
        table_name = next((name for name in ("block_table", "page_table") if name in parameters), None)
        if table_name is not None and "cache_seqlens" in parameters:
            return FlashAttention(function, table_name=table_name)
        reasons.append(f"{package}: its flash_attn_with_kvcache knows no page tables")
    return f"no package has it ({'; '.join(reasons)})"
