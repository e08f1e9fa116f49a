"""What tests of decoding share: tiny targets, plain greedy texts, drafts made to propose what is wanted, a recount."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from draft_parts import HEAD

from fixtures.make import make_tiny
from specctl import plugins
from specctl.core.capture import Recorder, record
from specctl.core.decodejob import DecodeJob
from specctl.core.headmaking import served_head
from specctl.core.losses import make_teacher
from specctl.core.modules import DraftModel
from specctl.core.placement import Placement
from specctl.core.speculate import Decoded, Request
from specctl.core.target import LoadedTarget, describe_target, load_target
from specctl.core.teaching import read_parts
from specctl.drafts import eagle3, peagle
from specctl.files.head import Asked
from specctl.files.headfolder import write_head
from specctl.records.draft import DraftBatch, DraftSettings
from specctl.records.head import HeadConfig
from specctl.records.progress import Reporter

CPU = torch.device("cpu")
DRAFTS = {"eagle3": eagle3, "peagle": peagle}
RESERVED = 263
LONG = tuple((31 * i + 7) % 250 for i in range(21))
PROMPTS = ((256, 7, 42, 99, 7, 3), (5,), LONG, (256, 1), (11, 11, 11))


@cache
def a_target(family: str) -> LoadedTarget:
    return load_target(describe_target(str(make_tiny(family))), dtype="float32", device=CPU)


@cache
def plain(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy tokens of transformers, by reading everything again for each."""
    model, tokens = a_target(family).model, list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def a_head(family: str, kind: str, **more) -> HeadConfig:
    """Of another width than the target, so that its embedding has to be its own."""
    spec = a_target(family).spec
    base = replace(
        HEAD,
        hidden_size=24,
        intermediate_size=48,
        head_dim=6,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.vocab_size,
        target_hidden_size=spec.hidden_size,
        num_aux=3,
        aux_ids=(1, 0, spec.num_layers),
        parallel_drafting=kind == "peagle",
        mask_token_id=RESERVED if kind == "peagle" else None,
        max_position_embeddings=512,
    )
    return replace(base, **more)


def a_draft(family: str, kind: str, *, seed: int = 3, **more) -> DraftModel:
    """Random, and with opinions: its logits are far apart."""
    model = DraftModel(a_head(family, kind, **more), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.ndim > 1 else 1.0)
    return model.requires_grad_(False).eval()


def a_draft_that_says(family: str, kind: str, token: int) -> DraftModel:
    """Its vocabulary is this one token."""
    model = a_draft(family, kind, draft_vocab_size=1)
    model.set_vocabulary(torch.tensor([token]))
    return model


def a_sample(family: str, head: HeadConfig, tokens: Sequence[int], num_prompt: int) -> DraftBatch:
    target, recorder = a_target(family), Recorder()
    slots = (*map(str, head.aux_ids or ()), "norm")
    with torch.inference_mode(), record(target.decoder, slots, recorder, model=target.model):
        target.model(torch.tensor([tokens]), use_cache=False)
    states = recorder.take(slots, target.model)
    aux = torch.cat([states[s][0] for s in slots[:-1]], -1).clone()
    mask = (torch.arange(len(tokens)) >= num_prompt).to(torch.uint8)
    return DraftBatch(torch.tensor(tokens), (0, len(tokens)), mask, aux, states["norm"][0].clone())


def learn_by_heart(family: str, kind: str, prompt: tuple[int, ...], count: int, *, depth: int, **more) -> DraftModel:
    """A few hundred steps on one greedy text; the vocabulary is reduced to the text's tokens and some others."""
    tokens = [*prompt, *plain(family, prompt, count)]
    ids = torch.unique(torch.tensor([*tokens, *range(40)]))
    head = a_head(family, kind, draft_vocab_size=len(ids), **more)
    batch = a_sample(family, head, tokens, len(prompt))
    model = DraftModel(head, generator=torch.Generator().manual_seed(0))
    model.set_vocabulary(ids)
    teacher = make_teacher(a_target(family).model.get_output_embeddings().weight, ids)
    settings = DraftSettings(depth, loss="ce", depth_decay=1.0, cod_ratio=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    draws = torch.Generator().manual_seed(0)
    for _ in range(300):
        found = DRAFTS[kind].training_loss(model, batch, teacher=teacher, settings=settings, generator=draws)
        (found.loss / found.weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if float(found.loss.detach() / found.weight) < 0.01:
            break
    assert abs(found.simulated_acceptance_length() - depth - 1) < 1e-6
    return model.requires_grad_(False).eval()


def save_draft(model: DraftModel, family: str, folder: Path, *, has_embedding: bool = True) -> str:
    """The draft as a server loads it."""
    files = read_parts(str(make_tiny(family))).files
    asked = Asked(target=files.facts, embedding=files.embedding, lm_head=files.lm_head)
    head = served_head(
        replace(model.head, dtype="float32"), model.state_dict(), has_embedding=has_embedding, inv_freq=None
    )
    written = plugins.load_format("vllm").write(head, asked)
    folder.mkdir(parents=True)
    write_head(folder, written.config, written.tensors)
    return str(folder)


def requests_of(prompts: Sequence[tuple[int, ...]] = PROMPTS) -> tuple[Request, ...]:
    return tuple(Request(f"p{i}", prompt) for i, prompt in enumerate(prompts))


def recounted(drafted: Sequence[tuple[int, ...]], text: Sequence[int], end: int) -> list[tuple[int, int]]:
    """How many of each step's drafted ids were kept, and the token after: from the greedy text alone.

    `text` goes on beyond `end`, where the new tokens end; the first token came of reading the prompt.
    """
    found, at = [], 1
    for guess in drafted:
        assert at < end, "a step after the end"
        kept = 0
        while kept < len(guess) and guess[kept] == text[at + kept]:
            kept += 1
        found.append((kept, text[at + kept]))
        at += kept + 1
    assert at >= end, "steps are missing"
    return found


def assert_counts(decoded: Decoded, text: Sequence[int], num_draft_tokens: int) -> None:
    """The counts of a text are those of a recount, and every step drafted as many as it should."""
    assert {len(step.drafted) for step in decoded.steps} <= {num_draft_tokens}
    found = [(step.accepted, step.following) for step in decoded.steps]
    assert found == recounted([step.drafted for step in decoded.steps], text, len(decoded.tokens))


@dataclass(frozen=True)
class Several:
    """Runs jobs one after the other on the same ranks: starting ranks costs more than these runs."""

    jobs: tuple[DecodeJob, ...]

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        for job in self.jobs:
            job(placement, reporter)
