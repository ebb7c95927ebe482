"""The check that deterministic mode makes of a CUDA device's matrix products, with products that pass and do not."""

import pytest
import torch
from device_cases import device_policy
from torch import Tensor

from srtrl.engine.determinism import check_row_places
from srtrl.model.fused_forward import linear


def by_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows_at_once: int) -> Tensor:
    """A product that is the same for every row, on any library."""
    return torch.cat([linear(row[None], weight, bias, 1) for row in hidden])


def test_products_that_treat_all_rows_alike_pass_and_each_shape_is_tried_once() -> None:
    policy = device_policy("cpu", torch.bfloat16)
    shapes = []

    def logged(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows_at_once: int) -> Tensor:
        assert len(hidden) == rows_at_once == 8
        assert (hidden == hidden[0]).all()
        shapes.append((*weight.shape, bias is not None))
        return by_rows(hidden, weight, bias, rows_at_once)

    check_row_places(policy, 8, logged)
    assert len(shapes) == len(set(shapes)) == 5
    with torch.no_grad():
        policy.head_weight[3, 3] = torch.nan  # is reported elsewhere, by its name
    check_row_places(policy, 8, by_rows)


@pytest.mark.parametrize("width", [23, 48])
def test_a_product_that_sums_a_row_by_its_place_is_found(width: int) -> None:
    def broken(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows_at_once: int) -> Tensor:
        product = by_rows(hidden, weight, bias, rows_at_once)
        if width in weight.shape:
            product[5:7, 2] += 1e-3
        return product

    with pytest.raises(ValueError, match=r"of 8 equal rows .*2 came out .*Leave rollout.deterministic out"):
        check_row_places(device_policy("cpu"), 8, broken)
