"""timm: a small member of every family, with fewer repeated blocks and fewer channels."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.shrink import lively, shallow, thin

CLASSES = 10


def _small(name: str, by: int, keep: int, options: dict[str, Any]) -> nn.Module:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    if keep:
        shallow(model, keep)
    if by > 1:
        thin(model, by)
    return lively(model)


def _built(path: str, config: str, size: int, options: dict[str, Any]) -> nn.Module:
    import timm.models

    home, _, kind = path.rpartition(".")
    room = getattr(timm.models, home)
    if not config:
        return lively(getattr(room, kind)(num_classes=CLASSES, **options))
    more = {} if kind == "NormFreeNet" else {"img_size": (size, size)}
    asked = getattr(room, config)(**options)
    return lively(getattr(room, kind)(asked, num_classes=CLASSES, **more))


def _class(path: str, size: int = 32, config: str = "", **options: Any) -> Entry:
    """Return an entry for a class in its own module, where no registered name is small enough.

    Args:
        config: name of the class that takes the options, where it is not that class itself.
    """
    name = path.partition(".")[0] + "-" + path.rpartition(".")[2]
    build = partial(_built, path, config, size, options)
    return Entry(f"timm/{name}", build, (f"3x{size}x{size}",), settled=True)


def _entry(name: str, size: int = 32, by: int = 8, keep: int = 1, **options: Any) -> Entry:
    """Return an entry; see ``shrink.py`` for ``by`` and ``keep``; options go to the model."""
    build = partial(_small, name, by, keep, options)
    return Entry(f"timm/{name}", build, (f"3x{size}x{size}",), settled=True)


def _vit(name: str, size: int = 32, **options: Any) -> Entry:
    """Return an entry for a plain vision transformer."""
    asked = {"img_size": size, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return _entry(name, size, 1, 2, **{**asked, **options})


FOUR = (1, 1, 1, 1)
WIDTHS = (16, 24, 32, 48)

ENTRIES = (
    # Convolutions
    _entry("gernet_s"),
    _entry("repvgg_a0"),
    _entry("mobileone_s0"),
    _entry("resnext26ts"),
    _entry("gcresnext26ts"),
    _entry("convmixer_768_32"),
    _entry("convnext_atto", by=1, depths=FOUR, dims=WIDTHS),
    _entry("convnextv2_atto", by=1, depths=FOUR, dims=WIDTHS),
    _entry("cs3darknet_focus_s", by=1),
    _entry("darknet53"),
    _entry("darknetaa53"),
    _entry("cspnext_tiny"),
    _entry("densenet121", by=1, growth_rate=8, block_config=(2, 2, 2, 2)),
    _entry("densenetblur121d", by=1, growth_rate=8, block_config=(2, 2, 2, 2)),
    _entry("dla34"),
    _entry("dla46x_c", by=2),
    _class(
        "dpn.DPN",
        k_sec=(1, 1, 1, 1),
        inc_sec=(8, 8, 8, 8),
        k_r=32,
        groups=4,
        num_init_features=8,
        small=True,
    ),
    _entry("efficientnet_b0"),
    _entry("efficientnet_lite0"),
    _entry("efficientnet_es"),
    _entry("tf_efficientnetv2_b0"),
    _entry("mixnet_s", by=1),
    _entry("mnasnet_small"),
    _entry("fbnetc_100"),
    _entry("spnasnet_100"),
    _entry("tinynet_e"),
    _entry("mobilenetv1_100"),
    _entry("mobilenetv2_050"),
    _entry("mobilenet_edgetpu_v2_xs"),
    _entry("ghostnet_050", by=1),
    _entry("hardcorenas_a"),
    _entry("hgnet_tiny", keep=0),
    _entry("hgnetv2_b0", keep=0),
    _entry("hrnet_w18_small"),
    _entry("inception_resnet_v2", 96),
    _entry("inception_v3", 96),
    _entry("inception_v4", 96),
    _entry("inception_next_atto", by=1, depths=FOUR, dims=(16, 32, 48, 64)),
    _entry("lcnet_035"),
    _entry("lcnetv2_small"),
    _entry("mobilenetv3_small_050"),
    _entry("fbnetv3_b"),
    _entry("mobilenetv4_conv_small"),
    _class(
        "nfnet.NormFreeNet",
        config="NfCfg",
        depths=FOUR,
        channels=(16, 32, 48, 64),
        stem_chs=16,
        group_size=8,
        attn_layer="se",
        attn_kwargs={"rd_ratio": 0.5},
        num_features=64,
    ),
    _class(
        "rdnet.RDNet",
        growth_rates=(8, 8, 16, 16),
        num_blocks_list=(2, 1, 1, 1),
        block_type=("Block", "Block", "BlockESE", "BlockESE"),
        is_downsample_block=(None, True, True, False),
        num_init_features=16,
    ),
    _entry("regnetx_002"),
    _entry("regnety_002"),
    _entry("regnetz_005", by=4),
    _entry("repghostnet_050"),
    _entry("repvit_m0_9"),
    _entry("res2net50_14w_8s", by=1, layers=[1, 1, 1, 1], keep=0),
    _entry("resnest14d"),
    _entry("resnet10t"),
    _entry("ecaresnet26t"),
    _entry("resnet26d"),
    _entry("seresnext26t_32x4d", by=4),
    _entry("resnetaa50"),
    _entry("resnetv2_18"),
    _entry("resnetv2_50x1_bit"),
    _entry("resnetv2_50d_gn"),
    _entry("rexnet_100", by=1),
    _entry("selecsls42"),
    _entry("legacy_seresnet18"),
    _entry("skresnet18", by=1, keep=0, layers=[1, 1, 1, 1]),
    _entry("starnet_s050"),
    _entry("vgg11_bn"),
    _entry("ese_vovnet19b_slim", keep=2),
    _entry("ese_vovnet19b_dw", keep=0),
    _entry("legacy_xception"),
    _entry("xception41"),
    _entry("fasternet_t0", by=1),
    _entry("csatv2", 64, by=1),
    # Attention with convolutions
    _entry("botnet26t_256", 64, by=1, img_size=64),
    _entry(
        "coat_lite_tiny",
        64,
        by=1,
        img_size=64,
        embed_dims=[16, 32, 48, 64],
        serial_depths=[1, 1, 1, 1],
        num_heads=8,
    ),
    _entry("cpubone_nano", by=1),
    _entry("davit_tiny"),
    _entry("edgenext_xx_small", by=1, keep=0),
    _class(
        "efficientformer.EfficientFormer",
        224,
        img_size=224,
        depths=(1, 1, 1, 2),
        embed_dims=(16, 24, 32, 48),
        num_vit=1,
    ),
    _entry("efficientvim_m1", by=1),
    _entry("efficientvit_b0"),
    _entry("efficientvit_m0", by=1, keep=0),
    _entry("fastvit_t8", by=1),
    _class("focalnet.FocalNet", embed_dim=16, depths=FOUR),
    _entry("iformer_t"),
    _class(
        "levit.Levit",
        64,
        img_size=64,
        embed_dim=(32, 48, 64),
        key_dim=8,
        depth=(1, 1, 1),
        num_heads=(2, 3, 4),
    ),
    _entry("lowformer_b0", by=1),
    _entry("test_mambaout", by=1),
    _class(
        "maxxvit.MaxxVit",
        64,
        "MaxxVitCfg",
        embed_dim=(16, 32, 32, 64),
        depths=FOUR,
        block_type=("C", "C", "T", "M"),
        stem_width=16,
    ),
    _class("metaformer.MetaFormer", depths=FOUR, dims=WIDTHS),
    _entry("mobilevit_xxs", by=1),
    _entry("mobilevitv2_050", by=1),
    _entry("shvit_s1", by=1),
    _entry("swiftformer_xs", by=1),
    _entry("tiny_vit_5m_224", by=1, embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
    _entry("visformer_tiny", 64, by=1, img_size=64, embed_dim=48),
    # Transformers
    _vit("vit_tiny_patch16_224"),
    _vit("deit_tiny_distilled_patch16_224"),
    _vit("deit3_small_patch16_224"),
    _vit("beit_base_patch16_224"),
    _vit("eva02_tiny_patch14_224"),
    _vit("vit_base_patch16_rope_224"),
    _vit("vit_relpos_small_patch16_224"),
    _vit("vit_srelpos_small_patch16_224"),
    _vit("cait_xxs24_224"),
    _vit("convit_tiny", embed_dim=12),
    _vit("qwen3_vit_88m"),
    _vit("naflexvit_base_patch16_gap"),
    _vit("samvit_base_patch16", 64),
    _entry(
        "tnt_s_patch16_224", 32, by=1, keep=2, img_size=32, embed_dim=48, depth=2, num_heads_outer=3
    ),
    _vit("beit3_base_patch16_224"),
    _entry("crossvit_9_240", by=1, embed_dim=(32, 48), num_heads=(2, 3)),
    _class(
        "gcvit.GlobalContextVit", 64, img_size=64, embed_dim=16, depths=FOUR, num_heads=(1, 2, 2, 4)
    ),
    _entry("hiera_tiny_224", 64, by=1, img_size=(64, 64), embed_dim=16),
    _entry("sam2_hiera_tiny", 64, by=1, embed_dim=16),
    _class("mvitv2.MultiScaleVit", config="MultiScaleVitCfg", depths=FOUR, embed_dim=16),
    _class(
        "nest.Nest",
        img_size=32,
        embed_dims=(16, 32, 48),
        num_heads=(1, 2, 3),
        depths=(1, 1, 1),
        drop_path_rate=0.1,
    ),
    _entry("pit_ti_224", 64, by=1, img_size=64),
    _entry("pvt_v2_b0", by=1),
    _entry("swin_tiny_patch4_window7_224", 64, by=1, img_size=64, embed_dim=24, window_size=4),
    _entry("swinv2_tiny_window8_256", 64, by=1, img_size=64, embed_dim=24, window_size=4),
    _entry("swinv2_cr_tiny_224", 64, by=1, img_size=64, embed_dim=24, depths=FOUR),
    _entry("twins_pcpvt_small"),
    _entry("twins_svt_small"),
    _entry("vitamin_small_224", 224, by=1),
    _class(
        "volo.VOLO",
        64,
        img_size=64,
        layers=[1, 1, 1, 1],
        embed_dims=[24, 48, 48, 48],
        num_heads=[2, 3, 3, 3],
        stem_hidden_dim=16,
    ),
    _entry("xcit_nano_12_p16_224", by=1, embed_dim=48, num_heads=3),
    # Perceptrons and recurrences
    _entry("mixer_s32_224", 64, img_size=64),
    _entry("gmixer_12_224", 224),
    _entry("gmlp_ti16_224", 224),
    _entry("resmlp_12_224", 64, by=1, img_size=64),
    _entry(
        "sequencer2d_s",
        56,
        by=1,
        img_size=56,
        embed_dims=(24, 48, 48, 48),
        hidden_sizes=(12, 24, 24, 24),
    ),
)
