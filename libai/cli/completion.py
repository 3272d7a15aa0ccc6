"""Print the completion of the command for a shell. Put `source <(libai completion bash)`, or zsh, into its start file.

It completes subcommands, flags, shipped configs, settings and files. The script holds all words, so that nothing is
run while one types.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from libai.cli.parser import Parser
from libai.launch.installation import shipped_configs

#: the subcommands whose words are a config and settings
WITH_SETTINGS = ("train", "eval", "resume", "parity", "verify-resume", "benchmark", "plan")
_BASH = """\
_libai() {
  local current=${COMP_WORDS[COMP_CWORD]} words= keys=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "COMMANDS" -- "$current"))
    return
  fi
  case ${COMP_WORDS[1]} in
CASES
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
  local settings=($(compgen -W "$keys" -- "$current"))
  if [ ${#settings[@]} -gt 0 ] && [ -n "$current" ]; then
    COMPREPLY+=("${settings[@]}")
    compopt -o nospace 2> /dev/null
  fi
}
complete -o filenames -F _libai libai
"""
_ZSH = """\
#compdef libai
_libai() {
  local -a commands=(COMMANDS)
  local words_= keys=
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case ${words[2]} in
CASES
  esac
  compadd -- ${=words_}
  compadd -S '' -- ${=keys}
  _files
}
compdef _libai libai
"""


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    print(script(args.shell), end="")
    return 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def script(shell: str) -> str:
    """The completion script for bash or zsh."""
    from libai.cli.main import COMMANDS
    from libai.config.settings import schema

    settings = " ".join(f"{key.path}=" for key in schema.settings())
    variable = "words_" if shell == "zsh" else "words"
    cases = []
    for name in COMMANDS:
        keys = f' keys="{settings}"' if name in WITH_SETTINGS else ""
        cases.append(f'    {name}) {variable}="{" ".join(words_of(name))}"{keys} ;;')
    text = "\n".join(cases)
    if shell == "bash":
        return _BASH.replace("COMMANDS", " ".join(COMMANDS)).replace("CASES", text)
    described = " ".join(shlex.quote(f"{name}:{command.summary}") for name, command in COMMANDS.items())
    return _ZSH.replace("COMMANDS", described).replace("CASES", text)


def words_of(name: str) -> list[str]:
    """What may follow a subcommand: its flags and own subcommands, and the names of the shipped configs."""
    from libai.cli.main import COMMANDS

    command = COMMANDS[name]
    is_light = command.module.startswith("libai.cli.")  # others may import oneflow
    build = getattr(command.load(), "build_parser", None) if is_light else None
    found: list[str] = []
    if build is not None:
        parser = build()
        found = [*parser.subcommands, *parser.flags, *(f for sub in parser.subcommands.values() for f in sub.flags)]
    configs = sorted(path.stem for path in Path(shipped_configs()).glob("*.py")) if name in WITH_SETTINGS else []
    return list(dict.fromkeys([*found, *configs]))
