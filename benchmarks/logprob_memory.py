"""Peak memory of log-probs over a large vocabulary: plain log-softmax against the chunked one, forward and backward.

python benchmarks/logprob_memory.py --vocab 151936 --tokens 2048 --hidden 64
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from typing import Any


def _peak(name: str, vocab: int, tokens: int, hidden: int, chunk: int, out: Any) -> None:
    import torch

    from mindspeed_odpo.engine.logprobs import token_logps

    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    weight.grad = torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "plain":
        logps = (states @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    else:
        logps = token_logps(states, weight, targets, vocab, chunk)
    logps.sum().backward()
    out.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, logps.sum().item()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunk", type=int, nargs="+", default=[256, 1024])
    args = parser.parse_args()
    unit = 2**20 if sys.platform == "linux" else 2**30  # ru_maxrss is in KiB on Linux, in bytes on macOS
    for tokens in args.tokens:
        for name, chunk in [("plain", 0), *[("chunked", size) for size in args.chunk]]:
            out: Any = multiprocessing.get_context("spawn").SimpleQueue()
            process = multiprocessing.get_context("spawn").Process(target=_peak, args=(name, args.vocab, tokens, args.hidden, chunk, out))
            process.start()
            peak, total = out.get()
            process.join()
            print(
                f"{tokens} tokens, {name}{f' {chunk}' if chunk else ''}: {peak / unit:.2f} GiB above weights, sum {total:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
