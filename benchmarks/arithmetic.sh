#!/bin/sh
# A model of 0.1 M parameters learns sums: text, then some right answers, then rewards. 12 minutes a seed on one thread.
#   sh benchmarks/arithmetic.sh outputs/arithmetic 1 2 3
# Prints, for each seed, val/reward/right by step: the share of 500 held-out sums whose greedy answer is exact. Then the
# share of answers that end in 7, as the same answers learn to with a reward for that form alone.
set -e
HERE=$(dirname "$0")
OUT=$1
shift
export OMP_NUM_THREADS=1
COMMON="trainer.accelerator=cpu trainer.precision=32-true logger=none report.enabled=false"
SUMS="data.source=lmtrain.data.sources.sums.Sums"
curve() { python "$HERE/curve.py" "$@"; } # RUN NAME
for SEED in "$@"; do
  RUN=$OUT/$SEED
  python -m lmtrain.train data=text $SUMS "+data.source_options={number: 400000, held_out: 500}" tokenizer=char \
    "tokenizer.add_tokens=[<,>]" model=llama_nano model.hidden_size=64 model.num_hidden_layers=2 model.num_attention_heads=4 \
    model.intermediate_size=192 model.max_position_embeddings=64 data.seq_len=16 data.packing=off data.global_batch_size=512 \
    data.micro_batch_size=512 trainer.max_steps=200 schedule=constant optimizer.lr=5e-3 trainer.val_check_interval=200 \
    trainer.limit_val_batches=4 callbacks.samples.every_n_validations=0 seed=$SEED $COMMON run.dir=$RUN/text
  # Ends at the first validation with three of ten held-out sums right.
  python -m lmtrain.train objective=sft data=chat_jsonl data.conversation_format=prompt_completion $SUMS \
    "+data.source_options={number: 100000, held_out: 500}" data.max_length=64 data.seq_len=64 data.packing=off \
    data.global_batch_size=512 data.micro_batch_size=512 model=$RUN/text optimizer.lr=5e-3 schedule=constant \
    trainer.max_steps=3000 trainer.val_check_interval=25 trainer.limit_val_batches=1 callbacks.samples.rows=256 \
    callbacks.samples.max_new_tokens=8 "callbacks.samples.metrics=[exact_match]" callbacks.early_stopping.monitor=val/exact_match \
    callbacks.early_stopping.mode=max callbacks.early_stopping.stop_at=0.3 callbacks.early_stopping.patience=100 \
    checkpoint.keep_last=1 seed=$SEED $COMMON run.dir=$RUN/answers
  python -m lmtrain.train experiment=grpo_arithmetic model=$RUN/answers trainer.val_before_training=true seed=$SEED $COMMON \
    run.dir=$RUN/rewards
  python -m lmtrain.train experiment=grpo_arithmetic model=$RUN/answers trainer.val_before_training=true seed=$SEED $COMMON \
    reward=regex "reward.pattern=.*7" trainer.max_steps=200 trainer.val_check_interval=50 checkpoint.monitor=val/reward run.dir=$RUN/form
  echo "seed $SEED, exact: $(curve $RUN/rewards val/reward/right)"
  echo "seed $SEED, ends in 7: $(curve $RUN/form val/reward)"
done
