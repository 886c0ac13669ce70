"""The token sampler: exact frequencies, truncation like transformers', and reproducible uniform numbers."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_odpo.engine.sampling import sample, uniforms_for
from mindspeed_odpo.errors import ConfigError, WorkerError


def _chi_square(drawn: torch.Tensor, probs: torch.Tensor) -> float:
    n = len(drawn)
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    possible = probs > 0
    assert counts[~possible].sum() == 0
    return float(((counts - n * probs)[possible] ** 2 / (n * probs[possible])).sum())


def _sweep(n: int) -> torch.Tensor:
    """n evenly spread uniforms: frequencies then come out exact to one count a token."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


@pytest.mark.parametrize("vocab", [7, 256, 1000])
def test_frequencies_match_the_softmax(vocab: int) -> None:
    """Chi-square of random draws stays within 5 deviations, for one block, whole blocks and a ragged last block."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(1, vocab, generator=g) * 2
    probs = (logits[0].double() / 0.8).softmax(-1)
    drawn = torch.cat(
        [sample(logits.expand(5000, -1), torch.rand(5000, dtype=torch.float64, generator=g), temperature=0.8) for _ in range(4)]
    )
    freedom = vocab - 1
    assert abs(_chi_square(drawn, probs) - freedom) < 5 * math.sqrt(2 * freedom)


def test_inverse_cdf_by_hand() -> None:
    """p = (0.5, 0.25, 0.25): the token changes at u = 0.5 and u = 0.75, and u = 0 and u just below 1 are legal."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(6, -1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_impossible_tokens_are_never_drawn() -> None:
    """Weight 0 at both ends and whole empty blocks: u = 0 and u just below 1 still give the only possible tokens."""
    logits = torch.full((3, 1000), -1e9)
    logits[:, 300] = 0.0
    logits[:, 700] = 0.0
    assert sample(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [300, 700, 700]


def test_the_largest_uniform_stays_inside_the_vocabulary() -> None:
    """500 rows of one block at u just below 1: the block's sum and the running sum differ in the last bit, in either
    direction, and a number between the two must not give the id behind the last one."""
    logits = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)) * 6  # weights far enough apart to round
    assert int(sample(logits, torch.full((500,), 1 - 2**-53, dtype=torch.float64)).max()) == 255


def test_rare_tokens_survive_a_large_vocabulary() -> None:
    """One token with half the weight before 50,000 equal ones: a float32 running sum would skip most of those."""
    logits = torch.zeros(1, 50_001)
    logits[0, 0] = math.log(50_000 * 1000)
    u = torch.tensor([(50_000_000 + i + 0.5) / 50_050_000 for i in (0, 1, 25_000, 49_999)], dtype=torch.float64)
    # float32 rounds exp() of the 50,000, so the boundary may lie a few tokens off; the order and distance may not
    drawn = sample(logits.expand(4, -1), u)
    assert (drawn - torch.tensor([1, 2, 25_001, 50_000])).abs().max() <= 3
    assert int(drawn[1] - drawn[0]) == 1


def test_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]], dtype=torch.bfloat16)
    assert sample(logits, torch.zeros(2, dtype=torch.float64), temperature=0.0).tolist() == [1, 0]


def test_top_k_keeps_the_k_likeliest() -> None:
    """p = (.1, .4, .3, .2), k = 2: tokens 1 and 2 at 4 : 3."""
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().expand(7000, -1)
    assert torch.bincount(sample(logits, _sweep(7000), top_k=2), minlength=4).tolist() == [0, 4000, 3000, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.05, [0, 1, 0, 0]), (0.39, [0, 1, 0, 0]), (0.41, [0, 4, 3, 0]), (0.71, [0, 4, 3, 2]), (0.95, [1, 4, 3, 2])]
)
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: list[int]) -> None:
    """p = (.1, .4, .3, .2): the set grows when top_p passes .4, .7 and .9; one token stays at any top_p."""
    n = 1000 * sum(kept)
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().expand(n, -1)
    assert torch.bincount(sample(logits, _sweep(n), top_p=top_p), minlength=4).tolist() == [1000 * k for k in kept]


def test_nucleus_counts_after_top_k_and_temperature() -> None:
    """p = (.4, .3, .2, .1): top_k = 2 leaves (.571, .429), of which top_p = .5 keeps one; without top_k it keeps two.
    At temperature .5 the first has .533 of all, so that it is alone as well."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(100, -1)
    assert set(sample(logits, _sweep(100), top_p=0.5).tolist()) == {0, 1}
    assert set(sample(logits, _sweep(100), top_p=0.5, top_k=2).tolist()) == {0}
    assert set(sample(logits, _sweep(100), top_p=0.5, temperature=0.5).tolist()) == {0}


def test_truncation_equals_transformers() -> None:
    """Both limits at once on flat and peaked rows: the same tokens stay possible, with the same probabilities. The flat
    rows need more than the 512 largest tokens that the nucleus looks at first."""
    lp = pytest.importorskip("transformers.generation.logits_process")
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 1200, generator=g) * torch.tensor([[0.3], [1.0], [3.0], [8.0]])
    warped = logits / 0.7
    for warp in (lp.TopKLogitsWarper(1000), lp.TopPLogitsWarper(0.9)):
        warped = warp(None, warped)
    for row, probs in zip(logits, warped.double().softmax(-1), strict=True):
        n = 4000
        drawn = torch.cat([sample(row.expand(1000, -1), u, 0.7, 0.9, 1000) for u in _sweep(n).split(1000)])
        assert (torch.bincount(drawn, minlength=1200) - n * probs).abs().max() < 1.01


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_their_row(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(WorkerError, match="^answer 1: logits are not finite"):
        sample(logits, torch.zeros(3, dtype=torch.float64), temperature, label="answer {}".format)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_settings_out_of_range_are_named(setting: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        sample(torch.zeros(1, 4), torch.zeros(1, dtype=torch.float64), **setting)


def test_uniforms_belong_to_slot_and_answer() -> None:
    """A rank that asks for slots 5 and 2 gets the rows of one that asks for 0..7; a longer answer continues the stream.
    The first number is fixed here: a new release must not change what a seed means."""
    whole = uniforms_for(1, 2, torch.arange(8), 3, 20)
    assert whole.shape == (8, 3, 20) and whole.dtype == torch.float64
    assert torch.equal(uniforms_for(1, 2, torch.tensor([5, 2]), 3, 20), whole[[5, 2]])
    assert torch.equal(uniforms_for(1, 2, torch.arange(8), 2, 5), whole[:, :2, :5])
    assert float(uniforms_for(0, 0, torch.tensor([0]), 1, 1)) == 0.5528852616660438


def test_uniforms_are_uniform_and_differ() -> None:
    """Another seed, step, slot or answer gives other numbers; 20,000 of them fill 20 bins evenly (chi-square, 19 degrees)."""
    a = uniforms_for(1, 2, torch.arange(10), 4, 500)
    assert len(a.unique()) == a.numel()
    assert not (a == uniforms_for(2, 2, torch.arange(10), 4, 500)).any()
    assert not (a == uniforms_for(1, 3, torch.arange(10), 4, 500)).any()
    assert float(a.min()) >= 0 and float(a.max()) < 1
    assert _chi_square((a.flatten() * 20).long(), torch.full((20,), 0.05, dtype=torch.float64)) < 19 + 5 * math.sqrt(38)
