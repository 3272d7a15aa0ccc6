"""The models of a benchmark in PyTorch: written here with the arguments and parameter names of `libai.models`, or those
of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from protocol import Unavailable
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


def build_model(case: dict[str, Any], folder: Path) -> nn.Module:
    """The model of the case in `folder`: ours where there is one, else that of `transformers`."""
    name, sizes = case["model"]["class"].rpartition(".")[2], case["model"]["arguments"]
    for rate in ("dropout", "drop_path"):
        if sizes.get(rate):
            raise Unavailable(f"model.{rate}={sizes[rate]}: PyTorch draws other masks, so the losses could not agree")
    if name == "GPT" or (name == "BERT" and not sizes.get("is_post_norm")):
        return LanguageModel(name, sizes)
    classes = {"Llama": Llama, "ViT": ViT, "ResNet": ResNet, "ResMLP": ResMLP}
    return classes[name](sizes) if name in classes else FromTransformers(name, case["transformers"], folder)


class FromTransformers(nn.Module):
    """A model of `transformers` with the weights of the case. `named`: our name -> parameter."""

    def __init__(self, name: str, exported: dict[str, Any], folder: Path):
        super().__init__()
        if "reason" in exported:
            raise Unavailable(f"{name} has no twin in PyTorch here: {exported['reason']}")
        try:
            import transformers
        except ImportError:
            raise Unavailable(f"{name} is compared with that of `transformers`, which this Python lacks") from None
        folder = folder / "transformers"
        config = transformers.AutoConfig.from_pretrained(folder)
        rates = [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]
        config.update({**dict.fromkeys(rates, 0.0), "use_cache": False})
        build = getattr(transformers, config.architectures[0]).from_pretrained
        self.model = build(folder, config=config, dtype=torch.float32).train()
        parameters = dict(self.model.named_parameters())
        # files and models of transformers 5 have different names: the one that a number arrives at is meant
        names = list(exported["names"])
        tensors = load_file(folder / "model.safetensors")
        # what our model does not have, a type of tokens, is zeros in the file and not trained
        numbers = {name: names.index(name) if name in names else -1 for name in tensors}
        filled = {name: torch.full_like(tensor, numbers[name]) for name, tensor in tensors.items()}
        numbered = dict(build(None, config=config, state_dict=filled, dtype=torch.float32).named_parameters())
        arrived = {key: int(p.flatten()[0]) for key, p in numbered.items()}
        self.named = {exported["names"][names[i]][0]: parameters[key] for key, i in arrived.items() if i >= 0}
        self.inputs = exported["inputs"]

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.inputs.get(name, name): tensor for name, tensor in batch.items()}).loss


class Attention(nn.Module):
    """Multi-head self-attention with separate projections; (batch, length, hidden) to the same."""

    def __init__(self, hidden_size: int, num_heads: int, is_causal: bool):
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.q, self.k, self.v, self.out = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLPBlock(nn.Module):
    """The two-layer network of a block."""

    def __init__(self, hidden_size: int, mlp_ratio: float):
        super().__init__()
        self.up = nn.Linear(hidden_size, int(hidden_size * mlp_ratio))
        self.down = nn.Linear(int(hidden_size * mlp_ratio), hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, is_causal: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, is_causal)
        self.mlp = MLPBlock(hidden_size, mlp_ratio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _blocks(sizes: dict[str, Any], is_causal: bool) -> nn.ModuleList:
    each = (sizes["hidden_size"], sizes["num_heads"], sizes["mlp_ratio"], is_causal)
    return nn.ModuleList([Block(*each) for _ in range(sizes["num_layers"])])


class LanguageModel(nn.Module):
    """GPT (causal) and BERT (with its extra head), by the arguments of libai's classes of these names."""

    def __init__(self, name: str, sizes: dict[str, Any]):
        super().__init__()
        hidden_size, vocab_size = sizes["hidden_size"], sizes["vocab_size"]
        self.is_bert, self.ignore_index = name == "BERT", sizes["ignore_index"]
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Parameter(torch.zeros(sizes["max_seq_length"], hidden_size))
        self.blocks = _blocks(sizes, not self.is_bert)
        self.norm = nn.LayerNorm(hidden_size)
        self.head: nn.Module | None = None
        if self.is_bert:
            self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.LayerNorm(hidden_size))
            self.head_bias = nn.Parameter(torch.zeros(vocab_size))
        elif not sizes["tie_head"]:
            self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(input_ids) + self.position_embedding[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        if self.is_bert:
            x = F.linear(x, self.token_embedding.weight, self.head_bias)
        elif self.head is None:
            x = F.linear(x, self.token_embedding.weight)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index)


