"""A small variant that sleeps instead of training: `sleeper.py [--seconds S] [--loss X] [--fail
WHEN] ...`.
"""

import argparse
import sys
import time

from libai.benchmark.protocol import Unavailable, Variant, serve_stdio


class Sleeper(Variant):
    def __init__(self):
        if given.fail == "unavailable":
            raise Unavailable("it cannot sleep here.")
        self.samples_per_iter = given.batch
        self.iteration = 0

    def step(self):
        if given.fail == "dies" and self.iteration:
            print("a planted death", file=sys.stderr)
            sys.exit(3)
        if given.fail == "hangs" and self.iteration:
            time.sleep(600)
        print("a library prints this", flush=True)
        time.sleep(given.seconds if self.iteration else given.first_seconds)
        self.iteration += 1
        return given.loss / self.iteration


parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0.002)
parser.add_argument("--first-seconds", type=float, default=0.002)
parser.add_argument("--loss", type=float, default=5.0)
parser.add_argument("--fail", default="")
parser.add_argument("--batch", type=int, default=4)
given = parser.parse_args()
serve_stdio(Sleeper)
