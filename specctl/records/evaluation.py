"""What an evaluation is asked, what it counted, and the file that it is kept in. No torch.

A step is a forward of the target after the prompt's. It verifies the drafted tokens before it, keeps the
first `accepted` of them, and adds one token of the target's own: the correction of a refused draft, or the
bonus when all were kept. Counts are taken before the text is cut at a stop token, as vLLM counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

from specctl.records.head import HeadConfig
from specctl.records.target import TargetSpec

COMPARED: Final = (
    "target_weights",
    "prompts_sha256",
    "template_sha256",
    "num_draft_tokens",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "draft_sampling",
    "seed",
    "ignore_eos",
    "no_spec",
    "turns",
)
"""Settings that decide what the number is of: two results that differ in one are not compared."""

STOP_REASONS: Final = ("eos", "length")

UNTOLD: Final = -1
"""Stands for a drafted id that a server refused and does not tell."""

Step: TypeAlias = tuple[tuple[int, ...], int]
"""The drafted ids, none where nothing was drafted, and how many of them were accepted."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What to measure, on what, and how.

    `prompts` is a file or the name of a set. `pp` are the pipeline-parallel sizes, measured one after the other;
    the first is the one that others are compared with. `tolerance` is relative. `baseline` also times plain
    decoding and replays proposers without a draft; `no_spec` decodes plainly and drafts nothing.

    `engine` is a plug-in's name; `endpoint` attaches to a server that runs, and the `server_*` say how to start
    one: the command before its arguments, the virtual environment that has it, arguments to add, and the seconds
    until it must be ready.
    """

    target: str
    draft: str | None
    prompts: str
    pp: tuple[int, ...] = (1,)
    tp: int = 1
    num_draft_tokens: int | None = None
    max_new_tokens: int = 64
    limit: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_sampling: str = "greedy"
    seed: int = 0
    turns: int = 1
    batch: int = 1
    tolerance: float = 0.05
    baseline: bool = False
    no_spec: bool = False
    ignore_eos: bool = False
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    report: str | None = None
    engine: str = "reference"
    endpoint: str | None = None
    server_command: str | None = None
    server_venv: str | None = None
    server_args: str | None = None
    server_timeout: float = 900.0
    api_key_env: str | None = None


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What an engine is to run: `num_draft_tokens` 0 is plain decoding, `head` the draft as it is stored.

    `facts` are what the engine adds to the settings of the result, `versions` to its software; `api_key` goes to
    an endpoint and nowhere else.
    """

    config: EvalConfig
    spec: TargetSpec
    head: HeadConfig | None
    num_draft_tokens: int
    stop_ids: tuple[int, ...]
    dtype: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn of one row, as the target reads it; `key` names it, also for its random numbers."""

    key: str
    id: str
    category: str | None
    turn: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """What verifying drafts came to on one text or several.

    `tokens` are the new ones, cut at a stop; `steps` the target's forwards after the prompt's; `num_drafts`
    those that verified a draft. Per position i, from 0: `proposed` drafts that had it, `reached` those of
    them whose tokens before it were all accepted, `accepted` those that kept it too.
    """

    texts: int
    tokens: int
    steps: int
    num_drafts: int
    proposed: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One turn of one prompt. `gaps` are the distances of the two best logits at each new token.

    `steps` is None where a server told no more than the counts. Build with `told` or `counted`.
    """

    id: str
    category: str | None
    turn: int
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    num_drafts: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: tuple[Step, ...] | None
    stop_reason: str
    gaps: tuple[float, ...] | None = None

    def counts(self) -> Counts:
        """The counts of this turn, with what the steps tell.

        Without steps every step is taken to have drafted, and every draft to have reached its next position
        when it kept the one before: so it is in servers, whose drafts all have the same length.
        """
        if self.steps is not None:
            return count_steps(self.steps, num_tokens=len(self.tokens))
        reached = tuple(map(min, self.proposed, (self.num_drafts, *self.accepted)))
        return Counts(1, len(self.tokens), self.num_drafts, self.num_drafts, self.proposed, reached, self.accepted)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """All prompts at one size. `seconds` are those of decoding, `plain_seconds` of plain decoding of the same
    prompts, which gave `plain_tokens` (None: as many); `bytes_on_wire` went between stages."""

    pp: int
    tp: int
    results: tuple[PromptResult, ...]
    seconds: float
    plain_seconds: float | None = None
    plain_tokens: int | None = None
    bytes_on_wire: int | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A proposer without a draft, replayed over the first size's texts; one entry per text, in its order."""

    name: str
    results: tuple[Counts, ...]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What a run measured. `settings` say what of (see COMPARED), `versions` by which software."""

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    sizes: tuple[SizeResult, ...]
    baselines: tuple[Baseline, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; `records.evaluationfile` reads it."""
        return asdict(self)


