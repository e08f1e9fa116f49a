"""Checkpoint layouts: what goes in comes out, in every direction, and the head computes the same."""

import contextlib
import inspect
import json
import random
import tempfile
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import DEPTH, VOCAB, Plan, by_vllm_name, config_of, logits, make, make_target, save, settings_of, tensors_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specctl import plugins
from specctl.errors import InputError, NotSupportedError, SpecctlError, UsageError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.head import Asked, Head
from specctl.files.target import read_target
from specctl.recipes.convert import ConvertConfig, ConvertReport, convert, recognised
from specctl.records.layers import tell_convention
from specctl.records.progress import SilentReporter

LAYOUTS = plugins.names("formats")
PAIRS = tuple(permutations(LAYOUTS, 2))
MEMORY = Path("/dev/shm")
"""Thousands of small folders are synced; on a disk that is most of the time."""

FLAGS = ("norm_before_residual", "norm_output", "attention_bias", "mlp_bias")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 500000.0,
    },
)


def run(source: Path, out: Path, to: str, target: Path | None = None, **more: Any) -> ConvertReport:
    config = ConvertConfig(str(source), str(out), to, target=str(target) if target else None, **more)
    return convert(config, SilentReporter())


def read(folder: Path, target: Path | None = None, layout: str | None = None, **asked: Any) -> Head:
    checkpoint = open_checkpoint(folder)
    if target is not None:
        files = read_target(target)
        asked |= {"target": files.facts, "embedding": files.embedding, "lm_head": files.lm_head}
    return plugins.load_format(layout or recognised(checkpoint)).read(checkpoint, Asked(**asked))


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder, as dtype, shape and bytes."""
    return {
        name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in load_file(folder / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Heads of every kind the canonical form has, the plain ones often enough to reach every layout."""
    is_plain = draw(st.booleans())
    num_aux = 3 if is_plain else draw(st.integers(1, 8))
    ids = draw(st.lists(st.integers(0, DEPTH), min_size=num_aux, max_size=num_aux, unique=True))
    default = (2, 6, 9) if num_aux == 3 else tuple(sorted(ids))
    norm = draw(st.sampled_from(["", "", "fc_norm", "norm_before_fc"]))
    flags = () if is_plain else tuple(f for f in FLAGS if draw(st.integers(0, 3)) == 0) + ((norm,) if norm else ())
    is_parallel = draw(st.integers(0, 2)) == 0
    target_hidden = draw(st.sampled_from([8, 8, 12]))
    return Plan(
        layers=1 if is_plain and not is_parallel else draw(st.integers(1, 4)),
        num_aux=num_aux,
        ids=draw(st.sampled_from([default, tuple(sorted(ids)), None if num_aux == 3 else default])),
        hidden=8,
        target_hidden=target_hidden,
        head_dim=draw(st.sampled_from([4, 6])),
        draft_vocab=draw(st.sampled_from([10, 10, VOCAB])),
        flags=flags,
        qwen3=not is_plain and draw(st.integers(0, 3)) == 0,
        parallel=is_parallel,
        own_embedding=target_hidden != 8 or draw(st.booleans()),
        own_head=True,
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        rope=draw(st.sampled_from(ROPES if not is_plain else ROPES[:3])),
        num_draft_tokens=draw(st.sampled_from([4, 7, None])),
        verifier=draw(st.sampled_from(["owner/target", None])),
        eos=draw(st.sampled_from([3, [3, 5], None])),
        extra=draw(st.sampled_from([{}, {"initializer_range": 0.02, "pretraining_tp": 1}, {"eagle_config": {"a": 1}}])),
        seed=draw(st.integers(0, 99)),
    )


def test_a_head_survives_every_pair_of_layouts_that_hold_it() -> None:
    travelled: set[tuple[str, str]] = set()

    @settings(max_examples=100, derandomize=True, deadline=None, database=None)
    @given(plan=plans(), has_target=st.booleans())
    @example(plan=Plan(), has_target=True)
    def there_and_back(plan: Plan, has_target: bool) -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
            travelled.update(survive_pairs(Path(root), plan, has_target=has_target))

    there_and_back()
    # The plain head passes everywhere; were all refused, the above would pass.
    assert travelled == set(PAIRS)


def survive_pairs(root: Path, plan: Plan, *, has_target: bool) -> set[tuple[str, str]]:
    """The pairs that hold the head; asserts that it comes back unchanged from each."""
    target = make_target(root / "target", plan.target_hidden, plan.dtype) if has_target else None
    source = make(root / "source", plan)
    first = {}
    for layout in LAYOUTS:
        try:
            run(source, root / layout, layout, target)
            first[layout] = (read(root / layout, target).config, stored(root / layout))
        except (NotSupportedError, UsageError) as error:
            assert error.hint, error
    assert "vllm" in first
    for one, other in permutations(first, 2):
        there, back = root / f"{one}-{other}", root / f"{one}-{other}-{one}"
        run(root / one, there, other, target)
        run(there, back, one, target)
        config, tensors = first[one]
        found, back_config = stored(back), read(back, target).config
        assert {name: found[name] for name in tensors} == tensors
        # What the layout between had to take from the target may stay; nothing else is added.
        assert found.keys() - tensors.keys() <= {"embed_tokens.weight", "model.embed_tokens.weight", "lm_head.weight"}
        assert replace(back_config, verifier=config.verifier) == config
        assert config.verifier in (back_config.verifier, None)
    return set(permutations(first, 2))


