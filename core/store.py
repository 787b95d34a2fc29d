"""Format of the hidden-state store: names, dtypes and shapes of everything in `hidden_states/`.

shard-NNNNN.safetensors
    input_ids      int32 [N]           tokens of the shard's samples, one after another
    loss_mask      uint8 [N]           1 on reply tokens, r[t] of the alignment
    aux_states     bf16  [N, A, H]     auxiliary states, columns in the order of manifest.layer_ids
    last_states    bf16  [M, H]        state before the final norm, only of rows whose next token is a reply token
    last_rows      int32 [M]           their rows in the shard, ascending
    sample_offsets int64 [S + 1]       sample s is rows sample_offsets[s] .. sample_offsets[s + 1]
index.parquet      one row a sample, see INDEX_SCHEMA
manifest.json      written last: target, layer_ids, last_state, storage, shards, rejected, inputs, versions
"""

import pyarrow as pa

INDEX = "index.parquet"
INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),  # index into manifest.shards
        pa.field("row", pa.int32(), nullable=False),  # s: the sample's place in sample_offsets
        pa.field("start", pa.int64(), nullable=False),  # its first row in the shard
        pa.field("length", pa.int32(), nullable=False),  # tokens
        pa.field("last_start", pa.int64(), nullable=False),  # its first row in last_states
        pa.field("last_length", pa.int32(), nullable=False),
        pa.field("supervised_tokens", pa.int32(), nullable=False),  # reply tokens
        pa.field("split", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),  # of its input_ids, loss_mask, aux_states, last_states bytes
    ]
)


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"
