"""Run by test_transformers4.py with transformers 4: loads adapters and whole exports, and says what it makes of them.

    python transformers4.py IDS BASE:FOLDER...

BASE is empty for a whole export. Prints JSON: the version, and of each folder the logits of IDS (a JSON list), and the
names of the adapter's tensors that no module took.
"""

import json
import sys
import warnings
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors import safe_open


def read(base: str, folder: str, ids: torch.Tensor) -> dict[str, Any]:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, lost = transformers.AutoModelForCausalLM.from_pretrained(base or folder, **options), []
    if base:
        with safe_open(f"{folder}/adapter_model.safetensors", "pt") as file:
            names = list(file.keys())  # a safetensors file is no dict
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, folder)
        taken = {name.replace(".default", "") for name, _ in model.named_parameters()}
        lost = [name for name in names if name not in taken]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    return {"logits": logits.tolist(), "lost": lost}


def main(ids: str, *folders: str) -> None:
    asked = torch.tensor([json.loads(ids)])
    found = [read(*folder.split(":"), asked) for folder in folders]
    print(json.dumps({"version": transformers.__version__, "read": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
