"""Speculative decoding gives the target's own greedy text, counts what it should, and is the same over stages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from decode_parts import (
    DRAFTS,
    PROMPTS,
    RESERVED,
    Several,
    a_draft,
    a_draft_that_says,
    a_sample,
    a_target,
    assert_counts,
    learn_by_heart,
    plain,
    requests_of,
    save_draft,
)

from fixtures.make import TARGETS
from specctl.core.decode import decode_here
from specctl.core.decodejob import DecodeJob, DecodeOutcome, read_outcome
from specctl.core.decoder import find_decoder
from specctl.core.launch import run_local
from specctl.core.modules import DraftCache, DraftModel
from specctl.core.placement import Placement
from specctl.core.ragged import Frame
from specctl.core.speculate import Decoded, DecodeSettings
from specctl.core.target import LoadedTarget
from specctl.core.targetrows import TargetRows
from specctl.errors import UsageError
from specctl.records.progress import SilentReporter

NEW, MORE = 20, 9
"""Tokens to write, and how far the reference goes on beyond them."""


def text_of(family: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return plain(family, prompt, NEW + MORE)


def check(family: str, found: Sequence[Decoded], prompts: Sequence[tuple[int, ...]], num_draft_tokens: int) -> None:
    """Every text is the plain greedy one, and its counts a recount's."""
    for decoded, prompt in zip(found, prompts, strict=True):
        assert decoded.tokens == text_of(family, prompt)[:NEW], (family, prompt)
        assert len(decoded.gaps) == NEW and min(decoded.gaps) > 0
        assert_counts(decoded, text_of(family, prompt), num_draft_tokens)


COVER = [
    (family, kind, 1 + (2 * i + j) % 8, 1 + (3 * i + 5 * j) % 8)
    for i, family in enumerate(TARGETS)
    for j, kind in enumerate(DRAFTS)
]
"""Every family with both drafts; every batch size and every number of draft tokens from 1 to 8 at least once."""


def test_the_selection_covers_all_sizes() -> None:
    assert {batch for *_, batch, _ in COVER} == {k for *_, k in COVER} == set(range(1, 9))


