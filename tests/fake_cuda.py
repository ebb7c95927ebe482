"""A CUDA device that is the CPU: `torch.cuda` in a process that has none, for tests of the CUDA path.

Inside `fake_cuda()` storages carry a mark, and `Tensor.device` says `cuda:0` where it is set. A function mode does what
C++ would decide by the real device (`to`, `cpu`, `numpy`); a dispatch mode carries the mark from operands to results
and refuses operands of two devices. Triton's kernels run under its interpreter. Where a device may do harm, this one
does:

- `torch.empty` holds NaN (integers: 0x7E7E...), and so does a graph's own memory after each replay.
- A non-blocking copy to pinned memory arrives when the host has waited for it; until then there is garbage. Pinned
  memory that the host writes while it is copied to the device is a finding (`race`).
- A capture runs nothing; a replay repeats what was captured on the same memory. Memory that was freed meanwhile is a
  finding (`stale`), and so is what no capture may hold (`capture`): waits, copies between the device and
  memory that is not pinned, work and memory of the host, a kernel's first compilation.

It has one stream, no limit of memory, no compiled kernels and no speed. `clip_grad_norm_` counts as a download: torch
groups gradients by their real device.
"""

import copy
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from kernel_cases import KERNEL_DEVICE  # it mends the interpreter
from plain_kernels import packed_attention_reference
from torch import Tensor
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from srtrl.cuda.shapes import ShapePlanner

