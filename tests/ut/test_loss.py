"""The losses against hand-worked numbers, finite differences, TRL's own code, and mutants.

None of it shows that the log-probs that go in are right; test_logprobs.py and test_forward.py do.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import mindspeed_odpo.loss as losses
from mindspeed_odpo.keys import LOSS_TYPES, SMOOTHED

NAN = float("nan")


def column(*values: float, **settings) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **settings)


def loss(chosen: float, rejected: float, **settings) -> float:
    """Loss of one pair whose log-ratios to the reference are ``chosen`` and ``rejected``, from four unequal numbers."""
    values = (column(x) for x in (chosen - 12, rejected - 22, -12, -22))
    return losses.preference_loss(*values, **{"beta": 0.1, **settings}).item()


def smoothing_of(kind: str) -> float:
    return 0.1 if kind in SMOOTHED else 0.0


# ---------------------------------------------------------------- closed forms

# log sigmoid(0.6) = -0.437488, log sigmoid(-0.6) = -1.037488, sigmoid(0.6) = 0.645656; beta 0.1, so 1 / (2 beta) = 5.
HAND = [
    # loss, smoothing, log-ratio of chosen, of rejected, loss by hand
    ("sigmoid", 0, 0, 0, 0.693147),
    ("sigmoid", 0, 4, -2, 0.437488),
    ("sigmoid", 0, -1, 5, 1.037488),
    ("sigmoid", 0, 10, -15, 0.078890),
    ("sigmoid", 0.1, 4, -2, 0.497488),  # 0.9 * 0.437488 + 0.1 * 1.037488
    ("robust", 0, 4, -2, 0.437488),
    ("robust", 0.1, 0, 0, 0.693147),
    ("robust", 0.1, 4, -2, 0.362488),  # (0.9 * 0.437488 - 0.1 * 1.037488) / 0.8
    ("hinge", 0, 0, 0, 1),
    ("hinge", 0, 4, -2, 0.4),
    ("hinge", 0, -1, 5, 1.6),
    ("hinge", 0, 10, -15, 0),  # 1 - 2.5 < 0
    ("ipo", 0, 0, 0, 25),
    ("ipo", 0, 4, -2, 1),
    ("ipo", 0, -1, 5, 121),
    ("exo_pair", 0.1, 0, 0, 0.510826),  # -ln 2 - ln(0.9 * 0.1) / 2
    ("exo_pair", 0.1, 4, -2, 0.233840),  # 0.645656 (-0.437488 + 0.105361) + 0.354344 (-1.037488 + 2.302585)
    ("nca_pair", 0, 0, 0, 1.386294),  # 2 ln 2
    ("nca_pair", 0, 4, -2, 1.268592),  # 0.513015 + 0.913015 / 2 + 0.598139 / 2
    ("sppo_hard", 0, 0, 0, 50),
    ("sppo_hard", 0, 4, -2, 10),  # (4 - 5)**2 + (-2 + 5)**2
    ("sppo_hard", 0, -1, 5, 136),  # (-1 - 5)**2 + (5 + 5)**2
    ("apo_zero", 0, 0, 0, 1),
    ("apo_zero", 0, 4, -2, 0.851478),  # sigmoid(-0.4) + sigmoid(-0.2) = 0.401312 + 0.450166
    ("apo_down", 0, 0, 0, 1),
    ("apo_down", 0, 4, -2, 0.953032),  # sigmoid(0.4) + sigmoid(-0.6) = 0.598688 + 0.354344
]


def check_by_hand(kinds: tuple[str, ...] = LOSS_TYPES) -> None:
    for kind, smoothing, chosen, rejected, expected in HAND:
        if kind in kinds:
            assert loss(chosen, rejected, loss_type=kind, label_smoothing=smoothing) == pytest.approx(expected, abs=1.5e-6)


def check_beta() -> None:
    """sigmoid, beta 0.2, margin 3: the same 0.6. ipo, beta 0.25, margin 6: (6 - 2)**2."""
    assert loss(2, -1, loss_type="sigmoid", beta=0.2) == pytest.approx(0.437488, abs=1e-6)
    assert loss(4, -2, loss_type="ipo", beta=0.25) == pytest.approx(16)


def check_simpo() -> None:
    """Means a token -0.5 and -1.2, beta 2, gamma / beta 0.3: x = 2 (0.7 - 0.3) = 0.8, -log sigmoid(x) = 0.371101,
    -log sigmoid(-x) = 1.171101. The reference is NaN, asks for a gradient, and gets none."""
    for smoothing, expected in ((0.0, 0.371101), (0.1, 0.451101)):
        policy = [column(-0.5, requires_grad=True), column(-1.2, requires_grad=True)]
        ref = [column(NAN, requires_grad=True), column(NAN, requires_grad=True)]
        got = losses.preference_loss(*policy, *ref, loss_type="simpo", beta=2.0, label_smoothing=smoothing, gamma_beta_ratio=0.3)
        assert got.item() == pytest.approx(expected, abs=1e-6)
        got.backward()
        slope = -2 * (1 / (1 + math.exp(0.8)) - smoothing)
        assert [x.grad.item() for x in policy] == pytest.approx([slope, -slope])
        assert [x.grad for x in ref] == [None, None]


def check_reductions() -> None:
    """Log-ratios of 4 nats over 2 tokens and 2 nats over 4: margin 2 as sums, 2 - 0.5 = 1.5 as means, 0.2 over rows of 10; IPO
    (margin - 5)**2: 9, 12.25, 23.04. Two answers of equal sum are equal as sums, 4 to 1 as means."""
    sums, lengths = column(4, 2), torch.tensor([2, 4])
    for reduction, margin, ipo in (("sum", 2.0, 9.0), ("masked_mean", 1.5, 12.25), ("padded_mean", 0.2, 23.04)):
        chosen, rejected = losses.reduced(sums, lengths, reduction, 10).tolist()
        assert chosen - rejected == pytest.approx(margin)
        assert loss(chosen, rejected, loss_type="ipo") == pytest.approx(ipo)
    assert losses.reduced(column(-2, -2), torch.tensor([1, 4]), "sum", 10).tolist() == [-2, -2]
    assert losses.reduced(column(-2, -2), torch.tensor([1, 4]), "masked_mean", 10).tolist() == [-2, -0.5]


def check_empty_answers() -> None:
    """An answer without a token is 0 with gradient 0, even where its sum is NaN; the others do not notice."""
    for reduction, expected in (("sum", -6.0), ("masked_mean", -2.0), ("padded_mean", -0.6)):
        sums = column(-6, 0, NAN, requires_grad=True)
        got = losses.reduced(sums, torch.tensor([3, 0, 0]), reduction, 10)
        assert got.tolist() == pytest.approx([expected, 0, 0])
        got.sum().backward()
        assert sums.grad.tolist() == pytest.approx([expected / -6, 0, 0])


def check_sft() -> None:
    """6 nats over 3 tokens are 2 nats a token, 8 over 2 are 4, once each; an empty answer is 0."""
    assert losses.sft_loss(column(-6, -8, 0), torch.tensor([3, 2, 0])).tolist() == pytest.approx([2, 4, 0])


CHECKS = (check_by_hand, check_beta, check_simpo, check_reductions, check_empty_answers, check_sft)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_right_code_passes(check):
    check()


@pytest.mark.parametrize("kind", [kind for kind in LOSS_TYPES if kind != "simpo"])
def test_every_loss_has_hand_worked_numbers(kind):
    assert sum(row[0] == kind for row in HAND) >= 2
    check_by_hand((kind,))


def test_one_pair_gives_another_number_under_every_loss():
    """One token each, margin 6: no loss type can stand in silently for another."""
    numbers = [loss(4, -2, loss_type=kind, label_smoothing=smoothing_of(kind)) for kind in LOSS_TYPES]
    assert len({round(number, 4) for number in numbers}) == len(LOSS_TYPES)


def test_without_a_difference_to_the_reference_the_loss_is_ln_2_in_fp32():
    policy = torch.tensor([-57.25, -81.5])
    got = losses.preference_loss(policy, policy - 3, policy, policy - 3, loss_type="sigmoid", beta=0.1)
    assert got.dtype == torch.float32
    assert (got - math.log(2)).abs().max() < 1e-6


# ---------------------------------------------------------------- gradients, stability


@pytest.mark.parametrize(
    ("kind", "smoothing"),
    [(kind, s) for kind in LOSS_TYPES for s in ((0.0, 0.2) if kind in SMOOTHED else (0.0,)) if s or kind != "exo_pair"],
)
def test_gradient_against_finite_differences(kind, smoothing):
    torch.manual_seed(0)
    inputs = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2 if kind == "simpo" else 4)]
    ref = [torch.full((5,), NAN, dtype=torch.float64)] * (4 - len(inputs))

    def call(*values):
        return losses.preference_loss(*values, *ref, loss_type=kind, beta=0.3, label_smoothing=smoothing, gamma_beta_ratio=0.7)

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
def test_gradient_of_reductions_against_finite_differences(reduction):
    lengths = torch.tensor([[3, 1], [2, 0]])
    sums = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: losses.reduced(x, lengths, reduction, 10), (sums,))
    assert losses.reduced(sums.float(), lengths, reduction, 10).dtype == torch.float32


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_far_margins_stay_finite_in_fp32(kind, beta):
    """Log-ratios of +-1e4 in every combination: loss and gradient are those of f64, so neither overflows nor is lost."""
    ends = (1e4, -1e4, 0.0)
    policy = torch.tensor([[c, r] for c in ends for r in ends]).T

    def run(dtype):
        chosen, rejected = (row.to(dtype).clone().requires_grad_() for row in policy)
        zero = torch.zeros(len(chosen), dtype=dtype)
        settings = {"loss_type": kind, "beta": beta, "label_smoothing": smoothing_of(kind), "gamma_beta_ratio": 1.4}
        got = losses.preference_loss(chosen, rejected, zero, zero, **settings)
        got.sum().backward()
        return torch.stack([got.detach(), chosen.grad, rejected.grad])

    got, exact = run(torch.float32), run(torch.float64)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


def test_tails_keep_their_digits_in_fp32():
    """apo_zero, beta c = 40, beta r = -40: 2 e**-40. Written as 1 - sigmoid it would be 0 with gradient 0, as it is in TRL."""
    chosen, zero = torch.tensor([400.0], requires_grad=True), torch.zeros(1)
    got = losses.preference_loss(chosen, torch.tensor([-400.0]), zero, zero, loss_type="apo_zero", beta=0.1)
    got.backward()
    assert got.item() == pytest.approx(2 * math.exp(-40), rel=1e-5)
    assert chosen.grad.item() == pytest.approx(-0.1 * math.exp(-40), rel=1e-5)


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_an_empty_answer_beside_a_normal_pair(kind, reduction):
    """The second pair's chosen answer has no token: finite, no NaN gradient; left out, the first pair's gradient is its own."""

    def gradient(pairs: int, weight: torch.Tensor) -> torch.Tensor:
        sums = column(-6, 0, -5, -9, requires_grad=True)
        each = losses.reduced(sums, torch.tensor([3, 0, 2, 4]), reduction, 10).view(2, 2)[:, :pairs]
        settings = {"loss_type": kind, "beta": 0.1, "label_smoothing": smoothing_of(kind), "gamma_beta_ratio": 1.4}
        got = losses.preference_loss(*each, *(each.detach() + 0.5), **settings)
        assert got.isfinite().all()
        (got * weight).sum().backward()
        return sums.grad

    assert gradient(2, column(1, 1)).isfinite().all()
    assert torch.equal(gradient(2, column(1, 0)), gradient(1, column(1)))


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
def test_the_padding_of_a_batch_does_not_matter(reduction):
    """Answers of 3 tokens in rows of 10 and of 500: sums go in, and padded_mean divides by its constant, not by the row."""
    torch.manual_seed(0)
    tokens = torch.randn(4, 3, dtype=torch.float64)
    found = []
    for width in (10, 500):
        rows = F.pad(tokens, (0, width - 3), value=-7.0)
        mask = torch.arange(width).expand(4, -1) < 3
        each = losses.reduced((rows * mask).sum(1), mask.sum(1), reduction, 500)
        found.append(losses.preference_loss(*each.view(2, 2), *torch.zeros(2, 2), loss_type="ipo", beta=0.1))
    assert torch.equal(*found)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("beta", [0.0, -0.1, NAN, math.inf])
def test_beta_must_be_positive_and_finite(beta):
    with pytest.raises(ValueError, match=rf"dpo_beta {beta:g}: must be more than 0 and finite; 0.1 is usual"):
        loss(0, 0, loss_type="sigmoid", beta=beta)


@pytest.mark.parametrize("smoothing", [-0.1, 0.5, 1.0, NAN])
def test_label_smoothing_must_be_a_probability_below_one_half(smoothing):
    with pytest.raises(ValueError, match=rf"dpo_label_smoothing {smoothing:g}: must be in \[0, 0.5\)"):
        loss(0, 0, loss_type="robust", label_smoothing=smoothing)


@pytest.mark.parametrize("kind", [kind for kind in LOSS_TYPES if kind not in SMOOTHED])
def test_label_smoothing_with_a_loss_that_has_none(kind):
    with pytest.raises(ValueError, match=rf"0.1: {kind} has none, set it to 0 \(known to sigmoid, robust, exo_pair, simpo\)"):
        loss(0, 0, loss_type=kind, label_smoothing=0.1)


def test_exo_pair_without_label_smoothing():
    with pytest.raises(ValueError, match="dpo_label_smoothing 0: exo_pair takes its logarithm"):
        loss(0, 0, loss_type="exo_pair")


@pytest.mark.parametrize("ratio", [-1.0, NAN])
def test_simpo_with_a_margin_below_0(ratio):
    """Other losses do not read it."""
    with pytest.raises(ValueError, match=f"gamma_beta_ratio {ratio:g}: must be 0 or more"):
        loss(0, 0, loss_type="simpo", gamma_beta_ratio=ratio)
    assert loss(0, 0, loss_type="hinge", gamma_beta_ratio=ratio) == 1


def test_an_unknown_loss_names_all_known_ones():
    with pytest.raises(ValueError) as error:
        loss(0, 0, loss_type="sigmod")
    assert str(error.value) == f"dpo_loss_type 'sigmod': known are {', '.join(LOSS_TYPES)}"


def test_an_unknown_reduction_names_the_known_ones():
    with pytest.raises(ValueError, match="dpo_logps_reduction 'mean': known are sum, masked_mean, padded_mean"):
        losses.reduced(column(1), torch.tensor([1]), "mean", 1)


def test_padded_mean_needs_a_length():
    with pytest.raises(ValueError, match="padded_length 0: padded_mean divides by it"):
        losses.reduced(column(1), torch.tensor([1]), "padded_mean", 0)


@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
def test_shapes_that_would_broadcast(kind):
    """[2] beside [2, 1] would make four pairs out of two."""
    good, bad = column(1, 2), column(1, 2)[:, None]
    with pytest.raises(ValueError, match=r"policy_rejected \[2, 1\]: one log-prob a pair, expected the shape of policy_chosen, \[2\]"):
        losses.preference_loss(good, bad, good, good, loss_type=kind, beta=0.1)
    with pytest.raises(ValueError, match=r"lengths \[1\]: one an answer, expected the shape of the sums, \[2\]"):
        losses.reduced(good, torch.tensor([1]), "sum", 1)


def test_a_reference_of_another_shape():
    good = column(1, 2)
    with pytest.raises(ValueError, match=r"ref_rejected \[1\]: one log-prob a pair"):
        losses.preference_loss(good, good, good, column(1), loss_type="sigmoid", beta=0.1)


# ---------------------------------------------------------------- TRL's own code on the same tokens


class Bigram(torch.nn.Module):
    """A language model of one table: the logits of the next token are the row of this one. Answers TRL's plain calls and those
    of its DPOTrainer, whose models return log-probs of the labels (0 at -100) instead of logits."""

    is_gradient_checkpointing = False

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=False, fused_lm_head=False):
        logits = self.table[input_ids]
        if not fused_lm_head:
            return SimpleNamespace(logits=logits)
        target, counted = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
        logps = logits[:, :-1].log_softmax(-1).gather(2, target[..., None]).squeeze(2) * counted
        unused = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=unused, mean_logits=unused, is_top1=unused > 0)


PROMPT, WIDTH, VOCABULARY, PAIRS = 2, 7, 11, 6
RATIO = 0.3
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, backward=lambda x: x.backward()
)


@pytest.fixture(scope="module")
def tokens() -> SimpleNamespace:
    """Six pairs, chosen rows first as TRL wants them: ids [12, 2 + 7], answers of 1 to 7 tokens, two tables of logits."""
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (2 * PAIRS, PROMPT + WIDTH))
    lengths = torch.tensor([7, 2, 3, 1, 5, 4, 3, 6, 3, 2, 1, 7])
    answer = torch.arange(WIDTH) < lengths[:, None]
    mask = torch.cat([torch.zeros(2 * PAIRS, PROMPT, dtype=torch.bool), answer], 1)
    table, ref_table = torch.randn(2, VOCABULARY, VOCABULARY, dtype=torch.float64)
    return SimpleNamespace(ids=ids, lengths=lengths, mask=mask, table=table, ref_table=ref_table)


def our_loss(t: SimpleNamespace, reduction: str, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair and the gradient of their mean, through sums taken token by token."""
    tables = t.table.clone().requires_grad_(), t.ref_table
    sums = [
        torch.stack([logps[row[:-1], row[1:]][mask[1:]].sum() for row, mask in zip(t.ids, t.mask, strict=True)])
        for logps in (table.log_softmax(1) for table in tables)
    ]
    policy, ref = (losses.reduced(each, t.lengths, reduction, WIDTH).view(2, -1) for each in sums)
    each = losses.preference_loss(*policy, *ref, **settings)
    each.mean().backward()
    return each.detach(), tables[0].grad