PARALLEL = Plan(layers=2, parallel=True, own_embedding=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_computes_the_same_in_every_layout(layout: str, tmp_path: Path, target: Path) -> None:
    """Names, order of columns and the map are read here by the test's own rules, not specctl's."""
    plan = Plan(seed=4)
    source = make(tmp_path / "source", plan)
    run(source, tmp_path / "out", layout, target)
    states = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(5)
    assert torch.equal(logits(source, states, tokens, target), logits(tmp_path / "out", states, tokens, target))


@pytest.mark.parametrize("layout", ["speculators", "specforge", "nemo"])
def test_a_parallel_head_computes_the_same_in_every_layout_that_has_them(
    layout: str, tmp_path: Path, target: Path
) -> None:
    source = make(tmp_path / "source", PARALLEL)
    run(source, tmp_path / "out", layout, target)
    mask = [by_vllm_name(folder)["mask_hidden"].double().view(3, 1, 8) for folder in (source, tmp_path / "out")]
    tokens = torch.tensor([5])
    one, other = (logits(f, m, tokens, target) for f, m in zip((source, tmp_path / "out"), mask, strict=True))
    assert torch.equal(one, other)
    assert load_file(tmp_path / "out" / "model.safetensors")["mask_hidden"].shape == (1, 1, 24)


def unsorted_rows(plan: Plan, order: torch.Tensor) -> dict[str, torch.Tensor]:
    """As NeMo and ModelOpt save: rows by frequency, `d2t` in the same order."""
    tensors = tensors_of(plan)
    targets = tensors["d2t"] + torch.arange(plan.draft_vocab)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = targets[order] - torch.arange(plan.draft_vocab)
    return tensors


def test_unsorted_rows_are_sorted_and_compute_the_same_bits(tmp_path: Path, target: Path) -> None:
    plan = Plan(seed=7)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    source = save(tmp_path / "source", config_of(plan), unsorted_rows(plan, order))
    report = run(source, tmp_path / "out", "vllm")
    states = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(4)
    assert torch.equal(logits(source, states, tokens, target), logits(tmp_path / "out", states, tokens, target))
    assert stored(tmp_path / "out") == stored(make(tmp_path / "sorted", plan))
    assert {row.name: row.change for row in report.trace}["lm_head.weight"] == "rows sorted"


@pytest.mark.parametrize("norm", ["", "fc_norm", "norm_before_fc"])
def test_unsorted_layers_are_sorted_and_compute_the_same(norm: str, tmp_path: Path, target: Path) -> None:
    """An engine joins states in rising order whatever order is listed (vllm-project/vllm#50514)."""
    plan = Plan(ids=(5, 2, 4), flags=(norm,) if norm else (), parallel=True, own_embedding=True)
    source = make(tmp_path / "source", plan)
    report = run(source, tmp_path / "out", "vllm")
    listed = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens = torch.arange(4)
    rising = listed[[1, 2, 0]]
    one, other = logits(source, listed, tokens, target), logits(tmp_path / "out", rising, tokens, target)
    assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert settings_of(tmp_path / "out")["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert report.aux_ids == (2, 4, 5)
    mask = by_vllm_name(tmp_path / "out")["mask_hidden"].view(3, 8)
    assert torch.equal(mask, by_vllm_name(source)["mask_hidden"].view(3, 8)[[1, 2, 0]])
    changes = {row.name: row.change for row in report.trace}
    assert changes["fc.weight"] == changes["mask_hidden"] == "blocks sorted"


def test_a_layer_named_twice_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", Plan(ids=(2, 2, 5)))
    with pytest.raises(InputError, match="name one twice"):
        run(source, tmp_path / "out", "vllm")


def test_a_map_that_permutes_the_whole_vocabulary_is_put_into_the_rows(tmp_path: Path, target: Path) -> None:
    plan = Plan(draft_vocab=VOCAB)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    tensors = tensors_of(plan)
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": order - torch.arange(VOCAB)}
    source = save(tmp_path / "source", config_of(plan), tensors)
    run(source, tmp_path / "out", "vllm")
    assert stored(tmp_path / "out") == stored(make(tmp_path / "plain", plan))


@pytest.mark.parametrize("layout", ["specforge", "angelslim"])
def test_layouts_that_always_map_get_an_identity_and_lose_it_again(layout: str, tmp_path: Path) -> None:
    """A map over the whole vocabulary stops vLLM 0.30 and newer."""
    source = make(tmp_path / "source", Plan(draft_vocab=VOCAB))
    report = run(source, tmp_path / "mapped", layout)
    mapped = load_file(tmp_path / "mapped" / "model.safetensors")
    assert not mapped["d2t"].any() and mapped["t2d"].all()
    assert {row.name: row.change for row in report.trace}["d2t"] == "made: the whole vocabulary"
    back = run(tmp_path / "mapped", tmp_path / "back", "vllm")
    assert stored(tmp_path / "back") == stored(source)
    assert {row.name for row in back.dropped} == {"d2t", "t2d"}


def with_map(folder: Path, **tensors: torch.Tensor) -> Path:
    """The default head (10 of 24 tokens) with other tables, None to leave one out."""
    made = tensors_of(Plan()) | tensors
    return save(folder, config_of(Plan()), {name: t for name, t in made.items() if t is not None})


FIRST_TEN = torch.arange(VOCAB) < 10


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        ({"d2t": torch.full((10,), 70)}, r"draft id 0 would be token 70 of 24"),
        ({"d2t": torch.full((10,), 2**62)}, "draft id 0 would be token"),
        ({"d2t": torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1, 1])}, "token 1 to draft ids 0 and 1"),
        ({"d2t": torch.tensor([-1, 0, 1, 1, 1, 1, 1, 1, 1, 1])}, "draft id 0 would be token -1"),
        ({"d2t": torch.zeros(10, dtype=torch.bfloat16), "t2d": None}, "has dtype BF16"),
        ({"d2t": torch.full((10,), 0.5), "t2d": FIRST_TEN}, "has dtype F32"),
        ({"d2t": torch.zeros(10, dtype=torch.int64), "t2d": None}, "all zeros"),
        ({"d2t": None, "t2d": None}, "no `d2t` that says which"),
        ({"d2t": torch.zeros(10, dtype=torch.int64)}, "which `t2d` does not mark"),
        ({"t2d": FIRST_TEN & (torch.arange(VOCAB) < 5)}, "marks 5 tokens"),
        ({"t2d": torch.full((VOCAB,), 2)}, "expected a mask of 0 and 1"),
        ({"d2t": torch.zeros(9, dtype=torch.int64)}, r"d2t \[9\] instead of \[10\]"),
    ],
)
def test_a_map_that_is_none_is_refused_with_the_place(tables: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=found):
        run(with_map(tmp_path / "source", **tables), tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def test_a_map_of_ids_instead_of_offsets_is_recognised(tmp_path: Path) -> None:
    ids = tensors_of(Plan())["d2t"] + torch.arange(10)
    with pytest.raises(InputError) as caught:
        run(with_map(tmp_path / "source", d2t=ids), tmp_path / "out", "vllm")
    assert "look like the target's ids themselves" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bfloat16, torch.float32])
