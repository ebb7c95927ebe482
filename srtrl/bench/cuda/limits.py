"""What the device can do, measured on the spot: bandwidth, matrix products, launches. And how to time work on it."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from srtrl.bench.cuda.plan import GpuBench, Limits
from srtrl.bench.cuda.report import SectionReport
from srtrl.engine.engine import EngineOptions
from srtrl.model.transformer import ModelConfig, Transformer

REPEATS = 12
WARM_UP = 3
GIGA, TERA = 1e9, 1e12


def time_on_device(work: Callable[[], object], device: torch.device, *, repeats: int = REPEATS) -> float:
    """Median seconds of `work` on the device, by its own clock; of the host's on a CPU. Some calls warm up."""
    for _ in range(WARM_UP):
        work()
    if device.type != "cuda":
        return median(_host_seconds(work) for _ in range(repeats))
    seconds: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return median(seconds)


def _host_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_limits(bench: GpuBench, report: SectionReport) -> None:
    """The section: fills `bench.limits`."""
    device, sizes = bench.device, bench.sizes
    copied = measure_copy(sizes.copy_bytes, device)
    read = measure_read(sizes.copy_bytes, device)
    matmul = measure_matmul(sizes.matmul_width, device)
    launch, node, graph = measure_launches(sizes.num_launches, device)
    limits = Limits(
        copy_bandwidth=copied,
        read_bandwidth=read,
        matmul_rate=matmul,
        launch_seconds=launch,
        graph_node_seconds=node,
        graph_launch_seconds=graph,
    )
    bench.limits = limits
    size = f"{sizes.copy_bytes / 2**30:.3g} GiB"
    report.add(f"copy on the device, {size}, read and written", f"{copied / TERA:.2f} TB/s")
    report.add(f"reading (a float32 sum), {size}", f"{read / TERA:.2f} TB/s")
    report.add(f"bfloat16 product, {sizes.matmul_width} cubed, random data", f"{matmul / TERA:.0f} TFLOP/s")
    report.add("host, to launch one small kernel", f"{1e6 * launch:.1f} us")
    report.add("small kernel in a graph; host, to launch the graph", f"{1e6 * node:.1f} us; {1e6 * graph:.1f} us")
    report.values["limits"] = {name: getattr(limits, name) for name in Limits.__slots__}
    report.notes.append(
        "Medians. The limits of later sections are the larger of the two bandwidths and this matrix product's rate."
    )


def measure_copy(num_bytes: int, device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / time_on_device(lambda: target.copy_(source), device)


def measure_read(num_bytes: int, device: torch.device) -> float:
    """Bytes read a second."""
    source = torch.rand(num_bytes // 4, device=device)
    return num_bytes / time_on_device(source.sum, device)


def measure_matmul(width: int, device: torch.device) -> float:
    """Operations a second."""
    left, right = (torch.randn(width, width, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * width**3 / time_on_device(lambda: torch.mm(left, right, out=out), device)


def measure_launches(num_launches: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds of the host for one small kernel; of the device for one in a graph; of the host for the graph.

    Without CUDA there are no graphs: the last two are then NaN.
    """
    numbers = torch.zeros(1024, device=device)

    def launch_all() -> None:
        for _ in range(num_launches):
            numbers.add_(1)

    launch_all()
    if device.type != "cuda":
        return _host_seconds(launch_all) / num_launches, float("nan"), float("nan")
    torch.cuda.synchronize(device)
    launch = median(_host_seconds(launch_all) for _ in range(REPEATS)) / num_launches
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    node = time_on_device(graph.replay, device) / num_launches
    torch.cuda.synchronize(device)
    replays = []
    for _ in range(REPEATS):
        replays.append(_host_seconds(graph.replay))
        torch.cuda.synchronize(device)
    return launch, node, median(replays)


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that a decode step reads: all, but for the rows of the embedding that no token asks for.

    A tied embedding is read whole, as the output head.
    """
    parameters: list[Tensor] = [p for name, p in model.named_parameters() if name != "embedding"]
    parameters += [model.head_weight] if model.head is None else []
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of so many tokens, all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize * num_tokens


def step_flops(config: ModelConfig, num_rows: int, num_keys: int) -> float:
    """Operations of a decode step of so many rows that see `num_keys` keys together, logits of all rows included."""
    from srtrl.model.transformer import model_flops

    products = model_flops(config, [1]) / 3 * num_rows  # a row that sees one key
    return products + 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * (
        num_keys - num_rows
    )


def describe_options(options: EngineOptions) -> str:
    """What tells two engines of this benchmark apart."""
    mode = "deterministic" if options.deterministic else "free"
    return f"{mode}, {'graphs' if options.cuda_graphs else 'no graphs'}"
