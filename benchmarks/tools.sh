#!/bin/sh
# A model of 1 M parameters, from scratch: conversations that call a calculator in three of ten answers, then rewards for right sums of
# five-digit numbers, with the tool and without; and the same for guessing a number. A quarter of an hour of CPU time a seed.
#   sh benchmarks/tools.sh outputs/tools 1 2 3
# Prints by step val/reward (sums: the share of 100 held-out ones that are right) and val/turns (games: guesses of a greedy answer).
set -e
HERE=$(dirname "$0")
OUT=$1
shift
export OMP_NUM_THREADS=1
python "$HERE/tools.py" "$OUT"
COMMON="data.chat_template=$HERE/tools.jinja data.seq_len=256 trainer.accelerator=cpu trainer.precision=32-true logger=none report.enabled=false"
# The constant beginning and end of a call are tokens, as a BPE would make them.
TOKENS='tokenizer.add_tokens=["<|user|>","<|assistant|>","<|tool|>","<tool_call>","</tool_call>","{\"name\": \"calculator\", \"arguments\": {\"expression\": \"","\"}}"]'
curve() { python "$HERE/curve.py" "$@"; } # RUN NAME
for SEED in "$@"; do
  RUN=$OUT/$SEED
  for TASK in sums games; do
    python -m lmtrain.train objective=sft data=chat_jsonl data.path=$OUT/${TASK}_chats.jsonl tokenizer=bytes "$TOKENS" model=dial \
      model.depth=4 optimizer=muon optimizer.momentum=0.9 optimizer.weight_decay=0.0 schedule=wsd data.global_batch_size=8 \
      data.micro_batch_size=8 trainer.max_steps=300 trainer.val_check_interval=100 trainer.limit_val_batches=2 seed=$SEED $COMMON \
      run.dir=$RUN/${TASK}_sft
  done
  REWARDS="experiment=grpo_tools objective.max_new_tokens=24 trainer.val_before_training=true trainer.limit_val_batches=4 seed=$SEED $COMMON"
  python -m lmtrain.train $REWARDS model=$RUN/sums_sft data.path=$OUT/sums_prompts.jsonl run.dir=$RUN/sums
  python -m lmtrain.train $REWARDS model=$RUN/sums_sft data.path=$OUT/sums_prompts.jsonl objective.environment._target_=null \
    reward=exact_number trainer.max_steps=60 run.dir=$RUN/no_tool
  python -m lmtrain.train $REWARDS model=$RUN/games_sft data.path=$OUT/games_prompts.jsonl optimizer.lr=1e-3 \
    trainer.max_steps=60 trainer.val_check_interval=10 objective.environment._target_=lmtrain.rewards.games.GuessNumber \
    objective.max_new_tokens=4 run.dir=$RUN/games
  echo "seed $SEED, right sums: $(curve $RUN/sums val/reward)"
  echo "seed $SEED, right sums without the tool: $(curve $RUN/no_tool val/reward)"
  echo "seed $SEED, guesses: $(curve $RUN/games val/turns)"
done
