"""TransferQueue 0.1.11's public names over rl-tq: `import rl_tq_transfer_queue as tq`.

For code that was written for it. Values lie in an rl-tq queue; samples, keys, tags and samplers are kept by a
controller as there, a Ray actor where Ray runs and a thread of this process elsewhere. What differs, on purpose: a
dtype conflict is an error, a missing key is an error and not a shorter batch, indexes are never given twice, a waiting
`get_meta` holds up nobody, and no call changes torch's thread count.
"""

from rl_tq_transfer_queue.client import StorageKeyNotFoundError, TransferQueueClient
from rl_tq_transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from rl_tq_transfer_queue.interface import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    close,
    get_client,
    get_metrics_endpoint,
    init,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from rl_tq_transfer_queue.metadata import BatchMeta, KVBatchMeta
from rl_tq_transfer_queue.original import install as _install
from rl_tq_transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

_install()
