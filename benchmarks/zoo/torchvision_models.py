"""torchvision: every family of classifiers, and detection, segmentation, video, optical flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import DenseNet, get_model, segmentation, vision_transformer

from benchmarks.zoo.entry import Call, Entry
from benchmarks.zoo.shrink import lively, shallow, thin

CLASSES = 10


def _small(name: str, by: int = 4, keep: int = 1, **options: Any) -> nn.Module:
    """Return a registered model with fewer blocks and channels."""
    asked = {"weights": None, "num_classes": CLASSES, **options}
    return lively(thin(shallow(get_model(name, **asked), keep), by))


def _densenet() -> nn.Module:
    return lively(DenseNet(8, (2, 2, 2, 2), 16, num_classes=CLASSES))


def _light(name: str, **options: Any) -> nn.Module:
    """Return a registered model whose large classifier is cut before it is filled."""
    with torch.device("meta"):
        model = get_model(name, weights=None, num_classes=CLASSES, **options)
    return lively(_filled(thin(model, 8)))


def _filled(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _vit() -> nn.Module:
    model = vision_transformer.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES)
    return lively(model)


def _swin(version: str) -> nn.Module:
    from torchvision.models import swin_transformer as home

    return home.SwinTransformer(
        [4, 4],
        16,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=CLASSES,
        block=getattr(home, f"SwinTransformerBlock{version}"),
        downsample_layer=getattr(home, f"PatchMerging{version}"),
    )


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 48, 2), CNBlockConfig(48, None, 1)]
    return lively(ConvNeXt(blocks, 0.1, num_classes=CLASSES))


def _maxvit() -> nn.Module:
    from torchvision.models.maxvit import MaxVit

    return lively(
        MaxVit(
            (32, 32),
            16,
            4,
            [16, 32],
            [1, 1],
            head_dim=8,
            stochastic_depth_prob=0.1,
            num_classes=CLASSES,
        )
    )


def _resnet(block: str, **options: Any) -> nn.Module:
    from torchvision.models import resnet

    made = resnet.ResNet(getattr(resnet, block), [1, 1, 1, 1], num_classes=CLASSES, **options)
    return lively(thin(made, 4))


def _segmenter(name: str, **options: Any) -> nn.Module:
    asked = {"weights": None, "weights_backbone": None, "num_classes": CLASSES, **options}
    model = segmentation.__dict__[name](**asked)
    shallow(model.backbone)
    return lively(thin(model, 4))


# Layers whose outputs are anchors times classes or coordinates.
HEADS = ("bbox_pred", "cls_logits", "bbox_reg", "kps_score_lowres", "mask_fcn_logits")
HEADS += tuple(f"head.module_list.{n}{deep}" for n in range(6) for deep in ("", ".1"))


def _detector(name: str, **options: Any) -> nn.Module:
    sizes = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    asked = {"weights": None, "weights_backbone": None, "num_classes": 5, **sizes, **options}
    model = getattr(torchvision.models.detection, name)(**asked)
    shallow(model.backbone)
    thin(model, 4, HEADS)
    if name == "ssd300_vgg16":
        model.backbone.scale_weight = nn.Parameter(model.backbone.scale_weight[::4].detach())
    return lively(model)


def _pictures(*sizes: tuple[int, int]) -> Call:
    """Return one argument, a list of pictures of several sizes."""
    return ([torch.rand(3, *size) for size in sizes or ((64, 72), (80, 64))],), {}


def _s3d() -> nn.Module:
    model = get_model("s3d", weights=None, num_classes=CLASSES)
    model.avgpool = nn.AvgPool3d(2, 1)
    return lively(thin(model, 4))


def _mvit(**options: Any) -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 16, 16, (3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 4, 4)),
        MSBlockConfig(2, 16, 32, (3, 3, 3), (3, 3, 3), (1, 2, 2), (1, 2, 2)),
    ]
    asked = {"residual_pool": False, "residual_with_cls_embed": True, "rel_pos_embed": False}
    asked |= {"proj_after_attn": False, **options}
    return lively(MViT((32, 32), 4, blocks, num_classes=CLASSES, **asked))


def _swin3d() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformerBlock
    from torchvision.models.video.swin_transformer import (
        PatchEmbed3d,
        ShiftedWindowAttention3d,
        SwinTransformer3d,
    )

    block = partial(SwinTransformerBlock, attn_layer=ShiftedWindowAttention3d)
    return SwinTransformer3d(
        [2, 4, 4],
        16,
        [2, 1],
        [2, 4],
        [2, 4, 4],
        num_classes=CLASSES,
        block=block,
        patch_embed=PatchEmbed3d,
    )


def _raft(name: str) -> nn.Module:
    return lively(getattr(torchvision.models.optical_flow, name)(weights=None))


def _frames() -> Call:
    pictures = {f"image{n}": torch.rand(1, 3, 128, 128) * 2 - 1 for n in (1, 2)}
    return (), {**pictures, "num_flow_updates": 2}


def _quantizable(name: str, by: int = 4) -> nn.Module:
    make = getattr(torchvision.models.quantization, name)
    return lively(thin(shallow(make(weights=None, quantize=False, num_classes=CLASSES), 1), by))


def _entry(name: str, build: Callable[[], nn.Module], size: int = 64) -> Entry:
    return Entry(f"torchvision/{name}", build, (f"3x{size}x{size}",), settled=True)


def _seen(name: str, build: Callable[[], nn.Module], *watch: str, **more: Any) -> Entry:
    return Entry(f"torchvision/{name}", build, example=_pictures, watch=watch, settled=True, **more)


NO_AUX: dict[str, Any] = {"aux_logits": False, "init_weights": False}
AUX: dict[str, Any] = {"aux_logits": True, "init_weights": False}
ALL_BOXES: dict[str, Any] = {"box_score_thresh": 0.0, "box_detections_per_img": 10}
FEW: dict[str, Any] = {"rpn_post_nms_top_n_test": 20, "rpn_pre_nms_top_n_test": 50}
FEW |= {"rpn_post_nms_top_n_train": 20, "rpn_pre_nms_top_n_train": 50}
RCNN = ALL_BOXES | FEW
SCORED: dict[str, Any] = {"score_thresh": 0.0, "detections_per_img": 10, "topk_candidates": 20}
RPN = ("backbone", "rpn.head")

ENTRIES = (
    _entry("alexnet", partial(_light, "alexnet")),
    _entry("convnext", _convnext, 32),
    _entry("densenet121", _densenet, 32),
    _entry("efficientnet_b0", partial(_small, "efficientnet_b0", 4), 32),
    _entry("efficientnet_v2_s", partial(_small, "efficientnet_v2_s", 4), 32),
    _entry("googlenet", partial(_small, "googlenet", 4, **NO_AUX), 64),
    _entry("googlenet-aux", partial(_small, "googlenet", 4, **AUX), 224),
    _entry("inception_v3", partial(_small, "inception_v3", 4, **NO_AUX), 96),
    _entry("maxvit", _maxvit, 32),
    _entry("mnasnet0_5", partial(_small, "mnasnet0_5", 2), 32),
    _entry("mobilenet_v2", partial(_small, "mobilenet_v2", 4), 32),
    _entry("mobilenet_v3_small", partial(_small, "mobilenet_v3_small", 2), 32),
    _entry("regnet_x_400mf", partial(_small, "regnet_x_400mf", 1), 32),
    _entry("regnet_y_400mf", partial(_small, "regnet_y_400mf", 1), 32),
    _entry("resnet-basic", partial(_resnet, "BasicBlock"), 32),
    _entry("resnet-bottleneck", partial(_resnet, "Bottleneck"), 32),
    _entry(
        "resnet-dilated",
        partial(_resnet, "Bottleneck", replace_stride_with_dilation=[False, True, True]),
        32,
    ),
    _entry("resnext", partial(_resnet, "Bottleneck", groups=4, width_per_group=16), 32),
    _entry("wide_resnet", partial(_resnet, "Bottleneck", width_per_group=128), 32),
    _entry("shufflenet_v2_x0_5", partial(_small, "shufflenet_v2_x0_5", 1), 32),
    _entry("squeezenet1_0", partial(_small, "squeezenet1_0", 2)),
    _entry("squeezenet1_1", partial(_small, "squeezenet1_1", 2)),
    _entry("swin", partial(_swin, ""), 32),
    _entry("swin_v2", partial(_swin, "V2"), 32),
    _entry("vgg11", partial(_light, "vgg11", init_weights=False), 32),
    _entry("vgg11_bn", partial(_light, "vgg11_bn", init_weights=False), 32),
    _entry("vit", _vit, 32),
    _entry("quantizable-googlenet", partial(_quantizable, "googlenet")),
    _entry("quantizable-inception_v3", partial(_quantizable, "inception_v3"), 96),
    _entry("quantizable-mobilenet_v2", partial(_quantizable, "mobilenet_v2"), 32),
    _entry("quantizable-mobilenet_v3", partial(_quantizable, "mobilenet_v3_large"), 32),
    _entry("quantizable-resnet18", partial(_quantizable, "resnet18"), 32),
    _entry("quantizable-resnet50", partial(_quantizable, "resnet50"), 32),
    _entry("quantizable-shufflenet", partial(_quantizable, "shufflenet_v2_x0_5", 1), 32),
    _entry("fcn_resnet50", partial(_segmenter, "fcn_resnet50"), 32),
    _entry("fcn_resnet50-aux", partial(_segmenter, "fcn_resnet50", aux_loss=True), 32),
    _entry("deeplabv3_resnet50", partial(_segmenter, "deeplabv3_resnet50"), 32),
    _entry("deeplabv3_mobilenet_v3", partial(_segmenter, "deeplabv3_mobilenet_v3_large"), 32),
    _entry("lraspp_mobilenet_v3", partial(_segmenter, "lraspp_mobilenet_v3_large"), 32),
    _seen(
        "fasterrcnn_mobilenet_v3",
        partial(_detector, "fasterrcnn_mobilenet_v3_large_320_fpn", **RCNN),
        *RPN,
    ),
    _seen("fasterrcnn_resnet50", partial(_detector, "fasterrcnn_resnet50_fpn", **RCNN), *RPN),
    _seen("fasterrcnn_resnet50_v2", partial(_detector, "fasterrcnn_resnet50_fpn_v2", **RCNN), *RPN),
    _seen("maskrcnn_resnet50", partial(_detector, "maskrcnn_resnet50_fpn", **RCNN), *RPN),
    _seen("keypointrcnn_resnet50", partial(_detector, "keypointrcnn_resnet50_fpn", **RCNN), *RPN),
    _seen(
        "retinanet_resnet50",
        partial(_detector, "retinanet_resnet50_fpn", **SCORED),
        "backbone",
        "head",
    ),
    _seen(
        "retinanet_resnet50_v2",
        partial(_detector, "retinanet_resnet50_fpn_v2", **SCORED),
        "backbone",
        "head",
    ),
    _seen("fcos_resnet50", partial(_detector, "fcos_resnet50_fpn", **SCORED), "backbone", "head"),
    _seen("ssd300_vgg16", partial(_detector, "ssd300_vgg16", **SCORED), "backbone", "head"),
    _seen(
        "ssdlite_mobilenet_v3",
        partial(_detector, "ssdlite320_mobilenet_v3_large", **SCORED),
        "backbone",
        "head",
    ),
    Entry("torchvision/r3d_18", partial(_small, "r3d_18"), ("3x4x32x32",), settled=True),
    Entry("torchvision/mc3_18", partial(_small, "mc3_18"), ("3x4x32x32",), settled=True),
    Entry("torchvision/r2plus1d_18", partial(_small, "r2plus1d_18"), ("3x4x32x32",), settled=True),
    Entry("torchvision/s3d", _s3d, ("3x16x64x64",), settled=True),
    Entry("torchvision/mvit_v1", _mvit, ("3x4x32x32",), settled=True),
    Entry(
        "torchvision/mvit_v2",
        partial(
            _mvit,
            residual_pool=True,
            residual_with_cls_embed=False,
            rel_pos_embed=True,
            proj_after_attn=True,
        ),
        ("3x4x32x32",),
        settled=True,
    ),
    Entry("torchvision/swin3d", _swin3d, ("3x4x32x32",), settled=True),
    Entry("torchvision/raft_small", partial(_raft, "raft_small"), example=_frames, settled=True),
    Entry("torchvision/raft_large", partial(_raft, "raft_large"), example=_frames, settled=True),
)