CUDA = torch.device("cuda", 0)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
"""Operations whose result, or its size, is read by the host."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
GARBAGE = 0x7E
CAPTURED_GARBAGE = 0xFF
"""In each byte: NaN, or -1."""
TOTAL_BYTES = 80 * 2**30

_real_device: Any = torch.Tensor.device
_is_plain = 0


@contextmanager
def plain() -> Iterator[None]:
    """PyTorch as it is inside: all tensors are on the CPU."""
    global _is_plain  # noqa: PLW0603
    _is_plain += 1
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        _is_plain -= 1


@dataclass(eq=False)
class Pending:
    """A non-blocking copy that a device does any time before the host waits for it."""

    host: Tensor
    content: Tensor
    """Content of the source when it was queued."""
    is_download: bool
    place: str


@dataclass
class Call:
    """Call in a capture: a function, and operands that are looked up again in each replay."""

    function: Callable[..., Any]
    name: str
    args: Any
    kwargs: Any
    results: list[Any]
    place: str


@dataclass
class Operand:
    """A tensor by its memory; only the graph's own is kept alive."""

    storage: Callable[[], Any]
    address: int
    layout: tuple[Any, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor | None:
        """The tensor, unless its memory was freed."""
        storage = self.storage()
        if storage is None or storage.data_ptr() != self.address:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


class FakeCuda:
    """The device: what it has to do, and what was found."""

    def __init__(self) -> None:
        self.findings: Counter[str] = Counter()
        """Kind, what and where -> how often; a test expects none."""
        self.waits: Counter[str] = Counter()
        """The host waited for the device: where -> how often."""
        self.num_captures = self.num_replays = 0
        self.log: list[str] = []
        """Waits between streams, starts of captures, and returns of memory."""
        self.pools: list[Any] = []
        """Memory pools of the captures."""
        self.free_bytes = TOTAL_BYTES
        self.is_broken = False
        """Whether a capture cannot end, as after an error in it."""
        self.current = Stream(self, "main")
        self.queue: list[Pending] = []
        self.capture: Graph | None = None
        self.kernels: set[Any] = set()
        """Kernels that were compiled."""
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.pinned: dict[int, int] = {}
        """Registered memory of the host: address -> bytes."""

    def report(self, kind: str, what: str) -> None:
        """Note a finding."""
        self.findings[f"{kind}: {what} at {place()}"] += 1

    def wait(self, what: str) -> None:
        """The host waits for all that the device has to do."""
        self.waits[f"{what} at {place()}"] += 1
        if self.capture is not None:
            self.report("capture", what)
        self.finish(list(self.queue))

    def finish(self, copies: list[Pending]) -> None:
        """Do these copies, if they are not done."""
        for one in copies:
            if one not in self.queue:
                continue
            self.queue.remove(one)
            with plain(), torch.inference_mode():
                if one.is_download:
                    one.host.copy_(one.content)
                elif not torch.equal(bytes_of(one.host), bytes_of(one.content)):
                    self.findings[f"race: memory was written while it was copied at {one.place}"] += 1

    def register(self, address: int, num_bytes: int, flags: int) -> None:
        """`cudaHostRegister`."""
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        """`cudaHostUnregister`."""
        del self.pinned[address]

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is in pinned memory of the host."""
        storage = tensor.untyped_storage()
        return hasattr(storage, "is_fake_pinned") or storage.data_ptr() in self.pinned

    def mark(self, tensor: Tensor) -> None:
        """Let a tensor's storage be on the device."""
        storage = storage_of(tensor)
        if is_here(tensor) or _real_device.__get__(tensor).type != "cpu":
            return
        storage.is_fake_cuda = True
        self.storages[id(storage)] = weakref.ref(storage)
        weakref.finalize(storage, self.storages.pop, id(storage), None).atexit = False
        if self.capture is not None:
            self.capture.owned[id(storage)] = storage

    def copy_between(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Copy between host and device."""
        host, is_download = (source, False) if is_here(target) else (target, True)
        is_queued = non_blocking and self.is_pinned(host)
        if self.capture is not None and is_queued:
            self.capture.record(self.copy_between, "copy_", (target, source, True), {}, [])
            return
        if self.capture is not None:
            self.report("capture", "a copy between host and device")
        if not is_queued:
            self.wait("a download" if is_download else "an upload of pageable memory")
        with plain(), torch.inference_mode(target.is_inference()), torch.no_grad():
            if is_queued:
                content = source.detach().to(host.dtype, copy=True)
                self.queue.append(Pending(host.detach(), content, is_download, place()))
            if is_queued and is_download:
                fill_bytes(target, GARBAGE)
            else:
                target.copy_(source)


def place() -> str:
    """The innermost lines of srtrl, or of the test, that led here."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    ours = [frame for frame in frames if "/srtrl/" in frame.filename and "/site-packages/" not in frame.filename]
    return " < ".join(f"{frame.filename.rpartition('/srtrl/')[2]}:{frame.lineno}" for frame in ours[:-4:-1])


def is_here(tensor: Tensor) -> bool:
    """Whether it is on the device."""
    return hasattr(storage_of(tensor), "is_fake_cuda")


def storage_of(tensor: Tensor) -> Any:
    """Its storage; of a sharded tensor that of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def fill_bytes(tensor: Tensor, byte: int) -> None:
    """Garbage in each element: for 0x7E floats are NaN."""
    if tensor.is_floating_point() and byte == GARBAGE:
        tensor.fill_(torch.nan)
    elif tensor.numel() and tensor.dtype != torch.bool:
        tensor.view(-1).view(torch.uint8).fill_(byte) if tensor.is_contiguous() else tensor.fill_(byte)


def memory_of(storage: Any) -> Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.owned: dict[int, Any] = {}
        """Storages of the graph's own pool."""
        self.calls: list[Call] = []
        self.before: list[tuple[weakref.ref[Any], Tensor]] = []

    def capture_begin(self, *, pool: Any, **_: Any) -> None:
        """Record from here on, with the memory as it is."""
        assert self.device.capture is None, "a capture within a capture"
        self.device.num_captures += 1
        self.device.pools.append(pool)
        self.device.log.append(f"capture on {self.device.current.name}")
        with plain():
            for reference in list(self.device.storages.values()):
                if (storage := reference()) is not None:
                    self.before.append((reference, memory_of(storage).clone()))
        self.device.capture = self

    def capture_end(self) -> None:
        """Undo what was done meanwhile: nothing has run."""
        self.device.capture = None
        with plain(), torch.inference_mode():
            for reference, content in self.before:
                if (storage := reference()) is not None:
                    memory_of(storage).copy_(content)
        self.before.clear()
        self.spoil()
        if self.device.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def spoil(self) -> None:
        """Another graph of the pool may overwrite this one's memory."""
        with plain(), torch.inference_mode():
            for storage in self.owned.values():
                memory_of(storage).fill_(CAPTURED_GARBAGE)

    def record(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Add a call."""
        with plain():
            args, kwargs, kept = tree_map(self._operand, (args, kwargs, results))
        self.calls.append(Call(function, name, args, kwargs, kept, place()))

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        is_own = id(storage) in self.owned
        layout = (value.storage_offset(), value.size(), value.stride())
        return Operand((lambda: storage) if is_own else weakref.ref(storage), storage.data_ptr(), layout, value.dtype)

    def replay(self) -> None:
        """Do the calls again."""
        self.device.num_replays += 1
        with plain(), torch.inference_mode():
            for call in self.calls:
                self._repeat(call)
        self.spoil()

    def _repeat(self, call: Call) -> None:
        stale = False

        def load(value: Any) -> Any:
            nonlocal stale
            tensor = value.tensor() if isinstance(value, Operand) else value
            stale |= isinstance(value, Operand) and tensor is None
            return tensor

        args, kwargs, results = tree_map(load, (call.args, call.kwargs, call.results))
        if stale:
            self.device.findings[f"stale: {call.name} uses memory that was freed, captured at {call.place}"] += 1
            return
        found = call.function(*args, **kwargs)
        for result, new in zip(results, tree_leaves(found) if results else (), strict=True):
            if new.data_ptr() != result.data_ptr():
                result.copy_(new)


class Stream:
    """`torch.cuda.Stream`; all of them are one."""

    def __init__(self, device: FakeCuda, name: str) -> None:
        self.device = device
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        """The other's queued work comes first anyhow."""
        self.device.log.append(f"{self.name} after {other.name}")

    def wait_event(self, _: "Event") -> None:
        """So does what was queued before the event."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, by default a new one."""
        event = event or Event(self.device)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait."""
        self.device.wait("stream.synchronize")


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.copies: list[Pending] = []

    def record(self, *_: Any) -> None:
        """It stands for what is queued now."""
        self.copies = list(self.device.queue)

    def synchronize(self) -> None:
        """Wait for that, and nothing else."""
        self.device.waits[f"event.synchronize at {place()}"] += 1
        if self.device.capture is not None:
            self.device.report("capture", "event.synchronize")
        self.device.finish(self.copies)


class Functions(TorchFunctionMode):
    """Calls from Python: `device=`, and what C++ decides without dispatching."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self.device = device
        self.targets: list[bool] = []
        """Whether each call under way makes tensors of the device."""
        self.methods: dict[str, Callable[..., Any]] = {
            "numpy": self.numpy,
            "__array__": lambda tensor, dtype=None: np.asarray(self.numpy(tensor), dtype),
            "__deepcopy__": self.copy_storage,
            "to": self.to,
            "cpu": lambda tensor: self.to(tensor, "cpu"),
            "tolist": lambda tensor: self.to(tensor, "cpu").tolist(),
            "is_pinned": device.is_pinned,
            "pin_memory": lambda tensor: self.pin(tensor.clone()),
            "mm": self.mm,
        }
        """Functions of tensors that replace PyTorch's."""

    @contextmanager
    def target(self, is_cuda: bool) -> Iterator[None]:
        """New tensors are on the device, or on the host."""
        self.targets.append(is_cuda)
        try:
            yield
        finally:
            self.targets.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in self.methods and args and isinstance(args[0], Tensor):
            return self.methods[name](*args, **kwargs)
        wanted = kwargs.get("device")
        is_pinned_memory = kwargs.pop("pin_memory", None)
        if wanted is None:
            is_cuda = any(isinstance(leaf, Tensor) and is_here(leaf) for leaf in tree_leaves((args, kwargs)))
        else:
            is_cuda = torch.device(wanted).type == "cuda"
            kwargs["device"] = "cpu" if is_cuda else wanted
        if name in {"tensor", "as_tensor", "new_tensor"} and is_cuda:  # made on the host, and copied
            with self.target(False):
                return self.to(func(*args, **kwargs), CUDA)
        with self.target(is_cuda):
            made = func(*args, **kwargs)
        return self.pin(made) if is_pinned_memory else made

    def run_backward(self, run: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass; hooks and recomputation are Python."""
        with self, self.target(is_here(roots[0])):
            return run(roots, *args, **kwargs)

    def numpy(self, tensor: Tensor, *args: Any) -> Any:
        """`Tensor.numpy`."""
        if is_here(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return tensor.numpy(*args)

    def mm(self, left: Tensor, right: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """`torch.mm`; the CPU's has no `out_dtype`."""
        if out_dtype is not None:
            assert is_here(left), "only on a device"
            left, right = left.type(out_dtype), right.type(out_dtype)
        return torch.mm(left, right, **options)

    def copy_storage(self, tensor: Tensor, memo: Any) -> Tensor:
        """`copy.deepcopy`."""
        assert not is_here(tensor), "not supported"
        return copy.deepcopy(tensor, memo)

    def pin(self, tensor: Tensor) -> Tensor:
        """Let a new tensor be in pinned memory."""
        if self.device.capture is not None:
            self.device.report("capture", "an allocation of pinned memory")
        storage: Any = tensor.untyped_storage()
        storage.is_fake_pinned = True
        return tensor

    def to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """`Tensor.to`."""
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        here, dtype = is_here(tensor), dtype or tensor.dtype
        there = here if device is None else device.type == "cuda"
        if tensor.device.type == "meta" or (device is not None and device.type == "meta"):
            to: Any = torch._C.TensorBase.to
            return cast(Tensor, to(tensor, *args, copy=copy, **kwargs))
        if here == there:
            if dtype == tensor.dtype and not copy:
                return tensor
            with self.target(here):
                return torch._C.TensorBase.to(tensor, dtype=dtype, copy=copy)
        assert not (tensor.requires_grad and torch.is_grad_enabled()), "not supported: a gradient between devices"
        with self.target(there):
            made = torch.empty_like(tensor.detach(), dtype=dtype)
        self.device.copy_between(made, tensor.detach(), non_blocking)
        return made


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each operation of PyTorch: where its results are, and whether the host waits for it."""

    def __init__(self, device: FakeCuda, functions: Functions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.functions = functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [is_here(tensor) for tensor in tensors]
        if name == "copy_" and here[0] != here[1]:
            self.device.copy_between(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
            return args[0]
        is_cuda = any(here)
        if is_cuda:
            self._check(func, name, tensors, here, kwargs)
        if not tensors or any(argument.name == "device" for argument in func._schema.arguments):
            targets = self.functions.targets
            is_cuda = targets[-1] if targets else is_cuda
        elif name in INDEXING:
            is_cuda = here[0]
        given = args
        if name == "embedding" and self.device.capture is not None:  # a capture reads no index: any may be there
            given = (args[0], torch.zeros_like(args[1]), *args[2:])
        found = func(*given, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        before = {tensor.untyped_storage()._cdata for tensor in tensors}
        is_view = not func._schema.is_mutable and all(one.untyped_storage()._cdata in before for one in results)
        capture = self.device.capture
        if not is_cuda:
            if capture is not None and not is_view and _real_device.__get__(results[0]).type == "cpu":
                self.device.report("capture", f"{name} on the host")
            return found
        for result in results:
            self.device.mark(result)
            if name in EMPTY and _real_device.__get__(result).type == "cpu":
                with plain():
                    fill_bytes(result.detach(), GARBAGE)
        if capture is not None and not is_view and name not in EMPTY:
            capture.record(func, name, args, kwargs, results)
        return found

    def _check(self, func: Any, name: str, tensors: list[Tensor], here: list[bool], kwargs: Any) -> None:
        odd = [tensor for tensor, is_there in zip(tensors, here, strict=True) if not is_there and tensor.ndim]
        if odd and name not in INDEXING | {"set_"}:
            raise RuntimeError(f"Expected all tensors to be on the same device, cuda:0 and cpu found: {func}")
        is_mask = name in INDEXING and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        is_counted = name == "repeat_interleave" and len(tensors) == 1 and kwargs.get("output_size") is None
        if name in WAITS or is_mask or is_counted or (odd and name in INDEXING):
            self.device.wait(name)


def launch_kernel(device: FakeCuda, run: Callable[..., Any]) -> Callable[..., None]:
    """Replacement of a kernel's launch under the interpreter."""

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("warmup", False):
            return
        name = executor.fn.__name__
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        assert all(map(is_here, tensors)), f"{name}: Pointer argument cannot be accessed from Triton (cpu tensor?)"

        def kind(value: Any) -> Any:
            """Kind of argument that Triton compiles a kernel for."""
            if isinstance(value, Tensor):
                return value.dtype, value.storage_offset() * value.element_size() % 16 == 0
            return value == 1, value % 16 == 0

        constants = tuple(sorted(item for item in kwargs.items() if not isinstance(item[1], Tensor)))
        key = (name, constants, *map(kind, args))
        if device.capture is not None:
            if key not in device.kernels:
                device.report("capture", f"first compilation of {name}")
            device.capture.record(lambda *a, **k: run(executor, *a, **k), name, args, kwargs, [])
            return
        device.kernels.add(key)
        with plain(), torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
            run(executor, *args, **kwargs)

    return launch


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *longest: int,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.attention.varlen.varlen_attn` of torch 2.13 by its definition; refuse what it refuses.

    Its causal mask is aligned at the end: a GPU test says so.
    """
    left, right = window_size
    assert right == 0, "not causal"
    assert q.shape[1] == k.shape[1] == v.shape[1] or enable_gqa
    assert q.dtype == k.dtype == v.dtype
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))
    with plain():
        num_queries, lengths = (starts.diff().tolist() for starts in (query_starts, key_starts))
    assert longest == (max(num_queries), max(lengths))
    return packed_attention_reference(lengths, q, k, v, num_queries, window=None if left < 0 else left + 1)


def varlen_attn(*inputs: Any, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:
    """The same on a device, which has further conditions."""
    q = inputs[0]
    assert q.dtype == torch.bfloat16
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    assert all(map(is_here, inputs[:5]))
    return attend_varlen(*inputs, window_size=window_size, enable_gqa=enable_gqa)


@contextmanager
def fake_cuda(*, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeCuda]:
    """`torch.cuda` is the fake device inside the `with` block."""
    device = FakeCuda()
    executor = import_module("triton.runtime.interpreter").GridExecutor
    properties = SimpleNamespace(
        name="fake",
        total_memory=TOTAL_BYTES,
        multi_processor_count=132,
        shared_memory_per_multiprocessor=228 * 1024,
    )
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: capability,
        "mem_get_info": lambda *_: (device.free_bytes, TOTAL_BYTES),
        "synchronize": lambda *_: device.wait("synchronize"),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=device.register, cudaHostUnregister=device.unregister),
        "check_error": lambda _: None,
        "Stream": lambda *_, **__: Stream(device, "side"),
        "MemPool": SimpleNamespace,
        "use_mem_pool": lambda _: nullcontext(),
        "set_device": lambda _: None,
        "Event": lambda *_, **__: Event(device),
        "CUDAGraph": lambda: Graph(device),
        "graph_pool_handle": object,
        "stream": lambda stream: mock.patch.object(device, "current", stream or device.current),
        "current_stream": lambda *_: device.current,
        "empty_cache": lambda: device.log.append("memory is given back"),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), lambda *_: 0),
        **dict.fromkeys(("reset_peak_memory_stats", "manual_seed_all", "set_rng_state"), lambda *_: None),
    }
    functions, autograd = Functions(device), import_module("torch.autograd")

    def device_of(tensor: Tensor) -> torch.device:
        real: torch.device = _real_device.__get__(tensor)
        return CUDA if not _is_plain and real.type == "cpu" and is_here(tensor) else real

    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(varlen, "varlen_attn", varlen_attn))
        for module in ("build", "build_models"):
            stack.enter_context(mock.patch(f"srtrl.{module}.check_triton"))  # the interpreter needs none
        shapes = ShapePlanner.graph_shapes  # it would compute all of them
        stack.enter_context(mock.patch.object(ShapePlanner, "graph_shapes", lambda planner: shapes(planner)[-1:]))
        run_backward = partial(functions.run_backward, autograd._engine_run_backward)
        stack.enter_context(mock.patch.object(autograd, "_engine_run_backward", run_backward))
        stack.enter_context(mock.patch.object(executor, "__call__", launch_kernel(device, executor.__call__)))
        for name, found in (("device", property(device_of)), ("is_cuda", property(is_here))):
            setattr(torch.Tensor, name, found)
            stack.callback(delattr, torch.Tensor, name)
        stack.enter_context(Operations(device, functions))
        stack.enter_context(functions)
        yield device


def any_cuda() -> AbstractContextManager[FakeCuda]:
    """The fake device, or if there is a real one a record of nothing."""
    return nullcontext(FakeCuda()) if KERNEL_DEVICE == "cuda" else fake_cuda()
