"""What is recorded is the stream at the boundary, in every family, however the model is called."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures.make import make_tiny
from specctl.core.capture import Recorder, owned_slots, record
from specctl.core.decoder import find_decoder, input_stream, stream_of
from specctl.core.extraction import RowSink, pack_rows
from specctl.core.plan import Batch
from specctl.core.recompute import final_norm
from specctl.core.target import LoadedTarget, describe_target, load_target
from specctl.errors import TargetError
from specctl.records.layers import parse_slots

FAMILIES = ("llama", "llama-tied", "qwen3", "gemma2", "gemma3", "moe", "hybrid", "multimodal", "gpt2")
IDS = torch.tensor([[256, 1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2]])


def load(family: str) -> LoadedTarget:
    return load_target(describe_target(str(make_tiny(family))), dtype="float32", device=torch.device("cpu"))


@torch.inference_mode()
def capture(model: Any, decoder: Any, slots: Sequence[str], **inputs: Any) -> dict[str, torch.Tensor]:
    recorder = Recorder()
    with record(decoder, slots, recorder, model=model):
        decoder.caller(**inputs)
    return recorder.take(slots, model)


def toy8() -> LlamaForCausalLM:
    """Eight layers, hidden 16, a final norm that cannot be overlooked."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 2, 16))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a7_every_slot_equals_the_plain_forward_bit_for_bit(family: str) -> None:
    """A7; linear-attention layers and multimodal wrappers included (vllm-project/vllm#36527)."""
    target = load(family)
    slots = parse_slots("all,norm", target.spec.num_layers)
    states = capture(target.model, target.decoder, slots, input_ids=IDS)
    with torch.inference_mode():
        expected = target.decoder.caller(input_ids=IDS, output_hidden_states=True).hidden_states
    for boundary in range(target.spec.num_layers):
        assert torch.equal(states[str(boundary)], expected[boundary]), boundary
    assert torch.equal(states["norm"], expected[-1])
    last = states[str(target.spec.num_layers)]
    assert torch.equal(final_norm(target)(last), states["norm"])
    assert not torch.allclose(last, states["norm"])


def test_last_is_the_stream_before_the_final_norm_and_gives_the_logits() -> None:
    """N-1 taken for N leaves logits one block short (lightseekorg/TorchSpec#87)."""
    model = toy8()
    slots = parse_slots("0,4,last", 8)
    assert slots == ("0", "4", "8")
    ids = torch.arange(6)[None]
    states = capture(model, find_decoder(model, 8), slots, input_ids=ids)
    with torch.inference_mode():
        rebuilt = model.lm_head(model.model.norm(states["8"]))
        assert float((rebuilt - model(ids).logits).abs().max()) < 1e-5


def test_the_final_boundary_is_never_dropped_from_three() -> None:
    """A boundary with no next block to hook gave two tensors of three (sgl-project/sglang#32334)."""
    model = toy8()
    states = capture(model, find_decoder(model, 8), parse_slots("4,6,8", 8), input_ids=torch.arange(6)[None])
    assert torch.cat(list(states.values()), -1).shape == (1, 6, 48)
    with torch.inference_mode():
        final = model.model(torch.arange(6)[None]).last_hidden_state
        assert torch.equal(model.model.norm(states["8"]), final)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2"])
def test_a5_layer_zero_is_the_first_layers_input_also_from_inputs_embeds(family: str) -> None:
    """A5: after the model's own scaling and positions, whoever made the embeddings."""
    target = load(family)
    entered: list[torch.Tensor] = []
    first = target.decoder.layers[0]
    handle = first.register_forward_pre_hook(
        lambda _m, a, k: entered.append(input_stream(a, k).clone()), with_kwargs=True
    )
    embeds = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    by_ids = capture(target.model, target.decoder, ("0",), input_ids=IDS)
    by_embeds = capture(target.model, target.decoder, ("0",), inputs_embeds=embeds)
    handle.remove()
    assert torch.equal(by_ids["0"], entered[0])
    assert torch.equal(by_embeds["0"], entered[1])
    assert not torch.equal(by_ids["0"], by_embeds["0"])