def trl_class(path: str, name: str):
    reason = "the comparison with TRL's own code needs trl 1.16: pip install -e .[benchmark]"
    pytest.importorskip("trl", minversion="1.16", reason=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(pytest.importorskip(path, reason=reason), name)


def trl_dpo_loss(t: SimpleNamespace, kind: str, smoothing: float, rows=slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    """DPOTrainer._compute_loss on a stand-in for the trainer: the mean over pairs, and its gradient."""
    dpo = trl_class("trl.trainer.dpo_trainer", "DPOTrainer")
    model = Bigram(t.table)
    stand_in = SimpleNamespace(
        model=model,
        ref_model=Bigram(t.ref_table),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=0.1,
        label_smoothing=smoothing,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids, mask = (x.view(2, PAIRS, -1)[:, rows].flatten(0, 1) for x in (t.ids, t.mask))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask.long()}
    got = dpo._compute_loss(stand_in, model, inputs, False)
    got.backward()
    return got.detach(), model.table.grad


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"])
def test_equals_trl_dpo_trainer(kind, tokens):
    """Each pair alone, their mean, and the gradient. TRL's ipo is on means a token; its exo_pair rounds the smoothing to f32."""
    smoothing = 0.1 if kind in ("robust", "exo_pair") else 0.0
    reduction = "masked_mean" if kind == "ipo" else "sum"
    ours, gradient = our_loss(tokens, reduction, loss_type=kind, beta=0.1, label_smoothing=smoothing)
    close = {"rtol": 1e-6, "atol": 1e-7} if kind == "exo_pair" else {"rtol": 1e-10, "atol": 1e-12}
    theirs = torch.stack([trl_dpo_loss(tokens, kind, smoothing, slice(i, i + 1))[0] for i in range(PAIRS)])
    torch.testing.assert_close(ours, theirs, **close)
    mean, trl_gradient = trl_dpo_loss(tokens, kind, smoothing)
    torch.testing.assert_close(ours.mean(), mean, **close)
    torch.testing.assert_close(gradient, trl_gradient, **close)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_equals_trl_online_dpo_trainer(kind, tokens):
    """OnlineDPOTrainer.training_step with recorded answers, the first of each two preferred. Its ipo is on sums, as is our default."""
    online = trl_class("trl.experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer")
    model = Bigram(tokens.table)
    recorded = (tokens.ids[:, :PROMPT], torch.ones(2 * PAIRS, PROMPT), tokens.ids[:, PROMPT:], tokens.mask[:, PROMPT:].long(), None)
    stand_in = SimpleNamespace(
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type=kind,
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        beta=0.1,
        max_length=PROMPT + WIDTH,
        ref_model=Bigram(tokens.ref_table),
        accelerator=ACCELERATOR,
        eos_token_ids=[0],
        reward_funcs=["recorded"],
        stats=defaultdict(list),
        processing_class=SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ["answer"] * len(ids)),
        _generate=lambda model, prompts, images: recorded,
        _calculate_rewards_from_functions=lambda **_: torch.arange(2 * PAIRS, 0, -1).double(),
    )
    stand_in._forward = MethodType(online._forward, stand_in)
    theirs = online.training_step(stand_in, model, {"prompt": ["prompt"] * PAIRS})
    ours, gradient = our_loss(tokens, "sum", loss_type=kind, beta=0.1)
    torch.testing.assert_close(ours.mean(), theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, model.table.grad, rtol=1e-10, atol=1e-12)


def trl_cpo_loss(kind: str, smoothing: float, chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    cpo = trl_class("trl.experimental.cpo.cpo_trainer", "CPOTrainer")
    stand_in = SimpleNamespace(
        accelerator=ACCELERATOR, alpha=0.0, loss_type=kind, beta=beta, label_smoothing=smoothing, simpo_gamma=RATIO * beta
    )
    return cpo.cpo_loss(stand_in, chosen, rejected)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_equals_trl_cpo_trainer(smoothing, tokens):
    """With TRL's means a token. Its simpo_gamma is our beta * gamma_beta_ratio."""
    cpo = trl_class("trl.experimental.cpo.cpo_trainer", "CPOTrainer")
    model = Bigram(tokens.table)
    means = cpo.get_batch_logps(model(tokens.ids).logits, tokens.ids.masked_fill(~tokens.mask, -100), average_log_prob=True)
    theirs = trl_cpo_loss("simpo", smoothing, *means.view(2, -1), beta=2.0)
    theirs.mean().backward()
    settings = {"loss_type": "simpo", "beta": 2.0, "label_smoothing": smoothing, "gamma_beta_ratio": RATIO}
    ours, gradient = our_loss(tokens, "masked_mean", **settings)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, model.table.grad, rtol=1e-10, atol=1e-12)


def test_label_smoothing_of_sigmoid_equals_trl_cpo_trainer():
    """TRL has cDPO without a reference only; log-ratios in the place of its log-probs make it ours."""
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 9
    theirs = trl_cpo_loss("sigmoid", 0.1, chosen, rejected, beta=0.1)
    ours = losses.preference_loss(
        chosen - 3, rejected - 8, *column(-3, -8)[:, None].expand(2, 5), loss_type="sigmoid", beta=0.1, label_smoothing=0.1
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_where_trl_differs_and_we_do_not_follow(tokens):
    """Its DPOTrainer drops the label smoothing of sigmoid without a word and divides robust's 0.5 by zero; an empty answer's mean
    is NaN in its CPOTrainer; its sft term averages over the tokens of all answers, so it changes with the micro-batch."""
    assert trl_dpo_loss(tokens, "sigmoid", 0.1)[0] == trl_dpo_loss(tokens, "sigmoid", 0.0)[0]
    assert not trl_dpo_loss(tokens, "robust", 0.5)[0].isfinite()
    cpo = trl_class("trl.experimental.cpo.cpo_trainer", "CPOTrainer")
    assert cpo.get_batch_logps(torch.zeros(1, 3, 5), torch.full((1, 3), -100), average_log_prob=True).isnan().all()

    logps = tokens.table.log_softmax(1)[tokens.ids[:PAIRS, :-1], tokens.ids[:PAIRS, 1:]] * tokens.mask[:PAIRS, 1:]
    ours = losses.sft_loss(logps.sum(1), tokens.lengths[:PAIRS])
    one_by_one = torch.stack([trl_dpo_loss(tokens, "sft", 0.0, slice(i, i + 1))[0] for i in range(PAIRS)])
    torch.testing.assert_close(ours, one_by_one, rtol=1e-10, atol=1e-12)
    assert abs(trl_dpo_loss(tokens, "sft", 0.0)[0] - one_by_one.mean()) > 0.01


# ---------------------------------------------------------------- mutants: one fault each, all to be caught

_preference, _reduced = losses.preference_loss, losses.reduced


def _bare(sums, lengths, reduction, padded_length):
    divisor = {"sum": 1, "masked_mean": lengths, "padded_mean": padded_length}[reduction]
    return sums / divisor


def _simpo_with_reference(c, r, rc, rr, **k):
    return _preference(c - rc, r - rr, rc, rr, **k) if k["loss_type"] == "simpo" else _preference(c, r, rc, rr, **k)


MUTANTS = {
    # name: (name of the function, or the loss whose formula is replaced; the wrong version)
    "sign_flipped": ("preference_loss", lambda c, r, rc, rr, **k: _preference(r, c, rr, rc, **k)),
    "no_reference": ("preference_loss", lambda c, r, rc, rr, **k: _preference(c, r, 0 * rc, 0 * rr, **k)),
    "reference_of_the_other_answer": ("preference_loss", lambda c, r, rc, rr, **k: _preference(c, r, rr, rc, **k)),
    "beta_ignored": ("preference_loss", lambda c, r, rc, rr, **k: _preference(c, r, rc, rr, **{**k, "beta": 0.1})),
    "always_sigmoid": ("preference_loss", lambda c, r, rc, rr, **k: _preference(c, r, rc, rr, loss_type="sigmoid", beta=k["beta"])),
    "smoothing_swapped": ("sigmoid", lambda c, r, b, s: -s * F.logsigmoid(b * (c - r)) - (1 - s) * F.logsigmoid(b * (r - c))),
    "smoothing_ignored": ("sigmoid", lambda c, r, b, s: -F.logsigmoid(b * (c - r))),
    "robust_as_cdpo": ("robust", lambda c, r, b, s: losses._logistic(b * (c - r), s)),
    "robust_without_its_divisor": ("robust", lambda c, r, b, s: losses._robust(c, r, b, s) * (1 - 2 * s)),
    "hinge_without_relu": ("hinge", lambda c, r, b, s: 1 - b * (c - r)),
    "ipo_target_1_over_beta": ("ipo", lambda c, r, b, s: (c - r - 1 / b) ** 2),
    "exo_pair_other_way": ("exo_pair", lambda c, r, b, s: losses._logistic(b * (c - r), s) + s * math.log(s) + (1 - s) * math.log1p(-s)),
    "nca_pair_without_the_middle": ("nca_pair", lambda c, r, b, s: -F.logsigmoid(b * c) - 0.5 * F.logsigmoid(-b * r)),
    "sppo_hard_loser_up": ("sppo_hard", lambda c, r, b, s: (c - 0.5 / b) ** 2 + (r - 0.5 / b) ** 2),
    "apo_zero_as_apo_down": ("apo_zero", losses._apo_down),
    "apo_down_rejected_alone": ("apo_down", lambda c, r, b, s: torch.sigmoid(b * c) + torch.sigmoid(-b * r)),
    "simpo_with_reference": ("preference_loss", _simpo_with_reference),
    "simpo_gamma_outside_beta": ("_simpo", lambda c, r, b, s, ratio: losses._logistic(b * (c - r) - ratio, s)),
    "simpo_without_gamma": ("_simpo", lambda c, r, b, s, ratio: losses._logistic(b * (c - r), s)),
    "mean_for_sum": ("reduced", lambda sums, n, how, width: _reduced(sums, n, "masked_mean" if how == "sum" else how, width)),
    "sum_for_mean": ("reduced", lambda sums, n, how, width: _reduced(sums, n, "sum" if how == "masked_mean" else how, width)),
    "padded_to_the_longest_here": ("reduced", lambda sums, n, how, width: _reduced(sums, n, how, int(n.max()))),
    "empty_answer_not_looked_for": ("reduced", _bare),
    "sft_divided_twice": ("sft_loss", lambda sums, n: -_reduced(sums, n, "masked_mean", 1) / n.clamp(min=1)),
    "sft_over_the_batch": ("sft_loss", lambda sums, n: (-sums.sum() / n.sum()).expand(len(sums))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    """At least one of the checks that pass the right code fails each wrong one."""
    where, wrong = MUTANTS[name]
    if where in LOSS_TYPES:
        monkeypatch.setitem(losses._LOSSES, where, wrong)
    else:
        monkeypatch.setattr(losses, where, wrong)

    def fails(check) -> bool:
        try:
            check()
        except AssertionError:
            return True
        return False

    assert any(fails(check) for check in CHECKS)
