"""Models of published sizes, by name.

Their tensors have the shapes of the weights that can be downloaded.
"""

from typing import Any

from libai.config import LazyCall


def _gpt2(hidden_size: int, num_layers: int, num_heads: int) -> Any:
    return LazyCall("libai.models.GPT")(
        vocab_size=50257,
        max_seq_length=1024,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        activation="gelu_tanh",
    )


def _llama(vocab_size: int, max_seq_length: int, **sizes: Any) -> Any:
    return LazyCall("libai.models.Llama")(
        vocab_size=vocab_size, max_seq_length=max_seq_length, **sizes
    )


def _bert(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    target: str = "libai.models.BERT",
    **more: Any,
) -> Any:
    return LazyCall(target)(
        vocab_size=30522,
        max_seq_length=512,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        is_post_norm=True,
        num_token_types=2,
        norm_eps=1e-12,
        **more,
    )


def _roberta(vocab_size: int, *sizes: int) -> Any:
    model = _bert(*sizes)
    model.update(vocab_size=vocab_size, num_token_types=1, norm_eps=1e-5, padding_token=1)
    return model


def _t5(
    hidden_size: int, num_layers: int, num_heads: int, inner_size: int, head_size: int = 64
) -> Any:
    return LazyCall("libai.models.T5")(
        vocab_size=32128,
        max_seq_length=512,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        inner_size=inner_size,
        head_size=head_size,
    )


def _mt5(*sizes: int) -> Any:
    model = _t5(*sizes)
    model.update(vocab_size=250112, activation="gelu_tanh", is_gated=True, tie_head=False)
    return model


def _vit(patch_size: int, hidden_size: int, num_layers: int, num_heads: int) -> Any:
    return LazyCall("libai.models.ViT")(
        image_size=224,
        patch_size=patch_size,
        num_classes=1000,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        norm_eps=1e-6,
    )


def _resnet(*blocks_per_stage: int) -> Any:
    return LazyCall("libai.models.ResNet")(
        num_classes=1000, blocks_per_stage=list(blocks_per_stage)
    )


def _swin(target: str, hidden_size: int, blocks: int, num_heads: int, **sizes: Any) -> Any:
    return LazyCall(target)(
        num_classes=1000,
        hidden_size=hidden_size,
        blocks_per_stage=[2, 2, blocks, 2],
        num_heads=[num_heads * 2**stage for stage in range(4)],
        **sizes,
    )


def _swin_v1(hidden_size: int, blocks: int, num_heads: int) -> Any:
    return _swin("libai.models.Swin", hidden_size, blocks, num_heads)


def _swin_v2(hidden_size: int, blocks: int, num_heads: int) -> Any:
    return _swin(
        "libai.models.SwinV2", hidden_size, blocks, num_heads, image_size=256, window_size=8
    )


def _resmlp(
    num_layers: int, layer_scale: float, patch_size: int = 16, hidden_size: int = 384
) -> Any:
    return LazyCall("libai.models.ResMLP")(
        patch_size=patch_size,
        num_classes=1000,
        hidden_size=hidden_size,
        num_layers=num_layers,
        layer_scale=layer_scale,
    )


published = {
    "resnet18": _resnet(2, 2, 2, 2),
    "bert_base": _bert(768, 12, 12, predicts_next_sentence=True),
    "bert_large": _bert(1024, 24, 16, predicts_next_sentence=True),
    "minilm_l6": _bert(384, 6, 12, "libai.models.BERTEmbedder", has_pooler=True),
    "roberta_base": _roberta(50265, 768, 12, 12),
    "roberta_large": _roberta(50265, 1024, 24, 16),
    "xlm_roberta_base": _roberta(250002, 768, 12, 12),
    "xlm_roberta_large": _roberta(250002, 1024, 24, 16),
    "t5_small": _t5(512, 6, 8, 2048),
    "t5_base": _t5(768, 12, 12, 3072),
    "t5_large": _t5(1024, 24, 16, 4096),
    "t5_3b": _t5(1024, 24, 32, 16384, 128),
    "t5_11b": _t5(1024, 24, 128, 65536, 128),
    "mt5_small": _mt5(512, 8, 6, 1024),
    "mt5_base": _mt5(768, 12, 12, 2048),
    "mt5_large": _mt5(1024, 24, 16, 2816),
    "mt5_xl": _mt5(2048, 24, 32, 5120),
    "mt5_xxl": _mt5(4096, 24, 64, 10240),
    "vit_tiny": _vit(16, 192, 12, 3),
    "vit_small": _vit(16, 384, 12, 6),
    "vit_base": _vit(16, 768, 12, 12),
    "vit_large": _vit(16, 1024, 24, 16),
    "vit_huge": _vit(14, 1280, 32, 16),
    "swin_tiny": _swin_v1(96, 6, 3),
    "swin_small": _swin_v1(96, 18, 3),
    "swin_base": _swin_v1(128, 18, 4),
    "swin_large": _swin_v1(192, 18, 6),
    "swinv2_tiny": _swin_v2(96, 6, 3),
    "swinv2_small": _swin_v2(96, 18, 3),
    "swinv2_base": _swin_v2(128, 18, 4),
    "resmlp_s12": _resmlp(12, 1e-4),
    "resmlp_s24": _resmlp(24, 1e-5),
    "resmlp_s36": _resmlp(36, 1e-6),
    "resmlp_b24": _resmlp(24, 1e-6, patch_size=8, hidden_size=768),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2_medium": _gpt2(1024, 24, 16),
    "gpt2_large": _gpt2(1280, 36, 20),
    "gpt2_xl": _gpt2(1600, 48, 25),
    "smollm2_135m": _llama(
        49152,
        8192,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        inner_size=1536,
        rotary_base=100000.0,
        tie_head=True,
    ),
    "tinyllama_1b": _llama(
        32000, 2048, hidden_size=2048, num_layers=22, num_heads=32, num_kv_heads=4, inner_size=5632
    ),
    "llama2_7b": _llama(
        32000, 4096, hidden_size=4096, num_layers=32, num_heads=32, inner_size=11008
    ),
    "llama3_8b": _llama(
        128256,
        8192,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        inner_size=14336,
        rotary_base=500000.0,
    ),
    "qwen2_0.5b": _llama(
        151936,
        32768,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        inner_size=4864,
        rotary_base=1000000.0,
        norm_eps=1e-6,
        qkv_bias=True,
        tie_head=True,
    ),
}
