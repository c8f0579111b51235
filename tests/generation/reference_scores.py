"""Prints the scores of sacrebleu and rouge-score for the pairs in a file, as JSON. Run by test_answers.py."""

import json
import sys
from pathlib import Path

import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

answers, references = json.loads(Path(sys.argv[1]).read_text())
names = {"rouge1": "rouge1", "rouge2": "rouge2", "rouge": "rougeL"}
scorer = RougeScorer(list(names.values()), use_stemmer=False)
scored = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
found = {ours: sum(s[theirs].fmeasure for s in scored) / len(scored) for ours, theirs in names.items()}
print(json.dumps({"bleu": sacrebleu.corpus_bleu(answers, [references]).score / 100, **found}))
