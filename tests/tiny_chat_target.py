"""A real Llama of two layers with a byte-level ChatML tokenizer, written to a folder. Seeded."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(*, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens, vocabulary 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None
    )
    tokenizer.chat_template = template
    return tokenizer


def make_tiny_chat_target(
    folder: Path,
    *,
    seed: int = 0,
    stop_scale: float = 1.4,
    max_positions: int = 512,
    template: str | None = CHATML,
) -> Path:
    """The folder of a target. `stop_scale` stretches the row of `<|im_end|>`: some answers end, some not."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.5,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        ids = tiny_tokenizer().convert_tokens_to_ids([chr(c) for c in range(33, 127)])
        silent = torch.ones(259, dtype=torch.bool)
        silent[[*ids, 258]] = False
        model.lm_head.weight[silent] = 0  # printable ASCII and the stop only: answers survive as text
        model.lm_head.weight[258] *= stop_scale
    # As published models do: two stop tokens, and a penalty that must not leak into the answers.
    model.generation_config = GenerationConfig(
        eos_token_id=[258, 256], pad_token_id=256, repetition_penalty=1.3, do_sample=True, top_k=5
    )
    model.save_pretrained(folder)
    tiny_tokenizer(template=template).save_pretrained(folder)
    return folder
