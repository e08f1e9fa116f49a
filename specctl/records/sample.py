"""One tokenised conversation, or why there is none. No torch."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids and what of them is supervised.

    `input_ids` int32 [T]; `loss_mask` uint8 [T], 1 on the tokens that the assistant wrote;
    `sample_id` is the row's own id or `content_id`; `where` is the file and line it came from.
    """

    sample_id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    where: str
    is_truncated: bool = False

    def key(self) -> bytes:
        """16 bytes that identify the sample: its id and its content, never its position."""
        digest = hashlib.sha256(self.sample_id.encode())
        digest.update(b"\0" + self.input_ids.tobytes() + self.loss_mask.tobytes())
        return digest.digest()[:16]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that gives no sample. `reason` is a short stable slug; `detail` one sentence."""

    where: str
    reason: str
    detail: str = ""


def content_id(input_ids: NDArray[Any], loss_mask: NDArray[Any]) -> str:
    """A 32-digit hexadecimal id made from the tokens and the mask."""
    digest = hashlib.sha256(np.asarray(input_ids, np.int32).tobytes())
    digest.update(np.asarray(loss_mask, np.uint8).tobytes())
    return digest.hexdigest()[:32]
