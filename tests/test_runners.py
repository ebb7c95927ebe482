"""Requirements of every runner: each row of a step has the token and the log-prob that the model itself gives it."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from runner_cases import (
    MAX_NODES,
    PAGE_SIZE,
    RunnerFactory,
    Samples,
    branch,
    cuda_runner,
    random_trees,
    runner_options,
    runner_policy,
)

from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.runner import RowFilters, Runner, page_bytes_of
from srtrl.engine.sampling import filter_top_k_top_p
from srtrl.model.transformer import Transformer


def by_kernels(policy: Transformer) -> Runner:
    """The CUDA runner: on a GPU, or with interpreted kernels."""
    return cuda_runner(policy)


def on_the_cpu(policy: Transformer) -> Runner:
    """The CPU runner."""
    return CpuRunner(policy.cpu(), runner_options())


HAS_TRITON = find_spec("triton") is not None
RUNNERS = pytest.mark.parametrize("make_runner", [on_the_cpu, *([by_kernels] if HAS_TRITON else [])])


@RUNNERS
def test_rows_of_trees_and_chunks_are_sampled_as_the_model_says(make_runner: RunnerFactory) -> None:
    """Prompts in chunks, beside a sample that decodes; trees of one and two words of bits; accepted paths."""
    random, policy = np.random.default_rng(0), runner_policy()
    samples = Samples(make_runner(policy), policy)
    samples.check_step([0], chunks=[samples.chunk(1, 0, 5), samples.chunk(2, 0, 5)])
    samples.check_step([0], random_trees(random, [4]), [samples.chunk(1, 5, 8)])
    for sizes in ([2, 0, 7], [0, MAX_NODES, 1]):
        trees = random_trees(random, sizes)
        samples.check_step([0, 1, 2], trees)
        samples.accept([0, 1, 2], trees, [branch(tree, tree.num_nodes - 1) for tree in trees])
    samples.check_step([2, 0])
    samples.check_step([1])


@RUNNERS
def test_top_k_and_top_p_decide_the_token_and_not_the_log_prob(make_runner: RunnerFactory) -> None:
    policy = runner_policy()
    samples = Samples(make_runner(policy), policy)
    samples.prefill()
    trees = random_trees(np.random.default_rng(0), [3, 0, 2])
    top_k, top_p = np.array([2, 2, 0, 1, 0, 5, 0, 0]), np.array([1.0, 0.3, 1.0, 1.0, 0.2, 1.0, 1.0, 0.01])
    found = samples.step([0, 1, 2], trees, filters=RowFilters(top_k=top_k, top_p=top_p))
    logits = samples.expected_logits([0, 1, 2], trees)
    temperatures = torch.from_numpy(samples.batch.temperatures[[0, 0, 0, 0, 1, 2, 2, 2]])
    filtered = filter_top_k_top_p(logits, temperatures, torch.from_numpy(top_k), torch.from_numpy(top_p))
    tokens, logprobs = samples.sample(logits, [0, 1, 2], trees, filtered)
    assert found.token_ids.tolist() == tokens.tolist()
    assert found.token_ids.tolist() != samples.sample(logits, [0, 1, 2], trees)[0].tolist()
    np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-4)
    samples.check_step()


@RUNNERS
def test_new_weights_are_decoded_with_and_broken_ones_show(make_runner: RunnerFactory) -> None:
    policy = runner_policy()
    runner = make_runner(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    runner.weights_changed()
    assert runner.model is policy
    samples = Samples(runner, policy)
    samples.prefill()
    samples.check_step()
    with torch.no_grad():
        policy.final_norm.fill_(torch.nan)
    runner.weights_changed()
    with np.errstate(all="ignore"):
        assert not np.isfinite(samples.step().logprobs).any()


@RUNNERS
def test_steps_are_timed_up_to_the_edges_of_their_padding_and_break_no_page(make_runner: RunnerFactory) -> None:
    policy = runner_policy()
    samples = Samples(runner := make_runner(policy), policy)
    assert page_bytes_of(policy, PAGE_SIZE) == 2 * 2 * PAGE_SIZE * 2 * 16 * 4
    edges = runner.row_edges(20)
    assert edges == sorted(set(edges))
    assert edges[-1] >= 20
    assert 0 < runner.time_step(edges[2], 9, 1) < 60
    num_pages = runner.num_pages
    assert num_pages > 3
    runner.allocate_pages(3)
    assert 0 < runner.time_step(edges[2], 15, 2) < 60  # more pages than there are: they are shared
    assert runner.was_prepared
    runner.allocate_pages(num_pages)
    samples.prefill()
    samples.check_step()


@RUNNERS
def test_positions_are_copied_as_if_all_sources_were_read_first(make_runner: RunnerFactory) -> None:
    runner = make_runner(runner_policy())
    runner.allocate_pages(6)
    cache = runner.cache
    by_page = [cache.key_pages.permute(0, 1, 4, 2, 3), cache.value_pages.transpose(2, 3)]  # [layers, P, S, K, E]
    for pages in by_page:
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(len(pages))))
    expected = [pages.clone(memory_format=torch.contiguous_format) for pages in by_page]
    sources, targets = np.array([3, 5, 6, 17], np.int32), np.array([2, 3, 5, 16], np.int32)
    for pages in expected:
        heads = pages.flatten(1, 2)  # a view
        heads[:, targets] = heads[:, sources]
    cache.move_indices(sources, targets)
    for pages, wanted in zip(by_page, expected, strict=True):
        assert torch.equal(pages, wanted)
