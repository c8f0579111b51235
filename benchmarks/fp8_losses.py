"""Losses of a small model on a CPU, with the output layer in fp32 and in 8 bits (fp8_head.py).

python benchmarks/fp8_losses.py SEED [STEPS]
"""

import json
import sys
from statistics import mean

from leg_switches import Variant


def main() -> None:
    seed, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300
    words = [
        "experiment=dial",
        "model.depth=3",
        "tokenizer.vocab_size=4096",
        f"seed={seed}",
        "trainer.precision=32-true",
    ]
    spec = {"overrides": [*words, "trainer.num_threads=1"], "turns": 0, "steps": steps}
    for name, own in (("fp32", {}), ("forward", {"fp8_head": "forward"}), ("all", {"fp8_head": "all"})):
        losses = Variant(spec, own).curve(steps)
        means = [round(mean(losses[i : i + 50]), 4) for i in range(0, steps, 50)]
        print(json.dumps({"seed": seed, "output layer": name, "losses": means}), flush=True)


if __name__ == "__main__":
    main()
