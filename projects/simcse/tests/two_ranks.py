"""Train three short runs on the ranks of one job: `two_ranks.py CONFIG FOLDER key=value…`."""

import sys
from pathlib import Path

from project_runs import train
from ranks import run_rank

#: name of a run -> its settings
RUNS = {
    "eager": ("train.rehearse=1",),
    "graph": ("train.rehearse=1", "graph.enabled=true"),
    "rank": ("train.dist.batch_scope=rank", "train.rehearse=0", "train.evaluation.enabled=false"),
}


def main(config: str, folder: str, *words: str) -> None:
    for name, settings in RUNS.items():
        train(Path(config), Path(folder, name), *words, *settings)


run_rank(main, *sys.argv[1:])
