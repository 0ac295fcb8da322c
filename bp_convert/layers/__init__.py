"""Bilinear layers, usable on their own. Each reads like the torch layer that it stands for."""

from __future__ import annotations

from bp_convert.layers.conv import BPConv1d, BPConv2d, BPConv3d
from bp_convert.layers.conv_transpose import (
    BPConvTranspose1d,
    BPConvTranspose2d,
    BPConvTranspose3d,
)
from bp_convert.layers.embedding import BPEmbedding
from bp_convert.layers.embedding_bag import BPEmbeddingBag
from bp_convert.layers.linear import BPLinear
from bp_convert.layers.lstm import BPLSTM
from bp_convert.layers.recurrent_cells import BPGRUCell, BPLSTMCell, BPRNNCell
from bp_convert.layers.rnn import BPGRU, BPRNN
from bp_convert.layers.turned import BPConv1D
from bp_convert.layers.two_inputs import BPBilinear

__all__ = [
    "BPGRU",
    "BPLSTM",
    "BPRNN",
    "BPBilinear",
    "BPConv1D",
    "BPConv1d",
    "BPConv2d",
    "BPConv3d",
    "BPConvTranspose1d",
    "BPConvTranspose2d",
    "BPConvTranspose3d",
    "BPEmbedding",
    "BPEmbeddingBag",
    "BPGRUCell",
    "BPLSTMCell",
    "BPLinear",
    "BPRNNCell",
]
