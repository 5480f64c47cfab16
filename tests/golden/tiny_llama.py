"""Tiny Llama checkpoints for the `ar` engine's tests: the class of the sidekick's thinker, made in a second.

`save_random`: random weights, spread out so that the most likely token is well ahead of the second.
`save_reciter`: weights that recite a given text, so that a test can choose which tokens are generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.engines.torchvision_operators import declare_missing_operators

declare_missing_operators()  # transformers, imported below where it is needed, imports torchvision

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
END_TOKEN = NUM_BYTES + SPECIAL_TOKENS.index("<|im_end|>")
VOCAB_SIZE = 272
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: token id = byte value. So a character outside ASCII is several tokens."""
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in symbols.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_random(folder: Path) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(hidden_size=64, num_hidden_layers=4, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(4)
        model.lm_head.weight.mul_(4)
        model.lm_head.weight[END_TOKEN].zero_()  # never the most likely: answers end by length
    return _save(model, folder)


def save_reciter(folder: Path, text: str) -> LlamaForCausalLM:
    """After byte t of the text comes the byte that follows t in it, and the end token after the last one.

    Each byte of the text must occur once. It starts with the text's first byte after any other token.
    """
    from transformers import LlamaForCausalLM

    data = text.encode()
    assert len(set(data)) == len(data), "a byte that occurs twice has no single successor"
    model = LlamaForCausalLM(_config(hidden_size=288, num_hidden_layers=1, tie_word_embeddings=False)).eval()
    successors = dict(zip(data, [*data[1:], END_TOKEN], strict=True))
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE, 288))
        model.lm_head.weight.zero_()
        for token in range(VOCAB_SIZE):
            model.lm_head.weight[successors.get(token, data[0]), token] = 1.0
    return _save(model, folder)


def _config(**changes: Any) -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.08,
            "bos_token_id": None,
            "eos_token_id": END_TOKEN,
            "pad_token_id": NUM_BYTES,
            **changes,
        }
    )


def _save(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
