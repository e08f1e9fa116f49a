"""TOKFIX: a byte-level tokenizer without merges, so that every id is known by hand."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, IM_START, IM_END, THINK, END_THINK, PAD = range(256, 263)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<pad>")

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte 0..255 (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def build(
    template: str | None = CHATML,
    *,
    extra_special: tuple[str, ...] = (),
    merges: tuple[tuple[str, str], ...] = (),
    trim_offsets: bool = False,
    has_bos: bool = True,
    eos: str = "<|im_end|>",
    truncation_side: str = "right",
) -> PreTrainedTokenizerFast:
    """Ids 0..255 are bytes, then `merges`, `SPECIAL` (256..262 without merges), `extra_special`."""
    symbols = [*byte_symbols(), *(first + second for first, second in merges)]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL, *extra_special])
    byte_level = processors.ByteLevel(trim_offsets=trim_offsets)
    bos = processors.TemplateProcessing(single="<s> $A" if has_bos else "$A", special_tokens=[("<s>", len(symbols))])
    backend.post_processor = processors.Sequence([byte_level, bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        pad_token="<pad>",
        chat_template=template,
        truncation_side=truncation_side,
        clean_up_tokenization_spaces=False,
    )
