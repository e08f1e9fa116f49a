"""What two runtimes support, as read from their sources: vLLM 0.33.0 and SGLang 0.5.23. Data only.

Lists are of `architectures` names of Hugging Face configs.
"""

from typing import Final, Literal

Runtime = Literal["vllm", "sglang"]
Version = tuple[int, ...]

NEWEST: Final[dict[Runtime, Version]] = {"vllm": (0, 33, 0), "sglang": (0, 5, 23)}
"""The releases whose sources the rules were read from, taken where no version is given."""

OLDEST: Final[dict[Runtime, Version]] = {"vllm": (0, 10, 2), "sglang": (0, 5, 10)}
"""The oldest releases that were read."""

VLLM_DRAFT_CLASSES: Final[dict[str, Version]] = {
    "LlamaForCausalLMEagle3": (0,),
    "Eagle3LlamaForCausalLM": (0,),
    "Eagle3Qwen2_5vlForCausalLM": (0, 11, 1),
    "Eagle3Qwen3vlForCausalLM": (0, 12),
    "Eagle3DeepseekV2ForCausalLM": (0, 18),
    "Eagle3DeepseekV3ForCausalLM": (0, 18),
    "Eagle3MiniMaxM2ForCausalLM": (0, 20),
    "Eagle3Qwen3ForCausalLM": (0, 24),
}
"""Draft class after vLLM's own rewriting, and the first release that has it."""

SGLANG_DRAFT_CLASSES: Final = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")

VLLM_RELAY_SINCE: Final[Version] = (0, 30)
"""First vLLM release that passes captured states between pipeline stages and keeps the embedding."""

VLLM_RELAY_TARGETS: Final = frozenset(
    [
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "Ernie4_5ForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM",
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "LLaMAForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "OpenCUAForConditionalGeneration",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "Qwen3ForCausalLM",
        "SarvamMLAForCausalLM",
        "TeleChat2ForCausalLM",
        "TeleChat3ForCausalLM",
        "TeleFLMForCausalLM",
    ]
)
"""Targets whose class passes captured states on. Qwen3-VL inherits the flag and not the code."""

VLLM_TARGETS_WITHOUT: Final = frozenset(
    [
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "ExaoneForCausalLM",
        "Exaone4ForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "InternLM2ForCausalLM",
        "InternVLChatModel",
        "JambaForCausalLM",
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "StableLmForCausalLM",
        "Step3TextForCausalLM",
    ]
)
"""Targets with a class of their own in vLLM that hands out no hidden states. Others not listed fall back
to the Transformers backend, which does."""

SGLANG_TARGETS: Final = frozenset(
    [
        "ApertusForCausalLM",
        "BailingMoEForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "Cosmos3ForConditionalGeneration",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm5NextForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM",
        "InternS1ProForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "LongcatFlashForCausalLM",
        "MellumForCausalLM",
        "MindSporeForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MistralLarge3ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "SarvamMoEForCausalLM",
        "TeleFLMForCausalLM",
    ]
)
"""Targets whose SGLang class has `set_eagle3_layers_to_capture`, its own or inherited."""

VLLM_TARGET_FAMILIES: Final[tuple[tuple[Version, str], ...]] = (
    ((0, 11), "llama qwen minicpm gpt_oss"),
    ((0, 16), "hunyuan_vl hunyuan_v1_dense afmoe"),
    ((0, 17), "nemotron_h"),
    ((0, 18), "deepseek_v2 deepseek_v3 kimi_k2 kimi_k25"),
    ((0, 20), "minimax_m2 gemma4"),
    ((0, 21), "laguna"),
)
"""Before 0.22 vLLM takes only targets whose model_type holds one of these, from the release named on."""

VLLM_FAMILIES_TO: Final[Version] = (0, 22)
