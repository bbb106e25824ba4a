"""The ops as torch.library sees them: schemas, fake implementations and autograd, for torch.compile and export.

Optional results are empty tensors here, because a schema cannot return None. The eager path does not come through here.
"""

from rl_csrc._library import _copies, _estimators  # registers their ops
from rl_csrc._library._policy import policy_arguments
from rl_csrc._library._schema import split
from rl_csrc._library._scores import linear_logprobs, logprob_stats, logprobs, parallel_logprobs

__all__ = [
    "_copies",
    "_estimators",
    "linear_logprobs",
    "logprob_stats",
    "logprobs",
    "parallel_logprobs",
    "policy_arguments",
    "split",
]
