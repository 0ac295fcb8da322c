"""What the words on a page mean."""

from __future__ import annotations

from typing import Literal

Term = Literal[
    "alpha", "estimated error", "kept", "low rank", "MAC", "method", "pair", "params", "rank R",
    "relative error", "replaced", "saves", "score", "seed", "target", "term",
]  # fmt: skip

MEANING: dict[Term, str] = {
    "alpha": "how much wider than before layers are; a convolution has alpha squared as many "
    "channels",
    "estimated error": "the relative error of the model's output that is expected from the errors "
    "of its layers",
    "kept": "the share of the source's parameters that is left",
    "low rank": "a sum of products of one column and one row, which is a Kronecker sum too; "
    "truncated SVD gives the best one for the weight",
    "MAC": "a multiply-add of one example; 1 MAC = 2 FLOPs",
    "method": "which sums may be chosen: svd is low rank alone, kron all Kronecker sums; with "
    "-data they are fitted to what layers see on examples, not to the weights alone",
    "pair": "how widths are split: a layer of K = k1 x k2 outputs and D = d1 x d2 inputs has the "
    "pair k1xk2|d1xd2 and, in each term, factors of k1 x d1 and k2 x d2 numbers",
    "params": "parameters: the numbers in the weights",
    "rank R": "the number of terms in a weight's sum",
    "relative error": "the length of what is lost over the length of the original, of a weight or, "
    "with examples, of a layer's output: 0 is the same, 1 is nothing left",
    "replaced": "a replaced layer is bilinear now, a widened one is dense in a new width, a kept "
    "one is as it was",
    "saves": "parameters of the layer that fall away at the error that the page names",
    "score": "measured on examples that nothing was fitted to",
    "seed": "of every random start; the same seed gives the same result on the same machine",
    "target": "a limit that the converted model keeps; a number up to 1 is a share of the source's",
    "term": "one Kronecker product of two small factors; a weight is a sum of R of them",
}
