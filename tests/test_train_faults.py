"""What other trainers got wrong: loss, masks, metrics, settings, rope, earlier drafts, resuming, the served draft."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import chat_rows
from draft_parts import HEAD, PARALLEL, a_batch, a_model, a_teacher
from safetensors.numpy import load_file, save_file
from train_parts import extracted, one_step

from specctl.cli import app
from specctl.core import headmaking, trainstate
from specctl.core.decode import decode_here
from specctl.core.losses import distil, make_teacher
from specctl.core.modules import DraftModel
from specctl.core.slots import scored, slots_of
from specctl.core.speculate import DecodeSettings, Request
from specctl.core.target import describe_target, load_target
from specctl.core.teaching import read_parts
from specctl.core.trainlog import numbers_of
from specctl.core.trainsetup import draft_settings, prepare
from specctl.drafts import eagle3, peagle
from specctl.errors import (
    InputError,
    MachineError,
    NotSupportedError,
    SettingsChangedError,
    SpecctlError,
    UsageError,
)
from specctl.recipes.inspectrun import inspect_run
from specctl.recipes.train import train
from specctl.recipes.trainfolder import begun
from specctl.recipes.trainplan import plan_training
from specctl.records.draft import DraftBatch, DraftSettings
from specctl.records.progress import SilentReporter
from specctl.records.training import DepthScore, TrainConfig

QUIET = SilentReporter()
RESERVED = 263
CPU = torch.device("cpu")
DRAFTS = {"eagle3": eagle3, "peagle": peagle}


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory) -> str:
    """States of a tiny Llama for ten chats."""
    return extracted(tiny("llama"), chat_rows(10), tmp_path_factory.mktemp("shards"))


@pytest.fixture
def config(tiny, shards, tmp_path) -> TrainConfig:
    return one_step(tiny("llama"), shards, tmp_path / "run")


def parallel(config: TrainConfig) -> TrainConfig:
    return replace(config, parallel_drafting=True, ptd_token_id=RESERVED)


KINDS = pytest.mark.parametrize("kind", [lambda c: c, parallel], ids=["eagle3", "peagle"])


def weights(folder: str | Path) -> dict[str, np.ndarray]:
    return load_file(Path(folder) / "model.safetensors")


def settings_of(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


class Notes(SilentReporter):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def note(self, message: str) -> None:
        self.kept.append(message)


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_the_last_token_is_a_label_and_nothing_after_it_is() -> None:
    """An unshifted mask trains the last position against padding (SafeAILab/EAGLE#341)."""
    batch = a_batch(HEAD, ((1, 1, 1, 1, 1),), padding=2)
    # Slots read tokens 1..4 and predict 2..5, of which the last is not there.
    assert scored(batch, slots_of(batch), 1)[:, 0].tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", DRAFTS)
def test_long_and_short_answers_weigh_by_their_tokens_in_any_order_and_any_cut(name: str) -> None:
    """A mean over positions, or of means, weakens whatever has a long prompt (SafeAILab/EAGLE#340)."""
    model = a_model(PARALLEL)
    teacher, settings = a_teacher(model), DraftSettings(3, cod_ratio=1.0)
    whole = a_batch(PARALLEL, ((0,) * 9 + (1,), (0,) * 3 + (1,) * 100, (1,) * 4))
    pieces = [
        DraftBatch(*(x[a:b] if torch.is_tensor(x) else (0, b - a) for x in tensors(whole)))
        for a, b in zip(whole.offsets, whole.offsets[1:], strict=False)
    ]

    def gradient(batches: list[DraftBatch]) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        found = [
            DRAFTS[name].training_loss(model, b, teacher=teacher, settings=settings, generator=torch.Generator())
            for b in batches
        ]
        weight = sum(float(report.weight) for report in found)
        loss = sum(report.loss for report in found) / weight
        loss.backward()
        return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    loss, gradients = gradient([whole])
    for cut in (pieces, pieces[::-1]):
        other, others = gradient(cut)
        assert other == pytest.approx(loss, rel=1e-9)
        assert others.keys() == gradients.keys()
        assert all(torch.allclose(others[n], gradients[n], atol=1e-9) for n in gradients)


def tensors(batch: DraftBatch) -> tuple[Any, ...]:
    return (batch.input_ids, batch.offsets, batch.loss_mask, batch.aux, batch.final)


def test_a_supervised_first_token_makes_no_anchor_before_it() -> None:
    """An anchor of -1 reads the last document (NVIDIA-NeMo/Automodel#2464)."""
    for masks, padding in ((((1, 1), (1,)), 1), (((1, 1, 1), (0, 1, 1, 1)), 2)):
        batch = a_batch(PARALLEL, masks, padding=padding)
        slots = slots_of(batch)
        scored_NK = scored(batch, slots, 2)
        chains = peagle.sample_chains(scored_NK, ratio=1.0, floor=1.0, generator=torch.Generator())
        assert bool((chains.slots_M >= 0).all())
        labels = slots.tokens_N[chains.slots_M] + 2 + chains.depths_M
        assert bool((labels < slots.ends_N[chains.slots_M]).all())
        model = a_model(PARALLEL)
        found = peagle.training_loss(
            model, batch, teacher=a_teacher(model), settings=DraftSettings(2), generator=torch.Generator()
        )
        assert bool(found.loss.isfinite())


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_best_token_inside_the_vocabulary_is_no_hit_where_the_targets_lies_outside(loss) -> None:
    """Training accuracy was above that of serving (sgl-project/SpecForge c90d72a0)."""
    odds = torch.tensor([0.05, 0.2, 0.05, 0.05, 0.1, 0.5, 0.05])
    teacher = make_teacher(odds.log()[:, None], torch.tensor([1, 4, 6]))
    head = torch.tensor([[3.0], [1.0], [0.0]])  # proposes token 1, the best of those inside
    found = distil(
        torch.ones(1, 1),
        head,
        teacher=teacher,
        states_UD=torch.ones(1, 1),
        rows_M=torch.tensor([0]),
        weights_M=torch.ones(1),
        kind=loss,
    )
    assert int(teacher.greedy_ids(torch.ones(1, 1))[0]) == 5
    assert not found.hits_M.any()
    assert found.outside_M.all()
    assert bool(found.total.isfinite())


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("answer", [1, 2, 8])
def test_a_draft_that_is_always_right_scores_one_at_every_depth_of_short_answers(name: str, answer: int) -> None:
    """speculators 0.9.0 reports 0.875, 0.750 and 0.625 for answers of eight tokens."""
    head = replace(PARALLEL, mlp_bias=True, draft_vocab_size=PARALLEL.vocab_size)
    model = a_model(head)
    with torch.no_grad():  # a stream that always points one way, and a token that lies there
        model.layers[-1].mlp.down_proj.bias.zero_()[0] = 1e6
        model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()[7, 0] = 1.0
    weight = torch.zeros(head.vocab_size, head.target_hidden_size, dtype=torch.float64)
    weight[7] = 1.0
    batch = a_batch(head, ((0, 0, 0) + (1,) * answer, (0, 1)), padding=1)
    batch = replace(batch, final=torch.ones_like(batch.final))
    found = DRAFTS[name].training_loss(
        model, batch, teacher=make_teacher(weight, None), settings=DraftSettings(3, cod_ratio=1.0)
    )
    assert found.hits.tolist() == found.counts.tolist()
    assert found.prefix_hits.tolist() == found.prefix_counts.tolist()
    reached = sum(count > 0 for count in found.prefix_counts.tolist())
    assert reached == min(3, answer)
    assert found.simulated_acceptance_length() == 1 + reached


@KINDS
def test_every_rate_of_a_run_is_a_share(kind, config) -> None:
    """Sums that were added up twice gave an accuracy of 1.42 (vllm-project/speculators#759)."""
    report = train(replace(kind(config), eval_fraction=0.3, accumulate=2, max_steps=2), QUIET)
    assert report is not None and report.evaluation is not None
    depths = report.evaluation.depths
    for depth in depths:
        assert all(0 <= rate <= 1 for rate in (depth.accuracy, depth.joint_rate, depth.outside_rate))
    assert depths[0].joint_rate == depths[0].accuracy
    assert all(a.joint_rate >= b.joint_rate - 1e-9 for a, b in pairwise(depths))
    assert report.evaluation.acceptance_length == pytest.approx(1 + sum(depth.joint_rate for depth in depths))


def test_rates_of_cross_entropy_are_shares_of_all_that_was_scored(config) -> None:
    """Elements outside the vocabulary are no part of `counts` and are a part of `outside`."""
    asked = replace(config, eval_fraction=0.3, draft_vocab_size=2)
    rates = {}
    for loss in ("ce", "kl"):
        report = train(replace(asked, loss=loss, out=config.out + loss, lr=1e-12), QUIET)
        assert report is not None and report.evaluation is not None
        rates[loss] = [(d.accuracy, d.joint_rate, d.outside_rate) for d in report.evaluation.depths]
        assert all(0 <= rate <= 1 for depth in rates[loss] for rate in depth)
    assert np.allclose(rates["ce"], rates["kl"])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_config(config, tmp_path) -> Callable[[str], int]:
    """`specctl train` in this process, its settings in a config file."""

    def run(text: str) -> int:
        path = tmp_path / "run.toml"
        given = {"target": config.target, "out": config.out, "max_steps": 1, "batch_tokens": 256}
        given = {key: value for key, value in given.items() if f"{key} =" not in text}
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items()) + text)
        return app.run(["train", *config.shards, "--config", str(path)])

    return run


