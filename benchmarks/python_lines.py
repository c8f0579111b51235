"""How much of a model's output is valid Python: the share of its lines that parse, each on its own.

python benchmarks/python_lines.py outputs/first/export

It samples eight texts of 96 tokens for each of four prompts, at temperature 0.5. Prose in a docstring doesn't parse.
"""

import ast
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BEGINNINGS = ("def main():\n", "class Reader:\n", "import os\n", "    def close(self):\n")
TEXTS, TOKENS = 8, 96


def parses(line: str) -> bool:
    """Returns whether a line is a statement or the head of one; the surrounding code that it needs is added."""
    if line.startswith(("elif ", "else:")):
        line = f"if x:\n pass\n{line}"
    if line.startswith(("except", "finally:")):
        line = f"try:\n pass\n{line}"
    for code in (line, f"{line}\n pass"):
        try:
            ast.parse(code)
            return True
        except SyntaxError:
            pass
    return False


def main() -> None:
    model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    torch.manual_seed(0)
    found = []
    for beginning in BEGINNINGS:
        ids = tokenizer(beginning, return_tensors="pt").input_ids.repeat(TEXTS, 1)
        options = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 0.5, "top_k": 50, "pad_token_id": 0}
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in model.generate(ids, **options)]
        print(texts[0], "-" * 40, sep="\n")
        # A repeated line of a text counts once; the last line is dropped because it may be incomplete.
        lines = [s.strip() for text in texts for s in dict.fromkeys(text[len(beginning) :].splitlines()[:-1])]
        found += [parses(line) for line in lines if line]
    print(f"{sum(found)} of {len(found)} lines parse: {sum(found) / len(found):.0%}")


if __name__ == "__main__":
    main()
