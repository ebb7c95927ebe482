"""Which runner computes on which device."""

from importlib.util import find_spec

from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.options import EngineOptions
from srtrl.engine.runner import Runner
from srtrl.model.transformer import Transformer


def make_runner(policy: Transformer, options: EngineOptions, max_sequence_tokens: int) -> Runner:
    """The runner for the policy's device, without pages yet.

    Raises:
        ValueError: Triton is not installed, or an option is not for this device.
    """
    if policy.device.type == "cpu":
        return CpuRunner(policy, options)
    if options.deterministic:
        raise ValueError(
            "rollout.deterministic: true is for decoding on a CPU: on a CUDA device kernels sum a row in an order that "
            "depends on the batch. Leave it out; drafts still do not change the distribution of the tokens"
        )
    if find_spec("triton") is None:
        raise ValueError(
            "decoding on a CUDA device needs Triton, which PyTorch's CUDA builds for Linux include and this "
            "installation lacks: `pip install triton`, or run with device=cpu"
        )
    from srtrl.engine.cuda_runner import CudaRunner

    return CudaRunner(policy, options, max_sequence_tokens)