def test_a_number_of_draft_tokens_that_is_left_out_is_the_default(run_config, config) -> None:
    """A default was evaluated where it was not needed, and failed (NVIDIA-NeMo/Automodel#2376)."""
    text = f"parallel_drafting = true\nptd_token_id = {RESERVED}\ndraft_vocab_size = 64\neval_fraction = 0.3\n"
    assert run_config(text) == 0
    lines = [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]
    assert [len(line["depths"]) for line in lines if line["kind"] == "eval"] == [4]
    assert draft_settings(parallel(config)).num_draft_tokens == 4
    assert draft_settings(config).num_draft_tokens == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("num_draft_tokens = 0", "num-draft-tokens 0"),
        ("num_draft_tokens = -1", "num-draft-tokens -1"),
        ("num_draft_tokens = 4.5", "is a float"),
        ("num_draft_tokens = 1.0", "is a float"),
        ("num_draft_tokens = true", "is a bool"),
        ('num_draft_tokens = "4"', "is a str"),
        ('lr = "fast"', "is a str"),
        ("lr = nan", "not above 0"),
        ("parallel_drafting = 1", "is a int"),
        ('betas = ["a", 0.9]', "`betas[0]` is a str"),
        ("betas = [0.9, 1.0]", "two numbers from 0 to below 1"),
        ("weights = [true]", "`weights[0]` is a bool"),
        ("weights = 2.0", "is a float"),
        ("layers = [2, 4]", "is a list"),
        ("num_draft_token = 3", "did you mean `num_draft_tokens`?"),
    ],
)
def test_a_setting_of_the_wrong_type_or_range_is_refused_before_anything_is_read(
    line, words, run_config, capsys
) -> None:
    assert run_config(line + '\ntarget = "/nowhere"\n') == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("lr", "epochs", "clip", "depth_decay", "warmup", "weight_decay", "min_lr", "rope_theta"),
        *("cod_ratio", "cod_floor", "max_bad_samples", "eval_fraction"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_numbers_that_would_ruin_the_weights_are_refused(name: str, value: float, config) -> None:
    """NaN passes every test that asks whether a number is too small."""
    steps = {"max_steps": None} if name == "epochs" else {}
    with pytest.raises(UsageError, match=name.replace("_", "[-_]")):
        train(replace(config, **{name: value, **steps}), QUIET)
    assert not Path(config.out).exists()


@pytest.mark.parametrize(
    "name", ["intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "eval_rows"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_of_nothing_is_refused_and_not_taken_for_none(name: str, value: int, config) -> None:
    with pytest.raises(UsageError, match=name):
        train(replace(config, **{name: value}), QUIET)


@pytest.mark.parametrize("changes", [{"seed": 1 << 70}, {"shards": ()}, {"segments": 0}, {"num_draft_tokens": 4.5}])
def test_other_values_without_a_meaning_are_refused(changes, config) -> None:
    with pytest.raises(UsageError):
        train(replace(config, **changes), QUIET)


def test_a_run_that_never_began_does_not_stand_in_the_way_of_the_corrected_one(config) -> None:
    with pytest.raises(UsageError, match="boundary 3"):
        train(replace(config, layers="3"), QUIET)
    report = train(config, QUIET)
    assert report is not None and report.passes


# -- rope and tables of the target ------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "rope_theta": 1e6}
ROPES = {
    "llama3": {"rope_parameters": LLAMA3},
    "theta alone": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "yarn": {"rope_parameters": YARN},
    "linear, old spelling": {"rope_theta": 5e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "theta alone, old spelling": {"rope_theta": 7e5},
}


def retold(target: str, folder: Path, **settings: Any) -> str:
    """A copy of a target whose config.json says `settings` instead of its rope."""
    shutil.copytree(target, folder)
    kept = {key: value for key, value in settings_of(target).items() if not key.startswith("rope")}
    (folder / "config.json").write_text(json.dumps(kept | settings))
    return str(folder)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_the_draft_turns_as_its_target_does_and_says_so_in_every_spelling(rope, config, tmp_path) -> None:
    """Readers of one spelling take theta 10000 where they find the other (NVIDIA-NeMo/Automodel#2920)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    target = retold(config.target, tmp_path / "target", **rope)
    report = train(replace(config, target=target), QUIET)
    assert report is not None and report.passes
    said = settings_of(report.draft)
    theta = rope.get("rope_theta") or rope["rope_parameters"]["rope_theta"]
    assert said["rope_theta"] == said["rope_parameters"]["rope_theta"] == theta
    scaling = {key: value for key, value in said["rope_parameters"].items() if key != "rope_theta"}
    assert said["rope_scaling"] == (None if scaling == {"rope_type": "default"} else scaling)
    whole = LlamaRotaryEmbedding(LlamaConfig(**{**settings_of(target), "rope_parameters": said["rope_parameters"]}))
    of_target = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(target))
    saved = weights(report.draft)["rotary_emb.inv_freq"]
    for expected in (whole, of_target):
        assert np.allclose(saved, expected.inv_freq.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({}, "says no `rope_theta`"),
        ({"rope_parameters": {"rope_type": "default"}}, "says no `rope_theta`"),
        ({"rope_theta": "1e4"}, "no number above 0"),
        ({"rope_theta": -1.0}, "no number above 0"),
        ({"rope_theta": 0}, "no number above 0"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "not finite and above 0"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn"}}, "make no rope"),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 7,
                    "long_factor": [1.0] * 7,
                    "original_max_position_embeddings": 64,
                },
            },
            "make no rope",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "spiral"}}, "not known"),
    ],
)
def test_a_rope_that_cannot_be_followed_is_refused_and_never_guessed(rope, words, config, tmp_path) -> None:
    with pytest.raises(SpecctlError, match=words):
        train(replace(config, target=retold(config.target, tmp_path / "target", **rope)), QUIET)


def test_a_theta_that_is_given_stands_in_for_one_that_the_target_does_not_say(config, tmp_path) -> None:
    target = retold(config.target, tmp_path / "target")
    report = train(replace(config, target=target, rope_theta=20000.0), QUIET)
    assert report is not None
    assert settings_of(report.draft)["rope_theta"] == 20000.0


def test_the_head_of_a_tied_target_is_its_embedding_and_the_drafts_own_comes_back_whole(tiny, config, tmp_path) -> None:
    """A tie taken over from the target put a table of another size in place (NVIDIA-NeMo/Automodel#2319)."""
    target = tiny("llama-tied")
    assert "lm_head.weight" not in load_file(Path(target) / "model.safetensors")
    states = extracted(target, chat_rows(6), tmp_path / "tied", layers="1,last,norm")
    report = train(replace(config, shards=(states,), target=target, draft_vocab_size=32), QUIET)
    assert report is not None and report.passes
    assert settings_of(report.draft)["tie_word_embeddings"] is False
    state = newest_state(config.out)["model"]
    assert tuple(state["lm_head.weight"].shape) == (32, 32)
    assert_equal(served(report.draft, target).state_dict(), state)


def newest_state(out: str | Path) -> dict[str, Any]:
    newest = trainstate.newest(Path(out))
    assert newest is not None
    return torch.load(newest / "state.pt", weights_only=True)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def served(draft: str | Path, target: str) -> DraftModel:
    """The draft in a folder as a module, read as any checkpoint is."""
    parts = read_parts(target)
    head = headmaking.read_head(str(draft), parts)
    found = {name: headmaking.to_tensor(source) for name, source in head.tensors.items()}
    config = TrainConfig(shards=(), target=target, out="")
    return headmaking.warm_model(config, head.config, found, parts)


# -- starting from an earlier draft -----------------------------------------------------------------------------------


def test_an_earlier_draft_keeps_its_map_on_other_data(config, tiny, tmp_path) -> None:
    """A map made anew gives every row of the head another token (sgl-project/SpecForge#602)."""
    first = train(config, QUIET)
    assert first is not None
    rows = [{"input_ids": [*range(200, 250)], "loss_mask": [1] * 50}]
    other = replace(config, shards=(extracted(tiny("llama"), rows, tmp_path / "other"),), out=str(tmp_path / "second"))
    fresh = prepare(other, CPU).vocabulary
    second = train(replace(other, init_from=first.draft), QUIET)
    assert second is not None and fresh is not None
    old, new = (weights(report.draft) for report in (first, second))
    assert np.array_equal(old["d2t"], new["d2t"])
    assert np.array_equal(old["t2d"], new["t2d"])
    assert not np.array_equal(new["d2t"] + np.arange(64), fresh.numpy())


def test_an_earlier_draft_with_another_reserved_token_is_refused_with_both_ids(config, tmp_path) -> None:
    first = train(parallel(config), QUIET)
    assert first is not None
    again = replace(parallel(config), init_from=first.draft, out=str(tmp_path / "second"))
    with pytest.raises(UsageError, match=rf"{RESERVED}, and the run asks for {RESERVED - 1}"):
        train(replace(again, ptd_token_id=RESERVED - 1), QUIET)
    report = train(again, QUIET)
    assert report is not None and report.passes
    with pytest.raises(UsageError, match="a P-EAGLE head"):
        train(replace(again, parallel_drafting=False, ptd_token_id=None, out=str(tmp_path / "third")), QUIET)


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_layers": 2}, {"hidden_size": 16}, {"intermediate_size": 48}, {"num_attention_heads": 2}),
        *({"norm_before_residual": True}, {"fc_norm": True}, {"norm_output": True}, {"rope_theta": 7.0}),
        *({"layers": "2,4"}, {"draft_vocab_size": 32}),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_shape_that_the_earlier_draft_does_not_have_is_refused(changes, config, first_draft) -> None:
    with pytest.raises(UsageError, match="the draft to start from"):
        train(replace(config, init_from=first_draft, **changes), QUIET)


@pytest.fixture(scope="module")
def first_draft(tiny, shards, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("first") / "run"
    report = train(
        TrainConfig(
            (shards,), tiny("llama"), str(out), draft_vocab_size=64, max_steps=1, batch_tokens=256, eval_fraction=0.0
        ),
        QUIET,
    )
    assert report is not None
    return report.draft


def test_an_embedding_of_its_own_is_kept_by_a_draft_that_starts_from_it(config, tmp_path) -> None:
    """A frozen embedding is left to the target, which would pair the new weights with another table."""
    first = train(replace(config, train_embedding=True, lr=1e-2), QUIET)
    assert first is not None
    again = replace(config, init_from=first.draft, out=str(tmp_path / "second"), lr=1e-9)
    second = train(again, QUIET)
    assert second is not None and second.passes
    name = "embed_tokens.weight"
    assert np.allclose(weights(first.draft)[name], weights(second.draft)[name], rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="an embedding of its own"):
        train(replace(again, train_embedding=False, out=str(tmp_path / "third")), QUIET)


def not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["norm.weight"] = np.full_like(tensors["norm.weight"], np.nan)


def transposed(tensors: dict[str, np.ndarray]) -> None:
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"].T)


def beyond(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1000


def twice(tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def without_map(tensors: dict[str, np.ndarray]) -> None:
    del tensors["d2t"], tensors["t2d"]


def without_head(tensors: dict[str, np.ndarray]) -> None:
    del tensors["lm_head.weight"]


@pytest.mark.parametrize("spoil", [not_finite, transposed, beyond, twice, without_map, without_head])
def test_an_earlier_draft_that_is_broken_is_refused_before_training(spoil, config, first_draft, tmp_path) -> None:
    """Tensors that do not fit were replaced by random ones with a warning (speculators 0.9.0)."""
    folder = Path(shutil.copytree(first_draft, tmp_path / "broken"))
    tensors = weights(folder)
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError) as found:
        train(replace(config, init_from=str(folder)), QUIET)
    assert found.value.where is not None and str(folder) in found.value.where


# -- stopping and going on --------------------------------------------------------------------------------------------


def test_the_last_part_of_a_window_is_a_step_and_what_is_left_can_be_served(config) -> None:
    """Exports lacked what was trained, or were of the step before (NVIDIA-NeMo/Automodel#2898, #2469)."""
    whole = replace(parallel(config), max_steps=None, epochs=1.0)
    tokens = sum(map(len, prepare(whole, CPU).task.training))
    longest = max(map(len, prepare(whole, CPU).task.training))
    run = next(
        replace(whole, accumulate=2, batch_tokens=size)
        for size in range(longest, tokens)
        if prepare(replace(whole, batch_tokens=size), CPU).task.total_rows == 3
    )
    report = train(run, QUIET)
    assert report is not None and report.passes
    assert report.steps == 2
    assert report.tokens == tokens
    saved, state = weights(report.draft), newest_state(run.out)
    assert {"d2t", "t2d", "mask_hidden", "embed_tokens.weight", "lm_head.weight"} <= saved.keys()
    assert state["progress"]["step"] == 2
    for name in ("mask_hidden", "embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(saved[name], state["model"][name].numpy())
    counters = [value["step"] for value in state["optimizer"]["state"].values()]
    assert all(step == 2 and step.dtype == torch.float32 for step in counters)
    before = (Path(report.draft) / "model.safetensors").read_bytes()
    again = train(replace(run, resume=True), QUIET)
    assert again is not None and again.steps == 2
    assert (Path(report.draft) / "model.safetensors").read_bytes() == before


@KINDS
def test_two_steps_and_two_more_are_four(kind, config, tmp_path) -> None:
    """Optimizers kept in bfloat16 made them differ by 5 to 10 percent (vllm-project/speculators#411)."""
    four = replace(kind(config), out=str(tmp_path / "four"), max_steps=4, schedule="constant", warmup=0.0)
    two = replace(four, out=str(tmp_path / "two"), max_steps=2)
    for run in (four, two, replace(two, max_steps=4, resume=True)):
        train(run, QUIET)
    assert_equal(newest_state(four.out)["model"], newest_state(two.out)["model"])


def test_resuming_with_another_reserved_token_is_refused_with_both_ids(config) -> None:
    """The masked slots would point at a row that was never trained (NVIDIA-NeMo/Automodel#2824)."""
    run = parallel(config)
    train(run, QUIET)
    with pytest.raises(SettingsChangedError, match=rf"ptd_token_id: {RESERVED} -> {RESERVED - 1}"):
        train(replace(run, ptd_token_id=RESERVED - 1, max_steps=2, resume=True), QUIET)
    with pytest.raises(SettingsChangedError, match="parallel_drafting: True -> False"):
        train(replace(run, parallel_drafting=False, ptd_token_id=None, max_steps=2, resume=True), QUIET)


def test_an_older_run_that_did_not_record_a_setting_goes_on_with_a_note(config) -> None:
    run, notes = parallel(config), Notes()
    train(run, QUIET)
    path = Path(run.out) / "run.json"
    record = json.loads(path.read_text())
    for key in ("ptd_token_id", "fc_norm", "shard_contents"):
        del record["settings"][key]
    path.write_text(json.dumps(record))
    report = train(replace(run, max_steps=2, resume=True), notes)
    assert report is not None and report.steps == 2
    (said,) = [note for note in notes.kept if "did not record" in note]
    assert all(f"`{key}`" in said for key in ("ptd_token_id", "fc_norm", "shard_contents"))
    assert json.loads(path.read_text())["settings"]["ptd_token_id"] == RESERVED


def test_other_shards_in_the_old_place_are_not_gone_on_with(config, shards, tiny, tmp_path) -> None:
    """The order of the data follows from the samples: others would be another run from the same step on."""
    folder = tmp_path / "states"
    shutil.copytree(shards, folder)
    run = replace(config, shards=(str(folder),))
    train(run, QUIET)
    shutil.rmtree(folder)
    shutil.copytree(extracted(tiny("llama"), chat_rows(10, seed=5), tmp_path / "new"), folder)
    with pytest.raises(SettingsChangedError, match="shard_contents"):
        train(replace(run, max_steps=2, resume=True), QUIET)


def test_a_map_that_has_become_another_is_not_gone_on_with(config, shards, tmp_path) -> None:
    """The head's rows would stay those of the old tokens, and their teacher would be the new ones'."""
    folder = tmp_path / "states"
    shutil.copytree(shards, folder)
    run = replace(config, shards=(str(folder),))
    train(run, QUIET)
    counts = load_file(folder / "token_counts.safetensors")
    save_file({name: count[::-1].copy() for name, count in counts.items()}, folder / "token_counts.safetensors")
    with pytest.raises(SettingsChangedError, match="vocabulary is not the one that the run began with"):
        train(replace(run, max_steps=2, resume=True), QUIET)


def test_a_run_goes_on_from_another_working_folder(config, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Path(config.target)
    monkeypatch.chdir(target.parent)
    train(replace(config, target=target.name), QUIET)
    monkeypatch.chdir(Path(config.out).parent)
    report = train(replace(config, max_steps=2, resume=True), QUIET)
    assert report is not None and report.steps == 2


def test_two_runs_never_train_in_one_folder(config) -> None:
    """Each would remove the other's checkpoints."""
    with begun(config, Path(config.out), QUIET):
        before = (Path(config.out) / "run.json").read_bytes()
        with pytest.raises(MachineError, match="another run trains in this folder"):
            train(replace(config, max_steps=9, resume=True), QUIET)
        assert (Path(config.out) / "run.json").read_bytes() == before
    report = train(replace(config, resume=True), QUIET)
    assert report is not None and report.steps == 1


@pytest.mark.parametrize("changes", [{"cod_ratio": 0.5}, {"cod_floor": 0.5}, {"segments": 2}])
def test_settings_of_parallel_drafting_are_refused_without_it(changes, config) -> None:
    with pytest.raises(UsageError, match="only with `--parallel-drafting`"):
        train(replace(config, **changes), QUIET)
    report = train(replace(parallel(config), **changes), QUIET)
    assert report is not None and report.passes


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": []}', '{"settings": null}', "{}"])
def test_a_record_of_settings_that_is_none_is_an_error_with_its_place(text: str, config) -> None:
    Path(config.out).mkdir()
    path = Path(config.out) / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match="settings cannot be read") as found:
        train(replace(config, resume=True), QUIET)
    assert found.value.where == str(path)


def cut(state: Path) -> None:
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])


def gone(state: Path) -> None:
    state.unlink()


def of_another_shape(state: Path) -> None:
    record = torch.load(state, weights_only=True)
    record["model"]["fc.weight"] = record["model"]["fc.weight"].T.contiguous()
    torch.save(record, state)


@pytest.mark.parametrize("spoil", [cut, gone, of_another_shape])
def test_a_checkpoint_that_is_broken_is_named_and_the_one_before_goes_on(spoil, config) -> None:
    """A cut file made every later resume die (vllm-project/speculators#603)."""
    run = replace(config, max_steps=2, save_every=1)
    train(run, QUIET)
    newest = trainstate.checkpoints(Path(run.out))[-1]
    spoil(newest / "state.pt")
    with pytest.raises(InputError, match="cannot be continued from") as found:
        train(replace(run, max_steps=3, resume=True), QUIET)
    assert str(newest) in str(found.value.where)
    shutil.rmtree(newest)
    report = train(replace(run, max_steps=3, resume=True), QUIET)
    assert report is not None and report.steps == 3


# -- what a server gets -----------------------------------------------------------------------------------------------

PROMPT, NEW, K = [256, 7, 42, 99, 7, 3], 26, 3


@KINDS
def test_a_text_learned_by_heart_is_accepted_throughout_once_the_draft_is_served(kind, config, tiny, tmp_path) -> None:
    """High training accuracy and an acceptance near 1: labels, states or positions off by one (vllm#14464)."""
    target = load_target(describe_target(tiny("llama")), dtype="float32", device=CPU)
    requests = (Request("heart", tuple(PROMPT)),)
    text = list(decode_here(target, None, requests, settings=DecodeSettings(NEW))[0].tokens)
    row = {"input_ids": PROMPT + text, "loss_mask": [0] * len(PROMPT) + [1] * NEW}
    states = extracted(tiny("llama"), [row], tmp_path / "heart")
    learning = {"loss": "ce", "lr": 5e-3, "schedule": "constant", "depth_decay": 1.0, "max_steps": 150}
    asked = replace(kind(config), shards=(states,), num_draft_tokens=K, save_every=1000, **learning)
    report = train(replace(asked, cod_ratio=1.0) if asked.parallel_drafting else asked, QUIET)
    assert report is not None and report.passes
    draft = served(report.draft, config.target)
    # The last K tokens are left out: what comes after the text was not taught.
    [found] = decode_here(target, draft, requests, settings=DecodeSettings(NEW - K, K))
    assert list(found.tokens) == text[: NEW - K]
    assert {step.accepted for step in found.steps} == {K}


def test_bytes_spoiled_inside_a_checkpoint_are_an_error_with_its_place(config) -> None:
    run = replace(config, max_steps=2, save_every=1)
    train(run, QUIET)
    state = trainstate.checkpoints(Path(run.out))[-1] / "state.pt"
    data = state.read_bytes()
    state.write_bytes(data[:200] + b"\xff" * 64 + data[264:])
    with pytest.raises(InputError, match="cannot be continued from"):
        train(replace(run, max_steps=3, resume=True), QUIET)


def test_progress_of_another_type_is_an_error_with_its_place(config) -> None:
    run = replace(config, max_steps=2, save_every=1)
    train(run, QUIET)
    state = trainstate.checkpoints(Path(run.out))[-1] / "state.pt"
    record = torch.load(state, weights_only=True)
    record["progress"]["step"] = "two"
    torch.save(record, state)
    with pytest.raises(InputError, match="cannot be continued from"):
        train(replace(run, max_steps=3, resume=True), QUIET)


@pytest.mark.parametrize("left", ["nothing", "older"])
def test_a_kill_between_the_checkpoint_and_the_draft_leaves_a_run_that_makes_it(left: str, config) -> None:
    """A finished run left no servable export, or that of the step before (NVIDIA-NeMo/Automodel#2898)."""
    run = replace(config, max_steps=2, save_every=1)
    train(run, QUIET)
    draft = Path(run.out) / "draft"
    whole = (draft / "model.safetensors").read_bytes()
    (Path(run.out) / ".result.json").unlink()
    if left == "nothing":
        shutil.rmtree(draft)
    else:
        tensors = weights(draft)
        tensors["norm.weight"] = tensors["norm.weight"] * 2
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    report = train(replace(run, resume=True), QUIET)
    assert report is not None and report.passes
    assert (draft / "model.safetensors").read_bytes() == whole


def test_a_run_whose_loss_is_not_finite_is_no_success(config) -> None:
    """Steps at infinity were skipped without a word, and the draft was saved and passed."""
    with pytest.raises(SpecctlError):
        train(replace(config, lr=1e30, max_steps=12), QUIET)


def test_a_run_of_bad_samples_alone_is_no_success(config, tmp_path) -> None:
    folder = Path(shutil.copytree(config.shards[0], tmp_path / "bad"))
    (path,) = (folder / "shards").glob("*.safetensors")
    from specctl.files.safetensors import read_header

    entry, data = read_header(path)[0]["hidden.4"], bytearray(path.read_bytes())
    data[entry.begin : entry.begin + entry.nbytes] = np.full(entry.nbytes // 4, np.nan, np.float32).tobytes()
    path.write_bytes(data)
    with pytest.raises(SpecctlError, match="not finite"):
        train(replace(config, shards=(str(folder),), max_steps=1), QUIET)


def test_the_log_is_json_for_readers_that_know_no_nan(config) -> None:
    with pytest.raises(UsageError, match="no gradient of the last"):
        train(replace(config, lr=1e30, max_steps=4, log_every=1), QUIET)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in the log")

    for line in (Path(config.out) / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_log_that_a_kill_cut_inside_a_line_is_gone_on_with(config) -> None:
    train(config, QUIET)
    log = Path(config.out) / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    train(replace(config, max_steps=2, resume=True), QUIET)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [2]
    assert inspect_run(Path(config.out)).steps == 2


@pytest.mark.parametrize(
    "line",
    [
        *('{"kind": "eval", "step": 1}', '{"kind": "train", "step": 1}', '{"kind": "train", "step": 1, "loss": "x"}'),
        '{"kind": "eval", "step": 1, "tokens": 1, "loss": 1, "acceptance_length": 1, "depths": [{"loss": 1}]}',
    ],
)
def test_a_line_of_the_log_that_is_none_is_an_error_with_its_place(line: str, config) -> None:
    train(config, QUIET)
    log = Path(config.out) / "log.jsonl"
    log.write_text(line + "\n" + log.read_text())
    with pytest.raises(InputError, match="line 1 of the log") as found:
        inspect_run(Path(config.out))
    assert found.value.where == str(log)


def test_other_logs_get_the_accuracy_of_each_depth() -> None:
    depths = [asdict(DepthScore(d, 2.0, 0.5 / (d + 1), 0.25, 0.0)) for d in range(2)]
    numbers = numbers_of({"step": 3, "loss": 1.5, "depths": depths})
    assert (numbers["loss"], numbers["accuracy_0"], numbers["accuracy_1"]) == (1.5, 0.5, 0.25)
    assert "depth_0" not in numbers


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_that_cannot_be_written_is_an_error_with_its_place(config) -> None:
    train(config, QUIET)
    log = Path(config.out) / "log.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
    with pytest.raises(MachineError, match="the log cannot be written") as found:
        train(replace(config, max_steps=2, resume=True), QUIET)
    assert found.value.where == str(log)


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_one_before_stays(config, run_cli) -> None:
    """torch tells a full disk as an error of its archive, without the reason."""
    train(config, QUIET)
    before = trainstate.checkpoints(Path(config.out))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
        "from specctl.cli.app import run; sys.exit(run(sys.argv[1:]))"
    )
    arguments = ["--target", config.target, "--out", config.out, "--draft-vocab-size", 64, "--max-steps", 2]
    arguments += ["--batch-tokens", 256, "--eval-fraction", 0, "--resume"]
    ended = subprocess.run(
        [sys.executable, "-c", code, "train", config.shards[0], *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "error: cannot write" in ended.stderr
    assert trainstate.checkpoints(Path(config.out)) == before


def test_tables_of_a_target_that_lie_at_odd_bytes_are_read(config, tmp_path) -> None:
    """safetensors promises no alignment, and torch views only what is aligned."""
    folder = tmp_path / "target"
    shutil.copytree(config.target, folder)
    path = next(folder.glob("*.safetensors"))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :])
    odd, even = read_parts(str(folder)), read_parts(config.target)
    assert torch.equal(odd.embedding, even.embedding)
    assert torch.equal(odd.head, even.head)


def test_a_plan_is_that_of_the_draft_to_start_from(config, tmp_path) -> None:
    first = train(replace(config, num_layers=2, train_embedding=True, lr=1e-2), QUIET)
    assert first is not None
    again = replace(config, init_from=first.draft, draft_vocab_size=None, out=str(tmp_path / "second"))
    plan, report = plan_training(again, QUIET), train(again, QUIET)
    assert report is not None
    assert (plan.parameters, plan.trained_parameters) == (report.parameters, report.trained_parameters)
    assert plan.draft_vocab_size == 64


@KINDS
def test_a_plan_knows_what_saves_memory(kind, config) -> None:
    asked = replace(kind(config), num_layers=4, batch_tokens=4096)
    bytes_of = lambda **changes: plan_training(replace(asked, **changes), QUIET).memory_bytes  # noqa: E731
    assert bytes_of(checkpoint_layers=True) < bytes_of()
    assert bytes_of(dtype="bfloat16") < bytes_of()
    if asked.parallel_drafting:
        assert bytes_of(segments=4) < bytes_of()
    with pytest.raises(UsageError, match="no multiple of the 2 processes"):
        bytes_of(nproc=2)


def a_target_of(family: str, folder: Path, **settings: Any) -> Any:
    """A causal LM of transformers with weights drawn at random, saved in `folder`."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("HyperCLOVAX", {"logits_scaling": 0.5}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Gemma2", {"head_dim": 8}),
    ],
)
def test_the_teachers_logits_are_the_targets_own(family: str, settings: dict, tmp_path) -> None:
    """The same key divides in Granite and multiplies in HyperCLOVA X."""
    model = a_target_of(family, tmp_path, **settings)
    parts = read_parts(str(tmp_path))
    teacher = make_teacher(parts.head, None, scale=parts.scale, softcap=parts.softcap)
    with torch.no_grad():
        states = model.model(torch.arange(10)[None]).last_hidden_state[0]
        logits = model(torch.arange(10)[None]).logits[0]
    torch.testing.assert_close(teacher.logits(states, teacher.inside_WD), logits)


def test_a_target_whose_head_has_a_bias_is_refused(tmp_path) -> None:
    """A draft trained without it learns another distribution, and says nothing of it."""
    a_target_of("Phi", tmp_path)
    with pytest.raises(NotSupportedError, match=r"bias `lm_head\.bias`"):
        read_parts(str(tmp_path))


def test_the_verdict_names_what_fails_and_no_note_beside_it(config, tiny, tmp_path) -> None:
    states = extracted(tiny("llama"), chat_rows(4), tmp_path / "zero", layers="0,4,norm")
    report = train(replace(config, shards=(states,)), QUIET)
    assert report is not None and not report.passes
    assert report.verdict == "fails: AUX_LAYERS_ZERO"