@pytest.mark.parametrize(("family", "kind", "batch", "k"), COVER)
def test_a7_a_random_draft_leaves_the_greedy_text_alone(family: str, kind: str, batch: int, k: int) -> None:
    """One prompt is a single token; rows advance at their own pace and end at different steps."""
    prompts = [*PROMPTS, *PROMPTS[:3]] if batch > len(PROMPTS) else PROMPTS
    settings = DecodeSettings(NEW, k)
    found = decode_here(a_target(family), a_draft(family, kind), requests_of(prompts), settings=settings, batch=batch)
    check(family, found, prompts, k)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {
    "Bloom": {"n_layer": 2, "n_head": 4},  # told no positions, biases of its own from a plain mask
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "Mamba": {"state_size": 4},  # a state that cannot forget
    "Granite": {"logits_scaling": 2.0, "num_key_value_heads": 2, "intermediate_size": 48},
    "Mistral": {"sliding_window": 6, "num_key_value_heads": 2, "intermediate_size": 48},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a7_targets_of_other_makes_give_their_plain_text(name: str) -> None:
    """A target that cannot be told where each row stands reads its rows again, instead of going wrong."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, bos_token_id=1, eos_token_id=2, **OTHERS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    spec = replace(a_target("llama").spec, num_layers=2, hidden_size=32, vocab_size=64)
    target = LoadedTarget(spec, model, find_decoder(model, 2), torch.device("cpu"), torch.float32)
    prompts = ((3, 4, 5, 6, 7, 8, 9, 10, 11), (5,), (9, 8, 7))
    draft = a_draft("llama", "eagle3", vocab_size=64, draft_vocab_size=64, aux_ids=(0, 1, 2))
    found = decode_here(target, draft, requests_of(prompts), settings=DecodeSettings(12, 2), batch=3)
    for decoded, prompt in zip(found, prompts, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(12):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert decoded.tokens == tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("family", ["llama", "hybrid"])
def test_without_a_draft_it_is_plain_greedy_decoding(family: str) -> None:
    found = decode_here(a_target(family), None, requests_of(), settings=DecodeSettings(NEW), batch=3)
    check(family, found, PROMPTS, 0)
    assert all(len(decoded.steps) == NEW - 1 for decoded in found)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("what", ["wrong", "eos", "reserved"])
def test_a_draft_that_says_one_token_for_ever(what: str, kind: str, k: int) -> None:
    """Always wrong, always the end of text, always the reserved id: the text stays the target's."""
    texts = [text_of("llama", prompt) for prompt in PROMPTS]
    never = next(token for token in range(256) if not any(token in text for text in texts))
    token = {"wrong": never, "eos": 259, "reserved": RESERVED}[what]
    draft = a_draft_that_says("llama", kind, token)
    settings = DecodeSettings(NEW, k, stop_ids=(259,))
    found = decode_here(a_target("llama"), draft, requests_of(), settings=settings, batch=3)
    for decoded, text in zip(found, texts, strict=True):
        cut = text[: text.index(259) + 1] if 259 in text[:NEW] else text[:NEW]
        assert decoded.tokens == cut
        assert_counts(decoded, text, k)
        assert all(step.drafted == (token,) * k for step in decoded.steps)
        if what == "wrong":
            assert len(decoded.steps) == len(decoded.tokens) - 1 and not any(step.accepted for step in decoded.steps)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("norms", [{}, {"norm_before_residual": True, "norm_output": True, "num_hidden_layers": 2}])
def test_b1_a_text_known_by_heart_is_accepted_throughout(kind: str, norms: dict) -> None:
    """Training and decoding that disagree by one anywhere (token, state, position, mask) accept little here.

    Source of the story: vllm-project/vllm#9565, NVIDIA-NeMo/Automodel#3268.
    """
    prompt, count, k = PROMPTS[0], 26, 3
    draft = learn_by_heart("llama", kind, prompt, count, depth=k, **norms)
    # Beside it a row that it does not know: each has its own pace.
    requests = requests_of((PROMPTS[2], prompt))
    _, found = decode_here(a_target("llama"), draft, requests, settings=DecodeSettings(count - k, k), batch=2)
    assert found.tokens == plain("llama", prompt, count)[: count - k]
    assert {step.accepted for step in found.steps} == {k}
    assert len(found.steps) == -(-(count - k - 1) // (k + 1))


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_stop_token_cuts_the_text_even_inside_an_accepted_draft(kind: str) -> None:
    """The text ends with the stop; the counts are those before the cut, as vLLM counts."""
    prompt, count, k = PROMPTS[0], 26, 3
    text = plain("llama", prompt, count)
    draft = learn_by_heart("llama", kind, prompt, count, depth=k)
    for stop in dict.fromkeys(text[: count - k - 1]):
        settings = DecodeSettings(count - k - 1, k, stop_ids=(stop,))
        [found] = decode_here(a_target("llama"), draft, requests_of((prompt,)), settings=settings)
        end = text.index(stop) + 1
        assert (found.tokens, found.is_stopped) == (text[:end], True)
        assert all(step.accepted == k for step in found.steps), "cut counts would be smaller"
        assert len(found.steps) == -(-(end - 1) // (k + 1))
        assert len(found.gaps) == end


def test_a_stop_token_beyond_the_limit_does_not_count() -> None:
    text = text_of("llama", PROMPTS[0])
    at = next(i for i in range(3, NEW) if text[i] not in text[:i])
    draft = a_draft("llama", "eagle3")
    for limit, is_stopped in ((at, False), (at + 1, True)):
        settings = DecodeSettings(limit, 5, stop_ids=(text[at],))
        [found] = decode_here(a_target("llama"), draft, requests_of(PROMPTS[:1]), settings=settings)
        assert (found.tokens, found.is_stopped) == (text[:limit], is_stopped)


@pytest.mark.parametrize("limit", [1, 2])
def test_one_token_needs_no_draft_and_two_need_one_step(limit: int) -> None:
    found = decode_here(a_target("llama"), a_draft("llama", "peagle"), requests_of(), settings=DecodeSettings(limit, 4))
    assert [d.tokens for d in found] == [text_of("llama", p)[:limit] for p in PROMPTS]
    assert [len(d.steps) for d in found] == [limit - 1] * len(PROMPTS)


def test_the_reserved_token_may_be_generated_and_is_kept() -> None:
    """Trimming by the value of the reserved id would lose it (NVIDIA-NeMo/Automodel#3268)."""
    text = text_of("llama", PROMPTS[0])
    draft = a_draft("llama", "peagle", mask_token_id=text[4])
    found = decode_here(a_target("llama"), draft, requests_of(), settings=DecodeSettings(NEW, 3), batch=2)
    check("llama", found, PROMPTS, 3)


def test_a_draft_that_does_not_name_its_states_is_refused() -> None:
    draft = a_draft("llama", "eagle3", aux_ids=None)
    with pytest.raises(UsageError, match="which of the target's layers"):
        decode_here(a_target("llama"), draft, requests_of(), settings=DecodeSettings(2, 1))


def from_scratch(family: str, draft: DraftModel, tokens: Sequence[int], k: int) -> tuple[int, ...]:
    """What a draft proposes after `tokens`, with nothing kept from before: slot p holds token p + 1 and states p.

    The last token has no states yet. EAGLE-3 goes on with its own stream, P-EAGLE with K - 1 reserved slots.
    """
    sample = a_sample(family, draft.head, tokens, 1)
    ids, hidden = torch.tensor(tokens[1:]), draft.project(sample.aux[:-1])
    cache = DraftCache(draft)
    if draft.head.parallel_drafting:
        ids = torch.cat((ids, *[draft.reserved_id()] * (k - 1)))
        hidden = torch.cat((hidden, *[draft.masked_projection()] * (k - 1)))
        logits = draft.logits(draft.norm(cache.run(ids, hidden)))[-k:]
        return tuple(draft.target_ids(logits.argmax(-1)).tolist())
    found: list[int] = []
    while len(found) < k:
        stream = cache.run(ids, hidden)[-1:]
        normed = draft.norm(stream)
        found += draft.target_ids(draft.logits(normed).argmax(-1)).tolist()
        ids, hidden = torch.tensor(found[-1:]), draft.next_hidden(stream, normed)
    return tuple(found)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("more", [{}, {"layer_types": ("sliding_attention",), "sliding_window": 6}])
def test_a_draft_among_other_rows_proposes_what_it_proposes_alone_from_scratch(kind: str, more: dict) -> None:
    """Slots, positions and mask slots are a server's, whatever other rows keep, refuse or pad."""
    draft, k, prompts = a_draft("llama", kind, **more), 4, PROMPTS[:3]
    found = decode_here(a_target("llama"), draft, requests_of(prompts), settings=DecodeSettings(12, k), batch=3)
    with torch.inference_mode():
        for decoded, prompt in zip(found, prompts, strict=True):
            tokens = [*prompt, decoded.tokens[0]]
            for step in decoded.steps:
                assert step.drafted == from_scratch("llama", draft, tokens, k)
                tokens += [*step.drafted[: step.accepted], step.following]


# Over pipeline stages, in real processes.


def a_job(folder: Path, family: str, kind: str, *, batch: int, k: int, embedding: bool, **more) -> DecodeJob:
    """A job of all prompts with a draft from a folder, one with the target's width where it has no embedding."""
    name = f"{family}-{kind}-{batch}-{k}-{embedding}"
    sizes = {} if embedding else {"hidden_size": 32, "head_dim": 8}
    draft = save_draft(a_draft(family, kind, **sizes, **more), family, folder / name, has_embedding=embedding)
    return DecodeJob(
        spec=a_target(family).spec,
        draft=draft,
        requests=requests_of(),
        settings=DecodeSettings(NEW, k),
        batch=batch,
        dtype="float32",
        device="cpu",
        out=str(folder / f"{name}.outcome"),
    )


def outcomes(jobs: Sequence[DecodeJob], pp: int) -> list[DecodeOutcome]:
    placed = [replace(job, out=f"{job.out}.{pp}") for job in jobs]
    run_local(Several(tuple(placed)), pp=pp, tp=1, device="cpu", reporter=SilentReporter())
    return [read_outcome(Path(job.out)) for job in placed]


def assert_same_at(pp: int, jobs: Sequence[DecodeJob]) -> list[DecodeOutcome]:
    """Tokens, steps and counts are those of one process, and the text is the plain one."""
    found = outcomes(jobs, pp)
    for job, one, several in zip(jobs, outcomes(jobs, 1), found, strict=True):
        key = [(d.key, d.tokens, d.steps, d.is_stopped) for d in several.decoded]
        assert key == [(d.key, d.tokens, d.steps, d.is_stopped) for d in one.decoded], job.draft
        family = Path(job.spec.path).name
        check(family, several.decoded, PROMPTS, job.settings.num_draft_tokens)
        assert (one.bytes_sent, several.bytes_sent > 0) == (0, True)
    return found


@pytest.mark.parametrize("family", ["gemma2", "llama-tied", "moe"])
def test_a5_a6_a_draft_reads_layer_zero_and_others_as_they_were_and_the_next_step_leaves_them(family: str) -> None:
    """A5, A6: rows at their own pace over a cache give the states of one plain forward, and keep them."""
    target = a_target(family)
    slots = ("0", "1", str(target.spec.num_layers - 1))
    tokens = torch.tensor([[256, 7, 42, 99, 7, 3, 11, 5]])
    with torch.inference_mode():
        expected = target.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    with TargetRows(target, slots, Placement()) as rows:
        cache, found = rows.new_cache(), []
        for begin, end in ((0, 5), (5, 8)):
            frame = Frame.of([begin], end - begin, torch.device("cpu"))
            found.append(rows.run(tokens[:, begin:end], frame, cache, None))
    for slot in slots:
        torch.testing.assert_close(torch.cat([f[slot] for f in found], 1), expected[int(slot)], rtol=1e-5, atol=1e-5)


def test_a2_two_stages_give_the_texts_steps_and_counts_of_one_process(tmp_path: Path) -> None:
    """A draft with its own embedding, and one that takes the target's on the last stage; several batches under way.

    EAGLE-3's middle state lies at the border of two equal stages: it travels as the stream and not beside it.
    """
    jobs = [
        a_job(tmp_path, "llama", "eagle3", batch=1, k=3, embedding=False, aux_ids=(2, 4, 5)),
        a_job(tmp_path, "qwen3", "peagle", batch=2, k=2, embedding=True),
    ]
    first, _ = assert_same_at(2, jobs)
    assert first.bytes_sent == bytes_needed(jobs[0], first, aux_before=1)


@pytest.mark.slow
def test_a2_two_stages_give_the_texts_of_one_process_for_other_families(tmp_path: Path) -> None:
    jobs = [
        a_job(tmp_path, "llama", "eagle3", batch=1, k=1, embedding=True),
        a_job(tmp_path, "llama", "peagle", batch=2, k=4, embedding=False),
        a_job(tmp_path, "gemma2", "eagle3", batch=4, k=5, embedding=False),
        a_job(tmp_path, "gemma3", "peagle", batch=3, k=8, embedding=True),
        a_job(tmp_path, "moe", "eagle3", batch=5, k=2, embedding=False),
        a_job(tmp_path, "hybrid", "eagle3", batch=2, k=2, embedding=False),
    ]
    first, *_ = assert_same_at(2, jobs)
    assert first.bytes_sent == bytes_needed(jobs[0], first, aux_before=2)


@pytest.mark.slow
def test_a2_four_stages_also_without_layers_give_the_texts_of_one_process(tmp_path: Path) -> None:
    jobs = [
        a_job(tmp_path, "llama", "eagle3", batch=1, k=2, embedding=False, aux_ids=(2, 4, 5)),
        a_job(tmp_path, "gemma2", "peagle", batch=2, k=3, embedding=True),
        a_job(tmp_path, "llama-tied", "eagle3", batch=2, k=3, embedding=False, aux_ids=(0, 1, 2)),
        a_job(tmp_path, "moe", "peagle", batch=5, k=1, embedding=False),
    ]
    assert_same_at(4, jobs)


def bytes_needed(job: DecodeJob, outcome: DecodeOutcome, *, aux_before: int) -> int:
    """What one hop and the way back carry, batch 1: the stream and each state recorded before the hop once; ids,
    with where they belong, in numbers of 8 bytes; a last word for each of the two groups under way.
    """
    position = 4 * job.spec.hidden_size * (1 + aux_before)
    width, total = job.settings.num_draft_tokens + 1, 0
    for request, decoded in zip(job.requests, outcome.decoded, strict=True):
        read = [len(request.prompt), *[width] * len(decoded.steps)]
        total += sum(read) * position
        total += 8 * sum(4 + count + 1 + (i > 0) for i, count in enumerate(read))
    return total + 8 * 4 * 2


@pytest.mark.slow
def test_two_tensor_parallel_ranks_give_the_texts_of_one_process(tmp_path: Path) -> None:
    job = a_job(tmp_path, "llama", "eagle3", batch=2, k=3, embedding=False)
    run_local(replace(job, out=f"{job.out}.tp"), pp=1, tp=2, device="cpu", reporter=SilentReporter())
    check("llama", read_outcome(Path(f"{job.out}.tp")).decoded, PROMPTS, 3)