def test_a5_layer_zero_is_the_same_under_torch_compile() -> None:
    """A5: what a compiled decoder records is what the eager one does; later calls leave it alone."""
    target = load("llama")
    slots = ("0", "4", "8", "norm")
    eager = capture(target.model, target.decoder, slots, input_ids=IDS)
    recorder = Recorder()
    with torch.inference_mode(), record(target.decoder, slots, recorder, model=target.model):
        compiled = torch.compile(target.decoder.caller, backend="aot_eager")
        compiled(input_ids=IDS)
        states = recorder.take(slots, target.model)
        kept = {slot: state.clone() for slot, state in states.items()}
        compiled(input_ids=IDS.flip(0))
        again = recorder.take(slots, target.model)
    for slot in slots:
        torch.testing.assert_close(states[slot], eager[slot], rtol=1e-5, atol=1e-5)
        assert torch.equal(states[slot], kept[slot])
        assert not torch.equal(again[slot], states[slot])
    assert torch.equal(states["0"], eager["0"])
    torch._dynamo.reset()


class InPlaceLayer(nn.Module):
    """Adds to its own input, as layers that save memory do."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.add_(self.step)


class Stack(nn.Module):
    """A decoder of given layers over an embedding of ones."""

    def __init__(self, layers: list[nn.Module], *, calls_layers: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls_layers = calls_layers

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        stream = torch.ones(*input_ids.shape, 4)
        for layer in self.layers if self.calls_layers else []:
            stream = layer(stream)
        return stream


class Whole(nn.Module):
    """A language model around a `Stack`."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.model = stack

    def get_output_embeddings(self) -> None:
        return None


def test_a6_a_recorded_tensor_survives_layers_that_work_in_place() -> None:
    """A6: without a copy every slot would show the last layer's values."""
    model = Whole(Stack([InPlaceLayer(1.0), InPlaceLayer(10.0), InPlaceLayer(100.0)]))
    states = capture(model, find_decoder(model, 3), ("0", "1", "2", "3"), input_ids=IDS)
    assert [float(state[0, 0, 0]) for state in states.values()] == [1.0, 2.0, 12.0, 112.0]


def test_rows_copied_during_the_forward_survive_in_place_layers_too() -> None:
    model = Whole(Stack([InPlaceLayer(1.0), InPlaceLayer(10.0)]))
    decoder = find_decoder(model, 2)
    buffers = {slot: torch.zeros(5, 4) for slot in ("0", "1", "2")}
    sink = RowSink()
    sink.aim(Batch(samples=(0, 1), lengths=(3, 2), begin=0), buffers, model)
    with torch.inference_mode(), record(decoder, tuple(buffers), sink, model=model):
        decoder.caller(torch.zeros(2, 3, dtype=torch.long))
    assert [float(b.mean()) for b in buffers.values()] == [1.0, 2.0, 12.0]


class ResidualLayer(nn.Module):
    """Called as (positions, hidden, residual), returns the pair whose sum is the stream."""

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden if residual is None else hidden + residual
        return residual * 0.5, residual


