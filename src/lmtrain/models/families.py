"""Families of transformers that need no probe: packed rows gave transformers' loss in every variant that was tried.

tests/models/test_families.py keeps this list: a family is in it when all its variants there pass.
"""

_NAMES = (
    "afmoe apertus arcee axk1 beam bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama "
    "dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text "
    "gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss "
    "granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash "
    "mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 "
    "olmoe opt persimmon phi phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu"
)
TESTED = tuple(_NAMES.split())
