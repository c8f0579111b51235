#!/bin/sh
# A model of 0.1 M parameters learns sums: text, then some right answers, then rewards. Minutes on two cores.
#   sh benchmarks/arithmetic.sh outputs/arithmetic
# Prints val/reward/right of each seed: the share of 500 held-out sums whose greedy answer is exact.
set -e
OUT=$1
export OMP_NUM_THREADS=1
COMMON="trainer.precision=32-true logger=none callbacks.samples.every_n_validations=0"
SUMS="data.source=lmtrain.data.sources.sums.Sums"
python -m lmtrain.train data=text $SUMS "+data.source_options={number: 400000, held_out: 500}" tokenizer=char \
  "tokenizer.add_tokens=[<,>]" model=llama_nano model.hidden_size=64 model.num_hidden_layers=2 model.num_attention_heads=4 \
  model.intermediate_size=192 model.max_position_embeddings=64 data.seq_len=16 data.packing=off data.global_batch_size=512 \
  data.micro_batch_size=512 trainer.max_steps=200 schedule=constant optimizer.lr=5e-3 trainer.val_check_interval=200 \
  trainer.limit_val_batches=4 $COMMON run.dir=$OUT/text
python -m lmtrain.train objective=sft data=chat_jsonl data.conversation_format=prompt_completion $SUMS \
  "+data.source_options={number: 100000, held_out: 500}" data.max_length=64 data.seq_len=64 data.packing=off \
  data.global_batch_size=512 data.micro_batch_size=512 model=$OUT/text optimizer.lr=5e-3 schedule=constant \
  trainer.max_steps=700 trainer.val_check_interval=100 trainer.limit_val_batches=1 $COMMON run.dir=$OUT/answers
for SEED in 1 2 3; do
  python -m lmtrain.train experiment=grpo_arithmetic model=$OUT/answers seed=$SEED trainer.val_before_training=true $COMMON run.dir=$OUT/rewards_$SEED
  grep -o '"step": [0-9]*, .*"val/reward/right": [0-9.]*' $OUT/rewards_$SEED/metrics.jsonl | tail -n 1
done
