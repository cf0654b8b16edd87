"""Group advantages against docs/method.md, section 3, point 1."""

import math

import pytest
import torch

import reference
from marble_rl import group_advantages

GROUPS = torch.tensor([17, 3, 17, -4, 3, 17, 900, -4, 17, 3, 900, 5])


def scores(k=3, dtype=torch.float64, offset=0.0, seed=0):
    source = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 30.0, 0.02, 5.0])[:k]
    return (torch.randn(len(GROUPS), k, generator=source, dtype=torch.float64) * scale + offset).to(dtype)


def mask(kind):
    if kind == "none":
        return None
    if kind == "scattered":
        return torch.rand(len(GROUPS), 3, generator=torch.Generator().manual_seed(1)) < 0.6
    applicable = torch.ones(len(GROUPS), 3, dtype=torch.bool)
    applicable[GROUPS == 17, 1] = False
    applicable[:, 2] = False
    return applicable


def expected(values, groups, applicable=None, std="group"):
    rows = reference.group_advantages(
        values.double().tolist(), groups.tolist(), None if applicable is None else applicable.tolist(), std
    )
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("kind", ["none", "scattered", "by prompt"])
def test_matches_the_reference(kind, std):
    values, applicable = scores(), mask(kind)
    found = group_advantages(values, GROUPS, applicable, std)
    torch.testing.assert_close(found, expected(values, GROUPS, applicable, std), rtol=1e-10, atol=1e-12)
    if applicable is not None:
        assert (found[~applicable] == 0).all()
    assert found.abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_keeps_the_dtype(dtype):
    values = scores(dtype=dtype)
    found = group_advantages(values, GROUPS)
    assert found.dtype == dtype
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected(values, GROUPS), rtol=epsilon, atol=1e-10)


@pytest.mark.parametrize("std", ["group", "global"])
def test_statistics_are_in_float64(std):
    """A large common offset costs float32 statistics all but three digits."""
    values = scores(k=2, dtype=torch.float32, offset=2e4)
    found = group_advantages(values, GROUPS, std=std)
    torch.testing.assert_close(found.double(), expected(values, GROUPS, std=std), rtol=1e-6, atol=1e-9)


def test_whole_numbers_count_as_scores():
    found = group_advantages(torch.tensor([[0], [1], [1], [0]]), torch.tensor([0, 0, 1, 1]))
    assert found[:, 0].tolist() == pytest.approx([-0.9998, 0.9998, 0.9998, -0.9998], abs=1e-6)


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1 / 3, 1e12])
def test_constant_group_is_exactly_zero(constant, std):
    values = torch.tensor([[constant]] * 7 + [[1.0], [2.0]], dtype=torch.float64)
    found = group_advantages(values, torch.tensor([1] * 7 + [0] * 2), std=std)
    assert (found[:7] == 0).all()
    assert found[7] < 0 < found[8]


@pytest.mark.parametrize(
    ("mean", "deviation", "informative"),
    [(0.0, 0.9e-6, False), (0.0, 1.1e-6, True), (1000.0, 0.9e-3, False), (1000.0, 1.1e-3, True), (-1e3, 9e-4, False)],
)
@pytest.mark.parametrize("std", ["group", "global"])
def test_what_counts_as_constant(mean, deviation, informative, std):
    """The std of a group counts from 1e-6 max(1, |mean|) on."""
    values = torch.tensor([[mean - deviation], [mean + deviation], [0.0], [8.0]], dtype=torch.float64)
    found = group_advantages(values, torch.tensor([0, 0, 1, 1]), std=std)[:2, 0]
    assert bool((found != 0).all()) == bool((found != 0).any()) == informative


@pytest.mark.parametrize("std", ["group", "global"])
def test_a_single_valid_sample_is_zero(std):
    values = torch.tensor([[3.0], [9.0], [1.0], [5.0], [8.0]], dtype=torch.float64)
    applicable = torch.tensor([[True], [False], [True], [True], [True]])
    found = group_advantages(values, torch.tensor([0, 0, 1, 1, 2]), applicable, std)[:, 0]
    assert found[0] == found[1] == found[4] == 0
    assert found[3] == -found[2] > 0.5


def test_global_std_is_of_the_group_centred_rewards():
    """Group means a hundred apart do not shrink the advantages, and the wide group keeps its lead."""
    values = torch.tensor([[0.0], [2.0], [100.0], [106.0]], dtype=torch.float64)
    found = group_advantages(values, torch.tensor([0, 0, 1, 1]), std="global")[:, 0]
    std = math.sqrt((1 + 1 + 9 + 9) / 4)
    assert found.tolist() == pytest.approx([x / (std + 1e-4) for x in (-1, 1, -3, 3)], rel=1e-12)


@pytest.mark.parametrize("std", ["group", "global"])
def test_rewards_do_not_mix(std):
    values = scores()
    alone = [group_advantages(values[:, [k]], GROUPS, std=std) for k in range(3)]
    torch.testing.assert_close(group_advantages(values, GROUPS, std=std), torch.cat(alone, dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("std", ["group", "global"])
def test_neither_the_order_of_rows_nor_the_ids_matter(std):
    values, applicable = scores(), mask("scattered")
    found = group_advantages(values, GROUPS, applicable, std)
    order = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(5))
    shuffled = group_advantages(values[order], -7 * GROUPS[order] + 2, applicable[order], std)
    torch.testing.assert_close(shuffled, found[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_scores(bad):
    """They are an error where the reward applies, and never read where it does not."""
    values, applicable = scores(), mask("by prompt")
    clean = group_advantages(values, GROUPS, applicable)
    values[~applicable] = bad
    assert torch.equal(group_advantages(values, GROUPS, applicable), clean)
    values[1, 0] = bad
    with pytest.raises(ValueError, match="NaN"):
        group_advantages(values, GROUPS, applicable)


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_nothing_to_compare(shape, std):
    found = group_advantages(torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long), std=std)
    assert found.shape == shape


@pytest.mark.parametrize("std", ["group", "global"])
def test_reward_that_applies_nowhere(std):
    applicable = torch.zeros(len(GROUPS), 3, dtype=torch.bool)
    found = group_advantages(torch.full((len(GROUPS), 3), math.nan), GROUPS, applicable, std)
    assert (found == 0).all()


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(4,), (4,)], {}),
        ([(4, 2), (3,)], {}),
        ([(4, 2), (4, 1)], {}),
        ([(4, 2), (4,)], {"applicable": torch.ones(4, 1, dtype=torch.bool)}),
        ([(4, 2), (4,)], {"std": "batch"}),
    ],
)
def test_bad_input_is_refused(shapes, options):
    values, group_ids = shapes
    with pytest.raises(ValueError, match=r"must be"):
        group_advantages(torch.zeros(values), torch.zeros(group_ids, dtype=torch.long), **options)


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("scale", [1e30, 1e160, 8e307])
def test_absurd_scores_have_finite_advantages(std, scale):
    """The same ones as scores of a common size, but for epsilon, which does not matter at that size."""
    values = torch.tensor([[-1.0], [0.5], [1.0], [2.0], [2.0], [0.25]], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    found = group_advantages(scale * values, groups, std=std)
    torch.testing.assert_close(found, group_advantages(1e9 * values, groups, std=std))