class ResidualStack(nn.Module):
    """Decoder in the style of serving engines."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ResidualLayer() for _ in range(count)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = torch.ones(*input_ids.shape, 4), None
        positions = torch.arange(input_ids.shape[1])
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual


def test_a_layer_that_returns_hidden_and_residual_is_recorded_as_their_sum() -> None:
    """The output alone differs grossly from the stream; input 0 is positions (vllm-project/vllm#12099)."""
    model = Whole(ResidualStack(2))
    states = capture(model, find_decoder(model, 2), ("0", "1", "2"), input_ids=IDS)
    assert [float(state[0, 0, 0]) for state in states.values()] == [1.0, 1.5, 2.25]


def test_attention_weights_beside_the_stream_are_not_taken_for_a_residual() -> None:
    stream, weights = torch.ones(2, 8, 4), torch.ones(2, 3, 8, 8)
    assert torch.equal(stream_of((stream, weights)), stream)


def test_a_model_that_never_calls_its_layers_is_an_error_not_an_empty_column() -> None:
    """A class that claims support and captures nothing (sgl-project/sglang#20104)."""
    model = Whole(Stack([InPlaceLayer(1.0)], calls_layers=False))
    with pytest.raises(TargetError, match="`Whole` returned no hidden states for slot `1`"):
        capture(model, find_decoder(model, 1), ("1",), input_ids=IDS)


class NoneLayer(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> None:
        return None


def test_a_layer_that_returns_none_is_an_error() -> None:
    model = Whole(Stack([NoneLayer()]))
    with pytest.raises(TargetError, match="no hidden states"):
        capture(model, find_decoder(model, 1), ("1",), input_ids=IDS)


class PPMissingLayer(nn.Module):
    """A stage's placeholder, by the name that servers give it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_a3_recorders_attach_to_real_layers_of_a_stage_only() -> None:
    """A3: the class of `layers[-1]` may be a placeholder's (vllm-project/vllm#66546)."""
    stage = Whole(Stack([InPlaceLayer(1.0), InPlaceLayer(10.0), PPMissingLayer(), PPMissingLayer()]))
    decoder = find_decoder(stage, 4)
    assert decoder.owned == range(2)
    slots = owned_slots(("0", "1", "2", "3", "4", "norm"), decoder.owned, is_last_stage=False)
    assert slots == ("0", "1", "2")
    assert list(capture(stage, decoder, slots, input_ids=IDS)) == ["0", "1", "2"]


def test_a_stage_without_real_layers_records_nothing_and_is_fine() -> None:
    decoder = find_decoder(Whole(Stack([PPMissingLayer(), PPMissingLayer()])), 2)
    assert decoder.owned == range(0)
    assert owned_slots(("0", "1", "2"), decoder.owned, is_last_stage=False) == ()
    assert owned_slots(("2", "norm"), decoder.owned, is_last_stage=True) == ("norm",)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 9])
def test_every_slot_has_exactly_one_owner(stages: int) -> None:
    from specctl.core.placement import stage_layers

    slots = parse_slots("all,norm", 7)
    owners: list[str] = []
    first = 0
    for stage, count in enumerate(stage_layers(7, stages)):
        owners += owned_slots(slots, range(first, first + count), is_last_stage=stage == stages - 1)
        first += count
    assert sorted(owners) == sorted(slots)


def test_a_list_of_experts_as_long_as_the_layers_is_not_taken_for_them() -> None:
    assert load("moe").decoder.path == "model.layers"


def test_a_model_without_a_list_of_layers_is_refused_naming_its_class() -> None:
    with pytest.raises(TargetError, match="`Whole` has no list of layers of the length 5"):
        find_decoder(Whole(Stack([InPlaceLayer(1.0)])), 5)


def test_packing_drops_padding_rows() -> None:
    stream = torch.arange(2 * 3 * 1.0).reshape(2, 3, 1)
    assert pack_rows(stream, (3, 2)).flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "hybrid", "moe"])
def test_a_padded_batch_stores_what_the_lone_sample_gives(family: str) -> None:
    """Pads taken for tokens, positions shifted, recurrences polluted (huggingface/transformers#46773)."""
    target = load(family)
    slots = parse_slots("all,norm", target.spec.num_layers)
    alone = capture(target.model, target.decoder, slots, input_ids=torch.tensor([[1, 2, 3, 4]]))
    padded = torch.tensor([[9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 1, 1]])
    batched = capture(target.model, target.decoder, slots, input_ids=padded)
    for slot in slots:
        rows = pack_rows(batched[slot], (6, 4))[6:]
        assert rows.shape[0] == 4
        torch.testing.assert_close(rows, alone[slot][0], rtol=1e-5, atol=1e-5)