def test_a_map_of_another_type_is_widened_when_nothing_is_lost(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = tensors_of(Plan())
    source = with_map(tmp_path / "source", d2t=plain["d2t"].to(dtype))
    report = run(source, tmp_path / "out", "vllm")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["d2t"], plain["d2t"])
    assert {row.name: row.change for row in report.trace}["d2t"].endswith("to int64")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_made_bool_and_a_missing_one_is_made(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = tensors_of(Plan())
    for name, table in (("numbers", plain["t2d"].to(dtype)), ("missing", None)):
        run(with_map(tmp_path / name, t2d=table), tmp_path / f"{name}-out", "vllm")
        assert torch.equal(load_file(tmp_path / f"{name}-out" / "model.safetensors")["t2d"], plain["t2d"])


def test_nemos_side_file_gives_the_map(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#2447: before it the ids were saved beside the head only."""
    plan = Plan()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    tensors = unsorted_rows(plan, order)
    ids = tensors.pop("d2t") + torch.arange(10)
    mask = tensors.pop("t2d")
    config = config_of(plan) | {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 32}
    at_top = {"lm_head.weight"}
    named = {name if name in at_top else f"model.{name}": tensor for name, tensor in tensors.items()}
    source = save(tmp_path / "source", config, named)
    meta = {"global_step": 5, "epoch": 0, "selected_token_ids": ids, "selected_token_mask": mask}
    torch.save(meta, source / "eagle_meta.pt")
    report = run(source, tmp_path / "out", "vllm")
    assert report.from_layout == "nemo"
    assert stored(tmp_path / "out") == stored(make(tmp_path / "plain", plan))
    assert settings_of(tmp_path / "out")["num_hidden_layers"] == 1


# what each layout cannot hold, and what then is said


@pytest.mark.parametrize(
    ("to", "plan", "said"),
    [
        ("eagle", PARALLEL, "`parallel_drafting` true"),
        ("sglang", Plan(layers=2), "`num_hidden_layers` 2"),
        ("sglang", Plan(flags=("norm_before_residual",)), "`norm_before_residual` true"),
        ("sglang", Plan(flags=("attention_bias",)), "`attention_bias` true"),
        ("sglang", Plan(qwen3=True), "`architectures` of a Qwen3 layer"),
        ("sglang", Plan(ids=(0, 6, 9)), "the embeddings"),
        ("sglang", Plan(ids=(2, 6, 12)), "never captures the output of the target's last"),
        ("sglang", Plan(num_aux=1, ids=(6,)), "skip an fc"),
        ("eagle", Plan(flags=("fc_norm",)), "`fc_norm` true"),
        ("eagle", Plan(ids=(2, 6, 10)), "always reads the layers 2, N/2 and N-3"),
        ("eagle", Plan(num_aux=4, ids=(2, 4, 6, 9)), "exactly 3"),
        ("eagle", Plan(rope=ROPES[1]), "takes 10000 whatever config.json says"),
        ("eagle", Plan(rope=ROPES[3]), "`rope_type` llama3"),
        ("eagle", Plan(own_embedding=True), "differs from the target's"),
        ("modelopt", Plan(own_embedding=True), "differs from the target's"),
        ("specforge", Plan(flags=("norm_output",)), "`norm_output` true"),
        ("nemo", Plan(flags=("norm_before_fc",)), "`norm_before_fc` true"),
        ("nemo", Plan(layers=2), "`num_hidden_layers` 2"),
        ("angelslim", Plan(rope=ROPES[3]), "`rope_type` llama3"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_by_its_key(
    to: str, plan: Plan, said: str, tmp_path: Path, target: Path
) -> None:
    with pytest.raises(NotSupportedError, match=said) as caught:
        run(make(tmp_path / "source", plan), tmp_path / "out", to, target)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_sglang_names_the_runtime_that_serves_parallel_heads(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError) as caught:
        run(make(tmp_path / "source", PARALLEL), tmp_path / "out", "sglang")
    assert caught.value.message == "SGLang cannot serve P-EAGLE heads; use vLLM >= 0.16"


@pytest.mark.parametrize("to", ["sglang", "eagle", "modelopt"])
def test_an_embedding_equal_to_the_targets_is_left_out_where_readers_replace_it(
    to: str, tmp_path: Path, target: Path
) -> None:
    shared = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors = tensors_of(Plan()) | {"embed_tokens.weight": shared}
    source = save(tmp_path / "source", config_of(Plan()), tensors)
    report = run(source, tmp_path / "out", to, target)
    assert "embed_tokens.weight" in {row.name for row in report.dropped}
    with pytest.raises(UsageError, match="not known"):
        run(source, tmp_path / "unknown", to, **({} if to != "eagle" else {"aux_layers": None}))


def test_shared_tables_are_taken_from_the_target_and_from_a_tied_one(tmp_path: Path) -> None:
    """A tied target's file has no lm_head (NVIDIA-NeMo/Automodel#2319)."""
    plan = Plan(own_head=False, draft_vocab=VOCAB)
    source = make(tmp_path / "source", plan)
    tied = make_target(tmp_path / "target", tie_word_embeddings=True)
    tables = load_file(tied / "model.safetensors")
    save(
        tied,
        json.loads((tied / "config.json").read_text()),
        {"model.embed_tokens.weight": tables["model.embed_tokens.weight"]},
    )
    report = run(source, tmp_path / "out", "speculators", tied)
    made = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("lm_head.weight", "embed_tokens.weight"):
        assert torch.equal(made[name], tables["model.embed_tokens.weight"])
        assert {row.name: row.change for row in report.trace}[name] == "from the target"
    with pytest.raises(UsageError, match="shares the target's"):
        run(source, tmp_path / "alone", "speculators")


def test_sglang_says_null_for_the_vocabulary_of_a_head_it_takes_from_the_target(tmp_path: Path) -> None:
    source = make(tmp_path / "source", Plan(own_head=False, draft_vocab=VOCAB))
    run(source, tmp_path / "out", "sglang")
    config = settings_of(tmp_path / "out")
    assert "draft_vocab_size" in config and config["draft_vocab_size"] is None
    run(tmp_path / "out", tmp_path / "back", "vllm")
    assert stored(tmp_path / "back") == stored(source)


# layer ids


@pytest.mark.parametrize(
    ("ids", "num_layers", "convention"),
    [
        ([1, 17, 32], 36, "output"),
        ([2, 18, 33], 36, "boundary"),
        ([24, 30, 36], 36, "boundary"),
        ([24, 30, 35], 36, None),
        ([1, 9, 30], None, "output"),
        ([2, 9, 30], None, "boundary"),
        ([3, 9, 30], None, None),
        ([1, 2, 3, 4], None, None),
        ([0, 1, 2], 4, None),
        ([], 8, None),
    ],
)
def test_unlabelled_ids_are_told_only_where_one_reading_is_possible(
    ids: list[int], num_layers: int | None, convention: str | None
) -> None:
    assert tell_convention(ids, num_layers) == convention


def modelopt_head(folder: Path, ids: list[int]) -> Path:
    plan = Plan(ids=None)
    tensors = {name: t for name, t in tensors_of(plan).items() if name != "t2d"}
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_mtp_layernorm": False, "use_aux_hidden_state": True}
    return save(folder, config_of(plan) | {"eagle_config": eagle}, tensors)


@pytest.mark.parametrize(("convention", "boundaries"), [("output", (4, 6, 8)), ("boundary", (3, 5, 7))])
def test_modelopts_ids_are_asked_for_where_they_can_be_read_in_two_ways(
    convention: str, boundaries: tuple[int, ...], tmp_path: Path, target: Path
) -> None:
    source = modelopt_head(tmp_path / "source", [3, 5, 7])
    with pytest.raises(UsageError, match="two ways") as caught:
        run(source, tmp_path / "out", "vllm", target)
    assert "--source-layer-convention" in str(caught.value.hint)
    report = run(source, tmp_path / "out", "vllm", target, source_layer_convention=convention)
    assert (report.from_layout, report.aux_ids) == ("modelopt", boundaries)


def test_modelopts_published_ids_that_reach_the_last_layer_are_boundaries(tmp_path: Path, target: Path) -> None:
    report = run(modelopt_head(tmp_path / "source", [8, 10, 12]), tmp_path / "out", "vllm", target)
    assert report.aux_ids == (8, 10, 12)


def test_layers_that_no_file_says_are_asked_for_or_follow_from_the_target(tmp_path: Path, target: Path) -> None:
    plan = Plan(ids=None)
    eagle = make(tmp_path / "eagle", plan)
    config = config_of(plan) | {"architectures": ["LlamaForCausalLM"]}
    (eagle / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="follow from the target's depth"):
        run(eagle, tmp_path / "out", "vllm")
    assert run(eagle, tmp_path / "out", "vllm", target).aux_ids == (2, 6, 9)
    nemo = make(tmp_path / "nemo", plan)
    (nemo / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaEagle3DraftModel"]}))
    with pytest.raises(UsageError, match="lets one choose"):
        run(nemo, tmp_path / "out2", "vllm", target)
    assert run(nemo, tmp_path / "out2", "vllm", target, aux_layers="aux").aux_ids == (2, 6, 9)
    assert run(nemo, tmp_path / "out3", "vllm", aux_layers="1,4,7").aux_ids == (1, 4, 7)


def test_an_option_does_not_overrule_what_the_file_says(tmp_path: Path) -> None:
    source = make(tmp_path / "source", Plan())
    with pytest.raises(UsageError, match="can only mean"):
        run(source, tmp_path / "out", "vllm", aux_layers="1,2,3")
    with pytest.raises(UsageError, match="`--num-draft-tokens` says 9"):
        run(source, tmp_path / "out", "vllm", num_draft_tokens=9)


def test_ids_nested_and_at_the_top_that_differ_are_asked_about(tmp_path: Path) -> None:
    plan = Plan(extra={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}})
    with pytest.raises(UsageError, match="twice and differently"):
        run(make(tmp_path / "source", plan), tmp_path / "out", "vllm")


def test_the_canonical_config_says_ids_for_both_runtimes_and_leaves_out_what_has_no_number(tmp_path: Path) -> None:
    run(make(tmp_path / "source", Plan()), tmp_path / "out", "vllm")
    config = settings_of(tmp_path / "out")
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    run(make(tmp_path / "zero", Plan(ids=(0, 6, 9))), tmp_path / "zero-out", "vllm")
    assert "eagle_aux_hidden_state_layer_ids" not in settings_of(tmp_path / "zero-out")["eagle_config"]


# settings


def changed(folder: Path, plan: Plan = Plan(), *, drop: tuple[str, ...] = (), **config: Any) -> Path:
    """A head whose config.json has other keys."""
    make(folder, plan)
    keys = config_of(plan) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if k not in drop}))
    return folder


def test_rope_only_in_the_new_spelling_comes_out_in_both(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#2920: readers of one spelling fall back to 10000 in silence."""
    source = changed(tmp_path / "source", Plan(rope=ROPES[3]), drop=("rope_theta", "rope_scaling"))
    run(source, tmp_path / "out", "vllm")
    config = settings_of(tmp_path / "out")
    assert config["rope_theta"] == 500000.0
    assert config["rope_parameters"] == ROPES[3]
    assert config["rope_scaling"] == {k: v for k, v in ROPES[3].items() if k != "rope_theta"}


def test_a_head_without_any_theta_is_refused(tmp_path: Path) -> None:
    source = changed(tmp_path / "source", drop=("rope_theta", "rope_scaling", "rope_parameters"))
    with pytest.raises(InputError, match="no `rope_theta`"):
        run(source, tmp_path / "out", "vllm")


def test_a_multimodal_rope_becomes_the_plain_one_of_text(tmp_path: Path) -> None:
    """vllm-project/speculators#598: `mrope_section` alone switches M-RoPE on."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24], "mrope_interleaved": True, "rope_theta": 1000000}
    source = changed(tmp_path / "source", drop=("rope_theta", "rope_scaling"), rope_parameters=rope)
    report = run(source, tmp_path / "out", "vllm")
    assert settings_of(tmp_path / "out")["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000000}
    assert any("mrope_section" in note for note in report.notes)


BY_KIND = {
    "full_attention": {"rope_theta": 500000.0, "rope_type": "yarn", "factor": 64.0},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_rope_per_kind_of_attention_is_that_of_the_drafts_layers(kind: str, tmp_path: Path) -> None:
    """vllm-project/speculators#649."""
    source = changed(
        tmp_path / "source",
        drop=("rope_theta", "rope_scaling"),
        rope_parameters=BY_KIND,
        layer_types=[kind],
        sliding_window=64,
    )
    report = run(source, tmp_path / "out", "vllm")
    assert settings_of(tmp_path / "out")["rope_parameters"] == BY_KIND[kind]
    assert any(f"rope_parameters.{kind}" in note for note in report.notes)


def test_an_unknown_kind_of_attention_is_refused(tmp_path: Path) -> None:
    source = changed(
        tmp_path / "source",
        drop=("rope_theta", "rope_scaling"),
        rope_parameters={"odd": {"rope_theta": 1.0}},
    )
    with pytest.raises(InputError, match="one set per kind of attention"):
        run(source, tmp_path / "out", "vllm")


@pytest.mark.parametrize("layout", ["eagle", "angelslim"])
def test_heads_of_trainers_that_ignore_theta_are_read_at_10000(layout: str, tmp_path: Path, target: Path) -> None:
    names = {"eagle": "LlamaForCausalLM", "angelslim": "Eagle3LlamaForCausalLM"}
    source = changed(
        tmp_path / "source", Plan(ids=None, rope=ROPES[1]), architectures=[names[layout]], target_model_type="x"
    )
    report = run(source, tmp_path / "out", "vllm", target)
    assert report.from_layout == layout
    assert settings_of(tmp_path / "out")["rope_parameters"] == ROPES[0]
    assert any("10000" in note for note in report.notes)


def test_positions_reach_as_far_as_the_targets(tmp_path: Path) -> None:
    """vllm-project/vllm#48894: the number sizes the table, positions follow the target."""
    target = make_target(tmp_path / "target", max_position_embeddings=40960)
    source = changed(tmp_path / "source", max_position_embeddings=2048)
    report = run(source, tmp_path / "out", "vllm", target)
    assert settings_of(tmp_path / "out")["max_position_embeddings"] == 40960
    assert any("trained with 2048" in note for note in report.notes)
    longer = changed(tmp_path / "longer", max_position_embeddings=131072)
    run(longer, tmp_path / "longer-out", "vllm", target)
    assert settings_of(tmp_path / "longer-out")["max_position_embeddings"] == 131072
    silent = changed(tmp_path / "silent", drop=("max_position_embeddings",))
    with pytest.raises(UsageError, match="would take 2048"):
        run(silent, tmp_path / "silent-out", "vllm")


def test_a_targets_window_is_not_the_drafts(tmp_path: Path) -> None:
    source = changed(tmp_path / "source", sliding_window=4096, use_sliding_window=True, max_window_layers=24)
    run(source, tmp_path / "out", "vllm")
    config = settings_of(tmp_path / "out")
    assert (config["sliding_window"], config["layer_types"]) == (None, ["full_attention"])
    wrong = changed(tmp_path / "wrong", layer_types=["full_attention"] * 24)
    with pytest.raises(InputError, match="`layer_types` has 24 entries"):
        run(wrong, tmp_path / "wrong-out", "vllm")


def test_a_draft_that_slides_keeps_its_window_where_it_can(tmp_path: Path, target: Path) -> None:
    source = changed(tmp_path / "source", sliding_window=64, layer_types=["sliding_attention"])
    run(source, tmp_path / "out", "speculators", target)
    layer = settings_of(tmp_path / "out")["transformer_layer_config"]
    assert (layer["sliding_window"], layer["layer_types"]) == (64, ["sliding_attention"])
    with pytest.raises(NotSupportedError, match="attend fully"):
        run(source, tmp_path / "no", "sglang")


def test_a_nested_norm_flag_is_lifted_to_where_every_reader_looks(tmp_path: Path) -> None:
    """vllm-project/vllm#42143."""
    plan = Plan(flags=("norm_before_fc",))
    source = changed(tmp_path / "source", plan, drop=("norm_before_fc",), eagle_config={"norm_before_fc": True})
    run(source, tmp_path / "out", "vllm")
    assert settings_of(tmp_path / "out")["norm_before_fc"] is True


@pytest.mark.parametrize(
    ("plan", "config", "said"),
    [
        (Plan(flags=("fc_norm",)), {"norm_before_fc": True}, "both true"),
        (Plan(), {"fc_norm": True}, r"missing: `fc_norm.0.weight`"),
        (Plan(), {"attention_bias": True}, "missing: `layers.0.self_attn.k_proj.bias`"),
        (Plan(flags=("attention_bias",)), {"attention_bias": False}, "no part of the head"),
        (Plan(layers=2), {"num_hidden_layers": 1}, "`layers.1.input_layernorm.weight`"),
        (Plan(), {"num_hidden_layers": 2}, "missing: `layers.1"),
        (Plan(), {"hidden_size": 16}, "not the shape"),
        (Plan(), {"hidden_size": "8"}, "`hidden_size` must be"),
        (Plan(), {"num_aux_hidden_states": 4}, "3 layers are named"),
        (Plan(), {"draft_vocab_size": 48}, "more than `vocab_size`"),
        (Plan(parallel=True), {"pard_token": 6}, "several ids"),
        (Plan(), {"rope_parameters": {"rope_type": {}, "rope_theta": 1.0}}, "must be a text"),
    ],
)
def test_config_and_tensors_that_contradict_are_refused(
    plan: Plan, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        run(changed(tmp_path / "source", plan, **config), tmp_path / "out", "vllm")


def test_a_bias_that_no_key_announces_is_refused_and_named(tmp_path: Path) -> None:
    tensors = tensors_of(Plan()) | {"fc.bias": torch.zeros(8)}
    with pytest.raises(InputError, match=r"`fc\.bias`"):
        run(save(tmp_path / "source", config_of(Plan()), tensors), tmp_path / "out", "vllm")


def test_a_parallel_head_without_its_token_is_asked_about(tmp_path: Path, target: Path) -> None:
    """SpecForge saves neither the id nor a flag: sgl-project/SpecForge configs/qwen3-8b-peagle.json."""
    source = changed(
        tmp_path / "source",
        PARALLEL,
        drop=("mask_token_id", "parallel_drafting", "eagle_aux_hidden_state_layer_ids"),
        architectures=["PEagleDraftModel"],
    )
    with pytest.raises(UsageError) as caught:
        run(source, tmp_path / "out", "vllm", target)
    assert "--mask-token" in str(caught.value.hint)
    report = run(source, tmp_path / "out", "vllm", target, mask_token=5)
    config = settings_of(tmp_path / "out")
    assert report.from_layout == "specforge"
    assert [config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")] == [5, 5, 5]
    assert config["parallel_drafting"] is True
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize(("said", "error"), [(True, UsageError), (False, NotSupportedError)])
def test_specforges_norm_output_is_asked_about(said: bool, error: type[SpecctlError], tmp_path: Path) -> None:
    """sgl-project/SpecForge#879: the key changed its meaning."""
    source = changed(tmp_path / "source", norm_output=said)
    with pytest.raises(error, match="norm_output"):
        run(source, tmp_path / "out", "vllm", from_layout="specforge")
    run(source, tmp_path / "out", "vllm", from_layout="specforge", norm_output=False)
    assert settings_of(tmp_path / "out")["norm_output"] is False


def test_speculators_without_its_residual_flag_is_asked_about(tmp_path: Path, target: Path) -> None:
    run(make(tmp_path / "source", Plan()), tmp_path / "spec", "speculators", target)
    config = json.loads((tmp_path / "spec" / "config.json").read_text())
    del config["norm_before_residual"]
    (tmp_path / "spec" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="vLLM takes true, speculators false"):
        run(tmp_path / "spec", tmp_path / "out", "vllm")
    run(tmp_path / "spec", tmp_path / "out", "vllm", norm_before_residual=True)
    assert settings_of(tmp_path / "out")["norm_before_residual"] is True


def test_what_a_target_left_in_the_config_stays_behind(tmp_path: Path) -> None:
    source = changed(
        tmp_path / "source", quantization_config={"quant_method": "fp8"}, auto_map={"": "x"}, use_cache=True
    )
    report = run(source, tmp_path / "out", "vllm")
    assert not {"quantization_config", "auto_map", "use_cache"} & settings_of(tmp_path / "out").keys()
    assert any("quantization_config" in note for note in report.notes)
    assert settings_of(tmp_path / "out")["initializer_range"] == 0.02


def test_a_quantised_head_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(Plan()) | {"fc.weight_scale": torch.ones(1)}
    with pytest.raises(NotSupportedError, match="quantised head"):
        run(save(tmp_path / "source", config_of(Plan()), tensors), tmp_path / "out", "vllm")


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hidden_size 8"):
        run(make(tmp_path / "source", Plan()), tmp_path / "out", "vllm", make_target(tmp_path / "target", 16))


def test_a_narrow_head_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing: `embed_tokens\.weight`"):
        run(make(tmp_path / "source", Plan(target_hidden=12)), tmp_path / "out", "vllm")


# which layout it is


@pytest.mark.parametrize(
    ("layout", "keys", "spell"),
    [
        ("vllm", {}, "layers.0."),
        ("sglang", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, "midlayer."),
        ("eagle", {"architectures": ["LlamaForCausalLM"]}, "midlayer."),
        ("specforge", {"dtype": "bfloat16"}, "midlayer."),
        ("nemo", {"architectures": ["LlamaEagle3DraftModel"]}, "model.layers.0."),
        ("angelslim", {"architectures": ["Eagle3LlamaForCausalLM"], "modal_type": "LLM"}, "midlayer."),
        ("modelopt", {"eagle_config": {"use_mtp_layernorm": False}}, "layers.0."),
        ("speculators", {"speculators_config": {}, "speculators_model_type": "eagle3"}, "layers.0."),
    ],
)
def test_each_projects_own_output_is_recognised(layout: str, keys: dict[str, Any], spell: str, tmp_path: Path) -> None:
    plan = Plan() if layout == "vllm" else Plan(ids=None)
    tensors = {name.replace("layers.0.", spell): t for name, t in tensors_of(plan).items()}
    if layout in ("sglang", "modelopt"):
        del tensors["t2d"]
    source = save(tmp_path / "source", config_of(plan) | keys, tensors)
    assert recognised(open_checkpoint(source)) == layout


@pytest.mark.parametrize("spell", ["midlayer.", "layers.0.", "model.midlayer.", "model.layers.0."])
def test_every_dialect_of_names_comes_out_in_the_one_that_is_read(spell: str, tmp_path: Path) -> None:
    """A lost rename gives acceptance 0 without an error (vllm-project/speculators#360)."""
    tensors = {name.replace("layers.0.", spell): t for name, t in tensors_of(Plan()).items()}
    source = save(tmp_path / "source", config_of(Plan()), tensors)
    run(source, tmp_path / "out", "vllm", from_layout="vllm")
    assert stored(tmp_path / "out") == stored(make(tmp_path / "plain", Plan()))


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(Plan())
    tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"].clone()
    with pytest.raises(InputError, match="are both"):
        run(save(tmp_path / "source", config_of(Plan()), tensors), tmp_path / "out", "vllm")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_satisfies_its_protocol_and_never_raises_when_asked_what_it_is(name: str, tmp_path: Path) -> None:
    layout = plugins.load("formats", name)
    for member in ("recognise", "aux_ids", "read", "write"):
        wanted = inspect.signature(getattr(plugins.Format, member)).parameters
        assert list(inspect.signature(getattr(layout, member)).parameters) == [p for p in wanted if p != "self"]
    assert layout.TITLE
    hostile: tuple[dict[str, Any], ...] = (
        {},
        {"specctl": 5, "architectures": 5, "eagle_config": [], "eagle_aux_hidden_state_layer_ids": "x"},
        {"specctl": {"layout": []}, "architectures": [[]], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [{}]}},
    )
    for i, config in enumerate(hostile):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(folder)
        assert 0 <= layout.recognise(checkpoint) <= 100
        assert layout.aux_ids(checkpoint, 12) in (None, (2, 6, 9))
        with pytest.raises(SpecctlError):
            layout.read(checkpoint, Asked())


ODD: tuple[Any, ...] = (None, -1, 0, 1.5, "x", "", [], {}, {"a": 1}, [1], [[1]], True, 2**70, float("nan"), "\udc80")
ODD_KEYS = (
    *(
        "norm_output",
        "num_depths",
        "use_aux_norm",
        "verifier",
        "specctl",
        "dflash_config",
        "layer_types",
        "logit_scale",
    ),
    *("speculators_config", "speculators_model_type", "transformer_layer_config", "quantization_config", "fc_norm"),
    *("aux_hidden_states_layer_ids", "rope_type", "type", "sliding_window", "tie_word_embeddings", "parallel_drafting"),
)


def test_any_wrong_value_anywhere_raises_only_errors_for_users(tmp_path: Path, target: Path) -> None:
    rng = random.Random(5)
    heads = {layout: tmp_path / layout for layout in LAYOUTS}
    for layout, folder in heads.items():
        run(make(tmp_path / f"{layout}-source", Plan()), folder, layout, target)
    plain = {layout: (folder / "config.json").read_text() for layout, folder in heads.items()}
    for _ in range(400):
        layout = rng.choice(LAYOUTS)
        config = json.loads(plain[layout])
        for _ in range(rng.randint(1, 3)):
            inner = [value for value in config.values() if isinstance(value, dict)]
            place = rng.choice(inner) if inner and rng.random() < 0.3 else config
            place[rng.choice([*ODD_KEYS, *place])] = json.loads(json.dumps(rng.choice(ODD)))
        (heads[layout] / "config.json").write_text(json.dumps(config))
        try:
            head = read(heads[layout], target, layout=layout)
            for other in LAYOUTS:
                with contextlib.suppress(SpecctlError):
                    json.dumps(plugins.load_format(other).write(head, Asked()).config)
        except SpecctlError as error:
            assert error.message.isprintable()


@pytest.mark.parametrize("rope", ROPES)
def test_transformers_reads_from_every_layout_the_rope_that_is_meant(
    rope: dict[str, Any], tmp_path: Path, target: Path
) -> None:
    from transformers import AutoConfig

    source = make(tmp_path / "source", Plan(rope=rope))
    for layout in LAYOUTS:
        try:
            run(source, tmp_path / layout, layout, target)
        except NotSupportedError:
            continue
        config = json.loads((tmp_path / layout / "config.json").read_text())
        kind = config.get("transformer_layer_config", config)
        (tmp_path / layout / "config.json").write_text(json.dumps(kind))
        loaded = dict(AutoConfig.from_pretrained(tmp_path / layout).rope_parameters)
        loaded.pop("type", None)
        assert loaded == rope, layout