class LlamaAttention(nn.Module):
    """Self-attention of grouped queries with rotary positions."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        hidden_size, num_heads = sizes["hidden_size"], sizes["num_heads"]
        self.head_size = hidden_size // num_heads
        inner = self.head_size * (sizes.get("num_kv_heads") or num_heads)
        self.q, self.out = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden_size, inner, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_size).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = (_rotate(part, cos, sin) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden_size, inner_size, bias=False) for _ in range(2))
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """A block of Llama."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        norm = (sizes["hidden_size"], sizes["norm_eps"])
        self.attention_norm, self.mlp_norm = nn.RMSNorm(*norm), nn.RMSNorm(*norm)
        self.attention, self.mlp = LlamaAttention(sizes), GatedMLP(sizes["hidden_size"], sizes["inner_size"])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A causal language model, by the arguments of `libai.models.Llama`; without biases and scaled positions."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        for name in ("head_size", "rotary_scaling", "qkv_bias", "out_bias", "mlp_bias"):
            if sizes.get(name):
                raise Unavailable(f"model.{name}={sizes[name]} is not in PyTorch's twin of Llama")
        hidden_size, vocab_size = sizes["hidden_size"], sizes["vocab_size"]
        self.ignore_index = sizes["ignore_index"]
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList([LlamaBlock(sizes) for _ in range(sizes["num_layers"])])
        self.norm = nn.RMSNorm(hidden_size, sizes["norm_eps"])
        self.head = None if sizes["tie_head"] else nn.Linear(hidden_size, vocab_size, bias=False)
        head_size = hidden_size // sizes["num_heads"]
        frequencies = sizes["rotary_base"] ** (-torch.arange(0, head_size, 2).float() / head_size)
        angles = torch.arange(sizes["max_seq_length"]).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, length = self.token_embedding(input_ids), input_ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        x = self.norm(x)
        logits = F.linear(x, self.token_embedding.weight) if self.head is None else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignore_index)


class ViT(nn.Module):
    """An image classifier, by the arguments of `libai.models.ViT`."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        size, hidden_size = sizes["patch_size"], sizes["hidden_size"]
        self.patch_size, self.pool = size, sizes["pool"]
        num_tokens = (sizes["image_size"] // size) ** 2 + (self.pool == "cls")
        self.patch_embedding = nn.Linear(sizes["num_channels"] * size**2, hidden_size)
        if self.pool == "cls":
            self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.position_embedding = nn.Parameter(torch.zeros(num_tokens, hidden_size))
        self.blocks = _blocks(sizes, False)
        self.norm, self.head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, sizes["num_classes"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embedding(_patches_of(images, self.patch_size))
        if self.pool == "cls":
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.cross_entropy(self.head(x[:, 0] if self.pool == "cls" else x.mean(dim=1)), labels)


def _patches_of(images: torch.Tensor, size: int) -> torch.Tensor:
    """(batch, patches, channels * size * size)."""
    batch, channels, height, width = images.shape
    x = images.reshape(batch, channels, height // size, size, width // size, size)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)


class BasicBlock(nn.Module):
    """A block of ResNet."""

    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out)
        self.conv2, self.norm2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out)
        projected = stride > 1 or num_in != num_out
        parts = [nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)] if projected else []
        self.shortcut = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """An image classifier, by the arguments of `libai.models.ResNet`."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        width, is_small = sizes["width"], sizes["stem"] == "cifar"
        self.stem = nn.Sequential(
            nn.Conv2d(sizes["num_channels"], width, *((3, 1, 1) if is_small else (7, 2, 3)), bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *([] if is_small else [nn.MaxPool2d(3, 2, 1)]),
        )
        widths = [width * 2**stage for stage, count in enumerate(sizes["blocks_per_stage"]) for _ in range(count)]
        pairs = zip([width, *widths], widths)
        self.blocks = nn.ModuleList([BasicBlock(num_in, num_out, num_out // num_in) for num_in, num_out in pairs])
        self.head = nn.Linear(widths[-1], sizes["num_classes"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Affine(nn.Module):
    """`x * weight + bias` for each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, x, self.weight)


class Scale(nn.Module):
    """`x * weight` for each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ResMLPBlock(nn.Module):
    """A block of ResMLP."""

    def __init__(self, num_patches: int, width: int, mlp_ratio: float):
        super().__init__()
        self.patch_norm, self.mlp_norm = Affine(width), Affine(width)
        self.patch_scale, self.mlp_scale = Scale(width), Scale(width)
        self.patches, self.mlp = nn.Linear(num_patches, num_patches), MLPBlock(width, mlp_ratio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.patch_scale(self.patches(self.patch_norm(x).transpose(1, 2)).transpose(1, 2))
        return x + self.mlp_scale(self.mlp(self.mlp_norm(x)))


class ResMLP(nn.Module):
    """An image classifier, by the arguments of `libai.models.ResMLP`."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        width, self.patch_size = sizes["hidden_size"], sizes["patch_size"]
        num_patches = (sizes["image_size"] // self.patch_size) ** 2
        self.patch_embedding = nn.Linear(sizes["num_channels"] * self.patch_size**2, width)
        blocks = [ResMLPBlock(num_patches, width, sizes.get("mlp_ratio", 4.0)) for _ in range(sizes["num_layers"])]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = Affine(width), nn.Linear(width, sizes["num_classes"])

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embedding(_patches_of(images, self.patch_size))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(dim=1)), labels)