def told(
    prompt: Prompt,
    tokens: tuple[int, ...],
    steps: tuple[Step, ...],
    *,
    is_stopped: bool,
    gaps: tuple[float, ...] | None = None,
) -> PromptResult:
    """The result of a prompt whose steps are known."""
    counts = count_steps(steps, num_tokens=len(tokens))
    found = (counts.num_drafts, counts.proposed, counts.accepted, steps)
    return _result(prompt, tokens, found, is_stopped=is_stopped, gaps=gaps)


def counted(
    prompt: Prompt,
    tokens: tuple[int, ...],
    num_drafts: int,
    *,
    proposed: tuple[int, ...],
    accepted: tuple[int, ...],
    is_stopped: bool,
) -> PromptResult:
    """The result of a prompt of which no more than counts is known: per position, drafts that had it and kept it."""
    return _result(prompt, tokens, (num_drafts, proposed, accepted, None), is_stopped=is_stopped, gaps=None)


def _result(
    prompt: Prompt,
    tokens: tuple[int, ...],
    found: tuple[int, tuple[int, ...], tuple[int, ...], tuple[Step, ...] | None],
    *,
    is_stopped: bool,
    gaps: tuple[float, ...] | None,
) -> PromptResult:
    reason = "eos" if is_stopped else "length"
    return PromptResult(prompt.id, prompt.category, prompt.turn, prompt.ids, tokens, *found, reason, gaps)


def count_steps(steps: Sequence[Step], *, num_tokens: int) -> Counts:
    """The counts of one text of `num_tokens` new tokens that took these steps."""
    longest = max((len(drafted) for drafted, _ in steps), default=0)
    positions = range(longest)
    return Counts(
        texts=1,
        tokens=num_tokens,
        steps=len(steps),
        num_drafts=sum(bool(drafted) for drafted, _ in steps),
        proposed=tuple(sum(i < len(drafted) for drafted, _ in steps) for i in positions),
        reached=tuple(sum(i < len(drafted) and i <= kept for drafted, kept in steps) for i in positions),
        accepted=tuple(sum(i < kept for _, kept in steps) for i in positions),
    )


SHORTER: Final = "shorter prompts, another `--limit`, fewer `--max-new-tokens`, or a server that takes longer texts"
"""What to do about `too_long`."""


def too_long(prompts: Sequence[Prompt], plan: DecodePlan, room: int | None) -> str | None:
    """What does not fit into texts of `room` tokens (None: no limit): a prompt, its answer and its drafts.

    Near the end of their room servers draft less or not at all.
    """
    more = plan.config.max_new_tokens + plan.num_draft_tokens
    long = [prompt for prompt in prompts if room is not None and len(prompt.ids) + more > room]
    if not long:
        return None
    worst = max(long, key=lambda prompt: len(prompt.ids))
    return (
        f"{len(long)} of {len(prompts)} prompts do not fit: the server takes texts of {room} tokens, and "
        f"`{worst.id}` has {len(worst.ids)}, with {plan.config.max_new_tokens} to be written and "
        f"{plan.num_draft_tokens} drafted"
    )
