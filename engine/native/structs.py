"""ctypes declarations of the structures in `source/model.h`.

The caller that fills a structure keeps the memory behind its pointers alive.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p


class LinearFields(Structure):
    """`Linear`: a weight in panels, its strips, bias and sizes."""

    _fields_ = (
        ("weight", c_void_p),
        ("strips", c_void_p),
        ("bias", c_void_p),
        ("panels", c_int64),
        ("steps", c_int64),
    )


class LayerFields(Structure):
    """`Layer`: four products and four norms."""

    _fields_ = (
        ("qkv", LinearFields),
        ("output", LinearFields),
        ("gate_up", LinearFields),
        ("down", LinearFields),
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
    )


class LowRankFields(Structure):
    """`LowRank`: the two thin products that an adapter adds to a linear layer."""

    _fields_ = (("down", LinearFields), ("up", LinearFields))


class LayerAdapterFields(Structure):
    """`LayerAdapter`: what an adapter adds to one layer."""

    _fields_ = (
        ("qkv", LowRankFields),
        ("output", LowRankFields),
        ("gate_up", LowRankFields),
        ("down", LowRankFields),
    )


class GroupFields(Structure):
    """`Group`: rows of one adapter."""

    _fields_ = (
        ("layers", POINTER(LayerAdapterFields)),
        ("first", c_int64),
        ("end", c_int64),
    )


class AdaptedFields(Structure):
    """`Adapted`: the rows of a step that use an adapter."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_groups", c_int64),
        ("rows", c_void_p),
        ("places", c_void_p),
        ("groups", POINTER(GroupFields)),
    )


class ModelFields(Structure):
    """`Model`: everything that is constant between steps."""

    _fields_ = (
        ("is_bf16", c_int64),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("eps", c_double),
        ("scale", c_double),
        ("embedding", c_void_p),
        ("layers", POINTER(LayerFields)),
        ("norm", c_void_p),
        ("lm_head", LinearFields),
        ("table", LinearFields),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("pool", c_void_p),
        ("low_stride", c_int64),
    )


class StepFields(Structure):
    """`Step`: one step's tokens, the slots of their KV, and the output of logits."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_tasks", c_int64),
        ("task_tokens", c_int64),
        ("num_sampled", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("tasks", c_void_p),
        ("last_tasks", c_void_p),
        ("sampled", c_void_p),
        ("logits", c_void_p),
        ("workspace", c_void_p),
        ("part_s", c_void_p),
        ("num_chosen", c_int64),
        ("chosen", c_void_p),
        ("states", c_void_p),
        ("adapted", AdaptedFields),
        ("last_adapted", AdaptedFields),
    )


class PackingFields(Structure):
    """`Packing`: a weight of a checkpoint, and the target of its packed form."""

    _fields_ = (
        ("is_bf16", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("is_gate_up", c_int64),
        ("weight", c_void_p),
        ("nothing", c_void_p),
        ("panels", c_int64),
        ("steps", c_int64),
        ("packed", c_void_p),
    )


class GroupPackingFields(Structure):
    """`GroupPacking`: quantised outputs of a GGUF file, and the target of their packed form."""

    _fields_ = (
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("blocks", c_void_p),
        ("row_bytes", c_int64),
        ("num_strips", c_int64),
        ("every", c_int64),
        ("strips", c_void_p),
        ("packed", c_void_p),
    )


PARTS = ("products", "attention", "head", "rest")
"""Parts of a step that are timed, numbered as in `source/model.h`."""
