"""Rules on the files themselves: is there a config, are the weights whole, does anything reach outside."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in

_HF_LAYOUT: Final = "https://huggingface.co/docs/safetensors, format; transformers `modeling_utils`"


def _problem(rule_id: str) -> Callable[[Subject], Iterator[Found]]:
    """The check of a rule that reading the folder has already answered."""

    def check(subject: Subject) -> Iterator[Found]:
        for problem in subject.checkpoint.problems:
            if problem.rule == rule_id:
                yield Found(problem.where, problem.expected, problem.found)

    return check


CONFIG_MISSING = rule(
    "CONFIG_MISSING",
    "error",
    "the draft has no config.json",
    story="Both runtimes build the draft's modules from config.json before they open any weights. Trainers that "
    "save a state dict only (DeepSpeed, torch.save) leave it behind in the run's folder.",
    fix="copy the trainer's config.json beside the weights",
    source="vLLM 0.33.0 config/speculative.py:1406",
)(_problem("CONFIG_MISSING"))

CONFIG_BROKEN = rule(
    "CONFIG_BROKEN",
    "error",
    "config.json cannot be read",
    story="config.json has to be one JSON object in UTF-8. A copy that was cut, a comment or a trailing comma is "
    "enough to stop the server at its start.",
    fix="restore the file from the trainer's output",
    source="RFC 8259",
)(_problem("CONFIG_BROKEN"))

CONFIG_KEY_TWICE = rule(
    "CONFIG_KEY_TWICE",
    "warning",
    "config.json says one key twice",
    story="JSON readers keep the last of two equal keys and say nothing. After a merge by hand the first value is "
    "the one people see at the top of the file, and the last is the one that is used.",
    fix="keep one of the two",
    source="RFC 8259, section 4",
)(_problem("CONFIG_KEY_TWICE"))

WEIGHTS_MISSING = rule(
    "WEIGHTS_MISSING",
    "error",
    "the folder has no weights",
    story="Weights are looked for as model.safetensors, as shards named by model.safetensors.index.json, or as "
    "pytorch_model.bin. A trainer's resume state (training_state.pt, eagle_meta.pt) and a LoRA adapter are neither.",
    fix="export the head from the trainer, or copy the weights into the folder",
    source="vLLM 0.33.0 model_executor/model_loader/default_loader.py",
)(_problem("WEIGHTS_MISSING"))

WEIGHTS_BROKEN = rule(
    "WEIGHTS_BROKEN",
    "error",
    "a weights file is cut or damaged",
    story="The file's own header says where each tensor lies. Here header and size do not agree, as after a copy "
    "that ended early or a full disk.",
    fix="copy the file again and compare its size with the source",
    source=_HF_LAYOUT,
)(_problem("WEIGHTS_BROKEN"))

WEIGHTS_UNSAFE = rule(
    "WEIGHTS_UNSAFE",
    "error",
    "the weights are a pickle that names code",
    story="A .bin file is a pickle, and a pickle can call any function of Python while it loads. specctl never "
    "unpickles; it reads the list of instructions and finds one that has no business in a file of tensors. Loaders "
    "with weights_only=True refuse such a file, older ones run it.",
    fix="do not load this file; get the head from its author as safetensors",
    source="https://pytorch.org/docs/stable/generated/torch.load.html, weights_only",
)(_problem("WEIGHTS_UNSAFE"))

INDEX_BROKEN = rule(
    "INDEX_BROKEN",
    "error",
    "the index of the shards cannot be read",
    story="model.safetensors.index.json maps each tensor to the shard that holds it. Without a readable "
    "`weight_map` nobody knows which files belong to the head.",
    fix="restore the index, or merge the shards into one model.safetensors",
    source=_HF_LAYOUT,
)(_problem("INDEX_BROKEN"))

INDEX_SHARD_MISSING = rule(
    "INDEX_SHARD_MISSING",
    "error",
    "the index names a shard that is not there",
    story="A download that left one shard out still looks complete. vLLM stops at the file it misses; loaders that "
    "take every *.safetensors load what is there, and each tensor of the missing shard stays uninitialised.",
    fix="fetch the missing file",
    source="deepseek-ai/DeepSpec#11; vLLM 0.33.0 model_loader/weight_utils.py:590-632",
)(_problem("INDEX_SHARD_MISSING"))

INDEX_PATH_ESCAPES = rule(
    "INDEX_PATH_ESCAPES",
    "error",
    "the index points outside the folder",
    story="A shard's name in `weight_map` is a plain file name. A path that leaves the folder makes a loader read "
    "another file of the machine. specctl does not open it.",
    fix="do not serve this folder; name the shards by file name only",
    source="CWE-22",
)(_problem("INDEX_PATH_ESCAPES"))

INDEX_TENSOR_MISSING = rule(
    "INDEX_TENSOR_MISSING",
    "error",
    "a shard lacks a tensor that the index promises",
    story="The index and the shards are of two different saves. The loader takes what the shards hold and leaves "
    "the rest uninitialised.",
    fix="take index and shards from the same save",
    source="NVIDIA/Model-Optimizer#2427",
)(_problem("INDEX_TENSOR_MISSING"))


@rule(
    "WEIGHTS_STRAY",
    "warning",
    "other *.safetensors lie beside the weights",
    story="Where an index stands, it decides: files it does not name are not read by transformers or vLLM, but tools "
    "that take every *.safetensors merge them in. Without an index vLLM does just that: it loads every *.safetensors "
    "of the folder, an adapter stops it at unknown names, a second copy of the head overwrites the first.",
    fix="move the other files out of the folder",
    source="vLLM 0.33.0 model_loader/weight_utils.py:590-632; deepseek-ai/DeepSpec#11; Blaizzy/mlx-vlm#1464",
    since="an error with vLLM where there is no index",
)
def weights_stray(subject: Subject) -> Iterator[Found]:
    if any(problem.rule == "INDEX_BROKEN" for problem in subject.checkpoint.problems):
        return  # which files belong to the head is not known
    is_loaded = subject.runtime == "vllm" and subject.checkpoint.container == "safetensors"
    for found in _problem("WEIGHTS_STRAY")(subject):
        yield replace(found, level="error" if is_loaded else None)


TENSOR_TWICE = rule(
    "TENSOR_TWICE",
    "error",
    "two files hold a tensor of the same name",
    story="The loader copies both into the same parameter and the one that is read last stays. Which that is "
    "depends on the order of the files.",
    fix="keep one of the two",
    source="vLLM 0.33.0 model_executor/model_loader/weight_utils.py",
)(_problem("TENSOR_TWICE"))


def _mended_by_copy(rule_id: str) -> Callable[[Subject], Iterator[Found]]:
    """As `_problem`, where a copy in one model.safetensors is the repair, for vLLM only."""

    def check(subject: Subject) -> Iterator[Found]:
        for found in _problem(rule_id)(subject):
            yield replace(found, repair=Repair())

    return check


WEIGHTS_CONSOLIDATED = rule(
    "WEIGHTS_CONSOLIDATED",
    "error",
    "a consolidated file sends vLLM to another format",
    story="A file called consolidated*.safetensors, anywhere below the folder, makes vLLM take the checkpoint for one "
    "in Mistral's own format: it then loads only files of that name beside config.json, or stops at `Cannot find any "
    "model weights`.",
    fix="move the consolidated files out of the folder",
    source="vLLM 0.33.0 model_loader/default_loader.py:144-262, transformers_utils/repo_utils.py:137-206",
    needs=("vllm",),
)(_mended_by_copy("WEIGHTS_CONSOLIDATED"))

INDEX_SUBFOLDER = rule(
    "INDEX_SUBFOLDER",
    "error",
    "the index names files in a subfolder",
    story="vLLM looks for weights beside config.json only. A shard in a folder below is not loaded: its tensors stay "
    "uninitialised, and where all lie below it stops at `Cannot find any model weights`.",
    fix="move the shards beside config.json and name them so in the index; `--fix` does",
    source="vLLM 0.33.0 model_loader/default_loader.py:144-262",
    needs=("vllm",),
)(_mended_by_copy("INDEX_SUBFOLDER"))

WEIGHTS_WRAPPED = rule(
    "WEIGHTS_WRAPPED",
    "error",
    "the tensors lie one level down in the .bin file",
    story="A trainer's own checkpoint keeps its weights under a key such as `state_dict`, beside steps and optimizers. "
    "Servers take the keys at the top for tensor names.",
    fix="`specctl convert` writes the tensors by themselves",
    source="vLLM 0.33.0 model_loader/weight_utils.py:1492",
)(_problem("WEIGHTS_WRAPPED"))

LINK_OUTSIDE = rule(
    "LINK_OUTSIDE",
    "error",
    "a file is a link that leaves the folder",
    story="A checkpoint from elsewhere can hold a link to any file of your machine. specctl follows only the "
    "links of the Hugging Face cache (snapshots to blobs of the same repository).",
    fix="copy the file that the link means into the folder",
    source="CWE-59",
)(_problem("LINK_OUTSIDE"))


@rule(
    "WEIGHTS_PICKLE",
    "note",
    "the weights are a pickle",
    story="A .bin file loads slower than safetensors, cannot be mapped, and needs weights_only=True to be safe. "
    "This one holds only tensors.",
    fix="`specctl convert` writes safetensors in any layout",
    source="https://pytorch.org/docs/stable/generated/torch.load.html, weights_only",
)
def weights_pickle(subject: Subject) -> Iterator[Found]:
    is_read = not any(problem.rule.startswith("WEIGHTS_") for problem in subject.checkpoint.problems)
    if subject.checkpoint.container in ("bin", "sharded-bin") and is_read:
        name = subject.checkpoint.weight_files[0].name
        yield Found(name, "a *.safetensors file", "a pickle that names only tensors", repair=Repair())


@rule(
    "REMOTE_CODE",
    "warning",
    "config.json asks to run code from the folder",
    story="`auto_map` names Python files that are run when a server is started with --trust-remote-code. A draft "
    "needs none: both runtimes bring its class. Trainers copy the key from the target, or save a broken one.",
    fix="remove `auto_map` from config.json",
    source='speculators 0.9.0 saves `auto_map {"": ...}`; transformers `dynamic_module_utils`',
)
def remote_code(subject: Subject) -> Iterator[Found]:
    if "auto_map" in subject.raw:
        yield Found(
            "config.json: auto_map",
            "no such key",
            repr(subject.raw["auto_map"])[:60],
            repair=Repair(unset=(("auto_map",),)),
        )


RULES = rules_in(globals())
