"""The `Family` of a kind of Hugging Face models: its tensor names and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from libai.hf.families.rules import Rule
from libai.utils.errors import UserError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`.

    Args:
        model_type: `model_type` in config.json.
        target: libai's class.
        rules: mapping between tensors; a function of config.json if the mapping depends on it.
        arguments: libai argument -> (key of config.json, default of `transformers` without that
            key).
        required: key of config.json -> values that libai's class supports; the first is the
            default.
        implied: libai arguments that follow from the architecture.
        prefix: prefix of tensor names in models with a head. Files of bare models omit it.
        copies: tensor name in a file -> name of the tensor that it duplicates (a tied head), if the
            file contains it.
        not_weights: name patterns of constants that some files contain.
        zeros: tensor name in a file -> keys of config.json that give its shape. `transformers`
            always has these tensors, so zeros are written for a libai model without them.
        inputs, outputs: name of an input or output of `transformers` -> libai's name, if they
            differ.
        read_more, write_more: functions for settings that cannot be mapped one to one.
    """

    model_type: str
    target: str
    rules: tuple[Rule, ...] | Callable[[Config], tuple[Rule, ...]]
    arguments: Mapping[str, tuple[str, Any]]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    not_weights: tuple[str, ...] = ()
    zeros: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    read_more: Callable[[Config], dict[str, Any]] = lambda config: {}
    write_more: Callable[[Config], dict[str, Any]] = lambda arguments: {}

    def rules_for(self, config: Config) -> tuple[Rule, ...]:
        """Return the rules for a model with this config.json."""
        return self.rules(config) if callable(self.rules) else self.rules

    def written_name(self, name: str) -> str:
        """Return the tensor name that `transformers` writes. Bare models omit the prefix."""
        return name.removeprefix(self.prefix) if "last_hidden_state" in self.outputs else name

    def read_arguments(self, config: Config) -> dict[str, Any]:
        """Return libai's arguments for a config.json.

        Raises `UserError` for a setting that libai's class does not support.
        """
        self._check(config)
        plain = {ours: config.get(key, default) for ours, (key, default) in self.arguments.items()}
        return {**plain, **self.implied, **self.read_more(config)}

    def write_config(self, architecture: str, arguments: Config) -> dict[str, Any]:
        """Return a config.json for a model with `arguments`."""
        fixed = {key: values[0] for key, values in self.required.items()}
        plain = {
            key: arguments[ours]
            for ours, (key, _) in self.arguments.items()
            if arguments.get(ours) is not None
        }
        head = {"architectures": [architecture], "model_type": self.model_type, "dtype": "float32"}
        written = {**head, **fixed, **plain, **self.write_more(arguments)}
        self._check(written)
        return written

    def _check(self, config: Config) -> None:
        if config.get("quantization_config"):
            raise UserError(
                "config.json has quantization_config: quantized weights are not supported. Save "
                "them in float32."
            )
        for key, values in self.required.items():
            if config.get(key, values[0]) not in values:
                raise UserError(
                    f"config.json has {key}={config[key]!r}, which {self.target} does not "
                    f"support. It supports {', '.join(map(repr, values))}."
                )


def arguments_in(table: str) -> dict[str, tuple[str, Any]]:
    """Return `Family.arguments` from a table: libai's name, the key of config.json, and its default
    as JSON.
    """
    rows = [line.split(maxsplit=2) for line in table.strip().splitlines()]
    return {ours: (theirs, json.loads(default)) for ours, theirs, default in rows}


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
ACTIVATIONS_OF_HF = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def activation_of(activation: str) -> str:
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"the activation {activation!r} of config.json is unknown. Known: "
            f"{', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[activation]


def ratio_of(inner_size: int, hidden_size: int) -> float:
    """Return the factor that turns `hidden_size` into `inner_size` after rounding down."""
    ratio = inner_size / hidden_size
    return ratio if int(hidden_size * ratio) == inner_size else math.nextafter(ratio, math.inf)


#: names of the parts of a block, shared by BERT and Swin and almost the same in ViT
ENCODER_BLOCK = {
    "attention.q.@": "attention.self.query.@",
    "attention.k.@": "attention.self.key.@",
    "attention.v.@": "attention.self.value.@",
    "attention.out.@": "attention.output.dense.@",
    "mlp.up.@": "intermediate.dense.@",
    "mlp.down.@": "output.dense.@",
}
#: settings with the same names in BERT and ViT
ENCODER_ARGUMENTS = arguments_in(
    """
    hidden_size  hidden_size          768
    num_layers   num_hidden_layers    12
    num_heads    num_attention_heads  12
    norm_eps     layer_norm_eps       1e-12
    """
)


def read_encoder(config: Config) -> dict[str, Any]:
    """Return the arguments that are computed from settings in the same way for BERT and ViT."""
    return {
        "mlp_ratio": ratio_of(
            config.get("intermediate_size", 3072), config.get("hidden_size", 768)
        ),
        "activation": activation_of(config.get("hidden_act", "gelu")),
    }


def write_encoder(ours: Config) -> dict[str, Any]:
    return {
        "intermediate_size": int(ours["hidden_size"] * ours.get("mlp_ratio", 4.0)),
        "hidden_act": ACTIVATIONS_OF_HF[ours.get("activation", "gelu")],
    }


_SINGLE_LABEL = "single_label_classification"


def num_classes_of(config: Config) -> int:
    """Return the number of labels in config.json as `transformers` counts them, with a default of
    two.

    Raises `UserError` for a classifier that `transformers` trains with a different loss.
    """
    count = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    problem = config.get("problem_type") or ("regression" if count == 1 else _SINGLE_LABEL)
    if problem != _SINGLE_LABEL:
        raise UserError(
            f"config.json has problem_type={config.get('problem_type')!r} and {count} label(s), "
            f"for which transformers computes a {problem} loss; libai's models choose one class "
            "per sample. To import the weights "
            f'anyway (the logits are equal), set problem_type="{_SINGLE_LABEL}".'
        )
    return count


def _labels_of(ours: Config) -> dict[str, Any]:
    names = [f"LABEL_{i}" for i in range(ours["num_classes"])]
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def classifying(
    read: Callable[[Config], dict[str, Any]], write: Callable[[Config], dict[str, Any]]
) -> dict[str, Any]:
    """Return `read_more` and `write_more` of a family of classifiers."""
    return {
        "read_more": lambda config: {**read(config), "num_classes": num_classes_of(config)},
        "write_more": lambda ours: {**write(ours), **_labels_of(ours)},
    }
