"""The check after the first weight sync: are the rollout's greedy answers the actor's own? On one rank and in parallel layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import free_port, run

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor": 2},
    "tp2 sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {"data": 2},
}


def gaps(rank: int, _: int, folder: Path, names: list[tuple[str, int]]) -> dict[str, list[torch.Tensor]]:
    """For each layout the gaps of the decoder's greedy answers, of the same with one token changed, and those of a decoder that
    was never synced (its head is another model's)."""
    from mindspeed_odpo.config import ParallelConfig
    from mindspeed_odpo.engine import parallel
    from mindspeed_odpo.engine.generate import Decoder
    from mindspeed_odpo.engine.greedy import greedy_gaps
    from mindspeed_odpo.engine.model import build_model
    from mindspeed_odpo.engine.weights import load_named, named_weights
    from mindspeed_odpo.hf.config import read_model_config
    from mindspeed_odpo.hf.weights import hf_to_megatron
    from mindspeed_odpo.types import Rollout

    config = read_model_config(folder, "tiny")
    prompt = torch.randint(3, config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    found = {}
    for name, port in names:
        sizes = ParallelConfig(**LAYOUTS[name])
        parallel.init_parallel(sizes, rank, "127.0.0.1", port, 0, 1.0)
        chunks = build_model(config, sizes, False, trainable=True)
        load_named(chunks, hf_to_megatron(folder, config))
        weights = dict(named_weights(chunks))
        stale = {**weights, "decoder.final_layernorm.weight": weights["decoder.final_layernorm.weight"].flip(0)}
        said = []
        for source in (weights, stale):
            decoder = Decoder(config, False)
            decoder.load_weights(0, source.items())
            unused = torch.zeros(2, 1, 8, dtype=torch.float64)
            ids, real, done = decoder.generate(prompt, mask, num_answers=1, max_new_tokens=8, eos_ids=[2], uniforms=unused, do_sample=False)
            said.append(Rollout(prompt, mask, ids, real, done, torch.arange(2), 0).check())
        answers = said[0]
        other = answers.response_ids.clone()
        other[1, 0, 1] = (other[1, 0, 1] + 1) % config.vocab_size
        changed = Rollout(prompt, mask, other, answers.response_mask, answers.finished, torch.arange(2), 0)
        found[name] = [greedy_gaps(chunks, each, torch.device("cpu")) for each in (answers, changed, said[1])]
        parallel.destroy()
    return found


@pytest.fixture(scope="module")
def results(folders) -> dict[str, list[list[torch.Tensor]]]:
    """Layout -> the gaps of each rank."""
    found: dict[str, list[list[torch.Tensor]]] = {}
    for world, names in ((1, ["one"]), (2, [name for name in LAYOUTS if name != "one"])):
        ranks = run(world, gaps, folders[0], [(name, free_port()) for name in names])
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_the_models_own_choice_has_no_gap(results, name):
    """Every rank says the same; what one process says, each layout says, to rounding."""
    for ranks in results[name]:
        own, changed, stale = ranks
        assert float(own.max()) < 1e-5
        assert float(changed[0, 0]) < 1e-5 and float(changed[1, 0]) > 0.05
        assert float(stale.max()) > 0.05
        for mine, alone in zip(ranks, results["one"][0], strict=True):
            torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)
