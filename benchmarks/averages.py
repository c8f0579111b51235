"""Is the average of the last checkpoints better than the last one? Loss on held-out text, by how many are averaged.

python benchmarks/averages.py --text input.txt                      experiment=shakespeare_char, three seeds
python benchmarks/averages.py schedule=constant --text input.txt    with further words for lmtrain.train
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lmtrain.checkpoints import store

EVERY, ROW = 20, 128  # steps between two checkpoints; tokens of a row
COUNTS = (1, 2, 3, 5, 10, 15)


def checkpoints(text: Path, seed: int, words: list[str], folder: Path) -> list[Path]:
    """Trains; returns the run's checkpoints in order."""
    own = [f"data.path={text}", f"data.cache_dir={folder.parent}/cache", f"run.dir={folder}", f"seed={seed}"]
    keep = [f"trainer.save_every_n_steps={EVERY}", "checkpoint.keep_last=1000", "trainer.accelerator=cpu"]
    command = [sys.executable, "-m", "lmtrain.train", "experiment=shakespeare_char", *own, *keep, *words]
    subprocess.run(command, check=True, capture_output=True)
    return sorted((folder / "checkpoints").glob("step_*"))


def averaged(model: PreTrainedModel, of: list[Path]) -> None:
    """Loads the mean of the checkpoints' weights; their names end with the model's."""
    found = [store.load_weights(path) for path in of]
    means = {name: torch.stack([weights[name].float() for weights in found]).mean(0) for name in found[0]}
    state = {own: next(mean for name, mean in means.items() if name.endswith(own)) for own in model.state_dict()}
    model.load_state_dict(state)


@torch.no_grad()
def loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Returns the mean loss in nats over rows of ROW tokens of `ids` [T]."""
    count = (len(ids) - 1) // ROW * ROW
    inputs, labels = ids[:count].view(-1, ROW), ids[1 : count + 1].view(-1, ROW)
    sums = [
        F.cross_entropy(model(input_ids=x).logits.float().flatten(0, 1), y.flatten(), reduction="sum")
        for x, y in zip(inputs.split(256), labels.split(256), strict=True)
    ]
    return float(sum(sums)) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=lambda p: Path(p).resolve(), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    options, words = parser.parse_known_args()
    whole = options.text.read_text()
    with tempfile.TemporaryDirectory(prefix="lmtrain_averages_") as name:
        for seed in options.seeds:
            run = Path(name) / str(seed)
            of = checkpoints(options.text, seed, words, run)
            tokenizer = AutoTokenizer.from_pretrained(run / "export")
            held_out = torch.tensor(tokenizer(whole[int(0.9 * len(whole)) :], add_special_tokens=False)["input_ids"])
            model = AutoModelForCausalLM.from_pretrained(run / "export").eval()
            for count in COUNTS:
                averaged(model, of[-count:])
                print(f"seed {seed}, the last {count}: {loss(model, held_out):.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
