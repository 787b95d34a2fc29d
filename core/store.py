"""Format of the hidden-state store: names, dtypes and shapes of everything in `hidden_states/`.

shard-NNNNN.safetensors
    input_ids      int32 [N]           tokens of the shard's samples, one after another
    loss_mask      uint8 [N]           1 on reply tokens, r[t] of the alignment
    aux_states     bf16  [N, A, H]     auxiliary states, columns in the order of manifest.layer_ids
    last_states    bf16  [M, H]        state before the final norm, only of rows whose next token is a reply token
    last_rows      int32 [M]           their rows in the shard, ascending
    sample_offsets int64 [S + 1]       sample s is rows sample_offsets[s] .. sample_offsets[s + 1]
With `capture.storage: fp8` (core/fp8_states.py) both states are float8 e4m3 and are to be multiplied by
    aux_scales     float32 [N, A]      of every token and layer
    last_scales    float32 [M]
index.parquet      one row a sample, see INDEX_SCHEMA
manifest.json      written last: target, layer_ids, last_state, storage, shards, rejected, inputs, versions

While a capture runs there are instead
shard-NNNNN.json   sidecar of a shard that is whole: its entry of manifest.shards and its rows of the index
inputs.json        what decides the states, as in the manifest
probe.json         the probe's findings, as in the manifest
and a store that was repaired is such a capture again, its damaged shards aside in damaged/.

hidden_states.part-I-of-N/ beside it are the N parts of a capture that is spread over hosts, each a store of its own
whose manifest says `part: {index, of}`; `draftsmith capture merge` makes one store of them.
"""

import pyarrow as pa

INDEX = "index.parquet"
INPUTS = "inputs.json"
PROBE = "probe.json"
DAMAGED = "damaged"
# A shard's header is padded to this, so that the states begin on a page of the file.
HEADER_BYTES = 4096
# What a sample is, in the order in which its bytes are hashed; the scales only where the states are in fp8.
TOKEN_TENSORS = ("input_ids", "loss_mask", "aux_states", "aux_scales")
LAST_TENSORS = ("last_states", "last_scales")
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
        pa.field(
            "sha256", pa.string(), nullable=False
        ),  # of TOKEN_TENSORS, then LAST_TENSORS: hidden_state_capture/shard.py
    ]
)


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def part_name(index: int | str, of: int | str) -> str:
    """Folder name of part `index` (from 0) of a capture in `of` parts."""
    return f"hidden_states.part-{index}-of-{of}"


def bytes_per_row(storage: str, num_aux: int, hidden_size: int) -> tuple[int, int]:
    """Bytes on disk of a token (ids, mask, auxiliary states) and, beside it, of a row whose last state is kept."""
    state = 2 * hidden_size if storage == "bf16" else hidden_size + 4
    return 4 + 1 + num_aux * state, state + 4
