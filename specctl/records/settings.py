"""Settings that have no flag: keys of a `--config` file alone, by command, and what they mean."""

from collections.abc import Mapping
from typing import Final

BEYOND_FLAGS: Final[Mapping[str, Mapping[str, str]]] = {
    "regenerate": {
        "timeout_s": "seconds until a server must have answered a request",
        "tries": "how often a request is sent before its row counts as failed",
    },
    "extract": {
        "shard_mib": "MiB of states of one shard file",
        "server_timeout": "seconds until a server that was started must be ready",
    },
    "train": {
        "schedule": "how the learning rate falls after the warm-up: cosine, linear or constant",
        "warmup": "share of the steps in which the learning rate rises to `lr`",
        "min_lr": "share of `lr` that is left at the end",
        "clip": "largest norm of a step's gradient; a larger one is scaled down",
        "weight_decay": "AdamW's weight decay",
        "betas": "AdamW's two betas",
        "eval_rows": "rows of held-out samples that are scored each time",
        "log_every": "steps between two lines of the log",
        "init_head": "where the draft's head starts: target (the target's rows) or fresh (random)",
        "train_embedding": "whether the embedding learns; P-EAGLE's does unless told, EAGLE-3's does not",
        "train_head": "whether the draft's head learns",
        "hidden_size": "width of the draft; the target's if not given, and so with the five below",
        "intermediate_size": "width of the MLP",
        "num_attention_heads": "query heads",
        "num_key_value_heads": "key and value heads",
        "head_dim": "width of a head",
        "rope_theta": "base of the rotary phases",
        "norm_before_residual": "whether the residual of layer 0 is the normed state",
        "norm_before_fc": "whether one norm runs over the fused states; EAGLE-3's does unless told",
        "fc_norm": "whether each fused state has a norm of its own",
        "norm_output": "whether the next step takes the state after the final norm",
        "checkpoint_layers": "whether layers are computed again in backward instead of kept, to save memory",
        "max_bad_samples": "share of samples with NaN or infinite states beyond which the run stops",
        "weights": "how often each shard folder is taken, one number a folder",
        "revision": "branch, tag or commit of a hub target",
        "trust_remote_code": "whether Python code that the target's folder brings is run",
    },
    "eval": {
        "revision": "branch, tag or commit of a hub target",
        "server_timeout": "seconds until a server that was started must be ready",
    },
}
