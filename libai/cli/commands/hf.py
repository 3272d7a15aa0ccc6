"""Import, export and verify Hugging Face weights."""

from __future__ import annotations

from collections.abc import Sequence

from libai.launch.command_line import Parser
from libai.utils.screen import say


def run(arguments: Sequence[str]) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    say("libai: importing oneflow")
    from libai import hf

    if options.action == "import":
        report = hf.import_folder(options.folder, options.out)
        print(
            f"{report}\nwrote {options.out}; train.load_weight={options.out} starts a run from it."
        )
        return 0
    if options.action == "export":
        if options.adapters:
            if options.like is None:
                parser.error("--adapters needs --like, the Hugging Face folder of their base.")
            files = hf.export_adapters(options.weights, options.out, options.like)
        else:
            files = hf.export_folder(
                options.weights, options.out, options.like, options.architecture, options.average
            )
        print(f"wrote {', '.join(files)} into {options.out}")
        return 0
    found = hf.verify(options.folder, options.python)
    for name, difference in found.items():
        print(f"{name}: largest difference {difference:.2e} of the largest value")
    is_equal = max(found.values()) <= options.tolerance
    print("equal" if is_equal else f"different: more than {options.tolerance:.0e} apart")
    return 0 if is_equal else 1


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    action = actions.add_parser(
        "import", help="write a Hugging Face folder's weights under libai's names"
    )
    action.add_argument(
        "folder",
        help="folder with config.json and model.safetensors, or with shards and their index",
    )
    action.add_argument("out")
    action = actions.add_parser(
        "export", help="write weights as a Hugging Face folder, with LoRA merged, or adapters alone"
    )
    action.add_argument("weights", help="a run's folder, a checkpoint, or an imported folder")
    action.add_argument("out")
    action.add_argument(
        "--like", help="a Hugging Face folder whose names, types, order and shards are kept"
    )
    action.add_argument("--architecture", help="architecture of a run, such as LlamaForCausalLM")
    action.add_argument(
        "--average",
        action="store_true",
        help="export the averages of train.ema instead of the latest weights",
    )
    action.add_argument(
        "--adapters",
        action="store_true",
        help="write only the LoRA adapters, as PEFT does; --like is the folder of their base",
    )
    action = actions.add_parser("verify", help="compare the outputs of libai and transformers")
    action.add_argument("folder")
    action.add_argument(
        "--python",
        required=True,
        help="interpreter of an environment with PyTorch and transformers",
    )
    action.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        help="largest difference allowed, relative to the largest value (default 1e-5)",
    )
    return parser
