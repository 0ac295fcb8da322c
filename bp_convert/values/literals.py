"""The words that a request may use. They stand apart from the values that hold them, since the
command line shows and checks them before any value is made.
"""

from __future__ import annotations

from typing import Literal, get_args

Policy = Literal["fast", "paper"]
# Where factors start from, and what may be asked for: auto chooses by what the terms keep.
Start = Literal["warm", "mixed", "random"]
Init = Literal["auto", "warm", "mixed", "random"]
# Which candidates a budget is spent on, and whether they are fitted to data; auto takes kron, and
# fits it to data where there is some.
Method = Literal["auto", "svd", "svd-data", "kron", "kron-data"]
# How weights lie in the file: whole numbers with scales, in 8, 4 or 3 bits, or a floating type.
Store = Literal["int8", "int4", "int3", "bf16", "fp16", "fp32"]
# How replaced layers run in eval mode: on their factors, or on the dense weight built of them; auto
# takes for each what is predicted to be faster.
Ways = Literal["auto", "factored", "expanded"]
# What an error of a layer is measured in: what goes into it, or what the model makes of it as well.
Sides = Literal["auto", "inputs", "both"]
# What the choice among layers goes by: what perturbing each did, all alike, or the best of several.
Allocation = Literal["auto", "measured", "uniform"]
# What error a target may give for time.
Prefer = Literal["speed", "balanced", "quality"]
# For which runtime a model is written, and how a bilinear layer stands in its file.
Goal = Literal["onnx", "openvino", "executorch", "torch-export"]
GOALS: tuple[Goal, ...] = get_args(Goal)
Form = Literal["factors", "built", "dense"]
DType = Literal["float32", "bfloat16", "float16", "float64"]
